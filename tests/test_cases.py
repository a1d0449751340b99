"""train() against fit: what a model, its loss, its data and the arguments of fit may be."""

import contextlib
import dataclasses
import functools

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

x, labels, targets, weights = data()
L = keras.layers


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compiled(model, loss="mse", optimizer=momentum, **options):
    model.compile(optimizer(), loss, **options)
    return model


def slow():
    """A learning rate for losses that are sums."""
    return keras.optimizers.SGD(0.002, momentum=0.9)


def dense(loss="mse", units=2, optimizer=momentum, layer=None, **options):
    layer = layer or L.Dense(6, activation="tanh")
    return compiled(
        keras.Sequential([keras.Input([5]), layer, L.Dense(units)]), loss, optimizer, **options
    )


class Subclassed(keras.Model):
    """Builds its layers from the first batch; one variable gets no gradient."""

    def __init__(self):
        super().__init__()
        self.first = L.Dense(6, activation="tanh")
        self.last = L.Dense(2)

    def build(self, input_shape):
        self.unused = self.add_weight(shape=[3], name="unused")
        super().build(input_shape)

    def call(self, inputs):
        return self.last(self.first(inputs))


class Penalty(L.Layer):
    """Adds a loss that is a mean over rows."""

    def call(self, inputs):
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class Tracked(L.Layer):
    """Tracks a mean of its batch, a value of each row, and a sum in its forward pass."""

    def __init__(self):
        super().__init__()
        self.of_batch = keras.metrics.Mean(name="of_batch")
        self.of_rows = keras.metrics.Mean(name="of_rows")
        self.total = keras.metrics.Sum(name="total")

    def call(self, inputs):
        self.of_batch.update_state(keras.ops.mean(inputs))
        self.of_rows.update_state(keras.ops.sum(inputs, axis=-1))
        self.total.update_state(keras.ops.sum(inputs))
        return inputs


class Nested(keras.Model):
    """Takes a dict with a tuple and a None in it, returns a dict of outputs."""

    def __init__(self):
        super().__init__()
        self.a = L.Dense(2)
        self.b = L.Dense(1)

    def call(self, inputs):
        assert inputs["nothing"] is None
        first, (second,) = inputs["first"], inputs["rest"]
        joined = keras.ops.concatenate([first, keras.ops.cast(second, first.dtype)], axis=-1)
        return {"a": self.a(joined), "b": self.b(joined)}


class AnyLength(keras.Model):
    """Sums over the positions of a ragged batch, whatever its longest row."""

    def __init__(self):
        super().__init__()
        self.embed = L.Embedding(9, 4)
        self.last = L.Dense(2)

    def call(self, tokens):
        embedded = tf.ragged.map_flat_values(self.embed, tokens)
        return self.last(tf.reduce_sum(embedded, axis=1))


def nested_ds():
    def row(features, target):
        inputs = {"first": features[:, :3], "rest": (features[:, 3:],), "nothing": None}
        return inputs, {"a": target, "b": target[:, :1]}

    return batches(x, targets, size=10, rows=20).map(row)


def functional_two_outputs(loss, loss_weights=None):
    inputs = keras.Input([5])
    hidden = L.Dense(6, activation="tanh")(inputs)
    outputs = [L.Dense(2, name="a")(hidden), L.Dense(3, name="b")(hidden)]
    model = keras.Model(inputs, outputs)
    model.compile(momentum(), loss, loss_weights=loss_weights, metrics={"b": "accuracy"})
    return model


tokens = np.random.default_rng(1).integers(0, 9, size=(23, 4))
lengths = np.random.default_rng(2).integers(1, 7, size=23)
ragged = tf.ragged.constant([[int(v) % 9 for v in range(n, 2 * n)] for n in lengths])
wide = np.random.default_rng(3).uniform(size=(23, 12)) * (
    np.random.default_rng(4).uniform(size=(23, 12)) < 0.3
)


def sparse_ds():
    return tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(wide), targets)).batch(10)


def embedding(optimizer=lambda: keras.optimizers.Adam(0.05), **options):
    model = keras.Sequential(
        [keras.Input([4], dtype="int64"), L.Embedding(9, 3), L.Flatten(), L.Dense(2)]
    )
    return compiled(model, "mse", optimizer, **options)


