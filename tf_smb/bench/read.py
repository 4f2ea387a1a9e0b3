"""`tf-smb bench read`: the center into a worker's arrays, against memcpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tf_smb import box
from tf_smb.bench import model, segments
from tf_smb.bench.case import Case
from tf_smb.bench.transfer import TransferTurns, TransferWorkload
from tf_smb.bench.workload import Column, Ratio


class ReadTurns(TransferTurns):
    """Reads the center."""

    name, yardstick = "read", "memcpy"

    def operation(self, segment: box.Segment, arrays: list[np.ndarray]) -> Callable[[], Any]:
        """Returns a read."""
        return lambda: segment.read_into(arrays)

    def check(self, case: Case, segment: box.Segment, arrays: list[np.ndarray]) -> None:
        """The center is what worker 0 began with."""
        segment.read_into(arrays)
        seeded = model.new_model(case.params_mb, seed=0, dtype=case.dtype, coarse=True)
        segments.check_same(f"a read of {case.params_mb:g} MB", arrays, seeded)

    def operate_at_once(
        self, segment: box.Segment, arrays: list[np.ndarray], operate: Callable[[], Any]
    ) -> dict[str, Any]:
        """All of them read the same."""
        self._worker.board.wait()
        operate()
        segments.check_same("a read while others read", arrays, segment.read())
        return {}


class Read(TransferWorkload):
    """Workers read the center."""

    name = "read"
    summary = "read the center into a worker's arrays; against memcpy"
    columns = (Column("read", "read"), Column("memcpy", "memcpy"))
    ratios = (Ratio("read_to_memcpy", "read / memcpy", "read", "memcpy", at_most=1.1),)
    method = """\
- **read**: `Segment.read_into` of one model of 34 variables, by all workers at once. **memcpy**:
  one `memcpy` between two arrays that belong to the process alone, allocated as the model's arrays
  are, by all workers at once. It has the model's size for float32 and float64; for float16 and
  bfloat16, whose center is float32, the size at which it reads and writes as many bytes as a read.
- Checked in the first round: what is read equals what was written, bit for bit."""
