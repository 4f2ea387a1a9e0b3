"""Real processes that are killed, stopped, forked or left without a server."""

import os
import signal
import time

import numpy as np
import pytest
from children import DEADLINE_S, LAYOUT, wait_until, zeros

from tf_smb import Client, Server
from tf_smb.errors import UnavailableError


def descriptors():
    return len(os.listdir("/proc/self/fd"))


EXCHANGE_FOREVER = """
segment = attach(1)
segment.start(zeros(), int(sys.argv[2]), announce=quiet)
say("started")
arrays = zeros(1)
step = 0
while True:
    step += 1
    segment.exchange(arrays, step)
    if step == 5:
        say("exchanging")
"""


def test_killed_workers_leave_nothing_behind(server, spawn):
    client = Client(server.address, job_id="job")
    with client.create("run", LAYOUT) as segment:
        segment.start(zeros(), 0)
        segment.exchange(zeros())
        before = descriptors()
        in_shm = sorted(os.listdir("/dev/shm"))
        children = [spawn(EXCHANGE_FOREVER, server.address, index) for index in (1, 2, 3)]
        for child in children:
            child.wait_for("exchanging")
        assert segment.live_workers() == [0, 1, 2, 3]
        segment.exchange(zeros())
        for child in children:
            child.kill()
        # At once: the lease has ten seconds.
        assert segment.live_workers() == [0]
        assert [m.state for m in segment.members()] == ["live", "dead", "dead", "dead"]
        arrays = zeros(2)
        assert segment.exchange(arrays) == "moved"
        assert segment.stats()["skipped_chunks"] == 0
        assert all(np.isfinite(a).all() for a in arrays)
        wait_until(lambda: descriptors() == before)
        assert sorted(os.listdir("/dev/shm")) == in_shm
        # Their indexes are free again.
        again = spawn(EXCHANGE_FOREVER, server.address, 2)
        again.wait_for("exchanging")
        assert segment.live_workers() == [0, 2]


def test_killed_first_worker_is_replaced_as_seeder(server, spawn):
    holder = spawn(
        """
segment = attach(2)
segment.join(0)
say("joined")
time.sleep(1000)
""",
        server.address,
    )
    holder.wait_for("joined")
    waiter = spawn(
        """
segment = attach(2)
say("waiting")
say("seeded", segment.start(zeros(5), 1, announce=quiet))
""",
        server.address,
    )
    waiter.wait_for("waiting")
    segment = Client(server.address, job_id="job").attach("run")
    wait_until(lambda: segment.live_workers() == [0, 1])
    assert not segment.seeded  # the lowest index seeds, and does not
    holder.kill()
    assert waiter.wait_for("seeded") == "True"
    waiter.exit_code()
    assert (segment.read()[0] == 5).all()
    assert [m.state for m in segment.members()] == ["dead", "left"]


def test_meeting_drops_a_killed_worker(server, spawn):
    never_comes = spawn(EXCHANGE_FOREVER, server.address, 0)
    never_comes.wait_for("exchanging")
    meeter = spawn(
        """
segment = attach(1)
arrays = zeros()
segment.start(arrays, 1, announce=quiet)
say("meeting")
segment.meet(arrays, timeout_s=1000, announce=quiet)
say("met")
""",
        server.address,
    )
    meeter.wait_for("meeting")
    segment = Client(server.address, job_id="job").attach("run")
    assert segment.live_workers() == [0, 1]
    never_comes.kill()
    meeter.wait_for("met")
    meeter.exit_code()


def test_stopped_worker_is_fenced_and_joins_again(spawn):
    with Server(lease_s=0.5) as server:
        child = spawn(
            """
segment = attach(1)
segment.start(zeros(), 0, announce=quiet)
say("started")
while segment.stats()["times_fenced"] == 0:
    segment.exchange(zeros())
    time.sleep(0.01)
while segment.exchange(zeros()) == "skipped":
    time.sleep(0.01)
say("again", segment.worker_index)
""",
            server.address,
        )
        child.wait_for("started")
        segment = Client(server.address, job_id="job").attach("run")
        incarnation = segment.members()[0].incarnation
        child.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: segment.live_workers() == [])
        assert segment.members()[0].state == "dead"
        child.process.send_signal(signal.SIGCONT)
        assert child.wait_for("again") == "0"
        assert [m.incarnation > incarnation for m in segment.members()] == [False, True]
        child.exit_code()


