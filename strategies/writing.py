"""Files that all workers would write: one does, so that readers never see half of one."""

from __future__ import annotations

import os
from typing import Any

import keras

from tf_smb.strategies.console import announce
from tf_smb.writing import replacing

__all__ = ["is_path", "replacing", "say_skipped", "say_written", "without_file_writers"]


def is_path(path: Any) -> bool:
    """Whether this names a file or folder (and is not an open file)."""
    return isinstance(path, str | os.PathLike)


def say_skipped(worker_index: int, what: str, path: Any) -> None:
    """Says that the chief writes it."""
    announce(f"tf_smb: worker {worker_index}: {what} to {os.fspath(path)} is left to the chief")


def say_written(what: str, path: Any) -> None:
    """Says where it is, after Keras named the temporary place."""
    announce(f"tf_smb: {what}: now at {os.fspath(path)}")


# Keras' callbacks that write files: all workers at one path would overwrite each other.
_FILE_WRITERS: tuple[type, ...] = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
)


def without_file_writers(callbacks: list[Any]) -> tuple[list[Any], list[str]]:
    """Returns the callbacks for workers other than the chief, and the skipped ones' names."""
    kept = [callback for callback in callbacks if not isinstance(callback, _FILE_WRITERS)]
    skipped = [type(c).__name__ for c in callbacks if isinstance(c, _FILE_WRITERS)]
    return kept, skipped
