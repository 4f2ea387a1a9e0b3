"""Dividing tf.data pipelines: every sample at exactly one worker, batches as before."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_smb.strategies import data, dataset_graph

N = 103
X = np.arange(N, dtype=np.float32)
Dataset = tf.data.Dataset


def _generator():
    yield from range(N)


# Name: pipeline, its batch size, whether the division is at the source.
PIPELINES = {
    "slices": (lambda: Dataset.from_tensor_slices(X).shuffle(200).batch(8), 8, True),
    "pairs": (
        lambda: Dataset.from_tensor_slices((X, X)).map(lambda a, b: (a, b * 2)).cache().batch(4),
        4,
        True,
    ),
    "range": (lambda: Dataset.range(N).shuffle(10).batch(7).prefetch(2), 7, True),
    "filtered": (
        lambda: Dataset.range(2 * N).filter(lambda i: i < N).batch(7, drop_remainder=False),
        7,
        True,
    ),
    "parallel": (
        lambda: Dataset.range(N).map(lambda i: i, num_parallel_calls=tf.data.AUTOTUNE).batch(5),
        5,
        True,
    ),
    "take": (lambda: Dataset.range(2 * N).take(N).batch(8), 8, False),
    "take_shuffled": (lambda: Dataset.range(N).shuffle(N).take(N).batch(8), 8, False),
    "zip": (
        lambda: Dataset.zip((Dataset.range(N), Dataset.range(N))).shuffle(N).batch(4),
        4,
        False,
    ),
    "generator": (
        lambda: Dataset.from_generator(
            _generator, output_signature=tf.TensorSpec((), tf.int32)
        ).batch(2),
        2,
        False,
    ),
}


def _seen(dataset):
    return [
        int(value)
        for batch in dataset
        for value in np.ravel(batch[0] if isinstance(batch, tuple) else batch)
    ]


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_sample_at_exactly_one_worker(name, num_workers):
    make, batch, at_source = PIPELINES[name]
    assert dataset_graph.batch_size(make()) == batch
    # Each worker makes its own pipeline, as its own script does.
    parts = [dataset_graph.divide(make(), num_workers, i) for i in range(num_workers)]
    for _ in range(2):  # epochs
        seen = [_seen(part.dataset) for part in parts]
        together = sorted(value for values in seen for value in values)
        assert together == list(range(N))
        assert min(len(values) for values in seen) > 0
    for part in parts:
        assert part.dataset.element_spec == make().element_spec
        assert (part.samples is not None) == at_source
        assert bool(part.warning) == (name == "generator")
    if at_source and name != "filtered":
        assert parts[0].samples == N
        sizes = [int(part.dataset.cardinality()) for part in parts]
        expected = [-(-len(range(i, N, num_workers)) // batch) for i in range(num_workers)]
        assert sizes == expected


def test_shuffle_differs_between_epochs():
    part = dataset_graph.divide(Dataset.range(N).shuffle(N).take(N).batch(8), 2, 0)
    assert _seen(part.dataset) != _seen(part.dataset)


def test_large_pipeline_is_not_serialised(monkeypatch):
    monkeypatch.setattr(dataset_graph, "_MAX_GRAPH_BYTES", 100)
    part = dataset_graph.divide(Dataset.from_tensor_slices(X).batch(8), 2, 1)
    assert part.warning
    assert _seen(part.dataset)[:8] == list(range(8, 16))


def test_arrays_of_every_kind_are_divided_alike():
    x = {"a": X, "b": np.stack([X, X], axis=1)}
    part = data.share(x, X, None, None, 0.0, 4, 1)
    assert part.samples == 26 and part.total_samples == N
    np.testing.assert_array_equal(part.x["a"], X[1::4])
    np.testing.assert_array_equal(part.x["b"][:, 1], X[1::4])
    np.testing.assert_array_equal(part.y, X[1::4])
    tensors = data.share(tf.constant(X), tf.constant(X), None, None, 0.0, 4, 1)
    np.testing.assert_array_equal(tensors.x.numpy(), X[1::4])


def test_validation_split_is_the_same_on_all_workers():
    parts = [data.share(X, X, None, None, 0.2, 2, i) for i in range(2)]
    train = sorted(float(v) for part in parts for v in part.x)
    assert train == list(range(82))
    for part in parts:
        np.testing.assert_array_equal(part.validation_data[0], X[82:])


def test_alone_nothing_is_changed():
    dataset = Dataset.range(10).batch(2)
    assert data.share(dataset, None, None, None, 0.0, 1, 0).x is dataset
    part = data.share(X, X, None, None, 0.2, 1, 0)
    assert part.x is X and not part.divided
