"""The order of the training data under BackupAndRestore: dealt, interrupted, dealt again."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_smb.strategies import data_order
from tf_smb.strategies.data_order import DataOrder, Deal, Position


def orders(total, num_workers, deals=(), starts=None, batch_size=8, shuffle=True, seed=3):
    starts = starts or [Position(0, 0)] * num_workers
    return [
        DataOrder(total, batch_size, shuffle, seed, num_workers, index, tuple(deals), starts[index])
        for index in range(num_workers)
    ]


def trained(worker, position):
    """What a worker has seen of each epoch, up to a position, since its start."""
    seen = {}
    for epoch in range(worker.start.epoch, position.epoch + 1):
        samples = worker.samples(epoch)
        done_before = worker.start.batch if epoch == worker.start.epoch else 0
        batches = position.batch - done_before
        seen[epoch] = samples if epoch < position.epoch else samples[: batches * worker.batch_size]
    return seen


@pytest.mark.parametrize("total", [1, 7, 64, 1003])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_is_one_workers_in_each_epoch(total, shuffle):
    for epoch in range(3):
        dealt = [worker.samples(epoch) for worker in orders(total, 4, shuffle=shuffle)]
        assert sorted(np.concatenate(dealt)) == list(range(total))
        lengths = [len(samples) for samples in dealt]
        assert max(lengths) - min(lengths) <= 1


def test_order_is_of_seed_and_epoch():
    first = data_order.epoch_order(100, True, 5, 0)
    np.testing.assert_array_equal(first, data_order.epoch_order(100, True, 5, 0))
    assert (first != data_order.epoch_order(100, True, 5, 1)).any()
    assert (first != data_order.epoch_order(100, True, 6, 0)).any()
    np.testing.assert_array_equal(data_order.epoch_order(9, False, 5, 1), np.arange(9))


def test_order_is_the_same_with_every_numpy():
    """Backups are gone on with under other versions: never change these numbers."""
    assert data_order.epoch_order(8, True, 1, 2).tolist() == FROZEN


FROZEN = [2, 4, 1, 5, 6, 3, 0, 7]


@pytest.mark.parametrize("total", [517, 40, 13])
@pytest.mark.parametrize("seed", range(5))
def test_chain_of_interruptions_trains_every_sample_once(total, seed):
    """4 workers, then 3, then 5, each killed somewhere in two epochs."""
    random = np.random.default_rng(seed)
    seen = {0: [], 1: []}
    deals = []
    for num_workers, batch_size in ((4, 8), (3, 5), (5, 8)):
        workers = orders(total, num_workers, deals, batch_size=batch_size)
        positions = []
        for worker in workers:
            epoch = int(random.integers(0, 2))
            batches = -(-len(worker.samples(epoch)) // batch_size)
            positions.append(Position(epoch, int(random.integers(0, batches + 1))))
            for e, samples in trained(worker, positions[-1]).items():
                seen[e].append(samples)
        deals.append(Deal(batch_size, tuple(positions)))
    for worker in orders(total, 2, deals):
        for epoch in (0, 1):
            seen[epoch].append(worker.samples(epoch))
        assert len(worker.samples(2)) in (total // 2, -(-total // 2))  # a whole one again
    for epoch in (0, 1):
        assert sorted(np.concatenate(seen[epoch])) == list(range(total))


def test_same_workers_go_on_with_their_own_shares():
    positions = [Position(1, 3), Position(0, 5), Position(1, 0)]
    before = orders(100, 3)
    after = orders(100, 3, starts=positions)
    for old, new, position in zip(before, after, positions, strict=True):
        seen = trained(old, position)
        for epoch in range(position.epoch, 3):
            both = np.concatenate([seen.get(epoch, np.zeros(0, int)), new.samples(epoch)])
            np.testing.assert_array_equal(both, old.samples(epoch))


def test_worker_begins_with_the_first_epoch_that_has_data_left():
    (worker,) = orders(20, 1, starts=[Position(0, 3)])  # 3 batches of 8: all of it
    assert worker.begun_epoch() == 1
    assert orders(20, 1, starts=[Position(0, 2)])[0].begun_epoch() == 0
    deals = [Deal(8, (Position(1, 2), Position(2, 1)))]  # 10 samples each
    assert orders(20, 1, deals)[0].begun_epoch() == 2
    # Of 3 samples that are left, the last of 4 workers gets none.
    deals = [Deal(1, (Position(0, 17),))]
    assert [worker.begun_epoch() for worker in orders(20, 4, deals)] == [0, 0, 0, 1]


def test_batches_of_arrays_keep_the_ragged_last_one_and_weights():
    x = {"a": np.arange(21.0)[:, None], "b": [tf.range(21)]}
    y, weight = np.arange(21), np.arange(21) / 2
    (order,) = orders(21, 1)
    batches = data_order.array_batches(order, x, y, weight)
    assert batches.num_batches == 3
    batches.begin_epoch(0)
    seen = [batches[i] for i in range(3)]
    assert [len(part[1]) for part in seen] == [8, 8, 5]
    for xs, ys, weights in seen:
        np.testing.assert_array_equal(xs["a"][:, 0], ys)
        np.testing.assert_array_equal(xs["b"][0], ys)
        np.testing.assert_array_equal(weights, ys / 2)
        assert xs["a"].dtype == weights.dtype == "float32"  # as Keras makes them of arrays
        assert isinstance(xs["b"], tuple)
    assert sorted(np.concatenate([ys for _, ys, _ in seen])) == list(range(21))


def test_one_weight_for_several_outputs():
    (order,) = orders(4, 1, shuffle=False)
    batches = data_order.array_batches(
        order, np.zeros(4), {"p": np.zeros(4), "q": np.ones(4)}, np.arange(4)
    )
    _, _, weights = batches[0]
    np.testing.assert_array_equal(weights["p"], weights["q"])


def test_arrays_are_not_copied():
    class Watched(np.ndarray):
        taken = 0

        def __getitem__(self, rows):
            Watched.taken += len(rows)
            return np.asarray(super().__getitem__(rows))

    x = np.zeros((1000, 10), np.float32).view(Watched)
    (order,) = orders(1000, 1)
    batches = data_order.array_batches(order, x, None, None)
    assert Watched.taken == 0
    batches.begin_epoch(3)
    batches[0]
    assert Watched.taken == 8


def test_pandas_ragged_and_texts():
    rows = np.array([2, 0])
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]])
    assert data_order.take(ragged, rows).to_list() == [[4.0, 5.0, 6.0], [1.0]]
    texts = data_order.take(np.array(["a", "b", "c"]), rows)
    assert texts.numpy().tolist() == [b"c", b"a"]
    pandas = pytest.importorskip("pandas")
    series = data_order.take(pandas.Series([1.0, 2.0, 3.0]), rows)
    assert series.tolist() == [[3.0], [1.0]]
    frame = data_order.take(pandas.DataFrame({"a": [1, 2, 3]}), rows)
    assert frame.tolist() == [[3], [1]]


def test_whole_length_is_what_keras_sees_and_a_short_epoch_ends_early():
    (order,) = orders(64, 1, starts=[Position(1, 5)])
    batches = data_order.array_batches(order, np.arange(64), None, None)
    assert batches.num_batches == 8 and not batches.is_short
    batches.begin_epoch(1)
    assert batches.num_batches == 3 and batches.is_short
    batches.begin_epoch(2)
    assert batches.num_batches == 8 and not batches.is_short
    batches.begin_epoch(1)
    batches.begin_whole_epoch()
    assert batches.num_batches == 8


class Squares(keras.utils.PyDataset):
    def __init__(self, length):
        super().__init__(workers=1)
        self.length = length
        self.begun = self.ended = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.full((2, 1), index), np.full((2, 1), index**2)

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def test_batches_of_a_py_dataset_are_dealt_whole():
    whole = Squares(11)
    dealt = [data_order.py_dataset_batches(order, whole) for order in orders(11, 3, batch_size=1)]
    assert [batches.num_batches for batches in dealt] == [4, 4, 3]
    seen = []
    for batches in dealt:
        batches.on_epoch_begin()
        batches.begin_epoch(0)
        seen += [int(batches[i][0][0, 0]) for i in range(batches.num_batches)]
        batches.on_epoch_end()
    assert sorted(seen) == list(range(11))
    assert whole.begun == whole.ended == 3


def test_keras_trains_a_short_epoch_and_then_whole_ones():
    seen = []

    class Watching(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            batches.begin_epoch(epoch)
            seen.append(0)

        def on_train_batch_end(self, batch, logs=None):
            seen[-1] += 1

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    (order,) = orders(61, 1, starts=[Position(1, 5)])
    values = np.arange(61.0)[:, None]
    batches = data_order.array_batches(order, values, values, None)
    with pytest.warns(UserWarning, match="ran out of data"):  # fit_session lets nobody see it
        model.fit(
            batches, epochs=4, initial_epoch=1, shuffle=False, verbose=0, callbacks=[Watching()]
        )
    assert seen == [3, 8, 8]


def test_keras_goes_through_an_epoch_without_data():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    values = np.arange(16.0)[:, None]
    # Nothing is left of epoch 0, all of epoch 1.
    (order,) = orders(16, 1, [Deal(8, (Position(0, 2),))])
    batches = data_order.array_batches(order, values, values, None)
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: batches.begin_epoch(epoch)
    )
    with pytest.warns(UserWarning, match="ran out of data"):
        history = model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=[begin])
    assert len(history.history["loss"]) == 1  # Keras has no logs of the other
