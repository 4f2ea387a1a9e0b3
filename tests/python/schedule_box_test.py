"""Schedules from Python: `Segment.start`, `is_due`, `exchange`; what workers tell each other."""

import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from children import DEADLINE_S, LAYOUT, wait_until, zeros

from tf_smb import (
    Client,
    DeltaAveraging,
    ElasticAveraging,
    PeriodicAveraging,
    ReadThenAccumulate,
    Schedule,
)
from tf_smb.box import Notice
from tf_smb.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)


@pytest.fixture
def client(server):
    return Client(server.address, job_id="job")


@pytest.fixture
def start(client):
    """Starts so many workers of one segment; gives them and their arrays."""
    segments = []

    def create(count, layout=LAYOUT, **options):
        made = [client.create("run", layout, num_workers=count) for _ in range(count)]
        arrays = [[np.zeros(shape, np.float32) for _, shape in layout] for _ in made]
        with ThreadPoolExecutor(count) as pool:
            for index, segment in enumerate(made):
                pool.submit(segment.join, index).result()
            list(pool.map(lambda s, a: s.start(a, **options), made, arrays))
        segments.extend(made)
        return made, arrays

    yield create
    for segment in segments:
        segment.detach()


def together(segments, arrays, call):
    with ThreadPoolExecutor(len(segments)) as pool:
        return list(pool.map(call, segments, arrays, range(len(segments))))


# --- Phases ------------------------------------------------------------------------------


def test_synchronous_then_asynchronous_in_lockstep(start):
    schedule = Schedule([(0, PeriodicAveraging(2)), (5, DeltaAveraging(3))])
    segments, arrays = start(2, schedule=schedule)

    def train(segment, mine, index):
        outcomes = []
        for step in range(1, 6):
            for array in mine:
                array += 1 + index
            if segment.is_due(step):
                outcomes.append((step, segment.exchange(mine, step)))
        return outcomes

    expected = [(2, "replaced"), (4, "replaced"), (5, "replaced")]
    assert together(segments, arrays, train) == [expected] * 2
    for segment, mine in zip(segments, arrays, strict=True):
        assert (segment.phase, segment.period) == (1, 3)
        assert (mine[0] == 7.5).all()
    a, b = segments
    for step in range(6, 9):
        assert a.is_due(step) == (step == 8)
    arrays[0][0] += 4
    assert a.exchange(arrays[0], 8) == "moved"
    assert (arrays[0][0] == 9.5).all()  # half of its progress since the round
    assert b.status()["phase"] == 1
    assert [member.phase for member in b.members()] == [1, 1]
    stats = a.stats()
    assert (stats["rounds"], stats["exchanges"]) == (3, 4)
    assert stats["changes"] == [
        {"steps": 2, "phase": 0, "period": 2, "rate": 1.0, "num_live": 2},
        {"steps": 8, "phase": 1, "period": 3, "rate": 0.5, "num_live": 2},
    ]
    assert stats["changes_forgotten"] == 0
    assert len(stats["staleness_histogram"]) == 16
    assert stats["moved_bytes"] == 4 * 2 * 4 * 100_003
    assert 0 <= stats["waiting_s"] <= stats["exchange_s"]


def test_phases_by_epochs(start):
    (segment,), (arrays,) = start(
        1, schedule=Schedule([(0, PeriodicAveraging(10)), (2, ElasticAveraging(10))], "epoch")
    )
    steps = 0
    for epoch in range(3):
        segment.begin_epoch(epoch, batches=2 * steps)
        if segment.is_due(steps, 2 * steps):
            assert (epoch, segment.exchange(arrays, steps, 2 * steps)) == (2, "replaced")
        for _ in range(4):
            steps += 1
            assert not segment.is_due(steps, 2 * steps)
    assert segment.phase == 1
    (member,) = segment.members()
    assert (member.epoch, member.batch, member.steps) == (2, 0, 8)


def test_a_rule_is_a_schedule_of_one_phase(start, client):
    (a, _), (arrays, _) = start(2, rule=ElasticAveraging(4, moving_rate=0.25))
    assert [step for step in range(1, 5) if a.is_due(step)] == [4]
    assert (a.phase, a.period) == (0, 4)
    late = client.attach("run")
    with pytest.raises(FailedPreconditionError, match="delta at 1 / workers every .* others"):
        late.start(zeros())
    assert not late.joined
    late.start(zeros(), rule=ElasticAveraging(4, moving_rate=0.25))
    a.set_rule(PeriodicAveraging(3))  # of this worker alone
    assert a.period == 3
    late.leave()


