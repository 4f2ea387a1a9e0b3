"""What `read`, `write` and `accumulate` have in common: one operation against one loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_smb import _smb, box
from tf_smb.bench import model, segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.contestants import Contestant, WorkerContestant, WorkerGroups
from tf_smb.bench.measuring import in_turns, measure, repeated
from tf_smb.bench.workload import Options, Workload


class TransferTurns:
    """Moves whole models between a worker's arrays and the center.

    Attributes:
        name: Of the operation in the samples.
        yardstick: Of what it is measured against.
    """

    name = ""
    yardstick = ""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn: the operation and its yardstick."""
        case, setup, board = turn.case, self._worker.setup, self._worker.board
        arrays = model.new_model(case.params_mb, seed=0, dtype=case.dtype, coarse=True)
        with self._worker.open(turn, arrays) as segment:
            model.fill(arrays, seed=1 + setup.index, coarse=True)
            if turn.check:
                in_turns(board, setup, lambda: self.check(case, segment, arrays))
            operate = self.operation(segment, arrays)
            reply: dict[str, Any] = {
                "times": measure(
                    board,
                    turn,
                    repeated(self.name, operate),
                    repeated(self.yardstick, self.yardstick_of(case)),
                )
            }
            board.wait()
            if turn.check:
                model.fill(arrays, seed=1 + setup.index, coarse=True)
                reply.update(self.operate_at_once(segment, arrays, operate))
            self._worker.free(turn)
            return reply

    def operation(self, segment: box.Segment, arrays: list[np.ndarray]) -> Callable[[], Any]:
        """Returns what is measured."""
        raise NotImplementedError

    def yardstick_of(self, case: Case) -> Callable[[], Any]:
        """Returns what it is measured against: one memcpy of as many bytes."""
        source, target = (model.empty(_bytes_copied(case), np.uint8) for _ in range(2))
        source.fill(1)
        target.fill(2)
        return lambda: _smb.copy_loop(source, target)

    def check(self, case: Case, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        """Compares one operation, made while no other worker makes one, with numpy.

        Raises:
            CheckFailedError: They differ.
        """
        raise NotImplementedError

    def operate_at_once(
        self, segment: box.Segment, arrays: list[np.ndarray], operate: Callable[[], Any]
    ) -> dict[str, Any]:
        """Has all workers operate at once; returns what the parent needs to check it."""
        self._worker.board.wait()
        operate()
        return {"after": segments.snapshot(self._worker, segment, arrays)}


def _bytes_copied(case: Case) -> int:
    """Returns the size of a memcpy that reads and writes as many bytes as a read or a write."""
    ours, centers = model.element_bytes(case.dtype), model.center_dtype(case.dtype).itemsize
    return model.element_count(case.params_mb, case.dtype) * (ours + centers) // 2


class Transfer(WorkerContestant):
    """An operation and its yardstick, in one turn."""

    required = True
    arrays_per_worker, arrays_shared = 4.0, 4.0

    def __init__(self, groups: WorkerGroups, name: str) -> None:
        super().__init__(groups)
        self.key = self.role = name


class TransferWorkload(Workload):
    """One of the operations on whole models."""

    axes = ("params_mb", "workers", "dtype", "threads")
    defaults = {
        "params_mb": (1.0, 10.0, 100.0, 1000.0),
        "workers": (1, 2),
        "dtypes": ("float32",),
        "threads": 0,
    }
    standard = (
        ("--params-mb", "1,10,100,1000", "--workers", "1,2"),
        ("--params-mb", "100", "--workers", "2", "--dtypes", "float64,float16,bfloat16"),
    )

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns the one that is measured."""
        return [self.contestant(groups)]

    def contestant(self, groups: WorkerGroups) -> Contestant:
        """Returns the one that is measured."""
        return Transfer(groups, self.name)
