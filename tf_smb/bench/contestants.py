"""Who is measured: contestants take turns and return samples of what they measured."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_smb.bench.case import Case, Turn
from tf_smb.bench.groups import Group, GroupError, start_workers

_segment_numbers = itertools.count()

# Numbers by name, one of each block or turn, in the unit of their column.
Samples = dict[str, list[float]]


class WrongResultError(Exception):
    """The box computed something else than numpy."""


class Contestant:
    """Takes turns.

    Attributes:
        key: Name of its main result, for example "exchange".
        required: Whether there is no result without it; others may fail for a reason.
        float32_only: Whether it is measured for models of float32 only.
        arrays_per_worker: How many times the model each worker holds at most.
        arrays_shared: How many times the model there is beside that.
    """

    key = ""
    required = False
    float32_only = False
    arrays_per_worker = 1.0
    arrays_shared = 0.0

    def memory_mb(self, case: Case) -> float:
        """Returns how much memory a turn needs."""
        return case.params_mb * (self.arrays_per_worker * case.workers + self.arrays_shared)

    def take(self, case: Case, check: bool) -> Samples:
        """Returns what it measured.

        Raises:
            GroupError: It cannot be measured.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends its processes."""


def hand_out_cores(workers: int) -> list[list[int]]:
    """Returns one core for each worker, or none at all when there are not enough."""
    cores = sorted(os.sched_getaffinity(0))
    return [[core] for core in cores[:workers]] if len(cores) >= workers else [[]] * workers


def is_pinned(workers: int) -> bool:
    """Returns whether so many workers have a core each."""
    return bool(hand_out_cores(workers)[0])


def check_conserved(
    before: Sequence[dict[str, list[float]]],
    after: Sequence[dict[str, list[float]]],
    tolerance: float,
) -> None:
    """Compares the sums of all weights and the center, of `segments.snapshot` on all workers.

    Raises:
        WrongResultError: An exchange lost something, or made something up.
    """
    first, last = (
        np.sum([one["local"] for one in shown], axis=0) + np.array(shown[0]["center"])
        for shown in (before, after)
    )
    if not np.allclose(first, last, rtol=tolerance):
        raise WrongResultError(
            f"exchanges of {len(before)} workers at once do not conserve the sum: it moved by "
            f"{np.abs(last - first).max():.3g}"
        )


class WorkerGroups:
    """The groups of workers of this package, started when first needed.

    Args:
        server: Address of the box.
        job_id: Of the segments.
    """

    def __init__(self, server: str, job_id: str) -> None:
        self._server = server
        self._job_id = job_id
        self._groups: dict[tuple[str, int], Group] = {}

    def take(self, role: str, turn: Turn) -> list[dict[str, Any]]:
        """Has the group of `role` take a turn; after a failure the next one starts anew.

        Raises:
            GroupError: A worker failed.
            WrongResultError: A worker's result is not numpy's.
        """
        workers = turn.case.workers
        key = (role, workers)
        if key not in self._groups:
            cores = hand_out_cores(workers)
            self._groups[key] = start_workers(role, workers, cores, self._server, self._job_id)
        try:
            replies = self._groups[key].take(turn, turn.case.timeout_s)
        except GroupError:
            self._groups.pop(key).close()
            raise
        failed = [reply["check_failed"] for reply in replies if "check_failed" in reply]
        if failed:
            self._groups.pop(key).close()
            raise WrongResultError(failed[0])
        return replies

    def close(self) -> None:
        """Ends all groups."""
        while self._groups:
            self._groups.popitem()[1].close()


class WorkerContestant(Contestant):
    """One that runs in workers of this package.

    Attributes:
        role: A key of `worker.ROLES`.
        units_per_s: What its seconds are multiplied by: 1e3 for milliseconds.
    """

    role = ""
    what = ""
    units_per_s = 1e3

    def __init__(self, groups: WorkerGroups) -> None:
        self._groups = groups

    def take(self, case: Case, check: bool) -> Samples:
        """Makes one turn and checks what the workers report."""
        name = f"bench/{next(_segment_numbers)}"
        replies = self._groups.take(self.role, Turn(case, self.what, name, check))
        self.check(case, replies)
        return self.samples(case, replies)

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """Looks at what only all replies together tell.

        Raises:
            WrongResultError: They cannot be right.
        """

    def samples(self, case: Case, replies: Sequence[dict[str, Any]]) -> Samples:
        """Returns the median of each block, whose iterations are as slow as their slowest worker.

        A reply has "times": see `measuring.Times`.
        """
        times = [reply["times"] for reply in replies]
        return {
            name: [
                self.units_per_s * statistics.median(map(max, zip(*block, strict=True)))
                for block in zip(*(one[name] for one in times), strict=True)
            ]
            for name in times[0]
        }
