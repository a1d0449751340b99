"""What is trained: a model, synthetic data, and how much of it makes one run.

A new workload is a function that builds a model and a line in `WORKLOADS`.
"""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

_CLASSES = 10
_SEED = 1


class Workload(NamedTuple):
    """A model and the batches that it is trained on.

    Attributes:
        build: Returns the model: built, not compiled, ending in logits of 10 classes.
        inputs: Shape of one row of the input, without the batch dimension.
        batch_size: Rows of a batch.
        batches: Batches of an epoch.
        epochs: Warm epochs of a run: enough of them for a few seconds.
        vocabulary: Inputs are ids below it, and each has a class; 0 for features of rows.
    """

    build: Callable[[], keras.Model]
    inputs: tuple[int, ...]
    batch_size: int
    batches: int
    epochs: int
    vocabulary: int = 0


def model_of(workload: Workload) -> keras.Model:
    """Return the model with its initial weights, the same ones in every process."""
    keras.utils.set_random_seed(_SEED)
    return workload.build()


def dataset_of(workload: Workload) -> tf.data.Dataset:
    """Return seeded random `(x, y)` batches from tensors in memory.

    `x` is float32 of shape `(batch_size, *inputs)` and `y` int32 of shape `(batch_size,)`; of ids
    both are int32 of shape `(batch_size, *inputs)`, a third of them 0 at the end of each row.
    """
    random = np.random.default_rng(_SEED)
    rows = workload.batch_size * workload.batches
    if workload.vocabulary:
        shape = (rows, *workload.inputs)
        x = random.integers(1, workload.vocabulary, size=shape, dtype="int32")
        x[:, 2 * shape[1] // 3 :] = 0
        y = random.integers(_CLASSES, size=shape, dtype="int32")
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(workload.batch_size)
    x = random.standard_normal((rows, *workload.inputs), dtype="float32")
    y = random.integers(_CLASSES, size=rows, dtype="int32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(workload.batch_size)


def _small_mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(_CLASSES),
        ]
    )


def _tiny() -> keras.Model:
    """Return a model whose updates cost less than what is around them."""
    return keras.Sequential([keras.Input((8,)), layers.Dense(_CLASSES)])


def _cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(_CLASSES),
        ]
    )


_VOCABULARY = 1000


def _tokens(mask_zero: bool) -> keras.Model:
    """Return layers that pass a mask on and cost the same with and without."""
    return keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(_VOCABULARY, 64, mask_zero=mask_zero),
            layers.Dense(256, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(_CLASSES),
        ]
    )


WORKLOADS = {
    "small_mlp": Workload(_small_mlp, (64,), batch_size=256, batches=60, epochs=20),
    "tiny": Workload(_tiny, (8,), batch_size=16, batches=500, epochs=6),
    "cnn": Workload(_cnn, (28, 28, 1), batch_size=256, batches=8, epochs=5),
    "cnn_1024": Workload(_cnn, (28, 28, 1), batch_size=1024, batches=3, epochs=3),
    "tokens": Workload(lambda: _tokens(False), (64,), 64, 20, 5, _VOCABULARY),
    "tokens_masked": Workload(lambda: _tokens(True), (64,), 64, 20, 5, _VOCABULARY),
}
