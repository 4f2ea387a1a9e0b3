"""Files that are either complete or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Any) -> Iterator[str]:
    """Gives a temporary name beside `path`, and puts what was written there in its place.

    If writing fails, what was at `path` before stays. The suffix is kept, since Keras chooses a
    format by it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    suffixes = "".join(target.suffixes)
    token = secrets.token_hex(4)
    temporary = target.with_name(f".{target.name}.{token}{suffixes}")
    try:
        yield os.fspath(temporary)
        _put_in_place(temporary, target, token)
    finally:
        _remove(temporary)


def _put_in_place(temporary: Path, target: Path, token: str) -> None:
    if not temporary.is_dir() or not target.exists():
        temporary.replace(target)
        return
    # A folder cannot replace a full one in one step: the old one steps aside.
    old = target.with_name(f".{target.name}.{token}.old")
    target.replace(old)
    temporary.replace(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
