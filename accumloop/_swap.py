"""Another function in the place of `model.train_function`, for as long as its `fit` lives.

A callback is not told that a `fit` has died: an exception passes all its hooks. But whatever
trains calls `model.make_train_function()` first, and then the function with its data. Both are
stood in for, and both look at who calls: a `fit` has its callbacks among its local variables. So
what callbacks train in the middle of the `fit` is done by the function of Keras, and what comes
after a `fit` that has died puts back what was there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

_NAME = "make_train_function"


class Swap:
    """`run` in the place of `model.train_function`.

    Args:
        model: The model that is being fitted.
        callback: The callback that swaps, which tells its `fit` from others.
        run: Takes an iterator, trains on its next batches and returns logs.
        forget: Is called when all functions of the model are to be made anew.
    """

    def __init__(
        self,
        model: keras.Model,
        callback: keras.callbacks.Callback,
        run: Callable[[Any], Any],
        forget: Callable[[], None],
    ) -> None:
        self._model = model
        self._callback = callback
        self._run = run
        self._forget = forget
        self._before = model.train_function
        self._make_before = vars(model).get(_NAME)
        self._plain = self._before.plain if isinstance(self._before, Swap) else self._before
        self._install()

    @property
    def plain(self) -> Any:
        """The function of Keras that it stands in for, or None if that is still to be made."""
        return self._plain

    @property
    def lives(self) -> bool:
        """Whether its `fit` is running, or the function that is running is called by it."""
        return any(_has(frame, self._callback) for frame in _frames())

    def _install(self) -> None:
        self._model.train_function = self
        # Past the tracking of attributes, so that no saved file has it.
        vars(self._model)[_NAME] = self._make

    def put_back(self) -> None:
        """Put back what was there, unless a recompilation has done so."""
        own = vars(self._model)
        if swap_of(self._model) is self:
            del own[_NAME]
            if self._make_before is not None:
                own[_NAME] = self._make_before
        if self._model.train_function is self:
            of_another = isinstance(self._before, Swap)
            self._model.train_function = self._before if of_another else self._plain

    def __call__(self, iterator: Any) -> Any:
        if not _has(sys._getframe(1), self._callback):
            return self._keras_function()(iterator)
        try:
            return self._run(iterator)
        except StopIteration:  # The end of the data, and not of the `fit`.
            raise
        except BaseException:
            self.put_back()
            raise

    def _make(self, force: bool = False) -> Any:
        recompiled = self._model.train_function is not self
        if not self.lives:
            self.put_back()
            return self._model.make_train_function(force)
        if force or recompiled:
            self._plain = None
            self._forget()
            self._keras_function()
            self._install()
        return self

    def _keras_function(self) -> Any:
        model = self._model
        if self._plain is None:
            swapped = model.train_function
            type(model).make_train_function(model, force=True)
            self._plain = model.train_function
            model.train_function = swapped
        return self._plain


def swap_of(model: keras.Model) -> Swap | None:
    """Return the swap that stands in for the functions of a model, or None."""
    swap = getattr(vars(model).get(_NAME), "__self__", None)
    return swap if isinstance(swap, Swap) else None


def put_back(model: keras.Model) -> None:
    """Put back the functions of Keras, if a `fit` that has died left a swap."""
    while (swap := swap_of(model)) is not None and not swap.lives:
        swap.put_back()


def callbacks_beside(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Return all callbacks of the running `fit` that `callback` belongs to."""
    for frame in _frames():
        for value in _callback_lists(frame):
            if callback in value.callbacks:
                return list(value.callbacks)
    return [callback]


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _callback_lists(frame: Any) -> list[keras.callbacks.CallbackList]:
    values = list(frame.f_locals.values())
    return [value for value in values if isinstance(value, keras.callbacks.CallbackList)]


def _has(frame: Any, callback: keras.callbacks.Callback) -> bool:
    return any(callback in value.callbacks for value in _callback_lists(frame))
