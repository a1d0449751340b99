"""The comparison itself can fail: one fault in each part of an outcome."""

import dataclasses

import keras
import numpy as np
import pytest
from oracle import Case, assert_same, batches, data, fit

x, labels, targets, weights = data()


def make_model():
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


CASE = Case(make_model, lambda: batches(x, targets, size=10))


def test_equal_outcomes_are_the_same():
    assert_same(fit(CASE), fit(CASE), rtol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: {"iterations": o.iterations + 1},
        lambda o: {"epochs": o.epochs[:-1]},
        lambda o: {"weights": {n: v * (1 + 1e-8) for n, v in o.weights.items()}},
        lambda o: {"weights": {n: v.astype("float32") for n, v in o.weights.items()}},
        lambda o: {"weights": dict(list(o.weights.items())[:-1])},
        lambda o: {"optimizer": {n: v + 1e-6 for n, v in o.optimizer.items()}},
        lambda o: {"history": {"loss": [v * (1 + 1e-8) for v in o.history["loss"]]}},
        lambda o: {"history": {"loss": o.history["loss"][:-1]}},
        lambda o: {"history": {**o.history, "more": [0.0]}},
        lambda o: {"events": o.events[:-1]},
        lambda o: {
            "events": [(*e[:-1], {n: np.float64(v) for n, v in e[-1].items()}) for e in o.events]
        },
        lambda o: {
            "events": [(*e[:-1], {n: v + 1e-6 for n, v in e[-1].items()}) for e in o.events]
        },
        lambda o: {"events": [(*e[:-1], {}) for e in o.events]},
    ],
    ids=[
        "iterations",
        "epochs",
        "weights",
        "weight_dtype",
        "weight_missing",
        "optimizer",
        "history",
        "history_short",
        "history_key",
        "event_missing",
        "logs_type",
        "logs_value",
        "logs_missing",
    ],
)
def test_a_difference_is_seen(change):
    outcome = fit(CASE)
    with pytest.raises(AssertionError):
        assert_same(outcome, dataclasses.replace(outcome, **change(outcome)))
