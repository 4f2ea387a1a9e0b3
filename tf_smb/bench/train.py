"""`tf-smb bench train`: what several workers and their exchange rule do to accuracy."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tf_smb.bench import train_report, train_runs, values
from tf_smb.bench.rule_specs import ACCEPTED, parse_rules
from tf_smb.bench.train_runs import AUTO, PROCESSES, SIMULATION, Run, TrainOptions
from tf_smb.bench.workload import say
from tf_smb.errors import InvalidArgumentError
from tf_smb.settings import MAX_WORKERS

NAME = "train"
SUMMARY = "accuracy by number of workers and exchange rule"

_DESCRIPTION = f"""\
Trains one small convolutional network with each number of workers and each rule, on the same
number of samples in total, and prints the test accuracy of the center.

- The learning rate of each number of workers and rule is the one of the grid that is best on the
  last training samples (5,000, at most a tenth), which nobody trains on. The test data choose
  nothing.
- Rules: {ACCEPTED}.
  PERIOD: local steps between exchanges. plain: one worker, `model.fit` without a box.
  read-then-accumulate is the papers' form at its worst: all workers read, and only then add.
- processes: real workers under `tf-smb run`. simulation: virtual workers in one process, each with
  its own weights and momentum, on a real box; asynchronous ones take turns round-robin."""

_EPILOG = """\
JSON: one object a line for each training, with workers, rule, seed, learning_rate,
center_accuracy and held_out_accuracy (0 to 1), finite, seconds, bytes_exchanged, seconds_waiting
(of the average worker, in calls on the box), mode, epochs, batch, samples (of a pass), skewed,
settle_steps and chosen (whether this learning rate is the best of the grid, so that the run counts
in the table)."""


def add_parser(commands: Any, formatter_class: type[argparse.HelpFormatter]) -> None:
    """Adds the command to those of `tf-smb bench`."""
    parser = commands.add_parser(
        NAME,
        help=SUMMARY,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=formatter_class,
        allow_abbrev=False,
    )
    parser.set_defaults(markdown=None)
    _add_what(parser.add_argument)
    _add_how(parser.add_argument)
    _add_output(parser.add_argument)


def _add_what(add: Callable[..., Any]) -> None:
    add("--data", type=Path, metavar="FILE", help="an .npz with x_train, y_train, x_test, y_test")
    add(
        "--workers",
        type=values.whole_numbers(1, MAX_WORKERS),
        default=[1, 2, 4, 8, 16],
        metavar="N,...",
        help="numbers of workers (default: 1,2,4,8,16)",
    )
    add(
        "--rules",
        default="plain,delta(10)",
        metavar="RULE,...",
        help="exchange rules and schedules (default: %(default)s)",
    )
    add(
        "--seeds",
        type=values.whole_number(1, 1000),
        default=3,
        metavar="N",
        help="runs with the best learning rate (default: 3)",
    )
    add(
        "--learning-rates",
        type=values.numbers(1e-6, 100),
        default=[0.01, 0.02, 0.05, 0.1],
        metavar="RATE,...",
        help="the grid (default: 0.01,0.02,0.05,0.1)",
    )


def _add_how(add: Callable[..., Any]) -> None:
    add(
        "--epochs",
        type=values.whole_number(1, 10_000),
        default=15,
        metavar="N",
        help="passes over the data, by all workers together (default: 15)",
    )
    add(
        "--batch",
        type=values.whole_number(1, 10_000),
        default=60,
        metavar="N",
        help="samples of a worker's step (default: 60)",
    )
    add(
        "--samples",
        type=values.whole_number(10, 10**9),
        metavar="N",
        help="use the first N training samples only",
    )
    add(
        "--skewed", action="store_true", help="each worker sees only its share of the sorted labels"
    )
    add(
        "--settle-steps",
        type=values.whole_number(0, 10**9),
        default=50,
        metavar="N",
        help="steps in lockstep at the end of asynchronous training, at most a tenth of them: in a "
        "simulation the last ones, in processes more (default: 50)",
    )
    add(
        "--mode",
        choices=[SIMULATION, PROCESSES, AUTO],
        default=AUTO,
        help="auto: processes where each worker has a core (default: auto)",
    )


def _add_output(add: Callable[..., Any]) -> None:
    add("--json", action="store_true", help="one JSON object a line, no table")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy against workers, with matplotlib")
    add(
        "--from",
        dest="results",
        type=Path,
        action="append",
        metavar="FILE",
        help="train nothing: show what --json printed before; may be given again",
    )


def run(parsed: argparse.Namespace, command: str) -> None:
    """Trains, or reads earlier results, and shows what came of it.

    Args:
        parsed: The options.
        command: How to do it again.

    Raises:
        InvalidArgumentError: No data or not such data, or no such rule.
    """
    if parsed.plot is not None:
        train_report.check_plot(parsed.plot)  # before hours of work
    if parsed.results:
        runs = train_report.read_runs(parsed.results)
        if parsed.json:
            _print_json(runs)
    else:
        runs = _train(_options(parsed), parsed.json)
    if not parsed.json:
        print(f"{command}\n{train_report.format_runs(runs)}", flush=True)
    if parsed.plot is not None:
        train_report.plot(runs, parsed.plot)


def _options(parsed: argparse.Namespace) -> TrainOptions:
    rules = parse_rules(parsed.rules)
    if parsed.data is None:
        raise InvalidArgumentError(
            "--data FILE must say what to train on, or --from FILE what to show [SMB-E479]"
        )
    return TrainOptions(
        data=parsed.data,
        workers=parsed.workers,
        rules=rules,
        seeds=parsed.seeds,
        learning_rates=parsed.learning_rates,
        epochs=parsed.epochs,
        batch=parsed.batch,
        skewed=parsed.skewed,
        settle_steps=parsed.settle_steps,
        mode=parsed.mode,
        samples=parsed.samples,
    )


def _train(options: TrainOptions, as_json: bool) -> list[Run]:
    trainer = train_runs.Trainer(options)
    runs = []
    for workers, rule in train_runs.cases(options):
        of_case = train_runs.run_case(
            trainer, workers, rule, tell=lambda run: say(train_report.line(run))
        )
        runs += of_case
        if as_json:
            _print_json(of_case)
    return runs


def _print_json(runs: list[Run]) -> None:
    for run in runs:
        print(json.dumps(asdict(run)), flush=True)
