"""Before training: create the variables that callbacks need in `on_train_begin`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from accumloop import _checks, _keras, _step, _trial


def build(model: keras.Model, element_spec: Any, batch: Any, accum: int) -> None:
    """Create the variables of model and optimizer, which callbacks need in `on_train_begin`.

    By a trace, as the first step of `fit` does, and without running anything. Metrics are built
    in the step. A model with its own `train_step` is left to build itself in its first step: what
    it calls its layers with is its own business. So is one that runs eagerly, and may not be
    traced; only to be cut it is run on a few rows.
    """
    if _checks.is_own(model, "train_step"):
        return
    if not all(layer.built for layer in [model, *_keras.flatten_layers(model)]):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
        if not model.run_eagerly:
            call = tf.autograph.experimental.do_not_convert(_keras.training_call(model))
            # What has no shape is missing: a None, or an Optional in its place.
            x = tf.nest.map_structure(lambda spec: spec if hasattr(spec, "shape") else None, x)
            tf.function(call).get_concrete_function(x)
        elif accum > 1:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(_trial.few_rows(batch, accum))
            model(x)
        else:
            return
    if not model.optimizer.built:
        # In the scope in which its first update would have built it: paths are those of fit.
        with keras.name_scope(model.optimizer.name, caller=model.optimizer):
            model.optimizer.build(model.trainable_variables)


def build_by_step(model: keras.Model, element_spec: Any, step: _step.Step) -> None:
    """Create the variables of a model with its own `train_step`, by a trace of its update.

    It is the trace that training will use.
    """
    if not model.run_eagerly:
        step.update.get_concrete_function(element_spec, tf.TensorSpec([], tf.int64))
