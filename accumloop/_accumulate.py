"""Accumulate: the callback by which `model.fit` accumulates, with the step of `train`."""

from __future__ import annotations

from typing import Any

import keras

from accumloop import _checks, _cut, _heartbeat, _prepare, _step, _swap


class Accumulate(keras.callbacks.Callback):
    """Let `model.fit` cut its batches, as `train` does: the same updates, less memory.

    Everything else stays that of `model.fit`: arrays, generators, `validation_split`,
    `class_weight`. Its place among the callbacks does not matter, and a later `fit` without it
    accumulates nothing, however this one has ended. `evaluate` and `predict` are untouched, and
    so are a `train_on_batch` and a `fit` of another callback.

    A model that is not built yet is built by the first batch, as under `model.fit`. On a dataset of
    unknown length `model.fit` makes one update too many in each epoch, without data; here it
    makes none.

    Args:
        accum: An int >= 1, the number of micro-batches that a batch is cut into. A batch of
            fewer rows is cut into single rows.
        whole_batch_loss: Whether to take the loss of whole batches, as in `train`.

    Raises:
        TypeError: If `accum` is no int, or `whole_batch_loss` no bool.
        ValueError: If `accum < 1`; in `fit`, if there are two of them, or the optimizer has
            `gradient_accumulation_steps` itself.
        NotImplementedError: In `fit`, at its start or its first batch, if micro-batches would
            train something else than their batch, as in `train`.

    Example:
        >>> x = keras.ops.reshape(keras.ops.arange(12.0), [6, 2])
        >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.001), "mse")
        >>> history = model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[Accumulate(2)])
        >>> len(history.history["loss"]), int(model.optimizer.iterations)
        (1, 2)

    References:
        - [`keras.Model.fit`](https://keras.io/api/models/model_training_apis/#fit-method)
    """

    def __init__(self, accum: int, whole_batch_loss: bool = False) -> None:
        super().__init__()
        _checks.accum(accum)
        _checks.whole_batch_loss(whole_batch_loss)
        self.accum = accum
        self.whole_batch_loss = whole_batch_loss
        self._pieces: Any = None
        self._step: _step.Step | None = None
        self._heartbeat = _heartbeat.Heartbeat([])
        self._swap: _swap.Swap | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the place of the function that trains."""
        _swap.put_back(self.model)
        beside = _swap.callbacks_beside(self)
        if sum(isinstance(callback, Accumulate) for callback in beside) > 1:
            raise ValueError(
                "Only one `Accumulate` can cut the batches of a `fit`. "
                "Received: two of them among its callbacks"
            )
        _checks.model(self.model)
        if self.accum > 1:
            _checks.cut_exactly(self.model, self.whole_batch_loss)
        self._step = None
        self._heartbeat = _heartbeat.Heartbeat(beside)
        self._pieces = _cut.pieces_of(self.accum)
        self._swap = _swap.Swap(self.model, self, self._train, self._forget)

    def on_train_end(self, logs: Any = None) -> None:
        """Give back the place."""
        if self._swap is not None:
            self._swap.put_back()
        self._step = self._swap = None
        self._heartbeat.close()

    def _train(self, iterator: Any) -> Any:
        # Read before the step, which a batch that is not there must not begin.
        first = iterator.get_next_as_optional()
        if not first.has_value():
            raise StopIteration
        if self._step is None:
            self._step = _prepare.prepared_step(
                self.model,
                iterator.element_spec,
                first.get_value(),
                self.accum,
                self.whole_batch_loss,
            )
        with self._heartbeat:
            logs = self._step.run(first, iterator, self._pieces)
            self._heartbeat.wait_for(logs)
        return logs

    def _forget(self) -> None:
        self._step = None
        _step.forget(self.model)


def refuse(callbacks: Any) -> None:
    """Refuse an `Accumulate` among the callbacks of `train`, which accumulates by itself."""
    for callback in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks)):
        if isinstance(callback, Accumulate):
            raise ValueError(
                "`Accumulate` is for `model.fit`. `accumloop.train` cuts batches by itself: leave "
                f"out the callback. Received: accum and Accumulate({callback.accum})"
            )
