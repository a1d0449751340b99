"""Whether cutting is exact, asked of a few rows before training.

Cutting a batch is exact if its loss is the sum of its micro-batches' weighted losses. That
cannot be read off a loss function, but it can be tried: a few rows of the first batch, as one
batch and as two micro-batches. This finds losses that couple rows (contrastive, soft F1), terms
of `add_loss` that are sums over rows, models whose rows depend on one another, and metrics that
are no sums over rows. It runs in a `keras.StatelessScope`, so that no Keras variable changes.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _cut, _keras, _moments, _shares, _trackers

_LEAST_ROWS, _MOST_ROWS = 3, 32
# Far above rounding, which differs between batch sizes, and far below what coupled rows do.
_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}
_LOW_PRECISION_TOLERANCE = 0.1


class _Trial(NamedTuple):
    """What a batch of a few rows gives, cut into micro-batches."""

    of_outputs: list[float]  # the loss of the model's outputs, of each micro-batch
    added: list[float]  # the losses that its layers add
    metrics: dict[str, list[float]]  # the results after all of them
    random: bool  # whether a seed moved
    moved: list[str]  # the paths of the weights that the forward passes moved


def refuse_inexact(model: keras.Model, batch: Any, accum: int, whole_batch_loss: bool) -> None:
    """Raise if the micro-batches of `batch` would not add up to it, warn if its metrics do not.

    Raises:
        NotImplementedError: If the loss of a few rows is not the sum of its parts.
    """
    few = few_rows(batch, accum)
    rows = int(_cut.rows(few))
    attempt = functools.partial(_try, model, few, outputs_only=whole_batch_loss)
    whole = attempt([(0, rows)], training=True)
    _warn_of(
        whole.moved,
        "Each forward pass in training updates {}. With accum > 1 that is once a micro-batch, and "
        "not once a batch as in `model.fit`.",
    )
    if rows < 2:
        return
    # Dropout: its draws differ. BatchNormalization normalizes by what it sees. At inference there
    # may be neither.
    training = not whole.random and not _moments.normalizations(model)
    whole = whole if training else attempt([(0, rows)], training=False)
    again = attempt([(0, rows)], training=training)
    close = _Close(model)
    if whole.random or not close.all(whole, again):
        return  # Random even at inference: it tells nothing.
    middle = max(1, rows // 3)  # Unequal parts: a mean of means is seen.
    parts = attempt([(0, middle), (middle, rows)], training=training)
    of_outputs = f"the loss {model.loss!r} of a batch"
    if whole_batch_loss:
        of_outputs = "a number that the model puts out for a row"
    for name, what in (
        ("of_outputs", of_outputs),
        ("added", "a loss that layers add (`add_loss`)"),
    ):
        total, pieces = getattr(whole, name), getattr(parts, name)
        if not close.sums(total, pieces, beside=[*whole.of_outputs, *whole.added]):
            raise NotImplementedError(
                f"With accum > 1, {what} must be a mean over its rows, and it is not: each row's "
                "part depends on the other rows, or the loss is their sum. "
                "whole_batch_loss=True takes the loss of whole batches. For a sum, return one "
                "value for each row from a `keras.losses.Loss` with "
                'reduction="sum"; else use accum=1. '
                f"Received: {sum(total):.6g} on {rows} rows of the first batch, against "
                f"{sum(pieces):.6g} for the same rows in two micro-batches"
            )
    _warn_of(
        [
            name
            for name in again.metrics  # The first trial has built some on the way.
            if not close.equal(again.metrics[name], parts.metrics[name])
        ],
        "The metrics {} of a batch are not those of its micro-batches together: what they report "
        "with accum > 1 is not what `model.fit` reports. A metric that counts rows, such as "
        "a `keras.metrics.Metric` with sums as its state, does not depend on how a batch is cut.",
    )


def _try(
    model: keras.Model,
    few: Any,
    cuts: list[tuple[int, int]],
    *,
    training: bool,
    outputs_only: bool,
) -> _Trial:
    of_outputs, added = [], []
    divisors = None if outputs_only else _divisors(model, few, cuts, training=training)
    with _stateless(model) as scope:
        before = dict(scope.state_mapping)
        model.reset_metrics()
        for cut in cuts:
            piece = _Piece(model, few, cut, training=training)
            share = piece.share
            added.append(share * sum(float(tf.reduce_sum(term)) for term in model.losses))
            with _trackers.withheld(model) as updates:
                loss = piece.whole_loss() if outputs_only else piece.loss(divisors)[0]
            if outputs_only:
                of_outputs.append(_checksum(piece.y_pred))
            else:
                of_outputs.append(share * float(tf.reduce_sum(loss)) - added[-1])
            model.compute_metrics(piece.x, piece.y, piece.y_pred, sample_weight=piece.sample_weight)
            # What a training step combines by rows and updates once.
            for update in [*piece.updates, *updates]:
                update.tracker.metric.update_state(update.value, sample_weight=share)
        metrics = {
            name: [float(value) for value in tf.reshape(result, [-1])]
            for name, result in _flat_results({} if outputs_only else model.get_metrics_result())
        }
        changed = {
            key for key, value in scope.state_mapping.items() if before.get(key) is not value
        }
    pooled = {id(v) for layer in _moments.normalizations(model) for v in layer.variables}
    weights = {id(variable): variable.path for variable in model.non_trainable_weights}
    seeds = changed - {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    moved = [path for key, path in weights.items() if key in changed - pooled]
    return _Trial(of_outputs, added, metrics, bool(seeds), moved)


def _stateless(model: keras.Model) -> keras.StatelessScope:
    """Return a scope in which the variables of `model` have their values, and do not change."""
    # Regularizers read from the mapping alone.
    state = [*model.variables, *model.metrics_variables]
    mapping = [(variable, tf.convert_to_tensor(variable.value)) for variable in state]
    return keras.StatelessScope(mapping, collect_losses=True)


class _Piece:
    """Some rows and the outputs of a model for them."""

    def __init__(
        self, model: keras.Model, few: Any, cut: tuple[int, int], *, training: bool
    ) -> None:
        self._model = model
        self._rows = _cut.take(few, *cut)
        self.share = float(_cut.shares(cut[1] - cut[0], _cut.rows(few)))
        self.x, self.y, self.sample_weight = keras.utils.unpack_x_y_sample_weight(self._rows)
        call = _keras.training_call(model) if training else model
        with _trackers.withheld(model) as self.updates:
            self.y_pred = call(self.x)

    def loss(self, divisors: Any) -> tuple[Any, list[Any]]:
        """Return the loss, weighted for its share by rows, and its own divisors."""
        with _shares.losses_by_share(self._rows, self.share, divisors) as own:
            loss = self.whole_loss()
        return loss, own

    def whole_loss(self) -> Any:
        """Return the loss of these rows as of a batch."""
        return _keras.compute_loss(self._model, self.x, self.y, self.y_pred, self.sample_weight)


def _divisors(
    model: keras.Model, few: Any, cuts: list[tuple[int, int]], *, training: bool
) -> Any | None:
    """Return the divisors of the losses of a few rows."""
    total: list[Any] = []
    with _stateless(model), _trackers.withheld(model):
        for cut in cuts:
            _, own = _Piece(model, few, cut, training=training).loss(None)
            if not own:
                return None
            total = own if not total else [a + b for a, b in zip(total, own, strict=True)]
    return tf.stack(total)


def _checksum(y_pred: Any) -> float:
    """Return a number that tells whether any output of a few rows has changed."""
    sums = [
        tf.reduce_sum(tf.abs(tf.cast(output, tf.float64)))
        for output in _cut.leaves(y_pred)
        if not isinstance(output, tf.RaggedTensor | tf.SparseTensor)
    ]
    return float(tf.add_n(sums)) if sums else 0.0


def _flat_results(results: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, result in results.items():
        if isinstance(result, dict):
            yield from _flat_results(result)
        else:
            yield name, result


class _Close:
    """Whether numbers are equal up to the rounding of a model's computations."""

    def __init__(self, model: keras.Model) -> None:
        layers = [model, *_keras.flatten_layers(model)]
        dtypes = {keras.backend.standardize_dtype(layer.compute_dtype) for layer in layers}
        self._tolerance = max(_TOLERANCE.get(d, _LOW_PRECISION_TOLERANCE) for d in dtypes)

    def sums(self, values: list[float], others: list[float], beside: Iterable[float] = ()) -> bool:
        total, other = sum(values), sum(others)
        if not math.isfinite(total) or not math.isfinite(other):
            return not math.isfinite(total)  # A batch without a loss tells nothing.
        # `beside` is what the values were taken from: a difference has the rounding of its terms.
        scale = max(sum(map(abs, numbers)) for numbers in (values, others, beside))
        return abs(total - other) <= self._tolerance * scale

    def equal(self, values: list[float], others: list[float]) -> bool:
        pairs = zip(values, others, strict=True)
        return all(self.sums([value], [other]) for value, other in pairs)

    def all(self, trial: _Trial, other: _Trial) -> bool:
        return self.sums(trial.of_outputs, other.of_outputs) and self.sums(trial.added, other.added)


def _warn_of(names: list[str], message: str) -> None:
    if names:
        warnings.warn(message.format(names), stacklevel=5)


def few_rows(batch: Any, accum: int) -> Any:
    """Return the first rows, at most a micro-batch: that many fit in memory, but at least three.

    Of a ragged batch, return two neighbours of different lengths.
    """
    for leaf in _cut.leaves(batch):
        if isinstance(leaf, tf.RaggedTensor):
            lengths = leaf.row_lengths().numpy()
            changes = (lengths[1:] != lengths[:-1]).nonzero()[0]
            if changes.size:
                return _cut.take(batch, int(changes[0]), int(changes[0]) + 2)
    rows = int(_cut.rows(batch))
    return _cut.take(batch, 0, min(rows, max(_LEAST_ROWS, min(rows // accum, _MOST_ROWS))))
