"""Before training: build what is not built, and ask a few rows whether cutting is exact.

Cutting a batch is exact if its loss is the sum of its micro-batches' weighted losses. That
cannot be read off a loss function, but it can be tried: a few rows of the first batch, as
one batch and as two micro-batches. This finds losses that couple rows (contrastive, soft F1), terms
of `add_loss` that are sums over rows, and models whose rows depend on one another. Nothing of
the model changes: all of it runs in a `keras.StatelessScope`.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _checks, _cut, _keras, _step

_ROWS = 3
# Far above rounding, which differs between batch sizes, and far below what coupled rows do.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


class _Trial(NamedTuple):
    """The loss of a few rows: of the model's outputs, and added by its layers."""

    of_outputs: float
    added: float
    random: bool  # whether computing it moved a seed


def build(model: keras.Model, batch: Any) -> None:
    """Create the variables of model, metrics and optimizer, as they are when `fit` has begun.

    Callbacks need them in `on_train_begin`. A model with its own `train_step` is left to build
    itself in its first step, as under `fit`: what it calls its layers with is its own business.
    """
    if _checks.own_methods(model):
        return
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(_few(batch))
    if not all(layer.built for layer in [model, *_keras.flatten_layers(model)]):
        # Variables that are created in the scope get their initial values when it ends.
        with keras.StatelessScope():
            model(x)
    with keras.StatelessScope(_state(model), collect_losses=True):
        y_pred = model(x)
        model.compute_loss(x, y, y_pred, sample_weight)
        model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    if not model.optimizer.built:
        # In the scope in which its first update would have built it: paths are those of fit.
        with keras.name_scope(model.optimizer.name, caller=model.optimizer):
            model.optimizer.build(model.trainable_variables)


def refuse_inexact(model: keras.Model, batch: Any) -> None:
    """Raise if the micro-batches of `batch` would not add up to it.

    Raises:
        NotImplementedError: If the loss of a few rows is not the sum of its parts.
    """
    few = _few(batch)
    rows = int(_cut.rows(few))
    whole = _try(model, few, rows)
    _warn_of_moving_state(model, few)
    if rows < 2:
        return
    parts = [_try(model, _cut.take(few, *bounds), rows) for bounds in ((0, 1), (1, rows))]
    again = _try(model, few, rows)
    if whole.random or whole != again:
        return  # Random even outside training: its losses tell nothing.
    tolerance = _tolerance(model)
    for name, what in (
        ("of_outputs", f"the loss {model.loss!r} of a batch"),
        ("added", "a loss that layers add (`add_loss`)"),
    ):
        total, pieces = getattr(whole, name), [getattr(part, name) for part in parts]
        scale = max(abs(total), sum(map(abs, pieces)))
        if math.isfinite(scale) and abs(total - sum(pieces)) > tolerance * scale:
            raise NotImplementedError(
                f"With accum > 1, {what} must be a mean over its rows, and it is not: each row's "
                "part depends on the other rows, or the loss is their sum. For a sum, use "
                'a `keras.losses.Loss` with reduction="sum"; else use accum=1. '
                f"Received: {total:.6g} on {rows} rows of the first batch, against "
                f"{sum(pieces):.6g} for the same rows in two micro-batches"
            )


def _try(model: keras.Model, few: Any, batch_rows: int) -> _Trial:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(few)
    with keras.StatelessScope(_state(model), collect_losses=True) as scope:
        before = dict(scope.state_mapping)
        y_pred = model(x)
        loss, _ = _step.weighted_loss(model, x, y, y_pred, sample_weight, batch_rows)
        added = sum(float(tf.reduce_sum(term)) for term in model.losses)
        random = any(
            before.get(variable) is not value for variable, value in scope.state_mapping.items()
        )
    added *= int(_cut.rows(few)) / batch_rows
    return _Trial(float(tf.reduce_sum(loss)) - added, added, random)


def _warn_of_moving_state(model: keras.Model, few: Any) -> None:
    """Warn of variables that each forward pass moves: they will move once a micro-batch."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(few)
    with keras.StatelessScope(_state(model)) as scope:
        before = dict(scope.state_mapping)
        _step.training_call(model)(x)
        moved = [
            variable.path
            for variable in model.non_trainable_weights
            if scope.get_current_value(variable) is not before[id(variable)]
        ]
    if moved:
        warnings.warn(
            f"Each forward pass in training updates {moved}. With accum > 1 that is once a "
            "micro-batch, and not once a batch as in `model.fit`.",
            stacklevel=2,
        )


def _state(model: keras.Model) -> list[tuple[keras.Variable, Any]]:
    return [(variable, tf.convert_to_tensor(variable.value)) for variable in model.variables]


def _few(batch: Any) -> Any:
    """Return the first three rows; of a ragged batch, two neighbours of different lengths."""
    for leaf in _cut.leaves(batch):
        if isinstance(leaf, tf.RaggedTensor):
            lengths = leaf.row_lengths().numpy()
            changes = (lengths[1:] != lengths[:-1]).nonzero()[0]
            if changes.size:
                return _cut.take(batch, int(changes[0]), int(changes[0]) + 2)
    return _cut.take(batch, 0, min(_ROWS, int(_cut.rows(batch))))


def _tolerance(model: keras.Model) -> float:
    layers = [model, *_keras.flatten_layers(model)]
    dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers}
    return max(_TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE) for dtype in dtypes)
