"""What was measured: medians, spreads, ratios; and its line of JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tf_smb.bench.case import Case
from tf_smb.bench.contestants import Samples
from tf_smb.bench.workload import Column, Ratio, Workload

# A spread (interquartile range) above this part of the median is said to be noisy.
NOISY = 0.15

JSON_HELP = """\
JSON: one object a line, with workload, transport, pinned (whether each worker had a core to
itself), what tells the cases apart ({axes}), and
{keys}
For each of these that is a time or a rate, also NAME_iqr_UNIT (interquartile range) and
NAME_samples (how many numbers the median is of); for each ratio, NAME_iqr. null: not measured.
noisy: names whose interquartile range is above {noisy:.0%} of the median. left_out: why there is
nothing, by name."""


def median(values: Sequence[float]) -> float | None:
    """Returns the median; None of nothing."""
    return statistics.median(values) if values else None


def iqr(values: Sequence[float]) -> float | None:
    """Returns the interquartile range; 0 for a single value, None of nothing."""
    if not values:
        return None
    if len(values) == 1:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def is_noisy(values: Sequence[float]) -> bool:
    """Returns whether the values spread too much to believe their median."""
    middle, spread = median(values), iqr(values)
    return middle is not None and spread is not None and spread > NOISY * abs(middle)


@dataclass
class Result:
    """One line.

    Attributes:
        workload: Whose.
        case: What was measured.
        pinned: Whether each worker had a core to itself.
        samples: Numbers by column, one of each block.
        reasons: Why a column has none.
        measured_by: The columns that each contestant has numbers in.
    """

    workload: Workload
    case: Case
    pinned: bool
    samples: Samples = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    measured_by: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def values(self, key: str) -> list[float]:
        """Returns the numbers of a column."""
        return self.samples.get(key, [])

    def ratio_values(self, ratio: Ratio) -> list[float]:
        """Returns the quotients of two columns that were measured in the same blocks."""
        over, under = self.values(ratio.over), self.values(ratio.under)
        return [a / b for a, b in zip(over, under, strict=True)] if over and under else []

    def noisy(self) -> list[str]:
        """Returns the names of columns and ratios that spread too much."""
        names = [column.key for column in self.columns() if is_noisy(self.values(column.key))]
        return names + [
            ratio.key for ratio in self.workload.ratios if is_noisy(self.ratio_values(ratio))
        ]

    def columns(self) -> tuple[Column, ...]:
        """Returns the workload's."""
        return self.workload.columns

    def to_json(self) -> dict[str, Any]:
        """Returns the object of `--json`."""
        line: dict[str, Any] = {
            "workload": self.workload.name,
            "transport": "shm",
            "pinned": self.pinned,
            **{axis: getattr(self.case, axis) for axis in self.workload.axes},
        }
        for column in self.columns():
            values = self.values(column.key)
            line[f"{column.key}_{column.unit}"] = _rounded(median(values))
            line[f"{column.key}_iqr_{column.unit}"] = _rounded(iqr(values))
            line[f"{column.key}_samples"] = len(values)
        for ratio in self.workload.ratios:
            quotients = self.ratio_values(ratio)
            line[ratio.key] = _rounded(median(quotients))
            line[f"{ratio.key}_iqr"] = _rounded(iqr(quotients))
        line["noisy"] = self.noisy()
        line["left_out"] = self.reasons
        return line


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def json_help(workload: Workload) -> str:
    """Returns the keys of a workload's JSON in words."""
    keys = [f"{column.key}_{column.unit}" for column in workload.columns]
    keys += [ratio.key for ratio in workload.ratios]
    return JSON_HELP.format(
        axes=", ".join(workload.axes), keys="\n".join(f"  {key}" for key in keys), noisy=NOISY
    )
