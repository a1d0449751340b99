"""`whole_batch_loss=True`: exact for any loss over outputs, also one that couples rows.

```
outputs = [model(micro_batch) for each micro-batch]         # no gradient, no activation is kept
loss, d_outputs = loss and gradient of the loss of the batch, on all outputs
for each micro-batch:
    gradient += gradient of sum(model(micro_batch) * its part of d_outputs)
```
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from accumloop import (
    _cut,
    _first_pass,
    _functions,
    _keras,
    _loop,
    _moments,
    _sums,
    _trackers,
    _withheld,
)

Logs = dict[str, Any]


class _Loss(NamedTuple):
    """The loss of a batch, and its gradients."""

    loss: Any
    numbers: list[_trackers.Number]
    of_outputs: list[Any]  # None for an output that the loss does not depend on
    of_weights: list[Any]  # past the outputs: regularizers, weights that the loss reads


class _TwoPasses:
    """The functions of the two passes, and what their traces have found."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._call = _keras.training_call(model)
        self.loss_trackers: list[_trackers.Tracker] = []
        self.plan = _withheld.Plan()
        self.outputs_of = _first_pass.FirstPass(model)

    def loss(self, batch: Any, outputs: _first_pass.Outputs) -> _Loss:
        """Return the loss of a whole batch."""
        model = self._model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        # What layers add belongs to micro-batches: the second pass has it, and `model.losses`
        # has not, as the first pass has cleared it.
        watched = [tensor for tensor in outputs.tensors if tensor.dtype.is_floating]
        weights = model.trainable_weights
        with (
            tf.GradientTape() as tape,
            _functions.traced_anew(),
            _trackers.withheld(model) as updates,
        ):
            tape.watch(watched)
            y_pred = self.outputs_of.y_pred(outputs)
            if model.loss is None and not _keras.is_own(model, "compute_loss"):
                loss = tf.add_n([tf.zeros([], keras.backend.floatx()), *model.losses])
            else:
                loss = _keras.compute_loss(model, x, y, y_pred, sample_weight)
            scaled = model.optimizer.scale_loss(loss)
        gradients = iter(tape.gradient(scaled, [*watched, *weights]))
        of_outputs = [
            next(gradients) if tensor.dtype.is_floating else None for tensor in outputs.tensors
        ]
        of_outputs = [None if g is None else tf.convert_to_tensor(g) for g in of_outputs]
        self.loss_trackers[:] = [update.tracker for update in updates]
        numbers = [_trackers.part_of(update, 1.0) for update in updates]
        return _Loss(loss, numbers, of_outputs, list(gradients))

    def backward(self, inputs: Any, share: Any, divisors: Any) -> _withheld.Outcome:
        """Return the gradients of a micro-batch, by those of its outputs."""
        model = self._model
        x, of_outputs = inputs
        with (
            tf.GradientTape() as tape,
            _functions.traced_anew(),
            _trackers.withheld(model) as updates,
            _moments.withheld(model) as moments,
        ):
            tensors = _cut.leaves(self._call(x))
            added = _added_losses(model) * share
            scaled = model.optimizer.scale_loss(added)
        wanted = [(t, g) for t, g in zip(tensors, of_outputs, strict=True) if g is not None]
        targets = [scaled, *(tensor for tensor, _ in wanted)]
        seeds = [tf.ones_like(scaled), *(gradient for _, gradient in wanted)]
        weights = model.trainable_weights
        gradients = tape.gradient(targets, weights, output_gradients=seeds) if weights else []
        for gradient, weight in zip(gradients, weights, strict=True):
            _sums.set_static_shape(gradient, weight.shape)
        return _withheld.Outcome(
            self.plan.parts([gradients], updates, moments, {"added": added}, share), [], {}
        )

    def apply(self, gradients: list[Any]) -> None:
        """Update the weights."""
        weights = self._model.trainable_weights
        if not weights:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return
        self._model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


def make_update(model: keras.Model) -> Callable[..., Logs]:
    """Return `update(batch, accum) -> logs`: two passes over the micro-batches of a batch."""
    passes = _TwoPasses(model)
    options = {"jit_compile": model.jit_compile}
    loss_of = _loop.as_function(model, passes.loss, **options)
    apply = _loop.as_function(model, passes.apply, **options)
    backward = _loop.as_function(model, passes.backward, **options)
    total = _loop.total_of(backward, model, has_divisors=False)

    def update(batch: Any, accum: Any) -> Logs:
        cut = _cut.Cut(batch, accum)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(cut.batch)
        outputs = passes.outputs_of(x, cut)
        whole = loss_of(cut.batch, outputs)
        inputs = (x, whole.of_outputs)
        parts = total(lambda index: (cut.of(inputs, index), cut.share(index)), cut.pieces)
        gradients = zip(whole.of_weights, parts.gradients[0], strict=True)
        apply([_sum(*pair) for pair in gradients])
        loss = whole.loss + tf.cast(parts.logs["added"], whole.loss.dtype)
        _keras.loss_tracker(model).update_state(loss, sample_weight=cut.rows)
        passes.plan.update_once(parts, cut.rows)
        for tracker, number in zip(passes.loss_trackers, whole.numbers, strict=True):
            _trackers.update_once(tracker, number, cut.rows)
        y_pred = passes.outputs_of.y_pred(outputs)
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return _loop.as_function(model, update)


def _added_losses(model: keras.Model) -> Any:
    """Return the sum of what layers have added, without regularizers, as float64."""
    regularizers = sum(weight.regularizer is not None for weight in model.trainable_weights)
    added = model.losses[: len(model.losses) - regularizers]
    total = tf.zeros([], tf.float64)
    for loss in added:
        total += tf.cast(tf.reduce_sum(loss), tf.float64)
    return total


def _sum(gradient: Any, other: Any) -> Any:
    """Return the sum of two gradients of a weight, as a tape does."""
    present = [part for part in (gradient, other) if part is not None]
    if len(present) < 2:
        return present[0] if present else None
    if all(isinstance(part, tf.IndexedSlices) for part in present):
        return tf.IndexedSlices(
            tf.concat([part.values for part in present], axis=0),
            tf.concat([part.indices for part in present], axis=0),
            gradient.dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(part) for part in present])
