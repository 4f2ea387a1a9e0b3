"""Files that all workers would write: one does, so that readers never see half of one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from tf_smb.strategies.console import announce


def is_path(path: Any) -> bool:
    """Whether this names a file or folder (and is not an open file)."""
    return isinstance(path, str | os.PathLike)


def say_skipped(worker_index: int, what: str, path: Any) -> None:
    """Says that the chief writes it."""
    announce(f"tf_smb: worker {worker_index}: {what} to {os.fspath(path)} is left to the chief")


def say_written(what: str, path: Any) -> None:
    """Says where it is, after Keras named the temporary place."""
    announce(f"tf_smb: {what}: now at {os.fspath(path)}")


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


# Keras' callbacks that write files: all workers at one path would overwrite each other.
_FILE_WRITERS: tuple[type, ...] = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.BackupAndRestore,
)


def without_file_writers(callbacks: list[Any]) -> tuple[list[Any], list[str]]:
    """Returns the callbacks for workers other than the chief, and the skipped ones' names."""
    kept = [callback for callback in callbacks if not isinstance(callback, _FILE_WRITERS)]
    skipped = [type(c).__name__ for c in callbacks if isinstance(c, _FILE_WRITERS)]
    return kept, skipped
