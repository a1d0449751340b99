"""Whether cutting is exact, asked of a few rows before training.

Cutting a batch is exact if its loss is the sum of its micro-batches' weighted losses. That
cannot be read off a loss function, but it can be tried: a few rows of the first batch, as one
batch and as two micro-batches. This finds losses that couple rows (contrastive, soft F1), terms
of `add_loss` that are sums over rows, models whose rows depend on one another, and metrics that
are no sums over rows. It runs in a `keras.StatelessScope`, so that no Keras variable changes.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras

from accumloop import _attempt, _close, _cut, _keras, _quiet


def refuse_inexact(model: keras.Model, batch: Any, accum: int, whole_batch_loss: bool) -> None:
    """Raise if the micro-batches of `batch` would not add up to it, warn if its metrics do not.

    Raises:
        NotImplementedError: If the loss of a few rows is not the sum of its parts.
    """
    few = _attempt.few_rows(batch, accum)
    rows = int(_cut.rows(few))
    attempt = functools.partial(_attempt.attempt, model, few, outputs_only=whole_batch_loss)
    whole = attempt([(0, rows)], training=True)
    moved = whole.moved
    _warn_of(
        moved,
        "Each forward pass in training updates {}. With accum > 1 that is once a micro-batch, and "
        "not once a batch as in `model.fit`.",
    )
    if rows < 2:
        return
    training = True
    with contextlib.ExitStack() as stack:
        if whole.random or _quiet.normalizes(model):
            # Dropout: its draws differ. BatchNormalization normalizes by what it sees.
            stack.enter_context(_quiet.quiet(model))
            whole = attempt([(0, rows)], training=True)
            training = not whole.random
            if not training:
                whole = attempt([(0, rows)], training=False)
        _compare(model, few, attempt, whole, moved, training, whole_batch_loss)


def _compare(
    model: keras.Model,
    few: Any,
    attempt: Callable[..., _attempt.Attempt],
    whole: _attempt.Attempt,
    moved: list[str],
    training: bool,
    whole_batch_loss: bool,
) -> None:
    """Compare a trial of a few rows with one of the same rows in two micro-batches."""
    rows = int(_cut.rows(few))
    again = attempt([(0, rows)], training=training)
    close = _close.Close(model)
    if whole.random or not _same(close, whole, again):
        return  # Random even at inference: it tells nothing.
    middle = max(1, rows // 3)  # Unequal parts: a mean of means is seen.
    cuts = [(0, middle), (middle, rows)]
    parts = attempt(cuts, training=training)
    # Where rows depend on one another by more than rounding, that explains no other loss.
    independent = close.tensors(
        _attempt.dense(whole.outputs), _attempt.dense([_attempt.together(parts.outputs)])
    )
    beside = [*whole.of_outputs, *whole.added]
    for name in ("of_outputs", "added"):
        total, pieces = getattr(whole, name), getattr(parts, name)
        if close.sums(total, pieces, beside, exactly=not independent):
            continue
        if moved:
            raise _assigns(moved)
        if name == "added":
            raise _no_mean("a loss that layers add (`add_loss`)", _ONLY_ONE, total, pieces, rows)
        if whole_batch_loss:
            raise _coupled_outputs(total, pieces, rows)
        raise _no_mean(_loss_in_words(model), _OF_WHOLE_BATCHES, total, pieces, rows)
    of_keras = model.loss is not None and not _keras.is_own(model, "compute_loss")
    if independent and of_keras and not whole_batch_loss:
        _compare_losses(model, few, cuts, parts.outputs)
    _warn_of(
        [
            name
            for name in again.metrics  # The first trial has built some on the way.
            if not close.all(again.metrics[name], parts.metrics[name])
        ],
        "The metrics {} of a batch are not those of its micro-batches together: what they report "
        "with accum > 1 is not what `model.fit` reports. A metric that counts rows, such as "
        "a `keras.metrics.Metric` with sums as its state, does not depend on how a batch is cut.",
    )


def _compare_losses(
    model: keras.Model, few: Any, cuts: list[tuple[int, int]], outputs: list[Any]
) -> None:
    """Compare the loss of the same outputs, and its gradient: there only the loss can differ."""
    rows = cuts[-1][-1]
    # Without the logits that a softmax attaches: a loss that finds them asks nothing of outputs.
    outputs = [_attempt.together([part]) for part in outputs]
    whole, whole_gradients = _attempt.loss_of(model, few, [(0, rows)], [_attempt.together(outputs)])
    parts, gradients = _attempt.loss_of(model, few, cuts, outputs)
    if not (_close.sums(whole, parts) and _close.gradients(whole_gradients, gradients)):
        what = f"{_loss_in_words(model)}, and its gradient,"
        numbers = (list(map(float, whole)), list(map(float, parts)))
        raise _no_mean(what, _OF_WHOLE_BATCHES, *numbers, rows)


def _loss_in_words(model: keras.Model) -> str:
    if _keras.is_own(model, "compute_loss"):
        return f"the loss of a batch, by `{type(model).__name__}.compute_loss`,"
    return f"the loss {model.loss!r} of a batch"


_ONLY_ONE = "For what depends on a whole batch, use accum=1. "
_OF_WHOLE_BATCHES = (
    "whole_batch_loss=True takes the loss of whole batches, which helps if it is the loss, and no "
    "layer, that couples rows. For a sum, return one value for each row from a "
    '`keras.losses.Loss` with reduction="sum"; else use accum=1. '
)


def _no_mean(
    what: str, advice: str, whole: list[float], parts: list[float], rows: int
) -> NotImplementedError:
    return NotImplementedError(
        f"With accum > 1, {what} must be a mean over its rows, and it is not: each row's part "
        f"depends on the other rows, or the loss is their sum. {advice}Received: "
        f"{sum(whole):.6g} on {rows} rows of the first batch, against {sum(parts):.6g} for the "
        "same rows in two micro-batches"
    )


def _coupled_outputs(whole: list[float], parts: list[float], rows: int) -> NotImplementedError:
    return NotImplementedError(
        "With accum > 1, what a model puts out for a row must not depend on the other rows of "
        "its batch, and a layer couples them. With whole_batch_loss=True only the loss may: use "
        f"accum=1. Received: outputs whose sizes add up to {sum(whole):.6g} on {rows} rows of the "
        f"first batch, and to {sum(parts):.6g} for the same rows in two micro-batches"
    )


def _assigns(moved: list[str]) -> NotImplementedError:
    return NotImplementedError(
        "With accum > 1, a forward pass must not depend on how often it is run, and a layer "
        "assigns to variables in it, on which the loss depends. Use accum=1. Received: "
        f"assignments to {moved}"
    )


def _same(close: _close.Close, trial: _attempt.Attempt, other: _attempt.Attempt) -> bool:
    return close.sums(trial.of_outputs, other.of_outputs) and close.sums(trial.added, other.added)


def _warn_of(names: list[str], message: str) -> None:
    if names:
        warnings.warn(message.format(names), stacklevel=5)
