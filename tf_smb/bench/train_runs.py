"""The runs of `tf-smb bench train`: which there are, and what each came to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tf_smb.bench.rule_specs import RuleSpec
from tf_smb.errors import InvalidArgumentError

if TYPE_CHECKING:  # they import TensorFlow
    from tf_smb.bench.train_model import Data, Loop

SIMULATION = "simulation"
PROCESSES = "processes"
AUTO = "auto"


@dataclass(frozen=True)
class TrainOptions:
    """What to train.

    Attributes:
        data: An .npz file.
        workers: Numbers of workers.
        rules: How they exchange.
        seeds: How many.
        learning_rates: The grid: the best one for each number of workers and rule is taken.
        epochs: Passes over the data, by all workers together.
        batch: Of a worker.
        skewed: Whether each worker sees only its share of the labels.
        settle_steps: At most, in lockstep at the end of asynchronous training.
        mode: "simulation", "processes" or "auto".
        samples: How many training samples are used; None: all.
    """

    data: Path
    workers: Sequence[int]
    rules: Sequence[RuleSpec]
    seeds: int
    learning_rates: Sequence[float]
    epochs: int
    batch: int
    skewed: bool
    settle_steps: int
    mode: str
    samples: int | None = None


@dataclass(frozen=True)
class Run:
    """One training, and a line of JSON.

    Attributes:
        workers: How many.
        rule: As on the command line.
        seed: Of the first weights and of the order of samples.
        learning_rate: Of every worker.
        center_accuracy: Of the center on the test data, from 0 to 1.
        held_out_accuracy: On the training samples that are kept for choosing the learning rate.
        finite: Whether all weights stayed finite; if not, training was broken off.
        seconds: Of the training, in all.
        bytes_exchanged: Read from and written to the center, by all workers.
        seconds_waiting: Of the average worker, in calls on the box.
        mode: "simulation" or "processes".
        epochs: Passes over the data, by all workers together.
        batch: Of a worker.
        samples: Of a pass.
        skewed: Whether each worker saw only its share of the labels.
        settle_steps: The limit that was given.
        chosen: Whether its learning rate is the best of the grid.
    """

    workers: int
    rule: str
    seed: int
    learning_rate: float
    center_accuracy: float
    held_out_accuracy: float
    finite: bool
    seconds: float
    bytes_exchanged: int
    seconds_waiting: float
    mode: str
    epochs: int
    batch: int
    samples: int
    skewed: bool
    settle_steps: int
    chosen: bool = False

    @property
    def diverged(self) -> bool:
        """Whether it learned nothing that lasted: no better than twice a guess at ten classes."""
        return not self.finite or self.center_accuracy < 0.2


def cases(options: TrainOptions) -> list[tuple[int, RuleSpec]]:
    """Returns the numbers of workers and rules to train with; `plain` is one worker's."""
    return [
        (workers, rule)
        for workers in options.workers
        for rule in options.rules
        if workers == 1 or not rule.is_plain
    ]


def mode_of(options: TrainOptions, workers: int, rule: RuleSpec) -> str:
    """Returns "simulation" or "processes"; `plain` is never simulated."""
    if rule.is_plain:
        return PROCESSES
    if options.mode != AUTO:
        return options.mode
    return PROCESSES if workers <= len(os.sched_getaffinity(0)) else SIMULATION


def run_case(
    trainer: Trainer, workers: int, rule: RuleSpec, tell: Callable[[Run], None]
) -> list[Run]:
    """Tries the grid with seed 0, and the best learning rate with the other seeds.

    Args:
        trainer: Makes the runs.
        workers: How many.
        rule: How they exchange.
        tell: Called with each run as soon as it is over.

    Returns:
        All runs, those of the best learning rate marked.
    """

    def train(seed: int, learning_rate: float) -> Run:
        run = trainer.train(workers, rule, seed, learning_rate)
        tell(run)
        return run

    grid = [train(0, rate) for rate in trainer.options.learning_rates]
    best = max(grid, key=lambda run: (run.finite, run.held_out_accuracy))
    others = [train(seed, best.learning_rate) for seed in range(1, trainer.options.seeds)]
    return [replace(run, chosen=run is best) for run in grid] + [
        replace(run, chosen=True) for run in others
    ]


