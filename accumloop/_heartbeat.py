"""A word at the end of the progress bar while an update takes long: it does not look hung."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

import keras

_PATIENCE = 2.0  # seconds
_INTERVAL = 1.0
_MOST_IDLE = 60  # intervals without a batch


class Heartbeat:
    """Says how long the running batch has taken so far, if it takes longer than two seconds.

    Used around each batch, in a `with` block, and closed at the end. The word is written over
    once a second by a thread, and taken away before the bar is drawn again. Without a bar, that
    is with `verbose` other than 1, it is silent and has no thread.

    Args:
        callbacks: The callbacks of the run.
    """

    def __init__(self, callbacks: list[keras.callbacks.Callback]) -> None:
        self._speaks = keras.config.is_interactive_logging_enabled() and any(
            isinstance(callback, keras.callbacks.ProgbarLogger) and callback.verbose == 1
            for callback in callbacks
        )
        self._lock = threading.Lock()
        self._began: float | None = None
        self._word = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if not self._speaks:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._began = time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._speaks:
            with self._lock:
                self._began = None
                self._write("")

    def wait_for(self, logs: dict[str, Any]) -> None:
        """Wait for the values of a batch, as the bar would: devices may be behind."""
        if self._speaks:
            for value in keras.tree.flatten(logs):
                keras.ops.convert_to_numpy(value)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, now: float) -> None:
        """Say how long the batch has taken by `now`, a reading of the monotonic clock."""
        with self._lock:
            if self._began is not None and now - self._began > _PATIENCE:
                self._write(f" - this batch: {now - self._began:.0f}s")

    def _run(self) -> None:
        idle = 0
        # A `fit` that dies closes nothing.
        while idle < _MOST_IDLE and not self._closed.wait(_INTERVAL):
            idle = idle + 1 if self._began is None else 0
            self.beat(time.monotonic())

    def _write(self, word: str) -> None:
        width = len(self._word)
        if width or word:
            back = "\b" * width
            sys.stdout.write(f"{back}{' ' * width}{back}{word}")
            sys.stdout.flush()
        self._word = word