def shared_embedding():
    inputs = keras.Input([4], dtype="int64")
    table = L.Embedding(9, 3)
    summed = L.Add()([table(inputs), table(keras.ops.flip(inputs, axis=1))])
    return compiled(
        keras.Model(inputs, L.Dense(2)(L.Flatten()(summed))),
        optimizer=lambda: keras.optimizers.Adam(0.05),
    )


def image_model():
    return compiled(
        keras.Sequential(
            [keras.Input([4, 4, 1]), L.Rescaling(1 / 255), L.Conv2D(3, 2), L.Flatten(), L.Dense(3)]
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
    )


images = np.random.default_rng(5).integers(0, 255, size=(23, 4, 4, 1)).astype("uint8")
plain = functools.partial(batches, x, targets, size=10)
weighted = functools.partial(batches, x, targets, weights, size=10)
classified = functools.partial(batches, x, labels, size=10)
one_hot = np.eye(3)[labels]
cross_entropy = keras.losses.SparseCategoricalCrossentropy
sequences = np.random.default_rng(6).normal(size=(23, 4, 5))


def lstm():
    return compiled(keras.Sequential([keras.Input([4, 5]), L.LSTM(3), L.Dense(2)]))


def time_distributed():
    return compiled(
        keras.Sequential([keras.Input([4, 5]), L.GRU(3, return_sequences=True), L.Dense(2)]),
        weighted_metrics=["mae"],
    )


def frozen_batch_normalization():
    normalization = L.BatchNormalization()
    normalization.trainable = False
    return dense(layer=normalization)


def frozen_layer():
    model = dense()
    model.layers[0].trainable = False
    return compiled(model)


def own_loss(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5)


class PerRow(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)


class OfLosses(keras.losses.Loss):
    """A loss that calls other losses: one share, its own."""

    def call(self, y_true, y_pred):
        each = keras.losses.MeanSquaredError(reduction=None)
        return each(y_true, y_pred) + keras.losses.MeanAbsoluteError(reduction=None)(y_true, y_pred)


CASES = {
    "plain": Case(dense, plain),
    "sample_weight": Case(functools.partial(dense, weighted_metrics=["mae"]), weighted),
    "class_weight": Case(
        functools.partial(dense, cross_entropy(from_logits=True), 3, weighted_metrics=["accuracy"]),
        classified,
        {"class_weight": {0: 0.2, 2: 3.0}},
    ),
    "class_weight_one_hot": Case(
        functools.partial(dense, keras.losses.CategoricalCrossentropy(from_logits=True), 3),
        functools.partial(batches, x, one_hot, size=10),
        {"class_weight": {0: 0.2, 1: 1.5, 2: 3.0}},
    ),
    "class_weight_column": Case(
        functools.partial(dense, cross_entropy(from_logits=True), 3),
        functools.partial(batches, x, labels[:, None], size=10),
        {"class_weight": {0: 2, 1: 1, 2: 3}},
    ),
    "nested": Case(
        lambda: compiled(
            Nested(),
            {"a": "mse", "b": "mae"},
            metrics={"a": ["mae"]},
            weighted_metrics={"b": ["mse"]},
        ),
        nested_ds,
    ),
    "two_outputs": Case(
        functools.partial(
            functional_two_outputs,
            ["mse", cross_entropy(from_logits=True)],
            [0.3, 2.0],
        ),
        lambda: batches(x, targets, labels, size=10, rows=20).map(lambda a, b, c: (a, (b, c))),
    ),
    "two_outputs_one_summed": Case(
        functools.partial(
            functional_two_outputs,
            [keras.losses.MeanSquaredError(reduction="sum"), cross_entropy(from_logits=True)],
        ),
        lambda: batches(x, targets, labels, size=10, rows=20).map(lambda a, b, c: (a, (b, c))),
    ),
    "output_without_loss": Case(
        functools.partial(functional_two_outputs, [None, cross_entropy(from_logits=True)]),
        lambda: batches(x, targets, labels, size=10).map(lambda a, b, c: (a, (b, c))),
    ),
    "inputs_alone": Case(
        lambda: compiled(
            keras.Sequential([keras.Input([5]), Penalty(), L.Dense(2), Penalty()]), None
        ),
        lambda: batches(x, size=10),
    ),
    "ragged": Case(
        lambda: compiled(AnyLength(), optimizer=lambda: keras.optimizers.Adam(0.05)),
        lambda: tf.data.Dataset.from_tensor_slices((ragged, targets)).batch(10),
    ),
    "sparse": Case(
        lambda: compiled(
            keras.Sequential([keras.Input([12], sparse=True), L.Dense(4), L.Dense(2)]),
            optimizer=lambda: keras.optimizers.Adam(0.05),
        ),
        sparse_ds,
    ),
    "uint8": Case(image_model, lambda: batches(images, labels, size=10)),
    "sum": Case(
        functools.partial(dense, keras.losses.MeanSquaredError(reduction="sum"), optimizer=slow),
        weighted,
    ),
    "not_reduced": Case(
        functools.partial(dense, keras.losses.MeanSquaredError(reduction=None), optimizer=slow),
        weighted,
    ),
    "mean_with_sample_weight_without": Case(
        functools.partial(
            dense, keras.losses.MeanAbsoluteError(reduction="mean_with_sample_weight")
        ),
        plain,
    ),
    "sum_and_regularizer": Case(
        lambda: dense(
            keras.losses.MeanSquaredError(reduction="sum"),
            layer=L.Dense(4, kernel_regularizer="l2", bias_regularizer="l1"),
            optimizer=slow,
        ),
        plain,
    ),
    "own_loss_function": Case(functools.partial(dense, own_loss), plain),
    "own_loss_class": Case(lambda: dense(PerRow()), weighted),
    "loss_of_losses": Case(lambda: dense(OfLosses()), weighted),
    "huber": Case(functools.partial(dense, keras.losses.Huber(delta=0.5)), weighted),
    "regularizers": Case(
        lambda: dense(
            layer=L.Dense(
                4,
                kernel_regularizer=keras.regularizers.L1L2(0.01, 0.02),
                bias_regularizer="l2",
                activity_regularizer="l1",
            )
        ),
        plain,
    ),
    "add_loss": Case(
        lambda: compiled(
            keras.Sequential([keras.Input([5]), L.Dense(4), Penalty(), L.Dense(2)]), metrics=["mae"]
        ),
        weighted,
    ),
    "tracked_in_a_layer": Case(
        lambda: compiled(keras.Sequential([keras.Input([5]), Tracked(), L.Dense(2)])), plain
    ),
    "constraints": Case(
        lambda: dense(layer=L.Dense(4, kernel_constraint="non_neg", bias_constraint="max_norm")),
        plain,
    ),
    "subclassed_unbuilt": Case(lambda: compiled(Subclassed(), metrics=["mae"]), plain),
    "deferred_sequential": Case(
        lambda: compiled(keras.Sequential([L.Dense(4, activation="relu"), L.Dense(2)])), plain
    ),
    "lstm": Case(lstm, lambda: batches(sequences, targets, size=10)),
    "time_distributed": Case(
        time_distributed,
        lambda: batches(sequences, sequences[:, :, :2], np.tile(weights[:, None], [1, 4]), size=10),
    ),
    "frozen_layer": Case(frozen_layer, plain),
    "frozen_batch_normalization": Case(frozen_batch_normalization, plain),
    "embedding_adam": Case(
        lambda: embedding(lambda: keras.optimizers.Adam(0.05)),
        lambda: batches(tokens, targets, size=10),
    ),
    "embedding_clipped": Case(
        lambda: embedding(lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1)),
        lambda: batches(tokens, targets, size=10),
    ),
    "embedding_ema": Case(
        lambda: embedding(lambda: keras.optimizers.RMSprop(0.02, use_ema=True)),
        lambda: batches(tokens, targets, size=10),
    ),
    "embedding_twice": Case(shared_embedding, lambda: batches(tokens, targets, size=10)),
    "embedding_regularized": Case(
        lambda: compiled(
            keras.Sequential(
                [
                    keras.Input([4], dtype="int64"),
                    L.Embedding(9, 3, embeddings_regularizer="l2"),
                    L.Flatten(),
                    L.Dense(2),
                ]
            ),
            optimizer=lambda: keras.optimizers.Adam(0.05),
        ),
        lambda: batches(tokens, targets, size=10),
    ),
    "eager": Case(lambda: dense(run_eagerly=True, metrics=["mae"]), weighted),
    "eager_embedding": Case(
        lambda: embedding(run_eagerly=True), lambda: batches(tokens, targets, size=10)
    ),
    "eager_subclassed": Case(lambda: compiled(Subclassed(), run_eagerly=True), plain),
    "xla": Case(lambda: dense(jit_compile=True, metrics=["mae"]), weighted),
    "xla_embedding": Case(
        lambda: embedding(jit_compile=True), lambda: batches(tokens, targets, size=10)
    ),
    "steps_per_execution_2": Case(lambda: dense(steps_per_execution=2), plain),
    "steps_per_execution_3": Case(lambda: dense(steps_per_execution=3, metrics=["mae"]), plain),
    "steps_per_execution_7": Case(lambda: dense(steps_per_execution=7), plain),
    "steps_per_execution_infinite": Case(
        lambda: dense(steps_per_execution=2), lambda: plain().repeat(), {"steps_per_epoch": 5}
    ),
    "steps_per_epoch_finite": Case(
        dense, lambda: batches(x, targets, size=3), {"steps_per_epoch": 2, "epochs": 4}
    ),
    "steps_per_epoch_divides": Case(
        dense, lambda: batches(x, targets, size=4), {"steps_per_epoch": 3, "epochs": 4}
    ),
    "steps_per_epoch_infinite": Case(
        dense, lambda: plain().repeat(), {"steps_per_epoch": 2, "epochs": 4}
    ),
    "shuffled": Case(
        dense,
        lambda: tf.data.Dataset.from_tensor_slices((x, targets)).shuffle(23, seed=4).batch(10),
    ),
    "shuffled_steps_per_epoch": Case(
        dense,
        lambda: (
            tf.data.Dataset.from_tensor_slices((x, targets)).shuffle(23, seed=4).batch(5).repeat()
        ),
        {"steps_per_epoch": 4},
    ),
    "initial_epoch": Case(dense, plain, {"initial_epoch": 2, "epochs": 4}),
    "validation_dataset": Case(
        lambda: dense(metrics=["mae"]),
        plain,
        {"validation_data": lambda: batches(x[:9], targets[:9], size=4)},
    ),
    "validation_arrays": Case(
        lambda: dense(weighted_metrics=["mae"]),
        plain,
        {"validation_data": (x[:9], targets[:9], weights[:9])},
    ),
    "validation_freq": Case(
        dense, plain, {"validation_data": (x[:9], targets[:9]), "validation_freq": 2, "epochs": 5}
    ),
    "validation_freq_list": Case(
        dense,
        plain,
        {"validation_data": (x[:9], targets[:9]), "validation_freq": [1, 4], "epochs": 5},
    ),
    "validation_steps": Case(
        dense,
        plain,
        {"validation_data": lambda: plain().repeat(), "validation_steps": 3},
    ),
}


