"""Before training: a model that is built, and a step for batches that are cut exactly."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from accumloop import _attempt, _checks, _cut, _functions, _keras, _step, _trial


def prepared_step(
    model: keras.Model, element_spec: Any, batch: Any, accum: int, whole_batch_loss: bool
) -> _step.Step:
    """Return the step of a model that is built, for batches that are known to be cut exactly.

    Args:
        model: A compiled model.
        element_spec: The spec of the batches.
        batch: The first of them, or None if there is none.
        accum: Number of micro-batches.
        whole_batch_loss: As in `train`.
    """
    steps = _step.steps_of(model)
    cuts = accum > 1
    whole_batch_loss = whole_batch_loss and cuts  # Of one micro-batch it is the same step.
    key = (cuts, whole_batch_loss, model.run_eagerly, model.jit_compile, model.steps_per_execution)
    prepared = (*key, str(element_spec))
    if key not in steps.made:
        steps.made[key] = _step.make_step(model, cuts, whole_batch_loss)
    if batch is not None:
        batch = _cut.without_optionals(batch)
        _checks.first_batch(batch, element_spec)
    if batch is not None and prepared not in steps.prepared:
        if cuts and _keras.is_own(model, "train_step"):
            steps.made[key].look(element_spec)
            _checks.cut_exactly(model, whole_batch_loss)
        else:
            _build(model, element_spec, batch, accum)
            if cuts:
                # Again, for layers that have been built only now.
                _checks.cut_exactly(model, whole_batch_loss)
                with _functions.traced_anew():
                    _trial.refuse_inexact(model, batch, accum, whole_batch_loss)
        if int(_cut.rows(batch)) > 1:  # One row tells nothing of the others: ask again.
            steps.prepared.add(prepared)
    return steps.made[key]


def build_all(model: keras.Model, step: _step.Step, element_spec: Any, batch: Any) -> None:
    """Create all variables that a step creates, those of metrics too, to be given saved values.

    By the trace that training will use. A model that runs eagerly is trained on a batch.
    """
    if model.run_eagerly:
        step.update(batch, _cut.pieces_of(1))
    else:
        step.update.get_concrete_function(element_spec, tf.TensorSpec([], tf.int64))


def _build(model: keras.Model, element_spec: Any, batch: Any, accum: int) -> None:
    """Create the variables of model and optimizer, which callbacks need in `on_train_begin`.

    By a trace, as the first step of `fit` does, and without running anything. Metrics are built
    in the step. A model with its own `train_step` is left to build itself in its first step: what
    it calls its layers with is its own business. So is one that runs eagerly, and may not be
    traced; only to be cut it is run on a few rows.
    """
    if _keras.is_own(model, "train_step"):
        return
    if not all(layer.built for layer in [model, *_keras.flatten_layers(model)]):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
        if not model.run_eagerly:
            call = tf.autograph.experimental.do_not_convert(_keras.training_call(model))
            x = _cut.without_optionals_of(x)
            tf.function(call).get_concrete_function(x)
        elif accum > 1:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(_attempt.few_rows(batch, accum))
            model(x)
        else:
            return
    if not model.optimizer.built:
        # In the scope in which its first update would have built it: paths are those of fit.
        with keras.name_scope(model.optimizer.name, caller=model.optimizer):
            model.optimizer.build(model.trainable_variables)
