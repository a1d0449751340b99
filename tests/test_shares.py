"""train() against fit: every loss, masked, weighted, of several outputs."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, assert_same, batches, fit, train

import accumloop

L = keras.layers
rng = np.random.default_rng(5)
ROWS, TIME = 23, 6
# Padded with 0 to different lengths. Rows 3 to 5 are padding alone, and so is the last batch.
lengths = rng.integers(0, TIME + 1, ROWS)
lengths[[*range(3, 6), *range(20, ROWS)]] = 0
tokens = np.where(np.arange(TIME) < lengths[:, None], rng.integers(1, 7, (ROWS, TIME)), 0)
sequences = rng.normal(size=(ROWS, TIME, 3)) * (np.arange(TIME) < lengths[:, None])[..., None]
labels = rng.integers(0, 4, (ROWS, TIME))
targets = rng.normal(size=(ROWS, 2))
row_weights = rng.uniform(0.2, 2.0, (ROWS, 1))
time_weights = rng.uniform(0.2, 2.0, (ROWS, TIME)) * (rng.uniform(size=(ROWS, TIME)) < 0.8)
WEIGHTS = {"unweighted": None, "row_weights": row_weights, "time_weights": time_weights}
MEANS = ["sum_over_batch_size", "mean_with_sample_weight", "sum"]


def momentum(rate=0.1):
    return keras.optimizers.SGD(rate, momentum=0.9)


def rate_of(reduction):
    return 0.1 if reduction != "sum" else 0.002


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


ENCODERS = {
    "lstm": lambda: [L.Masking(), L.LSTM(4, return_sequences=True)],
    "gru": lambda: [L.Masking(), L.GRU(4, return_sequences=True)],
    "simple_rnn": lambda: [L.Masking(), L.SimpleRNN(4, return_sequences=True)],
    "masking": lambda: [L.Masking(), L.Dense(4, activation="tanh")],
    "embedding": lambda: [L.Embedding(7, 4, mask_zero=True, embeddings_regularizer="l2")],
}


def sequence_model(encoder, loss, optimizer):
    start = keras.Input([TIME], dtype="int32") if encoder == "embedding" else keras.Input([TIME, 3])
    model = keras.Sequential([start, *ENCODERS[encoder](), L.Dense(4, kernel_regularizer="l2")])
    model.compile(optimizer(), loss(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def sequence_case(encoder, loss, weights=None, optimizer=momentum, **arguments):
    x = tokens if encoder == "embedding" else sequences
    leaves = (x, labels) if weights is None else (x, labels, weights)
    return Case(
        functools.partial(sequence_model, encoder, loss, optimizer),
        lambda: batches(*leaves, size=10),
        **arguments,
    )


@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_masked_sequences(encoder, weights, reduction):
    case = sequence_case(
        encoder,
        lambda: cross_entropy(reduction=reduction),
        WEIGHTS[weights],
        lambda: momentum(rate_of(reduction)),
    )
    expected = fit(case)
    assert_same(expected, train(case, 3))
    if encoder == "masking":
        assert_same(expected, train(case, 1), rtol=0)


@pytest.mark.parametrize("reduction", MEANS)
@pytest.mark.parametrize("weights", ["unweighted", "time_weights"])
@pytest.mark.parametrize("encoder", ["embedding", "unmasked"])
def test_ignore_class(encoder, weights, reduction, monkeypatch):
    """A mask of the loss, alone and together with one of the layers."""
    monkeypatch.setitem(ENCODERS, "unmasked", lambda: [L.Dense(4, activation="tanh")])
    case = sequence_case(
        encoder,
        lambda: cross_entropy(reduction=reduction, ignore_class=1),
        WEIGHTS[weights],
        lambda: momentum(rate_of(reduction)),
    )
    assert_same(fit(case), train(case, 3))


@pytest.mark.parametrize(
    "optimizer",
    [
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
        keras.optimizers.Adagrad,
        keras.optimizers.Adadelta,
        keras.optimizers.Adafactor,
        keras.optimizers.Ftrl,
        keras.optimizers.Lamb,
        keras.optimizers.Lion,
        keras.optimizers.Adamax,
        functools.partial(keras.optimizers.Adam, clipnorm=0.05),
        functools.partial(keras.optimizers.Adam, global_clipnorm=0.05),
        functools.partial(keras.optimizers.SGD, momentum=0.9, clipvalue=0.01),
    ],
)
def test_repeated_tokens_under_padding(optimizer):
    def make_model():
        model = keras.Sequential(
            [
                keras.Input([TIME], dtype="int32"),
                L.Embedding(7, 4, mask_zero=True),
                L.Dense(4),
            ]
        )
        model.compile(optimizer(0.02), cross_entropy())
        return model

    case = Case(make_model, lambda: batches(tokens, labels, size=10))
    assert_same(fit(case), train(case, 3))


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}, {}])
def test_masks_under_every_way_to_run(options):
    def make_model():
        model = keras.Sequential([keras.Input([TIME, 3]), *ENCODERS["masking"](), L.Dense(4)])
        model.compile(momentum(), cross_entropy(ignore_class=1), metrics=["accuracy"], **options)
        return model

    case = Case(make_model, lambda: batches(sequences, labels, time_weights, size=10))
    expected = fit(case)
    for accum in (3, 10):
        assert_same(expected, train(case, accum))


def two_masked_outputs(losses, loss_weights, names=("a", "b", "c")):
    """Outputs with a mask of the layers, another one, and none."""
    ids, steps = keras.Input([TIME], dtype="int32", name="ids"), keras.Input([TIME, 3], name="x")
    a = L.Dense(4, name=names[0])(L.Embedding(7, 4, mask_zero=True)(ids))
    hidden = L.LSTM(4, return_sequences=True)(L.Masking()(steps))
    b = L.Dense(4, name=names[1])(hidden)
    c = L.Dense(2, name=names[2])(L.LSTM(3)(hidden))
    model = keras.Model({"ids": ids, "x": steps}, {"a": a, "b": b, "c": c})
    model.compile(momentum(), losses, loss_weights=loss_weights, weighted_metrics={"b": "accuracy"})
    return model


# Masks of two inputs that differ: the sequences begin where the tokens end.
others = rng.normal(size=(ROWS, TIME, 3)) * (np.arange(TIME) >= lengths[:, None])[..., None]


def several(weights=None, rows=20):
    x, y = {"ids": tokens, "x": others}, {"a": labels, "b": labels, "c": targets}
    return batches(*((x, y) if weights is None else (x, y, weights)), size=10, rows=rows)


SEVERAL = {
    "means": ({"a": cross_entropy, "b": cross_entropy, "c": lambda: "mse"}, None, None),
    "loss_weights": (
        {"a": cross_entropy, "b": cross_entropy, "c": lambda: "mae"},
        {"a": 0.3, "b": 2.0, "c": 1.5},
        None,
    ),
    "kinds_and_weights": (
        {
            "a": lambda: cross_entropy(reduction="mean_with_sample_weight"),
            "b": lambda: cross_entropy(ignore_class=2),
            "c": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        },
        {"a": 0.3, "b": 2.0, "c": 1.5},
        {"a": time_weights, "b": row_weights, "c": row_weights[:, 0]},
    ),
    "without_one": ({"a": cross_entropy, "c": lambda: "mse"}, None, None),
}


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("name", SEVERAL)
def test_several_outputs_with_different_masks(name):
    losses, loss_weights, weights = SEVERAL[name]
    case = Case(
        lambda: two_masked_outputs({k: make() for k, make in losses.items()}, loss_weights),
        lambda: several(weights),
    )
    expected = fit(case)
    assert_same(expected, train(case, 3))
    if name == "kinds_and_weights":
        assert_same(expected, train(case, 1), rtol=0)
        assert_same(expected, train(case, 10))


def test_losses_of_outputs_are_those_of_the_batch():
    losses, loss_weights, weights = SEVERAL["kinds_and_weights"]
    case = Case(
        lambda: two_masked_outputs({k: make() for k, make in losses.items()}, loss_weights),
        lambda: several(weights, rows=None),
        epochs=1,
    )
    each = fit(case, epochs=3, steps_per_epoch=1).history  # fit does not weight its batches.
    for accum in (1, 3):
        whole = train(case, accum).history
        for name in ("loss", "a_loss", "b_loss", "c_loss"):
            expected = np.average(each[name], weights=[10, 10, 3])
            np.testing.assert_allclose(whole[name], [expected], rtol=1e-9)


def test_weights_of_both_signs_that_cancel_in_a_micro_batch():
    signed = np.where(np.arange(20) % 2, -1.0, 1.0) + np.where(np.arange(20) >= 6, 0.7, 0.0)

    def make_model():
        model = keras.Sequential([keras.Input([2]), L.Dense(2)])
        model.compile(
            momentum(0.01), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        )
        return model

    case = Case(make_model, lambda: batches(targets[:20], targets[:20, ::-1], signed, size=10))
    assert_same(fit(case), train(case, 5))


class OwnMask(keras.losses.Loss):
    """A loss of a user, which masks what is not observed."""

    def call(self, y_true, y_pred):
        values = keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)
        values._keras_mask = y_true[:, 0] > 0
        return values


class OwnCall(keras.losses.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))


class Nested(keras.losses.Loss):
    """A loss of losses: its share is its own."""

    def __init__(self):
        super().__init__()
        self.inner = keras.losses.MeanSquaredError(reduction="none")

    def call(self, y_true, y_pred):
        return 0.5 * self.inner(y_true, y_pred) + 0.1 * keras.ops.mean(y_pred, axis=-1)


@pytest.mark.parametrize(
    "loss",
    [
        OwnMask,
        OwnCall,
        Nested,
        lambda: lambda a, b: keras.ops.mean(keras.ops.square(a - b)),
        lambda: lambda a, b: keras.ops.mean(keras.ops.square(a - b), axis=-1),
        lambda: "mean_absolute_error",
    ],
    ids=["own_mask", "own_call", "nested", "reduced", "function", "string"],
)
def test_losses_of_users(loss):
    def make_model():
        model = keras.Sequential([keras.Input([2]), L.Dense(2, kernel_regularizer="l2")])
        model.compile(momentum(), loss())
        return model

    case = Case(make_model, lambda: batches(targets, targets[:, ::-1], size=10))
    assert_same(fit(case), train(case, 3))


def losses_of_keras():
    return {
        name: value
        for name, value in vars(keras.losses).items()
        if inspect.isclass(value)
        and issubclass(value, keras.losses.Loss)
        and value is not keras.losses.Loss
    }


# Their value depends on all rows together: exact with whole_batch_loss=True.
COUPLED = {"Dice", "Tversky", "Circle"}
# They have a value for each row, and the mask of a sequence has one for each step.
BY_ROWS = {"CTC", "Circle", "CategoricalGeneralizedCrossEntropy"}


def labels_of(name):
    if name == "CTC":
        return rng_labels(1, 4, (ROWS, 2))
    if name in BY_ROWS:
        return np.arange(ROWS) // 2 % 4
    return labels if name.startswith("Sparse") else np.eye(4)[labels]


def layers_of(name, masked):
    if name in BY_ROWS - {"CTC"}:
        last = [L.UnitNormalization()] if name == "Circle" else [L.Softmax()]
        return [L.Flatten(), L.Dense(4), *last]
    activation = {"CTC": None, "Dice": "sigmoid", "Tversky": "sigmoid"}.get(name, "softmax")
    return [L.Masking() if masked else L.Identity(), L.Dense(4, activation=activation)]


@pytest.mark.parametrize("reduction", [*MEANS, "mean", None])
@pytest.mark.parametrize(
    ("name", "masked"),
    [
        pytest.param(name, masked, id=f"{name}-masked" if masked else name)
        for name in losses_of_keras()
        for masked in ([False] if name in BY_ROWS else [False, True])
    ],
)
def test_every_loss_of_keras(name, masked, reduction):
    def make_model():
        model = keras.Sequential([keras.Input([TIME, 3]), *layers_of(name, masked)])
        model.compile(momentum(0.002), losses_of_keras()[name](reduction=reduction))
        return model

    case = Case(make_model, lambda: batches(sequences, labels_of(name), size=10), epochs=2)
    if name in COUPLED:
        with pytest.raises(NotImplementedError, match="whole_batch_loss=True"):
            train(case, 3)
    # TensorFlow computes CTC in float32, whatever it is given.
    rtol = 1e-6 if name == "CTC" else 1e-9
    assert_same(fit(case), train(case, 3, whole_batch_loss=name in COUPLED), rtol)


def rng_labels(low, high, shape):
    return np.random.default_rng(8).integers(low, high, shape)


def test_divisors_cost_no_forward_pass():
    """The pass that counts masks runs no matrix product, no lookup and no recurrent layer."""
    model = sequence_model("embedding", cross_entropy, momentum)
    ds = batches(tokens, labels, size=10)
    accumloop.train(model, ds, 3, verbose=0)
    graph = _graph_of_the_update(model, ds)
    loops = [op for op in graph.get_operations() if op.type in {"While", "StatelessWhile"}]
    bodies = [graph._get_function(op.get_attr("body").name).graph for op in loops]
    kinds = [{op.type for op in body.get_operations()} for body in bodies]
    counting = [kind for kind in kinds if not any("PartitionedCall" in name for name in kind)]
    assert len(loops) == 2
    assert len(counting) == 1
    assert counting[0].isdisjoint({"MatMul", "ResourceGather", "ReadVariableOp", "Assert"})
    assert "NotEqual" in counting[0]


def _graph_of_the_update(model, ds):
    from accumloop import _step

    (step,) = _step.steps_of(model).made.values()
    return step.update.get_concrete_function(ds.element_spec, tf.TensorSpec([], tf.int64)).graph


def test_an_unmasked_mean_has_no_pass_before():
    model = keras.Sequential([keras.Input([2]), L.Dense(2)])
    model.compile(momentum(), "mse")
    ds = batches(targets, targets, size=10)
    accumloop.train(model, ds, 3, verbose=0)
    operations = _graph_of_the_update(model, ds).get_operations()
    assert sum("While" in op.type for op in operations) == 1