@functools.cache
def fitted(name):
    return fit(CASES[name])


# fit warns of variables without a gradient, and so does train.
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize(
    ("name", "accum"),
    [
        pytest.param(name, accum, marks=pytest.mark.xdist_group(name))
        for name, case in CASES.items()
        # Arguments of fit say what to train on, which no cut changes.
        for accum in ([1, 3] if case.arguments and "class_weight" not in name else [1, 3, 10])
    ],
)
def test_case(name, accum):
    assert_same(fitted(name), train(CASES[name], accum), rtol=0 if accum == 1 else 1e-9)


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_dataset_of_unknown_length_counts_no_phantom_update(accum, steps_per_execution):
    """Against fit on the same data with known length: on unknown length fit itself is wrong."""
    make_model = functools.partial(
        dense,
        optimizer=lambda: keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), weight_decay=0.1
        ),
        steps_per_execution=steps_per_execution,
    )
    known = Case(make_model, lambda: batches(x, targets, size=10, rows=20))
    unknown = Case(make_model, lambda: known.make_ds().filter(lambda *_: True))
    assert unknown.make_ds().cardinality() == tf.data.UNKNOWN_CARDINALITY
    assert_same(fit(known), train(unknown, accum), rtol=0 if accum == 1 else 1e-9)


