"""Turns of a worker that exchanges numpy arrays: `Segment.exchange`, and the limit of memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from tf_smb import _smb, box
from tf_smb.bench import model, segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.measuring import CheckFailedError, in_turns, measure, repeated

_LIMIT_RATE = 0.1
# A segment each: what is measured, and when it looks for NaN and Inf.
CHECKS = {"exchange": "during", "checked_exchange": "before"}


class ExchangeTurns:
    """Exchanges numpy arrays in place."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn: both kinds of exchange, the limit, and the bare check if asked for."""
        with ExitStack() as stack:
            arrays = model.new_model(turn.case.params_mb, 0, turn.case.dtype)
            opened = {
                name: stack.enter_context(self._worker.open(turn, arrays, name, finite_check))
                for name, finite_check in CHECKS.items()
            }
            reply: dict[str, Any] = {"before": [], "after": []}
            self._fill(arrays)
            if turn.check:
                for segment in opened.values():
                    self._check(turn.case, segment, arrays)
            reply["times"] = self._measure(turn, opened, arrays)
            if turn.check:
                for segment in opened.values():
                    self._exchange_at_once(segment, arrays, reply)
            for name in opened:
                self._worker.free(turn, name)
            return reply

    def _fill(self, arrays: Sequence[np.ndarray]) -> None:
        model.fill(arrays, seed=1 + self._worker.setup.index)

    def _check(self, case: Case, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        def one() -> None:
            before = [array.copy() for array in arrays]
            centers = segment.read(wide=True)
            segment.exchange(arrays)
            segments.check_move(case, before, centers, arrays, segment.read(wide=True))

        in_turns(self._worker.board, self._worker.setup, one)

    def _exchange_at_once(
        self, segment: box.Segment, arrays: list[np.ndarray], reply: dict[str, Any]
    ) -> None:
        """Lets all workers exchange at once, and shows the parent what came of it."""
        self._fill(arrays)
        reply["before"].append(segments.snapshot(self._worker, segment, arrays))
        for _ in range(3):
            segment.exchange(arrays)
        reply["after"].append(segments.snapshot(self._worker, segment, arrays))

    def _measure(
        self, turn: Turn, opened: dict[str, box.Segment], arrays: list[np.ndarray]
    ) -> dict[str, list[list[float]]]:
        iterations = [
            repeated("exchange", lambda: opened["exchange"].exchange(arrays)),
            repeated("checked_exchange", lambda: opened["checked_exchange"].exchange(arrays)),
        ]
        if turn.what == "with limit":
            first, second = _limit_arrays(turn.case)
            flat = model.flat_bytes(arrays)
            if turn.check:
                _check_limit(first, second)
            iterations += [
                repeated("limit", lambda: _smb.move_loop(_LIMIT_RATE, first, second)),
                repeated("check", lambda: _smb.all_finite(turn.case.dtype, flat)),
            ]
        return measure(self._worker.board, turn, *iterations)


def _limit_arrays(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns two float32 arrays whose move reads and writes as many bytes as the exchange."""
    held = model.center_dtype(case.dtype).itemsize
    moved = model.element_count(case.params_mb, case.dtype) * (
        model.element_bytes(case.dtype) + held
    )
    first, second = (model.empty(moved // 8, np.float32) for _ in range(2))
    model.fill([first], seed=1)
    model.fill([second], seed=2)
    return first, second


def _check_limit(first: np.ndarray, second: np.ndarray) -> None:
    moved = np.float32(_LIMIT_RATE) * (first - second)
    expected = first - moved
    _smb.move_loop(_LIMIT_RATE, first, second)
    if not np.array_equal(first, expected):
        raise CheckFailedError("the limit's loop computes something else than numpy")
