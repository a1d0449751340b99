"""State that is not withheld from a step: it moves once a micro-batch, and that is said."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, assert_same, batches, data, fit, train

import accumloop

x, _, targets, _ = data()
L = keras.layers
KEPT = np.argsort(-targets[:10, 0])  # The first rows are among those that are kept.
ROWS = np.concatenate([KEPT, np.arange(10, 23)])


def make_ds():
    return batches(x, targets, size=10)


class RawCounter(L.Layer):
    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False, name="calls_so_far")

    def call(self, inputs):
        self.calls.assign_add(1.0)
        return inputs


class Counter(L.Layer):
    def build(self, shape):
        self.calls = self.add_weight(name="calls_so_far", trainable=False, initializer="zeros")

    def call(self, inputs):
        self.calls.assign(self.calls + 1.0)
        return inputs


class OwnStep(keras.Sequential):
    def train_step(self, batch):
        return super().train_step(batch)


class RunningLoss(keras.losses.Loss):
    """Has a variable that no model lists."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(0.0, trainable=False, dtype="float64", name="running")

    def call(self, y_true, y_pred):
        values = keras.ops.mean(keras.ops.square(y_pred - y_true), -1)
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(values))
        return values


def compiled(kind, *layers, loss="mse"):
    model = kind([keras.Input([5]), *layers, L.Dense(2)])
    model.compile("sgd", loss)
    return model


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: compiled(keras.Sequential, RawCounter()), "calls_so_far"),
        (lambda: compiled(keras.Sequential, Counter()), "calls_so_far"),
        (lambda: compiled(OwnStep, RawCounter()), "calls_so_far"),
        (lambda: compiled(OwnStep, Counter()), "calls_so_far"),
        (lambda: compiled(OwnStep, loss=RunningLoss()), "the model does not list"),
    ],
    ids=["raw", "listed", "raw_own_step", "listed_own_step", "loss"],
)
def test_what_a_layer_or_loss_moves_is_warned_of(make, name):
    with pytest.warns(UserWarning, match=f"updates.*{name}.*once a micro-batch"):
        accumloop.train(make(), make_ds(), 3, verbose=0)


def test_seeds_and_metrics_are_not_warned_of():
    metrics = [keras.metrics.MeanSquaredError(), "mae"]
    model = OwnStep([keras.Input([5]), L.Dropout(0.3), L.GaussianNoise(0.1), L.Dense(2)])
    model.compile("adam", "mse", metrics=metrics, weighted_metrics=["mse"])
    accumloop.train(model, make_ds(), 3, verbose=0)


# Losses that leave out rows, past the first ones.


class OfKeras(keras.losses.MeanSquaredError):
    def call(self, y_true, y_pred):
        return tf.boolean_mask(super().call(y_true, y_pred), y_true[:, 0] > -0.2)


class OfAUser(keras.losses.Loss):
    def call(self, y_true, y_pred):
        values = keras.ops.mean(keras.ops.square(y_pred - y_true), -1)
        return tf.boolean_mask(values, y_true[:, 0] > -0.2)


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        some = y[:, 0] > -0.2
        loss = keras.losses.MeanSquaredError()
        return loss(tf.boolean_mask(y, some), tf.boolean_mask(y_pred, some))


@pytest.mark.parametrize(
    ("kind", "loss"),
    [(keras.Sequential, OfKeras()), (keras.Sequential, OfAUser()), (OwnLoss, "mse")],
    ids=["of_keras", "of_a_user", "own_compute_loss"],
)
def test_a_loss_that_leaves_out_rows_is_an_error(kind, loss):
    ds = batches(x[ROWS], targets[ROWS], size=10)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must return values for each row"):
        accumloop.train(compiled(kind, loss=loss), ds, 3, verbose=0)


def test_a_loss_that_leaves_out_rows_under_xla():
    """XLA has no assertions."""
    model = compiled(keras.Sequential)
    model.compile("sgd", OfAUser(), jit_compile=True)
    ds = batches(x[ROWS], targets[ROWS], size=10)
    history = accumloop.train(model, ds, 3, verbose=0)
    assert np.isnan(history.history["loss"][0])


def test_only_added_losses():
    """No loss of outputs, in one pass and in two."""

    def make():
        layers = [keras.Input([5]), L.Dense(4, activity_regularizer="l2", kernel_regularizer="l2")]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        return model

    case = Case(make, lambda: batches(x, size=10))
    expected = fit(case)
    for options in ({}, {"whole_batch_loss": True}):
        assert_same(expected, train(case, 3, **options))


@pytest.mark.parametrize("options", [{}, {"whole_batch_loss": True}], ids=["one", "two"])
def test_eager_steps_know_each_kind_of_batch(options):
    """Without weights and with them, short and long."""

    def make():
        model = keras.Sequential([L.Dense(3), L.GlobalAveragePooling1D(), L.Dense(2)])
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
        return model

    rng = np.random.default_rng(0)
    short, long = rng.normal(size=(23, 4, 3)), rng.normal(size=(23, 7, 3))
    sets = [
        batches(short, targets, size=10),
        batches(short, targets, np.abs(targets[:, 0]), size=10),
        batches(long, targets, size=10),
    ]
    models = []
    for run in (keras.Model.fit, accumloop.train):
        keras.utils.set_random_seed(0)
        models.append(make())
        more = {"shuffle": False} if run is keras.Model.fit else {"accum": 3, **options}
        for ds in sets:
            run(models[-1], ds, verbose=0, **more)
    for wanted, got in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12)
