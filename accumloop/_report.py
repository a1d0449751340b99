"""From metrics to the `logs` that callbacks get, through Keras' own CallbackList."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Logs = dict[str, Any]


class Reported(NamedTuple):
    """What a micro-batch adds to a loss that Keras reports: a sum, and how many values it has.

    `size` is None for a scalar loss. A loss that is not reduced (`reduction=None`) is reported
    as the mean of its values, as `keras.metrics.Mean` does with the values of a whole batch.
    """

    total: Any
    size: Any | None


def part_of(value: Any, share: Any) -> Reported:
    """Return what `value`, the loss of a micro-batch, adds to the loss of its batch."""
    value = tf.convert_to_tensor(value)
    value = value * tf.cast(share, value.dtype)
    if value.shape.rank == 0:
        return Reported(value, None)
    return Reported(tf.reduce_sum(value), tf.size(value, out_type=tf.int64))


def update_once(tracker: keras.metrics.Metric, reported: Reported, rows: Any) -> None:
    """Update the tracker of a loss with the loss of a whole batch, weighted by its rows."""
    loss = reported.total
    if reported.size is not None:
        loss /= tf.cast(reported.size, loss.dtype)
    tracker.update_state(loss, sample_weight=rows)


@contextlib.contextmanager
def recorded_updates(
    metrics: list[keras.metrics.Metric],
) -> Iterator[list[tuple[keras.metrics.Metric, Any]]]:
    """Record what `update_state` of the metrics is given, instead of updating them.

    Keras tracks the loss of each output while it computes the loss: once a micro-batch. Recorded,
    they are combined over the batch, as the loss itself.
    """
    updates: list[tuple[keras.metrics.Metric, Any]] = []

    def recorder(metric: keras.metrics.Metric) -> Any:
        return lambda value, sample_weight=None: updates.append((metric, value))

    # In the instance's dict, past the tracking of Keras' attribute assignment.
    for metric in metrics:
        vars(metric)["update_state"] = recorder(metric)
    try:
        yield updates
    finally:
        for metric in metrics:
            del vars(metric)["update_state"]


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
