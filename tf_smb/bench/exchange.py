"""`tf-smb bench exchange`: a model's exchange with the box, its limit, and what others offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_smb.bench.case import Case
from tf_smb.bench.contestants import (
    Contestant,
    Samples,
    WorkerContestant,
    WorkerGroups,
    WrongResultError,
    check_conserved,
    is_pinned,
)
from tf_smb.bench.exchange_turns import CHECKS
from tf_smb.bench.groups import GroupError
from tf_smb.bench.mpi import CONTESTS, MpiPeer
from tf_smb.bench.workload import Column, Options, Ratio, Workload, say

_MPI_ITERATIONS = 10
_MPI_BUDGET_S = 1.0
# What rounding to the workers' dtype may make of a sum.
_SUM_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}


class Native(WorkerContestant):
    """`Segment.exchange` on numpy arrays; and the limit, in the same turn."""

    key, role = "exchange", "exchange"
    required = True
    arrays_per_worker, arrays_shared = 3.0, 7.0

    def __init__(self, groups: WorkerGroups, with_limit: bool) -> None:
        super().__init__(groups)
        self.what = "with limit" if with_limit else ""

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """Elastic moves conserve the sum of all weights and the center."""
        if case.rule == "elastic" and case.workers > 1:
            for number in range(len(replies[0]["before"])):
                check_conserved(
                    [reply["before"][number] for reply in replies],
                    [reply["after"][number] for reply in replies],
                    _SUM_TOLERANCE[case.dtype],
                )


class Op(WorkerContestant):
    """The TensorFlow op, the apply, and what the next optimizer step pays for them."""

    key, role = "op_exchange", "op"
    float32_only = True
    arrays_per_worker, arrays_shared = 4.0, 5.0


class TensorFlowAllReduce(WorkerContestant):
    """All-reduce of MultiWorkerMirroredStrategy."""

    key, role = "tf_allreduce", "all_reduce"
    float32_only = True
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

    float32_only = True
    arrays_per_worker, arrays_shared = 3.0, 1.0

    def __init__(self, what: str) -> None:
        self.key = f"mpi_{what}"
        self._what = what
        self._peer: MpiPeer | None = None

    def take(self, case: Case, check: bool) -> Samples:
        """Makes one turn; the first one tries the settings."""
        if case.workers == 1 and self._what.startswith("allreduce"):
            raise GroupError("one rank has nobody to reduce with")
        if self._peer is None:
            self._peer = MpiPeer(self._what, case.workers, is_pinned(case.workers), say)
        seconds = self._peer.take(case.params_mb, _MPI_ITERATIONS, _MPI_BUDGET_S, case.timeout_s)
        return {self.key: [1e3 * value for value in seconds]}

    def close(self) -> None:
        """Ends the ranks."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None


class Exchange(Workload):
    """Workers exchange a model with the box by a rule."""

    name = "exchange"
    summary = "exchange a model with the box; against memory, OpenMPI and TensorFlow"
    axes = ("params_mb", "workers", "dtype", "rule", "threads")
    defaults = {
        "params_mb": (1.0, 10.0, 100.0, 1000.0),
        "workers": (1, 2),
        "dtypes": ("float32",),
        "rule": "elastic",
        "threads": 0,
        "peers": frozenset({"limit", "op", "mpi", "tf"}),
    }
    standard = (
        ("--params-mb", "1,10,100", "--workers", "1,2"),
        ("--params-mb", "1000", "--workers", "1,2", "--peers", "limit", "--skip-op"),
        (
            *("--params-mb", "1,10,100", "--workers", "1,2"),
            *("--dtypes", "float64,float16,bfloat16", "--peers", "limit", "--skip-op"),
        ),
    )
    columns = (
        Column("exchange", "exchange"),
        Column("checked_exchange", "checked exchange"),
        Column("limit", "limit"),
        Column("check", "check alone"),
        Column("check_cost", "check in the exchange"),
        Column("op_exchange", "through the op", beside="checked_exchange"),
        Column("mpi_get_accumulate", "MPI get+acc", beside="exchange"),
        Column("mpi_get_accumulate_shared", "MPI get+acc, shared", beside="exchange"),
        Column("mpi_get_accumulate_default", "MPI get+acc, default", beside="exchange"),
        Column("mpi_allreduce", "MPI allreduce", beside="exchange"),
        Column("mpi_allreduce_default", "MPI allreduce, default", beside="exchange"),
        Column("tf_allreduce", "TF all-reduce", beside="exchange"),
        Column("op_and_apply", ""),
        Column("op_update_after", ""),
        Column("op_update", ""),
    )
    ratios = (
        Ratio("exchange_to_limit", "exchange / limit", "exchange", "limit", at_most=1.2),
        Ratio("checked_exchange_to_limit", "checked exchange / limit", "checked_exchange", "limit"),
    )
    method = f"""\
- **exchange**: `Segment.exchange` on numpy arrays in place, one process a worker, one model of 34
  variables, each from a multiple of 64 bytes on, as TensorFlow's are. It looks for NaN and Inf
  during the move (`finite_check="{CHECKS["exchange"]}"`): the move itself. **checked exchange**:
  the default, which looks at all weights before it touches the center. **check alone**: that look,
  as one pass of one thread. **check in the exchange**: the difference of the two exchanges.
- A checked exchange reads the weights once more: of a model larger than the cache, five times its
  size are read and written instead of four, so against a limit that memory alone sets it cannot be
  below 1.25. Where it is, the limit's loop was not bound by memory alone, or one worker copied.
- **limit**: `d = r (a - b); a -= d; b += d` on two float32 arrays that belong to the process alone:
  a plain loop, compiled as the package is, without sharing, locks or checks. The arrays have the
  model's size for float32; for another dtype the size at which the loop reads and writes as many
  bytes as the exchange does: each weight in its own dtype and each element of the center, which is
  float32 for float16 and bfloat16.
- **through the op**: a checked exchange from a `tf.function` on `tf.Variable`s, with the apply, and
  with what the next optimizer update takes longer after it than without it. In brackets: how many
  times the checked exchange.
- **MPI get+acc**: the elastic move on an OpenMPI window on rank 0: get, compute, accumulate, under
  an exclusive lock, so atomic as ours. **shared**: under a shared lock or lock_all: two ranks may
  get the same value before either adds to it, so this is another algorithm. **MPI allreduce**: a
  sum in place. Each is the best of many settings, tried in the same run: the program's pieces,
  OpenMPI's components, algorithms, segment sizes. **default**: what a program gets that calls
  OpenMPI once for the whole array, under an exclusive lock, and sets nothing.
  **TF all-reduce**: `MultiWorkerMirroredStrategy`, rings over gRPC on the loopback device. In
  brackets: how many times the exchange.
- Checked in the first round: one exchange after the other equals numpy's bit for bit, also through
  the op; exchanges at once conserve the sum of all weights and the center.
- One worker alone copies its weights into the center; it has nobody to reduce with."""

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns who competes, in the order of a round."""
        contestants: list[Contestant] = [Native(groups, "limit" in options.peers)]
        if "op" in options.peers:
            contestants.append(Op(groups))
        if "mpi" in options.peers:
            contestants += [Mpi(what) for what in CONTESTS]
        if "tf" in options.peers:
            contestants.append(TensorFlowAllReduce(groups))
        return contestants

    def derive(self, samples: Samples) -> None:
        """Adds what the check costs, block by block."""
        pairs = zip(samples.get("exchange", ()), samples.get("checked_exchange", ()), strict=True)
        samples["check_cost"] = [checked - bare for bare, checked in pairs]