class Trainer:
    """Makes runs on one set of data."""

    def __init__(self, options: TrainOptions) -> None:
        from tf_smb.bench import train_model

        self.options = options
        self._data: Data = train_model.load_data(options.data, options.samples)
        most = max(options.workers)
        if self._steps(most) < 1:
            raise InvalidArgumentError(
                f"{len(self._data.train.y)} training samples in {options.epochs} passes are fewer "
                f"than one batch of {options.batch} for each of {most} workers [SMB-E478]"
            )

    def train(self, workers: int, rule: RuleSpec, seed: int, learning_rate: float) -> Run:
        """Trains once."""
        mode = mode_of(self.options, workers, rule)
        begin = time.perf_counter()
        if rule.is_plain:
            result = self._train_plain(seed, learning_rate)
        elif mode == PROCESSES:
            result = self._train_in_processes(workers, rule, seed, learning_rate)
        else:
            result = self._simulate(workers, rule, seed, learning_rate)
        return Run(
            workers=workers,
            rule=rule.text,
            seed=seed,
            learning_rate=learning_rate,
            seconds=time.perf_counter() - begin,
            mode=mode,
            epochs=self.options.epochs,
            batch=self.options.batch,
            samples=len(self._data.train.y),
            skewed=self.options.skewed,
            settle_steps=self.options.settle_steps,
            **result,
        )

    def _steps(self, workers: int) -> int:
        """Returns how many steps each worker makes, of all samples that there are."""
        samples = self.options.epochs * len(self._data.train.y)
        return samples // (self.options.batch * workers)

    def _batches(self, workers: int, seed: int) -> list[Any]:
        from tf_smb.bench import train_model

        shares = train_model.divide(self._data.train.y, workers, self.options.skewed)
        return [
            train_model.make_batches(
                share, self._steps(workers), self.options.batch, (seed, worker)
            )
            for worker, share in enumerate(shares)
        ]

    def _train_plain(self, seed: int, learning_rate: float) -> dict[str, Any]:
        from tf_smb.bench import train_model

        (batches,) = self._batches(1, seed)
        model = train_model.fit_plain(self._data, batches, learning_rate, seed)
        return {
            **train_model.measure(model, self._data),
            "bytes_exchanged": 0,
            "seconds_waiting": 0.0,
        }

    def _simulate(
        self, workers: int, rule: RuleSpec, seed: int, learning_rate: float
    ) -> dict[str, Any]:
        from tf_smb.bench import simulation, train_model

        outcome = simulation.simulate(
            self._loop,
            train_model.first_weights(seed, self._data.train),
            rule,
            self._batches(workers, seed),
            learning_rate,
            self.options.settle_steps,
        )
        return {
            **self._loop.measure(outcome.center, self._data),
            "finite": outcome.finite,
            "bytes_exchanged": outcome.bytes_exchanged,
            "seconds_waiting": outcome.seconds_waiting,
        }

    def _train_in_processes(
        self, workers: int, rule: RuleSpec, seed: int, learning_rate: float
    ) -> dict[str, Any]:
        from tf_smb.bench import train_worker

        options = self.options
        job = train_worker.Job(
            data=str(options.data.absolute()),
            samples=options.samples,
            rule=rule.text,
            epochs=options.epochs,
            batch=options.batch,
            skewed=options.skewed,
            settle_steps=options.settle_steps,
            seed=seed,
            learning_rate=learning_rate,
        )
        return asdict(train_worker.train_in_processes(job, workers))

    @cached_property
    def _loop(self) -> Loop:
        from tf_smb.bench import train_model

        return train_model.Loop(self._data.train)
