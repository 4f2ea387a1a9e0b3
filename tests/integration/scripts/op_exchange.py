"""Runs an exchange through the op, eagerly and in a graph, and compares it with numpy."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf

import tf_smb
from tf_smb import ops

random = np.random.default_rng(0)
shapes = [(3, 5), (), (7,), (0,), (200, 400)]
layout = [(f"v{i}", shape) for i, shape in enumerate(shapes)]


def values():
    return [np.asarray(random.normal(size=shape), np.float32) for shape in shapes]


with tf_smb.Server() as server:
    client = tf_smb.Client(server.address, job_id="job")
    rule = tf_smb.ElasticAveraging(1, moving_rate=0.25)
    center, local = values(), values()
    segment = client.create("model", layout, num_workers=1)
    segment.start([value.copy() for value in center], worker_index=0, rule=rule)
    other = client.attach("model")
    other.join(1)  # two live workers: the rule moves both sides

    handle = segment.handle

    def exchange(tensors, steps=7):
        steps = tf.constant(steps, tf.int64)
        return ops.exchange(handle, steps, 2 * steps, tensors)

    def is_due(steps):
        steps = tf.constant(steps, tf.int64)
        return bool(ops.is_due(handle, steps, steps)), bool(graph_is_due(steps))

    @tf.function
    def graph_is_due(steps):
        due = ops.is_due(handle, steps, steps)
        assert due.shape == () and due.dtype == tf.bool
        return due

    for run in (exchange, tf.function(exchange)):
        center = segment.read()
        outcome, deltas = run([tf.constant(value) for value in local])
        assert int(outcome) == ops.MOVED, outcome
        for x, g, delta, after in zip(local, center, deltas, segment.read(), strict=True):
            assert delta.shape == x.shape
            moved = np.float32(0.25) * (x - g)
            np.testing.assert_array_equal(delta.numpy(), moved)
            np.testing.assert_array_equal(after, g + moved)
    member = segment.members()[0]
    assert (member.steps, member.batch) == (7, 14)
    assert is_due(7) == (False, False)
    assert is_due(8) == (True, True)  # its period is 1
    segment.set_period(4)
    assert [is_due(steps) for steps in (10, 11)] == [(False, False), (True, True)]
    other.detach()
    # Alone: first it takes over what is there, then the center takes its weights.
    exchange([tf.constant(value) for value in local])
    outcome, _ = exchange([tf.constant(value) for value in local])
    assert int(outcome) == ops.UNCHANGED, outcome
    for x, after in zip(local, segment.read(), strict=True):
        np.testing.assert_array_equal(after, x)

    try:
        exchange([tf.constant(value) for value in local[:-1]])
        raise AssertionError("the wrong number of variables was accepted")
    except tf.errors.InvalidArgumentError as error:
        assert "the segment has 5 variables, the op got 4 [SMB-E231]" in str(error)
    bad = [value.copy() for value in local]
    bad[2][3] = np.nan
    try:
        exchange([tf.constant(value) for value in bad])
        raise AssertionError("NaN was accepted")
    except tf.errors.InvalidArgumentError as error:
        assert "'v2' float32[7] of this worker holds NaN or Inf" in str(error)
        assert "[SMB-E185]" in str(error)

    # A round: the new values themselves, not what to subtract.
    segment.set_rule(tf_smb.PeriodicAveraging(2))
    other = client.attach("model")
    other.join(1)
    theirs = values()
    with ThreadPoolExecutor(1) as pool:
        round = pool.submit(other.average, [value.copy() for value in theirs], 4.0)
        outcome, means = tf.function(exchange)([tf.constant(value) for value in local], 11)
        round.result()
    assert int(outcome) == ops.REPLACED, outcome
    for x, y, mean, after in zip(local, theirs, means, segment.read(), strict=True):
        np.testing.assert_array_equal(mean.numpy(), after)
        np.testing.assert_allclose(after, (4 * x + 4 * y) / 8, rtol=1e-6, atol=1e-6)
    assert segment.stats()["rounds"] == 1
    other.detach()

    segment.detach()
    for call in (lambda: exchange([tf.constant(value) for value in local]), lambda: is_due(1)):
        try:
            call()
            raise AssertionError("a call after detach was accepted")
        except tf.errors.FailedPreconditionError as error:
            assert "is not attached in this process [SMB-E234]" in str(error)

print(
    "RESULT "
    + json.dumps(
        {
            "worker": 0,
            "tensorflow": tf.__version__,
            "sha256": hashlib.sha256(ops.library_path().read_bytes()).hexdigest(),
        }
    )
)
