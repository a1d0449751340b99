"""GradientAccumulator in loops written by hand, compared with fit on whole batches."""

import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, batches, data, fit, fresh_model

from accumloop import GradientAccumulator

x, labels, targets, weights = data()
L = keras.layers
tokens = np.random.default_rng(3).integers(0, 6, [23, 4])


def dense_model(optimizer):
    model = keras.Sequential([keras.Input([5]), L.Dense(4, activation="tanh"), L.Dense(2)])
    model.compile(optimizer(), "mse")
    return model


def token_model(optimizer):
    model = keras.Sequential([keras.Input([4]), L.Embedding(9, 3), L.Flatten(), L.Dense(2)])
    model.compile(optimizer(), "mse")
    return model


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.05, clipnorm=0.3)


def loop_of(model, accumulator, size, by_parts):
    """A loop over micro-batches of `size` rows, with one update at its end."""

    def part(features, wanted):
        with tf.GradientTape() as tape:
            y_pred = model(features, training=True)
            loss = tf.reduce_mean(keras.losses.mean_squared_error(wanted, y_pred))
        gradients = tape.gradient(loss, model.trainable_variables)
        accumulator.add(gradients, weight=tf.shape(features)[0])

    def apply():
        model.optimizer.apply(accumulator.value(), model.trainable_variables)
        accumulator.reset()

    def whole(features, wanted):
        for start in tf.range(0, tf.shape(features)[0], size):
            part(features[start : start + size], wanted[start : start + size])
        apply()

    if not by_parts:
        return tf.function(whole)
    part, apply = by_parts(part), by_parts(apply)

    def by_hand(features, wanted):
        for start in range(0, len(features), size):
            part(features[start : start + size], wanted[start : start + size])
        apply()

    return by_hand


@pytest.mark.parametrize(
    "by_parts", [None, tf.function, lambda function: function], ids=["whole", "functions", "eager"]
)
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize(
    ("make_model", "inputs"), [(dense_model, x), (token_model, tokens)], ids=["dense", "tokens"]
)
def test_a_loop_is_fit_on_whole_batches(make_model, inputs, optimizer, by_parts):
    case = Case(lambda: make_model(optimizer), lambda: batches(inputs, targets, size=10))
    expected = fit(case)
    model = fresh_model(case)
    accumulator = GradientAccumulator(model.trainable_variables)
    update = loop_of(model, accumulator, 4, by_parts)
    for _ in range(case.epochs):
        for features, wanted in case.make_ds():
            update(features, wanted)
    assert int(model.optimizer.iterations) == expected.iterations
    for variable in model.weights:
        wanted = expected.weights[variable.path]
        np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-9, atol=1e-12)


def slices(values, rows, shape=(4, 2)):
    values = tf.constant(values, tf.float64)
    return tf.IndexedSlices(values, tf.constant(rows), tf.constant(shape, tf.int64))


def test_weighted_mean():
    accumulator = GradientAccumulator([tf.Variable([0.0, 0.0], dtype=tf.float64)])
    accumulator.add([tf.constant([1.0, 2.0], tf.float64)], weight=3)
    accumulator.add([tf.constant([5.0, -2.0], tf.float64)], weight=tf.constant(1, tf.int32))
    accumulator.add([np.array([0.0, 8.0])], weight=np.float32(0.5))
    np.testing.assert_allclose(accumulator.value()[0], [8 / 4.5, 8 / 4.5], rtol=1e-15)


def test_weights_are_not_rounded():
    accumulator = GradientAccumulator([tf.Variable(0.0, dtype=tf.float64)])
    accumulator.add([tf.constant(1.0, tf.float64)], weight=0.1)
    accumulator.add([tf.constant(0.0, tf.float64)], weight=0.2)
    np.testing.assert_allclose(accumulator.value()[0], 0.1 / (0.1 + 0.2), rtol=1e-15)


