"""What a few rows tell of a loss that couples rows, and that they accuse no other."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import batches, data

import accumloop

x, labels, targets, weights = data()
rng = np.random.default_rng(2)
tokens = rng.integers(0, 6, [23, 4])
words = np.array([" ".join("ab"[n % 2] for n in range(1 + row % 5)) for row in range(23)])
L, ops = keras.layers, keras.ops

COUPLED = "must be a mean over its rows"


def root_mean_square(y_true, y_pred):
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def model_of(*layers, loss="mse", **options):
    model = keras.Sequential([*layers])
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    return model


def refused(model, *leaves, match=COUPLED, size=10, accum=3, **options):
    with pytest.raises(NotImplementedError, match=match):
        accumloop.train(model, batches(*leaves, size=size), accum, verbose=0, **options)


@contextlib.contextmanager
def policy(name):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(name)
    yield


def hashed():
    return [L.Hashing(9), L.Embedding(9, 3), L.Flatten(), L.Dense(2)]


def looked_up():
    return [L.IntegerLookup(vocabulary=list(range(6))), L.Embedding(9, 3), L.Flatten(), L.Dense(2)]


@pytest.mark.parametrize("layers", [hashed, looked_up])
def test_layers_of_ids_have_no_rounding(layers):
    refused(model_of(*layers(), loss=root_mean_square), tokens, targets)


def test_text_that_is_padded_to_its_longest_row():
    vectorize = L.TextVectorization(vocabulary=["a", "b"])
    layers = [vectorize, L.Embedding(4, 3), L.GlobalAveragePooling1D(), L.Dense(2)]
    refused(model_of(*layers), words[:, None], targets, accum=2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_root_of_a_mean(name, seed):
    keras.utils.set_random_seed(seed)
    with policy(name):
        features = np.random.default_rng(seed).normal(size=(64, 5)).astype("float32")
        wanted = features[:, :2] ** 2
        layers = [keras.Input([5]), L.Dense(8, "relu"), L.Dense(2, dtype="float32")]
        refused(model_of(*layers, loss=root_mean_square), features, wanted, size=64, accum=2)


def centre(inputs, training=False):
    return inputs - ops.mean(inputs, axis=0) if training else inputs


class Centre(L.Layer):
    def call(self, inputs, training=False):
        return centre(inputs, training)


class Balance(L.Layer):
    """Adds a loss that couples rows, in training alone."""

    def call(self, inputs, training=False):
        if training:
            self.add_loss(ops.sum(ops.square(ops.mean(ops.softmax(inputs), axis=0))))
        return inputs


def frozen():
    layer = L.BatchNormalization()
    layer.trainable = False
    return layer


BESIDE = {
    "frozen_normalization": frozen,
    "normalization": L.BatchNormalization,
    "dropout": lambda: L.Dropout(0.4),
    "noise": lambda: L.GaussianNoise(0.3),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", [Centre, Balance])
def test_rows_that_are_coupled_in_training_alone(kind, beside):
    layers = [keras.Input([5]), L.Dense(4), BESIDE[beside](), kind(), L.Dense(2)]
    refused(model_of(*layers), x, targets)
    if kind is Centre:
        match = "must not depend on the other rows.*use accum=1"
        refused(model_of(*layers), x, targets, match=match, whole_batch_loss=True)


@tf.custom_gradient
def normed(values):
    return values, lambda gradient: gradient / tf.norm(gradient)


def test_a_gradient_that_couples_rows():
    def loss(y_true, y_pred):
        return ops.mean(ops.square(y_true - normed(y_pred)), -1)

    refused(model_of(keras.Input([5]), L.Dense(2), loss=loss), x, targets)


def test_a_layer_that_assigns_to_weights_is_named():
    layer = L.SpectralNormalization(L.Dense(4))
    model = model_of(keras.Input([5]), layer, L.Dense(2))
    with pytest.warns(UserWarning, match="Each forward pass in training updates"):
        refused(model, x, targets, match="assigns to variables in it.*Received: assignments")


# And no false accusation.


def dense():
    return [keras.Input([5]), L.Dense(16, "relu"), L.Dense(16, "gelu"), L.Dense(2)], x, targets


def deep():
    hidden = [L.Dense(16, "tanh") for _ in range(8)]
    return [keras.Input([5]), *hidden, L.LayerNormalization(), L.Dense(2)], x, targets


def noisy():
    layers = [L.Dense(8), L.BatchNormalization(), L.Dropout(0.5), L.GaussianNoise(0.2), L.Dense(2)]
    return [keras.Input([5]), *layers], x, targets


def recurrent():
    layers = [L.Embedding(6, 4, mask_zero=True), L.LSTM(4, dropout=0.3, recurrent_dropout=0.2)]
    return [keras.Input([4]), *layers, L.Dense(2)], tokens, targets


class Attention(L.Layer):
    def __init__(self):
        super().__init__()
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.1)

    def call(self, inputs):
        return self.attention(inputs, inputs)


def attending():
    layers = [L.Embedding(6, 8), Attention(), L.LayerNormalization(), L.Flatten(), L.Dense(2)]
    return [keras.Input([4]), *layers], tokens, targets


def scored():
    layers = [L.Embedding(6, 4, mask_zero=True), L.Dense(6, "softmax")]
    return [keras.Input([4]), *layers], tokens, tokens


WELL_BEHAVED = [dense, deep, noisy, recurrent, attending]


@pytest.mark.parametrize("name", ["float64", "float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("make", WELL_BEHAVED)
def test_a_mean_over_rows_is_not_refused(make, name):
    for seed in range(2):
        keras.utils.set_random_seed(seed)
        if name != "float64":
            with policy(name):
                train_once(*make(), "mse")
        else:
            train_once(*make(), "mse")


@pytest.mark.parametrize("name", ["float32", "mixed_float16"])
@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "huber"])
def test_masks_are_not_refused(loss, name):
    with policy(name):
        layers, features, wanted = scored()
        if loss == "huber":
            wanted = np.eye(6)[wanted]
        train_once(layers, features, wanted, loss)


def train_once(layers, features, wanted, loss):
    model = model_of(*layers, loss=loss)
    accumloop.train(model, batches(features, wanted, size=23), 2, verbose=0)