@pytest.mark.parametrize("accum", [1, 3])
def test_optionals_are_missing_leaves(accum):
    """Keras' own array adapter marks a missing leaf by an empty Optional."""
    inputs = {"a": keras.Input([5], name="a"), "b": keras.Input([5], name="b", optional=True)}

    class Either(L.Layer):
        def call(self, a, b):
            return a if b is None else a + b

    def make_model():
        return compiled(keras.Model(inputs, L.Dense(2)(Either()(inputs["a"], inputs["b"]))))

    def make_ds():
        nothing = tf.experimental.Optional.empty(tf.TensorSpec([None, 5], tf.float64))
        return plain().map(lambda a, b: ({"a": a, "b": nothing}, b))

    case = Case(make_model, make_ds)
    assert_same(fit(case), train(case, accum), rtol=0 if accum == 1 else 1e-9)


@pytest.mark.parametrize("accum", [1, 4])
def test_losses_of_outputs_are_weighted_by_rows(accum):
    """Where the batch dimension is not static, fit's own mean of them is not weighted."""
    case = Case(
        CASES["two_outputs"].make_model,
        lambda: batches(x, targets, labels, size=10).map(lambda a, b, c: (a, (b, c))),
        epochs=1,
    )
    # One batch an epoch: then what fit reports is the loss of the batch.
    each = fit(case, epochs=3, steps_per_epoch=1)
    whole = train(case, accum)
    for name in ("loss", "a_loss", "b_loss"):
        expected = np.average(each.history[name], weights=[10, 10, 3])
        np.testing.assert_allclose(whole.history[name], [expected], rtol=1e-9)


