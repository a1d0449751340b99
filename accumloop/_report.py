"""From metrics to the `logs` that callbacks get, through Keras' own CallbackList."""

from __future__ import annotations

from typing import Any

import keras

Logs = dict[str, Any]


def callback_list(
    model: keras.Model, callbacks: Any, *, verbose: Any, epochs: int, steps: int | None
) -> keras.callbacks.CallbackList:
    """Return the callbacks as `fit` calls them, with History and the progress bar among them."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        model=model,
        verbose=verbose,
        epochs=epochs,
        steps=steps,
    )


def hears_of_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Tell whether a callback has a hook for training batches: else telling is time lost."""
    hooks = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
    return any(
        getattr(getattr(callback, hook), "__func__", None)
        is not getattr(keras.callbacks.Callback, hook)
        for callback in (callbacks, *callbacks.callbacks)
        if callback is not callbacks or type(callbacks) is not keras.callbacks.CallbackList
        for hook in hooks
    )


def epoch_logs(model: keras.Model, last: Logs) -> Logs:
    """Return the metrics at the end of an epoch, or the logs of its last step.

    As in `fit`: a model with a `train_step` of its own may report other things than its metrics.
    """
    results = model.get_metrics_result()
    return dict(results if set(results) == set(last) else last)


def validation_logs(
    model: keras.Model, data: Any, steps: int | None, callbacks: keras.callbacks.CallbackList
) -> Logs:
    """Return the results of `model.evaluate`, which reports to the same callbacks."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    results = model.evaluate(
        x,
        y,
        sample_weight=sample_weight,
        steps=steps,
        callbacks=callbacks,
        return_dict=True,
    )
    return {f"val_{name}": value for name, value in results.items()}
