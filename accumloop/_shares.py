"""The part that a micro-batch has in its batch's loss.

```
loss of a batch = sum over micro-batches of share * loss of the micro-batch
```

A loss with a mean reduction is a sum over a divisor, and a micro-batch's share in it is its
divisor over the batch's:

| reduction | divisor |
|---|---|
| mean, unmasked | the number of loss values, and so the rows: inner sizes are common to a batch |
| mean, masked by layers (`_keras_mask`) or by the loss (`ignore_class`) | unmasked values |
| `mean_with_sample_weight` | the sum of the weights of unmasked values |
| `sum` and None | none: the share is 1 |

Everything else that `compute_loss` adds, regularizers and `add_loss`, counts by rows, so that the
micro-batches of a batch count a weight regularizer once. So the whole of it is weighted by rows,
and each `keras.losses.Loss` whose share is another one returns its value times
share / row share. Its `__call__` is wrapped while the loss is computed: that reaches the losses
of every output, whatever their nesting, and those that an own `compute_loss` or `train_step`
calls, with public names alone. The divisors of the whole batch have to be known before: a
first pass over the micro-batches runs what they depend on, and no more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from accumloop import _cut, _keras
from accumloop._shadow import shadowed

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# Loss.__call__ is one for all threads: only one of them may have it wrapped.
_lock = threading.RLock()


@contextlib.contextmanager
def losses_by_share(
    batch: Any, row_share: Any, divisors: Any | None, *, trusted: bool = True
) -> Iterator[list[Any]]:
    """Let each loss return its value times its share over the share of rows.

    Args:
        batch: The micro-batch, a nested structure of tensors.
        row_share: The share of the micro-batch by its rows, a float scalar tensor.
        divisors: The divisors of the batch, a float64 vector, in the order in which the losses
            whose share is not that of their rows are called; or None, to leave those losses as
            they are and only learn the divisors of the micro-batch.
        trusted: Whether Keras calls the losses, so that its own have values for each row.

    Yields:
        A list that fills with the divisors of the micro-batch, float64 scalar tensors.

    Raises:
        NotImplementedError: Within, by a loss whose share cannot be told.
    """
    leaves = _cut.leaves(batch)
    # Inner sizes may differ from micro-batch to micro-batch.
    ragged = any(isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) for leaf in leaves)
    with _lock:
        original = keras.losses.Loss.__call__
        owner = threading.get_ident()
        inside = False
        own_divisors: list[Any] = []

        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            nonlocal inside
            # A loss that calls other losses has one share, its own. What a subclass with its own
            # `__call__` returns is its own business too: it counts by rows.
            foreign = threading.get_ident() != owner or type(loss).__call__ is not call
            if inside or foreign:
                return original(loss, y_true, y_pred, sample_weight)
            inside = True
            try:
                return weighted(loss, y_true, y_pred, sample_weight)
            finally:
                inside = False

        def weighted(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
            with _recorded_call(loss) as recorded:
                result = original(loss, y_true, y_pred, sample_weight)
            values = recorded[-1] if recorded else result
            mean = loss.reduction in _MEANS
            if keras.ops.ndim(values) == 0:
                masked = not mean and _keras.mask_of(y_pred) is not None
                if masked or sample_weight is not None:
                    raise _unknown(
                        loss, "it returns one number for all rows, and weights weigh rows"
                    )
                return result
            if not mean:
                return result / tf.cast(row_share, result.dtype)
            mask = _both(_keras.mask_of(y_pred), _keras.mask_of(values))
            by_weights = loss.reduction == "mean_with_sample_weight"
            counted = _product(mask, sample_weight if by_weights else None)
            if counted is None:
                _refuse_varying(loss, values, ragged)
                if trusted and _is_of_keras(loss):
                    return result
                return _of_all_rows(loss, result, values, _cut.rows_of(leaves[0]))
            divisor = tf.reduce_sum(counted)
            own_divisors.append(divisor)
            if divisors is None:
                return result
            total = divisors[len(own_divisors) - 1]
            if by_weights:
                # Not the mean times its share: weights of both signs may cancel in a micro-batch.
                with shadowed(loss, call=lambda *args, **kwargs: values, reduction="sum"):
                    result = original(loss, y_true, y_pred, sample_weight)
                divisor = tf.ones_like(divisor)
            share = tf.math.divide_no_nan(divisor, total) / tf.cast(row_share, tf.float64)
            return result * tf.cast(share, result.dtype)

        keras.losses.Loss.__call__ = call
        try:
            yield own_divisors
        finally:
            keras.losses.Loss.__call__ = original


@contextlib.contextmanager
def _recorded_call(loss: keras.losses.Loss) -> Iterator[list[Any]]:
    """Record the loss values that `loss.call` returns, before any reduction."""
    recorded: list[Any] = []
    call = loss.call

    def recording(*args: Any, **kwargs: Any) -> Any:
        values = call(*args, **kwargs)
        recorded.append(values)
        return values

    with shadowed(loss, call=recording):
        yield recorded


def _both(mask: Any | None, other: Any | None) -> Any | None:
    if mask is None or other is None:
        return other if mask is None else mask
    return tf.cast(mask, tf.bool) & tf.cast(other, tf.bool)


def _product(mask: Any | None, weights: Any | None) -> Any | None:
    """Return the weights of loss values, 0 where they are masked, as Keras broadcasts them."""
    if weights is not None:
        weights = tf.cast(tf.convert_to_tensor(weights), tf.float64)
    if mask is None:
        return weights
    mask = tf.cast(mask, tf.float64)
    if weights is None:
        return mask
    # Keras drops a last dimension of 1 that the other one lacks.
    if mask.shape.rank == weights.shape.rank + 1 and mask.shape[-1] == 1:
        mask = tf.squeeze(mask, -1)
    if weights.shape.rank == mask.shape.rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    return mask * weights


def _is_of_keras(loss: Any) -> bool:
    """Tell whether a loss is one of Keras' own, which have values for each row."""
    functions = (type(loss).call, getattr(loss, "fn", None))
    return all(f is None or f.__module__.startswith("keras.") for f in functions)


def _of_all_rows(loss: Any, result: Any, values: Any, rows: Any) -> Any:
    """Return `result`, if there are values for each row. XLA cannot raise, and gets NaN."""
    found = tf.shape(values, out_type=tf.int64)[0]
    check = tf.debugging.assert_equal(
        found,
        rows,
        message=f"The loss '{loss.name}' must return values for each row of a batch: its mean is "
        "over rows. To leave out some of them, give them a sample weight of 0, or use "
        "whole_batch_loss=True.",
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.where(tf.equal(found, rows), result, tf.cast(float("nan"), result.dtype))


def _refuse_varying(loss: Any, values: Any, ragged: bool) -> None:
    if ragged and any(size is None for size in values.shape[1:]):
        raise _unknown(loss, "rows of a ragged batch may have different numbers of loss values")


def _unknown(loss: Any, why: str) -> NotImplementedError:
    return NotImplementedError(
        f"The loss '{loss.name}' is not supported with accum > 1: {why}, so that the "
        "micro-batches of a batch have no shares that add up to it. Use whole_batch_loss=True, "
        f"or accum=1. Received: reduction={loss.reduction!r}"
    )
