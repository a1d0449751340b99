"""whole_batch_loss=True against fit: losses that couple rows, and all others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import (
    Case,
    assert_same,
    batches,
    data,
    distances,
    fit,
    fresh_model,
    train,
    under_policy,
)

import accumloop

L = keras.layers
ops = keras.ops
x, labels, targets, weights = data()


def momentum(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def contrastive(y_true, y_pred):
    """In-batch negatives: the towers' rows match on the diagonal."""
    left, right = ops.split(y_pred, 2, axis=-1)
    logits = ops.matmul(left, ops.transpose(right))
    rows = ops.arange(ops.shape(logits)[0])
    return keras.losses.sparse_categorical_crossentropy(rows, logits, from_logits=True)


def triplet(y_true, y_pred):
    """Batch-hard: the farthest row of the same label against the nearest one of another."""
    y_true = ops.reshape(y_true, [-1])
    squares = ops.sum(ops.square(y_pred[:, None] - y_pred[None]), axis=-1)
    same = y_true[:, None] == y_true[None]
    farthest = ops.max(ops.where(same, squares, 0.0), axis=1)
    nearest = ops.min(ops.where(same, 1e3, squares), axis=1)
    return ops.relu(farthest - nearest + 1.0)


def soft_f1(y_true, y_pred):
    y_true, y_pred = ops.cast(y_true > 0, y_pred.dtype), ops.sigmoid(y_pred)
    hits = ops.sum(y_true * y_pred, axis=0)
    return 1.0 - ops.mean(2.0 * hits / (ops.sum(y_true, axis=0) + ops.sum(y_pred, axis=0)))


def contrastive_of_thirds(y_true, y_pred):
    """The mean of what `contrastive` is of each of three micro-batches alone."""
    left, right = ops.split(y_pred, 2, axis=-1)
    logits = ops.matmul(left, ops.transpose(right))
    size = ops.shape(logits)[0]
    rows, edges = ops.arange(size), ops.arange(4) * size // 3
    third = ops.sum(ops.cast(rows[:, None] >= edges[1:3], "int32"), axis=1)
    logits = ops.where(third[:, None] == third, logits, -1e4)
    own_size = ops.take(edges[1:] - edges[:3], third)
    values = keras.losses.sparse_categorical_crossentropy(rows, logits, from_logits=True)
    return values * ops.cast(size, values.dtype) / ops.cast(3 * own_size, values.dtype)


def two_towers(layer=None, loss=contrastive, **options):
    """Without the biases that a contrastive loss does not depend on."""
    inputs = keras.Input([5])
    left = L.Dense(4, "tanh", kernel_regularizer="l2")(inputs)
    left = layer(left) if layer else left
    right = L.Dense(4, use_bias=False)(L.Dense(6, "tanh")(inputs))
    model = keras.Model(inputs, L.Concatenate()([left, right]))
    model.compile(momentum(), loss, **options)
    return model


def dense(loss, units=2, use_bias=True, **options):
    model = keras.Sequential(
        [keras.Input([5]), L.Dense(6, "tanh"), Adds(), L.Dense(units, use_bias=use_bias)]
    )
    model.compile(momentum(), loss, metrics=["mae"], **options)
    return model


class Adds(L.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


def several():
    inputs = keras.Input([5])
    hidden = L.Dense(6, "tanh", activity_regularizer="l2")(inputs)
    outputs = {
        "pair": L.Dense(4, use_bias=False, name="pair")(hidden),
        "more": L.Dense(2, name="more")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), {"pair": triplet, "more": "mse"})
    return model


