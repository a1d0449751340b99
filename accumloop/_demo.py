"""One training of the demonstration, in a process of its own and with its memory measured."""

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import keras
import numpy as np
import tensorflow as tf

import accumloop

_SEED = 1
_VALIDATION_ROWS = 32
_T = TypeVar("_T")


class Outcome(NamedTuple):
    """What a training leaves."""

    history: dict[str, list[float]]
    weights: list[np.ndarray]
    peak: int | None  # bytes above rest; None where the system does not tell


def run_apart(accum: int | None, *, batch_size: int, epochs: int, data_dir: str | None) -> Outcome:
    """Train the network on the digits, in a fresh process: no training sees another's memory.

    Args:
        accum: How many micro-batches `accumloop.train` cuts a batch into; None for `model.fit`.
        batch_size: The rows of a batch.
        epochs: The passes over the data.
        data_dir: Where the prepared digits are; None for the folder of TFDS.

    Returns:
        The outcome of the training.
    """
    # Spawned, not forked: the threads of TensorFlow do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_run, accum, batch_size, epochs, data_dir).result()


def _run(accum: int | None, batch_size: int, epochs: int, data_dir: str | None) -> Outcome:
    """Train the network in this process."""
    # The system tells how much memory the host gave, so that is where the activations have to be.
    tf.config.set_visible_devices([], "GPU")
    keras.utils.set_random_seed(_SEED)
    train, test = _batches(batch_size, data_dir)
    model = _network()

    def call() -> keras.callbacks.History:
        if accum is None:
            # Keras 3.15 warns of its own default for `shuffle` when it is given a Dataset.
            return model.fit(train, epochs=epochs, validation_data=test, shuffle=False)
        return accumloop.train(model, train, accum, epochs=epochs, validation_data=test)

    history, peak = measure_peak(call)
    return Outcome(history.history, model.get_weights(), peak)


def _batches(batch_size: int, data_dir: str | None) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Return the batches to train on and those to validate on, each of images and labels."""
    import tensorflow_datasets as tfds

    import accumloop.digits  # noqa: F401 - registers the data set

    train, test = tfds.load(
        "digits", split=["train", "test"], as_supervised=True, data_dir=data_dir
    )
    # Validation in small batches, or its forward pass would set the peak of both trainings.
    return train.cache().batch(batch_size), test.batch(_VALIDATION_ROWS).cache()


def _network() -> keras.Model:
    """Return a compiled network whose activations take far more memory than its weights.

    It enlarges the images to 32 x 32 pixels. It has neither relu nor max pooling: where those turn
    over, a rounding error becomes a step, and two equal trainings drift apart.
    """
    layers = keras.layers

    def convolution(filters: int) -> keras.Layer:
        return layers.Conv2D(
            filters, 3, padding="same", activation="gelu", kernel_initializer="he_normal"
        )

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 127.5, offset=-1),
            layers.UpSampling2D(4),
            convolution(32),
            convolution(32),
            layers.AveragePooling2D(4),
            convolution(64),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    # SGD, because Adam divides out the scale of a gradient and would hide a wrong one.
    model.compile(
        keras.optimizers.SGD(learning_rate=0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def measure_peak(call: Callable[[], _T]) -> tuple[_T, int | None]:
    """Call a function and measure how far it takes this process's memory above rest.

    Args:
        call: The function.

    Returns:
        What the function returns, and the highest resident set during the call (VmHWM) minus the
        resident set before it (VmRSS), in bytes; None where the system does not tell, as only
        Linux does.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # lets VmHWM start again from VmRSS
        rest = _status("VmRSS")
    except OSError:
        return call(), None
    result = call()
    return result, _status("VmHWM") - rest


def _status(field: str) -> int:
    """Return a field of `/proc/self/status`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kibibytes) * 1024


def relative_difference(weights: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """Return the largest `max|a - b| / max|b|` over the variables `a` and `b` of two models.

    Args:
        weights: The variables `a`, arrays of any shape.
        reference: The variables `b`, of the same shapes.
    """
    return max(
        float(np.max(np.abs(a - b)) / np.max(np.abs(b)))
        for a, b in zip(weights, reference, strict=True)
    )
