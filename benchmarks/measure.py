"""What one run costs: `python -m benchmarks.measure MEASURE WORKLOAD SYSTEM ACCUM`, as JSON.

A measure is taken in a process of its own, or it would depend on what ran before it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.systems import SYSTEMS, Training
from benchmarks.workloads import WORKLOADS


class Measure(NamedTuple):
    """One kind of cost.

    Attributes:
        title: What the numbers are, in words.
        take: Runs a system on a workload and returns its numbers, by name.
        compared: Name of the number that systems are compared by.
    """

    title: str
    take: Callable[[str, str, int], dict[str, float]]
    compared: str


def _cpu(workload: str, system: str, accum: int) -> dict[str, float]:
    """Return seconds of an epoch: CPU of the first and of a warm one, and the latter's wall time.

    The first epoch traces. Warm ones are a second call's, whose own cost is spread over them.
    """
    train = SYSTEMS[system].prepare(WORKLOADS[workload], accum)
    epochs = WORKLOADS[workload].epochs
    first, _ = _seconds_of(train, 1)
    warm, wall = _seconds_of(train, epochs)
    return {"first": first, "warm": warm / epochs, "wall": wall / epochs}


def _memory(workload: str, system: str, accum: int) -> dict[str, float]:
    """Return the most MB (1e6 bytes) in use while training, above those in use at rest.

    At rest, model, optimizer and data are in memory and nothing is traced.
    """
    train = SYSTEMS[system].prepare(WORKLOADS[workload], accum)
    gc.collect()
    rest = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Sets VmHWM back to what is in use now.
    train(2)
    return {"peak": (_status("VmHWM") - rest) / 1e6}


def _seconds_of(train: Training, epochs: int) -> tuple[float, float]:
    """Return the CPU seconds of all threads, user and system, and the seconds that passed."""
    cpu, wall = time.process_time(), time.perf_counter()
    train(epochs)
    return time.process_time() - cpu, time.perf_counter() - wall


def _status(key: str) -> int:
    """Return an entry of what Linux tells about this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    entries = dict(line.split(":", maxsplit=1) for line in lines)
    return int(entries[key].removesuffix("kB")) * 1024


MEASURES = {
    "cpu": Measure("CPU seconds of an epoch", _cpu, compared="warm"),
    "memory": Measure("MB above rest", _memory, compared="peak"),
}


if __name__ == "__main__":
    _measure, _workload, _system, _accum = sys.argv[1:]
    print(json.dumps(MEASURES[_measure].take(_workload, _system, int(_accum))))
