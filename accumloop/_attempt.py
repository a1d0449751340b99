"""A forward pass and a loss of a few rows, as one batch or cut, in which no variable changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import _cut, _keras, _moments, _shares, _trackers

_LEAST_ROWS, _MOST_ROWS = 3, 32


class Attempt(NamedTuple):
    """What a batch of a few rows gives, cut into micro-batches."""

    of_outputs: list[float]  # the loss of the model's outputs, of each micro-batch
    added: list[float]  # the losses that its layers add
    metrics: dict[str, list[float]]  # the results after all of them
    random: bool  # whether a seed moved
    moved: list[str]  # the variables that the forward passes moved
    outputs: list[Any]  # of each micro-batch, as the model returns them


def attempt(
    model: keras.Model,
    few: Any,
    cuts: list[tuple[int, int]],
    *,
    training: bool,
    outputs_only: bool,
) -> Attempt:
    of_outputs, added, outputs = [], [], []
    divisors = None if outputs_only else _divisors(model, few, cuts, training=training)
    with _stateless(model) as scope:
        before = dict(scope.state_mapping)
        model.reset_metrics()
        for cut in cuts:
            piece = _Piece(model, few, cut, training=training)
            share = piece.share
            outputs.append(piece.y_pred)
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
    listed = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    unlisted = {key: scope.state_mapping[key] for key in changed - listed}
    # A seed generator need not be listed: the global one, or that of a function.
    seeds = [key for key, value in unlisted.items() if value.dtype.is_integer]
    moved = [path for key, path in weights.items() if key in changed - pooled]
    if len(unlisted) > len(seeds):
        moved.append("a variable that the model does not list")
    return Attempt(of_outputs, added, metrics, bool(seeds), moved, outputs)


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


def loss_of(
    model: keras.Model, few: Any, cuts: list[tuple[int, int]], outputs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the parts of the loss of given outputs, and the gradients of their sum by these."""
    divisors: Any = None
    for _ in "ab":  # The divisors have to be known before.
        total: list[Any] = []
        with _stateless(model), _trackers.withheld(model), tf.GradientTape() as tape:
            floating = [leaf for leaf in _cut.leaves(outputs) if _has_gradient(leaf)]
            tape.watch(floating)
            parts = []
            for cut, y_pred in zip(cuts, outputs, strict=True):
                rows = _cut.take(few, *cut)
                x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(rows)
                share = float(_cut.shares(cut[1] - cut[0], _cut.rows(few)))
                with _shares.losses_by_share(rows, share, divisors) as own:
                    loss = _keras.compute_loss(model, x, y, y_pred, sample_weight)
                parts.append(share * tf.reduce_sum(loss))
                total = own if not total else [a + b for a, b in zip(total, own, strict=True)]
            loss = tf.add_n(parts)
        divisors = tf.stack(total) if total else None
        if divisors is None:
            break
    gradients = tape.gradient(loss, floating, unconnected_gradients="zero")
    kinds = len(floating) // len(outputs)
    return parts, [tf.concat(gradients[kind::kinds], axis=0) for kind in range(kinds)]


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating and bool(leaf.shape.rank)


def together(outputs: list[Any]) -> Any:
    """Return the outputs of micro-batches put together, with their masks."""

    def together(*parts: Any) -> Any:
        if parts[0] is None or isinstance(parts[0], tf.SparseTensor) or not parts[0].shape.rank:
            return parts[0]
        if len({tuple(part.shape[1:]) for part in parts}) > 1:
            return None  # They do not fit together: their shape depends on the other rows.
        whole = tf.concat(parts, axis=0)
        masks = [_keras.mask_of(part) for part in parts]
        if all(mask is not None for mask in masks):
            _keras.set_mask(whole, tf.concat(masks, axis=0))
        return whole

    return tf.nest.map_structure(together, *outputs)


def dense(outputs: list[Any]) -> list[Any]:
    flat = [getattr(leaf, "flat_values", leaf) for leaf in _cut.leaves(outputs)]
    return [leaf for leaf in flat if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string]


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
