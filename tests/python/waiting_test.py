"""Rounds, barriers, the lock and versions: what workers wait for each other with."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from children import DEADLINE_S, LAYOUT, wait_until, zeros

from tf_smb import Client, DeltaAveraging, ElasticAveraging, Round
from tf_smb.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
)

BAD_TIMEOUTS = [-1, float("nan"), 1e10, True, "1", []]
WAITS = {
    "average": lambda s, **options: s.average(zeros(), **options),
    "barrier": lambda s, **options: s.barrier([0, 5], **options),
    "lock": lambda s, **options: s.lock(**options),
    "wait_version": lambda s, announce=None, **options: s.wait_version(10**9, **options),
}


@pytest.fixture
def client(server):
    return Client(server.address, job_id="job")


@pytest.fixture
def make(client):
    """Makes so many members of one segment."""
    segments = []

    def create(count, layout=LAYOUT, name="run"):
        made = [client.create(name, layout) for _ in range(count)]
        for index, segment in enumerate(made):
            segment.join(index)
        segments.extend(made)
        return made

    yield create
    for segment in segments:
        segment.detach()


def together(segments, call):
    """Runs call(segment, index) on a thread each; returns what they returned."""
    with ThreadPoolExecutor(len(segments)) as pool:
        return list(pool.map(call, segments, range(len(segments))))


# --- Rounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16])
def test_mean_of_two_to_the_bit(make, dtype):
    """Whoever comes first: with halves and whole numbers nothing is rounded."""
    segments = make(2, [("w", (70_000,), dtype), ("s", (), dtype), ("none", (0,), dtype)])
    for number in range(1, 6):
        arrays = [
            [
                np.full(70_000, value, dtype),
                np.asarray(value).astype(dtype),
                np.zeros(0, dtype),
            ]
            for value in (number, 4 + 3 * number)
        ]
        rounds = together(segments, lambda s, i, a=arrays, n=number: s.average(a[i], steps=n))
        assert rounds == [Round(number, ())] * 2
        for mine in arrays:
            assert (mine[0] == 2 + 2 * number).all()
            assert mine[1] == 2 + 2 * number
    assert segments[0].rounds_closed == 5
    assert [member.steps for member in segments[0].members()] == [5, 5]


def test_weighted_mean_of_many(make):
    count = 6
    segments = make(count)
    random = np.random.default_rng(1)
    shares = [
        [random.standard_normal(shape).astype(np.float32) for _, shape in LAYOUT]
        for _ in range(count)
    ]
    weights = random.uniform(0.1, 10, count)
    expected = [
        np.average([share[v].astype(np.float64) for share in shares], axis=0, weights=weights)
        for v in range(len(LAYOUT))
    ]
    arrays = [[array.copy() for array in share] for share in shares]
    segments[0].write(zeros(1e6))  # what was there before does not count
    together(segments, lambda s, i: s.average(arrays[i], weight=float(weights[i])))
    for mine in arrays:
        for got, want, first in zip(mine, expected, arrays[0], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(got, first)


def test_round_without_who_does_not_come(make):
    a, b, c = make(3)
    arrays = zeros(3)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(b.average, zeros(5), timeout_s=60)
        assert a.average(arrays, timeout_s=0.5) == Round(1, (2,))
        other.result(DEADLINE_S)
    assert (arrays[0] == 4).all()
    assert (c.read()[1] == 4).all()
    c.leave()
    assert [r.number for r in together([a, b], lambda s, i: s.average(zeros()))] == [2, 2]


def test_round_of_one(make):
    (a,) = make(1)
    arrays = zeros(3)
    assert a.average(arrays) == Round(1, ())
    assert (a.read()[0] == 3).all()


def test_round_does_not_wait_for_who_leaves(make):
    a, b = make(2)
    with ThreadPoolExecutor(1) as pool:
        arrays = zeros(3)
        average = pool.submit(a.average, arrays, timeout_s=DEADLINE_S)
        wait_until(lambda: (b.read()[1] == 3).all())
        assert not average.done()
        b.leave()
        assert average.result(DEADLINE_S) == Round(1, ())


def test_delta_averaging_goes_on_from_the_mean(make):
    a, b = make(2)
    for segment in (a, b):
        segment.set_rule(DeltaAveraging())
    arrays = [zeros(2), zeros(6)]
    together([a, b], lambda s, i: s.average(arrays[i]))
    for array in arrays[0]:
        array += 8  # of 4, half of which reaches the center
    assert a.exchange(arrays[0]) == "moved"
    assert (a.read()[0] == 8).all()


def test_round_leaves_what_is_not_a_float(make):
    a, b = make(2, [("w", (2,)), ("n", (2,), "int32")])
    a.write([np.zeros(2, np.float32), np.full(2, 7, np.int32)])
    arrays = [[np.full(2, i, np.float32), np.full(2, i, np.int32)] for i in (0, 1)]
    together([a, b], lambda s, i: s.average(arrays[i]))
    assert [array.tolist() for array in arrays[1]] == [[0.5, 0.5], [1, 1]]
    assert a.read()[1].tolist() == [7, 7]


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "x", None, True])
def test_bad_weights(make, weight):
    (a,) = make(1)
    with pytest.raises(InvalidArgumentError, match="weight"):
        a.average(zeros(1), weight)
    assert a.version == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_shares(make, bad):
    (a,) = make(1)
    a.write(zeros(2))
    arrays = zeros(1)
    arrays[1][2] = bad
    with pytest.raises(InvalidArgumentError, match=r"'b' float32\[3\].*NaN or Inf"):
        a.average(arrays)
    assert (a.read()[0] == 2).all()
    with pytest.raises(InvalidArgumentError, match="has 2 variables, got 1 arrays"):
        a.average(zeros()[:1])
    assert a.average(zeros()) == Round(1, ())


def test_statistics_during_a_round(make):
    """Neither waits for the other for ever: one has the GIL, one the lock of exchanges."""
    a, _ = make(2)
    with ThreadPoolExecutor(1) as pool:
        average = pool.submit(a.average, zeros(), timeout_s=1)
        while not average.done():
            a.stats()
            a.set_rule(ElasticAveraging())
        assert average.result() == Round(1, (1,))


# --- Barriers ----------------------------------------------------------------------------


def test_nobody_passes_before_all_are_there(make):
    segments = make(5)
    arrived = [0] * 5

    def work(segment, index):
        for step in range(1, 30):
            arrived[index] = step
            segment.barrier(range(5))
            assert min(arrived) >= step

    together(segments, work)


def test_barrier_of_some(make):
    a, b, _ = make(3)
    with ThreadPoolExecutor(1) as pool:
        passed = pool.submit(a.barrier, (1, 0))
        time.sleep(0.1)
        assert not passed.done()
        b.barrier([0, 1])
        passed.result(DEADLINE_S)


def test_barrier_of_those_who_are_live(make):
    segments = make(3)
    segments.pop().leave()
    together(segments, lambda s, i: s.barrier())


def test_barrier_waits_for_those_who_never_joined(make):
    (a,) = make(1)
    with pytest.raises(
        DeadlineExceededError, match="0.2 s in vain for workers 3, 9 at the barrier"
    ):
        a.barrier([0, 3, 9], timeout_s=0.2)
    a.barrier([0])


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ([1], "worker 0 is not in the list"),
        ([], "worker 0 is not in the list"),
        ([0, 1024], "worker_index must be"),
        ([0, -1], "worker_index must be"),
        ([0, "x"], "worker_index must be"),
    ],
)
def test_bad_barriers(make, workers, words):
    (a,) = make(1)
    with pytest.raises(InvalidArgumentError, match=words):
        a.barrier(workers)


# --- The lock ------------------------------------------------------------------------------


def test_lock_excludes(make):
    segments = make(4, [("count", (1,), "float64")], "count")
    tokens = []

    def work(segment, index):
        for _ in range(50):
            with segment.lock() as lock:
                tokens.append(lock.token)
                segment.write_slice(0, 0, segment.read_slice(0, 0, 1) + 1)

    together(segments, work)
    assert segments[0].read()[0].tolist() == [200]
    assert tokens == list(range(1, 201))
    assert segments[0].lock_holder is None


def test_lock_is_had_by_one(make):
    a, b = make(2)
    lock = b.lock()
    assert a.lock_holder == b.lock_holder == 1
    for timeout_s in (0, 0.2):
        with pytest.raises(DeadlineExceededError, match="segment 'run', which worker 1 has"):
            a.lock(timeout_s=timeout_s)
    lock.release()
    lock.release()
    assert a.lock_holder is None
    with a.lock(timeout_s=0) as mine:
        assert mine.token == lock.token + 1
    # Another's goodbye ends it too.
    b.lock(lease_s=3600)
    b.leave()
    a.lock(timeout_s=0).release()


def test_lock_lapses(make):
    a, b = make(2)
    lapsed = a.lock(lease_s=0.2)
    started = time.monotonic()
    with b.lock(timeout_s=DEADLINE_S) as lock:
        assert 0.1 < time.monotonic() - started < 5
        assert lock.token == lapsed.token + 1
        with pytest.raises(AbortedError, match="lapsed") as caught:
            lapsed.release()
        assert caught.value.scope == "call"
        assert b.lock_holder == 1
    with pytest.raises(AbortedError), a.lock(lease_s=0.05):
        time.sleep(0.1)


def test_what_ends_a_locked_block_comes_through(make):
    a, b = make(2)
    with pytest.raises(LookupError, match="mine"), a.lock():
        raise LookupError("mine")
    with pytest.raises(LookupError, match="mine"), b.lock(lease_s=0.05, timeout_s=0):
        time.sleep(0.1)
        raise LookupError("mine")
    assert a.lock_holder is None


@pytest.mark.parametrize("lease_s", [0, -1, 3601, float("nan"), "x", None, True])
def test_bad_leases_of_locks(make, lease_s):
    (a,) = make(1)
    with pytest.raises(InvalidArgumentError, match="lease"):
        a.lock(lease_s=lease_s)
    assert a.lock_holder is None


# --- Versions ------------------------------------------------------------------------------


def test_wait_version(make):
    a, b = make(2)
    assert a.wait_version(0) == 0
    with pytest.raises(DeadlineExceededError, match="is at version 0, and did not come to 3"):
        a.wait_version(3, timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.wait_version, 3)
        for _ in range(3):
            assert not waiting.done()
            time.sleep(0.05)
            b.accumulate(zeros(1))
        assert waiting.result(DEADLINE_S) == 3


@pytest.mark.parametrize("version", [-1, 1.0, "1", None, 2**64])
def test_bad_versions(make, version):
    (a,) = make(1)
    with pytest.raises(InvalidArgumentError, match="version must be an integer"):
        a.wait_version(version)


# --- All waits -----------------------------------------------------------------------------


@pytest.fixture
def waiter(make):
    """A member for whom none of `WAITS` ends: worker 1 has the lock and stays away."""
    a, b = make(2)
    b.lock(lease_s=3600)
    return a


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("timeout_s", BAD_TIMEOUTS)
def test_bad_timeouts(waiter, wait, timeout_s):
    with pytest.raises(InvalidArgumentError, match="timeout_s must be a number of seconds from 0"):
        WAITS[wait](waiter, timeout_s=timeout_s)


@pytest.mark.parametrize("wait", WAITS)
def test_waiting_needs_a_segment(waiter, wait):
    waiter.leave()
    if wait != "wait_version":  # which needs no member
        with pytest.raises(FailedPreconditionError, match="'run' is not joined"):
            WAITS[wait](waiter)
    waiter.detach()
    with pytest.raises(FailedPreconditionError, match="segment 'run' is detached"):
        WAITS[wait](waiter)


WORDS = {
    "average": "tf_smb: waiting for the share of worker 1",
    "barrier": "tf_smb: waiting for worker 5 at the barrier",
    "lock": "tf_smb: waiting for the lock of segment 'run', which worker 1 has",
}


@pytest.mark.parametrize("wait", WORDS)
def test_long_waits_say_for_whom(waiter, wait):
    said = []

    class EnoughError(Exception):
        pass

    def announce(line):
        said.append(line)
        raise EnoughError

    with pytest.raises(EnoughError):
        WAITS[wait](waiter, timeout_s=DEADLINE_S, announce=announce)
    assert said == [WORDS[wait]]


@pytest.mark.parametrize("wait", WAITS)
def test_other_threads_run_meanwhile(waiter, wait):
    ran = threading.Event()
    threading.Timer(0.1, ran.set).start()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(WAITS[wait], waiter, timeout_s=1.0)
        assert ran.wait(0.9)
        assert not waiting.done()
        if wait == "average":
            assert waiting.result(DEADLINE_S) == Round(1, (1,))
        else:
            with pytest.raises(DeadlineExceededError):
                waiting.result(DEADLINE_S)


# --- Between processes -----------------------------------------------------------------------


def test_barrier_of_processes_drops_a_killed_one(server, client, spawn):
    script = """
