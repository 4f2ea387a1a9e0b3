"""`tf-smb bench accumulate`: center += scale * arrays, against a loop that does just that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tf_smb import _smb, box
from tf_smb.bench import model, segments
from tf_smb.bench.case import Case
from tf_smb.bench.contestants import Contestant, WorkerGroups, WrongResultError
from tf_smb.bench.transfer import Transfer, TransferTurns, TransferWorkload
from tf_smb.bench.workload import Column, Ratio

_CALLS_AT_ONCE = 20


class AccumulateTurns(TransferTurns):
    """Adds to the center."""

    name, yardstick = "accumulate", "add_loop"

    def operation(self, segment: box.Segment, arrays: list[np.ndarray]) -> Callable[[], Any]:
        """Returns an addition."""
        return lambda: segment.accumulate(arrays, model.COARSE_SCALE)

    def yardstick_of(self, case: Case) -> Callable[[], Any]:
        """Returns g += scale x on float32 arrays that read and write as many bytes."""
        ours, centers = model.element_bytes(case.dtype), model.center_dtype(case.dtype).itemsize
        moved = model.element_count(case.params_mb, case.dtype) * (ours + 2 * centers)
        x, g = (model.empty(moved // 12, np.float32) for _ in range(2))
        x.fill(1)
        g.fill(0)
        return lambda: _smb.add_loop(model.COARSE_SCALE, x, g)

    def check(self, case: Case, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        """The center moves by scale * arrays."""
        before = segment.read(wide=True)
        segment.accumulate(arrays, model.COARSE_SCALE)
        expected = [
            center + array.astype(center.dtype) * center.dtype.type(model.COARSE_SCALE)
            for array, center in zip(arrays, before, strict=True)
        ]
        segments.check_same(
            f"an accumulate of {case.params_mb:g} MB", segment.read(wide=True), expected
        )

    def operate_at_once(
        self, segment: box.Segment, arrays: list[np.ndarray], operate: Callable[[], Any]
    ) -> dict[str, Any]:
        """All of them add, many times."""
        before = segments.snapshot(self._worker, segment, arrays)
        for _ in range(_CALLS_AT_ONCE):
            operate()
        return {"before": before, "after": segments.snapshot(self._worker, segment, arrays)}


class AccumulateContestant(Transfer):
    """Checks additions that were made at once."""

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """None of them is lost: their sum has no rounding errors."""
        if "after" not in replies[0]:
            return
        before, after = (np.array(replies[0][when]["center"]) for when in ("before", "after"))
        added = np.sum([reply["after"]["local"] for reply in replies], axis=0)
        if not np.array_equal(after, before + _CALLS_AT_ONCE * model.COARSE_SCALE * added):
            raise WrongResultError(
                f"accumulates of {case.workers} workers at once do not add up in the center"
            )


class Accumulate(TransferWorkload):
    """Workers add to the center."""

    name = "accumulate"
    summary = "add a worker's arrays to the center; against the bare loop g += s x"
    columns = (Column("accumulate", "accumulate"), Column("add_loop", "g += s x"))
    ratios = (Ratio("accumulate_to_loop", "accumulate / loop", "accumulate", "add_loop"),)
    method = """\
- **accumulate**: `Segment.accumulate` of one model of 34 variables, by all workers at once. It
  looks for NaN and Inf first, and adds to each chunk by way of a side buffer, all or nothing if the
  process dies: both cost traffic that the loop does not have. **g += s x**: that loop on two
  float32 arrays that belong to the process alone, which read and write as many bytes as the bare
  addition would.
- Checked in the first round: one accumulate equals numpy's, bit for bit; of many at once none is
  lost."""

    def contestant(self, groups: WorkerGroups) -> Contestant:
        """Returns the one that is measured."""
        return AccumulateContestant(groups, self.name)
