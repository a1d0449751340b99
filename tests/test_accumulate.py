"""fit with Accumulate trains as fit does, by the step of train, and leaves nothing behind."""

import contextlib
import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, accumulate, assert_same, batches, data, fit, fresh_model

import accumloop
from accumloop import Accumulate

x, labels, targets, weights = data()
L = keras.layers


def make_model(**compiled):
    model = keras.Sequential([keras.Input([5]), L.Dense(4, activation="tanh"), L.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], **compiled)
    return model


def make_classifier():
    model = keras.Sequential([L.Dense(4, activation="tanh"), L.Dense(3)])  # not built
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, weighted_metrics=["accuracy"])
    return model


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(5 * index, 5 * index + 5)
        return x[rows], labels[rows], weights[rows]


def endless():
    while True:
        for start in (0, 7, 14):
            yield x[start : start + 7], labels[start : start + 7]


ARRAYS = {"y": lambda: labels, "batch_size": 10}
SOURCES = {
    "arrays": (lambda: x, ARRAYS),
    "sample_weight": (lambda: x, {**ARRAYS, "sample_weight": lambda: weights}),
    "class_weight": (lambda: x, {**ARRAYS, "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "validation_split": (lambda: x, {**ARRAYS, "validation_split": 0.3}),
    "shuffled": (lambda: x, {**ARRAYS, "shuffle": True}),
    "generator": (endless, {"steps_per_epoch": 3, "shuffle": None}),
    "py_dataset": (lambda: Sequence(workers=1), {}),
    "dataset": (lambda: batches(x, labels, size=7), {"validation_data": (x[:9], labels[:9])}),
    "steps_per_epoch": (lambda: batches(x, labels, size=7).repeat(), {"steps_per_epoch": 3}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_of_data(source):
    make_x, arguments = SOURCES[source]
    case = Case(make_classifier, make_x, arguments)
    expected = fit(case)
    assert_same(expected, accumulate(case, 1), rtol=0)
    assert_same(expected, accumulate(case, 3))


CASE = Case(make_model, functools.partial(batches, x, targets, size=10), {"epochs": 2})


@pytest.mark.parametrize(
    "compiled", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}]
)
def test_every_way_to_run(compiled):
    case = Case(functools.partial(make_model, **compiled), CASE.make_ds, CASE.arguments)
    assert_same(fit(case), accumulate(case, 3))


def test_whole_batch_loss():
    def contrastive(first, second):
        logits = tf.matmul(first, second, transpose_b=True)
        return keras.losses.sparse_categorical_crossentropy(
            tf.range(tf.shape(first)[0]), logits, from_logits=True
        )

    def make_coupled():
        # Without a bias at the end, whose true gradient would be 0.
        model = keras.Sequential([keras.Input([5]), L.Dense(4, "tanh"), L.Dense(2, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), contrastive)
        return model

    case = Case(make_coupled, CASE.make_ds, CASE.arguments)
    with pytest.raises(NotImplementedError, match="whole_batch_loss"):
        accumulate(case, 3)
    assert_same(fit(case), accumulate(case, 3, whole_batch_loss=True))


@pytest.mark.parametrize("steps_per_execution", [1, 2])
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_no_phantom_update(steps_per_execution):
    """On a dataset of unknown length `fit` makes one update too many, without data."""

    def make_decaying():
        model = make_model(steps_per_execution=steps_per_execution)
        optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
        model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
        return model

    def unknown():
        return CASE.make_ds().filter(lambda *batch: True)

    known = fit(Case(make_decaying, CASE.make_ds, CASE.arguments))
    actual = accumulate(Case(make_decaying, unknown, CASE.arguments), 3)
    assert actual.iterations == known.iterations == 6
    for name, value in known.weights.items():
        np.testing.assert_allclose(actual.weights[name], value, rtol=1e-9)
    np.testing.assert_allclose(actual.history["loss"], known.history["loss"], rtol=1e-9)


class Does(keras.callbacks.Callback):
    """Raises in one hook, or trains something else there."""

    def __init__(self, hook, what):
        super().__init__()
        setattr(self, hook, lambda *args, **kwargs: what(self.model))


def quiet_fit(model, **arguments):
    return model.fit(CASE.make_ds(), shuffle=False, verbose=0, **arguments)


def interrupt(model):
    raise KeyboardInterrupt


def accumulates(model, **arguments):
    """Tell whether the updates of a `fit` run the model on less than a batch of 10."""
    return most_rows(model, **arguments) < 10


def most_rows(model, **arguments):
    """Return on how many rows the model has been run at most."""
    rows = []
    model.make_train_function(force=True)  # So that it is traced again.
    call = model.layers[0].call

    def watched(inputs, *args, **kwargs):
        tf.py_function(lambda value: rows.append(len(value)), [inputs], [])
        return call(inputs, *args, **kwargs)

    model.layers[0].call = watched
    try:
        quiet_fit(model, **arguments)
    finally:
        model.layers[0].call = call
        model.make_train_function(force=True)
    return max(rows)


HOOKS = [
    *("on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"),
    *("on_epoch_end", "on_train_end", "on_test_begin", "on_test_batch_end"),
]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_put_back_when_another_callback_raises(hook, first):
    model = fresh_model(CASE)
    plain = model.make_train_function() or model.train_function
    callbacks = [Does(hook, interrupt)]
    callbacks.insert(0 if first else 1, Accumulate(3))
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(model, validation_data=(x, targets), callbacks=callbacks)
    quiet_fit(model)
    assert model.train_function is plain
    assert "make_train_function" not in vars(model)
    assert not accumulates(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_put_back_when_training_raises(error):
    class Failing(keras.Model):
        def train_step(self, batch):
            raise error("in the step")

    inputs = keras.Input([5])
    model = Failing(inputs, L.Dense(2)(inputs))
    model.compile("sgd", "mse", run_eagerly=True)
    model.make_train_function()
    plain = model.train_function
    with pytest.raises(error, match="in the step"):
        quiet_fit(model, callbacks=[Accumulate(3)])
    assert model.train_function is plain
    assert "make_train_function" not in vars(model)


def test_put_back_at_the_end():
    model = fresh_model(CASE)
    assert accumulates(model, callbacks=[Accumulate(3)])
    assert "make_train_function" not in vars(model)
    assert not accumulates(model)


def test_train_after_a_fit_that_died():
    model = fresh_model(CASE)
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(model, callbacks=[Accumulate(3), Does("on_epoch_end", interrupt)])
    accumloop.train(model, CASE.make_ds(), 2, verbose=0)
    assert not accumulates(model)
    quiet_fit(model, callbacks=[Accumulate(3)])


def on_a_batch(model):
    model.train_on_batch(x[:2], targets[:2])


def in_a_fit(model):
    model.fit(x[:4], targets[:4], verbose=0)


def in_a_fit_that_dies(model):
    with contextlib.suppress(KeyboardInterrupt):
        model.fit(x[:4], targets[:4], verbose=0, callbacks=[Does("on_epoch_end", interrupt)])


def in_a_fit_of_its_own_kind(model):
    model.fit(x[:4], targets[:4], verbose=0, callbacks=[Accumulate(2)])


def of_no_data(model):
    model.make_train_function()


def anew(model):
    model.make_train_function(force=True)


def compiled_anew(model):
    model.compile(model.optimizer, "mse")
    model.make_train_function()


@pytest.mark.parametrize(
    "what",
    [
        *(on_a_batch, in_a_fit, in_a_fit_that_dies, in_a_fit_of_its_own_kind),
        *(of_no_data, anew, compiled_anew),
    ],
)
@pytest.mark.parametrize(
    ("hook", "first"),
    [
        ("on_epoch_begin", False),
        ("on_train_batch_begin", False),
        ("on_train_batch_begin", True),
    ],
)
def test_other_training_by_a_callback(hook, first, what):
    """Batches and functions of another callback's own: not cut, and cut no less after them."""
    other = Does(hook, what)
    events = [other, Accumulate(3)] if first else [Accumulate(3), other]
    model = fresh_model(CASE)
    assert most_rows(model, callbacks=events) == 4  # of 10, in 3
    assert not accumulates(model)


@pytest.mark.parametrize("what", [anew, compiled_anew])
def test_functions_made_anew_before_a_fit_dies(what):
    model = fresh_model(CASE)
    others = [Does("on_train_batch_begin", what), Does("on_train_batch_end", interrupt)]
    with pytest.raises(KeyboardInterrupt):
        quiet_fit(model, callbacks=[Accumulate(3), *others])
    quiet_fit(model, epochs=2)
    assert "make_train_function" not in vars(model)
    assert not accumulates(model)


def test_same_results_with_other_training_by_a_callback():
    def more():
        return [Does("on_epoch_begin", lambda model: model.train_on_batch(x[:2], targets[:2]))]

    assert_same(fit(CASE, callbacks=more), accumulate(CASE, 3, callbacks=more))


def test_a_recompilation_wins():
    model = fresh_model(CASE)

    def recompile(model):
        model.compile("sgd", "mae")

    callbacks = [Accumulate(3), Does("on_epoch_end", recompile)]
    quiet_fit(model, callbacks=callbacks)
    assert model.train_function is None
    assert "make_train_function" not in vars(model)
    assert not accumulates(model)


def test_functions_made_anew_in_the_middle():
    """What Keras documents for a change of `trainable`, in the middle of training."""

    def more():
        def change(model):
            if int(model.optimizer.iterations) == 3:
                model.layers[0].activation = keras.activations.relu
                model.make_train_function(force=True)

        return [Does("on_train_batch_end", change)]

    expected = fit(CASE, callbacks=more)
    assert_same(expected, accumulate(CASE, 3, callbacks=more))
    assert any(np.any(value != fit(CASE).weights[name]) for name, value in expected.weights.items())


def test_two_of_them():
    model = fresh_model(CASE)
    one = Accumulate(2)
    for callbacks in ([one, Accumulate(3)], [one, one]):
        with pytest.raises(ValueError, match="Only one `Accumulate`"):
            quiet_fit(model, callbacks=callbacks)
        assert "make_train_function" not in vars(model)
    quiet_fit(model, callbacks=[one])


def test_refused_by_train():
    model = fresh_model(CASE)
    callbacks = keras.callbacks.CallbackList([Accumulate(2)], model=model)
    for given in ([Accumulate(2)], Accumulate(2), callbacks):
        with pytest.raises(ValueError, match="is for `model"):
            accumloop.train(model, CASE.make_ds(), 2, callbacks=given)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0,), ValueError, "at least 1"),
        ((2.0,), TypeError, "must be an int"),
        ((2, 1), TypeError, "must be a bool"),
    ],
)
def test_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        Accumulate(*arguments)


