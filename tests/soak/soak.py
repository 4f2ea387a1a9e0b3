"""Workers that are killed at random while they share segments: does the box stay right?

    python tests/soak/soak.py --kills 2000 [--seed 7] [--workers 6]

A real server (`tf-smb serve`), real worker processes, SIGKILL at random moments, a new worker
in each dead one's place. Three runs, one after the other:

  updates   exchanges, exact sums by accumulate, exact counts under the segment's lock
  rounds    every worker averages with all others, again and again
  barriers  every worker meets all others, again and again

Afterwards: no call of a survivor took longer than the lease and one second; every center is
finite; sums and counts are exact (at least what was completed, at most that and one for each
kill); within a chunk all elements are the same; nothing is left: no process, no thread or
descriptor of the server beyond those it began with, no entry in /dev/shm.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

LEASE_S = 5.0
SLACK_S = 1.0
CHUNK_ELEMENTS = 65_536  # of float32
CHUNKS = 4
ELEMENTS = CHUNK_ELEMENTS * CHUNKS
# A worker that waits for others, waits for them to die or come, at most.
TIMEOUT_S = 60.0
START_S = 30.0


class Board:
    """What workers report, in memory that outlives them.

    Attributes:
        completed: For each worker, how many calls of a kind came back.
        longest_s: For each worker, the longest call.
    """

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * 4 * 8)
        table = np.frombuffer(self._memory, np.float64).reshape(workers, 4)
        self.sums, self.counts, self.calls, self.longest_s = table.T

    def timed(self, worker: int, call: Callable[[], object]) -> None:
        """Makes a call and notes how long it took."""
        started = time.monotonic()
        call()
        took = time.monotonic() - started
        self.longest_s[worker] = max(self.longest_s[worker], took)
        self.calls[worker] += 1


def check(condition: bool, words: str) -> None:
    """Ends the program, saying what is wrong, unless `condition`."""
    if not condition:
        raise SystemExit(f"FAILED: {words}")


# --- What a worker does ---


def exchange_and_count(server: str, worker: int, board: Board) -> None:
    """Elastic exchanges, accumulates of 1, and a count under the lock, until killed."""
    import tf_smb  # after the fork

    client = tf_smb.Client(server, job_id="soak", timeout_s=START_S)
    model = client.attach("model")
    sums = client.attach("sums")
    count = client.attach("count")
    for segment in (model, count):
        segment.join(worker)
    model.set_rule(tf_smb.ElasticAveraging(1))
    weights = [np.full(ELEMENTS, worker, np.float32)]
    ones = [np.ones(ELEMENTS, np.float32)]

    def add_one() -> None:
        sums.accumulate(ones)
        board.sums[worker] += 1

    def count_one() -> None:
        with count.lock(lease_s=LEASE_S, timeout_s=TIMEOUT_S):
            count.write_slice(0, 0, count.read_slice(0, 0, 1) + 1)
            board.counts[worker] += 1

    while True:
        for call in (lambda: model.exchange(weights), add_one, count_one):
            board.timed(worker, call)


def average(server: str, worker: int, board: Board) -> None:
    """Rounds, until killed."""
    import tf_smb

    segment = tf_smb.Client(server, job_id="soak", timeout_s=START_S).attach("rounds")
    segment.join(worker)
    weights = [np.empty(ELEMENTS, np.float32)]
    while True:
        weights[0].fill(worker)
        board.timed(worker, lambda: segment.average(weights, timeout_s=TIMEOUT_S))
        for chunk in weights[0].reshape(CHUNKS, CHUNK_ELEMENTS):
            if not (chunk == chunk[0]).all():
                os._exit(3)


def meet(server: str, worker: int, board: Board) -> None:
    """Barriers, until killed."""
    import tf_smb

    segment = tf_smb.Client(server, job_id="soak", timeout_s=START_S).attach("barriers")
    segment.join(worker)
    everybody = list(range(len(board.calls)))
    while True:
        board.timed(worker, lambda: segment.barrier(everybody, timeout_s=TIMEOUT_S))


# --- Killing them ---


class Crew:
    """Worker processes, each in the place of a killed one."""

    def __init__(self, work: Callable[[str, int, Board], None], server: str, board: Board) -> None:
        self._work, self._server, self._board = work, server, board
        self.pids: dict[int, int] = {}

    def start(self, worker: int) -> None:
        """Starts one, by a fork of this process, which uses nothing of tf_smb itself."""
        pid = os.fork()
        if pid == 0:
            try:
                self._work(self._server, worker, self._board)
            except BaseException as error:
                print(f"worker {worker}: {type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(2)
        self.pids[worker] = pid

    def kill(self, worker: int) -> None:
        """Kills one; it must have been alive."""
        pid = self.pids.pop(worker)
        check(os.waitpid(pid, os.WNOHANG) == (0, 0), f"worker {worker} ended by itself")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_for_calls(board: Board, workers: list[int], calls: int) -> None:
    """Returns once each of the workers made so many more calls.

    Raises:
        SystemExit: They hang.
    """
    goals = {worker: board.calls[worker] + calls for worker in workers}
    deadline = time.monotonic() + START_S
    while any(board.calls[worker] < goal for worker, goal in goals.items()):
        check(time.monotonic() < deadline, f"no progress in {START_S:g} s: {board.calls}")
        time.sleep(0.001)


def kill_at_random(crew: Crew, board: Board, kills: int, rng: random.Random) -> None:
    """Starts all workers, and kills and replaces one after the other."""
    workers = list(range(len(board.calls)))
    for worker in workers:
        crew.start(worker)
    wait_for_calls(board, workers, 1)
    for _ in range(kills):
        worker = rng.choice(workers)
        crew.kill(worker)
        crew.start(worker)
        # Sometimes it comes to work, sometimes not; the others go on.
        others = [other for other in workers if other != worker]
        wait_for_calls(board, workers if rng.random() < 0.5 else others, 1)
        time.sleep(rng.random() * 0.02)
    for worker in workers:
        crew.kill(worker)


# --- The server, and what it may not keep ---


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """A server of its own; address and process id."""
    name = f"soak-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tf_smb.cli", "serve", "--name", name]
        + ["--lease-seconds", str(LEASE_S)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        check("serving" in process.stdout.readline(), "the server did not start")
        yield f"shm://{name}", process.pid
    finally:
        process.terminate()
        process.wait(START_S)


def held_by(pid: int) -> tuple[int, int]:
    """Returns how many descriptors and threads a process has."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def tool(script: str, *arguments: str) -> str:
    """Runs Python with tf_smb in a process of its own, so that this one never attaches."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], check=True, capture_output=True, text=True
    ).stdout


CREATE = """
import sys, numpy as np, tf_smb
client = tf_smb.Client(sys.argv[1], job_id="soak")
elements, workers = int(sys.argv[2]), int(sys.argv[3])
for name, shape, dtype in (("model", elements, "float32"), ("sums", elements, "float32"),
                           ("count", 1, "float64"), ("rounds", elements, "float32"),
                           ("barriers", 1, "float32")):
    client.create(name, [("w", (shape,), dtype)], num_workers=workers).detach()