@pytest.mark.parametrize("accum", [1, 3])
def test_a_batch_without_rows(accum):
    """Nothing to learn from, but an update: momentum and regularizers move the weights.

    Not with `run_eagerly`, where fit itself fails on it.
    """

    def make_model():
        return compiled(
            keras.Sequential(
                [
                    keras.Input([4], dtype="int64"),
                    L.Embedding(9, 3, embeddings_regularizer="l2"),
                    L.Flatten(),
                    L.Dense(2, kernel_regularizer="l2"),
                ]
            )
        )

    def make_ds():
        spec = (tf.TensorSpec([None, 4], tf.int64), tf.TensorSpec([None, 2], tf.float64))
        rows = [(tokens[:10], targets[:10]), (tokens[:0], targets[:0]), (tokens[:3], targets[:3])]
        ds = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=spec)
        return ds.apply(tf.data.experimental.assert_cardinality(3))

    case = Case(make_model, make_ds)
    assert_same(fit(case), train(case, accum), rtol=0 if accum == 1 else 1e-9)


class OnlyInTraining(keras.Model):
    """A layer that inference does not call: it is built, and trained, all the same."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.auxiliary = L.Dense(4), L.Dense(2), L.Dense(1)

    def call(self, inputs, training=False):
        hidden = self.first(inputs)
        if training:
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(self.auxiliary(hidden))))
        return self.last(hidden)


@pytest.mark.parametrize("accum", [1, 3])
def test_a_layer_for_training_only(accum):
    case = Case(lambda: compiled(OnlyInTraining()), plain)
    assert_same(fit(case), train(case, accum), rtol=0 if accum == 1 else 1e-9)


def test_more_micro_batches_than_an_integer_holds():
    case = CASES["plain"]
    assert_same(fit(case), train(case, 10**20))


class OwnVariable(L.Layer):
    """Creates a variable from an array, and counts its calls in one that is not Keras'."""

    def build(self, input_shape):
        self.scale = keras.Variable(np.full(input_shape[-1:], 1.5))
        self.calls = tf.Variable(0, trainable=False)

    def call(self, inputs):
        self.calls.assign_add(1)
        return inputs * self.scale


