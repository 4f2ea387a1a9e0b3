"""OpenMPI as a contestant: compiled here, its settings tried, the best one measured."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tf_smb.bench import model
from tf_smb.bench.groups import Group, GroupError, start_command

_COMPILE_TIMEOUT_S = 120.0
# Settings are compared on at most so many MB: what is best there is best above.
_TRIAL_MB = 100.0
_TRIAL_ITERATIONS = 3
_TRIAL_BUDGET_S = 0.5
_LOCKINGS = {0: "exclusive lock", 1: "shared lock", 2: "lock_all"}
# Elements; what is larger than the model means: in one piece.
_WHOLE = 1 << 40


@dataclass(frozen=True)
class _Contest:
    """An operation of mpi_peer.c, and what of the program itself may be varied.

    Attributes:
        operation: "get_accumulate" or "allreduce".
        chunks: Sizes of the pieces, in elements.
        lockings: Keys of `_LOCKINGS`. Under the exclusive lock get and accumulate are one atomic
            move, as an exchange is; under the others they are not: another, cheaper thing.
        as_installed: Without any setting of OpenMPI's.
    """

    operation: str
    chunks: tuple[int, ...]
    lockings: tuple[int, ...] = (0,)
    as_installed: bool = False


# The best of all settings, the program's pieces included; and what a program gets that calls
# OpenMPI once for the whole array and sets nothing.
_CONTESTS = {
    "get_accumulate": _Contest("get_accumulate", (1 << 13, 1 << 14, 1 << 16, _WHOLE)),
    "get_accumulate_shared": _Contest(
        "get_accumulate", (1 << 13, 1 << 14, 1 << 16, _WHOLE), (1, 2)
    ),
    "get_accumulate_default": _Contest("get_accumulate", (_WHOLE,), as_installed=True),
    "allreduce": _Contest("allreduce", (1 << 16, 1 << 18, 1 << 20, _WHOLE)),
    "allreduce_default": _Contest("allreduce", (_WHOLE,), as_installed=True),
}
CONTESTS = tuple(_CONTESTS)
_LAUNCH_SETTINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "get_accumulate": ((), ("--mca", "osc", "^sm")),
    "allreduce": (
        (),
        ("--mca", "btl_vader_single_copy_mechanism", "none"),
        *(
            (
                *("--mca", "coll_tuned_use_dynamic_rules", "1"),
                *("--mca", "coll_tuned_allreduce_algorithm", algorithm),
            )
            # Recursive doubling, ring, segmented ring, Rabenseifner.
            for algorithm in ("3", "4", "5", "6")
        ),
        *(
            (
                *("--mca", "coll_tuned_use_dynamic_rules", "1"),
                *("--mca", "coll_tuned_allreduce_algorithm", "5"),
                *("--mca", "coll_tuned_allreduce_algorithm_segmentsize", segment_bytes),
            )
            for segment_bytes in ("1048576", "4194304")
        ),
    ),
}


def compile_peer(folder: Path) -> Path:
    """Compiles mpi_peer.c into `folder`.

    Raises:
        GroupError: No compiler or no mpirun, or it does not compile.
    """
    for tool in ("mpicc", "mpirun"):
        if shutil.which(tool) is None:
            raise GroupError(f"there is no {tool} here (Debian: apt-get install libopenmpi-dev)")
    source = Path(__file__).with_name("mpi_peer.c")
    program = folder / "mpi_peer"
    command = ["mpicc", "-O3", "-ffp-contract=off", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        raise GroupError(f"mpicc failed: {done.stderr.strip().splitlines()[-1:]}")
    return program


@dataclass(frozen=True)
class _Settings:
    launch: tuple[str, ...]
    chunk_elements: int
    locking: int

    def request(self, what: str, params_mb: float, count: int, budget_s: float, rate: float) -> str:
        elements = round(params_mb * model.BYTES_PER_MB / 4)
        chunk = min(self.chunk_elements, elements)
        return f"{what} {elements} {count} {budget_s} {chunk} {self.locking} {rate:.9g}"

    def describe(self, what: str) -> str:
        chunk = self.chunk_elements * 4 >> 10
        size = f"pieces of {chunk} KiB" if chunk < 1 << 30 else "one piece"
        return size if what == "allreduce" else f"{_LOCKINGS[self.locking]}, {size}"


class MpiPeer:
    """One operation of mpi_peer.c with so many ranks.

    Args:
        what: One of `CONTESTS`.
        workers: Number of ranks.
        pinned: Whether each rank has a core to itself.
        say: Takes a line for people: the command that was best.
    """

    def __init__(self, what: str, workers: int, pinned: bool, say: Callable[[str], None]) -> None:
        self._what = what
        self._contest = _CONTESTS[what]
        self._operation = self._contest.operation
        self._workers = workers
        self._pinned = pinned
        self._say = say
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._program: Path | None = None
        self._best: dict[float, _Settings] = {}
        self._group: Group | None = None
        self._launch: tuple[str, ...] | None = None

    def take(
        self, params_mb: float, max_iterations: int, budget_s: float, timeout_s: float
    ) -> list[float]:
        """Returns seconds of each iteration, the slowest rank's.

        Raises:
            GroupError: It cannot be measured here.
        """
        trial_mb = min(params_mb, _TRIAL_MB)
        if trial_mb not in self._best:
            self._best[trial_mb] = self._choose(trial_mb, timeout_s)
        return self._run(self._best[trial_mb], params_mb, max_iterations, budget_s, timeout_s)

    def close(self) -> None:
        """Ends the ranks and removes the program."""
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _command(self, launch: Sequence[str]) -> list[str]:
        if self._program is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tf_smb_bench_")
            self._program = compile_peer(Path(self._folder.name))
        binding = (
            ("--bind-to", "core", "--map-by", "core") if self._pinned else ("--bind-to", "none")
        )
        return [
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(self._workers)),
            *binding,
            *launch,
            str(self._program),
        ]

    def _run(
        self, settings: _Settings, params_mb: float, count: int, budget_s: float, timeout_s: float
    ) -> list[float]:
        if self._group is None or self._launch != settings.launch:
            if self._group is not None:
                self._group.close()
            self._group = start_command("mpirun", self._command(settings.launch))
            self._launch = settings.launch
        rate = model.move_rate("elastic", self._workers)
        request = settings.request(self._operation, params_mb, count, budget_s, rate)
        try:
            (reply,) = self._group.call(request, timeout_s)
        except GroupError:
            self._group.close()
            self._group = None
            raise
        _check(self._operation, reply, rate)
        return [max(times) for times in zip(*reply["times"], strict=True)]

    def _choose(self, params_mb: float, timeout_s: float) -> _Settings:
        """Tries all settings; returns the fastest and says which it is."""
        tried: list[tuple[float, _Settings]] = []
        failure = GroupError("no setting works")
        for settings in self._candidates(params_mb):
            try:
                times = self._run(
                    settings, params_mb, _TRIAL_ITERATIONS, _TRIAL_BUDGET_S, timeout_s
                )
                tried.append((float(np.median(times)), settings))
            except GroupError as error:
                failure = error
        if not tried:
            raise failure
        _, best = min(tried, key=lambda entry: entry[0])
        rate = model.move_rate("elastic", self._workers)
        request = best.request(self._operation, params_mb, 10, 2.0, rate)
        self._say(
            f"MPI {self._what}, {params_mb:g} MB, {self._workers} ranks: best of {len(tried)} "
            f"settings is {best.describe(self._operation)}: echo {shlex.quote(request)} | "
            f"{shlex.join([*self._command(best.launch)[:-1], 'mpi_peer'])}"
        )
        return best

    def _candidates(self, params_mb: float) -> list[_Settings]:
        elements = round(params_mb * model.BYTES_PER_MB / 4)
        chunks = {chunk if chunk < elements else _WHOLE for chunk in self._contest.chunks}
        return [
            _Settings(launch, chunk, locking)
            for launch in (
                [()] if self._contest.as_installed else _LAUNCH_SETTINGS[self._operation]
            )
            for chunk in sorted(chunks)
            for locking in self._contest.lockings
        ]


def _check(what: str, reply: dict[str, Any], rate: float) -> None:
    """Compares the samples of a reply with numpy.

    Raises:
        GroupError: They differ.
    """

    def samples(when: str, of: str) -> np.ndarray:
        return np.array([entry[of] for entry in reply[when]], np.float32)

    before, once, after = (samples(when, "local") for when in ("before", "once", "after"))
    if what == "allreduce":
        expected = np.broadcast_to(before.sum(axis=0), once.shape)
        right = np.allclose(once, expected, rtol=1e-5)
    else:
        centers = [samples(when, "center")[0] for when in ("before", "once", "after")]
        x, center = model.expected_move(
            "elastic", rate, before[-1], centers[0], np.zeros(0, np.float32)
        )
        totals = [
            local.sum(axis=0) + held
            for local, held in zip((before, after), (centers[0], centers[2]), strict=True)
        ]
        right = (
            np.allclose(once[-1], x, rtol=1e-6)
            and np.allclose(centers[1], center, rtol=1e-6)
            and np.allclose(totals[0], totals[1], rtol=1e-3)
        )
    if not right:
        raise GroupError(f"the results of MPI's {what} differ from numpy's")
