"""The order of the training data under BackupAndRestore, so that a killed job can go on in it.

For each epoch the samples have one order, of a seed and the epoch's number, and are dealt to the
workers like cards: worker i of n takes those at i, i + n, ... of it, batch after batch. How far
a worker is in an epoch is then one number. When a job is started again, what its workers had
not done is dealt again, to as many as there are now; the deals before are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf


class Position(NamedTuple):
    """How far a worker is: the batches that it has done of an epoch. Later ones are larger."""

    epoch: int
    batch: int


@dataclass(frozen=True)
class Deal:
    """A deal that is over.

    Attributes:
        batch_size: Samples of a batch.
        positions: How far each worker came.
    """

    batch_size: int
    positions: tuple[Position, ...]


@dataclass(frozen=True)
class DataOrder:
    """Who trains on which sample when. The same on all workers, but for `worker_index`.

    Attributes:
        total: Samples.
        batch_size: Samples of a batch.
        shuffle: Whether each epoch has another order.
        seed: Of these orders.
        num_workers: To whom they are dealt now.
        worker_index: Which of them this is.
        deals: Those before, in order.
        start: Where this worker begins in the present deal.
    """

    total: int
    batch_size: int
    shuffle: bool
    seed: int
    num_workers: int
    worker_index: int
    deals: tuple[Deal, ...] = ()
    start: Position = Position(0, 0)

    def rest(self, epoch: int) -> np.ndarray:
        """Returns what the deals before have left of an epoch, for all workers, in order."""
        rest = epoch_order(self.total, self.shuffle, self.seed, epoch)
        for deal in self.deals:
            rest = rest[~_taken(len(rest), deal, epoch)]
        return rest

    def samples(self, epoch: int) -> np.ndarray:
        """Returns the numbers of the samples that this worker trains on in an epoch, in order."""
        mine = self.rest(epoch)[self.worker_index :: self.num_workers]
        done = self.start.batch * self.batch_size if epoch == self.start.epoch else 0
        return mine[done:].copy()  # not a view, which would keep all

    def begun_epoch(self) -> int:
        """Returns the epoch that this worker begins with: the first that has data left for it."""
        last = self.whole_epoch()
        epochs = range(self.start.epoch, last)
        return next((epoch for epoch in epochs if len(self.samples(epoch))), last)

    def whole_epoch(self) -> int:
        """Returns an epoch that none of the deals before, nor the start, has a part of."""
        positions = [position for deal in self.deals for position in deal.positions]
        return max(position.epoch for position in [self.start, *positions]) + 1


def epoch_order(total: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """Returns the numbers of all samples in an epoch's order.

    The same with every version of numpy: RandomState's streams are frozen, unlike Generator's.
    """
    order = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    if shuffle:
        np.random.RandomState([seed % 2**32, epoch]).shuffle(order)
    return order


def _taken(count: int, deal: Deal, epoch: int) -> np.ndarray:
    """Returns which of so many samples a deal's workers have done in an epoch."""
    taken = np.zeros(count, bool)
    num_workers = len(deal.positions)
    for index, position in enumerate(deal.positions):
        if position.epoch >= epoch:
            share = taken[index::num_workers]  # a view
            done = position.batch * deal.batch_size if position.epoch == epoch else len(share)
            share[:done] = True
    return taken


