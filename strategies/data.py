"""Each worker's share of the training data.

Arrays: worker i of n takes samples i, i + n, i + 2n, ... A tf.data pipeline is divided at its
source where that changes nothing but who sees which sample, so that no worker computes what
another one uses; else its batches are dealt out in turn. Generators cannot be divided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_smb.errors import InvalidArgumentError
from tf_smb.strategies import data_order, dataset_graph


@dataclass(frozen=True)
class Share:
    """A worker's part of the training data.

    Attributes:
        x, y, sample_weight: As for `fit`.
        validation_data: As for `fit`; never divided.
        samples: This worker's samples per epoch; None if unknown.
        total_samples: All workers' samples per epoch; None if unknown.
        divided: Whether this is a part, and not all of the data.
        warning: What the user should know about it; empty if nothing.
    """

    x: Any
    y: Any
    sample_weight: Any
    validation_data: Any
    samples: int | None = None
    total_samples: int | None = None
    divided: bool = True
    warning: str = ""


def split_validation(
    x: Any, y: Any, sample_weight: Any, validation_split: float
) -> tuple[tuple[Any, Any, Any], Any]:
    """Returns ((x, y, sample_weight), validation_data), the last samples held out, as Keras does.

    Every worker holds out the same samples, before the rest is divided.
    """
    count = num_samples(x)
    at = int(math.floor(count * (1.0 - validation_split)))
    train = tuple(
        _map_arrays(lambda a: _rows(a, slice(0, at)), part) for part in (x, y, sample_weight)
    )
    held_out = tuple(
        _map_arrays(lambda a: _rows(a, slice(at, count)), part) for part in (x, y, sample_weight)
    )
    return (train[0], train[1], train[2]), held_out if sample_weight is not None else held_out[:2]


def share(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_data: Any,
    validation_split: float,
    num_workers: int,
    worker_index: int,
) -> Share:
    """Returns worker `worker_index`'s share of what `fit` was given.

    Raises:
        InvalidArgumentError: There are fewer samples than workers.
    """
    whole = Share(x, y, sample_weight, validation_data, divided=False)
    if num_workers == 1:
        count = num_samples(x) if is_arrays(x) else None
        return Share(x, y, sample_weight, validation_data, count, count, divided=False)
    if isinstance(x, tf.data.Dataset):
        return _share_dataset(whole, num_workers, worker_index)
    if isinstance(x, keras.utils.PyDataset):
        return _with(whole, x=_PyDatasetShare(x, num_workers, worker_index), divided=True)
    if not is_arrays(x):
        return _with(
            whole,
            warning=(
                f"a {type(x).__name__} cannot be divided: every worker trains on all of it; use "
                "arrays, a tf.data.Dataset or a keras.utils.PyDataset, or give each worker its "
                "own part by strategy.worker_index and strategy.num_workers"
            ),
        )
    return _share_arrays(whole, validation_split, num_workers, worker_index)


def is_arrays(x: Any) -> bool:
    """Whether `x` is an array, or a structure of arrays."""
    leaves = tf.nest.flatten(x)
    return bool(leaves) and all(hasattr(leaf, "shape") for leaf in leaves if leaf is not None)


def check_enough(total: int, num_workers: int) -> None:
    """Refuses workers that would have nothing to train on.

    Raises:
        InvalidArgumentError: There are fewer samples than workers.
    """
    if total < num_workers:
        raise InvalidArgumentError(
            f"{total} training samples are fewer than {num_workers} workers: start at most "
            f"{total} [SMB-E420]"
        )


def _with(base: Share, **changes: Any) -> Share:
    return Share(**{**base.__dict__, **changes})


def _map_arrays(function: Callable[[Any], Any], structure: Any) -> Any:
    if structure is None:
        return None
    return tf.nest.map_structure(lambda leaf: None if leaf is None else function(leaf), structure)


def num_samples(x: Any) -> int:
    """Returns how many samples arrays have."""
    first = next(leaf for leaf in tf.nest.flatten(x) if leaf is not None)
    return int(first.shape[0])


def _rows(array: Any, rows: slice) -> Any:
    return array.iloc[rows] if hasattr(array, "iloc") else array[rows]


def _share_arrays(
    whole: Share, validation_split: float, num_workers: int, worker_index: int
) -> Share:
    x, y, sample_weight = whole.x, whole.y, whole.sample_weight
    validation_data = whole.validation_data
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = split_validation(
            x, y, sample_weight, validation_split
        )
    total = num_samples(x)
    check_enough(total, num_workers)
    rows = slice(worker_index, None, num_workers)
    return Share(
        _map_arrays(lambda a: _rows(a, rows), x),
        _map_arrays(lambda a: _rows(a, rows), y),
        _map_arrays(lambda a: _rows(a, rows), sample_weight),
        validation_data=validation_data,
        samples=len(range(worker_index, total, num_workers)),
        total_samples=total,
    )


def _share_dataset(whole: Share, num_workers: int, worker_index: int) -> Share:
    divided = dataset_graph.divide(whole.x, num_workers, worker_index)
    samples = divided.samples
    return _with(
        whole,
        x=divided.dataset,
        divided=True,
        warning=divided.warning,
        samples=None if samples is None else len(range(worker_index, samples, num_workers)),
        total_samples=samples,
    )


class _PyDatasetShare(keras.utils.PyDataset):
    """Batches i, i + n, i + 2n, ... of another PyDataset."""

    def __init__(self, whole: Any, num_workers: int, worker_index: int) -> None:
        super().__init__(
            workers=whole.workers,
            use_multiprocessing=whole.use_multiprocessing,
            max_queue_size=whole.max_queue_size,
        )
        self._whole = whole
        self._num_workers = num_workers
        self._worker_index = worker_index

    @property
    def num_batches(self) -> int | None:
        total = self._whole.num_batches
        if total is None:
            return None
        return len(range(self._worker_index, total, self._num_workers))

    def __getitem__(self, index: int) -> Any:
        return self._whole[self._worker_index + index * self._num_workers]

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()


def batch_of(x: Any, batch_size: int | None, steps_per_epoch: int | None) -> int | None:
    """Returns the batch size that Keras will use for `x`; None if it cannot be told."""
    if isinstance(x, tf.data.Dataset):
        return dataset_graph.batch_size(x)
    if isinstance(x, data_order.DealtBatches):
        return x.batch_size
    if not is_arrays(x):
        return None
    if batch_size:
        return int(batch_size)
    return None if steps_per_epoch else 32


def steps_of(
    x: Any, batch: int | None, steps_per_epoch: int | None, samples: int | None
) -> int | None:
    """Returns the steps of one epoch over `x`; None if it cannot be told."""
    if steps_per_epoch:
        return int(steps_per_epoch)
    if isinstance(x, tf.data.Dataset):
        count = int(x.cardinality().numpy())
        return count if count > 0 else None
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches
    return math.ceil(samples / batch) if samples and batch else None
