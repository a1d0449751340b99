"""Bad input: an error that says what to do, before anything has changed."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import batches, data

import accumloop

x, labels, targets, weights = data()
L = keras.layers


class SpoiltError(Exception):
    """Raised by a test in the middle of training."""


def make_model(optimizer=None, loss="mse", **options):
    model = keras.Sequential([keras.Input([5]), L.Dense(2)])
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), loss, **options)
    return model


def ds():
    return batches(x, targets, size=10)


def state_of(model):
    optimizer = model.optimizer.variables if model.compiled and model.optimizer else []
    return {v.path: keras.ops.convert_to_numpy(v) for v in [*model.variables, *optimizer]}


def refuse(error, match, model=None, data=None, accum=2, **arguments):
    """Assert that train raises, and leaves all values as they were: it may have built a model."""
    model = make_model() if model is None else model
    is_model = isinstance(model, keras.Model)
    before = state_of(model) if is_model else {}
    with pytest.raises(error, match=match):
        accumloop.train(model, ds() if data is None else data, accum, verbose=0, **arguments)
    after = state_of(model) if is_model else {}
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert not is_model or not model.compiled or int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("accum", "error", "match"),
    [
        (0, ValueError, "must be at least 1.* Received: accum=0"),
        (-1, ValueError, "must be at least 1.* Received: accum=-1"),
        (2.5, TypeError, r"must be an int.* Received: accum=2\.5 \(of type float\)"),
        ("4", TypeError, "must be an int.* Received: accum='4'"),
        (True, TypeError, "must be an int.* Received: accum=True"),
        (None, TypeError, "must be an int.* Received: accum=None"),
    ],
)
def test_accum(accum, error, match):
    refuse(error, match, accum=accum)


def test_accum_of_numpy_is_an_int():
    accumloop.train(make_model(), ds(), np.int64(3), verbose=0)


def test_not_a_model():
    refuse(TypeError, "`model` must be a `keras.Model`. Received: model=<Dense", L.Dense(1))


def test_not_compiled():
    model = keras.Sequential([keras.Input([5]), L.Dense(2)])
    refuse(ValueError, r"call `model\.compile\(\)` before", model)


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    refuse(ValueError, r"TensorFlow backend.* Received: keras\.backend\.backend\(\)='jax'")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: keras.optimizers.LossScaleOptimizer(optimizer),
    ],
    ids=["plain", "loss_scale"],
)
def test_an_optimizer_that_accumulates_itself(wrap):
    optimizer = wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    refuse(ValueError, "a second time.* gradient_accumulation_steps=4", make_model(optimizer))


def test_optimizers_of_which_one_accumulates_itself():
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return
    optimizer = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1),
            {".*bias": keras.optimizers.Adam(gradient_accumulation_steps=2)},
        )
    )
    refuse(ValueError, "a second time.* gradient_accumulation_steps=2", make_model(optimizer))


def test_a_strategy():
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = make_model()
    refuse(NotImplementedError, "strategy are not supported yet", model)


def test_arrays_are_no_dataset():
    refuse(TypeError, r"from_tensor_slices\(\(x, y\)\)\.batch", data=(x, targets))
    refuse(TypeError, r"Received: ds of type ndarray", data=x)


@pytest.mark.parametrize(
    "unbatched",
    [
        lambda: tf.data.Dataset.from_tensor_slices((x, labels)),
        lambda: tf.data.Dataset.from_tensor_slices((x, targets)),
    ],
    ids=["scalar_labels", "rows_disagree"],
)
def test_unbatched(unbatched):
    refuse(ValueError, r"ds = ds\.batch\(batch_size\)", data=unbatched())


def test_leaves_disagree_in_the_first_batch():
    """Known only when read: the batch dimension of a generator's tensors is None."""
    spec = (tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2]))
    uneven = tf.data.Dataset.from_generator(
        lambda: iter([(x[:10], targets[:9])]), output_signature=spec
    )
    refuse(ValueError, r"same number of rows.* numbers of rows \[9, 10\]", data=uneven)