segment = attach(3)
segment.join(int(sys.argv[2]))
segment.barrier([0, 1, 2], announce=quiet)
say("all here")
if sys.argv[2] == "2":
    time.sleep(1000)
segment.barrier([0, 1, 2], announce=quiet)
say("passed")
"""
    children = [spawn(script, server.address, index) for index in range(3)]
    for child in children:
        child.wait_for("all here")
    segment = client.attach("run")
    assert segment.live_workers() == [0, 1, 2]
    time.sleep(0.3)  # the others wait now
    children[2].kill()
    for child in children[:2]:
        child.wait_for("passed")
        child.exit_code()
    assert [m.state for m in segment.members()] == ["left", "left", "dead"]


def test_round_of_processes_drops_a_killed_one(server, client, spawn):
    script = """
segment = attach(3)
index = int(sys.argv[2])
segment.join(index)
segment.barrier([0, 1, 2], announce=quiet)
say("all here")
if index == 2:
    time.sleep(1000)
arrays = zeros(index)
round = segment.average(arrays, weight=1 + 2 * index, announce=quiet)
say("mean", arrays[0][-1], arrays[1][0], round.number, round.missing)
"""
    children = [spawn(script, server.address, index) for index in range(3)]
    for child in children:
        child.wait_for("all here")
    segment = client.attach("run")
    wait_until(lambda: segment.version == 2)  # two shares are in
    children[2].kill()
    for child in children[:2]:
        assert child.wait_for("mean") == "0.75 0.75 1 ()"
        child.exit_code()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_lock_of_a_process_that_is_gone(client, server, spawn, end):
    child = spawn(
        """
