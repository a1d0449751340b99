"""What differs between versions of Keras: its private names that accumloop needs, nowhere else.

Keras offers no public way to them. `tests/test_keras.py` says in words which one a version of
Keras lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.random import seed_generator

__all__ = ["in_stateless_scope"]


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return every layer of `model`, however deep: `model.layers` stops at the first level."""
    return list(model._flatten_layers(include_self=False))


def is_own(model: keras.Model, name: str) -> bool:
    """Tell whether a model overrides a method of Keras."""
    method = getattr(getattr(model, name), "__func__", None)
    return method is not getattr(keras.Model, name)


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Return the metric behind `logs["loss"]`: a model may override `metrics` and leave it out."""
    return model._loss_tracker


def output_loss_trackers(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics behind `logs["<output>_loss"]`, none before the loss is built."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """Return `model.compute_loss(...)` in training, whose overrides may lack `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=True)


def training_call(model: keras.Model) -> Callable[[Any], Any]:
    """Return the forward pass in training mode, where the model's `call` knows of modes."""
    return (lambda x: model(x, training=True)) if model._call_has_training_arg else model


def mask_of(tensor: Any) -> Any | None:
    """Return the mask that layers and losses attach to what they return, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any | None) -> None:
    """Attach a mask to an output, as layers do."""
    if mask is not None:
        tensor._keras_mask = mask


def update_renorm_statistics(layer: Any, mean: Any, variance: Any) -> None:
    """Move the statistics of a `BatchNormalization(renorm=True)` by the moments of a batch."""
    layer._update_renorm_statistics(mean, variance)


def restored_epoch(model: keras.Model) -> int | None:
    """Return the epoch that `keras.callbacks.BackupAndRestore` found in its backup, or None."""
    return model._initial_epoch


def forget_restored_epoch(model: keras.Model) -> None:
    """Clear that epoch: Keras never does, and the next `fit` would skip as many epochs again."""
    model._initial_epoch = None


def debugging_limit(name: str) -> int | None:
    """Return `keras.config.max_epochs()` or `max_steps_per_epoch()`: Keras 3.8 has neither."""
    limit = getattr(keras.config, name, None)
    return limit() if limit else None


def global_seed_generator() -> keras.random.SeedGenerator:
    """Return the generator of layers and ops that have no seed of their own, made if need be."""
    return seed_generator.global_seed_generator()


def global_seed_variables() -> list[keras.Variable]:
    """Return the variable of that generator, or none if nothing has drawn from it yet."""
    made = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return [] if made is None else [made.state]


def callback_state() -> dict[type, list[str]]:
    """Return the attributes of callbacks that later epochs depend on, and Keras saves nowhere."""
    stopping = ["wait", "best", "best_weights", "best_epoch", "stopped_epoch"]
    checkpoint = ["best", "_batches_seen_since_last_saving", "_last_batch_seen"]
    return {
        keras.callbacks.EarlyStopping: stopping,
        keras.callbacks.ReduceLROnPlateau: ["wait", "best", "cooldown_counter"],
        keras.callbacks.ModelCheckpoint: checkpoint,
        keras.callbacks.SwapEMAWeights: ["_ema_weights_in_model"],
        keras.callbacks.TensorBoard: ["_global_train_batch", "_global_test_batch"],
    }
