"""BackupAndRestore: a job that was killed goes on where it was."""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import Any, Protocol

import keras

from tf_smb.callbacks.common import SMBCallback
from tf_smb.errors import InvalidArgumentError

_DEFAULT_S = 60.0


class Session(Protocol):
    """What the strategy does for the callback in one `fit`."""

    def begin(self, model: keras.Model) -> None:
        """Before the first contact with the box."""

    def begin_epoch(self, model: keras.Model, epoch: int) -> None:
        """Before its first batch."""

    def end_batch(self, model: keras.Model) -> None:
        """Between two executions."""

    def end(self) -> None:
        """After the last epoch of this worker, which others may still be in."""


class BackupAndRestore(SMBCallback):
    """Backs a training under an SMBStrategy up, and goes on with it after everything was killed.

    The chief writes the center, its optimizer's variables, and how far every worker is, into a
    folder that all workers can reach. When the same script is started again, with as many
    workers or with others, all of them go on from there: in the middle of an epoch, with the
    samples that were not trained on yet, in the same phase of the schedule. After `fit` has come
    to its end the backups are removed. See `docs/resuming.md` for what is exact and what is not.

    With this callback, arrays and `keras.utils.PyDataset`s are shuffled in an order of its own.

    Args:
        folder: Where. For this one training: another fit or model needs another folder.
        every_steps: Steps of the chief between two backups.
        every_s: Seconds between two backups. Neither: 60 seconds.
        delete_checkpoint: Whether to remove the backups at the end of `fit`.
        seed: Of the order of the samples, the same on all workers. None: one of the job's.

    Raises:
        InvalidArgumentError: A value is out of range.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> backup = tf_smb.callbacks.BackupAndRestore("backup", every_s=300)
        >>> model.fit(x, y, epochs=10, callbacks=[backup])
    """

    # Late: what it restores counts, whatever other callbacks load before training; and it backs up
    # what they have made of the batch.
    tf_smb_order = 95

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every_steps: int | None = None,
        every_s: float | None = None,
        delete_checkpoint: bool = True,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.folder = _check_folder(folder)
        self.every_steps, self.every_s = _check_interval(every_steps, every_s)
        self.delete_checkpoint = bool(delete_checkpoint)
        self.seed = _check_seed(seed)
        self._session: Session | None = None

    def attach(self, session: Session | None) -> None:
        """Called by the strategy, for one `fit`."""
        self._session = session

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores, before this worker joins the others."""
        super().on_train_begin(logs)
        if self._session is not None:
            self._session.begin(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the epoch's data."""
        if self._session is not None:
            self._session.begin_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Backs up if it is time."""
        if self._session is not None:
            self._session.end_batch(self.model)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves backups to those that still train."""
        if self._session is not None:
            self._session.end()


def _check_folder(folder: Any) -> str:
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError(
            f"BackupAndRestore: folder must be the path of a folder, got {folder!r} [SMB-E370]"
        )
    return path


def _check_interval(every_steps: Any, every_s: Any) -> tuple[int | None, float | None]:
    if every_steps is not None and every_s is not None:
        raise InvalidArgumentError(
            f"BackupAndRestore: give every_steps or every_s, not both; got {every_steps!r} and "
            f"{every_s!r} [SMB-E371]"
        )
    if every_steps is not None:
        if not _is_integer(every_steps) or int(every_steps) < 1:
            raise InvalidArgumentError(
                "BackupAndRestore: every_steps must be an integer from 1 on, got "
                f"{every_steps!r} [SMB-E372]"
            )
        return int(every_steps), None
    if every_s is None:
        return None, _DEFAULT_S
    if isinstance(every_s, bool) or not isinstance(every_s, Real) or not 0 < float(every_s) <= 1e9:
        raise InvalidArgumentError(
            "BackupAndRestore: every_s must be a number of seconds above 0 and up to 1e9, got "
            f"{every_s!r} [SMB-E373]"
        )
    return None, float(every_s)


def _check_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if not _is_integer(seed) or not 0 <= int(seed) < 2**32:
        raise InvalidArgumentError(
            f"BackupAndRestore: seed must be an integer from 0 to 2**32 - 1, got {seed!r} "
            "[SMB-E374]"
        )
    return int(seed)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
