"""What was added up for one variable: a dense sum, and slices that are put together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from accumloop import _sums

_DENSE, _SLICES, _SUMMED = "a tensor", "slices", "slices with repeated rows summed"


class Total:
    """The weighted sum of the gradients of a variable.

    Both of its parts have no rows until they are needed: a table whose gradients are slices has
    no dense copy.

    Attributes:
        variable: The variable.
        kinds: The kinds of gradients that it has had, or that a graph will give it.
    """

    def __init__(self, variable: Any) -> None:
        self.variable = variable
        self.kinds: set[str] = set()
        shape = tf.TensorShape(variable.shape)
        rows = [None, *shape[1:]] if shape.rank else []
        dtype = _sums.wide(tf.as_dtype(variable.dtype))
        self._dense = local_variable(rows, dtype)
        self._values = local_variable([None, *shape[1:]], dtype)
        self._indices = local_variable([None], tf.int64)

    def is_new(self, gradient: Any) -> bool:
        """Tell whether a gradient, which may be None, is of a kind not seen before."""
        return gradient is not None and kind_of(gradient) not in self.kinds

    def expect(self, gradient: Any) -> None:
        """Make place for gradients of this kind, before any is added."""
        kind = kind_of(gradient)
        self.kinds.add(kind)
        if self.kinds >= {_SLICES, _SUMMED}:
            raise _sums.both_lookups()
        if kind == _DENSE:
            with tf.init_scope():
                for dense in getattr(self._dense, "values", [self._dense]):
                    dense.assign(tf.zeros(self.variable.shape, dense.dtype))

    def add(self, gradient: Any, weight: Any) -> None:
        """Add `weight` (a scalar) times a gradient, which may be None."""
        if isinstance(gradient, tf.IndexedSlices):
            values = self._weighted(gradient.values, weight)
            indices = tf.cast(gradient.indices, tf.int64)
            self._values.assign(tf.concat([self._values, values], axis=0))
            self._indices.assign(tf.concat([self._indices, indices], axis=0))
        elif gradient is not None:
            self._dense.assign_add(self._weighted(gradient, weight))

    def mean(self, weights: Any) -> Any:
        """Return the sum over `weights`, of the shape and dtype of the variable, or None."""
        if not self.kinds:
            return None
        if self.kinds == {_DENSE}:
            return self._mean_of(self._dense, weights, self.variable.shape)
        values = self._mean_of(self._values, weights, self._values.shape)
        indices = self._indices.read_value()
        if self.kinds == {_SUMMED}:
            values, indices = _sums.sum_repeated_rows(values, indices)
        if _DENSE not in self.kinds:
            return tf.IndexedSlices(
                values, indices, tf.constant(list(self.variable.shape), tf.int64)
            )
        dense = self._mean_of(self._dense, weights, self.variable.shape)
        return tf.tensor_scatter_nd_add(dense, indices[:, tf.newaxis], values)

    def reset(self) -> None:
        """Forget what was added."""
        self._dense.assign(tf.zeros_like(self._dense))
        self._values.assign(self._values[:0])
        self._indices.assign(self._indices[:0])

    def _weighted(self, tensor: Any, weight: Any) -> Any:
        tensor = tf.cast(tensor, self._dense.dtype)
        return tensor * tf.cast(weight, tensor.dtype)

    def _mean_of(self, total: Any, weights: Any, shape: Any) -> Any:
        mean = tf.math.divide_no_nan(total.read_value(), tf.cast(weights, total.dtype))
        return tf.cast(tf.ensure_shape(mean, shape), self.variable.dtype)


def kind_of(gradient: Any) -> str:
    """Return what a gradient is, in words."""
    if not isinstance(gradient, tf.IndexedSlices):
        return _DENSE
    sources = set() if tf.executing_eagerly() else _sums.sources(gradient.indices)
    return _SUMMED if _sums.come_summed(sources) else _SLICES


def local_variable(shape: list[int | None], dtype: tf.DType) -> tf.Variable:
    """Return a variable of zeros, each replica's own, with no rows where `shape` has None."""
    return tf.Variable(
        tf.zeros([0 if size is None else size for size in shape], dtype),
        shape=shape,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.NONE,
    )
