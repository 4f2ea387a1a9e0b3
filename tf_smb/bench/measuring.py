"""How a worker measures: in blocks, in which everything that is compared takes its place."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from tf_smb.bench.board import Board
from tf_smb.bench.case import Setup, Turn

# Seconds by name, of one iteration.
Iteration = Callable[[], dict[str, float]]
# Seconds by name: of each block, of each iteration.
Times = dict[str, list[list[float]]]


class CheckFailedError(Exception):
    """A result differs from what numpy computes."""


def timed(body: Callable[[], Any]) -> float:
    """Returns how many seconds `body` takes."""
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def repeated(name: str, body: Callable[[], Any], calls: int = 1) -> Iteration:
    """Returns an iteration of `calls` calls of `body`: its time is that of one call."""

    def iteration() -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(calls):
            body()
        return {name: (time.perf_counter() - start) / calls}

    return iteration


def measure(board: Board, turn: Turn, *iterations: Iteration) -> Times:
    """Runs the iterations on all workers at once, in blocks, each block the other way round.

    In its place in a block each runs once to warm up, and then as often as the time of a
    block allows. All workers begin each iteration together.
    """
    gc.collect()
    gc.disable()
    try:
        counts = [_count(board, turn, iteration) for iteration in iterations]
        places = list(zip(iterations, counts, strict=True))
        times: Times = {}
        for _ in range(turn.blocks):
            for iteration, count in places:
                for name, block in _run_block(board, iteration, count).items():
                    times.setdefault(name, []).append(block)
            places.reverse()
        return times
    finally:
        gc.enable()


def _count(board: Board, turn: Turn, iteration: Iteration) -> int:
    iteration()
    board.wait()
    slowest = board.maximum(timed(iteration))
    return max(1, min(turn.max_iterations, int(turn.block_s / slowest)))


def _run_block(board: Board, iteration: Iteration, count: int) -> dict[str, list[float]]:
    board.wait()
    iteration()
    block: dict[str, list[float]] = {}
    for _ in range(count):
        board.wait()
        for name, seconds in iteration().items():
            block.setdefault(name, []).append(seconds)
    return block


def in_turns(board: Board, setup: Setup, body: Callable[[], None]) -> None:
    """Runs `body` on one worker after the other."""
    for index in range(setup.count):
        board.wait()
        if index == setup.index:
            body()
    board.wait()
