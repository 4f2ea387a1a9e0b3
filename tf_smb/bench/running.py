"""Runs a workload: whoever is compared takes turns, round after round, on one machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from tf_smb.bench import model
from tf_smb.bench.case import Case
from tf_smb.bench.contestants import Contestant, WorkerGroups, is_pinned
from tf_smb.bench.groups import GroupError
from tf_smb.bench.result import Result
from tf_smb.bench.workload import Options, Workload, say
from tf_smb.box import Server, new_job_id

# Of the available memory, what a turn may use.
_MEMORY_SHARE = 0.8
# What a worker process needs without any model.
_WORKER_MB = 60.0


class LeftOutError(Exception):
    """A turn that would not work here; the text says why."""


def run(workload: Workload, options: Options) -> Iterator[Result]:
    """Yields results as they are done.

    Every process that this starts ends with it, whatever ends it.

    Raises:
        WrongResultError: The box computed something else than numpy.
        GroupError: What the workload is about cannot be measured here.
    """
    with Server() as server:
        for _, batches in itertools.groupby(workload.batches(options), key=_worker_counts):
            with ExitStack() as stack:
                groups = WorkerGroups(server.address, new_job_id())
                stack.callback(groups.close)
                contestants = workload.contestants(groups, options)
                for contestant in contestants:
                    stack.callback(contestant.close)
                for batch in batches:
                    yield from _run_batch(workload, batch, contestants, options.repeats)


def _worker_counts(batch: Sequence[Case]) -> list[int]:
    return [case.workers for case in batch]


def _run_batch(
    workload: Workload, batch: Sequence[Case], contestants: Sequence[Contestant], rounds: int
) -> list[Result]:
    results = [Result(workload, case, is_pinned(case.workers)) for case in batch]
    say(f"{workload.name}: {', '.join(map(describe, results))}; {rounds} rounds")
    for number in range(rounds):
        for result in results:
            for contestant in contestants:
                if contestant.key not in result.reasons:
                    _take_turn(contestant, result, check=number == 0)
    for result in results:
        workload.derive(result.samples)
    workload.relate([(result.case, result.samples) for result in results])
    return results


def describe(result: Result) -> str:
    """Returns what tells a case from others, for people."""
    case, axes = result.case, result.workload.axes
    parts = [f"{case.params_mb:g} MB"] if "params_mb" in axes else []
    parts += [case.dtype] if "dtype" in axes else []
    parts += [f"{case.workers} worker{'' if case.workers == 1 else 's'}"]
    return " ".join(parts)


def _take_turn(contestant: Contestant, result: Result, check: bool) -> None:
    try:
        _check_possible(contestant, result.case)
        samples = contestant.take(result.case, check)
    except (GroupError, LeftOutError) as error:
        if contestant.required and isinstance(error, GroupError):
            raise
        # What a peer measured before it failed does not count.
        result.reasons[contestant.key] = str(error)
        for name in result.measured_by.pop(contestant.key, ()):
            result.samples.pop(name, None)
        say(f"{describe(result)}: no {contestant.key}: {error}")
        return
    result.measured_by[contestant.key] = tuple(samples)
    for name, values in samples.items():
        result.samples.setdefault(name, []).extend(values)


def _check_possible(contestant: Contestant, case: Case) -> None:
    if contestant.float32_only and case.dtype != "float32":
        raise LeftOutError("measured for float32 only")
    try:
        model.numpy_dtype(case.dtype)
    except ImportError as error:
        raise LeftOutError(f"{case.dtype} needs a package that is not here: {error}") from None
    needed = contestant.memory_mb(case) + _WORKER_MB * case.workers
    available = available_memory_mb() * _MEMORY_SHARE
    if needed > available:
        raise LeftOutError(f"needs about {needed:.0f} MB, {available:.0f} MB may be used")


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
