"""A barrier between processes, in memory they share: they start within microseconds."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

# Arrivals, values, words for native yardsticks, and whether somebody gave up: a page each.
_PAGES = 4


class GivenUpError(Exception):
    """Another worker gave the turn up; it knows why."""


def create_board_fd() -> int:
    """Returns a descriptor of fresh shared memory, for the workers of one group."""
    fd = os.memfd_create("tf_smb_bench")
    os.ftruncate(fd, _PAGES * mmap.PAGESIZE)
    return fd


class Board:
    """One worker's view of the memory its group shares.

    Args:
        fd: Of `create_board_fd`.
        index: This worker's number.
        count: How many workers there are.
        yielding: Whether the workers have a core each: then waiting is spinning.
        timeout_s: After so long at one barrier, somebody died.

    Attributes:
        words: Zero at the beginning, for what waits without the board's help.
    """

    def __init__(self, fd: int, index: int, count: int, yielding: bool, timeout_s: float) -> None:
        self._memory = mmap.mmap(fd, _PAGES * mmap.PAGESIZE)
        self._arrivals = np.frombuffer(self._memory, np.int64, count)
        self._values = np.frombuffer(self._memory, np.float64, count, mmap.PAGESIZE)
        self.words = np.frombuffer(self._memory, np.uint32, mmap.PAGESIZE // 4, 2 * mmap.PAGESIZE)
        self._given_up = np.frombuffer(self._memory, np.uint32, 1, 3 * mmap.PAGESIZE)
        self._index = index
        self._yielding = yielding
        self._timeout_s = timeout_s
        self._round = 0

    def wait(self) -> None:
        """Returns when all workers have come here.

        Raises:
            TimeoutError: They did not.
            GivenUpError: One of them gave up.
        """
        self._round += 1
        self._arrivals[self._index] = self._round
        deadline = time.monotonic() + self._timeout_s
        while int(self._arrivals.min()) < self._round:
            if self._yielding:
                os.sched_yield()
            else:
                time.sleep(50e-6)
            if self._given_up[0]:
                raise GivenUpError
            if time.monotonic() > deadline:
                raise TimeoutError("the other workers did not come to the barrier")

    def give_up(self) -> None:
        """Ends all waits of the group, for good."""
        self._given_up[0] = 1

    def post(self, value: float) -> None:
        """Shows a value to the others."""
        self._values[self._index] = value

    def lowest(self) -> float:
        """Returns the smallest value that any worker shows now."""
        return float(self._values.min())

    def maximum(self, value: float) -> float:
        """Returns the largest of the workers' values."""
        self.post(value)
        self.wait()
        largest = float(self._values.max())
        self.wait()
        return largest
