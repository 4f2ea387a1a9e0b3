"""A worker process of the benchmark: takes turns that its parent asks for, one line each.

Started as `python -m tf_smb.bench.worker JSON`; `Setup` is the JSON. Requests come on the
standard input, replies go to what was the standard output. It ends when the input does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tf_smb.bench.board import Board

# What a worker is there for, and the class that does it; imported when needed, so that a
# worker without TensorFlow does not load it.
ROLES = {
    "native": ("tf_smb.bench.native_turns", "NativeTurns"),
    "op": ("tf_smb.bench.op_turns", "OpTurns"),
    "all_reduce": ("tf_smb.bench.all_reduce_turns", "AllReduceTurns"),
}


@dataclass
class Setup:
    """What a worker knows from its start.

    Attributes:
        role: A key of `ROLES`.
        index: Its number.
        count: How many workers there are.
        cores: Which cores it may use; empty: all of its parent's.
        board_fd: Of `create_board_fd`.
        server: Address of the box.
        job_id: Of the box's segments.
        addresses: HOST:PORT of each worker, for TensorFlow's own communication.
        timeout_s: For every wait.
    """

    role: str
    index: int
    count: int
    cores: list[int]
    board_fd: int
    server: str
    job_id: str
    addresses: list[str] = field(default_factory=list)
    timeout_s: float = 300.0


@dataclass
class Turn:
    """What the parent asks for: one contestant, measured a few times.

    Attributes:
        what: "exchange", "limit" or "all_reduce".
        params_mb: Size of the model.
        rule: "elastic" or "delta".
        name: Of the segment, if one is needed.
        max_iterations: How many timed iterations at most.
        budget_s: How long they may take together; one is always made.
        check: Whether to compare results with numpy.
    """

    what: str
    params_mb: float
    rule: str
    name: str
    max_iterations: int
    budget_s: float
    check: bool


class Turns(Protocol):
    """One role."""

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes a turn; returns "times" (seconds by name) and what the parent checks."""
        ...


class CheckFailedError(Exception):
    """A result differs from what numpy computes."""


def timed(body: Callable[[], Any]) -> float:
    """Returns how many seconds `body` takes."""
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def measure(
    board: Board, turn: Turn, iteration: Callable[[], dict[str, float]]
) -> dict[str, list[float]]:
    """Runs `iteration`, which returns seconds by name, on all workers at once.

    Once to warm up, once to see how often the budget allows, then that many times. All
    workers begin each one together.
    """
    gc.collect()
    gc.disable()
    try:
        iteration()
        board.wait()
        slowest = board.maximum(timed(iteration))
        count = max(1, min(turn.max_iterations, int(turn.budget_s / slowest)))
        times: dict[str, list[float]] = {}
        for _ in range(count):
            board.wait()
            for name, seconds in iteration().items():
                times.setdefault(name, []).append(seconds)
        return times
    finally:
        gc.enable()


def _serve(setup: Setup, replies: Any) -> None:
    module, name = ROLES[setup.role]
    board = Board(setup.board_fd, setup.index, setup.count, bool(setup.cores), setup.timeout_s)
    turns: Turns = getattr(importlib.import_module(module), name)(setup, board)
    for line in sys.stdin:
        try:
            reply = turns.take(Turn(**json.loads(line)))
        except CheckFailedError as error:
            reply = {"check_failed": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def main(argv: list[str]) -> int:
    """Serves until the input ends."""
    setup = Setup(**json.loads(argv[0]))
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    # Libraries print on the standard output: replies have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        _serve(setup, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
