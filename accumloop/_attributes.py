"""What a model and its layers have as attributes, where Keras keeps no list of it."""

from __future__ import annotations

from typing import Any

import keras

from accumloop import _keras


def held(model: keras.Model, kind: type) -> list[Any]:
    """Return the objects of a kind that a model, or a layer of it, has, in lists and dicts too."""
    found: dict[int, Any] = {}

    def look(value: Any, depth: int) -> None:
        if isinstance(value, kind):
            found.setdefault(id(value), value)
        elif depth and isinstance(value, dict):
            for item in list(value.values()):
                look(item, depth - 1)
        elif depth and isinstance(value, list | tuple | set):
            for item in list(value):
                look(item, depth - 1)

    for layer in [model, *_keras.flatten_layers(model)]:
        for value in list(vars(layer).values()):
            look(value, depth=3)
    return list(found.values())
