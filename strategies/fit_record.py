"""What is kept about the fits of a model, for its callbacks and for the report at the end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import keras


@dataclass
class FitRecord:
    """All fits of one model in this process.

    Attributes:
        global_seed: TensorFlow's, as the script had set it before the first fit; None: not set.
        epochs: How many this worker ended.
        samples: How many it trained on; None if the data of some fit does not tell.
        seconds: In all fits, from their beginnings to their ends.
        steps_before: Each worker's steps when the present fit began, by worker index.
        notice_before: The number of the segment's last notice when the present fit began.
    """

    global_seed: int | None = None
    epochs: int = 0
    samples: int | None = 0
    seconds: float = 0.0
    steps_before: dict[int, int] = field(default_factory=dict)
    notice_before: int = 0

    def add_epoch(
        self, batches: int | None, batch: int | None, samples_per_epoch: int | None
    ) -> None:
        """Counts an epoch that ended after so many batches.

        Args:
            batches: Of this epoch; None if unknown.
            batch: Samples of a batch; None if unknown.
            samples_per_epoch: Where the last batch may be smaller; None if unknown.
        """
        self.epochs += 1
        if batches is None or batch is None or self.samples is None:
            self.samples = None
            return
        samples = batches * batch
        self.samples += samples if samples_per_epoch is None else min(samples, samples_per_epoch)


_records: weakref.WeakKeyDictionary[keras.Model, FitRecord] = weakref.WeakKeyDictionary()


def record_of(model: keras.Model) -> FitRecord:
    """Returns the model's record, which begins empty."""
    return _records.setdefault(model, FitRecord())
