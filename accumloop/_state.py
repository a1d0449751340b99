"""What a run needs to go on in another process: everything that its next batches depend on."""

from __future__ import annotations

import random as python_random
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from accumloop import _attributes, _data, _keras, _store

_STATE, _VARIABLES, _ITERATOR = "state.json", "variables", "iterator"


class Place(NamedTuple):
    """Where in the epochs: before step `step` of epoch `epoch`, with what was logged last."""

    epoch: int
    step: int
    logs: dict[str, Any]


def save(
    path: str,
    model: keras.Model,
    callbacks: Iterable[Any],
    batches: _data.Epochs,
    fingerprint: int,
    place: Place,
) -> None:
    """Write the state of a run into an empty directory.

    Args:
        path: The directory.
        model: The model.
        callbacks: All callbacks of the run.
        batches: Its data.
        fingerprint: That of its first batch.
        place: Where it is.
    """
    variables = _variables(model)
    arrays: list[Any] = []
    state = {
        "epoch": place.epoch,
        "step": place.step,
        "logs": keras.tree.map_structure(lambda value: np.asarray(value).tolist(), place.logs),
        "variables": [_described(variable) for variable in variables],
        "callbacks": [
            [type(callback).__name__, _packed(callback, names, arrays)]
            for callback, names in _with_state(callbacks)
        ],
        "random": random(),
        "data": {**batches.place()._asdict(), "saved": _save_iterator(path, batches.iterator)},
        "fingerprint": fingerprint,
        "length": batches.length,
    }
    _checkpoint(variables=variables, arrays=[tf.Variable(array) for array in arrays]).write(
        tf.io.gfile.join(path, _VARIABLES)
    )
    _store.write_json(path, _STATE, state)


class Saved:
    """A state that was saved.

    Args:
        path: The directory.
        model: The model of this run, with all its variables.

    Raises:
        ValueError: If it is the state of another model.
    """

    def __init__(self, path: str, model: keras.Model) -> None:
        self._path = path
        self._model = model
        self._state = _store.read_json(path, _STATE)
        seeds(model, self._state["random"]["keras"])
        _refuse_other_model(path, self._state["variables"], _variables(model))
        self.place = Place(*(self._state[name] for name in Place._fields))

    def restore(self, callbacks: Iterable[Any]) -> None:
        """Give model, callbacks and generators of random numbers the values that were saved."""
        reader = tf.train.load_checkpoint(tf.io.gfile.join(self._path, _VARIABLES))

        def value(name: str, index: int) -> Any:
            return reader.get_tensor(f"{name}/{index}/.ATTRIBUTES/VARIABLE_VALUE")

        for index, variable in enumerate(_variables(self._model)):
            variable.assign(value("variables", index))
        found, saved = list(_with_state(callbacks)), self._state["callbacks"]
        if [type(callback).__name__ for callback, _ in found] == [name for name, _ in saved]:
            for (callback, _), (_, attributes) in zip(found, saved, strict=True):
                for name, packed in attributes.items():
                    setattr(callback, name, _unpacked(packed, lambda i: value("arrays", i)))
        else:
            warnings.warn(
                "The callbacks are others than those of the backup, and begin anew. Received: "
                f"{[type(c).__name__ for c, _ in found]}, and saved: {[n for n, _ in saved]}",
                stacklevel=2,
            )
        restore_random(self._state["random"])

    def restore_data(self, batches: _data.Epochs, fingerprint: int) -> None:
        """Let the next batch be the one after the last one before the state was saved.

        Args:
            batches: The data of this run.
            fingerprint: That of its first batch.
        """
        if self.place.step and batches.length != self._state["length"]:
            raise ValueError(
                "The backup was made in the middle of an epoch of another dataset. Remove the "
                f"directory to train from the beginning. Received: {self._path!r} of "
                f"{self._state['length']} batches, and a dataset of {batches.length}"
            )
        data = dict(self._state["data"])
        saved = data.pop("saved")
        same = fingerprint == self._state["fingerprint"]
        # TensorFlow 2.21 restores a shuffle that has reached the end of its input with one seed
        # too many for the iterators after it. Where there are such, and the dataset gives the
        # same batches again, it is read.
        if saved and (batches.endless or not same):
            batches.go_to(_data.Place(**data), self._restore_iterator)
            return
        if not same:
            warnings.warn(
                "The dataset gives other batches than before the interruption, and its iterators "
                "cannot be saved: in this epoch, examples are left out or repeated. Give its "
                "shuffles a `seed`, and leave out what is random otherwise.",
                stacklevel=2,
            )
        batches.go_to(_data.Place(**data), None)

    def _restore_iterator(self, iterator: Any) -> None:
        try:
            saved = _checkpoint(iterator=iterator).read(tf.io.gfile.join(self._path, _ITERATOR))
            saved.assert_consumed()
        except (tf.errors.OpError, ValueError, AssertionError) as error:
            raise ValueError(
                "The backup is one of another dataset, whose iterator this dataset cannot take "
                "up. Remove the directory to train from the beginning. Received: "
                f"{self._path!r}"
            ) from error


