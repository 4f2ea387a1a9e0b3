"""Results for people: tables, and docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tf_smb.bench.machine import machine_facts
from tf_smb.bench.result import NOISY, Result, iqr, is_noisy, median
from tf_smb.bench.running import describe
from tf_smb.bench.workload import Column, Ratio, Workload

_UNITS = {"ms": "ms", "us": "µs", "mb_s": "MB/s"}
_AXES = {"params_mb": "MB", "workers": "workers", "dtype": "dtype"}

HOW = f"""\
How it is measured, whatever it is:

- 1 MB is 10^6 bytes. Everything that is compared takes its place in short blocks, in turn, in one
  run; again and again. All workers begin an iteration together, and its time is the slowest
  worker's. Numbers are medians over the blocks, ± half the interquartile range. Ratios are taken
  block by block: what the machine does meanwhile cancels out.
- **noisy**: the interquartile range is more than {NOISY:.0%} of the median.
- With as many cores as workers each worker is pinned to one; else they share them all."""


@dataclass(frozen=True)
class Section:
    """The results of one command.

    Attributes:
        workload: What was measured.
        command: How to measure it again.
        results: A line each.
    """

    workload: Workload
    command: str
    results: Sequence[Result]


def format_table(workload: Workload, results: Sequence[Result]) -> str:
    """Returns the results in columns."""
    rows = _rows(workload, results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([*lines, *_not_measured(results)])


def format_markdown(sections: Sequence[Section], command: str) -> str:
    """Returns the text of docs/benchmarks.md."""
    facts = "\n".join(f"- {fact}" for fact in machine_facts())
    parts = [
        "# Benchmarks",
        f"Written by:\n\n```sh\n{command}\n```",
        f"The machine:\n\n{facts}",
        HOW,
    ]
    told: set[str] = set()
    for section in sections:
        if section.workload.name not in told:
            parts.append(f"## {section.workload.name}")
        parts += _section_parts(section, with_method=section.workload.name not in told)
        told.add(section.workload.name)
    return "\n\n".join(parts) + "\n"


def _section_parts(section: Section, with_method: bool) -> list[str]:
    rows = _rows(section.workload, section.results)
    table = ["| " + " | ".join(row) + " |" for row in rows]
    table.insert(1, "|" + "---:|" * len(rows[0]))
    parts = [section.workload.method] if with_method else []
    parts += [f"```sh\n{section.command}\n```", "\n".join(table)]
    missing = _not_measured(section.results)
    return parts + (["\n".join([f"{missing[0]}\n", *missing[1:]])] if missing else [])


def _not_measured(results: Sequence[Result]) -> list[str]:
    """Returns lines, one for each reason."""
    whats: dict[str, list[str]] = {}
    for result in results:
        for key, reason in result.reasons.items():
            whats.setdefault(reason, []).append(f"{key} ({describe(result)})")
    lines = [f"- {', '.join(what)}: {reason}" for reason, what in whats.items()]
    return ["Not measured:", *lines] if lines else []


def _rows(workload: Workload, results: Sequence[Result]) -> list[list[str]]:
    columns = [
        column
        for column in workload.columns
        if column.title and any(result.values(column.key) for result in results)
    ]
    ratios = [
        ratio for ratio in workload.ratios if any(result.ratio_values(ratio) for result in results)
    ]
    axes = [axis for axis in _AXES if axis in workload.axes]
    rows = [
        [
            *(_AXES[axis] for axis in axes),
            *(f"{column.title} {_UNITS[column.unit]}" for column in columns),
            *map(_ratio_title, ratios),
        ]
    ]
    for result in results:
        rows.append([*_axis_cells(result, axes), *_cells(result, columns, ratios)])
    return rows


def _ratio_title(ratio: Ratio) -> str:
    goal = ratio.describe_goal()
    return f"{ratio.title} ({goal})" if goal else ratio.title


def _axis_cells(result: Result, axes: Sequence[str]) -> list[str]:
    values = [getattr(result.case, axis) for axis in axes]
    return [value if isinstance(value, str) else f"{value:g}" for value in values]


def _cells(result: Result, columns: Sequence[Column], ratios: Sequence[Ratio]) -> Iterator[str]:
    for column in columns:
        yield _cell(result, column)
    for ratio in ratios:
        quotients = result.ratio_values(ratio)
        missed = bool(quotients) and not ratio.is_met_by(median(quotients) or 0.0)
        yield _number(quotients) + (", missed" if missed else "")


def _cell(result: Result, column: Column) -> str:
    value, beside = median(result.values(column.key)), median(result.values(column.beside))
    if value is None or not beside:
        return _number(result.values(column.key))
    return f"{value:.4g} ({value / beside:.2f}x)"


def _number(values: Sequence[float]) -> str:
    middle, spread = median(values), iqr(values)
    if middle is None or spread is None:
        return "-"
    return f"{middle:.3g} ± {spread / 2:.1g}" + (", noisy" if is_noisy(values) else "")