def test_leaves_disagree_in_a_later_batch():
    spec = (tf.TensorSpec([None, 5]), tf.TensorSpec([None, 2]))
    later = tf.data.Dataset.from_generator(
        lambda: iter([(x[:10], targets[:10]), (x[:10], targets[:9])]), output_signature=spec
    )
    model = make_model()
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        accumloop.train(model, later, 3, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize(
    "empty",
    [lambda: ds().take(0), lambda: ds().filter(lambda *_: False)],
    ids=["known", "unknown"],
)
def test_an_empty_dataset_warns_as_fit_does(empty, accum):
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        expected = make_model().fit(empty(), shuffle=False, verbose=0, epochs=2)
    model = make_model()
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        history = accumloop.train(model, empty(), accum, verbose=0, epochs=2)
    assert history.history == expected.history == {}
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"epochs": -1}, ValueError, "`epochs` must be at least 0. Received: epochs=-1"),
        ({"epochs": 1.5}, TypeError, r"`epochs` must be an int\. Received: epochs=1\.5"),
        ({"initial_epoch": -1}, ValueError, "`initial_epoch` must be at least 0"),
        ({"steps_per_epoch": 0}, ValueError, "`steps_per_epoch` must be at least 1"),
        ({"steps_per_epoch": "3"}, TypeError, "`steps_per_epoch` must be an int or None"),
        ({"validation_steps": -2}, ValueError, "`validation_steps` must be at least 1"),
        ({"validation_freq": "2"}, ValueError, "Expected `validation_freq` to be a list or int"),
        ({"validation_freq": 0}, ValueError, "`validation_freq` must be at least 1"),
        ({"callbacks": [print]}, TypeError, "`callbacks` must be .* Received: <built-in"),
        ({"callbacks": "tensorboard"}, TypeError, "`callbacks` must be"),
        ({"class_weight": {}}, ValueError, "`class_weight` must be a dict"),
        ({"class_weight": [1.0, 2.0]}, ValueError, "`class_weight` must be a dict"),
        ({"class_weight": {"a": 1.0}}, ValueError, "from class ids, ints >= 0"),
        ({"class_weight": {-1: 1.0}}, ValueError, "from class ids, ints >= 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments(arguments, error, match):
    refuse(error, match, **arguments)


@pytest.mark.parametrize("verbose", [3, "loud", None])
def test_verbose(verbose):
    with pytest.raises(ValueError, match="`verbose` must be"):
        accumloop.train(make_model(), ds(), 2, verbose=verbose)


def test_class_weight_with_sample_weight():
    weighted = batches(x, targets, weights, size=10)
    refuse(ValueError, "cannot be used at the same time", data=weighted, class_weight={0: 1.0})


def test_class_weight_with_nested_labels():
    nested = ds().map(lambda a, b: (a, {"a": b, "b": b}))
    refuse(
        ValueError, "only supported for models with a single", data=nested, class_weight={0: 1.0}
    )


@pytest.mark.parametrize("accum", [1, 2])
def test_no_loss(accum):
    model = keras.Sequential([keras.Input([5]), L.Dense(2)])
    model.compile("sgd")
    refuse(ValueError, "No loss to compute", model, accum=accum)


@pytest.mark.parametrize("accum", [1, 2])
def test_shapes_that_do_not_fit_the_model(accum):
    wrong = batches(x[:, :4], targets, size=10)
    refuse(ValueError, "incompatible with the layer|expected shape", data=wrong, accum=accum)


def contrastive(y_true, y_pred):
    logits = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return keras.ops.logsumexp(logits, axis=-1) - keras.ops.diagonal(logits)


def soft_f1(y_true, y_pred):
    y_pred, y_true = keras.ops.sigmoid(y_pred), keras.ops.abs(y_true)
    overlap = keras.ops.sum(y_true * y_pred)
    return 1 - 2 * overlap / keras.ops.sum(y_true + y_pred)


def summed(y_true, y_pred):
    return keras.ops.sum(keras.ops.square(y_true - y_pred))


class SumPenalty(L.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.sum(keras.ops.square(inputs)))
        return inputs


class Centred(L.Layer):
    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True)


