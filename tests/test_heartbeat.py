"""A long update says that it is running, at the end of the progress bar."""

import re
import threading

import keras
import pytest
import tensorflow as tf
from oracle import batches, data

import accumloop
from accumloop import _heartbeat

x, _, targets, _ = data()


def bar(verbose=1):
    logger = keras.callbacks.ProgbarLogger()
    logger.verbose = verbose
    return [keras.callbacks.History(), logger]


@pytest.fixture
def still(monkeypatch):
    """Heartbeats that beat when they are told to, at a time that they are told."""
    monkeypatch.setattr(_heartbeat, "_INTERVAL", 1000.0)
    monkeypatch.setattr(_heartbeat.time, "monotonic", lambda: 100.0)


def shown(text):
    """What a terminal shows of a line with backspaces."""
    line, at = [], 0
    for letter in text:
        if letter == "\b":
            at -= 1
        else:
            line[at : at + 1] = [letter]
            at += 1
    return "".join(line).rstrip()


def test_a_long_batch_is_told_of(still, capsys):
    heartbeat = _heartbeat.Heartbeat(bar())
    with heartbeat:
        heartbeat.beat(101.9)
        assert capsys.readouterr().out == ""
        heartbeat.beat(102.6)
        first = capsys.readouterr().out
        assert first == " - this batch: 3s"
        heartbeat.beat(112.0)
        assert shown(first + capsys.readouterr().out) == " - this batch: 12s"
    heartbeat.close()


def test_the_word_is_taken_away(still, capsys):
    heartbeat = _heartbeat.Heartbeat(bar())
    print("2/8 ====", end="")
    with heartbeat:
        heartbeat.beat(105.0)
    heartbeat.beat(109.0)  # Between batches.
    out = capsys.readouterr().out
    assert shown(out) == "2/8 ===="
    assert out.endswith("\b" * len(" - this batch: 5s"))
    heartbeat.close()


@pytest.mark.parametrize("callbacks", [[], bar(verbose=2), bar(verbose=0)])
def test_without_a_bar_it_is_silent(still, capsys, callbacks):
    before = threading.active_count()
    heartbeat = _heartbeat.Heartbeat(callbacks)
    with heartbeat:
        assert threading.active_count() == before
        heartbeat.beat(200.0)
    heartbeat.close()
    assert capsys.readouterr().out == ""


def waiting_model(shows):
    """A model whose updates end when something has been shown."""

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            def wait(value):
                assert shows.wait(60)
                return value

            return tf.ensure_shape(tf.numpy_function(wait, [inputs], inputs.dtype), inputs.shape)

    model = keras.Sequential([keras.Input([5]), Slow(), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("door", ["train", "accumulate"])
def test_it_beats_while_an_update_runs(monkeypatch, capsys, door):
    shows = threading.Event()
    write = _heartbeat.Heartbeat._write

    def seen(self, word):
        write(self, word)
        if word:
            shows.set()

    monkeypatch.setattr(_heartbeat.Heartbeat, "_write", seen)
    monkeypatch.setattr(_heartbeat, "_INTERVAL", 0.01)
    monkeypatch.setattr(_heartbeat, "_PATIENCE", 0.02)
    model, ds = waiting_model(shows), batches(x, targets, size=23)
    model.compile("sgd", "mse", run_eagerly=False)
    model.optimizer.build(model.trainable_variables)
    before = threading.active_count()
    if door == "train":
        accumloop.train(model, ds, 1, verbose=1)
    else:
        model.fit(ds, shuffle=False, verbose=1, callbacks=[accumloop.Accumulate(1)])
    assert threading.active_count() == before
    assert "this batch" in capsys.readouterr().out


def test_verbose_2_is_a_line_an_epoch(capsys):
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    accumloop.train(model, batches(x, targets, size=10), 64, epochs=2, verbose=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0::2] == ["Epoch 1/2", "Epoch 2/2"]
    assert all(re.fullmatch(r"3/3 - .*loss: [\d.e-]+", line) for line in lines[1::2])


def test_one_bar(capsys):
    """As in a notebook, where a second one would be a line of its own."""
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    accumloop.train(model, batches(x, targets, size=10), 2, verbose=1)
    lines = [line for line in capsys.readouterr().out.split("\n") if "/3" in line]
    assert len(lines) == 1