class OwnLoss(keras.Sequential):
    """Couples rows, and reads a weight past the outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + ops.std(y_pred) + 0.1 * ops.sum(ops.square(self.layers[-1].kernel))


def own_loss():
    model = OwnLoss([keras.Input([5]), L.Dense(4, "tanh"), L.Dense(2)])
    model.compile(momentum(), "mse")
    return model


CASES = {
    "contrastive": (two_towers, lambda: batches(x, targets, size=10)),
    "contrastive_xla": (
        lambda: two_towers(jit_compile=True),
        lambda: batches(x, targets, size=10),
    ),
    "contrastive_eager": (
        lambda: two_towers(run_eagerly=True),
        lambda: batches(x, targets, size=10),
    ),
    "triplet": (
        lambda: dense(triplet, 3, use_bias=False),
        lambda: batches(x, labels[:, None], size=10),
    ),
    "soft_f1": (lambda: dense(soft_f1), lambda: batches(x, targets, size=10)),
    "weighted": (
        lambda: dense(
            keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
            weighted_metrics=["mse"],
        ),
        lambda: batches(x, targets, weights, size=10),
    ),
    "several": (
        several,
        lambda: batches(x, labels[:, None], targets, size=10, rows=20).map(
            lambda a, b, c: (a, {"pair": b, "more": c})
        ),
    ),
    "own_compute_loss": (own_loss, lambda: batches(x, targets, size=10)),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_batch_loss(name):
    case = Case(*CASES[name])
    expected = fit(case)
    for accum in (1, 3, 7 if name == "triplet" else 10):
        assert_same(expected, train(case, accum, whole_batch_loss=True))


tokens = np.where(np.arange(6) < np.arange(23)[:, None] % 7, 1 + np.arange(6) % 5, 0)


@pytest.mark.parametrize("optimizer", [momentum, lambda: keras.optimizers.Adam(0.05)])
def test_masks_pass_from_the_first_pass_to_the_loss(optimizer):
    def make_model():
        layers = [L.Embedding(6, 4, mask_zero=True, embeddings_regularizer="l2"), L.LSTM(3)]
        layers[1].return_sequences = True
        model = keras.Sequential([keras.Input([6], dtype="int32"), *layers, L.Dense(6)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
        model.compile(optimizer(), loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
        return model

    case = Case(make_model, lambda: batches(tokens, tokens[:, ::-1], size=10))
    assert_same(fit(case), train(case, 3, whole_batch_loss=True))


def test_both_passes_draw_the_same_dropout():
    """With the loss of a plain mean one pass is exact too, and draws what the two passes draw."""

    def make_model():
        dropout = [L.Dropout(0.5, seed=3), L.Dense(6, "tanh"), L.GaussianNoise(0.3, seed=4)]
        model = keras.Sequential([keras.Input([5]), L.Dense(8), *dropout, L.Dense(2)])
        model.compile(momentum(), "mse")
        return model

    case = Case(make_model, lambda: batches(x, targets, size=10))
    assert_same(train(case, 3), train(case, 3, whole_batch_loss=True))


def test_metrics_that_need_the_whole_batch_are_exact():
    def spread(y_true, y_pred):
        return ops.std(y_pred)

    def make_model():
        model = keras.Sequential([keras.Input([5]), L.Dense(2)])
        model.compile(momentum(), "mse", metrics=[spread])
        return model

    case = Case(make_model, lambda: batches(x, targets, size=10))
    assert_same(fit(case), train(case, 3, whole_batch_loss=True))


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 4e-2), ("mixed_float16", 5e-3)]
)
def test_mixed_precision(policy, tolerance):
    """As near to fit as rounding allows, which is nearer than micro-batches by themselves."""

    def case_of(loss):
        return Case(
            under_policy(policy, lambda: two_towers(loss=loss)),
            lambda: batches(x.astype("float32"), targets.astype("float32"), size=10),
        )

    case = case_of(contrastive)
    expected = fit(case)
    assert_same(expected, train(case, 1, whole_batch_loss=True), rtol=0)
    assert_same(expected, train(case, 3, whole_batch_loss=True), rtol=tolerance)
    wrong = fit(case_of(contrastive_of_thirds))
    start = {v.path: ops.convert_to_numpy(v) for v in fresh_model(case).weights}
    assert max(distances(expected.weights, wrong.weights)) > 5 * tolerance
    assert min(distances(expected.weights, start)) > 5 * tolerance


class RawNoise(L.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


class GlobalNoise(L.Layer):
    def call(self, inputs):
        return inputs + keras.random.normal(ops.shape(inputs), dtype=inputs.dtype)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def refuse(model, error, match):
    before = model.get_weights()
    with pytest.raises(error, match=match):
        accumloop.train(model, batches(x, targets, size=10), 3, verbose=0, whole_batch_loss=True)
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


@pytest.mark.parametrize(
    ("layer", "match"),
    [(RawNoise, "raw TensorFlow ops that draw"), (GlobalNoise, "the global seed")],
)
def test_what_cannot_be_drawn_again_is_refused(layer, match):
    refuse(two_towers(layer()), NotImplementedError, match)


def test_an_own_train_step_is_refused():
    model = OwnStep([keras.Input([5]), L.Dense(2)])
    model.compile("sgd", "mse")
    refuse(model, NotImplementedError, "needs the loss by itself")


def test_outputs_that_depend_on_other_rows_are_refused():
    class Centred(L.Layer):
        def call(self, inputs):
            return inputs - ops.mean(inputs, axis=0)

    refuse(two_towers(Centred()), NotImplementedError, "what a model puts out for a row")


def test_a_flag_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="`whole_batch_loss` must be a bool"):
        accumloop.train(two_towers(), batches(x, targets, size=10), 3, whole_batch_loss=1)
