"""Where a batch is cut, and the rows of a nested structure between two cuts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Cut:
    """A batch, and the micro-batches that it is cut into.

    Args:
        batch: A nested structure of tensors.
        accum: Number of micro-batches, or more than there are rows; an int64 scalar tensor.

    Attributes:
        batch: The batch, with `None` for what is missing.
        rows: The rows of the batch, an int64 scalar tensor.
        pieces: The number of micro-batches, an int64 scalar tensor.
    """

    def __init__(self, batch: Any, accum: Any) -> None:
        self.batch = without_optionals(batch)
        self.rows = rows(self.batch)
        self.pieces = tf.maximum(tf.minimum(accum, self.rows), 1)
        # Known before the loop, which is left the fewest ops.
        self._edges = edges(self.pieces, self.rows)
        self._shares = shares(self._edges[1:] - self._edges[:-1], self.rows)

    def of(self, structure: Any, index: Any) -> Any:
        """Return the rows of micro-batch `index` of a structure with the rows of the batch."""
        return take(structure, tf.gather(self._edges, index), tf.gather(self._edges, index + 1))

    def rows_of(self, index: Any) -> Any:
        """Return the rows of micro-batch `index`, an int64 scalar tensor."""
        return tf.gather(self._edges, index + 1) - tf.gather(self._edges, index)

    def share(self, index: Any) -> Any:
        """Return the share of micro-batch `index` by its rows, a float64 scalar tensor."""
        return tf.gather(self._shares, index)


def pieces_of(accum: int) -> Any:
    """Return `accum` for a step: a Python int would be traced for each value."""
    return tf.constant(min(accum, tf.int64.max), tf.int64)


def leaves(batch: Any) -> list[Any]:
    """Return the tensors of a batch, in the order of `tf.nest`, without its `None`s."""
    return [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]


def without_optionals(batch: Any) -> Any:
    """Return `batch` with `None` where the data pipeline has a `tf.experimental.Optional`.

    Keras' own data adapters mark a missing leaf this way, and `fit` reads it as None.
    """
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch
    )


def without_optionals_of(element_spec: Any) -> Any:
    """Return the spec of a batch `without_optionals`."""
    return tf.nest.map_structure(
        lambda spec: None if isinstance(spec, tf.OptionalSpec) else spec, element_spec
    )


def signature(batch: Any) -> str:
    """Return what two micro-batches have in common, but for their rows, if one trace fits both."""
    return str(
        tf.nest.map_structure(
            lambda leaf: leaf if leaf is None else (type(leaf), leaf.dtype, leaf.shape[1:]), batch
        )
    )


def rows_of(leaf: Any) -> Any:
    """Return the number of rows of a dense, ragged or sparse tensor: an int64 scalar tensor."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    return tf.shape(leaf, out_type=tf.int64)[0]


def rows(batch: Any) -> Any:
    """Return the number of rows of a batch: an int64 scalar tensor.

    Raises:
        tf.errors.InvalidArgumentError: If leaves of the batch disagree in rows, when the
            batch is read. Cutting such a batch would drop rows of the longer leaf in silence.
    """
    first, *others = leaves(batch)
    count = rows_of(first)
    checks = [
        tf.debugging.assert_equal(
            rows_of(leaf),
            count,
            message="All leaves of a batch must have the same number of rows.",
        )
        for leaf in others
        if first.shape[0] is None or leaf.shape[0] != first.shape[0]
    ]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(count)


def edges(pieces: Any, rows: Any) -> Any:
    """Return where each of `pieces` micro-batches starts, and where the last one ends.

    `[index * rows // pieces for index in range(pieces + 1)]`, an int64 tensor: runs of consecutive
    rows, none empty while `pieces <= rows`, whose sizes differ by at most one.
    """
    return tf.range(pieces + 1) * rows // pieces


def shares(rows: Any, batch_rows: Any) -> Any:
    """Return the shares of micro-batches by their rows, int64 tensors, as float64."""
    # In float64, so that a loss in half precision has no rounded numbers of rows. A batch without
    # rows is one micro-batch: its regularizers count.
    rows, batch_rows = (tf.cast(tf.maximum(count, 1), tf.float64) for count in (rows, batch_rows))
    return rows / batch_rows


def take(batch: Any, start: Any, stop: Any) -> Any:
    """Return rows `start` to `stop` (int64 scalars) of every leaf, in the batch's structure."""

    def take_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, tf.SparseTensor):
            return _take_sparse(leaf, start, stop)
        return leaf[start:stop]

    return tf.nest.map_structure(take_leaf, batch)


def _take_sparse(leaf: tf.SparseTensor, start: Any, stop: Any) -> tf.SparseTensor:
    inner = leaf.dense_shape[1:]
    size = tf.concat([[stop - start], inner], axis=0)
    begin = tf.concat([[start], tf.zeros_like(inner)], axis=0)
    part = tf.sparse.slice(leaf, begin, size)
    # tf.sparse.slice forgets the static inner dimensions, which layers need to build.
    known = [
        part.dense_shape[axis] if size is None else tf.constant(size, tf.int64)
        for axis, size in enumerate([None, *leaf.shape[1:]])
    ]
    return tf.SparseTensor(part.indices, part.values, tf.stack(known))