class CentredInTraining(L.Layer):
    def call(self, inputs, training=False):
        return inputs - keras.ops.mean(inputs, axis=0, keepdims=True) if training else inputs


class TracksItsInputs(L.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean_of_inputs")

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


def sequence_ds():
    sequences = np.random.default_rng(0).normal(size=(23, 4, 5))
    sequences[::3, 2:] = 0.0
    return batches(sequences, sequences[:, :, :2], size=10)


def with_layer(layer, loss="mse"):
    model = keras.Sequential([keras.Input([5]), layer, L.Dense(2)])
    model.compile("sgd", loss)
    return model


def stateful():
    model = keras.Sequential([keras.Input([4, 5], batch_size=10), L.LSTM(2, stateful=True)])
    model.compile("sgd", "mse")
    return model


missing = np.where(np.arange(23)[:, None] % 4 == 1, -99.0, targets)
tokens = np.random.default_rng(1).integers(1, 6, size=(23, 4))


def mean_of_observed(y_true, y_pred):
    observed = keras.ops.cast(keras.ops.not_equal(y_true, -99.0), y_pred.dtype)
    return keras.ops.sum(keras.ops.square(y_true - y_pred) * observed) / keras.ops.sum(observed)


class SummedLookup(L.Layer):
    """Looks up each id of a row once, and counts it as often as it is there."""

    def __init__(self, hidden):
        super().__init__()
        self.look_up = tf.function(self.sums) if hidden else self.sums

    def build(self, input_shape):
        self.table = self.add_weight(shape=(6, 3), name="table")

    def sums(self, ids):
        sparse = tf.sparse.from_dense(tf.cast(ids, tf.int64))
        return tf.nn.embedding_lookup_sparse(self.table.value, sparse, None, combiner="sum")

    def call(self, ids):
        summed = self.look_up(ids)
        summed.set_shape([None, 3])
        return summed


def summed_lookup(*, hidden=False, **options):
    model = keras.Sequential([keras.Input([4]), SummedLookup(hidden), L.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


class OnlyEager(L.Layer):
    def call(self, inputs):
        if not isinstance(inputs, keras.KerasTensor) and tf.executing_eagerly():
            return inputs * float(np.max(inputs.numpy()) > -np.inf)
        if getattr(inputs, "graph", None) is not None and inputs.graph.name == "micro_step":
            raise SpoiltError
        return inputs


def untraceable():
    model = keras.Sequential(
        [keras.Input([4]), L.Embedding(6, 3), L.Flatten(), OnlyEager(), L.Dense(2)]
    )
    model.compile("adam", "mse", run_eagerly=True)
    return model


class OwnFunction(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


def own_make_train_function():
    model = OwnFunction([keras.Input([5]), L.Dense(2)])
    model.compile("sgd", "mse")
    return model


class Padded(keras.Model):
    """A loss value for each position of a ragged batch that is padded to its longest row."""

    def __init__(self):
        super().__init__()
        self.last = L.Dense(2)

    def call(self, inputs):
        return self.last(inputs.to_tensor()[:, :, None])


def padded():
    model = Padded()
    model.compile("sgd", lambda y_true, y_pred: keras.ops.mean(keras.ops.square(y_pred), axis=-1))
    return model


def ragged_ds(lengths):
    ragged = tf.ragged.constant([[1.0] * n for n in lengths], dtype=tf.float64)
    return tf.data.Dataset.from_tensor_slices((ragged, targets)).batch(10)


INEXACT = {
    "ragged_values": (
        padded,
        lambda: ragged_ds([2, 2, 2] + [1 + i % 4 for i in range(20)]),
        "must be a mean over its rows",
    ),
    "ragged_values_seen_late": (
        padded,
        lambda: ragged_ds([2] * 10 + [1 + i % 4 for i in range(13)]),
        "different numbers of loss values",
    ),
    "contrastive": (lambda: make_model(loss=contrastive), ds, "must be a mean over its rows"),
    "soft_f1": (lambda: make_model(loss=soft_f1), ds, "must be a mean over its rows"),
    "summed_in_a_function": (lambda: make_model(loss=summed), ds, "must be a mean over its rows"),
    "add_loss_of_a_sum": (lambda: with_layer(SumPenalty()), ds, r"layers add \(`add_loss`\)"),
    "rows_depend_on_rows": (lambda: with_layer(Centred()), ds, "must be a mean over its rows"),
    "rows_depend_on_rows_in_training": (
        lambda: with_layer(CentredInTraining()),
        ds,
        "must be a mean over its rows",
    ),
    "contrastive_beside_a_metric": (
        lambda: with_layer(TracksItsInputs(), contrastive),
        ds,
        "must be a mean over its rows",
    ),
    "contrastive_with_dropout": (
        lambda: with_layer(L.Dropout(0.5), contrastive),
        ds,
        "must be a mean over its rows",
    ),
    "eager_lookup_that_cannot_be_traced": (
        untraceable,
        lambda: batches(tokens, targets, size=10),
        "must be one that can be traced",
    ),
    "hidden_lookup": (
        lambda: summed_lookup(hidden=True),
        lambda: batches(tokens, targets, size=10),
        "looked up inside a `tf.function`",
    ),
    "mean_of_observed": (
        lambda: make_model(loss=mean_of_observed),
        lambda: batches(x, missing, size=10),
        "must be a mean over its rows",
    ),
    "mean_of_observed_in_one_row": (
        lambda: make_model(loss=mean_of_observed),
        lambda: batches(x, np.where(np.arange(23)[:, None] == 0, -99.0, targets), size=10),
        "must be a mean over its rows",
    ),
    "weights_of_a_mean": (
        lambda: make_model(loss=lambda a, b: keras.ops.mean(keras.ops.square(a - b))),
        lambda: batches(x, targets, np.ones(23), size=10),
        "weights weigh rows",
    ),
    "own_make_train_function": (
        own_make_train_function,
        ds,
        "its own `make_train_function` is not supported",
    ),
    "stateful": (stateful, sequence_ds, "A stateful layer is not supported"),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_would_train_something_else_is_refused(name):
    make, make_ds, match = INEXACT[name]
    refuse(NotImplementedError, match, make(), make_ds(), accum=3)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_lookup_that_sums_is_exact(options):
    results = []
    for run in (
        lambda model, data: model.fit(data, epochs=3, shuffle=False, verbose=0),
        lambda model, data: accumloop.train(model, data, 3, epochs=3, verbose=0),
    ):
        keras.utils.set_random_seed(0)
        model = summed_lookup(**options)
        run(model, batches(tokens, targets, size=10))
        results.append(model.get_weights())
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_a_loss_that_leaves_out_rows_is_seen_where_it_does():
    """The first batch has no row to leave out."""

    def observed(y_true, y_pred):
        return tf.boolean_mask(keras.ops.square(y_true - y_pred), tf.not_equal(y_true, -99.0))

    late = np.where(np.arange(23)[:, None] == 15, -99.0, targets)
    model = make_model(loss=observed)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must return values for each row"):
        accumloop.train(model, batches(x, late, size=10), 2, verbose=0)


def test_a_variable_that_its_gradient_overwrites_is_refused():
    model = make_model()
    model.layers[0].kernel.overwrite_with_gradient = True
    refuse(NotImplementedError, "whose gradient is its next value", model)


def test_a_generator_for_validation():
    refuse(TypeError, "`validation_data` must be", validation_data=(i for i in [(x, targets)]))


def test_random_outputs_do_not_look_like_coupled_rows():
    """A layer that samples also at inference, as in a variational autoencoder."""

    class Sampling(L.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)

        def call(self, inputs):
            noise = keras.random.normal(keras.ops.shape(inputs), dtype=inputs.dtype, seed=self.seed)
            return inputs + noise

    accumloop.train(with_layer(Sampling()), ds(), 3, verbose=0)


def test_a_layer_that_moves_state_in_each_pass_warns():
    class Counting(L.Layer):
        def build(self, input_shape):
            self.count = self.add_weight(shape=[], initializer="zeros", trainable=False, name="n")

        def call(self, inputs, training=False):
            if training:
                self.count.assign_add(1.0)
            return inputs

    layer = Counting()
    with pytest.warns(UserWarning, match=r"Each forward pass in training updates \[.*n'\]"):
        accumloop.train(with_layer(layer), ds(), 3, verbose=0)
    assert float(layer.count) == 9.0  # batches of 10, 10 and 3 rows, in 3 micro-batches each


def root_mean_square(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


class TracksASum(L.Layer):
    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean(name="mean_of_sums")

    def call(self, inputs):
        self.mean.update_state(keras.ops.sum(keras.ops.abs(inputs)))
        return inputs


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: make_model(metrics=["mae", root_mean_square]), "root_mean_square"),
        (lambda: with_layer(TracksASum()), "mean_of_sums"),
    ],
    ids=["function", "layer"],
)
def test_a_metric_that_depends_on_the_cut_warns(make, name):
    with pytest.warns(UserWarning, match=rf"The metrics \['{name}'\] of a batch are not those"):
        accumloop.train(make(), ds(), 3, verbose=0)


def test_a_first_batch_of_one_row_is_not_taken_for_proof():
    model = make_model(loss=contrastive)
    accumloop.train(model, ds().unbatch().batch(1).take(2), 3, verbose=0)
    with pytest.raises(NotImplementedError, match="must be a mean over its rows"):
        accumloop.train(model, ds(), 3, verbose=0)


@pytest.mark.parametrize("accum", [1, 3])
def test_rows_that_disagree_are_refused_in_a_second_run_too(accum):
    def pairs(rows):
        spec = tf.TensorSpec([None, 5], tf.float64), tf.TensorSpec([None, 2], tf.float64)
        return tf.data.Dataset.from_generator(
            lambda: iter([(np.ones([10, 5]), np.ones([rows, 2]))]), output_signature=spec
        )

    model = make_model()
    accumloop.train(model, pairs(10), accum, verbose=0)
    with pytest.raises(ValueError, match="same number of rows"):
        accumloop.train(model, pairs(9), accum, verbose=0)


def test_unbatched_of_unknown_rank():
    unknown = tf.data.Dataset.from_generator(lambda: iter([1.0, 2.0]), output_types=tf.float64)
    refuse(ValueError, r"ds = ds\.batch\(batch_size\)", data=unknown)


@pytest.mark.parametrize("error", [SpoiltError, KeyboardInterrupt])
@pytest.mark.parametrize("event", ["on_train_batch_end", "on_epoch_begin", "on_train_begin"])
def test_an_exception_leaves_the_model_usable(event, error):
    class Spoil(keras.callbacks.Callback):
        pass

    def spoil(self, *args, **kwargs):
        raise error

    setattr(Spoil, event, spoil)
    model = make_model(metrics=["mae"])
    with pytest.raises(error):
        accumloop.train(model, ds(), 3, verbose=0, callbacks=[Spoil()])
    assert "update_state" not in vars(model.metrics[0])
    assert keras.losses.Loss.__call__.__module__.startswith("keras.")
    for door in (
        lambda: model.fit(ds(), shuffle=False, verbose=0),
        lambda: accumloop.train(model, ds(), 3, verbose=0),
    ):
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        for variable in model.optimizer.variables:
            variable.assign(keras.ops.zeros_like(variable))
        model.optimizer.learning_rate = 0.1
        assert door().history["loss"][0] == pytest.approx(_loss_of_ones(), rel=1e-9)


def _loss_of_ones():
    model = make_model(metrics=["mae"])
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    return model.fit(ds(), shuffle=False, verbose=0).history["loss"][0]


def test_an_error_while_tracing_leaves_the_model_usable():
    calls = []

    class Failing(L.Layer):
        def call(self, inputs):
            calls.append(tf.executing_eagerly())
            if not tf.executing_eagerly() and calls.count(False) == 2:
                raise SpoiltError
            return inputs

    model = with_layer(Failing())
    with pytest.raises(SpoiltError):
        accumloop.train(model, ds(), 3, verbose=0)
    assert keras.losses.Loss.__call__.__module__.startswith("keras.")
    accumloop.train(model, ds(), 3, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(ds(), shuffle=False, verbose=0)
