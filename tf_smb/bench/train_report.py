"""Results of `tf-smb bench train` for people: a table, the grid, a plot."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_smb.bench.rule_specs import PLAIN
from tf_smb.bench.train_runs import Run
from tf_smb.errors import FailedPreconditionError, InvalidArgumentError

# Of Student's distribution, for a two-sided 95% interval, by degrees of freedom from 1.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Group:
    """The runs that differ by seed only.

    Attributes:
        workers: How many.
        rule: As on the command line.
        skewed: Whether each worker saw only its share of the labels.
        runs: Those with the chosen learning rate.
        grid: Those of seed 0.
    """

    workers: int
    rule: str
    skewed: bool
    runs: Sequence[Run]
    grid: Sequence[Run]

    @property
    def label(self) -> str:
        """The rule, and what is special about the data."""
        return f"{self.rule}, skewed" if self.skewed else self.rule

    @property
    def mean(self) -> float:
        """Of the accuracies, in percent."""
        return 100 * statistics.fmean(run.center_accuracy for run in self.runs)

    @property
    def interval(self) -> float | None:
        """Half the 95% interval of the mean, in points; None of a single run."""
        count = len(self.runs)
        if count < 2:
            return None
        t = _T_95[count - 2] if count - 2 < len(_T_95) else _NORMAL_95
        spread = statistics.stdev(run.center_accuracy for run in self.runs)
        return 100 * t * spread / math.sqrt(count)

    @property
    def diverged(self) -> bool:
        """Whether any of them did."""
        return any(run.diverged for run in self.runs)


def groups(runs: Sequence[Run]) -> list[Group]:
    """Returns the runs by workers, rule and data, in the order of their first."""
    found: dict[tuple[int, str, bool], list[Run]] = {}
    for run in runs:
        found.setdefault((run.workers, run.rule, run.skewed), []).append(run)
    return [
        Group(*key, [r for r in of_key if r.chosen], [r for r in of_key if r.seed == 0])
        for key, of_key in found.items()
    ]


def line(run: Run) -> str:
    """Returns what is said of a run when it is over."""
    accuracy = "diverged" if run.diverged else f"{100 * run.center_accuracy:.2f} %"
    return (
        f"{run.workers} x {run.rule}{' skewed' if run.skewed else ''}, learning rate "
        f"{run.learning_rate:g}, seed {run.seed}: {accuracy} ({run.mode}, {run.seconds:.0f} s)"
    )


def format_runs(runs: Sequence[Run]) -> str:
    """Returns the table, and the grid that the learning rates are from."""
    parts = [_align(_table(groups(runs)))]
    if any(len(group.grid) > 1 for group in groups(runs)):
        parts += [
            "Held-out accuracy of seed 0 in percent, by learning rate (* best):",
            _align(_grid_table(groups(runs))),
        ]
    return "\n".join(parts)


def _table(found: Sequence[Group]) -> list[list[str]]:
    baseline = next((group.mean for group in found if group.rule == PLAIN), None)
    rows = [
        [
            "workers",
            "rule",
            "mode",
            "rate",
            "accuracy %",
            "- plain",
            "seeds",
            "s",
            "s waiting",
            "MB",
        ]
    ]
    return rows + [_row(group, baseline) for group in found]


def _row(group: Group, baseline: float | None) -> list[str]:
    first = group.runs[0]
    interval = "" if group.interval is None else f" ± {group.interval:.2f}"
    difference = "" if baseline is None or group.diverged else f"{group.mean - baseline:+.2f}"
    return [
        str(group.workers),
        group.label,
        first.mode,
        f"{first.learning_rate:g}",
        f"{group.mean:.2f}{interval}" + (", diverged" if group.diverged else ""),
        difference,
        str(len(group.runs)),
        f"{statistics.fmean(run.seconds for run in group.runs):.0f}",
        f"{statistics.fmean(run.seconds_waiting for run in group.runs):.2f}",
        f"{statistics.fmean(run.bytes_exchanged for run in group.runs) / 1e6:,.0f}",
    ]


def _grid_table(found: Sequence[Group]) -> list[list[str]]:
    rates = sorted({run.learning_rate for group in found for run in group.grid})
    rows = [["workers", "rule", *(f"{rate:g}" for rate in rates)]]
    for group in found:
        cells = {run.learning_rate: _grid_cell(run) for run in group.grid}
        rows.append([str(group.workers), group.label, *(cells.get(rate, "") for rate in rates)])
    return rows


def _grid_cell(run: Run) -> str:
    text = "diverged" if run.diverged else f"{100 * run.held_out_accuracy:.2f}"
    return f"{text}{'*' if run.chosen else ' '}"


def _align(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Returns the runs of files that `--json` wrote.

    Raises:
        InvalidArgumentError: Not such a file.
    """
    runs = []
    for path in paths:
        try:
            runs += [Run(**json.loads(text)) for text in path.read_text().splitlines()]
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgumentError(
                f"--from must be a file that tf-smb bench train --json wrote, got {str(path)!r}: "
                f"{error} [SMB-E480]"
            ) from None
    return runs


# --- Plot --------------------------------------------------------------------


def check_plot(path: Path) -> None:
    """Raises what would keep `plot` from writing there.

    Raises:
        FailedPreconditionError: There is no matplotlib.
        InvalidArgumentError: There is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise FailedPreconditionError("--plot needs matplotlib: pip install matplotlib [SMB-E481]")
    if not path.absolute().parent.is_dir():
        raise InvalidArgumentError(f"there is no folder for --plot {str(path)!r} [SMB-E482]")


def plot(runs: Sequence[Run], path: Path) -> None:
    """Draws accuracy against workers, a line for each rule, into a file."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "tf_smb"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    shown = [group for group in groups(runs) if group.runs and not group.diverged]
    _draw_baseline(axes, shown)
    labels = dict.fromkeys(group.label for group in shown if group.rule != PLAIN)
    for place, label in enumerate(labels):
        _draw_line(axes, [group for group in shown if group.label == label], label, place)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("workers")
    axes.set_ylabel("test accuracy of the center, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_baseline(axes: Any, shown: Sequence[Group]) -> None:
    for group in shown:
        if group.rule == PLAIN:
            interval = group.interval or 0.0
            axes.axhline(group.mean, color="black", label="one worker, plain Keras")
            axes.axhspan(group.mean - interval, group.mean + interval, color="black", alpha=0.1)


def _draw_line(axes: Any, line_groups: Sequence[Group], label: str, place: int) -> None:
    ordered = sorted(line_groups, key=lambda group: group.workers)
    axes.errorbar(
        # A little apart, so that intervals of one number of workers can be told from each other.
        [group.workers * 1.02**place for group in ordered],
        [group.mean for group in ordered],
        yerr=[group.interval or 0.0 for group in ordered],
        marker="o",
        capsize=3,
        label=label,
    )
