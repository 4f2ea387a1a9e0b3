"""Trajectories of many workers against an independent simulation in numpy.

A script of events (steps, exchanges, joins, leaves) runs on real segments and on the oracle. In
the dtype of the center the oracle does the same operations in the same order and must give the
same bits; in float64 it must agree to float32 rounding.
"""

import warnings

import ml_dtypes
import numpy as np
import pytest

from tf_smb import Client, DeltaAveraging, ElasticAveraging, ReadThenAccumulate, Server

# Beside small shapes one that does not fit into a chunk of 256 KiB.
SHAPES = [(3, 5), (), (0, 4), (65_600,), (17,)]
EVENTS = {1: 60, 2: 100, 5: 120, 16: 160}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# What the workers' arrays are made of, what the oracle computes in, and whether to the bit.
DTYPES = {
    "float32": (np.dtype("float32"), np.float32, True),
    "float32 in float64": (np.dtype("float32"), np.float64, False),
    "float64": (np.dtype("float64"), np.float64, True),
    "float16": (np.dtype("float16"), np.float32, True),
    "bfloat16": (BFLOAT16, np.float32, True),
}


class Oracle:
    """Center and workers, by the equations in the docstrings of `tf_smb.rules`.

    Workers' arrays are of `own`, all arithmetic with the center in `wide`.
    """

    def __init__(self, rule, own, wide):
        self.rule = rule
        self.own = own
        self.wide = wide
        self.center = None
        self.local = {}  # x of each worker
        self.base = {}  # l: where its progress is measured from
        self.live = set()
        self.had_company = {}

    def rate(self):
        if isinstance(self.rule, DeltaAveraging):
            return self.rule.gain / len(self.live)
        if self.rule.moving_rate is None:
            return 0.9 / len(self.live)
        return self.rule.moving_rate

    def start(self, worker, arrays):
        if self.center is None:
            self.center = [a.astype(self.wide) for a in arrays]
        self.live.add(worker)
        self.had_company[worker] = False
        self._take(worker, self.center)
        self.base[worker] = [a.astype(self.wide) for a in self.local[worker]]

    def step(self, worker, change):
        self.local[worker] = [
            np.asarray(x + d.astype(self.own))
            for x, d in zip(self.local[worker], change, strict=True)
        ]

    def exchange(self, worker):
        x = [a.astype(self.wide) for a in self.local[worker]]
        delta = isinstance(self.rule, DeltaAveraging)
        if len(self.live) > 1:
            self.had_company[worker] = True
            rate = self.rate()
        elif self.had_company[worker]:
            self.had_company[worker] = False
            rate = 1.0 if delta else 0.5
        else:
            self.center = self.base[worker] = x
            return "unchanged"
        rate = self.wide(rate)
        if delta:
            self.center = [
                g + rate * (a - b)
                for g, a, b in zip(self.center, x, self.base[worker], strict=True)
            ]
            self._take(worker, self.center)
            self.base[worker] = [a.astype(self.wide) for a in self.local[worker]]
        else:
            moves = [rate * (a - g) for a, g in zip(x, self.center, strict=True)]
            self._take(worker, [a - d for a, d in zip(x, moves, strict=True)])
            if isinstance(self.rule, ReadThenAccumulate):  # travels in the worker's dtype
                moves = [d.astype(self.own).astype(self.wide) for d in moves]
            self.center = [g + d for g, d in zip(self.center, moves, strict=True)]
        return "moved"

    def _take(self, worker, values):
        self.local[worker] = [np.asarray(value).astype(self.own) for value in values]


def _changes(random):
    return [np.asarray(random.standard_normal(shape), np.float32) for shape in SHAPES]