@pytest.mark.parametrize("accum", [1, 3])
def test_a_model_is_built_as_fit_builds_it(accum):
    case = Case(
        lambda: compiled(keras.Sequential([OwnVariable(), L.Dense(2)])), plain, {"epochs": 1}
    )
    models = [fresh_model(case), fresh_model(case)]
    models[0].fit(case.make_ds(), shuffle=False, verbose=0)
    with contextlib.ExitStack() as stack:
        if accum > 1:
            stack.enter_context(pytest.warns(UserWarning, match="own_variable.*a micro-batch"))
        accumloop.train(models[1], case.make_ds(), accum, verbose=0)
    shapes = [(model.input_shape, model.get_build_config()) for model in models]
    assert shapes[0] == shapes[1]
    if accum == 1:
        calls = [int(model.layers[0].calls) for model in models]
        assert calls[0] == calls[1], "nothing is run before the first step"


def test_an_epoch_that_fit_has_left_behind_is_forgotten(tmp_path):
    case = CASES["plain"]
    model = case.make_model()
    model._initial_epoch = 2
    assert accumloop.train(model, case.make_ds(), 3, epochs=2, verbose=0).epoch == [0, 1]


def test_a_model_without_an_optimizer():
    class Constant(keras.Sequential):
        def train_step(self, data):
            return {"own": tf.constant(1.0)}

    def make_model():
        model = Constant([keras.Input([5]), L.Dense(2)])
        model.compile(loss="mse")
        model.optimizer = None
        return model

    history = accumloop.train(make_model(), plain(), 1, verbose=0)
    assert history.history == {"own": [1.0]}


@pytest.mark.parametrize("arguments", [{"epochs": 0}, {"epochs": 2, "initial_epoch": 2}])
def test_no_epoch_to_run(arguments):
    """The optimizer is built before `on_train_begin`, which fit leaves to the first update."""
    case = Case(dense, plain, arguments)
    expected, actual = fit(case), train(case, 3)
    assert set(expected.optimizer) < set(actual.optimizer)
    assert_same(expected, dataclasses.replace(actual, optimizer=expected.optimizer), rtol=0)


@pytest.mark.parametrize("accum", [1, 3])
def test_limits_for_debugging_runs(accum):
    case = Case(dense, functools.partial(batches, x, targets, size=4), {"epochs": 4})
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        with pytest.warns(UserWarning, match="Limiting"):
            expected = fit(case)
        with pytest.warns(UserWarning, match="Limiting (epochs to 2|steps_per_epoch to 3)"):
            actual = train(case, accum)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert_same(expected, actual, rtol=0 if accum == 1 else 1e-9)


def test_running_out_of_data_warns_as_fit_does():
    case = Case(dense, functools.partial(batches, x, targets, size=10), {"steps_per_epoch": 5})
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        expected = fit(case)
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        actual = train(case, 3)
    assert_same(expected, actual)


@pytest.mark.parametrize("accum", [2, 5])
def test_dropout_draws_anew_for_each_micro_batch_and_repeats_under_a_seed(accum):
    drawn = []

    class Recorder(L.Layer):
        def call(self, inputs):
            tf.py_function(lambda value: drawn.append(value.numpy()), [inputs], [])
            return inputs

    def make_model():
        return compiled(
            keras.Sequential([keras.Input([50]), L.Dropout(0.5), Recorder(), L.Dense(1)]),
            run_eagerly=True,
        )

    ones = np.ones([10, 50])
    case = Case(make_model, lambda: batches(ones, ones[:, :1], size=10), epochs=1)
    first = train(case, accum)
    masks = [value[0] for value in drawn[-accum:]]
    assert len({mask.tobytes() for mask in masks}) == accum
    assert_same(first, train(case, accum), rtol=0)


def test_dropout_with_one_micro_batch_draws_as_fit_does():
    case = Case(lambda: dense(layer=L.Dropout(0.5)), plain)
    assert_same(fit(case), train(case, 1), rtol=0)


