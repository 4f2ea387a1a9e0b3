"""The command line: `tf-smb run`, `serve`, `ls`, `stat`, `rm`, `bench`, `version`.

Exit codes: 0; 2 for a command line that cannot be right, which is told in one sentence; for
`run`, see its `--help`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tf_smb import __version__, _smb, compare, inspection, launcher, serve
from tf_smb.errors import Error, InvalidArgumentError
from tf_smb.launch_setup import LaunchOptions
from tf_smb.settings import MAX_WORKERS

_BAD_USAGE = 2
_EXAMPLE = "tf-smb run -n 2 -- python train.py"

_USAGE = f"""\
usage: tf-smb COMMAND ...

  run      train with several workers on this machine: {_EXAMPLE}
  serve    lend memory to processes that are started on their own
  ls       the segments of this user's servers on this host
  stat     one segment: workers, version, variables
  rm       free a segment
  bench    measure exchanges
  version  what is installed, and what each transport can do here

tf-smb COMMAND --help says more."""

_RUN_EPILOG = """\
Worker 0 has the terminal; the others write to log files, whose folder is told at the start.
Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to all workers; a second Ctrl-C
kills them. What a worker leaves running when it ends is ended, too.

exit code: 0 if all workers ended well; else the first failure's: its exit code, or 128 + N
if signal N killed it. 128 + N if signal N ended the job (130 after Ctrl-C); 2 for a command
line that cannot be right."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of a usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    _fill_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else None
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    command = _COMMANDS.get("version" if name == "--version" else name or "")
    if command is None:
        seen = "no command" if name is None else f"no command {name!r}"
        known = ", ".join(_COMMANDS)
        print(f"tf-smb: {seen}: use one of {known}, as in {_EXAMPLE} [SMB-E308]", file=sys.stderr)
        return _BAD_USAGE
    return _guarded(f"tf-smb {name}", command, arguments[1:])


