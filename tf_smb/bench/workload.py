"""What a workload of the benchmark is: its cases, who is measured, what is reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_smb.bench.case import Case
from tf_smb.bench.contestants import Contestant, Samples, WorkerGroups


def say(text: str) -> None:
    """Prints a line for people, beside the results."""
    print(f"tf-smb bench: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Column:
    """A number that is measured.

    Attributes:
        key: Its name in the samples.
        title: Over its column of the table; empty: in JSON only.
        unit: "ms", "us" or "mb_s".
        beside: Of the column whose multiple it is shown as, too.
    """

    key: str
    title: str
    unit: str = "ms"
    beside: str = ""


@dataclass(frozen=True)
class Ratio:
    """Two columns, block by block, whose medians are compared.

    Attributes:
        key: Its name in JSON.
        title: Over its column of the table.
        over: Key of the column that is divided.
        under: By which.
        at_most: The goal, if it is a highest value.
        at_least: The goal, if it is a lowest value.
    """

    key: str
    title: str
    over: str
    under: str
    at_most: float | None = None
    at_least: float | None = None

    def is_met_by(self, value: float) -> bool:
        """Returns whether the goal is reached, if there is one."""
        return (self.at_most is None or value <= self.at_most) and (
            self.at_least is None or value >= self.at_least
        )

    def describe_goal(self) -> str:
        """Returns the goal in words; empty if there is none."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"


@dataclass(frozen=True)
class Options:
    """What to measure; a workload looks at those that have a default in its `defaults`.

    Attributes:
        params_mb: Model sizes in MB (10^6 bytes).
        workers: Numbers of workers.
        dtypes: Of the workers' arrays.
        rule: "elastic" or "delta".
        threads: Of an operation; 0: one for each core of the worker.
        seconds: How long workers go on.
        peers: Of "limit", "op", "mpi" and "tf".
        repeats: How often each contestant takes its turn.
    """

    params_mb: Sequence[float] = (0.0,)
    workers: Sequence[int] = (2,)
    dtypes: Sequence[str] = ("float32",)
    rule: str = "elastic"
    threads: int = 0
    seconds: float = 0.0
    peers: frozenset[str] = frozenset()
    repeats: int = 5


class Workload:
    """One thing that the box does.

    Attributes:
        name: On the command line.
        summary: A line of the list of workloads.
        method: How it is measured, as Markdown.
        axes: The fields of `Case` that tell its lines from each other.
        defaults: Of those options that it takes.
        standard: Options for `tf-smb bench all`: one table each.
        columns: What is measured.
        ratios: What of it is compared.
    """

    name = ""
    summary = ""
    method = ""
    axes: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}
    standard: tuple[tuple[str, ...], ...] = ((),)
    columns: tuple[Column, ...] = ()
    ratios: tuple[Ratio, ...] = ()

    def batches(self, options: Options) -> Iterator[list[Case]]:
        """Yields cases; those of a batch are measured in turns."""
        for workers in options.workers:
            for dtype in options.dtypes:
                for params_mb in options.params_mb:
                    yield [self.case(options, workers, params_mb, dtype)]

    def case(self, options: Options, workers: int, params_mb: float, dtype: str) -> Case:
        """Returns one case."""
        return Case(
            workload=self.name,
            workers=workers,
            params_mb=params_mb,
            dtype=dtype,
            rule=options.rule,
            threads=options.threads,
            seconds=options.seconds,
        )

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns who is measured, in the order of a round."""
        raise NotImplementedError

    def derive(self, samples: Samples) -> None:
        """Adds columns that are computed from others."""

    def relate(self, batch: Sequence[tuple[Case, Samples]]) -> None:
        """Adds columns that come from other cases of a batch."""
