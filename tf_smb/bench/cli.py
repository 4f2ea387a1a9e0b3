"""The command line of the benchmark: `tf-smb bench exchange`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tf_smb.bench import exchange, report
from tf_smb.bench.contestants import WrongResultError
from tf_smb.bench.groups import GroupError
from tf_smb.errors import Error

_BAD_USAGE = 2
_PEERS = ("limit", "mpi", "tf")

_DESCRIPTION = f"""\
Measures how long workers take to exchange a model with the box, next to what memory allows
and to what OpenMPI and TensorFlow offer, in one run, in turns.

{report.METHOD}"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_USAGE, f"{self.prog}: {message}\n")


def _numbers(text: str, lowest: float, highest: float, whole: bool) -> list[float]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not lowest <= number <= highest or (whole and number != int(number)):
            what = "whole numbers" if whole else "numbers"
            raise argparse.ArgumentTypeError(
                f"must be {what} from {lowest:g} to {highest:g}, separated by commas, got {text!r}"
            )
        numbers.append(number)
    return numbers


def _sizes(text: str) -> list[float]:
    return _numbers(text, 0.5, 100_000, whole=False)


def _counts(text: str) -> list[int]:
    return [int(number) for number in _numbers(text, 1, 64, whole=True)]


def _rounds(text: str) -> int:
    rounds = _numbers(text, 1, 1000, whole=True)
    if len(rounds) != 1:
        raise argparse.ArgumentTypeError(f"must be one number, got {text!r}")
    return int(rounds[0])


def _peers(text: str) -> frozenset[str]:
    if text in ("all", "none"):
        return frozenset(_PEERS if text == "all" else ())
    names = text.split(",")
    for name in names:
        if name not in _PEERS:
            raise argparse.ArgumentTypeError(
                f"must be all, none, or of {', '.join(_PEERS)}, separated by commas, got {text!r}"
            )
    return frozenset(names)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tf-smb bench", description="Benchmarks of tf_smb.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="exchange")
    bench = commands.add_parser(
        "exchange",
        help="the exchange of a model with the box",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "--transport", choices=["shm"], default="shm", help="how the workers reach the box"
    )
    bench.add_argument(
        "--params-mb",
        type=_sizes,
        default=[1.0, 10.0, 100.0, 1000.0],
        metavar="MB,...",
        help="sizes of the model (default: 1,10,100,1000)",
    )
    bench.add_argument(
        "--workers",
        type=_counts,
        default=[1, 2, 4],
        metavar="N,...",
        help="numbers of workers (default: 1,2,4)",
    )
    bench.add_argument(
        "--rule", choices=["elastic", "delta"], default="elastic", help="what an exchange computes"
    )
    bench.add_argument(
        "--peers",
        type=_peers,
        default=frozenset(_PEERS),
        metavar="NAME,...",
        help="limit, mpi, tf; all (the default) or none: what to compare with",
    )
    bench.add_argument(
        "--skip-op", action="store_true", help="leave out the exchange from TensorFlow"
    )
    bench.add_argument(
        "--repeats",
        type=_rounds,
        default=5,
        metavar="N",
        help="rounds, in each of which everybody takes a turn (default: 5)",
    )
    bench.add_argument("--json", action="store_true", help="one JSON object a line, no table")
    bench.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table to a file too"
    )
    return parser


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception, so that it cleans up as Ctrl-C does."""

    def end(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit code: 2 for bad options, 130 after Ctrl-C."""
    try:
        parsed = _make_parser().parse_args(argv)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else _BAD_USAGE
    try:
        with _ended_by_sigterm():
            return _run(parsed, argv)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (Error, GroupError, WrongResultError, TimeoutError, OSError) as error:
        print(f"tf-smb bench: {error}", file=sys.stderr)
        return 1


def _run(parsed: argparse.Namespace, argv: Sequence[str]) -> int:
    if parsed.markdown is not None and not parsed.markdown.absolute().parent.is_dir():
        print(f"tf-smb bench: there is no folder for {parsed.markdown}", file=sys.stderr)
        return _BAD_USAGE
    options = exchange.Options(
        params_mb=parsed.params_mb,
        workers=parsed.workers,
        rule=parsed.rule,
        peers=parsed.peers | (frozenset() if parsed.skip_op else {"op"}),
        rounds=parsed.repeats,
    )
    results = []
    for result in exchange.run(options):
        results.append(result)
        if parsed.json:
            print(json.dumps(result.to_json()), flush=True)
    if not parsed.json:
        print(report.format_table(results))
    if parsed.markdown is not None:
        command = shlex.join(["tf-smb", "bench", *argv])
        parsed.markdown.write_text(report.format_markdown(results, command))
    return 0
