"""Numbers on the command line of the benchmark."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def numbers(lowest: float, highest: float) -> Callable[[str], list[float]]:
    """Returns a parser of numbers in a range, separated by commas."""
    return lambda text: _numbers(text, lowest, highest, whole=False)


def whole_numbers(lowest: int, highest: int) -> Callable[[str], list[int]]:
    """Returns a parser of whole numbers in a range, separated by commas."""
    return lambda text: [int(number) for number in _numbers(text, lowest, highest, whole=True)]


def number(lowest: float, highest: float) -> Callable[[str], float]:
    """Returns a parser of one number in a range."""
    return lambda text: _one(text, _numbers(text, lowest, highest, whole=False))


def whole_number(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns a parser of one whole number in a range."""
    return lambda text: int(_one(text, _numbers(text, lowest, highest, whole=True)))


def _numbers(text: str, lowest: float, highest: float, whole: bool) -> list[float]:
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not lowest <= value <= highest or (whole and value != int(value)):
            what = "whole numbers" if whole else "numbers"
            raise argparse.ArgumentTypeError(
                f"must be {what} from {lowest:g} to {highest:g}, separated by commas, got {text!r} "
                "[SMB-E455]"
            )
        found.append(value)
    return found


def _one(text: str, values: list[float]) -> float:
    if len(values) != 1:
        raise argparse.ArgumentTypeError(f"must be one number, got {text!r} [SMB-E456]")
    return values[0]
