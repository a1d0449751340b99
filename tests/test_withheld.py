"""train() against fit: models with methods of their own, several optimizers, BatchNormalization."""

import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, assert_same, batches, data, fit, fresh_model, outcome_of, train

import accumloop

L = keras.layers
ops = keras.ops
x, labels, targets, weights = data()
plain = functools.partial(batches, x, targets, size=10)


def momentum(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def compiled(model, loss="mse", optimizer=momentum, **options):
    model.compile(optimizer(), loss, **options)
    return model


class ByComputeLoss(keras.Sequential):
    def train_step(self, data):
        bx, by = data
        with tf.GradientTape() as tape:
            y_pred = self(bx, training=True)
            loss = self.compute_loss(bx, by, y_pred)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(by, y_pred)
        return {metric.name: metric.result() for metric in self.metrics} | {"constant": 3}


class AddsToLogs(keras.Sequential):
    """Numbers read from before the update and after it, and of a batch."""

    def train_step(self, data):
        before = {"rate_before": self.optimizer.learning_rate * 2}
        logs = super().train_step(data) | before
        logs["rate"] = self.optimizer.learning_rate
        logs["updates"] = self.optimizer.iterations
        logs["norm"] = ops.norm(self.layers[0].kernel)
        logs["perplexity"] = ops.exp(logs["loss"])
        logs["hundred"] = tf.constant(100)
        return logs


class LoopsOverMetrics(keras.Sequential):
    """As Keras' guide to customizing `fit` does; the result of the compiled metrics is a dict."""

    def train_step(self, data):
        bx, by = data
        with tf.GradientTape() as tape:
            y_pred = self(bx, training=True)
            loss = self.compute_loss(y=by, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(by, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Distilled(keras.Model):
    """Learns from labels, and from a teacher that has been trained."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential([keras.Input([5]), L.Dense(3)])
        self.student = keras.Sequential([keras.Input([5]), L.Dense(4, "tanh"), L.Dense(3)])
        self.teacher.trainable = False
        self.divergence = keras.losses.KLDivergence()
        self.distilled = keras.metrics.Mean(name="distilled")

    def call(self, inputs, training=False):
        return self.student(inputs, training=training)

    def train_step(self, data):
        bx, by, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        taught = self.teacher(bx, training=False)
        with tf.GradientTape() as tape:
            y_pred = self.student(bx, training=True)
            own = self.compute_loss(bx, by, y_pred, sample_weight)
            distilled = self.divergence(ops.softmax(taught / 3), ops.softmax(y_pred / 3))
            loss = 0.3 * own + 0.7 * 9 * distilled
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.distilled.update_state(distilled)
        self._loss_tracker.update_state(loss)
        return self.compute_metrics(bx, by, y_pred, sample_weight)


class Autoencoder(keras.Model):
    """A VAE with two terms and trackers of its own; its noise is the first columns of its input."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input([5]), L.Dense(6, "tanh"), L.Dense(4)])
        self.decoder = keras.Sequential([keras.Input([2]), L.Dense(6, "tanh"), L.Dense(5)])
        names = ("total", "reconstruction", "divergence")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(data), 2, axis=-1)
            z = mean + ops.exp(0.5 * log_variance) * data[:, :2]
            reconstruction = ops.mean(ops.sum(ops.square(data - self.decoder(z)), axis=-1))
            divergence = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
            divergence = ops.mean(ops.sum(divergence, axis=-1))
            total = reconstruction + divergence
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(total, weights), weights, strict=True))
        for tracker, value in zip(self.trackers, (total, reconstruction, divergence), strict=True):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Adversarial(keras.Model):
    """A GAN with two optimizers, without noise; the generator reads weights from before."""

    def __init__(self, simultaneous=True):
        super().__init__()
        self.generator = keras.Sequential([keras.Input([5]), L.Dense(4, "tanh"), L.Dense(2)])
        self.critic = keras.Sequential([keras.Input([2]), L.Dense(4, "tanh"), L.Dense(1)])
        self.simultaneous = simultaneous
        self.critic_tracker = keras.metrics.Mean(name="critic")
        self.generator_tracker = keras.metrics.Mean(name="generator")

    def compile(self, optimizers):
        super().compile()
        self.optimizers = optimizers
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.critic_tracker, self.generator_tracker]

    def train_step(self, data):
        bx, real = data
        critic, generator = self.critic.trainable_weights, self.generator.trainable_weights
        with tf.GradientTape(persistent=True) as tape:
            made = self.critic(self.generator(bx))
            seen = self.critic(real)
            critic_loss = self.entropy(ops.ones_like(seen), seen)
            critic_loss += self.entropy(ops.zeros_like(made), made)
            generator_loss = self.entropy(ops.ones_like(made), made)
        of_critic = tape.gradient(critic_loss, critic)
        of_generator = tape.gradient(generator_loss, generator)
        self.optimizers["critic"].apply(of_critic, critic)
        self.optimizers["generator"].apply(of_generator, generator)
        self.critic_tracker.update_state(critic_loss)
        self.generator_tracker.update_state(generator_loss)
        return {"critic": self.critic_tracker.result(), "gen": self.generator_tracker.result()}


