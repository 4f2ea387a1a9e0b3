"""The log files of workers, as lines for a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

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
