"""Progress records for `tf-smb run --compare`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import keras

_INTERVAL_S = 0.2


def report_path(worker_index: int) -> Path | None:
    """Returns the file to append records to; None unless `TF_SMB_REPORT` names a folder."""
    folder = os.environ.get("TF_SMB_REPORT")
    return Path(folder) / f"worker-{worker_index}.jsonl" if folder else None


class ProgressReporter(keras.callbacks.Callback):
    """Appends a JSON line about every 0.2 s: time, step, samples, mean loss since the last.

    Args:
        path: The file.
        worker_index: This worker's number.
        batch: Samples of a step; None if unknown.
    """

    def __init__(self, path: Path, worker_index: int, batch: int | None) -> None:
        super().__init__()
        self._path = path
        self._worker_index = worker_index
        self._batch = batch
        self._step = 0
        self._batches = 0  # of this epoch: what Keras' running mean is over
        self._loss_sum = 0.0
        self._written_sum = 0.0
        self._written_batches = 0
        self._written_at = 0.0
        self._last_batch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._write("begin", None)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._batches = self._written_batches = 0
        self._loss_sum = self._written_sum = 0.0
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        done = batch - self._last_batch
        self._last_batch = batch
        self._step += done
        self._batches += done
        if time.time() - self._written_at >= _INTERVAL_S:
            self._record(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._record(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._write("end", None)

    def _record(self, logs: dict[str, Any] | None) -> None:
        new = self._batches - self._written_batches
        if not logs or new <= 0:
            return
        # Keras reports the mean since the epoch's beginning: undo it for the new batches.
        self._loss_sum = float(logs["loss"]) * self._batches
        loss = (self._loss_sum - self._written_sum) / new
        self._written_sum, self._written_batches = self._loss_sum, self._batches
        self._write("batch", loss)

    def _write(self, event: str, loss: float | None) -> None:
        self._written_at = time.time()
        record = {
            "event": event,
            "time": self._written_at,
            "worker": self._worker_index,
            "step": self._step,
            "samples": None if self._batch is None else self._step * self._batch,
            "loss": loss,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