def adversarial():
    model = Adversarial()
    model.compile({"critic": momentum(0.1), "generator": keras.optimizers.Adam(0.01)})
    return model


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * ops.mean(ops.square(y_pred))


class OwnMetrics(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.largest = keras.metrics.MeanSquaredError(name="own")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(y, y_pred)
        results["own"] = self.largest.result()
        return results


MODELS = {
    "compute_loss_in_a_step": (
        lambda: compiled(ByComputeLoss([L.Dense(4, "tanh"), L.Dense(2)])),
        plain,
    ),
    "adds_to_logs": (
        lambda: compiled(
            AddsToLogs([L.Dense(4, kernel_regularizer="l2"), L.Dense(2)]),
            optimizer=lambda: keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), momentum=0.9
            ),
            metrics=["mae"],
        ),
        plain,
    ),
    "loops_over_metrics": (
        lambda: compiled(LoopsOverMetrics([L.Dense(4), L.Dense(2)]), metrics=["mae", "mse"]),
        lambda: batches(x, targets, size=10, rows=20),
    ),
    "distillation": (
        lambda: compiled(
            Distilled(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        ),
        lambda: batches(x, labels, weights, size=10),
    ),
    "autoencoder": (lambda: compiled(Autoencoder(), None), lambda: batches(x, size=10)),
    "adversarial": (adversarial, plain),
    "own_compute_loss": (
        lambda: compiled(OwnLoss([L.Dense(4, kernel_regularizer="l2"), L.Dense(2)])),
        plain,
    ),
    "own_compute_metrics": (
        lambda: compiled(OwnMetrics([L.Dense(4), L.Dense(2)]), metrics=["mae"]),
        plain,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_methods_of_a_models_own(name):
    case = Case(*MODELS[name])
    expected = fit(case)
    for accum in (1, 3, 10):
        assert_same(expected, train(case, accum))


@pytest.mark.parametrize("options", [{"jit_compile": True}, {"run_eagerly": True}])
def test_own_step_under_every_way_to_run(options):
    case = Case(
        lambda: compiled(ByComputeLoss([keras.Input([5]), L.Dense(4), L.Dense(2)]), **options),
        plain,
    )
    assert_same(fit(case), train(case, 3))


class Clipping(keras.Sequential):
    limit = 0.2

    def train_step(self, data):
        bx, by = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(bx, by, self(bx, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        gradients = [tf.clip_by_norm(gradient, self.limit) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def clipping():
    return compiled(Clipping([keras.Input([5]), L.Dense(2)]))


def test_what_a_step_clips_by_itself_is_clipped_for_each_micro_batch():
    """Weighted by rows, as a model's own step is; fit clips the whole batch's gradient."""

    def clipped_by_hand(ds, epochs, callbacks, verbose):
        model = by_hand
        for _ in range(epochs):
            for bx, by in ds:
                rows = len(bx)
                edges = [i * rows // 3 for i in range(4)]
                total = [tf.zeros_like(w) for w in model.trainable_weights]
                for start, stop in itertools.pairwise(edges):
                    with tf.GradientTape() as tape:
                        y_pred = model(bx[start:stop], training=True)
                        loss = model.compute_loss(bx[start:stop], by[start:stop], y_pred)
                    own = tape.gradient(loss, model.trainable_weights)
                    share = (stop - start) / rows
                    total = [
                        t + share * tf.clip_by_norm(g, model.limit)
                        for t, g in zip(total, own, strict=True)
                    ]
                model.optimizer.apply(total, model.trainable_weights)

    case = Case(clipping, plain)
    by_hand = fresh_model(case)
    clipped_by_hand(plain(), 3, [], 0)
    actual = train(case, 3)
    for variable in by_hand.weights:
        wanted = keras.ops.convert_to_numpy(variable)
        np.testing.assert_allclose(actual.weights[variable.path], wanted, rtol=1e-9)
    whole = fit(case).weights
    assert any(np.abs(whole[n] - actual.weights[n]).max() > 1e-4 for n in whole)


def test_a_second_optimizer_sees_weights_from_before_the_first_ones_update():
    class InTurn(Adversarial):
        def train_step(self, data):
            bx, real = data
            with tf.GradientTape() as tape:
                made, seen = self.critic(self.generator(bx)), self.critic(real)
                loss = self.entropy(ops.ones_like(seen), seen)
                loss += self.entropy(ops.zeros_like(made), made)
            critic = self.critic.trainable_weights
            self.optimizers["critic"].apply(tape.gradient(loss, critic), critic)
            with tf.GradientTape() as tape:
                made = self.critic(self.generator(bx))
                loss = self.entropy(ops.ones_like(made), made)
            generator = self.generator.trainable_weights
            self.optimizers["generator"].apply(tape.gradient(loss, generator), generator)
            return {}

    def make(kind):
        model = kind()
        model.compile({"critic": momentum(0.1), "generator": momentum(0.1)})
        return model

    in_turn = train(Case(lambda: make(InTurn), plain), 3)
    together = fit(Case(lambda: make(Adversarial), plain))
    for name, wanted in together.weights.items():
        np.testing.assert_allclose(in_turn.weights[name], wanted, rtol=1e-9)


class Repeats(keras.Sequential):
    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


def test_a_step_that_updates_the_same_weights_twice_warns():
    model = compiled(Repeats([keras.Input([5]), L.Dense(2)]))
    with pytest.warns(UserWarning, match="updates the same weights more than once"):
        accumloop.train(model, plain(), 3, verbose=0)
    assert int(model.optimizer.iterations) == 2 * 3


class Assigns(keras.Sequential):
    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_weights:
            weight.assign(weight * 0.99)
        return logs


class AssignsByValue(keras.Sequential):
    """Past the `assign` of Keras."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.layers[0].kernel.value.assign_sub(0.01 * self.layers[0].kernel)
        return logs


class Averages(keras.Sequential):
    """Has a kernel that follows the one that learns."""

    def __init__(self, layers):
        super().__init__(layers)
        self.mean = self.add_weight([5, 2], name="mean_kernel", trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        self.mean.assign(0.9 * self.mean + 0.1 * self.layers[0].kernel)
        return logs


class Counts(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False)

    def train_step(self, data):
        self.count.assign(self.count + 1)
        return super().train_step(data)


class CountsRaw(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.count = tf.Variable(0)

    @tf.function
    def count_one(self):
        self.count.assign_add(1)

    def train_step(self, data):
        self.count_one()
        return super().train_step(data)


hidden = []  # Optimizers that are no attributes.


class Hides(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        hidden.append(keras.optimizers.SGD(0.1))

    def train_step(self, data):
        bx, by = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(bx, by, self(bx))
        hidden[-1].apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


class InAFunction(keras.Sequential):
    @tf.function
    def learn(self, bx, by):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(bx, by, self(bx))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return loss

    def train_step(self, data):
        return {"loss": self.learn(*data)}


@pytest.mark.parametrize("fitted", [False, True], ids=["new", "fitted"])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Assigns, "assigns to a variable by itself.*dense.*kernel"),
        (Hides, "not an attribute of the model"),
        (Averages, "assigns to a variable by itself.*kernel"),
        (Counts, "assigns to a variable by itself.*count"),
        (CountsRaw, "assigns to a variable by itself.*Variable"),
        (AssignsByValue, "assigns to a variable by itself.*kernel"),
    ],
)
def test_a_step_that_cannot_be_held_back_is_refused(kind, match, options, fitted):
    model = compiled(kind([keras.Input([5]), L.Dense(2)]), **options)
    if fitted:
        model.fit(plain(), shuffle=False, verbose=0)
    before = model.get_weights()
    with pytest.raises(NotImplementedError, match=match):
        accumloop.train(model, plain(), 3, verbose=0)
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)
    assert "apply" not in vars(keras.optimizers.Optimizer)
    assert "apply" not in vars(model.optimizer)


@pytest.mark.parametrize("fitted", [False, True])
def test_an_optimizer_in_a_function_of_its_own(fitted):
    """Eagerly it is run as the rest; a graph cannot be taken out of."""
    case = Case(
        lambda: compiled(InAFunction([keras.Input([5]), L.Dense(2)]), run_eagerly=True), plain
    )
    if not fitted:
        assert_same(fit(case), train(case, 3))
    model = compiled(InAFunction([keras.Input([5]), L.Dense(2)]))
    if fitted:
        model.fit(plain(), shuffle=False, verbose=0)
    before = model.get_weights()
    with pytest.raises(NotImplementedError, match="must not hold a call of an optimizer"):
        accumloop.train(model, plain(), 3, verbose=0)
    for weight, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


class LossInAFunction(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.error = keras.losses.MeanSquaredError(reduction="sum")

    @tf.function
    def of(self, by, y_pred):
        return self.error(by, y_pred)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.of(y, y_pred)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_function_of_a_models_own_is_not_left_with_a_share(options):
    case = Case(lambda: compiled(LossInAFunction([keras.Input([5]), L.Dense(2)]), **options), plain)
    expected = fit(case)
    model = fresh_model(case)
    whole = model.evaluate(plain(), verbose=0)  # It is traced.
    actual = outcome_of(model, functools.partial(accumloop.train, model, accum=3), case)
    assert_same(expected, actual)
    assert model.evaluate(plain(), verbose=0) != whole


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_loss_scale_that_moves(own_step, options):
    kind = ByComputeLoss if own_step else keras.Sequential

    def make():
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return compiled(
            kind([keras.Input([5]), L.Dense(2)]),
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=8.0, dynamic_growth_steps=2
            ),
            **options,
        )

    case = Case(make, plain)
    assert_same(fit(case), train(case, 3))


class LateNormalization(keras.layers.Layer):
    def build(self, shape):
        self.inner = L.BatchNormalization(momentum=0.7)

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}], ids=["graph", "eager"])
def test_a_layer_that_makes_a_normalization_when_it_is_built(options):
    case = Case(
        lambda: compiled(ByComputeLoss([LateNormalization(), L.Dense(2)]), **options),
        lambda: batches(100.0 + x, targets, size=10),
    )
    expected, actual = statistics(fit(case)), statistics(train(case, 3))
    assert len(expected) == 2
    for path, wanted in expected.items():
        np.testing.assert_allclose(actual[path], wanted, rtol=1e-9, err_msg=path)


class DrawnMask(keras.Sequential):
    """A masked language model, in small: what is scored is drawn in the step."""

    def train_step(self, data):
        bx, by = data
        drawn = keras.random.uniform([ops.shape(bx)[0]], seed=self.layers[0].seed_generator) < 0.5
        weight = ops.cast(drawn, "float64")
        with tf.GradientTape() as tape:
            loss = self.compute_loss(bx, by, self(bx, training=True), weight)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"error": loss}


def test_a_mask_that_is_drawn_in_the_step_is_refused():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    layers = [keras.Input([5]), L.Dropout(0.5, seed=1), L.Dense(2)]
    model = compiled(DrawnMask(layers), loss)
    with pytest.raises(NotImplementedError, match="must not be drawn at random"):
        accumloop.train(model, plain(), 3, verbose=0)
    model = compiled(DrawnMask(layers), loss, run_eagerly=True)
    accumloop.train(model, plain(), 3, verbose=0)


def test_shares_of_a_drawn_mask_sum_up_eagerly():
    """Each part of a loss that is constant, so that it shows the sum of the shares."""

    class Constant(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return ops.sum(y_pred, -1) * 0.0 + 1.0

    loss = Constant(reduction="mean_with_sample_weight")
    layers = [keras.Input([5]), L.Dropout(0.5, seed=1), L.Dense(2)]
    model = compiled(DrawnMask(layers), loss, run_eagerly=True)
    history = accumloop.train(model, batches(x, targets, size=23), 3, epochs=3, verbose=0)
    np.testing.assert_allclose(history.history["error"], 1.0, rtol=1e-12)


def test_a_step_that_logs_no_numbers_is_refused():
    class Talks(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data) | {"what": object()}

    model = compiled(Talks([keras.Input([5]), L.Dense(2)]))
    with pytest.raises(TypeError, match="must be numbers or tensors of them"):
        accumloop.train(model, plain(), 3, verbose=0)


# BatchNormalization


sequences = np.random.default_rng(3).normal(2.0, 3.0, size=(23, 6, 3))
sequences *= (np.arange(6) < np.random.default_rng(4).integers(1, 7, 23)[:, None])[..., None]
images = np.random.default_rng(5).normal(size=(23, 4, 4, 2))


def normalized(*first, units=2, **options):
    model = keras.Sequential([*first, L.Flatten(), L.Dense(units)])
    return compiled(model, **options)


def nested_normalization():
    inner = keras.Sequential([keras.Input([5]), L.BatchNormalization(momentum=0.6)])
    return normalized(keras.Input([5]), keras.Sequential([inner]))


def masked_normalization():
    layers = [L.Masking(), L.BatchNormalization(momentum=0.7), L.GlobalAveragePooling1D()]
    return compiled(keras.Sequential([keras.Input([6, 3]), *layers, L.Dense(2)]))


def called_twice():
    inputs, layer = keras.Input([5]), L.BatchNormalization(momentum=0.6)
    outputs = L.Dense(2)(L.Concatenate()([layer(inputs), layer(inputs * 2.0 + 1.0)]))
    return compiled(keras.Model(inputs, outputs))


NORMALIZED = {
    "first": (
        lambda: normalized(keras.Input([5]), L.BatchNormalization(momentum=0.7)),
        lambda: batches(100.0 + x, targets, size=10),
    ),
    "images": (
        lambda: normalized(keras.Input([4, 4, 2]), L.BatchNormalization(momentum=0.7)),
        lambda: batches(images, targets, size=10),
    ),
    "axis": (
        lambda: normalized(keras.Input([4, 4, 2]), L.BatchNormalization(axis=1, scale=False)),
        lambda: batches(images, targets, size=10),
    ),
    "masked": (
        masked_normalization,
        lambda: batches(sequences, targets, size=10),
    ),
    "nested": (nested_normalization, plain),
    "twice": (called_twice, plain),
    "synchronized": (
        lambda: normalized(keras.Input([5]), L.BatchNormalization(synchronized=True)),
        plain,
    ),
    "renorm": (
        lambda: normalized(keras.Input([5]), L.BatchNormalization(renorm=True)),
        plain,
    ),
    "xla": (
        lambda: normalized(keras.Input([5]), L.BatchNormalization(), jit_compile=True),
        plain,
    ),
    "eager": (
        lambda: normalized(keras.Input([5]), L.BatchNormalization(), run_eagerly=True),
        plain,
    ),
}


def statistics(outcome):
    kept = ("moving", "renorm")
    return {n: v for n, v in outcome.weights.items() if any(word in n for word in kept)}


@pytest.mark.parametrize("name", NORMALIZED)
def test_moving_statistics_move_by_the_moments_of_the_batch(name):
    case = Case(*NORMALIZED[name])
    expected = statistics(fit(case))
    assert expected
    for accum, whole_batch_loss in [(1, False), (3, False), (3, True), (10, True)]:
        actual = statistics(train(case, accum, whole_batch_loss=whole_batch_loss))
        for path, wanted in expected.items():
            np.testing.assert_allclose(actual[path], wanted, rtol=1e-9, atol=1e-12, err_msg=path)


def test_moving_statistics_in_float32():
    keras.config.set_floatx("float32")
    case = Case(
        lambda: normalized(keras.Input([5]), L.BatchNormalization()),
        lambda: batches(x.astype("float32"), targets.astype("float32"), size=10),
    )
    expected, actual = statistics(fit(case)), statistics(train(case, 3))
    for path, wanted in expected.items():
        np.testing.assert_allclose(actual[path], wanted, rtol=1e-6, atol=1e-7)


def test_each_micro_batch_is_normalized_by_its_own_statistics():
    """A limit: the weights are not fit's, the moving statistics of a first layer are."""
    case = Case(*NORMALIZED["first"])
    expected, actual = fit(case).weights, train(case, 3).weights
    assert any(np.abs(expected[n] - actual[n]).max() > 1e-4 for n in expected)
