"""Attributes of an object that others stand in for, for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def shadowed(target: Any, **attributes: Any) -> Iterator[None]:
    """Let `attributes` stand in for those of `target`.

    In the instance's `__dict__`, past the tracking of Keras' attribute assignment.
    """
    own = vars(target)
    before = {name: own.get(name, _MISSING) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                del own[name]
            else:
                own[name] = value
