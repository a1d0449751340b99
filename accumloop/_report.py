"""From metrics to the `logs` that callbacks get, through Keras' own CallbackList."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

Logs = dict[str, Any]


class Reported(NamedTuple):
    """What a micro-batch adds to a number that Keras reports: a sum, and of how many values.

    `size` is None for a scalar loss. A loss that is not reduced (`reduction=None`) is reported
    as the mean of its values, as `keras.metrics.Mean` does with the values of a whole batch.
    """

    total: Any
    size: Any | None


class Tracker(NamedTuple):
    """A metric to update once a batch, and whether the rows of the batch are its weight."""

    metric: keras.metrics.Metric
    by_rows: bool


def part_of(value: Any, share: Any) -> Reported:
    """Return what `value`, of a micro-batch, adds to that of its batch."""
    value = tf.convert_to_tensor(value)
    value = value * tf.cast(share, value.dtype)
    if value.shape.rank == 0:
        return Reported(value, None)
    return Reported(tf.reduce_sum(value), tf.size(value, out_type=tf.int64))


def update_once(tracker: Tracker, reported: Reported, rows: Any) -> None:
    """Update a metric with the number of a whole batch."""
    value = reported.total
    if reported.size is not None:
        value /= tf.cast(reported.size, value.dtype)
    tracker.metric.update_state(value, sample_weight=rows if tracker.by_rows else None)


@contextlib.contextmanager
def recorded_updates(
    metrics: list[keras.metrics.Metric], *, by_rows: bool
) -> Iterator[list[tuple[Tracker, Any]]]:
    """Record what `keras.metrics.Mean`s are updated with, instead of updating them.

    Keras tracks the loss of each output while it computes the loss, and a layer may track a number
    of its own in its forward pass: once a batch under `fit`. Recorded, they are combined over the
    micro-batches by rows, as the loss itself. An update with a value for each row stays as it is.

    Args:
        metrics: The metrics of the model.
        by_rows: Whether an update has the rows of the batch as its weight, as losses have.
    """
    updates: list[tuple[Tracker, Any]] = []

    def recorder(metric: keras.metrics.Metric) -> Any:
        update_state = metric.update_state

        def record(value: Any, sample_weight: Any = None) -> Any:
            if by_rows or (sample_weight is None and keras.ops.ndim(value) == 0):
                return updates.append((Tracker(metric, by_rows), value))
            return update_state(value, sample_weight)

        return record

    # In the instance's dict, past the tracking of Keras' attribute assignment. One that a user
    # has put there is left alone, and so is a metric that is listed twice.
    shadowed: list[keras.metrics.Metric] = []
    for metric in metrics:
        if type(metric) is keras.metrics.Mean and "update_state" not in vars(metric):
            vars(metric)["update_state"] = recorder(metric)
            shadowed.append(metric)
    try:
        yield updates
    finally:
        for metric in shadowed:
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
