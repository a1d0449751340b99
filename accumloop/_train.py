"""train(): epochs and batches, in the order in which things happen."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import tensorflow as tf

from accumloop import (
    _accumulate,
    _backup,
    _beside,
    _checks,
    _cut,
    _data,
    _heartbeat,
    _keras,
    _prepare,
    _report,
    _state,
    _swap,
)


def train(
    model: keras.Model,
    ds: tf.data.Dataset,
    accum: int,
    *,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_data: Any = None,
    class_weight: dict[int, float] | None = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_freq: int | list[int] = 1,
    whole_batch_loss: bool = False,
) -> keras.callbacks.History:
    """Train a model as `model.fit(ds)` does, at about `1 / accum` of the activation memory.

    ```
    for batch in ds:
        for micro_batch in cut(batch, accum):  # runs of consecutive rows
            gradient += share(micro_batch) * gradient of loss(micro_batch)
        update once with the gradient  # that of loss(batch), to rounding
    ```

    Updates, weights, optimizer state, History and callback events are those of `model.fit`:
    bit-equal with `accum=1`, and to rounding with more.

    Args:
        model: A compiled `keras.Model` on the TensorFlow backend.
        ds: A batched `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`. One of its
            elements is one batch and one update. Its leaves have shape `(rows, ...)` and may be
            dense, ragged or sparse, in nested dicts, tuples and lists, with `None` among them.
        accum: An int >= 1, the number of micro-batches that a batch is cut into. A batch of
            fewer rows is cut into single rows.
        epochs: As in `model.fit`: the index of the epoch to stop before.
        verbose: `"auto"`, 0, 1 or 2, as in `model.fit`.
        callbacks: A list of `keras.callbacks.Callback`s. They see one
            `on_train_batch_begin` and `on_train_batch_end` a batch.
        validation_data: A dataset or a tuple of arrays `(x, y)` or `(x, y, sample_weight)`, for
            `model.evaluate` at the end of epochs.
        class_weight: A dict from integer class ids to weights.
        initial_epoch: The index of the first epoch.
        steps_per_epoch: Batches of an epoch, or None for all of `ds`. An iterator over `ds` then
            goes on across epochs, as in `model.fit`.
        validation_steps: Batches of a validation, or None for all of them.
        validation_freq: An int n, to validate each n-th epoch, or a list of 1-based epochs.
        whole_batch_loss: Whether to take the loss of whole batches, which makes any loss over the
            outputs exact: contrastive ones, triplets, soft F1. It costs one more forward pass,
            and the outputs of a batch are kept.

    Returns:
        A `keras.callbacks.History`, also at `model.history`.

    Raises:
        TypeError: If an argument is of a wrong kind: `accum` no int, `ds` no dataset, `model` no
            Keras model, `callbacks` no callbacks.
        ValueError: If an argument has a wrong value: `accum < 1`, a model that is not compiled,
            an unbatched dataset, an optimizer that has `gradient_accumulation_steps` itself.
        NotImplementedError: If micro-batches would train something else than their batch, with
            `accum > 1`: a loss that couples rows (tried on a few rows of the first batch) without
            `whole_batch_loss`, a `train_step` that assigns to weights by itself, a stateful
            layer; or under a strategy.

    Example:
        >>> x = tf.reshape(tf.range(12.0), [6, 2])
        >>> ds = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.001), "mse")
        >>> history = train(model, ds, 3, epochs=2, verbose=0)
        >>> len(history.history["loss"]), int(model.optimizer.iterations)
        (2, 4)

    References:
        - [`keras.Model.fit`](https://keras.io/api/models/model_training_apis/#fit-method)
    """
    _checks.accum(accum)
    if isinstance(model, keras.Model):
        _swap.put_back(model)
    _checks.model(model)
    _checks.dataset(ds)
    _checks.callbacks(callbacks)
    _accumulate.refuse(callbacks)
    backup = _backup.among(callbacks)
    _checks.numbers_of_steps(
        epochs=epochs,
        initial_epoch=initial_epoch,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_freq=validation_freq,
        verbose=verbose,
    )
    _checks.class_weight(class_weight, ds.element_spec)
    _checks.validation(validation_data)
    _checks.whole_batch_loss(whole_batch_loss)
    if accum > 1:
        _checks.cut_exactly(model, whole_batch_loss)

    if class_weight is not None:
        ds = _data.with_class_weight(ds, class_weight)
    epochs = _limited("epochs", epochs, _keras.debugging_limit("max_epochs"))
    steps_per_epoch = _limited(
        "steps_per_epoch", steps_per_epoch, _keras.debugging_limit("max_steps_per_epoch")
    )
    batches = _data.Epochs(ds, steps_per_epoch, model.steps_per_execution)
    step = _prepare.prepared_step(model, ds.element_spec, batches.peek(), accum, whole_batch_loss)
    pieces = _cut.pieces_of(accum)

    callbacks = _report.callback_list(
        model, callbacks, verbose=verbose, epochs=epochs, steps=batches.steps
    )
    backups = _backup.Backups(backup, model, callbacks, batches)
    beside = _beside.Beside(model, callbacks)
    heartbeat = _heartbeat.Heartbeat(callbacks.callbacks)
    model.stop_training = False
    _keras.forget_restored_epoch(model)  # Of a `fit` before: this run has its own backup or none.
    try:
        callbacks.on_train_begin()
        place = backups.begin(step, ds.element_spec)
        if place is None:
            place = _begin(beside, batches, initial_epoch)
        logs: _report.Logs = place.logs
        epoch_logs = place.logs or None
        for epoch in range(place.epoch, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            begin_step = backups.begin_epoch()
            hears_of_batches = _report.hears_of_batches(callbacks)
            for execution in batches.epoch(begin_step):
                if hears_of_batches:
                    callbacks.on_train_batch_begin(execution.begin_step)
                with heartbeat:
                    logs = step.run(execution.first, execution.iterator, pieces)
                    heartbeat.wait_for(logs)
                if hears_of_batches:
                    callbacks.on_train_batch_end(execution.end_step, logs)
                backups.after_batches(epoch, execution, logs)
                del execution  # Its batch must not wait in memory for the next one.
                if model.stop_training:
                    break

            epoch_logs = _report.epoch_logs(model, logs)
            if validation_data is not None and _validates(epoch, validation_freq):
                epoch_logs |= _report.validation_logs(
                    model, validation_data, validation_steps, callbacks
                )
            beside.before_epoch_end(epoch)
            callbacks.on_epoch_end(epoch, epoch_logs)
            backups.after_epoch(epoch, epoch_logs)
            if model.stop_training:
                break

        if epochs > 0 and isinstance(model.optimizer, keras.optimizers.Optimizer):
            # Writes the averages of an optimizer with EMA into the weights.
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(epoch_logs)
        backups.end()
    finally:
        heartbeat.close()
        _keras.forget_restored_epoch(model)
    return model.history


def _begin(beside: _beside.Beside, batches: _data.Epochs, initial_epoch: int) -> _state.Place:
    """Return the place before the first epoch, or the one that a backup of Keras says.

    The epochs before have had their part of the data: a seeded shuffle goes on in its order.
    """
    epoch = beside.begin() or initial_epoch
    batches.pass_over(epoch - initial_epoch)
    return _state.Place(epoch, 0, {})


def _limited(name: str, value: Any, limit: int | None) -> Any:
    """Return `value` under a limit that `keras.config` sets for debugging runs."""
    if not limit or (value is not None and value <= limit):
        return value
    warnings.warn(f"Limiting {name} to {limit}", stacklevel=3)
    return limit


def _validates(epoch: int, validation_freq: int | list[int]) -> bool:
    if isinstance(validation_freq, int):
        return (epoch + 1) % validation_freq == 0
    return epoch + 1 in validation_freq