segment = attach(2)
segment.join(1)
token = segment.lock(lease_s=float(sys.argv[2]), announce=quiet).token
say("locked", token)
time.sleep(1000)
""",
        server.address,
        3600 if end == signal.SIGKILL else 1,
    )
    assert child.wait_for("locked") == "1"
    segment = client.attach("run")
    segment.join(0)
    assert segment.lock_holder == 1
    os.kill(child.process.pid, end)
    with segment.lock(timeout_s=DEADLINE_S) as lock:
        assert lock.token == 2
        assert segment.lock_holder == 0


def test_versions_of_another_process(client, server, spawn):
    child = spawn(
        """
segment = attach(1)
for version in (1, 2, 5):
    say("at", segment.wait_version(version, timeout_s=60))
""",
        server.address,
    )
    segment = client.create("run", LAYOUT)
    for versions in (1, 1, 3):
        for _ in range(versions):
            segment.accumulate(zeros(1))
        assert child.wait_for("at") == str(segment.version)
    child.exit_code()


@pytest.mark.parametrize("wait", WAITS)
def test_interrupts_end_every_wait(client, server, spawn, wait):
    """Ctrl-C in a terminal: a real SIGINT to a real process."""
    holder = client.create("run", LAYOUT)
    holder.join(1)
    holder.lock(lease_s=3600)
    child = spawn(
        f"""