class DealtBatches(keras.utils.PyDataset):
    """A worker's batches in a DataOrder.

    Keras asks for the length once, before the first epoch: it is that of a whole one. An epoch
    that was begun before is shorter, and ends where its data does.

    Args:
        order: Who trains on what.
        fetch: Returns the batch of some samples, from their numbers.
        workers, use_multiprocessing, max_queue_size: As for `keras.utils.PyDataset`.
        whole: The PyDataset of the user, if it is one, to be told of epochs.
    """

    def __init__(
        self,
        order: DataOrder,
        fetch: Callable[[np.ndarray], Any],
        workers: int = 1,
        use_multiprocessing: bool = False,
        max_queue_size: int = 10,
        whole: Any = None,
    ) -> None:
        super().__init__(
            workers=workers,
            use_multiprocessing=use_multiprocessing,
            max_queue_size=max_queue_size,
        )
        self._order = order
        self._fetch = fetch
        self._whole = whole
        self._samples = order.samples(order.whole_epoch())
        self._whole_length = self.num_batches

    @property
    def is_short(self) -> bool:
        """Whether the present epoch is not a whole one."""
        return self.num_batches < self._whole_length

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch; None if a user's PyDataset makes them."""
        return None if self._whole is not None else self._order.batch_size

    @property
    def length(self) -> int:
        """Batches of the present epoch."""
        return -(-len(self._samples) // self._order.batch_size)

    @property
    def num_batches(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        size = self._order.batch_size
        return self._fetch(self._samples[index * size : (index + 1) * size])

    def begin_epoch(self, epoch: int) -> None:
        """Makes the batches those of an epoch."""
        self._samples = self._order.samples(epoch)

    def begin_whole_epoch(self) -> None:
        """Makes the batches those of an epoch that nobody has a part of."""
        self._samples = self._order.samples(self._order.whole_epoch())

    def on_epoch_begin(self) -> None:
        if self._whole is not None:
            self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._whole is not None:
            self._whole.on_epoch_end()


def array_batches(order: DataOrder, x: Any, y: Any, sample_weight: Any) -> DealtBatches:
    """Returns batches of arrays, which are not copied, as Keras would make them."""
    if sample_weight is not None and tf.nest.is_nested(y) and not tf.nest.is_nested(sample_weight):
        # As Keras does for arrays: one weight of a sample, for each output.
        sample_weight = tf.nest.map_structure(lambda _: sample_weight, y)
    if sample_weight is not None:
        parts: tuple[Any, ...] = (x, y, sample_weight)
    else:
        parts = (x,) if y is None else (x, y)
    parts = _as_tuples(parts)

    def fetch(samples: np.ndarray) -> Any:
        return tf.nest.map_structure(lambda leaf: take(leaf, samples), parts)

    return DealtBatches(order, fetch)


def py_dataset_batches(order: DataOrder, whole: Any) -> DealtBatches:
    """Returns batches of another PyDataset: for `order` each is one sample."""
    return DealtBatches(
        order,
        lambda samples: whole[int(samples[0])],
        whole.workers,
        whole.use_multiprocessing,
        whole.max_queue_size,
        whole,
    )


def can_take(x: Any) -> bool:
    """Whether samples can be taken from these arrays by their numbers."""
    return not any(
        isinstance(leaf, tf.SparseTensor) or type(leaf).__module__.startswith("scipy.sparse")
        for leaf in tf.nest.flatten(x)
    )


def take(array: Any, samples: np.ndarray) -> Any:
    """Returns some samples of an array, floats as Keras' default float type."""
    if array is None:
        return None
    if isinstance(array, tf.RaggedTensor) or tf.is_tensor(array):
        taken = tf.gather(array, samples, axis=0)
        return _as_floatx(taken, tf.cast)
    if hasattr(array, "iloc"):  # pandas: a Series is a column
        values = array.iloc[samples].to_numpy()
        return _as_floatx(values[:, None] if values.ndim == 1 else values, np.asarray)
    if hasattr(array, "__array__") and not isinstance(array, np.ndarray):
        array = np.asarray(array)  # of another library, in place where it can
    if array.dtype.kind in "OU":  # texts
        return tf.convert_to_tensor(array[samples])
    return _as_floatx(array[samples], np.asarray)


def _as_floatx(values: Any, cast: Callable[[Any, str], Any]) -> Any:
    floatx = keras.config.floatx()
    dtype = getattr(values.dtype, "name", "")
    return cast(values, floatx) if "float" in dtype and dtype != floatx else values


def _as_tuples(structure: Any) -> Any:
    """Lists mean single tensors to tf.data."""
    if isinstance(structure, Sequence) and not isinstance(structure, str):
        return tuple(_as_tuples(part) for part in structure)
    if isinstance(structure, dict):
        return {key: _as_tuples(part) for key, part in structure.items()}
    return structure
