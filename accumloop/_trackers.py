"""Numbers that a model tracks once a batch, put together from its micro-batches.

Keras tracks the loss of a batch and that of each output, and a model or a layer may track a number
of its own, by updating a `keras.metrics.Mean` once a batch under `fit`. The updates of the
micro-batches are withheld, combined by rows, as the loss itself, and made once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _keras
from accumloop._shadow import shadowed


class Number(NamedTuple):
    """What a micro-batch adds to a number that is tracked.

    `size` counts values that are not reduced (`reduction=None`), whose mean is tracked as
    `keras.metrics.Mean` does with the values of a whole batch; None for a scalar. `weight` is that
    of the update, None where it has none, or has the rows of the batch.
    """

    total: Any
    size: Any | None
    weight: Any | None


class Tracker(NamedTuple):
    """A metric to update once a batch, and whether the rows of the batch are its weight."""

    metric: keras.metrics.Metric
    by_rows: bool
    weight: float | None  # of each update, if it is a Python number


class Update(NamedTuple):
    """An update that a micro-batch has asked for."""

    tracker: Tracker
    value: Any
    weight: Any | None


def part_of(update: Update, share: Any) -> Number:
    """Return what an update with a micro-batch's value adds to that of its batch."""
    value = tf.convert_to_tensor(update.value)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.float64)
    value = value * tf.cast(share, value.dtype)
    if value.shape.rank == 0:
        return Number(value, None, update.weight)
    return Number(tf.reduce_sum(value), tf.size(value, out_type=tf.int64), update.weight)


def update_once(tracker: Tracker, number: Number, rows: Any) -> None:
    """Update a metric with the number of a whole batch."""
    value = number.total
    if number.size is not None:
        value /= tf.cast(number.size, value.dtype)
    weight = tracker.weight if number.weight is None else number.weight
    tracker.metric.update_state(value, sample_weight=rows if tracker.by_rows else weight)


@contextlib.contextmanager
def withheld(model: keras.Model) -> Iterator[list[Update]]:
    """Record what `keras.metrics.Mean`s of `model` are updated with, instead of updating them.

    An update with a value for each row stays as it is.
    """
    updates: list[Update] = []

    def recorder(metric: keras.metrics.Metric) -> Callable[..., Any]:
        update_state = metric.update_state

        def record(value: Any, sample_weight: Any = None) -> Any:
            by_rows = _has_rows_as_weight(model, metric, sample_weight)
            weighs_all = sample_weight is None or keras.ops.ndim(sample_weight) == 0
            scalar = keras.ops.ndim(value) == 0 and weighs_all
            if not by_rows and not scalar:
                return update_state(value, sample_weight)
            number = isinstance(sample_weight, int | float)
            tracker = Tracker(metric, by_rows, float(sample_weight) if number else None)
            weight = None if by_rows or number else sample_weight
            updates.append(Update(tracker, value, weight))
            return None

        return record

    with contextlib.ExitStack() as stack:
        for metric in _means(model):
            stack.enter_context(shadowed(metric, update_state=recorder(metric)))
        yield updates


@contextlib.contextmanager
def output_losses_by_rows(model: keras.Model, rows: Callable[[], Any]) -> Iterator[None]:
    """Weight the loss of each output by rows, as the loss itself.

    Keras means to, and does so only where the batch dimension is static.
    """

    def weighter(metric: keras.metrics.Metric) -> Callable[..., Any]:
        update_state = metric.update_state
        return lambda value, sample_weight=None: update_state(value, sample_weight=rows())

    with contextlib.ExitStack() as stack:
        for metric in _keras.output_loss_trackers(model):
            stack.enter_context(shadowed(metric, update_state=weighter(metric)))
        yield


def _means(model: keras.Model) -> Iterator[keras.metrics.Metric]:
    """Yield the trackers of a model, each once, but for those that a user has shadowed already."""
    seen: set[int] = set()
    for metric in model.metrics:
        exactly = type(metric) is keras.metrics.Mean and "update_state" not in vars(metric)
        if exactly and id(metric) not in seen:
            seen.add(id(metric))
            yield metric


def _has_rows_as_weight(model: keras.Model, metric: Any, sample_weight: Any) -> bool:
    if metric is _keras.loss_tracker(model):
        return sample_weight is not None  # A `train_step` of its own may update it without.
    return any(metric is tracker for tracker in _keras.output_loss_trackers(model))