def test_reset_forgets():
    accumulator = GradientAccumulator([tf.Variable(tf.zeros([4, 2], tf.float64)) for _ in "ab"])
    dense = tf.ones([4, 2], tf.float64)
    accumulator.add([dense, slices([[1.0, 1.0]], [2])], weight=7)
    accumulator.reset()
    accumulator.add([3 * dense, slices([[5.0, 5.0]], [0])])
    mean, table = accumulator.value()
    np.testing.assert_array_equal(mean, 3 * dense)
    np.testing.assert_array_equal(table.values, [[5.0, 5.0]])
    np.testing.assert_array_equal(table.indices, [0])
    accumulator.reset()
    mean, table = accumulator.value()
    np.testing.assert_array_equal(mean, np.zeros([4, 2]))
    assert table.values.shape == [0, 2]


def test_a_reset_that_was_traced_first_forgets():
    """In the first call of a loop that begins with it, before it is known what will be added."""
    accumulator = GradientAccumulator([tf.Variable([0.0]), tf.Variable(tf.zeros([3, 1]))])

    @tf.function
    def run():
        accumulator.reset()
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([3, 1]))
        accumulator.add([tf.constant([1.0]), rows])
        return accumulator.value()

    for _ in range(3):
        mean, table = run()
        np.testing.assert_array_equal(mean, [1.0])
        np.testing.assert_array_equal(table.values, [[1.0]])


def test_a_variable_without_gradient_stays_without():
    accumulator = GradientAccumulator([tf.Variable(1.0), tf.Variable([1.0]), tf.Variable([1.0])])
    accumulator.add([None, tf.constant([4.0]), None], weight=1)
    accumulator.add([None, None, tf.constant([4.0])], weight=3)
    absent, first, second = accumulator.value()
    assert absent is None
    np.testing.assert_array_equal(first, [1.0])  # None is a zero in the mean of what has one.
    np.testing.assert_array_equal(second, [3.0])


def test_slices_keep_their_rows_in_order():
    accumulator = GradientAccumulator([tf.Variable(tf.zeros([4, 2], tf.float64))])
    accumulator.add([slices([[1.0, 2.0], [3.0, 4.0]], [3, 3])], weight=1)
    accumulator.add([slices([[8.0, 8.0]], [0])], weight=3)
    (table,) = accumulator.value()
    np.testing.assert_array_equal(table.indices, [3, 3, 0])
    np.testing.assert_array_equal(table.values, [[0.25, 0.5], [0.75, 1.0], [6.0, 6.0]])
    np.testing.assert_array_equal(table.dense_shape, [4, 2])


def test_a_table_with_tensors_and_slices():
    accumulator = GradientAccumulator([tf.Variable(tf.zeros([4, 2], tf.float64))])
    accumulator.add([slices([[1.0, 2.0], [1.0, 2.0]], [3, 3])])
    accumulator.add([tf.ones([4, 2], tf.float64)])
    (table,) = accumulator.value()
    np.testing.assert_array_equal(table, [[0.5, 0.5]] * 3 + [[1.5, 2.5]])


def test_a_table_of_slices_has_no_dense_copy():
    accumulator = GradientAccumulator([tf.Variable(tf.zeros([1000, 2], tf.float64))])
    accumulator.add([slices([[1.0, 2.0]], [3], (1000, 2))])
    assert max(int(tf.size(v)) for v in local_variables(accumulator)) == 2


def local_variables(accumulator):
    return [v for total in accumulator._totals for v in (total._dense, total._values)]


