"""Whether numbers are equal up to rounding, which differs between batch sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from accumloop import _keras

# Of a forward pass: far above rounding, and far below what coupled rows do.
_OF_A_PASS = {"float64": 1e-6, "float32": 1e-3}
_OF_A_LOW_PRECISION_PASS = 0.1
# Of the same numbers added up in another order.
_OF_A_SUM = {"float64": 1e-6, "float32": 1e-5}
_OF_A_LOW_PRECISION_SUM = 0.02


class Close:
    """Whether numbers are equal up to the rounding of a model's computations."""

    def __init__(self, model: keras.Model) -> None:
        layers = [model, *_keras.flatten_layers(model)]
        dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers}
        floating = {dtype for dtype in dtypes if "float" in dtype}  # Others have ids or text.
        self._of_a_pass = max(
            (_OF_A_PASS.get(d, _OF_A_LOW_PRECISION_PASS) for d in floating),
            default=_OF_A_PASS["float32"],
        )

    def sums(
        self,
        values: list[float],
        others: list[float],
        beside: Iterable[float] = (),
        *,
        exactly: bool = False,
    ) -> bool:
        """Tell whether two sums are close.

        Args:
            values: Terms of a sum.
            others: Terms of another one.
            beside: What they were taken from: a difference has the rounding of its terms.
            exactly: Whether the passes that they come from are known to differ by more.
        """
        tolerance = max(self._of_a_pass / 10, _OF_A_PASS["float64"]) if exactly else self._of_a_pass
        return _close(values, others, beside, tolerance)

    def all(self, values: list[float], others: list[float]) -> bool:
        """Tell whether each of some numbers is close to another one."""
        pairs = zip(values, others, strict=True)
        return all(self.sums([value], [other]) for value, other in pairs)

    def tensors(self, tensors: list[Any], others: list[Any]) -> bool:
        """Tell whether dense tensors, or what two passes have put together of them, are close."""
        return len(tensors) == len(others) and all(
            _close_tensors(*pair, self._of_a_pass) for pair in zip(tensors, others, strict=True)
        )


def sums(values: list[Any], others: list[Any]) -> bool:
    """Tell whether two sums of scalar tensors are the same but for the order of additions."""
    dtypes = {tensor.dtype.name for tensor in [*values, *others]}
    tolerance = max(_OF_A_SUM.get(dtype, _OF_A_LOW_PRECISION_SUM) for dtype in dtypes)
    return _close([float(v) for v in values], [float(v) for v in others], (), tolerance)


def gradients(tensors: list[Any], others: list[Any]) -> bool:
    """Tell whether gradients of the same sum are the same but for the order of additions."""
    for tensor, other in zip(tensors, others, strict=True):
        tolerance = 100 * _OF_A_SUM.get(tensor.dtype.name, _OF_A_LOW_PRECISION_SUM / 20)
        if not _close_tensors(tensor, other, tolerance):
            return False
    return True


def _close(
    values: list[float], others: list[float], beside: Iterable[float], tolerance: float
) -> bool:
    total, other = sum(values), sum(others)
    if not math.isfinite(total) or not math.isfinite(other):
        return not math.isfinite(total)  # A batch without a loss tells nothing.
    scale = max(sum(map(abs, numbers)) for numbers in (values, others, beside))
    return abs(total - other) <= tolerance * scale


def _close_tensors(tensor: Any, other: Any, tolerance: float) -> bool:
    if tensor.shape != other.shape:
        return False
    tensor, other = tf.cast(tensor, tf.float64), tf.cast(other, tf.float64)
    scale = tf.reduce_max(tf.abs(tensor)) if tf.size(tensor) else 0.0
    return bool(tf.reduce_all(tf.abs(tensor - other) <= tolerance * scale))