"""
READ = """
import sys, numpy as np, tf_smb
client = tf_smb.Client(sys.argv[1], job_id="soak")
np.savez(sys.argv[2], **{name: client.attach(name).read()[0]
                         for name in ("model", "sums", "count", "rounds")})
"""


def read_centers(server: str) -> dict[str, np.ndarray]:
    """Returns the centers of all segments."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "centers.npz")
        tool(READ, server, path)
        with np.load(path) as centers:
            return dict(centers)


def wait_until(condition: Callable[[], bool], words: str) -> None:
    """Returns once `condition` holds.

    Raises:
        SystemExit: It does not come to hold.
    """
    deadline = time.monotonic() + START_S
    while not condition():
        check(time.monotonic() < deadline, words)
        time.sleep(0.05)


# --- The run ---


def check_counts(centers: dict[str, np.ndarray], board: Board, kills: int) -> None:
    """Sums and counts: what was completed, and for each kill one more at most."""
    completed = board.sums.sum()
    for number, chunk in enumerate(centers["sums"].reshape(CHUNKS, CHUNK_ELEMENTS)):
        low, high = float(chunk.min()), float(chunk.max())
        check(low == high, f"chunk {number} holds sums from {low} to {high}")
        check(
            completed <= low <= completed + kills,
            f"chunk {number} holds {low}; {completed} accumulates were completed, {kills} killed",
        )
    counted, count = board.counts.sum(), float(centers["count"][0])
    check(
        counted <= count <= counted + kills,
        f"the count is {count}; {counted} were completed, {kills} workers killed",
    )


def run(workers: int, kills: int, seed: int) -> None:
    """All of it; ends the program at the first thing that is wrong."""
    rng = random.Random(seed)
    in_shm = set(os.listdir("/dev/shm"))
    with serving() as (server, server_pid):
        tool(CREATE, server, str(ELEMENTS), str(workers))
        # The last client's thread ends after its process.
        time.sleep(0.5)
        before = held_by(server_pid)
        longest_s = 0.0
        shares = {exchange_and_count: kills - kills // 4 * 2, average: kills // 4, meet: kills // 4}
        for work, share in shares.items():
            board = Board(workers)
            started = time.monotonic()
            kill_at_random(Crew(work, server, board), board, share, rng)
            longest_s = max(longest_s, float(board.longest_s.max()))
            print(
                f"{work.__name__}: {share} kills in {time.monotonic() - started:.1f} s, "
                f"{int(board.calls.sum())} calls, the longest {board.longest_s.max():.3f} s",
                flush=True,
            )
            check(
                longest_s <= LEASE_S + SLACK_S,
                f"a call took {longest_s:.1f} s; the lease is {LEASE_S:g} s",
            )
            if work is exchange_and_count:
                check_counts(read_centers(server), board, share + workers)
        for name, center in read_centers(server).items():
            check(bool(np.isfinite(center).all()), f"the center of '{name}' is not finite")
        wait_until(
            lambda: held_by(server_pid) == before,
            f"the server began with {before} descriptors and threads: {held_by(server_pid)}",
        )
    left = {name for name in os.listdir("/dev/shm") if name.startswith("tf_smb")} - in_shm
    check(not left, f"left in /dev/shm: {sorted(left)}")
    print(f"passed: {kills} kills of {workers} workers, the longest call {longest_s:.3f} s")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=None)
    parsed = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if parsed.seed is None else parsed.seed
    print(f"seed {seed}", flush=True)
    run(parsed.workers, parsed.kills, seed)


if __name__ == "__main__":
    main()
