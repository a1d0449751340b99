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


def test_output_loss_trackers():
    inputs = keras.Input([5])
    outputs = [keras.layers.Dense(2, name=name)(inputs) for name in ("a", "b")]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mse"])
    assert hasattr(model, "_compile_loss"), lacks(
        "Model._compile_loss", "the losses of outputs cannot be weighted by rows"
    )
    assert _keras.output_loss_trackers(model) == []
    x, y = keras.ops.ones([3, 5]), [keras.ops.ones([3, 2])] * 2
    _keras.compute_loss(model, x, y, model(x), None)
    names = [metric.name for metric in _keras.output_loss_trackers(model)]
    assert names == ["a_loss", "b_loss"]


def test_compute_loss(model):
    assert hasattr(model, "_compute_loss"), lacks(
        "Model._compute_loss", "an override of compute_loss without `training` cannot be called"
    )
    assert float(_keras.compute_loss(model, None, keras.ops.ones([3, 2]), 0.0, None)) == 1.0


def test_training_call(model):
    assert hasattr(model, "_call_has_training_arg"), lacks(
        "Model._call_has_training_arg", "whether a model knows of modes cannot be told"
    )
    assert _keras.training_call(model)(keras.ops.ones([3, 5])).shape == (3, 2)


def test_set_mask():
    tensor, mask = keras.ops.ones([2]), keras.ops.ones([2], "bool")
    _keras.set_mask(tensor, None)
    assert _keras.mask_of(tensor) is None
    _keras.set_mask(tensor, mask)
    assert _keras.mask_of(tensor) is mask


def test_update_renorm_statistics():
    layer = keras.layers.BatchNormalization
    assert not hasattr(layer, "renorm_momentum") or hasattr(layer, "_update_renorm_statistics"), (
        lacks("BatchNormalization._update_renorm_statistics", "renorm=True cannot be pooled")
    )


def test_in_stateless_scope():
    assert not _keras.in_stateless_scope()
    with keras.StatelessScope():
        assert _keras.in_stateless_scope(), lacks(
            "in_stateless_scope", "an inference of shapes would be taken for a step"
        )


def test_global_seed():
    keras.utils.clear_session()
    assert _keras.global_seed_variables() == []
    generator = _keras.global_seed_generator()
    assert _keras.global_seed_variables() == [generator.state], lacks(
        "global_seed_generator", "a backup would leave out a seed"
    )
    before = keras.ops.convert_to_numpy(generator.state.value)
    keras.random.uniform([2])
    assert (before != keras.ops.convert_to_numpy(generator.state.value)).any()


def test_state_of_callbacks(tmp_path):
    made = {
        keras.callbacks.EarlyStopping: keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau: keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.ModelCheckpoint: keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"),
        keras.callbacks.SwapEMAWeights: keras.callbacks.SwapEMAWeights(),
        keras.callbacks.TensorBoard: keras.callbacks.TensorBoard(),
    }
    assert set(made) == set(_keras.callback_state())
    made[keras.callbacks.EarlyStopping].on_train_begin()
    for kind, names in _keras.callback_state().items():
        for name in names:
            assert hasattr(made[kind], name), lacks(
                f"{kind.__name__}.{name}", "a run that goes on would begin it anew"
            )


def test_regularizers_come_last_among_losses():
    """Behind what layers add in their calls: the second of two passes has only the first."""

    class Adds(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(keras.ops.mean(inputs))
            return inputs

    model = keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, kernel_regularizer="l2"), Adds()]
    )
    model(keras.ops.ones([2, 1]))
    added, regularizer = model.losses
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel.value)
    assert float(added) == pytest.approx(float(kernel[0, 0]))
    assert float(regularizer) == pytest.approx(0.01 * float(kernel[0, 0]) ** 2)
