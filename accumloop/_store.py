"""Numbered backups in a directory, of which one that is torn is never taken.

```
backup_dir/partial-8/  is being written, or was when the process died
backup_dir/backup-7/   the newest, if its files are those of its manifest
backup_dir/backup-6/   the one before
```

A backup is written aside and then renamed. The manifest has the size and the checksum of each
file, for file systems that rename in steps or lose what was written last.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

_MANIFEST = "manifest.json"
_KEPT = 2


def write(directory: str, fill: Callable[[str], None]) -> None:
    """Add a backup, whose files `fill(path)` writes, and remove those before the last two."""
    numbers = _numbers(directory, "backup")
    for number in _numbers(directory, "partial"):
        tf.io.gfile.rmtree(_path(directory, "partial", number))
    number = max(numbers, default=0) + 1
    partial = _path(directory, "partial", number)
    tf.io.gfile.makedirs(partial)
    fill(partial)
    _write_text(tf.io.gfile.join(partial, _MANIFEST), json.dumps(_checksums(partial)))
    tf.io.gfile.rename(partial, _path(directory, "backup", number))
    for old in sorted(numbers, reverse=True)[_KEPT - 1 :]:
        tf.io.gfile.rmtree(_path(directory, "backup", old))


def newest(directory: str) -> str | None:
    """Return the path of the newest backup that is whole, or None if there is none.

    Raises:
        ValueError: If there are only damaged ones.
    """
    damaged: list[str] = []
    for number in sorted(_numbers(directory, "backup"), reverse=True):
        path = _path(directory, "backup", number)
        if _is_whole(path):
            if damaged:
                warnings.warn(
                    f"Backups are damaged: {damaged}. Going on from the one before: {path}",
                    stacklevel=2,
                )
            return path
        damaged.append(path)
    if damaged:
        raise ValueError(
            "All backups are damaged. To train from the beginning, remove the directory. "
            f"Received: backup_dir={directory!r} with {damaged}"
        )
    return None


def remove(directory: str) -> None:
    """Remove the backups of a directory, and the directory if nothing else is in it."""
    for kind in ("partial", "backup"):
        for number in _numbers(directory, kind):
            tf.io.gfile.rmtree(_path(directory, kind, number))
    if tf.io.gfile.isdir(directory) and not tf.io.gfile.listdir(directory):
        tf.io.gfile.rmtree(directory)


def read_json(path: str, name: str) -> Any:
    """Return what a JSON file of a backup holds."""
    with tf.io.gfile.GFile(tf.io.gfile.join(path, name), "r") as file:
        return json.loads(file.read())


def write_json(path: str, name: str, value: Any) -> None:
    """Write a JSON file of a backup."""
    _write_text(tf.io.gfile.join(path, name), json.dumps(value))


def _numbers(directory: str, kind: str) -> list[int]:
    names = tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []
    found = (re.fullmatch(rf"{kind}-(\d+)/?", name) for name in names)
    return [int(match[1]) for match in found if match]


def _path(directory: str, kind: str, number: int) -> str:
    return tf.io.gfile.join(directory, f"{kind}-{number}")


def _write_text(path: str, text: str) -> None:
    with tf.io.gfile.GFile(path, "w") as file:
        file.write(text)


def _is_whole(path: str) -> bool:
    try:
        return read_json(path, _MANIFEST) == _checksums(path)
    except (tf.errors.OpError, UnicodeDecodeError, json.JSONDecodeError):
        return False


def _checksums(path: str) -> dict[str, list[int]]:
    """Return the size and the CRC-32 of each file of a backup but the manifest."""
    sums = {}
    for name in sorted(tf.io.gfile.listdir(path)):
        if name == _MANIFEST:
            continue
        size = checksum = 0
        with tf.io.gfile.GFile(tf.io.gfile.join(path, name), "rb") as file:
            while block := file.read(1 << 20):
                size += len(block)
                checksum = zlib.crc32(block, checksum)
        sums[name] = [size, checksum]
    return sums
