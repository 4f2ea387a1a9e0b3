"""Backups of a training in a folder, each whole or not there at all.

    <folder>/backup-000012/state.json   where the job was, in words and numbers
    <folder>/backup-000012/arrays.npz   its weights and the optimizer's variables
    <folder>/backup-000013/...

A backup is written under another name, brought to the disk, and renamed. The two newest are kept,
so that there is another one if the disk has spoiled the newest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_smb.errors import DataLossError, FailedPreconditionError

FORMAT = 1
_KEPT = 2
_NAME = re.compile(r"backup-(\d{6,})$")
_TEMPORARY = re.compile(r"\.backup-\d{6,}\.[0-9a-f]{8}$")
# Others write and remove backups while this process looks for the newest.
_TRIES = 5
# A temporary folder this old was left by a process that was killed.
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Backup:
    """One backup.

    Attributes:
        number: Counts the folder's backups.
        state: What JSON can hold.
        arrays: By name.
    """

    number: int
    state: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]


class BackupFolder:
    """The backups of one training.

    Args:
        path: The folder; made when the first backup is written.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def numbers(self) -> list[int]:
        """Returns the numbers of the backups there, the newest first."""
        return sorted((int(match[1]) for match in self._matches(_NAME)), reverse=True)

    def newest(self, announce: Callable[[str], None]) -> Backup | None:
        """Returns the newest backup that can be read; None if there is none at all.

        Raises:
            DataLossError: None of those there can be read; the message says why.
            FailedPreconditionError: It is of a later version of tf_smb.
        """
        said: set[int] = set()
        reason = ""
        for _ in range(_TRIES):
            numbers = self.numbers()
            for number in numbers:
                try:
                    return self._read(number)
                except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                    reason = f"{type(error).__name__}: {error}"
                if (self.path / _name(number)).exists() and number not in said:
                    said.add(number)
                    announce(
                        f"tf_smb: backup {self.path / _name(number)} cannot be read ({reason}): "
                        "skipped"
                    )
            if not numbers:
                return None
            if numbers == self.numbers():
                break
        raise DataLossError(
            f"none of the backups in {self.path} can be read (the last: {reason}): remove the "
            "folder to begin anew [SMB-E440]"
        )

    def write(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> int:
        """Writes the next backup, and removes those before the last; returns its number.

        Raises:
            OSError: It could not be written; those there are as they were.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        number = max(self.numbers(), default=0) + 1
        temporary = self._temporary(number)
        temporary.mkdir()
        try:
            _write_arrays(temporary / "arrays.npz", arrays)
            _write_state(temporary / "state.json", state, arrays)
            _sync(temporary)
            number = self._put_in_place(temporary, number)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._tidy()
        return number

    def remove(self) -> None:
        """Removes all backups, and the folder if there is nothing else in it."""
        for number in reversed(self.numbers()):
            self._remove(number)
        for match in self._matches(_TEMPORARY):
            shutil.rmtree(self.path / match[0], ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def _matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return [match for match in map(pattern.match, names) if match]

    def _read(self, number: int) -> Backup:
        folder = self.path / _name(number)
        state = json.loads((folder / "state.json").read_text())
        if state["format"] > FORMAT:
            raise FailedPreconditionError(
                f"backup {folder} was written by a later version of tf_smb: go on with that one, "
                "or remove the folder to begin anew [SMB-E441]"
            )
        arrays = {}
        # Reading to the end compares zip's checksums.
        with np.load(folder / "arrays.npz", allow_pickle=False) as file:
            for name, dtype in state["arrays"].items():
                array = file[name]
                arrays[name] = array.view(tf.as_dtype(dtype).as_numpy_dtype)
        return Backup(number, state, arrays)

    def _put_in_place(self, temporary: Path, number: int) -> int:
        while True:
            try:
                temporary.rename(self.path / _name(number))
            except OSError:
                if not (self.path / _name(number)).exists():
                    raise
                number += 1  # another worker has just written one
            else:
                _sync(self.path)
                return number

    def _temporary(self, number: int) -> Path:
        return self.path / f".{_name(number)}.{secrets.token_hex(4)}"

    def _remove(self, number: int) -> None:
        """Removes a backup, of which nobody ever sees a part."""
        temporary = self._temporary(number)
        with suppress(OSError):  # another worker is at it
            (self.path / _name(number)).rename(temporary)
            shutil.rmtree(temporary, ignore_errors=True)

    def _tidy(self) -> None:
        for number in self.numbers()[_KEPT:]:
            self._remove(number)
        for match in self._matches(_TEMPORARY):
            with suppress(OSError):
                path = self.path / match[0]
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


def _name(number: int) -> str:
    return f"backup-{number:06}"


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    # What numpy itself does not know, such as bfloat16, goes as plain bits.
    plain: dict[str, Any] = {
        name: array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")
        for name, array in arrays.items()
    }
    with path.open("wb") as file:
        np.savez(file, **plain)
        file.flush()
        os.fsync(file.fileno())


def _write_state(path: Path, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    names = {name: array.dtype.name for name, array in arrays.items()}
    with path.open("w") as file:
        json.dump({"format": FORMAT, **state, "arrays": names}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Brings a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