def _fill_closed_streams() -> None:
    """Opens /dev/null for closed standard streams: else the next file opened takes their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))


def _guarded(
    program: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]
) -> int:
    """Runs a command; errors that people can do something about become one sentence."""
    try:
        return command(arguments)
    except InvalidArgumentError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return _BAD_USAGE
    except Error as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 1  # whoever read our output has enough
    except OSError as error:  # no processes, descriptors or disk space left
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # before the workers started, or after they ended


# --- run ---


def _run(arguments: Sequence[str]) -> int:
    parser = _run_parser()
    before, command = _split_at_dashes(arguments)
    if command is None and not {"-h", "--help"} & set(before):
        seen = f", got: {' '.join(before)}" if before else ""
        raise InvalidArgumentError(
            f"-- must stand before the command, as in {_EXAMPLE}{seen} [SMB-E300]"
        )
    parsed, unknown = parser.parse_known_args(before)
    if unknown:
        what = "unknown option" if unknown[0].startswith("-") else "before -- can only be options:"
        raise InvalidArgumentError(
            f"{what} {unknown[0]!r}; tf-smb run --help lists them [SMB-E301]"
        )
    if parsed.json and not parsed.compare:
        raise InvalidArgumentError("--json goes with --compare [SMB-E302]")
    options = LaunchOptions(
        command=command or [],
        num_workers=parsed.num_workers,
        cores_per_worker=parsed.cores_per_worker,
        gpus=parsed.gpus,
        output=parsed.output,
        log_dir=parsed.log_dir,
        on_failure=parsed.on_failure,
        grace_s=parsed.grace_seconds,
    )
    if parsed.compare:
        return compare.run_compare(options, as_json=parsed.json)
    return launcher.launch(options).exit_code


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    if "--" not in arguments:
        return list(arguments), None
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _run_parser() -> _Parser:
    parser = _Parser(
        prog="tf-smb run",
        usage="tf-smb run -n N [options] -- COMMAND [ARGUMENT ...]",
        description=f"Starts N workers on this machine, each running COMMAND: {_EXAMPLE}",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "--num-workers", type=_num_workers, required=True, metavar="N", help="how many")
    add(
        "--output",
        choices=("chief", "all"),
        default="chief",
        help="show worker 0's output, or also the others', line by line (default: chief)",
    )
    add("--log-dir", metavar="DIR", help="where the others' output goes (default: a new folder)")
    add(
        "--cores-per-worker",
        default="auto",
        metavar="K",
        help="cores each worker is pinned to; auto: an equal share; none: not pinned",
    )
    add(
        "--gpus",
        default="auto",
        metavar="GPUS",
        help="auto: one for each worker, if there are any; share: taken in turn; none; or 0,1,...",
    )
    add(
        "--on-failure",
        choices=("auto", "stop", "continue"),
        default="auto",
        help="whether a failed worker stops the others; auto: its exit code does, being killed "
        "by a signal does not",
    )
    add(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long workers have to end before they are killed (default: 10)",
    )
    add(
        "--compare",
        action="store_true",
        help="run COMMAND once plain, then with N workers, and compare speed and loss",
    )
    add("--json", action="store_true", help="with --compare: the result as one JSON object")
    return parser


def _num_workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 1 to {MAX_WORKERS}, got {text!r} [SMB-E303]"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(
            f"must be seconds from 0 to 86400, got {text!r} [SMB-E304]"
        )
    return seconds


# --- serve, ls, stat, rm ---


def _serve(arguments: Sequence[str]) -> int:
    parser = _Parser(
        prog="tf-smb serve",
        description="Lends memory as segments until SIGTERM or Ctrl-C. Workers find it by "
        "TF_SMB_SERVER=shm://NAME or server='shm://NAME'.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--name", required=True, help="the server is shm://NAME, for this user's processes")
    add("--transport", choices=("shm",), default="shm", help="shm: shared memory, on this host")
    add(
        "--lease-seconds",
        type=_lease_seconds,
        default=10.0,
        metavar="S",
        help="a worker that is silent for so long is dropped (default: 10)",
    )
    add(
        "--dir",
        default=serve.DEFAULT_DIRECTORY,
        help="where segments are files, which a server of the same name takes over after a crash "
        f"(default: {serve.DEFAULT_DIRECTORY})",
    )
    parsed = parser.parse_args(arguments)
    if not os.path.isdir(parsed.dir):
        raise InvalidArgumentError(f"--dir must be a folder, got {parsed.dir!r} [SMB-E305]")
    return serve.serve(
        serve.ServeOptions(f"{parsed.transport}://{parsed.name}", parsed.lease_seconds, parsed.dir)
    )


def _lease_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(
            f"must be seconds from 0.1 to 3600, got {text!r} [SMB-E306]"
        )
    return seconds


def _segment_parser(command: str, description: str, takes_name: bool) -> _Parser:
    parser = _Parser(prog=f"tf-smb {command}", description=description, allow_abbrev=False)
    if takes_name:
        parser.add_argument("name", metavar="NAME", help="the segment's")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="shm://NAME (default: all of this user's on this host)"
    )
    return parser


def _ls(arguments: Sequence[str]) -> int:
    parser = _segment_parser("ls", "Lists segments, and what crashed servers left.", False)
    parser.add_argument("--json", action="store_true", help="as one JSON array")
    parsed = parser.parse_args(arguments)
    inspection.print_list(parsed.server, parsed.json)
    return 0


def _stat(arguments: Sequence[str]) -> int:
    parser = _segment_parser("stat", "Shows a segment: workers, version, variables.", True)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parsed = parser.parse_args(arguments)
    inspection.print_status(parsed.name, parsed.server, parsed.json)
    return 0


def _rm(arguments: Sequence[str]) -> int:
    parser = _segment_parser("rm", "Frees a segment, or removes what a crashed server left.", True)
    parser.add_argument("--force", action="store_true", help="also with live workers on it")
    parsed = parser.parse_args(arguments)
    inspection.remove(parsed.name, parsed.server, parsed.force)
    return 0


# --- bench, version ---


def _bench(arguments: Sequence[str]) -> int:
    return int(importlib.import_module("tf_smb.bench.cli").main(list(arguments)) or 0)


def _version(arguments: Sequence[str]) -> int:
    if arguments:
        raise InvalidArgumentError(f"takes no arguments, got {arguments[0]!r} [SMB-E307]")
    versions = [f"tf_smb {__version__}", f"Python {platform.python_version()}"]
    for package in ("tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    print(", ".join(versions))
    for scheme, viable, reason, can in _smb.transports():
        print(
            f"{scheme}://  {', '.join(can) or 'messages'}" if viable else f"{scheme}://  {reason}"
        )
    return 0


_COMMANDS = {
    "run": _run,
    "serve": _serve,
    "ls": _ls,
    "stat": _stat,
    "rm": _rm,
    "bench": _bench,
    "version": _version,
}


if __name__ == "__main__":
    sys.exit(main())