@pytest.mark.filterwarnings("ignore:ReadThenAccumulate:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", EVENTS)
@pytest.mark.parametrize(
    "rule",
    [
        ElasticAveraging(),
        ElasticAveraging(moving_rate=0.3),
        DeltaAveraging(),
        DeltaAveraging(1, 1.7),
        ReadThenAccumulate(moving_rate=0.3),
    ],
    ids=["elastic", "elastic-0.3", "delta", "delta-1.7", "read-then-accumulate"],
)
def test_trajectory(rule, workers, dtype):
    own, wide, exact = DTYPES[dtype]
    random = np.random.default_rng(1000 * workers + len(repr(rule)))
    oracle = Oracle(rule, own if exact else np.dtype(wide), wide)
    with Server() as server:
        client = Client(server.address)
        layout = [(f"v{i}", shape, own) for i, shape in enumerate(SHAPES)]
        segments = [
            client.create("run", layout, exchange_threads=1 + i % 2) for i in range(workers)
        ]
        local = {}

        def compare(worker):
            for ours, theirs in (
                (local[worker], oracle.local[worker]),
                (segments[worker].read(wide=True), oracle.center),
            ):
                for a, b in zip(ours, theirs, strict=True):
                    if exact:
                        np.testing.assert_array_equal(a, b)
                    else:
                        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

        def start(worker):
            local[worker] = [change.astype(own) for change in _changes(random)]
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
                    x += d.astype(own)
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
        assert rates == [0.9 / p for p in (2, 3, 4, 3, 2)]


def test_workers_may_exchange_the_center_dtype():
    """A float32 array for a bfloat16 variable: nothing is rounded."""
    with Server() as server:
        client = Client(server.address)
        a, b = (client.create("run", [("w", (3,), "bfloat16")]) for _ in range(2))
        x = np.array([1, 2, 1 / 3], np.float32)
        a.start([x], rule=ElasticAveraging(moving_rate=0.1))
        b.start([np.zeros(3, BFLOAT16)], rule=ElasticAveraging(moving_rate=0.1))
        old, center = x + np.float32(0.001), x.copy()
        x[:] = old
        assert a.exchange([x]) == "moved"
        moved = np.float32(0.1) * (old - center)
        np.testing.assert_array_equal(x, old - moved)
        np.testing.assert_array_equal(a.read(wide=True)[0], center + moved)
        np.testing.assert_array_equal(a.read()[0], (center + moved).astype(BFLOAT16))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rule", [ElasticAveraging(), DeltaAveraging(), ReadThenAccumulate()])
def test_what_is_not_a_float_stays(rule, workers):
    layout = [("w", (2,)), ("count", (2,), "int64"), ("mask", (), "bool")]

    def arrays(value):
        return [
            np.full(2, value, np.float32),
            np.full(2, value, np.int64),
            np.array(bool(value), np.bool_),
        ]

    with Server() as server:
        client = Client(server.address)
        segments = [client.create("run", layout) for _ in range(workers)]
        for segment in segments:
            first = arrays(7)
            segment.start(first, rule=rule)
        local = arrays(0)
        assert segments[0].exchange(local) == ("unchanged" if workers == 1 else "moved")
        assert local[1].tolist() == [0, 0]
        assert not local[2]
        w, count, mask = segments[0].read()
        assert (w != 7).all()
        assert count.tolist() == [7, 7]
        assert mask
        # Those who ask for it still get it.
        segments[0].read_into(local)
        assert local[1].tolist() == [7, 7]
        assert local[2]


def test_unstable_rates_are_said_once():
    with Server() as server:
        client = Client(server.address)
        segments = [client.create("run", [("w", (2,))]) for _ in range(4)]
        for segment in segments[:2]:
            segment.start([np.zeros(2, np.float32)], rule=ReadThenAccumulate(moving_rate=0.5))
        x = [np.ones(2, np.float32)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            segments[0].exchange(x)  # 0.5 < 2 / 3
        segments[2].set_rule(None)
        segments[2].join()
        with pytest.warns(RuntimeWarning, match="moving_rate=0.5 .* 3 workers .* = 0.5$") as said:
            segments[0].exchange(x)
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            segments[0].exchange(x)
            segments[2].exchange(x)  # another rule
