"""`tf-smb bench write`: a worker's arrays into the center, against memcpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_smb import box
from tf_smb.bench import segments
from tf_smb.bench.case import Case
from tf_smb.bench.contestants import Contestant, WorkerGroups, WrongResultError
from tf_smb.bench.transfer import Transfer, TransferTurns, TransferWorkload
from tf_smb.bench.workload import Column, Ratio


class WriteTurns(TransferTurns):
    """Writes the center."""

    name, yardstick = "write", "memcpy"

    def operation(self, segment: box.Segment, arrays: list[np.ndarray]) -> Callable[[], Any]:
        """Returns a write."""
        return lambda: segment.write(arrays)

    def check(self, case: Case, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        """The center is what was written."""
        segment.write(arrays)
        written = [
            array.astype(center.dtype)
            for array, center in zip(arrays, segment.read(True), strict=True)
        ]
        segments.check_same(f"a write of {case.params_mb:g} MB", segment.read(wide=True), written)


class WriteContestant(Transfer):
    """Checks writes that were made at once."""

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """Each element of the center is one of the workers'."""
        if "after" not in replies[0]:
            return
        center = np.array(replies[0]["after"]["center"])
        written = np.array([reply["after"]["local"] for reply in replies])
        if not (written == center).any(axis=0).all():
            raise WrongResultError(
                f"after writes of {case.workers} workers at once the center holds what none wrote"
            )


class Write(TransferWorkload):
    """Workers write the center."""

    name = "write"
    summary = "write a worker's arrays into the center; against memcpy"
    columns = (Column("write", "write"), Column("memcpy", "memcpy"))
    ratios = (Ratio("write_to_memcpy", "write / memcpy", "write", "memcpy", at_most=1.1),)
    method = """\
- **write**: `Segment.write` of one model of 34 variables, by all workers at once: each chunk of the
  center is written by one after the other. **memcpy**: as for read, and by all workers at once.
- Checked in the first round: the center equals what was written, bit for bit; after writes at once
  each of its elements is one of the workers'."""

    def contestant(self, groups: WorkerGroups) -> Contestant:
        """Returns the one that is measured."""
        return WriteContestant(groups, self.name)
