"""Files of the center, written during training."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path
from typing import Any

import keras

from tf_smb.callbacks.common import SMBCallback, acting_worker
from tf_smb.errors import InvalidArgumentError
from tf_smb.writing import replacing

_SUFFIX = ".weights.h5"
_FIELD = re.compile(r"\{(epoch|step)(:[^{}]*)?\}")


class CenterCheckpoint(SMBCallback):
    """Writes the center to a file, every so many epochs or steps of the chief.

    One worker writes for all: the chief, the lowest live worker in training. If it dies, or is
    through its epochs, the next one goes on. A file is complete or not there: it is written under
    a temporary name and then renamed. Plain Keras reads it, without tf_smb:
    `model.load_weights(path)`.

    Several of these can be in one fit, for different files.

    Args:
        filepath: Ends with `.weights.h5`, and may have `{epoch}` (from 1, as in Keras'
            ModelCheckpoint) and `{step}` (the chief's local steps), also as `{epoch:03d}`.
            Folders are made.
        every_epochs: Write at the end of each so many epochs. None: 1, unless `every_steps` is
            given.
        every_steps: Write at the end of the first batch at or after each so many steps.
        keep: How many files to keep: the older ones of this name, with other numbers, are
            deleted, those of earlier runs too. None: all.

    Raises:
        InvalidArgumentError: A value is not acceptable; the message has it.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> model.fit(x, y, callbacks=[
        ...     tf_smb.callbacks.CenterCheckpoint("checkpoints/{epoch:03d}.weights.h5", keep=3)
        ... ])
    """

    one_of_a_kind = False

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        every_epochs: int | None = None,
        every_steps: int | None = None,
        keep: int | None = 5,
    ) -> None:
        super().__init__()
        self._template = _check_path(filepath)
        if every_epochs is not None and every_steps is not None:
            raise InvalidArgumentError(
                "CenterCheckpoint: give every_epochs= or every_steps=, not both; got "
                f"{every_epochs!r} and {every_steps!r} [SMB-E345]"
            )
        self._every_steps = _check_count("every_steps", every_steps)
        self._every_epochs = _check_count("every_epochs", every_epochs)
        if self._every_steps is None and self._every_epochs is None:
            self._every_epochs = 1
        self._keep = _check_count("keep", keep)
        self._epoch = 0
        self._steps = 0  # at the last look
        self._batches = 0  # counted here, for a process that trains by itself
        self._last_batch = -1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the epoch begins."""
        self._epoch, self._last_batch = epoch, -1
        self._steps = self._steps_now()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, if a multiple of `every_steps` was passed."""
        self._batches += batch - self._last_batch
        self._last_batch = batch
        if self._every_steps is None:
            return
        before, self._steps = self._steps, self._steps_now()
        if self._steps // self._every_steps > before // self._every_steps:
            self._write()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes, if `every_epochs` says so."""
        if self._every_epochs is not None and (epoch + 1) % self._every_epochs == 0:
            self._write()

    def _steps_now(self) -> int:
        mirror = self.mirror
        return self._batches if mirror is None else int(mirror.steps)

    def _is_ours(self) -> bool:
        mirror = self.mirror
        if mirror is None:
            # By itself, or one of several that do not exchange: their files would be the same.
            return getattr(self.model.distribute_strategy, "worker_index", 0) == 0
        return acting_worker(mirror.segment) in (None, mirror.segment.worker_index)

    def _write(self) -> None:
        if not self._is_ours():
            return
        path = Path(self._template.format(epoch=self._epoch + 1, step=self._steps_now()))
        with replacing(path) as temporary:
            if self.strategy is None:
                keras.saving.save_weights(self.model, temporary)
            else:
                with self.strategy.center_weights(self.model):
                    keras.saving.save_weights(self.model, temporary)
        if self._keep is not None:
            _delete_oldest(self._template, self._keep)


def _check_path(filepath: Any) -> str:
    path = os.fspath(filepath) if isinstance(filepath, str | os.PathLike) else None
    if not isinstance(path, str) or not path.endswith(_SUFFIX) or not Path(path).name[:-11]:
        raise InvalidArgumentError(
            f"CenterCheckpoint: filepath must be a path that ends with '{_SUFFIX}', got "
            f"{filepath!r} [SMB-E343]"
        )
    try:
        path.format(epoch=1, step=1)
        complete = not re.search(r"[{}]", _FIELD.sub("", path))
    except (IndexError, KeyError, ValueError):
        complete = False
    if not complete or "{" in os.path.dirname(path):
        raise InvalidArgumentError(
            "CenterCheckpoint: between braces, the file's name may have {epoch} and {step} only, "
            f"and its folder nothing, got {path!r} [SMB-E344]"
        )
    return path


def _check_count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidArgumentError(
            f"CenterCheckpoint: {name} must be an integer from 1 on, or None, got {value!r} "
            "[SMB-E346]"
        )
    return number


def _delete_oldest(template: str, keep: int) -> None:
    """Deletes all but the newest `keep` files that the template can have named."""
    path = Path(template)
    parts = _FIELD.split(path.name)[:: _FIELD.groups + 1]
    pattern = re.compile(r"\s*\d+".join(map(re.escape, parts)))
    files = [file for file in path.parent.iterdir() if pattern.fullmatch(file.name)]
    for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-keep]:
        file.unlink(missing_ok=True)
