"""What micro-batches add up to: sums that start at zero, and slices that are put together.

```
total = zeros(parts)
for each micro-batch:  total = add(total, parts, index)
result = value(total)
```

A dense tensor is summed in float32 or wider. `tf.IndexedSlices` are not summed but collected,
in row order, so that the optimizer gets the very slices that a whole batch would have given:
Keras' optimizers treat repeated rows one by one (Adam squares each occurrence), and a dense
sum would train something else. The totals are plain tensors, carried from one micro-batch to
the next by the loop: TensorFlow adds in place, and they are gone when the update is done.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class _Slices(NamedTuple):
    """The `tf.IndexedSlices` of the micro-batches so far."""

    values: tf.TensorArray
    indices: tf.TensorArray
    dense_shape: Any


def wide(dtype: tf.DType) -> tf.DType:
    """Return the dtype to sum `dtype` in: itself, but at least float32."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def set_static_shape(gradient: Any, shape: tuple[int, ...]) -> None:
    """Tell a gradient, which may be None, the shape of its variable: a loop can forget it."""
    if isinstance(gradient, tf.IndexedSlices):
        gradient.values.set_shape([None, *shape[1:]])
    elif gradient is not None:
        gradient.set_shape(shape)


def zeros(parts: list[Any], pieces: Any) -> list[Any]:
    """Return the totals before the first of `pieces` micro-batches.

    Args:
        parts: What one micro-batch gives: tensors of known shape and `tf.IndexedSlices`. Only
            their dtypes and shapes are read.
        pieces: Number of micro-batches, an int64 scalar tensor.
    """
    return [_zero(part, pieces) for part in parts]


def add(total: list[Any], parts: list[Any], index: Any) -> list[Any]:
    """Return the totals with the parts of micro-batch `index` (an int64 scalar) added."""
    return [_add(*pair, index) for pair in zip(total, parts, strict=True)]


def value(total: list[Any], parts: list[Any]) -> list[Any]:
    """Return the sums, in the dtypes and kinds of `parts`, whose slices are those of a graph."""
    return [_value(*pair) for pair in zip(total, parts, strict=True)]


def _zero(part: Any, pieces: Any) -> Any:
    if isinstance(part, tf.IndexedSlices):
        return _Slices(
            empty_array(part.values, pieces),
            empty_array(part.indices, pieces),
            tf.zeros(part.dense_shape.shape, part.dense_shape.dtype),
        )
    return tf.zeros(part.shape, wide(part.dtype))


def empty_array(tensor: Any, pieces: Any) -> tf.TensorArray:
    """Return an array for what each micro-batch has in place of `tensor`, to be put together."""
    return tf.TensorArray(
        tensor.dtype,
        size=tf.cast(pieces, tf.int32),
        infer_shape=False,
        element_shape=[None, *tensor.shape[1:]],
    )


def _add(total: Any, part: Any, index: Any) -> Any:
    if isinstance(part, tf.IndexedSlices):
        index = tf.cast(index, tf.int32)
        return _Slices(
            total.values.write(index, part.values),
            total.indices.write(index, part.indices),
            part.dense_shape,
        )
    return total + tf.cast(part, total.dtype)


def _value(total: Any, part: Any) -> Any:
    if not isinstance(part, tf.IndexedSlices):
        return tf.cast(total, part.dtype)
    values, indices = total.values.concat(), total.indices.concat()
    values.set_shape([None, *part.values.shape[1:]])
    if _each_row_once(part.indices):
        values, indices = sum_repeated_rows(values, indices)
    return tf.IndexedSlices(values, indices, total.dense_shape)


def _each_row_once(indices: Any) -> bool:
    """Tell whether a lookup has summed repeated rows already, as that of a SparseTensor does.

    The gradient of `tf.nn.embedding_lookup_sparse` takes its indices from a `Unique` op. Over a
    whole batch it would have one slice a row, so rows of different micro-batches are summed too.

    Raises:
        NotImplementedError: If a table is looked up in both ways, or out of sight.
    """
    found = sources(indices)
    once = come_summed(found)
    hidden = found & _CALLS
    if hidden:
        raise NotImplementedError(
            "A table that is looked up inside a `tf.function` or control flow of its own is not "
            "supported with accum > 1: whether the lookup sums repeated rows cannot be seen. "
            f"Look it up outside, or use accum=1. Received: indices from {sorted(hidden)}"
        )
    return once


def come_summed(found: set[str]) -> bool:
    """Tell whether the sources of indices are a lookup that sums repeated rows.

    Raises:
        NotImplementedError: If they are one that does and one that does not.
    """
    if "Unique" in found and len(found) > 1:
        raise both_lookups()
    return found == {"Unique"}


def both_lookups() -> NotImplementedError:
    """Return the refusal of a table that is looked up in both ways."""
    return NotImplementedError(
        "A table that is looked up both by dense ids and by a `tf.SparseTensor` is not supported "
        "with accum > 1. Use two tables, or one kind of lookup."
    )


_CALLS = {
    *("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile"),
    *("Case", "StatelessCase"),
}


def sources(tensor: Any) -> set[str]:
    """Return the types of the ops where indices come from, behind reshapes, casts and joins."""
    passing = {"Identity", "Reshape", "Cast", "ConcatV2", "StopGradient"}
    if tensor.op.type not in passing:
        return {tensor.op.type}
    inputs = tensor.op.inputs
    joined = inputs[:-1] if tensor.op.type == "ConcatV2" else inputs[:1]
    return set().union(*(sources(source) for source in joined))


def sum_repeated_rows(values: Any, indices: Any) -> tuple[Any, Any]:
    """Return slices with each row once, summed in float32 or wider."""
    rows, positions = tf.unique(indices)
    sums = tf.math.unsorted_segment_sum(
        tf.cast(values, wide(values.dtype)), positions, tf.size(rows)
    )
    return tf.cast(sums, values.dtype), rows
