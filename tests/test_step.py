"""What is traced, how often, and what is left in memory."""

import functools
import gc
import weakref

import keras
import pytest
import tensorflow as tf
from oracle import batches, data

import accumloop
from accumloop import _ancestors, _data, _step

x, labels, targets, weights = data()
L = keras.layers
ds = functools.partial(batches, x, targets, size=10)


class Counting(L.Layer):
    """Counts how often it is traced."""

    def __init__(self):
        super().__init__()
        self.traces = 0

    def call(self, inputs):
        self.traces += not tf.executing_eagerly()
        return inputs


def make_model(*layers, **options):
    model = keras.Sequential([*layers, L.Dense(2)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae", "mse"], **options)
    return model


# TensorFlow traces a function twice if it creates variables. Keras' step creates its metrics, the
# build the weights (after a trace in which Keras infers shapes).
STEP = {1: 2, 3: 1, 64: 1}
BUILD = 3


@pytest.mark.parametrize("accum", STEP)
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}], ids=["one", "two"])
def test_traces(accum, built, options):
    layer = Counting()
    model = make_model(*([keras.Input([5])] if built else []), layer, **options)
    layer.traces = 0
    accumloop.train(model, ds(), accum, epochs=5, verbose=0)
    first = STEP[accum] + (0 if built else BUILD)
    assert layer.traces == first
    accumloop.train(model, ds(), accum, epochs=5, verbose=0)
    assert layer.traces == first, "a second call traces nothing again"
    accumloop.train(model, ds().take(1), accum + 7, epochs=1, verbose=0)
    assert layer.traces == first + (accum == 1), "another accum only if the first cut nothing"
    model.compile("sgd", "mse")
    accumloop.train(model, ds(), accum, verbose=0)
    assert layer.traces == first + (accum == 1) + 1, "a recompile does"


def test_traces_of_xla():
    """XLA compiles once for each size of micro-batch, but nothing is traced again."""
    layer = Counting()
    model = make_model(keras.Input([5]), layer, jit_compile=True)
    layer.traces = 0
    accumloop.train(model, ds(), 3, epochs=5, verbose=0)
    assert layer.traces == 1


def test_an_eager_model_is_traced_once_for_the_first_of_two_passes():
    layer = Counting()
    model = make_model(keras.Input([5]), layer, run_eagerly=True)
    layer.traces = 0
    accumloop.train(model, ds(), 3, epochs=2, verbose=0, whole_batch_loss=True)
    assert layer.traces == 1


def test_whole_batch_loss_of_one_micro_batch_is_the_same_step():
    layer = Counting()
    model = make_model(keras.Input([5]), layer)
    accumloop.train(model, ds(), 1, verbose=0)
    traces = layer.traces
    accumloop.train(model, ds(), 1, verbose=0, whole_batch_loss=True)
    assert layer.traces == traces


def nodes_of(model, accum):
    accumloop.train(model, ds(), accum, verbose=0)
    (step,) = _step.steps_of(model).made.values()
    iterator = iter(ds())
    graph = step.run.get_concrete_function(
        iterator.get_next_as_optional(), iterator, tf.constant(accum, tf.int64)
    ).graph
    return _ancestors.nodes_of(graph)


def test_the_graph_does_not_grow_with_the_number_of_micro_batches():
    few, many = (len(nodes_of(make_model(keras.Input([5])), accum)) for accum in (2, 64))
    assert few == many > 100


@pytest.mark.parametrize("accum", [1, 3])
def test_a_model_that_is_dropped_is_freed(accum):
    model = make_model(keras.Input([5]))
    accumloop.train(model, ds(), accum, verbose=0)
    gone = weakref.ref(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    assert gone() is None


def test_a_recompile_drops_the_steps_before():
    model = make_model(keras.Input([5]))
    accumloop.train(model, ds(), 3, verbose=0)
    before = weakref.ref(_step.steps_of(model))
    model.compile("sgd", "mse")
    accumloop.train(model, ds(), 3, verbose=0)
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("accum", [1, 3])
def test_a_batch_is_not_kept_while_the_next_one_is_fetched(monkeypatch, accum):
    freed, used = [], []
    epoch = _data.Epochs.epoch

    def spied(self, *begin):
        executions = epoch(self, *begin)
        while True:
            freed.extend(ref() is None for ref in used)
            used.clear()
            given = [next(executions, None)]
            if given[0] is None:
                return
            used.append(weakref.ref(given[0].first))
            yield given.pop()

    monkeypatch.setattr(_data.Epochs, "epoch", spied)
    unknown = ds().filter(lambda *_: True)  # Of others the step reads the batches itself.
    accumloop.train(make_model(keras.Input([5])), unknown, accum, epochs=2, verbose=0)
    assert freed == [True] * 6


def test_micro_batches_run_one_after_another():
    """In parallel they would hold the activations of as many."""
    (loop,) = [node for node in nodes_of(make_model(keras.Input([5])), 3) if "While" in node.op]
    assert loop.attr["parallel_iterations"].i == 1


@pytest.mark.parametrize("accum", [1, 2])
def test_run_eagerly_runs_python_for_each_micro_batch(accum):
    seen = []

    class Looking(L.Layer):
        def call(self, inputs):
            if hasattr(inputs, "numpy"):  # Keras builds with symbolic tensors.
                seen.append(len(inputs.numpy()))
            return inputs

    model = make_model(Looking(), run_eagerly=True)
    accumloop.train(model, ds().take(1), accum, verbose=0)
    assert seen[-accum:] == [10 // accum] * accum
