"""Training by several virtual workers in one process, on a real box.

Each virtual worker has its own weights, momentum and samples, and is a member of a real segment of
a real server; only the order in which they take their turns is decided here. In an asynchronous
phase they take it round-robin: a worker makes its local steps and exchanges, then the next one
does. So every worker's exchange is behind those of all others, as among processes of one speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from tf_smb import rules
from tf_smb.bench.rule_specs import PhaseSpec, RuleSpec
from tf_smb.bench.train_model import Arrays, Loop
from tf_smb.box import Client, Round, Segment, Server
from tf_smb.errors import InvalidArgumentError

_SEGMENT_NAME = "train"
# Between two looks at whether a share is in.
_LOOK_S = 2e-5


@dataclass
class Outcome:
    """What a simulation came to.

    Attributes:
        center: The last weights of the center.
        finite: Whether all weights stayed finite; if not, it was broken off.
        bytes_exchanged: Read from and written to the center, by all workers.
        seconds_waiting: Of the average worker, in calls on the box.
    """

    center: Arrays
    finite: bool
    bytes_exchanged: int
    seconds_waiting: float


@dataclass
class _Worker:
    """A virtual worker: its place in the box, and all that a process of its own would have."""

    segment: Segment
    weights: Arrays
    momenta: Arrays
    batches: np.ndarray
    steps: int = 0


class _NotFiniteError(Exception):
    """The weights have NaN or Inf: there is nothing more to train."""


def settling_steps(rule: RuleSpec, workers: int, steps: int, settle_steps: int) -> int:
    """Returns how many of a worker's steps are made in lockstep at the end.

    As `fit` does it: at most a tenth, and only where several workers are asynchronous until then.
    """
    return min(settle_steps, steps // 10) if rule.ends_asynchronous and workers > 1 else 0


def simulate(
    loop: Loop,
    first: Arrays,
    rule: RuleSpec,
    batches: Sequence[np.ndarray],
    learning_rate: float,
    settle_steps: int = 0,
) -> Outcome:
    """Trains by several virtual workers.

    Args:
        loop: The compiled model.
        first: The weights that all begin with.
        rule: How workers and center exchange; not `plain`.
        batches: Of each worker, which samples each step takes: (steps, batch); as many steps each.
        learning_rate: Of all workers.
        settle_steps: See `settling_steps`.
    """
    with Server() as server, ExitStack() as stack:
        workers = _start(stack, server.address, first, batches, rule.phases[0])
        simulation = _Simulation(loop, workers, learning_rate, stack)
        settle = settling_steps(rule, len(workers), len(batches[0]), settle_steps)
        finite = simulation.run(rule, len(batches[0]) - settle, settle)
        return Outcome(
            workers[0].segment.read(),
            finite,
            simulation.bytes_exchanged,
            simulation.box_s / len(workers),
        )


def _start(
    stack: ExitStack,
    address: str,
    first: Arrays,
    batches: Sequence[np.ndarray],
    phase: PhaseSpec,
) -> list[_Worker]:
    """Returns the workers, members of one segment, all at its center."""
    client = Client(address)
    layout = [(f"weights_{i}", array.shape) for i, array in enumerate(first)]
    workers = []
    for index, own in enumerate(batches):
        segment = stack.enter_context(
            client.create(_SEGMENT_NAME, layout, num_workers=len(batches), exchange_threads=1)
        )
        segment.join(index)
        weights = [array.copy() for array in first]
        workers.append(_Worker(segment, weights, [np.zeros_like(a) for a in first], own))
    for worker in workers:  # all have joined: no start waits
        worker.segment.start(worker.weights, rule=_box_rule(phase))
    return workers


def _box_rule(phase: PhaseSpec) -> rules.ExchangeRule | None:
    """Returns the rule for `exchange`; rounds need none."""
    return None if phase.is_synchronous else phase.rule


class _Simulation:
    """Takes the workers through the phases."""

    def __init__(
        self, loop: Loop, workers: list[_Worker], learning_rate: float, stack: ExitStack
    ) -> None:
        self._loop = loop
        self._workers = workers
        self._learning_rate = learning_rate
        # A round of the box ends for nobody before all have come.
        self._threads = stack.enter_context(ThreadPoolExecutor(len(workers)))
        self._center_bytes = sum(array.nbytes for array in workers[0].weights)
        self.bytes_exchanged = 0
        self.box_s = 0.0

    def run(self, rule: RuleSpec, steps: int, settle: int) -> bool:
        """Makes all steps; returns whether the weights stayed finite."""
        try:
            for phase, count in _lengths(rule.phases, steps):
                self._run_phase(phase, count)
            if settle:
                self._take_center()
                self._in_chunks(settle, 1, self._average)
        except _NotFiniteError:
            return False
        return True

    def _run_phase(self, phase: PhaseSpec, steps: int) -> None:
        period = phase.rule.communication_period
        for worker in self._workers:
            worker.segment.set_rule(_box_rule(phase))
            worker.segment.rebase(worker.weights)  # as after its last exchange
        if phase.is_synchronous:
            self._in_chunks(steps, period, self._average)
        elif isinstance(phase.rule, rules.ReadThenAccumulate):
            rate = phase.rule.moving_rate
            self._in_chunks(steps, period, lambda: self._read_then_accumulate(rate))
        else:
            for count in _chunks(steps, period):
                for worker in self._workers:
                    self._train(worker, count)
                    with self._in_box(transfers=2):
                        worker.segment.exchange(worker.weights, worker.steps)

    def _in_chunks(self, steps: int, period: int, exchange: Callable[[], None]) -> None:
        """Lets all workers train, then exchange together, until the steps are made."""
        for count in _chunks(steps, period):
            for worker in self._workers:
                self._train(worker, count)
            exchange()

    def _train(self, worker: _Worker, count: int) -> None:
        batches = worker.batches[worker.steps : worker.steps + count]
        worker.weights, worker.momenta = self._loop.train(
            worker.weights, worker.momenta, batches, self._learning_rate
        )
        worker.steps += count

    # --- On the box ---

    def _average(self) -> None:
        """One round: every worker's `average` in a thread of its own, for it waits for the rest.

        The shares go in one after the other, for a sum that is rounded the same way every time.
        """
        with self._in_box(transfers=2 * len(self._workers)):
            rounds = []
            for worker in self._workers:
                rounds.append(
                    self._threads.submit(worker.segment.average, worker.weights, 1.0, worker.steps)
                )
                self._wait_for_share(worker, rounds[-1])
            for done in rounds:
                done.result()

    def _wait_for_share(self, worker: _Worker, call: Future[Round]) -> None:
        index = worker.segment.worker_index
        while not call.done() and worker.segment.members()[index].steps < worker.steps:
            time.sleep(_LOOK_S)

    def _read_then_accumulate(self, rate: float) -> None:
        """The papers' form at its worst: all read the center, and only then all add to it."""
        with self._in_box(transfers=2 * len(self._workers)):
            centers = [worker.segment.read() for worker in self._workers]
            for worker, center in zip(self._workers, centers, strict=True):
                pulls = [rate * (x - g) for x, g in zip(worker.weights, center, strict=True)]
                worker.weights = [x - d for x, d in zip(worker.weights, pulls, strict=True)]
                worker.segment.accumulate(pulls)

    def _take_center(self) -> None:
        with self._in_box(transfers=len(self._workers)):
            for worker in self._workers:
                worker.segment.read_into(worker.weights)
                worker.segment.rebase(worker.weights)

    @contextmanager
    def _in_box(self, transfers: int) -> Iterator[None]:
        """Counts bytes and seconds, and tells weights that are not finite from real errors."""
        begin = time.perf_counter()
        try:
            yield
        except InvalidArgumentError:
            if self._all_finite():
                raise
            raise _NotFiniteError from None
        self.box_s += time.perf_counter() - begin
        self.bytes_exchanged += transfers * self._center_bytes

    def _all_finite(self) -> bool:
        return all(
            bool(np.isfinite(array).all()) for worker in self._workers for array in worker.weights
        )


def _lengths(phases: Sequence[PhaseSpec], steps: int) -> Iterator[tuple[PhaseSpec, int]]:
    """Yields each phase that begins before the end, and how many steps it has."""
    ends = [*(phase.begin_step for phase in phases[1:]), steps]
    for phase, end in zip(phases, ends, strict=True):
        count = min(end, steps) - phase.begin_step
        if count > 0:
            yield phase, count


def _chunks(steps: int, period: int) -> Iterator[int]:
    """Yields how many steps to make before each exchange; the last may be fewer."""
    for begin in range(0, steps, period):
        yield min(period, steps - begin)
