"""The command line of the benchmark: `tf-smb bench WORKLOAD`."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tf_smb.bench import model, train, values
from tf_smb.bench.contestants import WrongResultError
from tf_smb.bench.groups import GroupError
from tf_smb.bench.report import HOW, Section, format_markdown, format_table
from tf_smb.bench.result import json_help
from tf_smb.bench.running import run
from tf_smb.bench.workload import Options, Workload
from tf_smb.bench.workloads import WORKLOADS
from tf_smb.errors import Error, InvalidArgumentError

_BAD_USAGE = 2
_PEERS = ("limit", "mpi", "tf")
_ALL = "all"
_DOCUMENT = Path("docs/benchmarks.md")
_ALL_SUMMARY = f"a standard selection of each, written to {_DOCUMENT}"


class _ListFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the names of workloads and what they are on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=18, width=100)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_USAGE, f"{self.prog}: {message}\n")


# --- Values ------------------------------------------------------------------


_sizes = values.numbers(0.5, 100_000)
_counts = values.whole_numbers(1, 64)


def _names(known: Sequence[str], text: str, also: str = "") -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"must be {also}of {', '.join(known)}, separated by commas, got {text!r} [SMB-E457]"
            )
    return names


def _dtypes(text: str) -> list[str]:
    return _names(model.DTYPES, text)


def _peers(text: str) -> frozenset[str]:
    if text in ("all", "none"):
        return frozenset(_PEERS if text == "all" else ())
    return frozenset(_names(_PEERS, text, also="all, none, or "))


# --- Options -----------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    """An option of those workloads that have a default for it."""

    flag: str
    parse: Callable[[str], Any]
    metavar: str
    help: str


_OPTIONS = {
    "params_mb": _Option("--params-mb", _sizes, "MB,...", "sizes of the model"),
    "workers": _Option("--workers", _counts, "N,...", "numbers of workers"),
    "dtypes": _Option("--dtypes", _dtypes, "NAME,...", f"of {', '.join(model.DTYPES)}"),
    "threads": _Option(
        "--threads",
        values.whole_number(0, 64),
        "N",
        "of an operation on the box; 0: one for each core of the worker",
    ),
    "seconds": _Option("--seconds", values.number(0.1, 3600), "S", "how long the workers go on"),
    "peers": _Option(
        "--peers", _peers, "NAME,...", f"what to compare with: {', '.join(_PEERS)}; all or none"
    ),
}


def _default_text(value: Any) -> str:
    if isinstance(value, frozenset):
        return "all"
    if isinstance(value, tuple):
        return ",".join(part if isinstance(part, str) else f"{part:g}" for part in value)
    return f"{value:g}"


def _add_common(parser: argparse.ArgumentParser, markdown: Path | None) -> None:
    parser.add_argument(
        "--repeats",
        type=values.whole_number(1, 1000),
        metavar="N",
        help="rounds, in each of which everybody takes a turn "
        f"(default: {Options.repeats if markdown is None else 'as the selection says'})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, no table")
    parser.add_argument(
        "--markdown",
        type=Path,
        default=markdown,
        metavar="FILE",
        help="write the tables to a file too" + (f" (default: {markdown})" if markdown else ""),
    )


def _add_workload(commands: Any, workload: Workload) -> None:
    parser = commands.add_parser(
        workload.name,
        help=workload.summary,
        description=f"{workload.summary[0].upper()}{workload.summary[1:]}.\n\n"
        f"{workload.method}\n\n{HOW}",
        epilog=json_help(workload),
        formatter_class=_ListFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--transport", choices=["shm"], default="shm", help="how the workers reach the box"
    )
    for name, option in _OPTIONS.items():
        if name in workload.defaults:
            default = workload.defaults[name]
            parser.add_argument(
                option.flag,
                type=option.parse,
                default=default,
                metavar=option.metavar,
                help=f"{option.help} (default: {_default_text(default)})",
            )
    if "rule" in workload.defaults:
        parser.add_argument(
            "--rule",
            choices=["elastic", "delta"],
            default="elastic",
            help="what an exchange computes",
        )
    if "peers" in workload.defaults:
        parser.add_argument(
            "--skip-op", action="store_true", help="leave out the exchange from TensorFlow"
        )
    _add_common(parser, markdown=None)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tf-smb bench",
        description="Measures the box, and checks what it computes.",
        epilog="tf-smb bench WORKLOAD --help says how it is measured, and what --json has.",
        formatter_class=_ListFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    for workload in WORKLOADS.values():
        _add_workload(commands, workload)
    train.add_parser(commands, _ListFormatter)
    _add_common(commands.add_parser(_ALL, help=_ALL_SUMMARY, description=_ALL_SUMMARY), _DOCUMENT)
    return parser


# --- Running -----------------------------------------------------------------


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
    if parsed.markdown is not None and not parsed.markdown.absolute().parent.is_dir():
        print(f"tf-smb bench: there is no folder for {parsed.markdown} [SMB-E458]", file=sys.stderr)
        return _BAD_USAGE
    try:
        with _ended_by_sigterm():
            _run(parsed, shlex.join(["tf-smb", "bench", *argv]))
            return 0
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    except (Error, GroupError, WrongResultError, TimeoutError, OSError) as error:
        print(f"tf-smb bench: {error}", file=sys.stderr)
        return _BAD_USAGE if isinstance(error, InvalidArgumentError) else 1


def _run(parsed: argparse.Namespace, command: str) -> None:
    if parsed.workload == train.NAME:
        train.run(parsed, command)
        return
    sections: list[Section] = []
    for workload, options, section_command in _selection(parsed, command):
        sections.append(_measure(workload, options, section_command, parsed.json))
        if parsed.markdown is not None:  # after each: the next one may fail, after an hour
            parsed.markdown.write_text(format_markdown(sections, command))


def _selection(parsed: argparse.Namespace, command: str) -> Iterator[tuple[Workload, Options, str]]:
    """Yields what to measure, and the command that measures just that."""
    if parsed.workload != _ALL:
        yield WORKLOADS[parsed.workload], _options(parsed), command
        return
    for workload in WORKLOADS.values():
        for arguments in workload.standard:
            argv = [workload.name, *arguments]
            if parsed.repeats is not None:
                argv += ["--repeats", str(parsed.repeats)]
            yield (
                workload,
                _options(_make_parser().parse_args(argv)),
                shlex.join(["tf-smb", "bench", *argv]),
            )


def _options(parsed: argparse.Namespace) -> Options:
    workload = WORKLOADS[parsed.workload]
    values = {name: getattr(parsed, name) for name in workload.defaults}
    if "peers" in values and not parsed.skip_op:
        values["peers"] |= {"op"}
    if parsed.repeats is not None:
        values["repeats"] = parsed.repeats
    return Options(**values)


def _measure(workload: Workload, options: Options, command: str, as_json: bool) -> Section:
    results = []
    for result in run(workload, options):
        results.append(result)
        if as_json:
            print(json.dumps(result.to_json()), flush=True)
    if not as_json:
        print(f"{command}\n{format_table(workload, results)}", flush=True)
    return Section(workload, command, results)
