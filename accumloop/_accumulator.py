"""GradientAccumulator: the weighted mean of gradients, for a training loop written by hand."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from accumloop import _totals


class GradientAccumulator:
    """The weighted mean of the gradients of micro-batches, for a training loop of your own.

    ```
    add(gradients, weight):  total += weight * gradients;  weights += weight
    value():                 total / weights
    ```

    The gradients of means over rows, weighted by their rows, give the gradient of the mean over
    the whole batch. Sums are taken in float32 or wider. `tf.IndexedSlices` are put together and
    stay slices: optimizers of Keras treat repeated rows one by one. Those that a lookup of a
    `tf.SparseTensor` has summed already are summed again, where a graph shows where they come
    from: neither eagerly, nor out of a `tf.function` within the one that adds.

    Make one outside of the `tf.function` that uses it. Under a strategy make it in
    `strategy.scope()` and use it in `strategy.run`: each replica adds by itself, and the values
    of all replicas add up to the mean of the whole batch, as optimizers do. Only the sum of the
    weights crosses replicas before.

    Args:
        variables: The variables, of Keras or TensorFlow, in the order of the gradients.

    Raises:
        TypeError: If `variables` are no variables.
        ValueError: If there are none.

    Example:
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> loss_fn, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.001)
        >>> optimizer.build(model.trainable_variables)
        >>> accumulator = GradientAccumulator(model.trainable_variables)
        >>> @tf.function
        ... def update(x, y):
        ...     accumulator.reset()
        ...     for start in tf.range(0, tf.shape(x)[0], 4):  # micro-batches of 4 rows, and a rest
        ...         x_part, y_part = x[start : start + 4], y[start : start + 4]
        ...         with tf.GradientTape() as tape:
        ...             loss = loss_fn(y_part, model(x_part, training=True))  # a mean
        ...         gradients = tape.gradient(loss, model.trainable_variables)
        ...         accumulator.add(gradients, weight=tf.shape(x_part)[0])
        ...     optimizer.apply(accumulator.value(), model.trainable_variables)
        >>> x = tf.reshape(tf.range(20.0), [10, 2])
        >>> update(x, x[:, :1])
        >>> int(optimizer.iterations)
        1
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self._variables = _checked_variables(variables)
        self._totals = [_totals.Total(variable) for variable in self._variables]
        self._weights = _totals.local_variable([], tf.float64)
        self._traced = False  # Whether a graph has a `value()`, of the kinds known by then.

    @tf.autograph.experimental.do_not_convert
    def add(self, gradients: Sequence[Any], weight: Any = 1) -> None:
        """Add the gradients of a micro-batch.

        Args:
            gradients: One for each variable, of its shape and dtype: a tensor, a
                `tf.IndexedSlices`, or None for a variable that had no part in the loss.
            weight: A number, or a scalar tensor of any real dtype: the part of the micro-batch in
                the mean, relative to the others. For a loss that is a mean over rows, its rows.

        Raises:
            TypeError: If a gradient or the weight is of a wrong kind or dtype.
            ValueError: If there are too few or too many gradients, if one has the shape of
                another variable, if the weight is no scalar or negative, or if a gradient is of a
                kind that an earlier `value()` in a `tf.function` did not reckon with.
            RuntimeError: If it was made under a strategy, and is not called in a replica, as for
                the other methods.
        """
        self._refuse_outside_of_replicas()
        gradients = _checked_gradients(gradients, self._variables)
        weight = _checked_weight(weight)
        for total, gradient in zip(self._totals, gradients, strict=True):
            if total.is_new(gradient):
                self._refuse_unread(total, gradient)
                total.expect(gradient)
        self._weights.assign_add(tf.cast(weight, tf.float64))
        for total, gradient in zip(self._totals, gradients, strict=True):
            total.add(gradient, weight)

    @tf.autograph.experimental.do_not_convert
    def value(self) -> list[Any]:
        """Return the weighted mean of what was added since `reset()`.

        Returns:
            A list with one gradient for each variable, of its shape and dtype: a tensor, a
            `tf.IndexedSlices` if there were only such, or None if there was none. Zero where the
            weights sum up to 0. In a replica: its part of the mean, for an optimizer that sums
            over replicas.

        Raises:
            ValueError: If nothing has ever been added.
        """
        self._refuse_outside_of_replicas()
        if not any(total.kinds for total in self._totals):
            raise ValueError(
                "There are no gradients to take the mean of. Call `add(gradients)` before "
                "`value()`; in a `tf.function`, above it."
            )
        self._traced = self._traced or not tf.executing_eagerly()
        weights = self._weights.read_value()
        replica = tf.distribute.get_replica_context()
        weights = replica.all_reduce(tf.distribute.ReduceOp.SUM, weights)
        return [total.mean(weights) for total in self._totals]

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Forget what was added."""
        self._refuse_outside_of_replicas()
        self._weights.assign(0.0)
        for total in self._totals:
            total.reset()

    def _refuse_outside_of_replicas(self) -> None:
        outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
        if outside and isinstance(self._weights, tf.distribute.DistributedValues):
            raise RuntimeError(
                "A GradientAccumulator that is made under a strategy has parts in each replica: "
                "call its methods in the function that `strategy.run` runs."
            )

    def _refuse_unread(self, total: _totals.Total, gradient: Any) -> None:
        if self._traced:
            raise ValueError(
                "A `value()` that is traced already would leave out this gradient: no gradient of "
                "this kind had been added by then. Make another GradientAccumulator, or trace the "
                f"function that adds first. Received: {_totals.kind_of(gradient)} for "
                f"'{_name_of(total.variable)}'"
            )


def _checked_variables(variables: Any) -> list[Any]:
    kinds = tf.Variable | keras.Variable
    if not isinstance(variables, list | tuple) or not all(isinstance(v, kinds) for v in variables):
        raise TypeError(
            "`variables` must be a list of Keras or TensorFlow variables, such as "
            f"`model.trainable_variables`. Received: variables={variables!r}"
        )
    if not variables:
        raise ValueError(
            "`variables` must have at least one variable. Build the model before. Received: "
            "variables=[]"
        )
    return list(variables)


def _checked_gradients(gradients: Any, variables: list[Any]) -> list[Any]:
    if not isinstance(gradients, list | tuple):
        raise TypeError(
            "`gradients` must be a list, as `tape.gradient(loss, variables)` returns for one. "
            f"Received: gradients of type {type(gradients).__name__}"
        )
    if len(gradients) != len(variables):
        raise ValueError(
            "`gradients` must have one gradient, or None, for each variable, in their order. "
            f"Received: {len(gradients)} gradients for {len(variables)} variables"
        )
    return [
        None if gradient is None else _checked_gradient(gradient, variable)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _checked_gradient(gradient: Any, variable: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        try:
            gradient = tf.convert_to_tensor(gradient)
        except (TypeError, ValueError) as error:
            raise TypeError(
                "A gradient must be a tensor, a `tf.IndexedSlices` or None. Received: "
                f"{gradient!r} for '{_name_of(variable)}'"
            ) from error
    if gradient.dtype != tf.as_dtype(variable.dtype):
        raise TypeError(
            "A gradient must have the dtype of its variable. Received: "
            f"{gradient.dtype.name} for '{_name_of(variable)}' of {variable.dtype}"
        )
    shape = gradient.shape
    if isinstance(gradient, tf.IndexedSlices):
        shape = [variable.shape[0], *gradient.values.shape[1:]] if variable.shape else [None]
    if not tf.TensorShape(variable.shape).is_compatible_with(shape):
        raise ValueError(
            "A gradient must have the shape of its variable, and gradients the order of "
            f"`variables`. Received: shape {tuple(shape)} for '{_name_of(variable)}' of shape "
            f"{tuple(variable.shape)}"
        )
    return gradient


def _checked_weight(weight: Any) -> Any:
    if isinstance(weight, numbers.Real):
        if not float(weight) >= 0:
            raise ValueError(f"`weight` must not be negative. Received: weight={weight!r}")
        # In float64, which `tf.cast` of a Python float would not give.
        return 1 if weight == 1 else tf.constant(float(weight), tf.float64)
    weight = tf.convert_to_tensor(weight)
    if not (weight.dtype.is_integer or weight.dtype.is_floating):
        raise TypeError(f"`weight` must be a real number. Received: weight={weight!r}")
    if weight.shape.rank not in (0, None):
        raise ValueError(
            "`weight` must be a scalar: one number for a micro-batch. Received: weight of shape "
            f"{tuple(weight.shape)}"
        )
    return weight


def _name_of(variable: Any) -> str:
    return getattr(variable, "path", variable.name)
