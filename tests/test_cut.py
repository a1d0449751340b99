"""Where a batch is cut, and what the pieces are."""

import numpy as np
import pytest
import tensorflow as tf

from accumloop import _cut

ROWS = [1, 2, 3, 7, 8, 10, 64]


@pytest.mark.parametrize("accum", [1, 2, 3, 5, 8, 64, 100])
@pytest.mark.parametrize("rows", ROWS)
def test_edges(rows, accum):
    pieces = min(accum, rows)
    edges = _cut.edges(tf.constant(pieces, tf.int64), tf.constant(rows, tf.int64)).numpy()
    assert (edges[0], edges[-1], len(edges)) == (0, rows, pieces + 1)
    sizes = edges[1:] - edges[:-1]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def leaf(kind, rows):
    values = np.arange(rows * 3, dtype="float64").reshape(rows, 3)
    if kind == "dense":
        return tf.constant(values)
    if kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(
            tf.range(sum(i % 4 for i in range(rows))), [i % 4 for i in range(rows)]
        )
    return tf.sparse.from_dense(values * (values % 2))


def as_lists(leaf):
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("rows", ROWS)
def test_take(kind, rows, traced):
    whole = leaf(kind, rows)

    def pieces():
        assert int(_cut.rows_of(whole)) == rows if tf.executing_eagerly() else True
        return [
            _cut.take({"a": (whole, None)}, index * rows // 3, (index + 1) * rows // 3)["a"]
            for index in range(3)
        ]

    pieces = tf.function(pieces)() if traced else pieces()
    assert all(nothing is None for _, nothing in pieces)
    assert [row for piece, _ in pieces for row in as_lists(piece)] == as_lists(whole)


def test_a_piece_of_a_sparse_tensor_keeps_its_static_shape():
    @tf.function(input_signature=[tf.SparseTensorSpec([None, 3, 2])])
    def take(sparse):
        piece = _cut.take(sparse, tf.constant(0, tf.int64), tf.constant(1, tf.int64))
        assert piece.shape.as_list()[1:] == [3, 2]
        return piece

    take(tf.sparse.from_dense(np.ones([4, 3, 2], "float32")))


def test_rows_of_a_batch():
    batch = {"a": leaf("dense", 5), "b": [leaf("ragged", 5), None, leaf("sparse", 5)]}
    assert int(_cut.rows(batch)) == 5


@pytest.mark.parametrize("other", ["dense", "ragged", "sparse"])
def test_rows_that_disagree(other):
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        tf.function(lambda batch: _cut.rows(batch))((leaf("dense", 5), leaf(other, 4)))


def test_without_optionals():
    nothing = tf.experimental.Optional.empty(tf.TensorSpec([2]))
    assert _cut.without_optionals({"a": nothing, "b": 1}) == {"a": None, "b": 1}
