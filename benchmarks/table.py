"""The plain-text table."""

from collections.abc import Sequence
from itertools import groupby

from benchmarks.measure import MEASURES
from benchmarks.rounds import Ratio, Summary

_BASELINES = ("fit", "bare")


def table_of(summaries: Sequence[Summary]) -> str:
    """Return a block for each measure and workload, with a line for each system and `accum`."""
    blocks = groupby(summaries, key=lambda summary: summary.case[:2])
    return "\n\n".join(_block(list(block)) for _, block in blocks)


def _block(summaries: list[Summary]) -> str:
    case, medians, _ = summaries[0]
    header = [
        "system",
        "accum",
        *medians,
        *(f"{MEASURES[case.measure].compared}/{b}" for b in _BASELINES),
    ]
    lines = [header, *(_line(summary) for summary in summaries)]
    return "\n".join([f"{case.workload}: {MEASURES[case.measure].title}", *_aligned(lines)])


def _line(summary: Summary) -> list[str]:
    return [
        summary.case.system,
        str(summary.case.accum),
        *(f"{value:.4g}" for value in summary.medians.values()),
        *(_cell(summary.ratios.get(baseline)) for baseline in _BASELINES),
    ]


def _cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})"


def _aligned(lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
