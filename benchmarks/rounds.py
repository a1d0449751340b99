"""Runs, interleaved and each in a process of its own, and what their numbers come to."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.measure import MEASURES
from benchmarks.systems import SYSTEMS


class Case(NamedTuple):
    """What is repeated: one measure of one system on one workload."""

    measure: str
    workload: str
    system: str
    accum: int


class Run(NamedTuple):
    """The numbers of a case in one round, by name."""

    round: int
    case: Case
    numbers: dict[str, float]


class Ratio(NamedTuple):
    """The ratios to another case over the rounds."""

    median: float
    least: float
    most: float


class Summary(NamedTuple):
    """What the runs of a case come to.

    Attributes:
        case: The case.
        medians: The median over the rounds of each of its numbers, by name.
        ratios: The ratios of the number that is compared, by the system that it is compared
            with; without those systems that were not run.
    """

    case: Case
    medians: dict[str, float]
    ratios: dict[str, Ratio]


def cases_of(
    measures: Sequence[str], workloads: Sequence[str], systems: Sequence[str], accum: Sequence[int]
) -> list[Case]:
    """Return the cases of a round; those that are compared with each other are neighbours."""
    settings = [(system, 1) for system in systems if not SYSTEMS[system].cuts]
    settings += [(system, k) for k in accum for system in systems if SYSTEMS[system].cuts]
    return [
        Case(measure, workload, *setting)
        for measure in measures
        for workload in workloads
        for setting in settings
    ]


def run_rounds(cases: Sequence[Case], repeats: int) -> Iterator[Run]:
    """Yield the runs, round by round. A round runs every case once: A B C, A B C."""
    for number in range(1, repeats + 1):
        for case in cases:
            yield Run(number, case, _in_own_process(case))


def summaries_of(runs: Sequence[Run]) -> list[Summary]:
    """Return the summary of each case, in the order of their first runs."""
    return [_summary(runs, case) for case in dict.fromkeys(run.case for run in runs)]


def _in_own_process(case: Case) -> dict[str, float]:
    """Take the measure in a fresh process: no run sees the memory or the traces of another.

    Raises:
        RuntimeError: If the process fails, with what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.measure", *map(str, case)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{case} ended with {result.returncode}.\n{result.stderr}")
    return json.loads(result.stdout)


def _summary(runs: Sequence[Run], case: Case) -> Summary:
    own = _by_round(runs, case)
    names = next(iter(own.values()))
    medians = {name: statistics.median(numbers[name] for numbers in own.values()) for name in names}
    baselines = {"fit": case._replace(system="fit", accum=1), "bare": case._replace(system="bare")}
    ratios = {
        system: _ratio(own, _by_round(runs, baseline), MEASURES[case.measure].compared)
        for system, baseline in baselines.items()
        if any(run.case == baseline for run in runs)
    }
    return Summary(case, medians, ratios)


def _by_round(runs: Sequence[Run], case: Case) -> dict[int, dict[str, float]]:
    return {run.round: run.numbers for run in runs if run.case == case}


def _ratio(
    above: dict[int, dict[str, float]], below: dict[int, dict[str, float]], name: str
) -> Ratio:
    """Return the ratios within each round: what slows a whole round down falls out of them."""
    ratios = [above[number][name] / below[number][name] for number in above]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))
