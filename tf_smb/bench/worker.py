"""A worker process of the benchmark: takes turns that its parent asks for, one line each.

Started as `python -m tf_smb.bench.worker JSON`; `Setup` is the JSON. Requests come on the
standard input, replies go to what was the standard output. It ends when the input does.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, Protocol

from tf_smb.bench.board import Board, GivenUpError
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.measuring import CheckFailedError

# What a worker is there for, and the class that does it; imported when needed, so that a
# worker without TensorFlow does not load it.
ROLES = {
    "exchange": ("tf_smb.bench.exchange_turns", "ExchangeTurns"),
    "op": ("tf_smb.bench.op_turns", "OpTurns"),
    "all_reduce": ("tf_smb.bench.all_reduce_turns", "AllReduceTurns"),
    "read": ("tf_smb.bench.read", "ReadTurns"),
    "write": ("tf_smb.bench.write", "WriteTurns"),
    "accumulate": ("tf_smb.bench.accumulate", "AccumulateTurns"),
    "barrier": ("tf_smb.bench.barrier", "BarrierTurns"),
    "notify": ("tf_smb.bench.notify", "NotifyTurns"),
    "scaling": ("tf_smb.bench.scaling", "ScalingTurns"),
}


class Turns(Protocol):
    """One role."""

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes a turn; returns what the parent makes samples of, and what it checks."""
        ...


def _serve(setup: Setup, replies: Any) -> None:
    module, name = ROLES[setup.role]
    board = Board(setup.board_fd, setup.index, setup.count, bool(setup.cores), setup.timeout_s)
    turns: Turns = getattr(importlib.import_module(module), name)(setup, board)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = turns.take(Turn(**{**request, "case": Case(**request["case"])}))
        except CheckFailedError as error:
            board.give_up()
            reply = {"check_failed": str(error)}
        except GivenUpError:
            reply = {}  # the one that gave up says why
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
