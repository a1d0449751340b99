"""The loop over the micro-batches of a batch, in a graph or run by Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from accumloop import _accumulator

# Arguments of the micro-step for micro-batch `index`.
Arguments = Callable[[Any], Any]


def total_of(micro_step: Any, *, eagerly: bool) -> Callable[[Arguments, Any], Any]:
    """Return `total(arguments, pieces)`: the sum of `micro_step(*arguments(index))`.

    Args:
        micro_step: Returns a structure of tensors, `tf.IndexedSlices` and `None`s; a
            `tf.function` unless it runs eagerly.
        eagerly: Whether Python runs the loop: `run_eagerly=True`.
    """
    if not eagerly:
        return lambda arguments, pieces: _sum_in_graph(micro_step, arguments, pieces)
    kinds: list[Any] = []  # Traced once, by the first batch that has slices.

    def total(arguments: Arguments, pieces: Any) -> Any:
        parts = micro_step(*arguments(0))
        sums = _accumulator.zeros(_present(parts), pieces)
        sums = _accumulator.add(sums, _present(parts), 0)
        for index in range(1, int(pieces)):
            parts = micro_step(*arguments(index))
            sums = _accumulator.add(sums, _present(parts), index)
        if not any(isinstance(part, tf.IndexedSlices) for part in _present(parts)):
            return _packed(parts, _accumulator.value(sums, _present(parts)))
        if not kinds:
            kinds.extend(_traced(micro_step, arguments))
        return _packed(parts, _accumulator.value(sums, kinds))

    return total


def _sum_in_graph(micro_step: Any, arguments: Arguments, pieces: Any) -> Any:
    # Traced here for the structure of its outputs, and called in the loop: one trace.
    example = micro_step.get_concrete_function(*arguments(tf.constant(0, tf.int64)))
    structure = example.structured_outputs

    def body(index: Any, sums: list[Any]) -> tuple[Any, list[Any]]:
        parts = micro_step(*arguments(index))
        return index + 1, _accumulator.add(sums, _present(parts), index)

    _, sums = tf.while_loop(
        lambda index, sums: index < pieces,
        body,
        [tf.constant(0, tf.int64), _accumulator.zeros(_present(structure), pieces)],
        parallel_iterations=1,  # More would hold the activations of as many micro-batches.
    )
    return _packed(structure, _accumulator.value(sums, _present(structure)))


def _traced(micro_step: Any, arguments: Arguments) -> list[Any]:
    """Return the parts of a trace: only a graph tells where slices come from."""
    trace = tf.function(tf.autograph.experimental.do_not_convert(micro_step))
    try:
        return _present(trace.get_concrete_function(*arguments(0)).structured_outputs)
    except Exception as error:  # Whatever a model that is meant to run eagerly raises in a graph.
        raise NotImplementedError(
            "With accum > 1 and `run_eagerly=True`, a model that looks up rows of a table must be "
            "one that can be traced, to see how it does. Compile with run_eagerly=False, or use "
            "accum=1."
        ) from error


def _present(parts: Any) -> list[Any]:
    return [part for part in tf.nest.flatten(parts) if part is not None]


def _packed(structure: Any, present: list[Any]) -> Any:
    """Return `present` in the places where `structure` is not None."""
    values = iter(present)
    flat = [None if part is None else next(values) for part in tf.nest.flatten(structure)]
    return tf.nest.pack_sequence_as(structure, flat)
