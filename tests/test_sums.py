"""Sums of dense tensors, and slices that are put together."""

import numpy as np
import pytest
import tensorflow as tf

from accumloop import _sums

PIECES = 3


def total_of(parts):
    total = _sums.zeros(parts[0], tf.constant(len(parts), tf.int64))
    for index, part in enumerate(parts):
        total = _sums.add(total, part, tf.constant(index, tf.int64))
    return _sums.value(total, parts[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_sum(dtype):
    parts = [[tf.cast(tf.fill([2, 3], 0.5 + index), dtype)] for index in range(PIECES)]
    (total,) = total_of(parts)
    assert total.dtype == dtype
    np.testing.assert_array_equal(tf.cast(total, "float64"), np.full([2, 3], 4.5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype):
    """256 and 255 times 1: in bfloat16 itself the sum would stay at 256."""
    parts = [[tf.constant([256.0 if index == 0 else 1.0], dtype)] for index in range(256)]
    assert _sums.zeros(parts[0], 1)[0].dtype == tf.float32
    (total,) = total_of(parts)
    np.testing.assert_allclose(tf.cast(total, "float64"), [511.0], rtol=2e-3)


def slices(index, rows=2):
    ids = tf.constant([(index + row) % 4 for row in range(rows)], tf.int64)
    return tf.IndexedSlices(tf.fill([rows, 5], float(index)), ids, tf.constant([9, 5], tf.int64))


def test_slices_are_put_together_in_order():
    @tf.function
    def put_together():
        return total_of([[slices(index, rows=1 + index)] for index in range(PIECES)])

    (total,) = put_together()
    assert isinstance(total, tf.IndexedSlices)
    np.testing.assert_array_equal(total.indices, [0, 1, 2, 2, 3, 0])
    np.testing.assert_array_equal(total.values[:, 0], [0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(total.dense_shape, [9, 5])


def lookup(table, ids):
    with tf.GradientTape() as tape:
        rows = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
    return tape.gradient(rows, table)


def sparse_ids(rows):
    return tf.sparse.from_dense(tf.constant(rows, tf.int64))


def test_a_lookup_that_sums_repeated_rows_does_so_over_the_whole_batch():
    table = tf.Variable(tf.ones([9, 5]))
    rows = [[3, 3], [3, 4], [4, 5], [3, 1]]

    @tf.function
    def whole():
        return lookup(table, sparse_ids(rows))

    @tf.function
    def cut():
        parts = [[lookup(table, sparse_ids(part))] for part in (rows[:1], rows[1:2], rows[2:])]
        return total_of(parts)[0]

    expected, actual = whole(), cut()
    order = np.argsort(actual.indices), np.argsort(expected.indices)
    np.testing.assert_array_equal(
        actual.indices.numpy()[order[0]], expected.indices.numpy()[order[1]]
    )
    np.testing.assert_array_equal(
        actual.values.numpy()[order[0]], expected.values.numpy()[order[1]]
    )


def test_a_table_with_both_kinds_of_lookup_is_refused():
    table = tf.Variable(tf.ones([9, 5]))

    @tf.function
    def both():
        with tf.GradientTape() as tape:
            summed = tf.nn.embedding_lookup_sparse(
                table, sparse_ids([[3, 3], [1, 2]]), None, combiner="sum"
            )
            loss = tf.reduce_sum(summed) + tf.reduce_sum(tf.gather(table, [3, 3]))
        return total_of([[tape.gradient(loss, table)]])

    with pytest.raises(NotImplementedError, match="both by dense ids and by a"):
        both()
