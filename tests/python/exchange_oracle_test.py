"""Trajectories of many workers against an independent simulation in numpy.

A script of events (steps, exchanges, joins, leaves) runs on real segments and on the oracle. In
float32 the oracle does the same operations in the same order and must give the same bits; in
float64 it must agree to float32 rounding.
"""

import numpy as np
import pytest

from tf_smb import Client, DeltaAveraging, ElasticAveraging, Server

# Beside small shapes one that does not fit into a chunk of 65536 elements.
SHAPES = [(3, 5), (), (0, 4), (65_600,), (17,)]
EVENTS = {1: 60, 2: 100, 5: 120, 16: 160}


class Oracle:
    """Center and workers, by the equations in the docstrings of `tf_smb.rules`."""

    def __init__(self, rule, dtype):
        self.rule = rule
        self.dtype = dtype
        self.center = None
        self.local = {}  # x of each worker
        self.base = {}  # l: where its progress is measured from
        self.live = set()
        self.had_company = {}

    def rate(self):
        count = self.dtype(len(self.live))
        if isinstance(self.rule, DeltaAveraging):
            return self.dtype(np.float32(self.rule.gain)) / count
        if self.rule.moving_rate is None:
            return self.dtype(np.float32(0.9)) / count
        return self.dtype(np.float32(self.rule.moving_rate))

    def start(self, worker, arrays):
        if self.center is None:
            self.center = [a.astype(self.dtype) for a in arrays]
        self.local[worker] = [g.copy() for g in self.center]
        self.base[worker] = [g.copy() for g in self.center]
        self.live.add(worker)
        self.had_company[worker] = False

    def step(self, worker, change):
        self.local[worker] = [
            x + d.astype(self.dtype) for x, d in zip(self.local[worker], change, strict=True)
        ]

    def exchange(self, worker):
        x = self.local[worker]
        delta = isinstance(self.rule, DeltaAveraging)
        if len(self.live) > 1:
            self.had_company[worker] = True
            rate = self.rate()
        elif self.had_company[worker]:
            self.had_company[worker] = False
            rate = self.dtype(1 if delta else 0.5)
        else:
            self.center = [a.copy() for a in x]
            self.base[worker] = [a.copy() for a in x]
            return "unchanged"
        if delta:
            self.center = [
                g + rate * (a - b)
                for g, a, b in zip(self.center, x, self.base[worker], strict=True)
            ]
            self.local[worker] = [g.copy() for g in self.center]
            self.base[worker] = [g.copy() for g in self.center]
        else:
            moves = [rate * (a - g) for a, g in zip(x, self.center, strict=True)]
            self.local[worker] = [a - d for a, d in zip(x, moves, strict=True)]
            self.center = [g + d for g, d in zip(self.center, moves, strict=True)]
        return "moved"


def _changes(random):
    return [np.asarray(random.standard_normal(shape), np.float32) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("workers", EVENTS)
@pytest.mark.parametrize(
    "rule",
    [
        ElasticAveraging(),
        ElasticAveraging(moving_rate=0.3),
        DeltaAveraging(),
        DeltaAveraging(1, 1.7),
    ],
    ids=["elastic", "elastic-0.3", "delta", "delta-1.7"],
)
def test_trajectory(rule, workers, dtype):
    random = np.random.default_rng(1000 * workers + len(repr(rule)))
    oracle = Oracle(rule, dtype)
    with Server() as server:
        client = Client(server.address)
        layout = [(f"v{i}", shape) for i, shape in enumerate(SHAPES)]
        segments = [
            client.create("run", layout, exchange_threads=1 + i % 2) for i in range(workers)
        ]
        local = {}

        def compare(worker):
            for ours, theirs in (
                (local[worker], oracle.local[worker]),
                (segments[worker].read(), oracle.center),
            ):
                for a, b in zip(ours, theirs, strict=True):
                    if dtype is np.float32:
                        np.testing.assert_array_equal(a, b)
                    else:
                        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

        def start(worker):
            local[worker] = _changes(random)
            oracle.start(worker, local[worker])
            seeded = segments[worker].start(local[worker], worker_index=worker, rule=rule)
            assert seeded == (worker == first)
            compare(worker)

        first = 0
        start(0)
        exchanges = 0
        for event in range(EVENTS[workers]):
            worker = int(random.integers(workers))
            if worker not in local:
                start(worker)
            elif worker not in oracle.live:
                segments[worker].join(worker)
                oracle.live.add(worker)
            elif random.random() < 0.05 and len(oracle.live) > 1:
                segments[worker].leave()
                oracle.live.remove(worker)
            elif random.random() < 0.5:
                change = _changes(random)
                for x, d in zip(local[worker], change, strict=True):
                    x += d
                oracle.step(worker, change)
            else:
                outcome = segments[worker].exchange(local[worker], steps=event)
                exchanges += 1
                assert outcome == oracle.exchange(worker)
                assert segments[worker].stats()["last_num_live"] == len(oracle.live)
                compare(worker)
        assert exchanges > 10
        assert sum(s.stats()["exchanges"] for s in segments) == exchanges
        assert segments[0].version == 1 + exchanges  # one for the seed
        for segment in segments:
            segment.detach()


@pytest.mark.parametrize("rule", [ElasticAveraging(), DeltaAveraging()])
def test_alone_is_plain_training(rule):
    with Server() as server:
        segment = Client(server.address).create("run", [("w", (4,))])
        x = np.zeros(4, np.float32)
        segment.start([x], rule=rule)
        for step in range(5):
            x += np.float32(1.25)
            before = x.copy()
            assert segment.exchange([x], step) == "unchanged"
            np.testing.assert_array_equal(x, before)
            np.testing.assert_array_equal(segment.read()[0], before)


def test_last_of_several_takes_over_the_center_once():
    with Server() as server:
        client = Client(server.address)
        a, b = (client.create("run", [("w", (2,))]) for _ in range(2))
        x, y = np.zeros(2, np.float32), np.zeros(2, np.float32)
        a.start([x], rule=ElasticAveraging(moving_rate=0.5))
        b.start([y], rule=ElasticAveraging(moving_rate=0.5))
        y += 8
        assert b.exchange([y]) == "moved"  # center 4
        assert a.exchange([x]) == "moved"  # both 2
        b.exchange([y])  # y 4, center 2: both 3
        b.detach()
        x += 1
        assert a.exchange([x]) == "moved"
        np.testing.assert_array_equal(x, [3, 3])
        assert a.stats()["last_rate"] == 0.5
        x += 1
        assert a.exchange([x]) == "unchanged"
        np.testing.assert_array_equal(a.read()[0], [4, 4])


def test_moving_rate_follows_joins_and_leaves():
    with Server() as server:
        client = Client(server.address)
        segments = [client.create("run", [("w", ())]) for _ in range(4)]
        x = np.zeros((), np.float32)
        segments[0].start([x], rule=ElasticAveraging())
        rates = []
        for other in segments[1:]:
            other.join()
            segments[0].exchange([x])
            rates.append(segments[0].stats()["last_rate"])
        for other in segments[1:3]:
            other.leave()
            segments[0].exchange([x])
            rates.append(segments[0].stats()["last_rate"])
        expected = [np.float32(0.9) / np.float32(p) for p in (2, 3, 4, 3, 2)]
        assert rates == [float(rate) for rate in expected]
