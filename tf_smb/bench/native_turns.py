"""Turns of a worker without TensorFlow: `Segment.exchange`, and the limit of memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_smb import _smb, box
from tf_smb.bench import workload
from tf_smb.bench.board import Board
from tf_smb.bench.worker import CheckFailedError, Setup, Turn, measure, timed

_LIMIT_RATE = 0.1


class NativeTurns:
    """Exchanges numpy arrays in place."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._setup = setup
        self._board = board
        self._client = box.Client(setup.server, job_id=setup.job_id)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn: "exchange" or "limit"."""
        return self._limit(turn) if turn.what == "limit" else self._exchange(turn)

    def _exchange(self, turn: Turn) -> dict[str, Any]:
        arrays = workload.new_model(turn.params_mb, seed=0)
        with open_segment(self._client, self._setup, turn, arrays) as segment:
            workload.fill(arrays, seed=1 + self._setup.index)
            reply: dict[str, Any] = {}
            if turn.check:
                in_turns(self._board, self._setup, lambda: self._check(turn, segment, arrays))
                reply["before"] = snapshot(self._board, self._setup, segment, arrays)
            reply["times"] = measure(
                self._board, turn, lambda: {"exchange": timed(lambda: segment.exchange(arrays))}
            )
            self._board.wait()
            if turn.check:
                reply["after"] = snapshot(self._board, self._setup, segment, arrays)
            free_segment(self._client, self._board, self._setup, turn)
            return reply

    def _check(self, turn: Turn, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        before = [array.copy() for array in arrays]
        centers = segment.read()
        segment.exchange(arrays)
        check_move(turn, self._setup.count, before, centers, arrays, segment.read())

    def _limit(self, turn: Turn) -> dict[str, Any]:
        size = sum(int(np.prod(shape)) for shape in workload.model_shapes(turn.params_mb))
        first, second = np.empty(size, np.float32), np.empty(size, np.float32)
        workload.fill([first], seed=1)
        workload.fill([second], seed=2)

        def one_pass() -> dict[str, float]:
            return {"limit": timed(lambda: _smb.memory_limit_pass(_LIMIT_RATE, first, second))}

        if turn.check:
            moved = np.float32(_LIMIT_RATE) * (first - second)
            expected = first - moved
            one_pass()
            if not np.array_equal(first, expected):
                raise CheckFailedError("the limit's loop computes something else than numpy")
        return {"times": measure(self._board, turn, one_pass)}


def open_segment(
    client: box.Client, setup: Setup, turn: Turn, arrays: list[np.ndarray]
) -> box.Segment:
    """Creates or joins the turn's segment; its center, and `arrays`, are worker 0's `arrays`."""
    segment = client.create(
        turn.name,
        workload.model_variables(turn.params_mb),
        num_workers=setup.count,
        exchange_threads=max(1, len(setup.cores)),
    )
    segment.start(
        arrays,
        worker_index=setup.index,
        rule=workload.make_rule(turn.rule),
        timeout_s=setup.timeout_s,
        announce=lambda text: None,
    )
    return segment


def free_segment(client: box.Client, board: Board, setup: Setup, turn: Turn) -> None:
    """Gives the segment's name up, once, when no worker needs it any more."""
    board.wait()
    if setup.index == 0:
        client.free(turn.name)


def in_turns(board: Board, setup: Setup, body: Any) -> None:
    """Runs `body` on one worker after the other."""
    for index in range(setup.count):
        board.wait()
        if index == setup.index:
            body()
    board.wait()


def snapshot(
    board: Board, setup: Setup, segment: box.Segment, arrays: list[np.ndarray]
) -> dict[str, list[float]]:
    """Returns samples of the arrays, and from worker 0 of the center, while nobody moves."""
    board.wait()
    samples = {"local": workload.sample(arrays)}
    if setup.index == 0:
        samples["center"] = workload.sample(segment.read())
    board.wait()
    return samples


def check_move(
    turn: Turn,
    workers: int,
    before: list[np.ndarray],
    centers_before: list[np.ndarray],
    after: list[np.ndarray],
    centers_after: list[np.ndarray],
) -> None:
    """Compares one exchange, made while no other worker made one, with numpy: every bit.

    Raises:
        CheckFailedError: They differ.
    """
    rate = workload.move_rate(turn.rule, workers)
    start = workload.new_model(turn.params_mb, seed=0)
    for i, old in enumerate(before):
        if workers == 1:  # A worker alone: a copy into the center.
            new_x, new_center = old, old
        else:
            new_x, new_center = workload.expected_move(
                turn.rule, rate, old, centers_before[i], start[i]
            )
        if not np.array_equal(after[i], new_x) or not np.array_equal(centers_after[i], new_center):
            raise CheckFailedError(
                f"an exchange of {turn.params_mb:g} MB differs from numpy in variable {i}"
            )