@pytest.mark.parametrize("name", ["train_step", "compute_loss", "compute_metrics"])
def test_one_micro_batch_runs_the_models_own_methods(name):
    """With accum=1 a batch is not cut, and whatever a model does is what it does under fit."""

    class Own(keras.Sequential):
        pass

    def train_step(self, data):
        return {**keras.Sequential.train_step(self, data), "extra": tf.constant(1.5)}

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {"loss": keras.ops.mean(y_pred)}

    setattr(Own, name, locals()[name])
    case = Case(lambda: compiled(Own([L.Dense(2)])), plain)
    assert_same(fit(case), train(case, 1), rtol=0)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("mixed_bfloat16", 4e-2), ("mixed_float16", 5e-3)]
)
def test_mixed_precision(policy, tolerance):
    """As near to fit as rounding allows, which is nearer than what a wrong mean would train."""
    single = x[:20].astype("float32"), (targets[:20] + 1.0).astype("float32")
    case = Case(
        under_policy(policy, functools.partial(dense, metrics=["mae"])),
        lambda: batches(*single, size=5),
    )
    expected = fit(case)
    assert_same(expected, train(case, 1), rtol=0)
    assert_same(expected, train(case, 3), rtol=tolerance)
    # The mean of the means of 1, 2 and 2 rows is that of all rows with these weights.
    rows = np.tile(np.array([2, 1, 1, 1, 1], "float32") * 5 / 6, 4)
    wrong = fit(dataclasses.replace(case, make_ds=lambda: batches(*single, rows, size=5)))
    start = {v.path: keras.ops.convert_to_numpy(v) for v in fresh_model(case).weights}
    assert max(distances(expected.weights, wrong.weights)) > 5 * tolerance
    assert min(distances(expected.weights, start)) > 5 * tolerance


@pytest.mark.parametrize(("policy", "rows"), [("bfloat16", 256), ("float16", 2048)])
def test_gradients_of_half_precision_variables_are_summed_in_float32(policy, rows):
    """Micro-batches of a row: 1, then many a `1 / rows`, which 1 in this dtype would swallow."""
    one = keras.ops.cast(1.0, policy)
    assert one + one / rows == one
    features = np.ones([rows, 1], "float32")
    features[0], features[-1] = rows, 2  # They add up to 2 * rows.

    def make_model():
        # The gradient is the mean of the features.
        last = L.Dense(1, kernel_initializer="zeros", use_bias=False)
        return compiled(
            keras.Sequential([keras.Input([1]), last]),
            lambda y_true, y_pred: keras.ops.mean(y_pred, axis=-1),
            lambda: keras.optimizers.SGD(1.0),
        )

    case = Case(
        under_policy(policy, make_model), lambda: batches(features, features, size=rows), epochs=1
    )
    (kernel,) = train(case, rows).weights.values()
    assert kernel.dtype == policy
    assert float(kernel[0, 0]) == -2.0


@pytest.mark.parametrize("accum", [1, 4])
def test_a_micro_batch_that_overflows_skips_the_whole_update(accum):
    def make_model():
        model = keras.Sequential([keras.Input([5]), L.Dense(1, kernel_initializer="ones")])
        model.compile(
            keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=8.0),
            "mse",
        )
        return model

    bad = x.copy()
    bad[3] = np.inf
    case = Case(make_model, lambda: batches(bad, targets[:, :1], size=10), epochs=1)
    expected, actual = fit(case), train(case, accum)
    assert actual.iterations == expected.iterations == 2
    for name, wanted in (expected.weights | expected.optimizer).items():
        np.testing.assert_allclose((actual.weights | actual.optimizer)[name], wanted, rtol=1e-9)


def test_no_trainable_variable_warns_as_fit_does():
    def make_model():
        model = dense(metrics=["mae"])
        model.trainable = False
        return compiled(model, metrics=["mae"])

    case = Case(make_model, plain)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        expected = fit(case)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        actual = train(case, 3)
    assert_same(expected, actual)


def test_a_saved_model_holds_nothing_of_accumloop(tmp_path):
    case = CASES["plain"]
    model = case.make_model()
    accumloop.train(model, case.make_ds(), 3, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert "accumloop" not in (tmp_path / "model.keras").read_bytes().decode("latin1")
    assert [v.shape for v in loaded.optimizer.variables] == [
        v.shape for v in model.optimizer.variables
    ]
    for loaded_value, value in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(loaded_value, value)
