"""`tf-smb bench barrier`: how long workers take to meet, against a bare futex barrier."""

from __future__ import annotations

from typing import Any

from tf_smb import _smb, box
from tf_smb.bench import segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Setup, Turn
from tf_smb.bench.contestants import Contestant, WorkerContestant, WorkerGroups
from tf_smb.bench.measuring import CheckFailedError, measure, repeated
from tf_smb.bench.workload import Column, Options, Ratio, Workload

_CALLS = 20
_CHECKED_CALLS = 50


class BarrierTurns:
    """Meets the other workers."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn: both barriers."""
        setup, board = self._worker.setup, self._worker.board
        workers = range(setup.count)
        with self._worker.open_tiny(turn) as segment:
            if turn.check:
                self._check(segment, workers)
            times = measure(
                board,
                turn,
                repeated("barrier", lambda: self._meet(segment, workers), _CALLS),
                repeated(
                    "futex_barrier",
                    lambda: _smb.futex_barrier(board.words, setup.count, setup.timeout_s),
                    _CALLS,
                ),
            )
            self._worker.free(turn)
            return {"times": times}

    def _meet(self, segment: box.Segment, workers: range) -> None:
        segment.barrier(workers, self._worker.setup.timeout_s, announce=None)

    def _check(self, segment: box.Segment, workers: range) -> None:
        """Nobody leaves a barrier before all have come to it."""
        board = self._worker.board
        for call in range(1, 1 + _CHECKED_CALLS):
            board.post(float(call))
            self._meet(segment, workers)
            if board.lowest() < call:
                raise CheckFailedError(f"a worker left barrier {call} before all had come to it")
        board.wait()


class BarrierContestant(WorkerContestant):
    """Both barriers, in one turn."""

    key = role = "barrier"
    required = True
    units_per_s = 1e6


class Barrier(Workload):
    """Workers meet at a barrier."""

    name = "barrier"
    summary = "how long workers take to meet at a barrier; against a bare futex barrier"
    axes = ("workers",)
    defaults = {"workers": (1, 2, 4, 8, 16, 32)}
    columns = (
        Column("barrier", "barrier", "us"),
        Column("futex_barrier", "futex barrier", "us"),
    )
    ratios = (Ratio("barrier_to_futex", "barrier / futex", "barrier", "futex_barrier"),)
    method = f"""\
- **barrier**: `Segment.barrier` of all workers, {_CALLS} times without a pause: microseconds from
  one to the next. It knows who died, and who is missing. **futex barrier**: a counter and one
  futex in memory that the workers share, in the same turn; it knows nothing.
- With more workers than cores this is mostly the kernel's scheduler.
- Checked in the first round: nobody leaves a barrier before all have come to it."""

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns the one that is measured."""
        return [BarrierContestant(groups)]
