"""The contestants of `tf-smb bench exchange`: each takes turns and returns milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tf_smb.bench.groups import Group, GroupError, start_workers
from tf_smb.bench.mpi import CONTESTS, MpiPeer
from tf_smb.bench.worker import Turn

MAX_ITERATIONS = 10
BUDGET_S = 2.0
_segment_numbers = itertools.count()

Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    params_mb: float
    workers: int
    rule: str

    @property
    def timeout_s(self) -> float:
        """For one turn: starting TensorFlow included, and a machine that does other things."""
        return 180.0 + 0.5 * self.params_mb * self.workers


class WrongResultError(Exception):
    """Our own exchange computed something else than numpy."""


class Contestant:
    """Takes turns.

    Attributes:
        key: Name of its main result, for example "exchange".
        arrays_per_worker: How many times the model each worker holds at most.
        arrays_shared: How many times the model there is beside that.
    """

    key = ""
    arrays_per_worker = 1.0
    arrays_shared = 0.0

    def memory_mb(self, case: Case) -> float:
        """Returns how much memory a turn needs."""
        return case.params_mb * (self.arrays_per_worker * case.workers + self.arrays_shared)

    def take(self, case: Case, check: bool) -> Samples:
        """Returns milliseconds by name, one for each iteration: the slowest worker's.

        Raises:
            GroupError: It cannot be measured.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends its processes."""


class WorkerGroups:
    """The groups of workers of this package, started when first needed.

    Args:
        count: Workers in each group.
        cores: Each worker's.
        server: Address of the box.
        job_id: Of the segments.
    """

    def __init__(
        self, count: int, cores: Sequence[Sequence[int]], server: str, job_id: str
    ) -> None:
        self._start = lambda role: start_workers(role, count, cores, server, job_id)
        self._groups: dict[str, Group] = {}

    def take(self, role: str, turn: Turn, timeout_s: float) -> list[dict[str, Any]]:
        """Has the group of `role` take a turn; after a failure the next one starts anew.

        Raises:
            GroupError: A worker failed.
            WrongResultError: A worker's result is not numpy's.
        """
        if role not in self._groups:
            self._groups[role] = self._start(role)
        try:
            replies = self._groups[role].take(turn, timeout_s)
        except GroupError:
            self._groups.pop(role).close()
            raise
        failed = [reply["check_failed"] for reply in replies if "check_failed" in reply]
        if failed:
            self._groups.pop(role).close()
            raise WrongResultError(failed[0])
        return replies

    def close(self) -> None:
        """Ends all groups."""
        while self._groups:
            self._groups.popitem()[1].close()


class WorkerContestant(Contestant):
    """One that runs in workers of this package."""

    role = ""
    what = ""

    def __init__(self, groups: WorkerGroups) -> None:
        self._groups = groups

    def take(self, case: Case, check: bool) -> Samples:
        """Makes one turn and checks what the workers report."""
        turn = Turn(
            what=self.what,
            params_mb=case.params_mb,
            rule=case.rule,
            name=f"bench/{next(_segment_numbers)}",
            max_iterations=MAX_ITERATIONS,
            budget_s=BUDGET_S,
            check=check,
        )
        replies = self._groups.take(self.role, turn, case.timeout_s)
        self._check(case, replies)
        return self._rename(_slowest([reply["times"] for reply in replies]))

    def _check(self, case: Case, replies: list[dict[str, Any]]) -> None:
        """Looks at what the workers report beside their times."""

    def _rename(self, samples: Samples) -> Samples:
        return {self.key: next(iter(samples.values()))}


def _slowest(times: list[dict[str, list[float]]]) -> Samples:
    """Returns milliseconds: of each iteration the slowest worker's."""
    return {
        name: [1e3 * max(values) for values in zip(*(one[name] for one in times), strict=True)]
        for name in times[0]
    }


class Native(WorkerContestant):
    """`Segment.exchange` on numpy arrays."""

    key, role, what = "exchange", "native", "exchange"
    arrays_per_worker, arrays_shared = 1.0, 5.0

    def _check(self, case: Case, replies: list[dict[str, Any]]) -> None:
        """Elastic moves conserve the sum of all weights and the center, element by element."""
        if case.rule != "elastic" or case.workers == 1 or "after" not in replies[0]:
            return
        before, after = (
            np.sum([reply[when]["local"] for reply in replies], axis=0)
            + np.array(replies[0][when]["center"])
            for when in ("before", "after")
        )
        if not np.allclose(before, after, rtol=1e-5):
            raise WrongResultError(
                f"exchanges of {case.workers} workers at once do not conserve the sum: it moved "
                f"by {np.abs(after - before).max():.3g}"
            )


class Limit(WorkerContestant):
    """A loop that reads and writes two arrays of the model's size."""

    key, role, what = "limit", "native", "limit"
    arrays_per_worker = 4.0


class Op(Native):
    """The TensorFlow op, the apply, and what the next optimizer step pays for them."""

    key, role, what = "op_exchange", "op", "exchange"
    arrays_per_worker, arrays_shared = 4.0, 5.0

    def _rename(self, samples: Samples) -> Samples:
        names = {
            "exchange": self.key,
            "op_and_apply": "op_and_apply",
            "update_after": "op_update_after",
            "update": "op_update",
        }
        return {names[name]: values for name, values in samples.items()}


class TensorFlowAllReduce(WorkerContestant):
    """All-reduce of MultiWorkerMirroredStrategy."""

    key, role, what = "tf_allreduce", "all_reduce", "all_reduce"
    arrays_per_worker = 5.0

    def take(self, case: Case, check: bool) -> Samples:
        """Makes one turn."""
        if case.workers == 1:
            raise GroupError("one worker has nobody to reduce with")
        try:
            return super().take(case, check)
        except WrongResultError as error:
            raise GroupError(str(error)) from None


class Mpi(Contestant):
    """An operation of OpenMPI."""

    def __init__(self, what: str, peer: MpiPeer) -> None:
        self.key = f"mpi_{what}"
        self._what = what
        self._peer = peer
        self.arrays_per_worker, self.arrays_shared = 3.0, 1.0

    def take(self, case: Case, check: bool) -> Samples:
        """Makes one turn; the first one tries the settings."""
        if case.workers == 1 and self._what.startswith("allreduce"):
            raise GroupError("one rank has nobody to reduce with")
        seconds = self._peer.take(case.params_mb, MAX_ITERATIONS, BUDGET_S, case.timeout_s)
        return {self.key: [1e3 * value for value in seconds]}

    def close(self) -> None:
        """Ends the ranks."""
        self._peer.close()


def make_contestants(
    groups: WorkerGroups,
    peers: frozenset[str],
    workers: int,
    pinned: bool,
    say: Callable[[str], None],
) -> list[Contestant]:
    """Returns who competes, in the order of a round."""
    contestants: list[Contestant] = [Native(groups)]
    if "limit" in peers:
        contestants.append(Limit(groups))
    if "op" in peers:
        contestants.append(Op(groups))
    if "mpi" in peers:
        for what in CONTESTS:
            contestants.append(Mpi(what, MpiPeer(what, workers, pinned, say)))
    if "tf" in peers:
        contestants.append(TensorFlowAllReduce(groups))
    return contestants
