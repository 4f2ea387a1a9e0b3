"""`tf-smb bench scaling`: many workers that exchange without a pause, against two."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_smb import box
from tf_smb.bench import model, segments
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.contestants import (
    Contestant,
    Samples,
    WorkerContestant,
    WorkerGroups,
    check_conserved,
)
from tf_smb.bench.measuring import CheckFailedError
from tf_smb.bench.workload import Column, Options, Ratio, Workload

# What others are compared with.
_REFERENCE_WORKERS = 2


class ScalingTurns:
    """Exchanges until the time is over."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self._worker = segments.WorkerBox(setup, board)

    def take(self, turn: Turn) -> dict[str, Any]:
        """Makes one turn; the reply says how many exchanges this worker made, and how long."""
        arrays = model.new_model(turn.case.params_mb, seed=0, dtype=turn.case.dtype)
        with self._worker.open(turn, arrays) as segment:
            model.fill(arrays, seed=1 + self._worker.setup.index)
            before = segments.snapshot(self._worker, segment, arrays)
            reply = _exchange_for(segment, arrays, turn.case.seconds)
            after = segments.snapshot(self._worker, segment, arrays)
            skipped = segment.stats()["skipped_chunks"]
            if skipped:
                raise CheckFailedError(f"exchanges left out {skipped} chunks")
            self._worker.free(turn)
            return {**reply, "before": before, "after": after}


def _exchange_for(
    segment: box.Segment, arrays: list[np.ndarray], seconds: float
) -> dict[str, float]:
    count, longest_s = 0, 0.0
    start = last = time.perf_counter()
    while last - start < seconds:
        outcome = segment.exchange(arrays)
        if outcome == "skipped":
            raise CheckFailedError("an exchange was skipped: a lease lapsed")
        now = time.perf_counter()
        count, longest_s, last = count + 1, max(longest_s, now - last), now
    return {"count": count, "elapsed_s": last - start, "longest_s": longest_s}


class ScalingContestant(WorkerContestant):
    """So many workers, for some seconds."""

    key, role = "throughput", "scaling"
    required = True
    arrays_per_worker, arrays_shared = 1.0, 1.0

    def check(self, case: Case, replies: Sequence[dict[str, Any]]) -> None:
        """Elastic moves conserve the sum of all weights and the center."""
        if case.workers > 1:
            before, after = ([reply[when] for reply in replies] for when in ("before", "after"))
            check_conserved(before, after, tolerance=1e-4)

    def samples(self, case: Case, replies: Sequence[dict[str, Any]]) -> Samples:
        """Returns MB/s of all workers, of the slowest one and of the mean, and the longest time."""
        rates = [case.params_mb * reply["count"] / reply["elapsed_s"] for reply in replies]
        return {
            "throughput": [sum(rates)],
            "slowest": [min(rates)],
            "mean": [sum(rates) / len(rates)],
            "longest": [1e3 * max(reply["longest_s"] for reply in replies)],
        }


class Scaling(Workload):
    """Many workers exchange at once."""

    name = "scaling"
    summary = "many workers exchange without a pause; against two, and the slowest against the mean"
    axes = ("params_mb", "workers", "threads", "seconds")
    defaults = {
        "params_mb": (100.0,),
        "workers": (2, 4, 8, 16, 32),
        "threads": 0,
        "seconds": 3.0,
    }
    standard = (("--params-mb", "10,100", "--workers", "2,4,8,16,32", "--repeats", "3"),)
    columns = (
        Column("throughput", "all workers", "mb_s"),
        Column("two_workers", "", "mb_s"),
        Column("slowest", "slowest worker", "mb_s"),
        Column("mean", "mean worker", "mb_s"),
        Column("longest", "longest exchange", "ms"),
    )
    ratios = (
        Ratio("throughput_to_two", "all / two", "throughput", "two_workers", at_least=0.9),
        Ratio("slowest_to_mean", "slowest / mean", "slowest", "mean", at_least=0.5),
    )
    method = """\
- All workers call `Segment.exchange` on one segment for some seconds, without a pause, each as
  often as it can. **all workers**: megabytes of model exchanged in a second, together; **all /
  two**: against two workers in the same round. **slowest / mean**: in a round, the worker that
  exchanged least against the mean. **longest exchange**: of any worker.
- Checked in every round: exchanges conserve the sum of all weights and the center, and none is
  left out."""

    def batches(self, options: Options) -> Iterator[list[Case]]:
        """Yields all numbers of workers together: they are compared with two."""
        workers = sorted({*options.workers, _REFERENCE_WORKERS})
        for params_mb in options.params_mb:
            yield [self.case(options, count, params_mb, "float32") for count in workers]

    def contestants(self, groups: WorkerGroups, options: Options) -> list[Contestant]:
        """Returns the one that is measured."""
        return [ScalingContestant(groups)]

    def relate(self, batch: Sequence[tuple[Case, Samples]]) -> None:
        """Adds what two workers reached in the same rounds."""
        two = next(samples for case, samples in batch if case.workers == _REFERENCE_WORKERS)
        for _, samples in batch:
            if "throughput" in samples and "throughput" in two:
                samples["two_workers"] = two["throughput"]
