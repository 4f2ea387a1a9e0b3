"""What the strategy says to the person in front of it."""

from __future__ import annotations


def announce(line: str) -> None:
    """Prints a line, at once: output of workers is often a pipe or a file."""
    print(line, flush=True)
