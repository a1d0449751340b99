"""The part that a micro-batch has in its batch's loss.

```
loss of a batch = sum over micro-batches of share * loss of the micro-batch
```

A loss with a mean reduction is a sum over a divisor, and a micro-batch's share in it is its
divisor over the batch's: for an unmasked mean, its rows over the batch's rows, because the
inner sizes of the loss values are common to a batch. A sum (`reduction="sum"` or None) has no
divisor: its share is 1. Everything else that `compute_loss` adds, regularizers and `add_loss`,
counts by rows, so that the micro-batches of a batch count a weight regularizer once.

So the whole of `compute_loss` is weighted by rows, and each `keras.losses.Loss` whose share is
another one returns its value times share / row share. Its `__call__` is wrapped while
`compute_loss` runs: that reaches the losses of every output, whatever their nesting, and those
that an own `compute_loss` calls, with public names alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from accumloop import _keras

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
# Loss.__call__ is one for all threads: only one of them may have it wrapped.
_lock = threading.RLock()


def of_rows(rows: Any, batch_rows: Any) -> Any:
    """Return the shares of micro-batches by their rows, int64 tensors, as float64."""
    # In float64, so that a loss in half precision has no rounded numbers of rows. A batch without
    # rows is one micro-batch: its regularizers count.
    rows, batch_rows = (tf.cast(tf.maximum(count, 1), tf.float64) for count in (rows, batch_rows))
    return rows / batch_rows


@contextlib.contextmanager
def losses_by_share(row_share: Any, rows: Callable[[], Any], *, ragged: bool) -> Iterator[None]:
    """Let each loss return its value times its share over the share of rows.

    Args:
        row_share: The share of the micro-batch by its rows, a float scalar tensor.
        rows: Returns the rows of the micro-batch, an int64 scalar tensor.
        ragged: Whether the batch holds ragged or sparse tensors, so that inner sizes may
            differ from micro-batch to micro-batch.

    Raises:
        NotImplementedError: Within, by a loss whose share is not known from the rows.
    """
    with _lock:
        original = keras.losses.Loss.__call__
        owner = threading.get_ident()
        inside = False

        def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            nonlocal inside
            if inside or threading.get_ident() != owner:
                return original(loss, y_true, y_pred, sample_weight)
            inside = True  # A loss that calls other losses has one share: its own.
            try:
                with _recorded_call(loss) as recorded:
                    result = original(loss, y_true, y_pred, sample_weight)
            finally:
                inside = False
            values = recorded[-1] if recorded else result
            _refuse_unknown_share(loss, y_pred, values, sample_weight, ragged)
            if _is_reduced(values):
                return result
            if loss.reduction not in _MEANS:
                return result / tf.cast(row_share, result.dtype)
            if _is_of_keras(loss):
                return result
            with tf.control_dependencies(_checks_of_rows(loss, values, rows())):
                return tf.identity(result)

        keras.losses.Loss.__call__ = call
        try:
            yield
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

    own = vars(loss).get("call")
    loss.call = recording
    try:
        yield recorded
    finally:
        if own is None:
            del loss.call
        else:
            loss.call = own


def _is_reduced(values: Any) -> bool:
    return keras.ops.ndim(values) == 0


def _is_of_keras(loss: Any) -> bool:
    """Tell whether a loss is one of Keras' own, which have values for each row."""
    return getattr(loss, "fn", type(loss)).__module__.startswith("keras.")


def _checks_of_rows(loss: Any, values: Any, rows: Any) -> list[Any]:
    check = tf.debugging.assert_equal(
        tf.shape(values, out_type=tf.int64)[0],
        rows,
        message=f"The loss '{loss.name}' must return values for each row of a batch: its mean is "
        "over rows. To leave out some of them, give them a sample weight of 0, or use accum=1.",
    )
    return [] if check is None else [check]


def _refuse_unknown_share(
    loss: Any, y_pred: Any, values: Any, sample_weight: Any, ragged: bool
) -> None:
    if loss.reduction not in _MEANS:
        return
    masked = _keras.mask_of(y_pred) is not None or _keras.mask_of(values) is not None
    weighted = loss.reduction == "mean_with_sample_weight" and sample_weight is not None
    weighted |= _is_reduced(values) and sample_weight is not None
    varying = ragged and any(size is None for size in values.shape[1:])
    if masked:
        what = "the mean is over unmasked values"
    elif weighted:
        what = "sample weights enter its divisor, or weigh what is a mean already"
    elif varying:
        what = "rows of a ragged batch may have different numbers of loss values"
    else:
        return
    raise NotImplementedError(
        f"The loss '{loss.name}' is not supported with accum > 1 yet: {what}, so that the "
        "micro-batches of a batch have shares that their rows do not tell. "
        'Use accum=1 or reduction="sum". '
        f"Received: reduction={loss.reduction!r}"
    )
