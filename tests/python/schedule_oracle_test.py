"""Schedules of many workers, across their boundaries, against an independent simulation in numpy.

A script of events (steps of workers in any order, joins, leaves) runs on real segments and on the
oracle. The oracle does the same float32 operations in the same order: it must give the same bits.
Some trajectories are frozen in tests/golden, so that a change of both would be seen, too:
`python tests/python/schedule_oracle_test.py` freezes them anew.
"""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tf_smb import (
    Client,
    DeltaAveraging,
    ElasticAveraging,
    PeriodicAveraging,
    Schedule,
    Server,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "trajectories.json"
# Beside small shapes one that does not fit into a chunk of 256 KiB.
SHAPES = [(3, 2), (), (65_600,)]
EVENTS = {1: 150, 2: 250, 5: 500, 16: 1200}
SCHEDULES = {
    "periodic": Schedule([(0, PeriodicAveraging(3))]),
    "sync, then async": Schedule([(0, PeriodicAveraging(1)), (11, ElasticAveraging(4))]),
    "five phases": Schedule(
        [
            (0, PeriodicAveraging(4)),  # 10 is no multiple of 4
            (10, ElasticAveraging(3)),
            (20, DeltaAveraging(2)),
            (29, PeriodicAveraging(2)),
            (36, DeltaAveraging(5, gain=1.5)),
        ]
    ),
    "async, then sync": Schedule(
        [(0, DeltaAveraging(4)), (9, ElasticAveraging(2, 0.3)), (17, PeriodicAveraging(5))]
    ),
}


class Numbers:
    """Numbers that are the same in every version of numpy."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 7919 + 1

    def below(self, count: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % count

    def arrays(self) -> list[np.ndarray]:
        arrays = []
        for shape in SHAPES:
            size = int(np.prod(shape, dtype=np.int64))
            ramp = (np.arange(size, dtype=np.uint64) + self.below(2**31)) * 2654435761 % 2**32
            values = ramp.astype(np.float64) / 2**31 - 1
            arrays.append(np.asarray(values.reshape(shape), np.float32))
        return arrays


class SimulatedWorker:
    def __init__(self, x: list[np.ndarray], phase: int) -> None:
        self.x = x
        self.base = [a.copy() for a in x]
        self.steps = 0
        self.exchanged_at = 0
        self.phase = phase
        self.closed = False  # has made the last exchange of its phase
        self.waits = False  # in a round

    @property
    def since(self) -> int:
        return self.steps - self.exchanged_at


class SimulatedJob:
    """The docstrings of `Schedule` and the rules, for workers that take turns."""

    def __init__(self, schedule: Schedule) -> None:
        self.phases = schedule.phases
        self.phase = 0
        self.center: list[np.ndarray] | None = None
        self.workers: dict[int, SimulatedWorker] = {}
        self.round: set[int] = set()
        self.log: list[tuple[int, int]] = []  # (worker, phase) as they enter

    def start(self, number: int, x: list[np.ndarray]) -> None:
        if self.center is None:
            self.center = [a.copy() for a in x]
        self.workers[number] = SimulatedWorker([a.copy() for a in self.center], self.phase)
        self.log.append((number, self.phase))

    def leave(self, number: int) -> list[int]:
        del self.workers[number]
        self.round.discard(number)
        return self._close_round()

    def step(self, number: int, change: list[np.ndarray]) -> None:
        worker = self.workers[number]
        worker.x = [a + d for a, d in zip(worker.x, change, strict=True)]
        worker.steps += 1

    def is_due(self, number: int) -> bool:
        worker = self.workers[number]
        if worker.closed and self._try_end(worker.phase):
            self._enter(number)
        ends = self._ends(worker) and worker.since > 0 and not worker.closed
        return (
            self.phase > worker.phase
            or ends
            or worker.since >= self._rule(worker).communication_period
        )

    def exchange(self, number: int) -> list[int]:
        """Returns the workers that may go on."""
        worker = self.workers[number]
        if isinstance(self._rule(worker), PeriodicAveraging):
            if not self.round:
                self.round = set(self.workers)
            worker.waits = True
            return self._close_round()
        self._move(worker)
        worker.exchanged_at = worker.steps
        if self._ends(worker):
            worker.closed = True
            self._try_end(worker.phase)
        if self.phase > worker.phase:
            self._enter(number)
        return [number]

    def _rule(self, worker: SimulatedWorker):
        return self.phases[worker.phase][1]

    def _ends(self, worker: SimulatedWorker) -> bool:
        following = worker.phase + 1
        return following < len(self.phases) and worker.steps >= self.phases[following][0]

    def _try_end(self, phase: int) -> bool:
        if self.phase == phase and all(w.phase >= phase for w in self.workers.values()):
            self.phase += 1
        return self.phase > phase

    def _enter(self, number: int) -> None:
        worker = self.workers[number]
        while worker.phase < self.phase:
            worker.phase += 1
            self.log.append((number, worker.phase))
        worker.closed = False
        worker.base = [a.copy() for a in worker.x]

    def _move(self, worker: SimulatedWorker) -> None:
        rule, live = self._rule(worker), len(self.workers)
        if live == 1:
            self.center = [a.copy() for a in worker.x]
            worker.base = [a.copy() for a in worker.x]
        elif isinstance(rule, DeltaAveraging):
            rate = np.float32(rule.gain / live)
            self.center = [
                g + rate * (a - b)
                for g, a, b in zip(self.center, worker.x, worker.base, strict=True)
            ]
            worker.x = [g.copy() for g in self.center]
            worker.base = [g.copy() for g in self.center]
        else:
            rate = np.float32(0.9 / live if rule.moving_rate is None else rule.moving_rate)
            moves = [rate * (a - g) for a, g in zip(worker.x, self.center, strict=True)]
            worker.x = [a - d for a, d in zip(worker.x, moves, strict=True)]
            self.center = [g + d for g, d in zip(self.center, moves, strict=True)]

    def _close_round(self) -> list[int]:
        if not self.round or not all(self.workers[n].waits for n in self.round):
            return []
        members, self.round = sorted(self.round), set()
        weight, mean = 0.0, []
        for number in members:
            worker = self.workers[number]
            weight += worker.since
            rate = np.float32(worker.since / weight)
            mean = (
                [g + rate * (a - g) for g, a in zip(mean, worker.x, strict=True)]
                if mean
                else [a.copy() for a in worker.x]
            )
        if any(self._ends(self.workers[number]) for number in members):
            self.phase += 1
        self.center = mean
        for number in members:
            worker = self.workers[number]
            worker.x = [g.copy() for g in mean]
            worker.base = [g.copy() for g in mean]
            worker.exchanged_at = worker.steps
            worker.waits = False
            self._enter(number)
        return members


class RealWorker:
    def __init__(self, client: Client, number: int, schedule: Schedule, first) -> None:
        self.x = first
        layout = [(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
        self.segment = client.create("run", layout, exchange_threads=1 + number % 2)
        self.segment.start(self.x, worker_index=number, schedule=schedule)
        self.segment.set_training(True)
        self.steps = 0
        self.pending: Future | None = None

    def exchange(self) -> str:
        return self.segment.exchange(self.x, steps=self.steps, announce=None)


def play(name: str, num_workers: int) -> dict:
    """Runs a script on segments and the oracle; returns what came of it."""
    schedule, numbers = SCHEDULES[name], Numbers(num_workers)
    job, real = SimulatedJob(schedule), {}

    def compare(number: int) -> None:
        worker = job.workers[number]
        assert real[number].segment.phase == worker.phase
        pairs = [(real[number].x, worker.x)]
        if not job.round:  # else shares are coming in
            pairs.append((real[number].segment.read(), job.center))
        for ours, theirs in pairs:
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a, b)

    def start(number: int) -> None:
        first = numbers.arrays()
        job.start(number, first)
        real[number] = RealWorker(client, number, schedule, first)
        compare(number)

    def go_on(number_list: list[int]) -> None:
        for number in number_list:
            if real[number].pending is not None:
                assert real[number].pending.result(timeout=60) in ("replaced", "moved")
                real[number].pending = None
        for number in number_list:
            compare(number)

    with Server() as server, ThreadPoolExecutor(num_workers) as pool, ExitStack() as stack:
        # After a failure nobody waits in a round for long.
        stack.callback(lambda: [r.segment.leave() for r in real.values() if r.pending is None])
        client = Client(server.address)
        late = num_workers - 1 if num_workers > 2 else None
        for number in range(num_workers):
            if number != late:
                start(number)
        for event in range(EVENTS[num_workers]):
            number = numbers.below(num_workers)
            nobody_waits = not job.round
            if number == late and number not in real:
                if nobody_waits and event > EVENTS[num_workers] // 4:
                    start(number)
                continue
            if number not in job.workers or job.workers[number].waits:
                continue
            leaves = num_workers > 2 and number == 1 and event > EVENTS[num_workers] // 2
            if leaves:
                real[number].segment.leave()
                go_on(job.leave(number))
                continue
            change = numbers.arrays()
            job.step(number, change)
            for x, d in zip(real[number].x, change, strict=True):
                x += d
            real[number].steps += 1
            due = real[number].segment.is_due(real[number].steps)
            assert due == job.is_due(number)
            if not due:
                continue
            if isinstance(job._rule(job.workers[number]), PeriodicAveraging):
                real[number].pending = pool.submit(real[number].exchange)
            else:
                real[number].exchange()
            go_on(job.exchange(number))
        # Whoever still waits in a round is freed by the others' leaving.
        for number in [n for n, worker in job.workers.items() if not worker.waits]:
            real[number].segment.leave()
            go_on(job.leave(number))
        result = {
            "phases": job.log,
            "steps": {n: worker.steps for n, worker in job.workers.items()},
            "center": [hex_of(a) for a in (job.center or [])],
        }
    return result


def hex_of(array: np.ndarray) -> list[str]:
    """The first elements, exactly, and the sum of all."""
    flat = np.asarray(array, np.float64).ravel()
    return [float(value).hex() for value in [*flat[:4], math.fsum(flat)]]


CASES = [(name, workers) for name in SCHEDULES for workers in EVENTS]


@pytest.mark.parametrize(("name", "workers"), CASES)
def test_schedule(name, workers):
    result = play(name, workers)
    phases: dict[int, list[int]] = {}
    for number, phase in result["phases"]:
        phases.setdefault(number, []).append(phase)
    for number, seen in phases.items():
        assert seen == list(range(seen[0], seen[-1] + 1)), (number, seen)  # none is left out
    last = len(SCHEDULES[name].phases) - 1
    assert all(seen[-1] == last for n, seen in phases.items() if n != 1 or workers <= 2)
    frozen = json.loads(GOLDEN.read_text())[f"{name}, {workers} workers"]
    assert json.loads(json.dumps(result)) == frozen


if __name__ == "__main__":
    trajectories = {f"{name}, {workers} workers": play(name, workers) for name, workers in CASES}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(trajectories, indent=1) + "\n")
    sys.stdout.write(f"{GOLDEN}: {len(trajectories)} trajectories\n")
