"""The command: `python -m benchmarks`."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from benchmarks.measure import MEASURES
from benchmarks.rounds import Run, Summary, cases_of, run_rounds, summaries_of
from benchmarks.systems import SYSTEMS
from benchmarks.table import table_of
from benchmarks.workloads import WORKLOADS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmarks and print their table.

    Args:
        arguments: The command's arguments; those of the process by default.
    """
    options = _parse(arguments)
    conditions = _conditions()
    print(*(f"{name}: {value}" for name, value in conditions.items()), sep=", ", flush=True)

    cases = cases_of(options.measures, options.workloads, options.systems, options.accum)
    runs = []
    for run in run_rounds(cases, options.repeats):
        runs.append(run)
        print(_progress(run, len(runs), len(cases) * options.repeats), file=sys.stderr, flush=True)

    summaries = summaries_of(runs)
    print(f"\nMedians of {options.repeats}, ratios within a round: median (least-most)\n")
    print(table_of(summaries))
    if options.json is not None:
        document = _document(conditions, runs, summaries)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, or exit as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="CPU seconds and memory of training, next to model.fit and a bare loop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, known in (("workloads", WORKLOADS), ("systems", SYSTEMS), ("measures", MEASURES)):
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=known,
            default=list(known),
            metavar="NAME",
            help=f"which of {', '.join(known)}",
        )
    parser.add_argument(
        "--accum", nargs="+", type=int, default=[1, 8], metavar="K", help="micro-batches of a batch"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds")
    parser.add_argument(
        "--json",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="write every number into this file",
    )
    options = parser.parse_args(arguments, argparse.Namespace(json=None))
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1. Received: {options.repeats}")
    for workload in options.workloads:
        rows = WORKLOADS[workload].batch_size
        for accum in options.accum:
            if accum < 1 or rows % accum:
                parser.error(
                    f"--accum must divide the {rows} rows of a batch of {workload}. "
                    f"Received: {accum}"
                )
    return options


def _conditions() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
    }


def _progress(run: Run, done: int, total: int) -> str:
    measure, workload, system, accum = run.case
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in run.numbers.items())
    return f"{done}/{total} {workload} {system} accum={accum} {measure}: {numbers}"


def _document(
    conditions: dict[str, Any], runs: list[Run], summaries: list[Summary]
) -> dict[str, Any]:
    return {
        "conditions": conditions,
        "summaries": [
            {
                **summary.case._asdict(),
                "medians": summary.medians,
                "ratios": {system: ratio._asdict() for system, ratio in summary.ratios.items()},
            }
            for summary in summaries
        ],
        "runs": [{"round": run.round, **run.case._asdict(), **run.numbers} for run in runs],
    }


if __name__ == "__main__":
    main()