segment = attach(1)
segment.join(0)
wait = {{
    "average": lambda: segment.average(zeros(), announce=quiet),
    "barrier": lambda: segment.barrier([0, 1], announce=quiet),
    "lock": lambda: segment.lock(announce=quiet),
    "wait_version": lambda: segment.wait_version(10**9),
}}["{wait}"]
say("waiting")
try:
    wait()
except KeyboardInterrupt:
    say("interrupted", segment.joined)
say("version", segment.version >= 0)
""",
        server.address,
    )
    child.wait_for("waiting")
    time.sleep(0.5)
    sent = time.monotonic()
    child.process.send_signal(signal.SIGINT)
    assert child.wait_for("interrupted") == "True"
    assert time.monotonic() - sent < 2
    child.exit_code()


def test_an_interrupted_round_is_no_ones_problem(make):
    """The worker that stopped waiting is still in the round; the others get their mean."""
    a, b = make(2)

    class EnoughError(Exception):
        pass

    def announce(line):
        raise EnoughError

    with pytest.raises(EnoughError):
        a.average(zeros(2), announce=announce)
    arrays = zeros(6)
    assert b.average(arrays, timeout_s=DEADLINE_S).number == 1
    assert (arrays[0] == 4).all()


def test_server_may_go_meanwhile(make, server):
    a, b = make(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.barrier, [0, 1])
        server.close()
        b.barrier([0, 1])
        waiting.result(DEADLINE_S)
