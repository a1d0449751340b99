"""The step: cut a batch, run its micro-batches, add up what they give, update once.

Graph code: it knows nothing of epochs, callbacks or printing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _cut, _keras, _loop, _trackers, _two_passes, _withheld

Logs = dict[str, Any]


class Step(NamedTuple):
    """The function of an execution, and that of one batch that it calls."""

    run: Callable[[Any, Any, Any], Logs]
    update: Any  # a `tf.function`, unless the model runs eagerly
    look: Callable[[Any], None]  # sees what a step of a model's own does, before it does it


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


def forget(model: keras.Model) -> None:
    """Let the steps of a model be made anew."""
    vars(model).pop("_accumloop_steps", None)


def make_step(model: keras.Model, accumulating: bool, whole_batch_loss: bool) -> Step:
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
    look: Callable[[Any], None] = lambda element_spec: None  # noqa: E731
    if not accumulating:
        update = _whole_update(model)
    elif whole_batch_loss:
        update = _two_passes.make_update(model)
    else:
        update, look = _accumulated_update(model)

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

    return Step(step if model.run_eagerly else tf.function(step), update, look)


def _whole_update(model: keras.Model) -> Callable[..., Logs]:
    """One micro-batch is the whole batch: Keras' own `train_step`, and so bit-equal to `fit`."""

    def update(batch: Any, accum: Any) -> Logs:
        batch = _cut.without_optionals(batch)
        with _trackers.output_losses_by_rows(model, lambda: _cut.rows_of(_cut.leaves(batch)[0])):
            return model.train_step(batch)

    # XLA would compile the loop over steps too: only the update is compiled, as in fit.
    return _loop.as_function(model, update, jit_compile=model.jit_compile)


def _accumulated_update(model: keras.Model) -> tuple[Callable[..., Logs], Callable[[Any], None]]:
    plan = _withheld.Plan()
    micro_step = _withheld.make_micro_step(model, plan)
    look = _withheld.make_look(model, plan, micro_step)
    # Micro-batches differ in size: XLA compiles one of them and the update, not the loop.
    micro_step = _loop.as_function(model, micro_step, jit_compile=model.jit_compile)
    apply = _loop.as_function(model, plan.apply, jit_compile=model.jit_compile)
    total = _loop.total_of(micro_step, model)

    def update(batch: Any, accum: Any) -> Logs:
        cut = _cut.Cut(batch, accum)

        def arguments(index: Any) -> tuple[Any, Any]:
            return cut.of(cut.batch, index), cut.share(index)

        parts = total(arguments, cut.pieces)
        apply(parts.gradients)
        plan.update_once(parts, cut.rows)
        if parts.logs and not model.run_eagerly:
            return plan.logs(parts, _loop.state_of(micro_step, arguments, "logs"))
        return plan.logs(parts, {})

    return _loop.as_function(model, update), look
