"""train() against fit: every optimizer, every way to cut, every tail."""

import functools
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from oracle import Case, assert_same, batches, data, fresh_model, outcome_of

import accumloop

x, labels, targets, weights = data()
ROWS_OF_A_BATCH = 10
TAILS = {"even": 20, "ragged": 23, "one_row": 21}
ACCUMS = [1, 2, 3, 5, ROWS_OF_A_BATCH, 64]
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
    "adamax": lambda: keras.optimizers.Adamax(0.05),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.05),
    "lion": lambda: keras.optimizers.Lion(0.02),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.02, momentum=0.5, centered=True),
    "clipnorm": lambda: keras.optimizers.Adam(0.05, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, momentum=0.9, clipvalue=0.02),
    "weight_decay": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.05),
    "ema": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.7),
    "ema_overwrite": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2
    ),
    "loss_scale_factor": lambda: keras.optimizers.SGD(0.1, momentum=0.9, loss_scale_factor=64.0),
    "loss_scale_optimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=256.0, dynamic_growth_steps=2
    ),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.3, decay_steps=2, decay_rate=0.5),
        momentum=0.9,
    ),
    "warmup": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(0.01, 6, warmup_target=0.1, warmup_steps=3)
    ),
}
if hasattr(keras.optimizers, "Muon"):
    OPTIMIZERS["muon"] = lambda: keras.optimizers.Muon(0.02)
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.05)
if hasattr(keras.optimizers, "MultiOptimizer"):
    OPTIMIZERS["multi"] = lambda: keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.1, momentum=0.9), {".*bias": keras.optimizers.Adam(0.05)}
        )
    )


def make_model(optimizer):
    model = keras.Sequential(
        [
            keras.Input([5]),
            keras.layers.Dense(
                8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01)
            ),
            keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1.5)),
        ]
    )
    model.compile(
        OPTIMIZERS[optimizer](),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce")],
    )
    return model


def case_of(optimizer, tail):
    rows = TAILS[tail]
    return Case(
        functools.partial(make_model, optimizer),
        lambda: batches(x, labels, weights, size=ROWS_OF_A_BATCH, rows=rows),
    )


class Trained:
    """A model that is put back to its start for each run, so that each function traces once."""

    def __init__(self, optimizer):
        self.model = fresh_model(case_of(optimizer, "even"))
        self.model.optimizer.build(self.model.trainable_variables)
        self.start = [(v, keras.ops.convert_to_numpy(v)) for v in self._variables()]

    def _variables(self):
        return [*self.model.variables, *self.model.optimizer.variables]

    def outcome(self, run, case):
        for variable, value in self.start:
            variable.assign(value)
        return outcome_of(self.model, run, case)


@functools.cache
def trained(optimizer, door):
    return Trained(optimizer)


@functools.cache
def fitted(optimizer, tail):
    runner = trained(optimizer, "fit")
    return runner.outcome(
        functools.partial(runner.model.fit, shuffle=False), case_of(optimizer, tail)
    )


def test_every_optimizer_of_keras_is_here():
    known = {type(inner) for make in OPTIMIZERS.values() for inner in [make()]}
    classes = {
        value
        for value in vars(keras.optimizers).values()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer)
    }
    assert classes - {keras.optimizers.Optimizer} == known


@pytest.mark.parametrize("accum", ACCUMS)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in OPTIMIZERS]
)
def test_optimizer(optimizer, tail, accum):
    runner = trained(optimizer, "train")
    actual = runner.outcome(
        lambda ds, **kw: accumloop.train(runner.model, ds, accum, **kw), case_of(optimizer, tail)
    )
    assert_same(fitted(optimizer, tail), actual, rtol=0 if accum == 1 else 1e-9)


def test_the_cases_tell_right_from_wrong():
    """Mean of means, in which each micro-batch counts the same, is 1e-2 off on a ragged cut."""
    case = case_of("momentum", "ragged")
    runner = trained("momentum", "fit")

    def mean_of_means(ds, epochs, callbacks, verbose):
        model, optimizer = runner.model, runner.model.optimizer
        for _ in range(epochs):
            for bx, by, bw in ds:
                cuts = [(0, 3), (3, 6), (6, 10)]
                parts = [(bx[a:b], by[a:b], bw[a:b]) for a, b in cuts if a < len(bx)]
                sums = None
                for px, py, pw in parts:
                    with tf.GradientTape() as tape:
                        loss = model.compute_loss(px, py, model(px, training=True), pw)
                    grads = tape.gradient(loss, model.trainable_variables)
                    sums = (
                        grads if sums is None else [s + g for s, g in zip(sums, grads, strict=True)]
                    )
                optimizer.apply([s / len(parts) for s in sums], model.trainable_variables)
        return model.history

    wrong = runner.outcome(mean_of_means, case).weights
    right = fitted("momentum", "ragged").weights
    assert max(np.max(np.abs(wrong[name] - right[name])) for name in right) > 1e-3