def _checkpoint(**objects: Any) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(**objects)


def _variables(model: keras.Model) -> list[tf.Variable]:
    """Return all that training can change, each once, in an order that is always the same."""
    optimizers = _attributes.held(model, keras.optimizers.Optimizer)
    tracked = [*model.variables, *model.metrics_variables]
    tracked += [variable for optimizer in optimizers for variable in optimizer.variables]
    tracked += _keras.global_seed_variables()
    values = [variable.value for variable in tracked]
    values += _attributes.held(model, tf.Variable)
    return list({id(value): value for value in values}.values())


def _described(variable: tf.Variable) -> list[Any]:
    return [variable.name, list(variable.shape), variable.dtype.name]


def _refuse_other_model(path: str, saved: list[Any], variables: list[tf.Variable]) -> None:
    own = [_described(variable) for variable in variables]
    if [kind for _, *kind in saved] == [kind for _, *kind in own]:
        return
    pairs = zip(saved + [None] * len(own), own + [None] * len(saved), strict=False)
    theirs, ours = next(pair for pair in pairs if (pair[0] or [0])[1:] != (pair[1] or [0])[1:])
    raise ValueError(
        "The backup is one of another model or optimizer. Give another `backup_dir`, or remove "
        f"this one to train from the beginning. Received: {path!r} with {_words(theirs)}, where "
        f"the model has {_words(ours)}"
    )


def _words(described: list[Any] | None) -> str:
    if described is None:
        return "no further variable"
    name, shape, dtype = described
    return f"'{name}' of shape {tuple(shape)} and dtype {dtype}"


def _save_iterator(path: str, iterator: Any) -> bool:
    """Write where an iterator is, if what its dataset does can be written."""
    if iterator is None:
        return False
    try:
        _checkpoint(iterator=iterator).write(tf.io.gfile.join(path, _ITERATOR))
    except tf.errors.OpError:
        return False
    return True


def _with_state(callbacks: Iterable[Any]) -> Iterable[tuple[Any, list[str]]]:
    for callback in callbacks:
        names = [
            name
            for kind, own in _keras.callback_state().items()
            if isinstance(callback, kind)
            for name in own
        ]
        if names:
            yield callback, names


def _packed(callback: Any, names: list[str], arrays: list[Any]) -> dict[str, Any]:
    """Return attributes as JSON has them, with the indices of arrays in place of arrays."""
    packed: dict[str, Any] = {}
    for name in names:
        value = getattr(callback, name, None)
        if isinstance(value, list):
            packed[name] = list(range(len(arrays), len(arrays) + len(value)))
            arrays.extend(value)
        else:
            packed[name] = value.item() if isinstance(value, np.generic) else value
    return packed


def _unpacked(value: Any, array: Any) -> Any:
    return [array(index) for index in value] if isinstance(value, list) else value


def seeds(model: keras.Model, with_global: bool) -> list[tf.Variable]:
    """Return the states of the seed generators of a model, and of the global one if it is used."""
    if with_global:
        _keras.global_seed_generator()
    weights = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    own = [variable for variable in model.variables if id(variable) not in weights]
    return [variable.value for variable in own + _keras.global_seed_variables()]


def random() -> dict[str, Any]:
    """Return the states of random numbers of Python and NumPy, and whether Keras draws globally."""
    version, numbers, gauss = python_random.getstate()
    kind, keys, *more = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *more],
        "keras": bool(_keras.global_seed_variables()),
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore the states of random numbers of Python and NumPy."""
    version, numbers, gauss = state["python"]
    python_random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))
