"""BackupAndRestore: backups from which `train` goes on as if it had not been interrupted."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from accumloop import _data, _prepare, _state, _step, _store


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """Back up the state of `train`, and go on from it when the same script is run again.

    Killed at any moment and run again, training ends with the weights, the optimizer state and
    the history of the remaining epochs that it would have had without the interruption, to the
    last bit. Other than that of Keras, a backup in the middle of an epoch goes on there, with
    the batch after the last one saved. It has, besides weights and optimizers: the metrics of the
    running epoch; the state of `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`,
    `SwapEMAWeights` and `TensorBoard`; that of the random numbers of Keras, NumPy and Python; and
    the position in the dataset.

    A dataset that gives the same batches again, such as one with a seeded shuffle, is read up to
    where it was. One that does not, and one without end, go on by a checkpoint of their iterator,
    so that no row is left out or repeated; what is behind a `shuffle(seed=...).batch(n).repeat()`
    may have another order in later repetitions than without the interruption. If the iterator
    cannot be saved either, as that of a generator, and its batches are other ones this time, a
    warning says so.

    A backup is written aside and renamed when it is whole, and the one before is kept.

    For `train` only: `model.fit` owns its position in the data, so use
    `keras.callbacks.BackupAndRestore` there. Not saved: the generators of `tf.random` and the
    state of callbacks of your own.

    Args:
        backup_dir: Path of a directory for these backups alone.
        save_freq: `"epoch"` to save at the end of each epoch, or an int n >= 1 to save after each
            n batches.
        delete_checkpoint: Whether to delete the backups when training is finished.

    Raises:
        TypeError: If `save_freq` is neither `"epoch"` nor an int.
        ValueError: If `backup_dir` is empty or `save_freq < 1`; in `train`, if the backup is one
            of another model or dataset, or if all backups are damaged; in `model.fit`.

    Example:
        >>> import tempfile
        >>> import tensorflow as tf
        >>> from accumloop import train
        >>> x = tf.reshape(tf.range(12.0), [6, 2])
        >>> ds = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(2)
        >>> def run(backup_dir, *callbacks):
        ...     model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        ...     model.compile(keras.optimizers.SGD(0.001), "mse")
        ...     backup = BackupAndRestore(backup_dir, save_freq=2)
        ...     train(model, ds, 2, epochs=2, verbose=0, callbacks=[backup, *callbacks])
        ...     return int(model.optimizer.iterations)
        >>> class Interrupt(keras.callbacks.Callback):
        ...     def on_epoch_begin(self, epoch, logs=None):
        ...         if epoch == 1:
        ...             raise KeyboardInterrupt
        >>> with tempfile.TemporaryDirectory() as backup_dir:
        ...     try:
        ...         run(backup_dir, Interrupt())
        ...     except KeyboardInterrupt:
        ...         run(backup_dir)  # goes on before the third batch of the first epoch
        6

    References:
        - [`keras.callbacks.BackupAndRestore`](https://keras.io/api/callbacks/backup_and_restore/)
        - [Checkpoints of iterators](https://www.tensorflow.org/guide/data#iterator_checkpointing)
    """

    def __init__(
        self, backup_dir: Any, save_freq: str | int = "epoch", delete_checkpoint: bool = True
    ) -> None:
        if save_freq != "epoch":
            if isinstance(save_freq, bool) or not isinstance(save_freq, int | np.integer):
                raise TypeError(
                    '`save_freq` must be "epoch" or an int, the number of batches between two '
                    f"backups. Received: save_freq={save_freq!r}"
                )
            if save_freq < 1:
                raise ValueError(
                    f"`save_freq` must be at least 1. Received: save_freq={save_freq!r}"
                )
            save_freq = int(save_freq)
        backup_dir = str(backup_dir or "")
        super().__init__(backup_dir, save_freq, delete_checkpoint=delete_checkpoint)
        self.of_train = False

    # `train` saves and restores by itself, when all callbacks have been told.

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse to be a callback of `model.fit`."""
        if not self.of_train:
            raise ValueError(
                "`accumloop.BackupAndRestore` is for `accumloop.train`. For `model.fit` use "
                "`keras.callbacks.BackupAndRestore`, which saves whole epochs."
            )

    on_train_batch_end = keras.callbacks.Callback.on_train_batch_end
    on_epoch_end = keras.callbacks.Callback.on_epoch_end
    on_train_end = keras.callbacks.Callback.on_train_end


def among(callbacks: Any) -> BackupAndRestore | None:
    """Return the backup among callbacks, or None.

    Raises:
        ValueError: If there are several.
    """
    found = [
        callback
        for callback in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
        if isinstance(callback, BackupAndRestore)
    ]
    if len(found) > 1:
        raise ValueError(
            "Only one `BackupAndRestore` can say where to go on. Received: "
            f"{[callback.backup_dir for callback in found]}"
        )
    return found[0] if found else None


class Backups:
    """The backups of one run of `train`: none, if there is no callback for them.

    Args:
        callback: A `BackupAndRestore`, or None.
        model: The model.
        callbacks: All callbacks of the run.
        batches: The data of the run.
    """

    def __init__(
        self, callback: BackupAndRestore | None, model: keras.Model, callbacks: Any, batches: Any
    ) -> None:
        self._callback = callback
        self._model = model
        self._callbacks = callbacks.callbacks
        self._batches: _data.Epochs = batches
        self._saved: _state.Saved | None = None
        self._since = 0  # Batches since the last backup.
        self._fingerprint = 0
        if callback is not None:
            callback.of_train = True
            self._fingerprint = _data.fingerprint(batches.peeked)

    def begin(self, step: _step.Step, element_spec: Any) -> _state.Place | None:
        """Go back to the last backup, and return its place, or None if there is none."""
        path = None if self._callback is None else _store.newest(self._callback.backup_dir)
        if path is None:
            return None
        _prepare.build_all(self._model, step, element_spec, self._batches.peeked)
        self._saved = _state.Saved(path, self._model)
        self._saved.restore_data(self._batches, self._fingerprint)
        self._saved.restore(self._callbacks)
        return self._saved.place

    def begin_epoch(self) -> int:
        """Return the first step of the epoch that has begun."""
        saved, self._saved = self._saved, None
        if saved is None or not saved.place.step:
            return 0
        # It had begun before: what its beginning changes now, such as the learning rate, it has
        # changed by then.
        saved.restore(self._callbacks)
        return saved.place.step

    def after_batches(self, epoch: int, execution: _data.Execution, logs: Any) -> None:
        """Make a backup in the middle of an epoch, if it is time."""
        if self._callback is None or self._callback.save_freq == "epoch":
            return
        self._since += execution.end_step + 1 - execution.begin_step
        if self._since >= self._callback.save_freq:
            self._since = 0
            self._save(self._callback, _state.Place(epoch, execution.end_step + 1, logs))

    def after_epoch(self, epoch: int, logs: Any) -> None:
        """Make a backup after an epoch, if it is time."""
        if self._callback is not None and self._callback.save_freq == "epoch":
            self._save(self._callback, _state.Place(epoch + 1, 0, logs))

    def end(self) -> None:
        """Delete the backups of a run that is over."""
        if self._callback is not None and self._callback.delete_checkpoint:
            _store.remove(self._callback.backup_dir)

    def _save(self, callback: BackupAndRestore, place: _state.Place) -> None:
        if self._model.stop_training:  # About to end: from an earlier backup it ends here again.
            return
        run = (self._model, self._callbacks, self._batches, self._fingerprint, place)
        _store.write(callback.backup_dir, lambda path: _state.save(path, *run))
