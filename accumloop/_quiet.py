"""A model in training without what differs from pass to pass: draws, and statistics of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from accumloop import _keras, _moments
from accumloop._shadow import shadowed

# Dropout and its kin, Gaussian noise, cells of recurrent layers.
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")


def normalizes(model: keras.Model) -> bool:
    """Tell whether a layer normalizes by the statistics of what it sees in training."""
    return any(layer.trainable for layer in _moments.normalizations(model))


@contextlib.contextmanager
def quiet(model: keras.Model) -> Iterator[None]:
    """Let no layer of Keras draw, and no `BatchNormalization` look at its batch."""
    with contextlib.ExitStack() as stack:
        for layer in _moments.normalizations(model):
            stack.enter_context(shadowed(layer, call=_inference_of(layer)))
        for layer in _keras.flatten_layers(model):
            own = vars(layer)
            rates = [name for name in _RATES if isinstance(own.get(name), float | int)]
            if rates and type(layer).__module__.startswith("keras."):
                stack.enter_context(shadowed(layer, **dict.fromkeys(rates, 0.0)))
        yield


def _inference_of(layer: keras.layers.BatchNormalization) -> Any:
    call = layer.call

    def inference(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return call(inputs, training=False, mask=mask)

    return inference
