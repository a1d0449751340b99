"""Callbacks see what they see under fit, one step a batch."""

import functools
import json
import re

import keras
import numpy as np
import pytest
from oracle import Case, assert_same, batches, data, fit, fresh_model, train

import accumloop

x, labels, targets, weights = data()
L = keras.layers
VALIDATION = (x[:9], targets[:9])


def make_model():
    model = keras.Sequential([keras.Input([5]), L.Dense(4, activation="tanh"), L.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


CASE = Case(
    make_model,
    functools.partial(batches, x, targets, size=5),
    {"validation_data": VALIDATION, "epochs": 4},
)


class Stop(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.step:
            self.model.stop_training = True


class Params(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.params_seen = dict(self.params)


@pytest.mark.parametrize(
    "hook", ["on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"]
)
@pytest.mark.parametrize("on_instance", [False, True])
def test_every_way_to_hear_of_batches(hook, on_instance):
    class Hearing(keras.callbacks.Callback):
        pass

    heard = []
    callback = Hearing()
    if on_instance:
        setattr(callback, hook, lambda batch, logs=None: heard.append(batch))
    else:
        setattr(Hearing, hook, lambda self, batch, logs=None: heard.append(batch))
    model = fresh_model(CASE)
    accumloop.train(model, CASE.make_ds(), 3, verbose=0, callbacks=[callback])
    assert heard == [0, 1, 2, 3, 4]


def test_stopping_is_honoured_after_the_batch():
    told = train(CASE, 3, callbacks=[Stop(2)]).events
    assert [event[1] for event in told if event[0] == "on_train_batch_end"] == [0, 1, 2]


def test_one_step_a_batch_whatever_the_number_of_micro_batches():
    told = train(CASE, 5, epochs=1).events
    steps = [event[1] for event in told if event[0] == "on_train_batch_end"]
    assert steps == [0, 1, 2, 3, 4]


def test_params():
    model = fresh_model(CASE)
    seen = Params()
    accumloop.train(model, CASE.make_ds(), 3, epochs=2, verbose=0, callbacks=[seen])
    assert seen.params == {"verbose": 0, "epochs": 2, "steps": 5}


@pytest.mark.parametrize("accum", [1, 3])
def test_backup_and_restore(tmp_path, accum):
    """An interrupted run goes on where it was, and a later one is whole again."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    class Unbuilt(keras.Sequential):
        pass

    def make_unbuilt():
        model = Unbuilt([L.Dense(4, activation="tanh"), L.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    case = Case(make_unbuilt, CASE.make_ds, {"epochs": 4})
    whole = train(case, accum)
    with pytest.raises(KeyboardInterrupt):
        train(case, accum, callbacks=[keras.callbacks.BackupAndRestore(tmp_path), Interrupt()])
    model = fresh_model(case)
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    history = accumloop.train(model, case.make_ds(), accum, epochs=4, verbose=0, callbacks=[backup])
    assert history.epoch == [2, 3]
    for got, wanted in zip(model.get_weights(), whole.weights.values(), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert accumloop.train(model, case.make_ds(), accum, epochs=1, verbose=0).epoch == [0]
    assert model.fit(case.make_ds(), shuffle=False, epochs=1, verbose=0).epoch == [0]


def test_whole_batches_are_told_of_to_the_last_bit():
    stop = [keras.callbacks.EarlyStopping("loss", min_delta=10.0, restore_best_weights=True)]
    assert_same(fit(CASE, callbacks=stop), train(CASE, 1, callbacks=stop), rtol=0)


@pytest.mark.parametrize("verbose", ["auto", 1, 2])
def test_progress_bar(verbose, capsys):
    """The same lines, but for the times in them."""

    def lines(door):
        door(CASE, verbose=verbose)
        printed = re.sub(r"\x1b\[\d+m|\x08", "", capsys.readouterr().out)
        printed = re.sub(r"\d+(ms|us|s|ms/step|us/step|s/step)\b", "TIME", printed)
        # How often a bar is redrawn depends on the time: the finished bars do not.
        return [
            line
            for line in re.split(r"[\r\n]+", printed)
            if " 5/5 " in line or "/4" in line or "val_loss" in line
        ]

    def finished(text):
        return [re.sub(r"TIME/step|TIME", "", line).split() for line in text]

    expected, actual = finished(lines(fit)), finished(lines(functools.partial(train, accum=3)))
    assert [words for words in actual if "val_loss:" in words] == [
        words for words in expected if "val_loss:" in words
    ]
    assert [words for words in actual if "Epoch" in words] == [
        words for words in expected if "Epoch" in words
    ]
    assert any("val_loss:" in words for words in actual)


def test_verbose_0_prints_nothing(capsys):
    train(CASE, 3, verbose=0)
    assert capsys.readouterr().out == ""


def test_a_callback_list_is_taken_as_it_is():
    model = fresh_model(CASE)
    callbacks = keras.callbacks.CallbackList(
        [], add_history=True, model=model, verbose=0, epochs=2, steps=5
    )
    history = accumloop.train(model, CASE.make_ds(), 3, epochs=2, callbacks=callbacks)
    assert history.epoch == [0, 1]


def test_history_is_json():
    history = train(CASE, 3).history
    assert json.loads(json.dumps(history)) == history