def test_accum_may_be_set_anew():
    model = fresh_model(CASE)
    callback = Accumulate(1)
    callback.accum = 5
    assert most_rows(model, callbacks=[callback]) == 3  # of a trial; else 2


def test_refused_before_training():
    def make_accumulating():
        model = make_model()
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        return model

    case = Case(make_accumulating, CASE.make_ds, CASE.arguments)
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        accumulate(case, 2)


def test_evaluate_and_predict_are_untouched():
    model = fresh_model(CASE)
    callback = Accumulate(3)
    expected = model.evaluate(x, targets, verbose=0)
    assert model.evaluate(x, targets, verbose=0, callbacks=[callback]) == expected
    assert model.predict(x, verbose=0, callbacks=[callback]).shape == (23, 2)
    assert model.train_function is None


def test_a_second_fit_traces_nothing():
    traces = []

    class Traced(keras.layers.Dense):
        def call(self, inputs):
            traces.append(1)
            return super().call(inputs)

    model = keras.Sequential([keras.Input([5]), Traced(2)])
    model.compile("sgd", "mse")
    callback = Accumulate(3)
    model.fit(x, targets, batch_size=10, callbacks=[callback], verbose=0)
    before = len(traces)
    model.fit(x, targets, batch_size=8, callbacks=[callback], verbose=0)
    model.fit(x, targets, batch_size=8, callbacks=[Accumulate(4)], verbose=0)
    assert len(traces) == before


def test_nothing_is_kept_and_nothing_is_saved(tmp_path):
    def save(model):
        model.save(tmp_path / "model.keras")
        model.export(tmp_path / "exported", verbose=False)

    model = fresh_model(CASE)
    quiet_fit(model, callbacks=[Accumulate(3), Does("on_epoch_end", save)], epochs=2)
    again = keras.models.load_model(tmp_path / "model.keras")
    for got, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    kept = weakref.ref(model)
    del model, again
    keras.utils.clear_session()
    gc.collect()
    assert kept() is None
