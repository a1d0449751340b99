"""The step: cut a batch, run its micro-batches, add up their gradients, update once.

Graph code: it knows nothing of epochs, callbacks or printing.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _accumulator, _cut, _keras, _loop, _report, _shares

Logs = dict[str, Any]
Step = Callable[[Any, Any, Any], Logs]


@dataclasses.dataclass
class Steps:
    """The traced steps of one compilation of a model: a second `train` traces nothing again."""

    compilation: Any
    made: dict[Hashable, Step] = dataclasses.field(default_factory=dict)
    prepared: set[Hashable] = dataclasses.field(default_factory=set)


def steps_of(model: keras.Model) -> Steps:
    """Return the steps made since `model.compile()` was last called.

    They live in the model's `__dict__`, as the `train_function` of Keras does, so that they go
    when the model goes, and past its attribute tracking, so that no saved file has them.
    """
    compilation = _keras.loss_tracker(model)  # `compile` makes a new one.
    steps = vars(model).get("_accumloop_steps")
    if steps is None or steps.compilation is not compilation:
        steps = vars(model)["_accumloop_steps"] = Steps(compilation)
    return steps


class _Parts(NamedTuple):
    """What one micro-batch gives, in structures of tensors."""

    gradients: list[Any]
    numbers: list[_report.Reported]


def make_step(model: keras.Model, accumulating: bool) -> Step:
    """Return `step(first, iterator, accum) -> logs`: the updates of one execution.

    ```
    update(first or next(iterator))
    repeat steps_per_execution - 1 times, while there is data:  update(next(iterator))
    return the model's metrics
    ```

    `first` is a `tf.experimental.Optional` of a batch that was read before, or an empty one.
    `accum` is an int64 scalar tensor, so that another `accum` needs no other trace.
    Everything is traced at the first call, whatever the number of micro-batches, their sizes, and
    the size of the batches.
    """
    update = _accumulated_update(model) if accumulating else _whole_update(model)

    @tf.autograph.experimental.do_not_convert
    def step(first: Any, iterator: Any, accum: Any) -> Logs:
        first = tf.cond(first.has_value(), lambda: first, iterator.get_next_as_optional)
        logs = update(first.get_value(), accum)
        if model.steps_per_execution == 1:
            return logs

        def more(done: Any, batch: Any, logs: Logs) -> Any:
            return tf.logical_and(done < model.steps_per_execution, batch.has_value())

        def one(done: Any, batch: Any, logs: Logs) -> tuple[Any, Any, Logs]:
            logs = update(batch.get_value(), accum)
            return done + 1, following(done + 1), logs

        def following(done: Any) -> Any:
            # The batch after the last one belongs to the next execution: do not read it.
            return tf.cond(
                done < model.steps_per_execution,
                iterator.get_next_as_optional,
                lambda: tf.experimental.Optional.empty(iterator.element_spec),
            )

        done = tf.constant(1)
        return tf.while_loop(more, one, [done, following(done), logs])[-1]

    return step if model.run_eagerly else tf.function(step)


def _function(model: keras.Model, function: Callable[..., Any], **options: Any) -> Any:
    function = tf.autograph.experimental.do_not_convert(function)
    return function if model.run_eagerly else tf.function(function, **options)


def _whole_update(model: keras.Model) -> Callable[..., Logs]:
    """One micro-batch is the whole batch: Keras' own `train_step`, and so bit-equal to `fit`."""

    def update(batch: Any, accum: Any) -> Logs:
        return model.train_step(_cut.without_optionals(batch))

    # XLA would compile the loop over steps too: only the update is compiled, as in fit.
    return _function(model, update, jit_compile=model.jit_compile)


def _accumulated_update(model: keras.Model) -> Callable[..., Logs]:
    trackers: list[_report.Tracker] = []
    micro_step = _make_micro_step(model, trackers)
    # Micro-batches differ in size: XLA compiles one of them and the update, not the loop.
    micro_step = _function(model, micro_step, jit_compile=model.jit_compile)
    apply = _function(model, _make_apply(model), jit_compile=model.jit_compile)
    total = _loop.total_of(micro_step, eagerly=model.run_eagerly)

    def update(batch: Any, accum: Any) -> Logs:
        batch = _cut.without_optionals(batch)
        rows = _cut.rows(batch)
        pieces = tf.maximum(tf.minimum(accum, rows), 1)
        # Known before the loop, which is left the fewest ops.
        edges = _cut.edges(pieces, rows)
        shares = _shares.of_rows(edges[1:] - edges[:-1], rows)

        def arguments(index: Any) -> tuple[Any, Any]:
            start, stop = tf.gather(edges, index), tf.gather(edges, index + 1)
            return _cut.take(batch, start, stop), tf.gather(shares, index)

        parts = total(arguments, pieces)
        apply(parts.gradients)
        for tracker, number in zip(trackers, parts.numbers, strict=True):
            _report.update_once(tracker, number, rows)
        return model.get_metrics_result()

    return _function(model, update)


def _make_micro_step(
    model: keras.Model, trackers: list[_report.Tracker]
) -> Callable[[Any, Any], _Parts]:
    """Return forward and backward pass of one micro-batch.

    `trackers` is filled with the metrics that report the numbers of the parts.
    """
    call = training_call(model)

    def micro_step(batch: Any, share: Any) -> _Parts:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            with _report.recorded_updates(model.metrics, by_rows=False) as updates:
                y_pred = call(x)
            loss, reported = weighted_loss(model, x, y, y_pred, sample_weight, share)
            scaled = model.optimizer.scale_loss(loss)
        reported += [(tracker, _report.part_of(value, share)) for tracker, value in updates]
        trackers[:] = [tracker for tracker, _ in reported]
        weights = model.trainable_weights
        gradients = tape.gradient(scaled, weights) if weights else []
        for gradient, weight in zip(gradients, weights, strict=True):
            _accumulator.set_static_shape(gradient, weight.shape)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        return _Parts(gradients, [number for _, number in reported])

    return micro_step


def training_call(model: keras.Model) -> Callable[[Any], Any]:
    """Return the forward pass in training mode, where the model's `call` knows of modes."""
    if "training" in inspect.signature(model.call).parameters:
        return lambda x: model(x, training=True)
    return model


def weighted_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, share: Any
) -> tuple[Any, list[tuple[_report.Tracker, _report.Reported]]]:
    """Return a micro-batch's part of its batch's loss, and of each loss that Keras tracks.

    `share` is the share of the micro-batch by its rows.
    """
    leaves = _cut.leaves((x, y, sample_weight))
    ragged = any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves)
    with (
        _shares.losses_by_share(share, lambda: _cut.rows_of(leaves[0]), ragged=ragged),
        _report.recorded_updates(model.metrics, by_rows=True) as updates,
    ):
        loss = model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
    updates = [(_report.Tracker(_keras.loss_tracker(model), by_rows=True), loss), *updates]
    reported = [(tracker, _report.part_of(value, share)) for tracker, value in updates]
    return loss * tf.cast(share, loss.dtype), reported


def _make_apply(model: keras.Model) -> Callable[[list[Any]], None]:
    def apply(gradients: list[Any]) -> None:
        weights = model.trainable_weights
        if not weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        model.optimizer.apply_gradients(zip(gradients, weights, strict=True))

    return apply