def test_a_lookup_that_sums_repeated_rows_does_so_over_all_parts():
    table = tf.Variable(tf.ones([6, 2], tf.float64))
    accumulator = GradientAccumulator([table])
    ids = tf.sparse.from_dense([[1, 2, 1], [3, 1, 0], [2, 2, 0], [5, 1, 1]])

    def gradient_of(part):
        with tf.GradientTape() as tape:
            looked_up = tf.nn.embedding_lookup_sparse(table, part, None, combiner="sum")
            loss = tf.reduce_sum(looked_up**2)
        return tape.gradient(loss, [table])

    @tf.function
    def both():
        accumulator.reset()
        for start in range(0, 4, 2):
            accumulator.add(gradient_of(tf.sparse.slice(ids, [start, 0], [2, 3])))
        return accumulator.value()[0], gradient_of(ids)[0]

    actual, whole = both()
    assert sorted(actual.indices.numpy()) == sorted(whole.indices.numpy())
    np.testing.assert_allclose(
        tf.convert_to_tensor(actual) * 2, tf.convert_to_tensor(whole), rtol=1e-12
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_summed_in_float32(dtype):
    """256 and 255 times 1: in bfloat16 itself the sum would stay at 256."""
    accumulator = GradientAccumulator([tf.Variable([0.0], dtype=dtype)])
    for index in range(256):
        accumulator.add([tf.constant([256.0 if index == 0 else 1.0], dtype)])
    (mean,) = accumulator.value()
    assert mean.dtype == dtype
    np.testing.assert_allclose(tf.cast(mean, "float64"), [511 / 256], rtol=4e-3)


def test_weights_of_zero_give_zero():
    accumulator = GradientAccumulator([tf.Variable([1.0, 2.0])])
    accumulator.add([tf.constant([5.0, 5.0])], weight=0)
    np.testing.assert_array_equal(accumulator.value()[0], [0.0, 0.0])


def kernel():
    return keras.Variable(np.zeros([5, 4], "float32"), name="kernel")


def made():
    return GradientAccumulator([kernel(), kernel()])


good = tf.zeros([5, 4])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: GradientAccumulator([]), ValueError, "at least one variable"),
        (lambda: GradientAccumulator([1.0]), TypeError, "list of Keras or TensorFlow variables"),
        (lambda: GradientAccumulator(3), TypeError, "list of Keras or TensorFlow variables"),
        (lambda: made().add([good]), ValueError, "1 gradients for 2 variables"),
        (lambda: made().add(good), TypeError, "must be a list"),
        (lambda: made().add([good] * 3), ValueError, "3 gradients for 2 variables"),
        (lambda: made().add([good, tf.zeros([4, 5])]), ValueError, r"\(4, 5\) for 'kernel'"),
        (lambda: made().add([tf.zeros([]), good]), ValueError, r"shape \(\) for 'kernel'"),
        (
            lambda: made().add([slices([[1.0]], [0]), good]),
            TypeError,
            "float64 for 'kernel' of float32",
        ),
        (
            lambda: made().add([tf.IndexedSlices(tf.zeros([1, 3]), tf.constant([0])), good]),
            ValueError,
            r"shape \(5, 3\) for 'kernel' of shape \(5, 4\)",
        ),
        (lambda: made().add([good, np.zeros([5, 4])]), TypeError, "float64 for 'kernel'"),
        (lambda: made().add([good, "gradient"]), TypeError, "string for 'kernel'"),
        (lambda: made().add([good, object()]), TypeError, "a `tf.IndexedSlices` or None"),
        (lambda: made().add([good, good], weight=-1), ValueError, "must not be negative"),
        (lambda: made().add([good, good], weight=float("nan")), ValueError, "not be negative"),
        (lambda: made().add([good, good], weight=[1, 2]), ValueError, "must be a scalar"),
        (lambda: made().add([good, good], weight="much"), TypeError, "must be a real number"),
        (lambda: made().value(), ValueError, "Call `add\\(gradients\\)` before"),
    ],
)
def test_errors_say_what_was_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_error_adds_nothing():
    accumulator = made()
    accumulator.add([good + 1, good + 1])
    with pytest.raises(ValueError, match="order of `variables`"):
        accumulator.add([good + 5, tf.zeros([4, 5])])
    np.testing.assert_array_equal(accumulator.value()[0], good + 1)


def test_a_value_that_would_leave_out_a_gradient_is_refused():
    accumulator = made()
    value = tf.function(accumulator.value)
    accumulator.add([good, None])
    value()
    with pytest.raises(ValueError, match="Received: a tensor for 'kernel'"):
        accumulator.add([good, good])


def test_replicas_have_the_mean_of_the_whole_batch():
    """In a process of its own, whose device is two."""
    script = pathlib.Path(__file__).with_name("replicas.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert run.stdout == "equal\n", run.stderr[-3000:]
