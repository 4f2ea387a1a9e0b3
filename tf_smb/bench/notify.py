"""`tf-smb bench notify`: from one worker's update to the return of another's wait for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_smb import _smb, box
from tf_smb.bench import model, segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.contestants import (
    Contestant,
    Samples,
    WorkerContestant,
    WorkerGroups,
    WrongResultError,
)
from tf_smb.bench.workload import Column, Options, Ratio, Workload

# In a block.
_CALLS = 40
# How long the caller spins first, so that the other one is asleep.
_PAUSE_S = 200e-6


class NotifyTurns:
    """Worker 0 calls, worker 1 waits; CLOCK_MONOTONIC is the same for both."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn: nanoseconds of each call and each return, round trips in seconds."""
        with self._worker.open_tiny(turn) as segment:
            caller = self._worker.setup.index == 0
            arrays = [np.ones(shape, np.float32) for _, shape, _ in segment.variables]
            before = segment.read()
            self._worker.board.wait()
            stamps: list[list[int]] = []
            round_trips: list[list[float]] = []
            for _ in range(turn.blocks):
                stamps.append(self._call(segment, arrays) if caller else self._wait(segment))
                round_trips.append(self._play() if caller else self._answer())
            self._worker.board.wait()
            moved = float((segment.read()[0] - before[0]).max())
            self._worker.free(turn)
            return {"stamps": stamps, "round_trips": round_trips, "moved": moved}

    def _call(self, segment: box.Segment, arrays: list[np.ndarray]) -> list[int]:
        stamps = []
        for _ in range(_CALLS):
            self._worker.board.wait()
            _spin(_PAUSE_S)
            stamps.append(time.monotonic_ns())
            segment.accumulate(arrays, model.COARSE_SCALE)
        return stamps

    def _wait(self, segment: box.Segment) -> list[int]:
        stamps = []
        for _ in range(_CALLS):
            version = segment.version + 1
            self._worker.board.wait()
            segment.wait_version(version, self._worker.setup.timeout_s)
            stamps.append(time.monotonic_ns())
        return stamps

    def _play(self) -> list[float]:
        board, timeout_s = self._worker.board, self._worker.setup.timeout_s
        round_trips = []
        for _ in range(_CALLS):
            board.wait()
            round_trips.append(_smb.futex_round_trip(board.words, _PAUSE_S, timeout_s))
        return round_trips

    def _answer(self) -> list[float]:
        board = self._worker.board
        for _ in range(_CALLS):
            board.wait()
            _smb.futex_answer(board.words, self._worker.setup.timeout_s)
        return []


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class NotifyContestant(WorkerContestant):
    """Both ways to wake somebody, in one turn."""

    key = role = "notify"
    required = True

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """Nobody woke before it was called, and every call is in the center once."""
        calls = len(replies[0]["stamps"]) * _CALLS
        if any(reply["moved"] != calls * model.COARSE_SCALE for reply in replies):
            raise WrongResultError(
                f"{calls} updates moved the center by {replies[0]['moved']:g} instead of "
                f"{calls * model.COARSE_SCALE:g}"
            )
        if min(map(min, _latencies(replies))) < 0:
            raise WrongResultError("a wait for a version returned before the update was called")

    def samples(self, case: Case, replies: Sequence[dict[str, Any]]) -> Samples:
        """Returns microseconds: the median of each block."""
        return {
            "notify": [statistics.median(block) / 1e3 for block in _latencies(replies)],
            "futex": [1e6 * statistics.median(block) / 2 for block in replies[0]["round_trips"]],
        }


def _latencies(replies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Returns nanoseconds from call to return, by block."""
    called, returned = (reply["stamps"] for reply in replies)
    return [
        [end - start for start, end in zip(starts, ends, strict=True)]
        for starts, ends in zip(called, returned, strict=True)
    ]


class Notify(Workload):
    """One worker updates the center, another one waits for it."""

    name = "notify"
    summary = "from one worker's update to the return of another's wait; against a bare futex"
    axes = ("workers",)
    columns = (Column("notify", "notify", "us"), Column("futex", "futex, one way", "us"))
    ratios = (Ratio("notify_to_futex", "notify / futex", "notify", "futex", at_most=5.0),)
    method = f"""\
- **notify**: microseconds from worker 0's call of `Segment.accumulate` on a tiny segment to the
  return of worker 1 from `Segment.wait_version`, on the clock that all processes share. **futex,
  one way**: half a round trip between the same two processes, which wake each other by a futex in
  memory that they share, in the same turn. Before each call the caller spins for
  {1e6 * _PAUSE_S:.0f} microseconds, so that the other one is asleep.
- Checked: no wait returns before its update was called; every update is in the center once."""

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns the one that is measured."""
        return [NotifyContestant(groups)]
