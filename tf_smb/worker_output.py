"""Where the output of workers goes, and how it is shown."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

# Colours and cursor movements (CSI), window titles (OSC), other two-byte escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
# A line that goes on for longer than this is printed in pieces.
_LONGEST_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


def visible_line(line: bytes) -> str:
    """Returns what a terminal would show of a line, in the end.

    A progress bar writes a line again and again, with a carriage return before each: the last
    is what counts. Colours and other escape sequences are left out.
    """
    text = _ESCAPES.sub("", line.decode(errors="replace")).replace("\b", "")
    states = [state for state in text.rstrip("\r\n").split("\r") if state.strip()]
    return states[-1] if states else ""


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line, clear of a progress bar that may be on the terminal."""
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
        clear = "\r\x1b[K" if stream.isatty() else ""
        print(f"{clear}{line}", file=stream, flush=True)


class WorkerOutputs:
    """Where each worker's output goes.

    Worker 0 has the launcher's own streams, so that its progress bar works; the others write to
    log files. To show all, the log files are followed. Then worker 0 writes to log files too
    where nobody looks at a terminal: of what several processes write to one pipe, lines get
    mixed.

    Args:
        log_dir: None: there is no worker but worker 0.
        show_all: Show what the others write, too.
        stdout: Where output is shown.
    """

    def __init__(self, log_dir: Path | None, show_all: bool, stdout: TextIO) -> None:
        self._log_dir = log_dir
        self._show_all = show_all
        self._stdout = stdout
        self._followers: list[LogFollower] = []

    @property
    def following(self) -> bool:
        """Whether `show_new` may have something to show."""
        return bool(self._followers)

    def log_path(self, worker_index: int) -> Path | None:
        """Returns a worker's log file, if it has one of its own."""
        if worker_index == 0 or self._log_dir is None:
            return None
        return self._log_dir / f"worker-{worker_index}.log"

    @contextlib.contextmanager
    def open(self, worker_index: int) -> Iterator[tuple[TextIO, TextIO | int]]:
        """Opens standard output and error for a worker, for as long as it takes to start it.

        Raises:
            OSError: A log file cannot be written.
        """
        log_path = self.log_path(worker_index)
        with contextlib.ExitStack() as files:
            if log_path is None:
                yield (
                    self._own_stream(self._stdout, "worker-0.log", files),
                    self._own_stream(sys.stderr, "worker-0-errors.log", files),
                )
            else:
                if self._show_all:
                    self._follow(log_path, self._stdout, f"[worker {worker_index}] ")
                output = files.enter_context(open(log_path, "w"))
                yield output, subprocess.STDOUT

    def show_new(self) -> None:
        """Shows lines that were completed since the last call."""
        for follower in self._followers:
            follower.show_new()

    def show_rest(self) -> None:
        """Shows all that is left, when nobody writes any more."""
        for follower in self._followers:
            follower.show_new()
            follower.show_rest()

    def _own_stream(self, stream: TextIO, name: str, files: contextlib.ExitStack) -> TextIO:
        if self._log_dir is None or not self._show_all or stream.isatty():
            return stream
        self._follow(self._log_dir / name, stream, "")
        return files.enter_context(open(self._log_dir / name, "w"))

    def _follow(self, path: Path, stream: TextIO, prefix: str) -> None:
        self._followers.append(LogFollower(path, lambda line: print_line(prefix + line, stream)))


class LogFollower:
    """Hands on what is new in a log file, line by line.

    Args:
        path: The file; need not exist yet.
        show: Called with each line.
    """

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self._path = path
        self._show = show
        self._offset = 0
        self._rest = b""  # of a line that has no end yet

    def show_new(self) -> None:
        """Shows the lines that were completed since the last call."""
        while new := self._read():
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                self._show(visible_line(line))
            if len(self._rest) > _LONGEST_LINE_BYTES:
                self.show_rest()

    def show_rest(self) -> None:
        """Shows a last line that has no end."""
        if self._rest:
            self._show(visible_line(self._rest))
            self._rest = b""

    def _read(self) -> bytes:
        try:
            if os.stat(self._path).st_size <= self._offset:
                return b""
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                new = file.read(_LONGEST_LINE_BYTES)
        except OSError:
            return b""
        self._offset += len(new)
        return new


def last_lines(path: Path, count: int) -> list[str]:
    """Returns the last lines of a log file, empty ones left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read()
    except OSError:
        return []
    lines = [visible_line(line) for line in text.split(b"\n")]
    return [line for line in lines if line.strip()][-count:]
