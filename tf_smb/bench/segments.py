"""What the turns of workers do with segments: open, look at, check, give up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tf_smb import box
from tf_smb.bench import model
from tf_smb.bench.board import Board
from tf_smb.bench.case import Case, Setup, Turn
from tf_smb.bench.measuring import CheckFailedError

_TINY = [("variable", (16,), "float32")]


class WorkerBox:
    """A worker's way to the box, as every role needs it."""

    def __init__(self, setup: Setup, board: Board) -> None:
        self.setup = setup
        self.board = board
        self._client = box.Client(setup.server, job_id=setup.job_id)

    def open(
        self, turn: Turn, arrays: Sequence[np.ndarray], name: str = "", finite_check: str = "before"
    ) -> box.Segment:
        """Creates or joins a segment; its center, and `arrays`, become worker 0's `arrays`."""
        case = turn.case
        segment = self._client.create(
            turn.name + name,
            model.model_variables(case.params_mb, case.dtype) if case.params_mb else _TINY,
            num_workers=self.setup.count,
            exchange_threads=case.threads or max(1, len(self.setup.cores)),
            finite_check=finite_check,
        )
        segment.start(
            arrays,
            worker_index=self.setup.index,
            rule=model.make_rule(case.rule),
            timeout_s=self.setup.timeout_s,
            announce=lambda text: None,
        )
        return segment

    def open_tiny(self, turn: Turn) -> box.Segment:
        """Creates or joins a segment of which only the meetings matter."""
        return self.open(turn, [np.ones(shape, np.float32) for _, shape, _ in _TINY])

    def free(self, turn: Turn, name: str = "") -> None:
        """Gives the segment's name up, once, when no worker needs it any more."""
        self.board.wait()
        if self.setup.index == 0:
            self._client.free(turn.name + name)


def snapshot(
    worker: WorkerBox, segment: box.Segment, arrays: Sequence[np.ndarray]
) -> dict[str, list[float]]:
    """Returns samples of the arrays, and from worker 0 of the center, while nobody moves."""
    worker.board.wait()
    samples = {"local": model.sample(arrays)}
    if worker.setup.index == 0:
        samples["center"] = model.sample(segment.read(wide=True))
    worker.board.wait()
    return samples


def check_same(what: str, got: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    """Compares two models, bit for bit.

    Raises:
        CheckFailedError: They differ; the first variable that does is named.
    """
    for i, (ours, numpys) in enumerate(zip(got, expected, strict=True)):
        if not np.array_equal(ours, numpys):
            raise CheckFailedError(f"{what} differs from numpy in variable {i}")


def check_move(
    case: Case,
    before: Sequence[np.ndarray],
    centers_before: Sequence[np.ndarray],
    after: Sequence[np.ndarray],
    centers_after: Sequence[np.ndarray],
) -> None:
    """Compares one exchange, made while no other worker made one, with numpy: every bit.

    Raises:
        CheckFailedError: They differ.
    """
    what = f"an exchange of {case.params_mb:g} MB of {case.dtype}"
    rate = model.move_rate(case.rule, case.workers)
    start = model.new_model(case.params_mb, seed=0, dtype=case.dtype)
    for i, old in enumerate(before):
        held = centers_before[i].dtype
        new_x, new_center = old, old.astype(held)  # a worker alone: a copy into the center
        if case.workers > 1:
            new_x, new_center = model.expected_move(
                case.rule, rate, old, centers_before[i], start[i]
            )
        if not np.array_equal(after[i], new_x) or not np.array_equal(centers_after[i], new_center):
            raise CheckFailedError(f"{what} differs from numpy in variable {i}")
