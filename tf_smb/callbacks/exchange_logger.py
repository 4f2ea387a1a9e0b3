"""What the exchanges do, in Keras' logs and in TensorBoard."""

from __future__ import annotations

import operator
import os
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_smb.callbacks.common import SMBCallback
from tf_smb.errors import InvalidArgumentError


class ExchangeLogger(SMBCallback):
    """Adds to the epoch logs what this worker's exchanges did.

    The progress bar, History and CSVLogger then show, wherever this callback stands in the list:

    - `exchanges`: how many this worker made so far, in all its fits;
    - `waiting_s`: seconds that it waited in them for other workers, so far;
    - `distance_to_center`: |x - g| / |g|, of its weights x and the center g, now;
    - `staleness`: how many exchanges others made between two of its own, the mean since the last
      record (from counts by powers of two: exact for 0 and 1);
    - `samples`: how many it trained on so far; left out where the data does not tell.

    A process that trains by itself has none of them but `samples`.

    Args:
        log_dir: A folder for TensorBoard, each worker's records in one of its own below it,
            `worker-<index>`, by the worker's local steps. None: no TensorBoard.
        every: When to write to TensorBoard: "epoch", or each so many steps.

    Raises:
        InvalidArgumentError: `every` is neither; the message has the value.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> model.fit(x, y, epochs=5, callbacks=[tf_smb.callbacks.ExchangeLogger("logs")])
    """

    # Before all that reads logs.
    tf_smb_order = 21

    def __init__(
        self, log_dir: str | os.PathLike[str] | None = None, every: str | int = "epoch"
    ) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._every_steps = None if every == "epoch" else _check_steps(every)
        self._writer: Any = None
        self._written_at = 0  # steps
        self._histogram: np.ndarray | None = None  # of staleness, at the last record

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the logs, and writes to TensorBoard if that is by epochs."""
        values = self._values()
        if logs is not None:
            logs.update(values)
        if self._every_steps is None:
            self._write(values)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes to TensorBoard if that is by steps."""
        mirror = self.mirror
        if self._every_steps is None or self._log_dir is None or mirror is None:
            return
        steps = int(mirror.steps)
        if steps // self._every_steps > self._written_at // self._every_steps:
            self._write(self._values())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _values(self) -> dict[str, float]:
        values: dict[str, float] = {}
        mirror = self.mirror
        if mirror is not None:
            stats = mirror.segment.stats()
            values["exchanges"] = float(stats["exchanges"])
            values["waiting_s"] = float(stats["waiting_s"])
            values["distance_to_center"] = _distance(mirror.local(), mirror.segment.read(wide=True))
            values["staleness"] = self._staleness(stats["staleness_histogram"])
        if self.record is not None and self.record.samples is not None:
            values["samples"] = float(self.record.samples)
        return values

    def _staleness(self, counts: Any) -> float:
        histogram = np.array(counts, np.float64)
        new = histogram if self._histogram is None else histogram - self._histogram
        self._histogram = histogram
        return mean_staleness(new)

    def _write(self, values: dict[str, float]) -> None:
        mirror = self.mirror
        if self._log_dir is None or mirror is None:
            return
        if self._writer is None:
            folder = self._log_dir / f"worker-{self.strategy.worker_index}"
            self._writer = tf.summary.create_file_writer(os.fspath(folder))
        self._written_at = int(mirror.steps)
        with self._writer.as_default():
            for name, value in values.items():
                # Not tf.summary.scalar: it needs the package tensorboard.
                tf.summary.write(
                    f"tf_smb/{name}", np.float32(value), self._written_at, _SCALAR_METADATA
                )
        self._writer.flush()


_SCALAR_METADATA = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,  # DATA_CLASS_SCALAR
)


def mean_staleness(histogram: np.ndarray) -> float:
    """Returns the mean of counts by powers of two (0, 1, 2-3, 4-7, ...); 0 for no counts."""
    middles = [0.0] + [(2**i + 2 ** (i + 1) - 1) / 2 for i in range(len(histogram) - 1)]
    total = float(histogram.sum())
    return float(histogram @ np.array(middles)) / total if total > 0 else 0.0


def _distance(local: list[np.ndarray], center: list[np.ndarray]) -> float:
    """Returns |x - g| / |g|, over all weights together."""
    apart = length = 0.0
    for x, g in zip(local, center, strict=True):
        wide = np.asarray(g, np.float64)
        apart += float(np.square(np.asarray(x, np.float64) - wide).sum())
        length += float(np.square(wide).sum())
    return (apart / length) ** 0.5 if length > 0 else 0.0


def _check_steps(every: Any) -> int:
    try:
        number = 0 if isinstance(every, bool) else operator.index(every)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidArgumentError(
            "ExchangeLogger: every must be 'epoch' or an integer number of steps from 1 on, got "
            f"{every!r} [SMB-E349]"
        )
    return number
