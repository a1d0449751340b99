"""BatchNormalization: its moving statistics move once a batch, by the moments of the batch.

Each micro-batch is normalized by its own statistics. What its forward pass would have moved the
moving statistics by is withheld and pooled: the mean is the mean of the means, the variance
that within micro-batches plus that between them, each weighted by how many positions it was
taken over. A layer whose `momentum` is 0 assigns the moments themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _keras
from accumloop._shadow import shadowed


class Sums(NamedTuple):
    """What a micro-batch adds to the moments of its batch, in float64."""

    count: Any  # of positions, shape ()
    first: Any  # the sum of what is normalized, shape (channels,)
    second: Any  # and of its square


class Moved(NamedTuple):
    """A layer whose statistics a forward pass would have moved."""

    layer: keras.layers.BatchNormalization
    epsilon: float  # what Keras adds to the count


def normalizations(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Return the layers of `model` that keep moving statistics."""
    layers = _keras.flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def withheld(model: keras.Model) -> Iterator[list[tuple[Moved, Sums]]]:
    """Record the moments of each call of a `BatchNormalization`, and do not move its statistics."""
    recorded: list[tuple[Moved, Sums]] = []
    with contextlib.ExitStack() as stack:
        for layer in normalizations(model):
            stack.enter_context(shadowed(layer, call=_recording_call(layer, recorded)))
        yield recorded


def move(moved: Moved, sums: Sums) -> None:
    """Move the statistics of a layer by the moments of a whole batch."""
    layer, epsilon = moved
    dtype = layer.moving_mean.dtype
    mean = sums.first / (sums.count + epsilon)
    variance = sums.second - 2.0 * mean * sums.first + sums.count * mean * mean
    variance = tf.maximum(variance, 0.0) / (sums.count + epsilon)
    mean, variance = tf.cast(mean, dtype), tf.cast(variance, dtype)
    if getattr(layer, "renorm", False):
        _keras.update_renorm_statistics(layer, mean, variance)
        return
    for statistic, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        statistic.assign(statistic * layer.momentum + value * (1.0 - layer.momentum))


def _recording_call(
    layer: keras.layers.BatchNormalization, recorded: list[tuple[Moved, Sums]]
) -> Callable[..., Any]:
    call = layer.call

    def recording(inputs: Any, *args: Any, mask: Any = None, **kwargs: Any) -> Any:
        if mask is not None:
            kwargs["mask"] = mask
        if _keras.in_stateless_scope():  # Keras infers shapes, or a pass that moves nothing.
            return call(inputs, *args, **kwargs)
        assigned: dict[int, Any] = {}

        def recorder(variable: Any) -> Callable[[Any], Any]:
            def assign(value: Any) -> Any:
                assigned[id(variable)] = value
                return value

            return assign

        with contextlib.ExitStack() as stack:
            for variable in _statistics(layer):
                stack.enter_context(shadowed(variable, assign=recorder(variable)))
            for momentum in ("momentum", "renorm_momentum"):
                if hasattr(layer, momentum):
                    stack.enter_context(shadowed(layer, **{momentum: 0.0}))
            outputs = call(inputs, *args, **kwargs)
        if {id(layer.moving_mean), id(layer.moving_variance)} <= set(assigned):
            mean, variance = (assigned[id(v)] for v in (layer.moving_mean, layer.moving_variance))
            epsilon = 0.0 if mask is None else keras.config.epsilon()
            recorded.append((Moved(layer, epsilon), _sums(inputs, mask, mean, variance, epsilon)))
        return outputs

    return recording


def _statistics(layer: keras.layers.BatchNormalization) -> list[Any]:
    """Return the statistics that Keras moves: a subclass may have other state."""
    names = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
    return [getattr(layer, name) for name in names if hasattr(layer, name)]


def _sums(inputs: Any, mask: Any, mean: Any, variance: Any, epsilon: float) -> Sums:
    # In float64: the variance is a difference of sums.
    mean, variance = (tf.cast(value, tf.float64) for value in (mean, variance))
    if mask is None:
        positions = tf.size(inputs, out_type=tf.int64) // tf.size(mean, out_type=tf.int64)
        count = tf.cast(positions, tf.float64)
    else:
        count = tf.reduce_sum(tf.cast(mask, tf.float64))
    first = mean * (count + epsilon)
    second = variance * (count + epsilon) + mean * (2.0 * first - count * mean)
    return Sums(count, first, second)
