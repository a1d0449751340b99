"""What a backup of Keras leaves out: random numbers, in a file beside it.

`keras.callbacks.BackupAndRestore` saves no seeds, so dropout would draw the masks of the first
epochs again, and it saves the weights before it notes their epoch, so a process may die between
the two. The file has the last two epochs, by the number of updates that the weights have had.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from accumloop import _backup, _keras, _state, _store

_NAME = "accumloop.json"
_KEPT = 2


class Beside:
    """The files beside the backups of Keras, in one run of `train`.

    Args:
        model: The model.
        callbacks: All callbacks of the run.
    """

    def __init__(self, model: keras.Model, callbacks: Any) -> None:
        self._model = model
        self._directories = [
            str(callback.backup_dir)
            for callback in callbacks.callbacks
            if isinstance(callback, keras.callbacks.BackupAndRestore)
            and not isinstance(callback, _backup.BackupAndRestore)
        ]

    def begin(self) -> int | None:
        """Restore what belongs to the restored weights, and return the epoch to begin with."""
        for directory in self._directories:
            saved = _read(directory).get(str(self._updates()))
            if saved is None:
                continue
            seeds = _state.seeds(self._model, saved["random"]["keras"])
            if len(seeds) == len(saved["seeds"]):
                for seed, value in zip(seeds, saved["seeds"], strict=True):
                    seed.assign(value)
                _state.restore_random(saved["random"])
                return saved["epoch"]
        return _keras.restored_epoch(self._model)

    def before_epoch_end(self, epoch: int) -> None:
        """Write what belongs to the weights that Keras is about to save."""
        if not self._directories:
            return
        random = _state.random()
        seeds = _state.seeds(self._model, random["keras"])
        saved = {
            "epoch": epoch + 1,
            "random": random,
            "seeds": [seed.numpy().tolist() for seed in seeds],
        }
        for directory in self._directories:
            entries = {**_read(directory), str(self._updates()): saved}
            last = dict(list(entries.items())[-_KEPT:])
            tf.io.gfile.makedirs(directory)
            _store.write_json(directory, f"{_NAME}.new", last)
            tf.io.gfile.rename(
                tf.io.gfile.join(directory, f"{_NAME}.new"),
                tf.io.gfile.join(directory, _NAME),
                overwrite=True,
            )

    def _updates(self) -> int:
        optimizer = self._model.optimizer
        return int(optimizer.iterations) if isinstance(optimizer, keras.optimizers.Optimizer) else 0


def _read(directory: str) -> dict[str, Any]:
    exists = tf.io.gfile.exists(tf.io.gfile.join(directory, _NAME))
    return _store.read_json(directory, _NAME) if exists else {}
