"""Who trains: accumloop, and what it is compared with.

A new system is a function that prepares a training and a line in `SYSTEMS`. All of them see the
same model, the same loss and optimizer, and the same batches, each of which is one update.
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import tensorflow as tf

import accumloop
from benchmarks.workloads import Workload, dataset_of, model_of

# Trains for a number of epochs. Called again, it goes on with what it has traced.
Training = Callable[[int], object]


class System(NamedTuple):
    """One way to train.

    Attributes:
        prepare: Returns a training with model, optimizer and data in memory, nothing traced yet.
        cuts: Whether it cuts batches. One that does not is run once a round, as `accum=1`.
    """

    prepare: Callable[[Workload, int], Training]
    cuts: bool = True


def _fit(workload: Workload, accum: int) -> Training:
    """`model.fit` on whole batches."""
    model, ds = _compiled(workload), dataset_of(workload)
    return lambda epochs: model.fit(ds, epochs=epochs, verbose=0)


def _train(workload: Workload, accum: int) -> Training:
    """`accumloop.train`."""
    model, ds = _compiled(workload), dataset_of(workload)
    return lambda epochs: accumloop.train(model, ds, accum, epochs=epochs, verbose=0)


def _accumulate(workload: Workload, accum: int) -> Training:
    """`model.fit` on whole batches, with `accumloop.Accumulate`."""
    model, ds = _compiled(workload), dataset_of(workload)
    callbacks = [accumloop.Accumulate(accum)]
    return lambda epochs: model.fit(ds, epochs=epochs, verbose=0, callbacks=callbacks)


def _two_passes(workload: Workload, accum: int) -> Training:
    """`accumloop.train` with `whole_batch_loss=True`."""
    model, ds = _compiled(workload), dataset_of(workload)
    return lambda epochs: accumloop.train(
        model, ds, accum, epochs=epochs, verbose=0, whole_batch_loss=True
    )


def _bare(workload: Workload, accum: int) -> Training:
    """A loop written by hand for this workload: no metrics, no callbacks, no odd sizes.

    Accumulators are variables. The first micro-batch, outside the loop, assigns to them: this
    was no slower than carrying sums through the loop, and took less memory than the other way
    to save the first addition, a carried sum that begins with the first micro-batch.
    """
    model, ds = _compiled(workload), dataset_of(workload)
    variables = model.trainable_variables
    totals = [tf.Variable(tf.zeros(variable.shape), trainable=False) for variable in variables]
    micro_batch_size = workload.batch_size // accum

    def gradients(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True)) / accum
        return tape.gradient(loss, variables)

    @tf.function
    def update(x: tf.Tensor, y: tf.Tensor) -> None:
        x = tf.reshape(x, (accum, micro_batch_size, *workload.inputs))
        y = tf.reshape(y, (accum, micro_batch_size, *y.shape[1:]))
        for total, gradient in zip(totals, gradients(x[0], y[0]), strict=True):
            total.assign(gradient, read_value=False)
        for index in tf.range(1, accum):
            # More would hold the activations of as many micro-batches, and save no time.
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            for total, gradient in zip(totals, gradients(x[index], y[index]), strict=True):
                total.assign_add(gradient, read_value=False)
        model.optimizer.apply([total.read_value() for total in totals], variables)

    def train(epochs: int) -> None:
        for _ in range(epochs):
            for x, y in ds:
                update(x, y)

    return train


def _keras_accumulation(workload: Workload, accum: int) -> Training:
    """`model.fit` on micro-batches, with an optimizer of Keras that accumulates."""
    # Keras refuses a 1: its optimizers that do not accumulate have None here.
    model = _compiled(workload, gradient_accumulation_steps=accum if accum > 1 else None)
    ds = dataset_of(workload).unbatch().batch(workload.batch_size // accum)
    return lambda epochs: model.fit(ds, epochs=epochs, verbose=0)


def _compiled(workload: Workload, gradient_accumulation_steps: int | None = None) -> keras.Model:
    model = model_of(workload)
    model.compile(
        keras.optimizers.Adam(gradient_accumulation_steps=gradient_accumulation_steps),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.optimizer.build(model.trainable_variables)  # Its slots are memory at rest, like weights.
    return model


SYSTEMS = {
    "fit": System(_fit, cuts=False),
    "bare": System(_bare),
    "train": System(_train),
    "accumulate": System(_accumulate),
    "whole_batch_loss": System(_two_passes),
    "keras_accumulation": System(_keras_accumulation),
}
