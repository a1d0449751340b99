"""The private names of Keras that accumloop uses: a Keras without one fails here, in words."""

import keras
import pytest

from accumloop import _keras


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input([5]), keras.Sequential([keras.layers.Dense(2)])])
    model.compile("sgd", "mse")
    return model


def lacks(name, why):
    return f"keras {keras.__version__} has no `{name}`: {why}"


def test_flatten_layers(model):
    assert hasattr(model, "_flatten_layers"), lacks(
        "Model._flatten_layers", "nested BatchNormalization and stateful layers cannot be found"
    )
    kinds = [type(layer) for layer in _keras.flatten_layers(model)]
    assert keras.layers.Dense in kinds


def test_loss_tracker(model):
    assert hasattr(model, "_loss_tracker"), lacks(
        "Model._loss_tracker", "the loss of a batch cannot be reported"
    )
    assert _keras.loss_tracker(model).name == "loss"
    before = _keras.loss_tracker(model)
    model.compile("sgd", "mse")
    assert _keras.loss_tracker(model) is not before, "a recompile is not seen"


def test_mask_of():
    masked = keras.layers.Masking()(keras.ops.ones([2, 3, 4]))
    assert _keras.mask_of(masked) is not None, lacks(
        "_keras_mask", "a masked loss would be taken for an unmasked one"
    )
    assert _keras.mask_of(keras.ops.ones([2])) is None


def test_restored_epoch(model, tmp_path):
    assert hasattr(model, "_initial_epoch"), lacks(
        "Model._initial_epoch", "BackupAndRestore cannot say where to go on"
    )
    assert _keras.restored_epoch(model) is None
    model._initial_epoch = 3
    assert _keras.restored_epoch(model) == 3
    _keras.forget_restored_epoch(model)
    assert _keras.restored_epoch(model) is None
