"""The oracle of the tests: what the installed Keras' `fit` does, and how far `train` is from it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import accumloop

RTOL = 1e-9


class Events(keras.callbacks.Callback):
    """Every event in order, with its index and its logs."""

    def __init__(self):
        super().__init__()
        self.told = []


for _name in [
    "on_train_begin",
    "on_train_end",
    "on_test_begin",
    "on_test_end",
]:
    setattr(Events, _name, lambda self, logs=None, name=_name: self.told.append((name, logs or {})))
for _name in [
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
]:
    setattr(
        Events,
        _name,
        lambda self, index, logs=None, name=_name: self.told.append((name, index, logs or {})),
    )


@dataclasses.dataclass
class Outcome:
    """What is left of a training run."""

    weights: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    iterations: int
    history: dict[str, list[float]]
    epochs: list[int]
    events: list[tuple]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training job: a model, its data, and the arguments of `fit`."""

    make_model: Callable[[], keras.Model]
    make_ds: Callable[[], tf.data.Dataset]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    epochs: int = 3


def fresh_model(case: Case) -> keras.Model:
    """Return the model of a case: the same names and initial weights each time."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return case.make_model()


def outcome_of(model: keras.Model, run: Callable[..., Any], case: Case, **more: Any) -> Outcome:
    """Return the outcome of `run(ds, epochs=..., callbacks=...)`, `fit` or `train`."""
    events = Events()
    keras.utils.set_random_seed(11)
    arguments = {"epochs": case.epochs, "verbose": 0} | case.arguments | more
    arguments = {name: value() if callable(value) else value for name, value in arguments.items()}
    callbacks = [*arguments.pop("callbacks", []), events]
    history = run(case.make_ds(), callbacks=callbacks, **arguments)
    assert history is model.history
    return Outcome(
        weights={v.path: keras.ops.convert_to_numpy(v) for v in model.weights},
        optimizer={v.path: keras.ops.convert_to_numpy(v) for v in model.optimizer.variables},
        iterations=int(model.optimizer.iterations),
        history=history.history,
        epochs=history.epoch,
        events=events.told,
    )


def fit(case: Case, **more: Any) -> Outcome:
    """Return what `model.fit` does on whole batches."""
    model = fresh_model(case)
    arguments = {"shuffle": False} | case.arguments | more
    return outcome_of(model, model.fit, case, **arguments)


def train(case: Case, accum: int, **more: Any) -> Outcome:
    """Return what `accumloop.train` does."""
    model = fresh_model(case)
    return outcome_of(model, lambda ds, **kw: accumloop.train(model, ds, accum, **kw), case, **more)


def accumulate(case: Case, accum: int, whole_batch_loss: bool = False, **more: Any) -> Outcome:
    """Return what `model.fit` does with `accumloop.Accumulate` among its callbacks."""

    def run(ds: Any, *, callbacks: list, **arguments: Any) -> Any:
        own = accumloop.Accumulate(accum, whole_batch_loss)
        return model.fit(ds, callbacks=[own, *callbacks], **{"shuffle": False} | arguments)

    model = fresh_model(case)
    return outcome_of(model, run, case, **more)


def assert_same(expected: Outcome, actual: Outcome, rtol: float = RTOL) -> None:
    """Assert that two runs had the same events and results; with `rtol=0` to the last bit.

    But for the loss of each output, which fit does not weight by rows, and train does.
    """
    assert actual.iterations == expected.iterations
    assert actual.epochs == expected.epochs
    _assert_same_arrays(expected.weights, actual.weights, rtol)
    _assert_same_arrays(expected.optimizer, actual.optimizer, rtol)
    assert list(actual.history) == list(expected.history)
    _assert_same_arrays(expected.history, actual.history, rtol)
    assert [event[:-1] for event in actual.events] == [event[:-1] for event in expected.events]
    for told, wanted in zip(actual.events, expected.events, strict=True):
        assert list(told[-1]) == list(wanted[-1]), told[:-1]
        assert all(type(value) is float for value in told[-1].values()), told
        _assert_same_arrays(wanted[-1], told[-1], rtol)


def _assert_same_arrays(expected: dict, actual: dict, rtol: float) -> None:
    assert list(actual) == list(expected)
    for name, wanted in expected.items():
        got, wanted = np.asarray(actual[name]), np.asarray(wanted)
        tolerance = max(rtol, 1e-14) if name.endswith("_loss") else rtol
        assert got.shape == wanted.shape, name
        assert got.dtype == wanted.dtype, name
        if tolerance == 0:
            np.testing.assert_array_equal(got, wanted, err_msg=name)
        elif wanted.size:
            # Relative to the largest value: an element may be 0 up to rounding.
            scale = np.max(np.abs(wanted))
            np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale, err_msg=name)


def distances(expected: dict, actual: dict) -> list[float]:
    """Return by how much arrays differ at most, relative to the largest value of each."""
    assert list(actual) == list(expected)
    pairs = [(actual[name], wanted) for name, wanted in expected.items()]
    return [np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)) for got, wanted in pairs]


def under_policy(policy: str, make_model: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Return a maker of models in this dtype policy, set late: `fresh_model` resets it."""

    def make() -> keras.Model:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        model = make_model()
        assert model.layers[-1].compute_dtype == policy.removeprefix("mixed_")
        wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert wrapped == (policy == "mixed_float16")
        return model

    return make


def batches(*leaves, size: int, rows: int | None = None) -> tf.data.Dataset:
    """Return a dataset of batches of `size` rows of arrays, the last one ragged."""
    ds = tf.data.Dataset.from_tensor_slices(leaves if len(leaves) > 1 else leaves[0])
    return (ds if rows is None else ds.take(rows)).batch(size)


@functools.cache
def data(rows: int = 23, features: int = 5, classes: int = 3):
    """Return features, integer labels, targets and positive weights, float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features))
    labels = rng.integers(0, classes, rows)
    targets = rng.normal(size=(rows, 2))
    return x, labels, targets, rng.uniform(0.2, 2.0, rows)
