"""Another function in the place of `model.train_function`, that gives way when its `fit` is over.

A callback is not told that a `fit` has died: an exception passes all its hooks. But whatever
trains next calls `model.make_train_function()` first, and then the function with its data. So
both are stood in for, and the first call that cannot be of the living `fit` puts back what was
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_NAME = "make_train_function"


class Swap:
    """`run` in the place of `model.train_function`.

    Args:
        model: The model that is being fitted.
        run: Takes an iterator, trains on its next batches and returns logs.
        forget: Is called when all functions of the model are to be made anew.
    """

    def __init__(
        self,
        model: keras.Model,
        run: Callable[[Any], Any],
        forget: Callable[[], None],
    ) -> None:
        self._model = model
        self._run = run
        self._forget = forget
        self._plain = model.train_function
        self.doubted = False  # Whether something else than its `fit` may be about to train.
        self._install()

    def trains_on(self) -> None:
        """Note that the `fit` of this swap is alive, whatever its callbacks have trained."""
        self.doubted = False
        if self._plain is not None and self._model.train_function is self._plain:
            self._install()

    def _install(self) -> None:
        self._model.train_function = self
        # Past the tracking of attributes, so that no saved file has it.
        vars(self._model)[_NAME] = self._make

    def put_back(self) -> None:
        """Put back the functions of Keras, unless a recompilation has done so."""
        if swap_of(self._model) is self:
            del vars(self._model)[_NAME]
        if self._model.train_function is self:
            self._model.train_function = self._plain

    def __call__(self, iterator: Any) -> Any:
        if not isinstance(iterator, tf.data.Iterator):  # A callback calls `train_on_batch`.
            self.doubted = False
            return self._keras_function()(iterator)
        if self.doubted:  # Another `fit`, without this callback.
            self.put_back()
            return self._keras_function()(iterator)
        try:
            return self._run(iterator)
        except StopIteration:  # The end of the data, and not of the `fit`.
            raise
        except BaseException:
            self.put_back()
            raise

    def _make(self, force: bool = False) -> Any:
        if self._model.train_function is not self:
            self.put_back()
            return self._model.make_train_function(force)
        self.doubted = True
        if force:
            self._plain = None
            self._forget()
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
    swap = swap_of(model)
    if swap is not None:
        swap.put_back()
