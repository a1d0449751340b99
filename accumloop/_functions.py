"""Functions of a model's own (`tf.function`), which are to be seen when a step is traced.

What is withheld from a step is seen while Python runs. A `tf.function` that has been traced
before, by `fit` or `evaluate`, would run without it, and one that is traced now would keep what
stood in for the time of the step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_Function = type(tf.function(lambda: None))
_lock = threading.RLock()


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Let each `tf.function` that this thread calls be traced for this call alone.

    Eagerly, let it be run by Python, as the model around it is.
    """
    original = _Function.__call__
    owner = threading.get_ident()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        inner = getattr(function, "_accumloop_traced", False)
        if inner or threading.get_ident() != owner:
            return original(function, *args, **kwargs)
        if tf.executing_eagerly():
            return function.python_function(*args, **kwargs)
        jit_compile = getattr(function, "_jit_compile", None)  # TensorFlow has no public name.
        again = tf.function(function.python_function, jit_compile=jit_compile)
        again._accumloop_traced = True
        return again(*args, **kwargs)

    with _lock:
        _Function.__call__ = call
        try:
            yield
        finally:
            _Function.__call__ = original