def test_set_rule_also_for_rounds(start):
    segments, arrays = start(2)
    for segment in segments:
        segment.set_rule(PeriodicAveraging(2))
    arrays[0][0] += 4

    def step(segment, mine, index):
        assert not segment.is_due(1)
        assert segment.is_due(2)
        return segment.exchange(mine, 2)

    assert together(segments, arrays, step) == ["replaced"] * 2
    assert (arrays[1][0] == 2).all()


def test_set_period_until_the_phase_ends(start):
    (segment,), (arrays,) = start(
        1, schedule=Schedule([(0, ElasticAveraging(2)), (6, ElasticAveraging(3))])
    )
    segment.set_period(5)
    due = []
    for step in range(1, 13):
        if segment.is_due(step):
            due.append(step)
            segment.exchange(arrays, step)
    assert due == [5, 6, 9, 12]
    for bad in (0, -1, 2.0, True, "1", 10**9 + 1):
        with pytest.raises(InvalidArgumentError, match="period"):
            segment.set_period(bad)


def test_training_is_taken_up_where_it_was(client):
    schedule = Schedule([(0, PeriodicAveraging(1)), (100, ElasticAveraging(8))])
    segment = client.create("run", LAYOUT)
    segment.start(zeros(), schedule=schedule, position=150)
    assert segment.phase == 1
    assert [step for step in range(151, 159) if segment.is_due(step)] == [158]
    for bad in (-1, 1.5, True, None):
        with pytest.raises(InvalidArgumentError, match="position must be an integer"):
            segment.start(zeros(), schedule=schedule, position=bad)


def test_rule_and_schedule_are_one_thing(client):
    segment = client.create("run", LAYOUT)
    schedule = Schedule([(0, ElasticAveraging())])
    with pytest.raises(InvalidArgumentError, match="not both"):
        segment.start(zeros(), rule=ElasticAveraging(), schedule=schedule)
    for bad in (5, "x", [(0, ElasticAveraging())]):
        with pytest.raises(InvalidArgumentError, match="schedule must be"):
            segment.start(zeros(), schedule=bad)
    assert not segment.joined