def test_workers_go_on_without_their_server(spawn):
    server = spawn(
        """
with Server() as server:
    say("at", server.address)
    time.sleep(1000)
"""
    )
    address = server.wait_for("at")
    client = Client(address, job_id="job")
    segment = client.create("run", LAYOUT)
    other = client.create("run", LAYOUT)
    segment.start(zeros(), 0)
    other.start(zeros(), 1)
    server.kill()
    assert segment.exchange(zeros(2)) == "moved"
    assert other.exchange(zeros(4)) == "moved"
    assert segment.live_workers() == [0, 1]
    for call in (client.segments, lambda: client.attach("run")):
        with pytest.raises(UnavailableError):
            call()
    with pytest.raises(UnavailableError):
        Client(address, timeout_s=0.05)
    other.detach()
    segment.meet(zeros())
    segment.detach()


def test_meeting_of_processes_gives_the_same_bytes_and_the_exact_sum(server, spawn):
    workers, rounds = 4, 25
    script = """
import hashlib
index, workers, rounds = map(int, sys.argv[2:5])
segment = attach(workers)
arrays = zeros()
segment.start(arrays, index, rule=DeltaAveraging(gain=1), announce=quiet)
for step in range(rounds):
    for array in arrays:
        array += np.float32(4 * (index + 1))  # a quarter of it is whole: sums are exact
    segment.exchange(arrays, step)
segment.meet(arrays, announce=quiet)
say("met", arrays[0][0], hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest())
"""
    children = [spawn(script, server.address, i, workers, rounds) for i in range(workers)]
    said = [child.wait_for("met").split() for child in children]
    assert [float(value) for value, _ in said] == [rounds * (1 + 2 + 3 + 4)] * workers
    assert len({digest for _, digest in said}) == 1
    for child in children:
        child.exit_code()
    segment = Client(server.address, job_id="job").attach("run")
    assert segment.version == 1 + workers * rounds
    assert [m.state for m in segment.members()] == ["left"] * workers


def test_two_jobs_do_not_meet(server, spawn):
    child = spawn(EXCHANGE_FOREVER, server.address, 0)
    child.wait_for("exchanging")
    other = spawn(
        """
try:
    Client(sys.argv[1], job_id="other").create("run", LAYOUT)
except errors.FailedPreconditionError as error:
    say("refused", error)
""",
        server.address,
    )
    assert "another job ('job') that is still running" in other.wait_for("refused")


FORK = """
segment = attach(1)
segment.start(zeros(), 0, announce=quiet)
client = Client(sys.argv[1], job_id="job")
time.sleep(0.05)
child = os.fork()
if child == 0:
    for name, use in {
        "exchange": lambda: segment.exchange(zeros()),
        "read": segment.read,
        "write": lambda: segment.write(zeros()),
        "members": segment.members,
        "join": segment.join,
        "meet": lambda: segment.meet(zeros()),
        "start": lambda: segment.start(zeros()),
        "set_rule": lambda: segment.set_rule(None),
        "set_training": lambda: segment.set_training(True),
        "leave_unless_last": segment.leave_unless_last,
        "client.segments": client.segments,
        "client.attach": lambda: client.attach("run"),
    }.items():
        try:
            use()
            say("used", name)
        except errors.FailedPreconditionError as error:
            if not ("fork()" in str(error) and "'spawn'" in str(error)):
                say("unclear", name, error)
    say("tried")
    sys.exit(7)  # through all of Python's finalization
say("child", child)
_, status = os.waitpid(child, 0)
say("ended", os.waitstatus_to_exitcode(status))
segment.exchange(zeros())
say("parent", segment.live_workers())
"""


def test_forked_child_is_refused_and_exits(server, spawn):
    parent = spawn(FORK, server.address)
    pid = int(parent.wait_for("child"))
    deadline = time.monotonic() + DEADLINE_S
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("the forked child hangs")
        time.sleep(0.02)
    rest = parent.process.stdout.read().splitlines()
    assert parent.process.wait(DEADLINE_S) == 0
    assert "ended 7" in rest
    assert "parent [0]" in rest
    assert not [line for line in rest if line.startswith(("used", "unclear"))]


def test_exit_without_detach_is_a_goodbye(server, spawn):
    child = spawn(
        """
segment = attach(1)
segment.start(zeros(), 0, announce=quiet)
""",
        server.address,
    )
    child.exit_code()
    segment = Client(server.address, job_id="job").attach("run")
    assert segment.members()[0].state == "left"


def test_interrupt_ends_a_wait(server, spawn):
    child = spawn(
        """
segment = attach(2)
say("waiting")
try:
    segment.start(zeros(), 0, announce=quiet)
except KeyboardInterrupt:
    say("interrupted")
""",
        server.address,
    )
    child.wait_for("waiting")
    time.sleep(0.3)
    child.process.send_signal(signal.SIGINT)
    child.wait_for("interrupted")
    child.exit_code()
