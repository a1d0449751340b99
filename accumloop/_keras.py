"""What differs between versions of Keras: its private names that accumloop needs, nowhere else.

Keras offers no public way to them. `tests/test_keras.py` says in words which one a version of
Keras lacks.
"""

from __future__ import annotations

from typing import Any

import keras


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Return every layer of `model`, however deep: `model.layers` stops at the first level."""
    return list(model._flatten_layers(include_self=False))


def loss_tracker(model: keras.Model) -> keras.metrics.Metric:
    """Return the metric behind `logs["loss"]`: a model may override `metrics` and leave it out."""
    return model._loss_tracker


def mask_of(tensor: Any) -> Any | None:
    """Return the mask that layers and losses attach to what they return, or None."""
    return getattr(tensor, "_keras_mask", None)


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
