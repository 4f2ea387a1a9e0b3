"""`tf-smb bench exchange`: all contestants in turn, round after round, on one machine."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tf_smb.bench.contestants import Case, Contestant, WorkerGroups, make_contestants
from tf_smb.bench.groups import GroupError
from tf_smb.box import Server, new_job_id

# Main results, in the order of the table; a contestant may have more.
RESULTS = (
    "exchange",
    "op_exchange",
    "limit",
    "mpi_get_accumulate",
    "mpi_get_accumulate_shared",
    "mpi_get_accumulate_default",
    "mpi_allreduce",
    "mpi_allreduce_default",
    "tf_allreduce",
)
PARTS = ("op_and_apply", "op_update_after", "op_update")
# Of the available memory, what a turn may use.
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        params_mb: Model sizes in MB (10^6 bytes of float32).
        workers: Numbers of workers.
        rule: "elastic" or "delta".
        peers: Of "limit", "op", "mpi" and "tf".
        rounds: How often each contestant takes its turn.
    """

    params_mb: Sequence[float]
    workers: Sequence[int]
    rule: str
    peers: frozenset[str]
    rounds: int


@dataclass
class Result:
    """One line: a model size and a number of workers.

    Attributes:
        case: What was measured.
        pinned: Whether each worker had a core to itself.
        samples: Milliseconds by name, one for each iteration.
        reasons: Why a name has none.
    """

    case: Case
    pinned: bool
    samples: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        """Returns the median in milliseconds, None if it was not measured."""
        values = self.samples.get(name)
        return statistics.median(values) if values else None

    def iqr(self, name: str) -> float | None:
        """Returns the interquartile range in milliseconds; 0 for a single value."""
        values = self.samples.get(name)
        if not values:
            return None
        if len(values) == 1:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return high - low

    def to_json(self) -> dict[str, Any]:
        """Returns the object of `--json`."""
        line: dict[str, Any] = {
            "transport": "shm",
            "rule": self.case.rule,
            "params_mb": self.case.params_mb,
            "workers": self.case.workers,
            "pinned": self.pinned,
        }
        for name in (*RESULTS, *PARTS):
            line[f"{name}_ms"] = _rounded(self.median(name))
            line[f"{name}_iqr_ms"] = _rounded(self.iqr(name))
            line[f"{name}_samples"] = len(self.samples.get(name, ()))
        return line


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def say(text: str) -> None:
    """Prints a line for people, beside the results."""
    print(f"tf-smb bench: {text}", file=sys.stderr, flush=True)


def run(options: Options) -> Iterator[Result]:
    """Yields a result for each number of workers and each size, as they are done.

    Every process that this starts ends with it, whatever ends it.

    Raises:
        WrongResultError: An exchange computed something else than numpy.
        GroupError: Our own exchange cannot be measured here.
    """
    with Server() as server:
        for workers in options.workers:
            yield from _run_workers(options, workers, server.address)


def _run_workers(options: Options, workers: int, server: str) -> Iterator[Result]:
    cores = _hand_out_cores(workers)
    pinned = bool(cores[0])
    groups = WorkerGroups(workers, cores, server, new_job_id())
    contestants = make_contestants(groups, options.peers, workers, pinned, say)
    try:
        for params_mb in options.params_mb:
            case = Case(params_mb, workers, options.rule)
            yield _run_case(case, pinned, contestants, options.rounds)
    finally:
        for contestant in contestants:
            contestant.close()
        groups.close()


def _hand_out_cores(workers: int) -> list[list[int]]:
    """Returns one core for each worker, or none at all when there are not enough."""
    cores = sorted(os.sched_getaffinity(0))
    return [[core] for core in cores[:workers]] if len(cores) >= workers else [[]] * workers


def _run_case(case: Case, pinned: bool, contestants: Sequence[Contestant], rounds: int) -> Result:
    say(f"{case.params_mb:g} MB, {case.workers} workers, {rounds} rounds")
    result = Result(case, pinned)
    for number in range(rounds):
        for contestant in contestants:
            if contestant.key not in result.reasons:
                _take_turn(contestant, result, check=number == 0)
    return result


def _take_turn(contestant: Contestant, result: Result, check: bool) -> None:
    case = result.case
    needed, available = contestant.memory_mb(case), available_memory_mb() * _MEMORY_SHARE
    try:
        if needed > available:
            raise GroupError(f"needs about {needed:.0f} MB, {available:.0f} MB may be used")
        samples = contestant.take(case, check)
    except GroupError as error:
        if contestant.key == "exchange" and needed <= available:
            raise
        # What a peer measured before it failed does not count.
        result.reasons[contestant.key] = str(error)
        result.samples.pop(contestant.key, None)
        say(f"no {contestant.key}_ms: {error}")
        return
    for name, values in samples.items():
        result.samples.setdefault(name, []).extend(values)


def available_memory_mb() -> float:
    """Returns what processes here may still allocate, in MB: of the machine and the cgroup."""
    limits = [_meminfo_mb("MemAvailable"), _cgroup_mb(Path("/sys/fs/cgroup"))]
    return min(limit for limit in limits if limit is not None)


def _meminfo_mb(key: str) -> float | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024 / 1e6
    return None


def _cgroup_mb(folder: Path) -> float | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else (int(limit) - used) / 1e6
