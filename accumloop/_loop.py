"""Functions, and the loop over the micro-batches of a batch, in a graph or run by Python."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from accumloop import _ancestors, _assigned, _cut, _sums

# Batch and share of micro-batch `index`.
Arguments = Callable[[Any], tuple[Any, Any]]

_DIVISORS = tf.TensorSpec([None], tf.float64)


def as_function(model: keras.Model, function: Callable[..., Any], **options: Any) -> Any:
    """Return a `tf.function`, or the function itself if the model runs eagerly."""
    function = tf.autograph.experimental.do_not_convert(function)
    return function if model.run_eagerly else tf.function(function, **options)


def trace_of_eager(function: Callable[..., Any], arguments: list[Any], refusal: str) -> Any:
    """Return a trace of a function that is meant to run eagerly, to see what it does.

    Raises:
        NotImplementedError: With the text `refusal`, if it cannot be traced.
    """
    traced = tf.function(tf.autograph.experimental.do_not_convert(function))
    try:
        return traced.get_concrete_function(*arguments)
    except Exception as error:  # Whatever a model that is meant to run eagerly raises in a graph.
        raise NotImplementedError(refusal) from error


def total_of(
    micro_step: Any, model: keras.Model, *, has_divisors: bool | None = None
) -> Callable[[Arguments, Any], Any]:
    """Return `total(arguments, pieces)`: the sum of the parts that the micro-step returns.

    ```
    divisors = sum of the divisors of each micro-batch  # only what these depend on is run
    total    = sum of micro_step(*arguments(index), divisors).parts
    ```

    Args:
        micro_step: Returns `(parts, divisors)`: a structure of tensors, `tf.IndexedSlices` and
            `None`s, and a list of float64 scalars; a `tf.function` unless the model runs eagerly.
        model: The model of the micro-step.
        has_divisors: Whether there are any; None if only the micro-step will tell.
    """
    if not model.run_eagerly:
        return lambda arguments, pieces: _sum_in_graph(model, micro_step, arguments, pieces)
    return _EagerTotal(micro_step, model, has_divisors)


def _sum_in_graph(model: keras.Model, micro_step: Any, arguments: Arguments, pieces: Any) -> Any:
    # Traced here for the structure of its outputs, and called in the loop: one trace.
    example = micro_step.get_concrete_function(*arguments(tf.constant(0, tf.int64)), _DIVISORS)
    _assigned.refuse_or_warn(model, example.graph)
    structure, own_divisors, *_ = example.structured_outputs
    divisors = tf.zeros([0], tf.float64)
    if own_divisors:
        _refuse_drawn(example, own_divisors)
        divisors_of = _ancestors.function_of(example, own_divisors)
        divisors = _loop(
            pieces,
            lambda index, sums: sums + tf.stack(divisors_of(arguments(index), divisors)),
            tf.zeros([len(own_divisors)], tf.float64),
        )

    def add(index: Any, sums: list[Any]) -> list[Any]:
        parts, *_ = micro_step(*arguments(index), divisors)
        return _sums.add(sums, _present(parts), index)

    sums = _loop(pieces, add, _sums.zeros(_present(structure), pieces))
    return packed(structure, _sums.value(sums, _present(structure)))


def state_of(micro_step: Any, arguments: Arguments, name: str) -> dict[str, Any]:
    """Return what the micro-step returns as `name`, but for what depends on its micro-batch.

    It is read anew, from the variables as they are now. To be called in a graph.
    """
    given = [*arguments(tf.constant(0, tf.int64)), tf.zeros([0], tf.float64)]
    example = micro_step.get_concrete_function(*given[:2], _DIVISORS)
    values = getattr(example.structured_outputs, name)
    values = {k: v for k, v in values.items() if not _ancestors.reads_arguments(example, v)}
    read = _ancestors.function_of(example, list(values.values()))(*given)
    return dict(zip(values, read, strict=True))


def _refuse_drawn(concrete: Any, divisors: list[Any]) -> None:
    """Refuse masks and weights that are drawn: known beforehand they would be other ones."""
    drawn = {op for op in _ancestors.ops_of(concrete, divisors) if "Random" in op or "Rng" in op}
    if drawn:
        raise NotImplementedError(
            "With accum > 1, the mask or the weights of a loss must not be drawn at random in "
            "the step: the micro-batches of a batch would have no shares that add up to it. Draw "
            "them in the dataset, use whole_batch_loss=True, or accum=1. Received: "
            f"{sorted(drawn)}"
        )


def _loop(pieces: Any, body: Callable[[Any, Any], Any], start: Any) -> Any:
    return tf.while_loop(
        lambda index, _: index < pieces,
        lambda index, sums: (index + 1, body(index, sums)),
        [tf.constant(0, tf.int64), start],
        parallel_iterations=1,  # More would hold the activations of as many micro-batches.
    )[1]


class _EagerTotal:
    """The loop run by Python, for a model that is meant to run eagerly."""

    def __init__(self, micro_step: Any, model: keras.Model, has_divisors: bool | None) -> None:
        self._micro_step = micro_step
        self._model = model
        self._has_divisors = has_divisors
        # By the signature of the batch: what is traced for one may not be so for another.
        self._without_divisors: set[str] = set()
        self._kinds: dict[str, list[Any]] = {}

    def __call__(self, arguments: Arguments, pieces: Any) -> Any:
        divisors = self._divisors(arguments, pieces)
        parts, *_ = self._micro_step(*arguments(0), divisors)
        sums = _sums.zeros(_present(parts), pieces)
        sums = _sums.add(sums, _present(parts), 0)
        for index in range(1, int(pieces)):
            parts, *_ = self._micro_step(*arguments(index), divisors)
            sums = _sums.add(sums, _present(parts), index)
        kinds = _present(parts)
        if any(isinstance(part, tf.IndexedSlices) for part in kinds):
            signature = _cut.signature(arguments(0)[0])
            if signature not in self._kinds:
                # Only a graph tells where slices come from.
                trace = trace_of_eager(
                    self._micro_step,
                    [*arguments(0), divisors],
                    "With accum > 1 and `run_eagerly=True`, a model that looks up rows of a table "
                    "must be one that can be traced, to see how it does. Compile with "
                    "run_eagerly=False, or use accum=1.",
                )
                self._kinds[signature] = _present(trace.structured_outputs[0])
            kinds = self._kinds[signature]
        return packed(parts, _sums.value(sums, kinds))

    def _divisors(self, arguments: Arguments, pieces: Any) -> Any:
        """Return the divisors of the batch, by steps that are taken back."""
        total = tf.zeros([0], tf.float64)
        signature = _cut.signature(arguments(0)[0])
        if self._has_divisors is False or signature in self._without_divisors:
            return total
        with _restored(self._model):
            for index in range(int(pieces)):
                _, own, *_ = self._micro_step(*arguments(index), None)
                if not own:
                    self._without_divisors.add(signature)
                    break
                total = tf.stack(own) if index == 0 else total + tf.stack(own)
        return total


@contextlib.contextmanager
def _restored(model: keras.Model) -> Iterator[None]:
    """Put back what a step moves, its metrics and seeds, but for what the micro-step withholds."""
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    before = [(variable, keras.ops.copy(variable.value)) for variable in variables]
    try:
        yield
    finally:
        known = {id(variable) for variable in variables}
        for metric in model.metrics:
            if not known.issuperset(map(id, metric.variables)):
                metric.reset_state()  # Built by this very step.
        for variable, value in before:
            variable.assign(value)


def _present(parts: Any) -> list[Any]:
    return [part for part in tf.nest.flatten(parts) if part is not None]


def packed(structure: Any, present: list[Any]) -> Any:
    """Return `present` in the places where `structure` is not None."""
    values = iter(present)
    flat = [None if part is None else next(values) for part in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, flat)