def test_unstable_rates_are_said_in_their_phase(start):
    segments, arrays = start(
        3, schedule=Schedule([(0, ElasticAveraging(2)), (2, ReadThenAccumulate(1, 0.9))])
    )
    a, mine = segments[0], arrays[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert a.is_due(1) is False
    assert a.is_due(2)
    with pytest.warns(RuntimeWarning, match="moving_rate=0.9 .* 3 workers") as said:
        a.exchange(mine, 2)
        a.exchange(mine, 3)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_bad_counts(start):
    (segment,), (arrays,) = start(1)
    for bad in (-1, 1.5, "1", None, True):
        with pytest.raises(InvalidArgumentError, match="steps must be an integer"):
            segment.is_due(bad)
        with pytest.raises(InvalidArgumentError, match="epoch must be an integer"):
            segment.begin_epoch(bad)
        with pytest.raises(InvalidArgumentError, match="steps must be an integer"):
            segment.publish_steps(bad)
    for bad in (-1, 1.5, "1"):
        with pytest.raises(InvalidArgumentError, match="batches must be an integer"):
            segment.is_due(1, bad)
        with pytest.raises(InvalidArgumentError, match="batches must be an integer"):
            segment.exchange(arrays, 1, bad)


# --- Statistics ------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [["variance"], [False, True], (np.False_, np.True_)])
def test_variances_stay_above_zero(start, statistics):
    """With delta averaging 10 - 2 * 0.625 * 9 is -1.25."""
    layout = [("kernel", (2,)), ("variance", (2,))]
    segments, arrays = start(2, layout, rule=DeltaAveraging(1, 1.25))
    for segment, mine in zip(segments, arrays, strict=True):
        segment.set_statistics(statistics)
        for array in mine:
            array[:] = 10
        segment.rebase(mine)
    segments[0].write(arrays[0])
    for segment, mine in zip(segments, arrays, strict=True):
        for array in mine:
            array[:] = 1
        assert segment.exchange(mine) == "moved"
    kernel, variance = segments[0].read()
    assert kernel.tolist() == [-1.25] * 2
    assert variance.tolist() == [3.25] * 2


@pytest.mark.parametrize("bad", ["w", 5, None, [1, 0], [True, "w"], [None]])
def test_bad_statistics(start, bad):
    (segment,), _ = start(1)
    with pytest.raises(InvalidArgumentError, match="statistics must be a bool for each") as caught:
        segment.set_statistics(bad)
    assert repr(bad) in str(caught.value)


def test_statistics_that_there_are_not(start):
    (segment,), _ = start(1)
    with pytest.raises(NotFoundError, match="no variable 'x'"):
        segment.set_statistics(["x"])
    with pytest.raises(InvalidArgumentError, match="each of the 2 variables .* got 1"):
        segment.set_statistics([True])
    segment.set_statistics([])  # of names: none


# --- Starting --------------------------------------------------------------------------------


def test_too_few_workers(client):
    segment = client.create("run", LAYOUT, num_workers=3)
    with pytest.raises(
        DeadlineExceededError,
        match=r"1 workers came to segment 'run' in 0.3 s, of the 2 that min_workers asks for: "
        "workers 1, 2 did not",
    ):
        segment.start(zeros(), 0, timeout_s=0.3, min_workers=2)
    other = client.attach("run")
    other.join(2)
    lines = []
    assert segment.start(zeros(), 0, timeout_s=0.3, min_workers=2, announce=lines.append)
    assert lines == ["tf_smb: worker 1 did not come in 0.3 s: starting without"]


def test_absent_workers_are_not_enough(client, server):
    segment = client.create("run", LAYOUT, num_workers=2)
    server.mark_worker_absent(1)
    with pytest.raises(DeadlineExceededError, match="other workers did not"):
        segment.start(zeros(), 0, timeout_s=0.3, min_workers=2)
    assert segment.start(zeros(), timeout_s=60)


@pytest.mark.parametrize("bad", [0, 3, 1025, -1, True, 1.0, "x"])
def test_bad_fewest_workers(client, bad):
    segment = client.create("run", LAYOUT, num_workers=2)
    with pytest.raises(InvalidArgumentError, match="min_workers must be"):
        segment.start(zeros(), min_workers=bad)
    assert not segment.joined


def test_settings_of_the_environment(client, monkeypatch):
    monkeypatch.setenv("TF_SMB_MIN_WORKERS", "2")
    monkeypatch.setenv("TF_SMB_ROUND_TIMEOUT_S", "0.2")
    segment = client.create("run", LAYOUT, num_workers=2)
    with pytest.raises(DeadlineExceededError, match="2 that min_workers"):
        segment.start(zeros(), timeout_s=0.2)
    other = client.attach("run")
    other.join()
    assert segment.start(zeros())
    segment.set_rule(PeriodicAveraging(1))
    began = time.monotonic()
    assert segment.exchange(zeros(), 1) == "replaced"  # without the other, which never comes
    assert 0.1 < time.monotonic() - began < 30
    segment.set_round_timeout(0.1)
    assert segment.exchange(zeros(), 2) == "replaced"
    with pytest.raises(InvalidArgumentError, match="round_timeout_s"):
        segment.set_round_timeout(-1)


# --- Words to all ------------------------------------------------------------------------------


def test_notices(start):
    (a, b), _ = start(2)
    assert a.notice() == Notice(0, "")
    assert a.post_notice("first: äöü") == 1
    assert b.notice() == Notice(1, "first: äöü")
    assert b.post_notice("") == 2
    assert a.notice() == (2, "")
    assert a.post_notice("x" * 4096) == 3
    with pytest.raises(InvalidArgumentError, match="more than 4096"):
        a.post_notice("x" * 4097)
    for bad in (None, 5, b"x"):
        with pytest.raises(InvalidArgumentError, match="a notice must be a text"):
            a.post_notice(bad)
    assert b.notice().text == "x" * 4096
    a.leave()
    with pytest.raises(FailedPreconditionError, match="not joined"):
        a.post_notice("gone")


def test_stop_is_asked_for_until_the_meeting(start):
    (a, b), arrays = start(2)
    assert not b.stop_requested
    a.request_stop()
    assert a.stop_requested
    assert b.stop_requested
    together([a, b], arrays, lambda segment, mine, index: segment.meet(mine))
    assert not a.stop_requested


def test_steps_between_exchanges(start):
    (a, b), _ = start(2)
    a.publish_steps(17)
    (first, second) = b.members()
    assert (first.steps, first.exchanges, second.steps) == (17, 0, 0)


# --- Rounds and waiting ----------------------------------------------------------------------


def test_waiting_says_for_whom(start):
    segments, arrays = start(2, rule=PeriodicAveraging(1))

    class EnoughError(Exception):
        pass

    def announce(line):
        assert line == "tf_smb: waiting for the share of worker 1"
        raise EnoughError

    with pytest.raises(EnoughError):
        segments[0].exchange(arrays[0], 1, announce=announce)


def test_statistics_do_not_wait_for_a_round(start):
    segments, arrays = start(2, rule=PeriodicAveraging(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(segments[0].exchange, arrays[0], 1)
        time.sleep(0.2)
        began = time.monotonic()
        assert segments[0].stats()["rounds"] == 0
        assert segments[0].phase == 0
        assert time.monotonic() - began < 5
        assert not waiting.done()
        assert segments[1].exchange(arrays[1], 1) == "replaced"
        assert waiting.result(DEADLINE_S) == "replaced"
    assert segments[0].stats()["waiting_s"] > 0.1


TRAIN = """
from tf_smb import PeriodicAveraging, Schedule
segment = attach(3)
index = int(sys.argv[2])
arrays = zeros()
schedule = Schedule([(0, PeriodicAveraging(2)), (9, ElasticAveraging(4))])
segment.start(arrays, index, schedule=schedule, announce=quiet)
segment.set_training(True)
say("started")
for step in range(1, 20):
    for array in arrays:
        array += 1
    if segment.is_due(step):
        outcome = segment.exchange(arrays, step, announce=quiet)
        say("exchanged", step, outcome)
    if index == 2 and step == 5:
        say("stops")
        time.sleep(1000)
say("phase", segment.phase, arrays[0][0] >= 9)
segment.meet(arrays, announce=quiet)
say("done", arrays[0][0])
"""


def test_a_killed_worker_ends_no_phase_of_rounds(server, client, spawn):
    children = [spawn(TRAIN, server.address, index) for index in range(3)]
    children[2].wait_for("stops")
    time.sleep(0.3)  # the others wait in round 3
    segment = client.attach("run")
    assert segment.rounds_closed == 2
    children[2].kill()
    for child in children[:2]:
        child.wait_for("exchanged 9 replaced")
        assert child.wait_for("phase") == "1 True"
    centers = {child.wait_for("done") for child in children[:2]}
    assert len(centers) == 1
    for child in children[:2]:
        child.exit_code()
    assert segment.rounds_closed == 5
    assert segment.status()["phase"] == 1


INTERRUPTED = """
segment = attach(2)
segment.join(0)
from tf_smb import PeriodicAveraging
segment.set_rule(PeriodicAveraging(1))
wait = lambda: segment.exchange(zeros(), 1, announce=quiet)
if sys.argv[2] != "numpy":
    import tensorflow as tf
    from tf_smb import ops
    one = tf.constant(1, tf.int64)
    tensors = [tf.constant(array) for array in zeros()]
    wait = lambda: ops.exchange(segment.handle, one, one, tensors)
if sys.argv[2] == "graph":
    def several():  # as Keras runs several steps
        return [ops.exchange(segment.handle, one, one, tensors)[0] for _ in range(5)]
    wait = tf.function(several)
say("waiting")
try:
    wait()
    say("came back")
except KeyboardInterrupt:
    say("interrupted", segment.joined)
import signal
say("handler", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
try:
    signal.raise_signal(signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    say("again")
"""


@pytest.mark.parametrize("how", ["numpy", "eager", "graph"])
def test_ctrl_c_ends_a_round(server, client, spawn, how):
    """A real SIGINT to a real process that waits, in Python's call or inside an op."""
    other = client.create("run", LAYOUT, num_workers=2)
    other.join(1)
    child = spawn(INTERRUPTED, server.address, how)
    child.wait_for("waiting")
    wait_until(lambda: other.version == 1)  # its share is in: now it waits
    time.sleep(0.7)
    sent = time.monotonic()
    child.process.send_signal(signal.SIGINT)
    assert child.wait_for("interrupted") == "True"
    assert time.monotonic() - sent < 5
    assert child.wait_for("handler") == "True"
    child.wait_for("again")
    child.exit_code()


@pytest.mark.parametrize("how", ["numpy", "graph"])
def test_sigterm_ends_the_process_as_ever(server, client, spawn, how):
    other = client.create("run", LAYOUT, num_workers=2)
    other.join(1)
    child = spawn(INTERRUPTED, server.address, how)
    child.wait_for("waiting")
    wait_until(lambda: other.version == 1)
    time.sleep(0.3)
    os.kill(child.process.pid, signal.SIGTERM)
    assert child.process.wait(DEADLINE_S) == -signal.SIGTERM
    assert [member.state for member in other.members()] == ["dead", "live"]
