"""`Server`, `Client` and `Segment`, in one process."""

import ast
import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from children import wait_until

import tf_smb
from tf_smb import Client, ElasticAveraging, Segment, Server, _smb, box
from tf_smb.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

LAYOUT = [("kernel", (3, 4)), ("bias", (4,)), ("scale", ())]


def zeros(value=0.0):
    return [np.full(shape, value, np.float32) for _, shape in LAYOUT]


def filled_with(arrays, value):
    return all((a == np.float32(value)).all() for a in arrays)


@pytest.fixture
def server():
    with Server() as server:
        yield server


@pytest.fixture
def client(server):
    return Client(server.address, job_id="job-1")


@pytest.fixture
def segment(client):
    with client.create("run", LAYOUT) as segment:
        yield segment


# --- Server --------------------------------------------------------------------------


def test_server_addresses_are_unique_and_taken_once(server):
    with Server() as other:
        assert other.address != server.address
    with pytest.raises(AlreadyExistsError, match=server.address):
        Server(server.address)


@pytest.mark.parametrize("address", ["", "nowhere", "shm://", "tcp://host:1", "shm://" + "x" * 200])
def test_bad_addresses(address):
    with pytest.raises(InvalidArgumentError):
        Server(address)
    with pytest.raises(InvalidArgumentError):
        Client(address, timeout_s=0)


@pytest.mark.parametrize(
    "lease_s", [0, 0.09, 3601, -1, float("nan"), float("inf"), True, "1", None]
)
def test_bad_leases(lease_s):
    with pytest.raises(InvalidArgumentError, match=r"lease_s must be 0\.1 to 3600") as caught:
        Server(lease_s=lease_s)
    assert repr(lease_s) in str(caught.value)


def test_segments_of_a_folder_are_files(tmp_path):
    with Server(directory=tmp_path) as server:
        assert server.refused_files == []
        segment = Client(server.address).create("run", LAYOUT)
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        segment.write(zeros(3))
        assert b"kernel" in path.read_bytes()


@pytest.mark.parametrize("directory", ["", b"/tmp", 5, True])
def test_bad_folders(directory):
    with pytest.raises(InvalidArgumentError, match="directory must be the path of a folder, got "):
        Server(directory=directory)


def test_closed_server_says_so_and_its_segments_live_on(server, client, segment):
    segment.start(zeros(1))
    server.close()
    server.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        server.segments()
    with pytest.raises(UnavailableError):
        client.segments()
    assert segment.exchange(zeros(2)) == "unchanged"
    assert filled_with(segment.read(), 2)


def test_no_server_is_unavailable():
    with pytest.raises(UnavailableError, match="shm://nobody-is-here"):
        Client("shm://nobody-is-here", timeout_s=0.05)


# --- Client --------------------------------------------------------------------------


def test_create_join_attach_free(client):
    first = client.create("run", LAYOUT, num_workers=3)
    second = client.create("run", LAYOUT)
    third = client.attach("run")
    assert [s.created for s in (first, second, third)] == [True, False, False]
    for segment in (first, second, third):
        assert segment.name == "run"
        assert segment.job_id == "job-1"
        assert segment.num_workers == 3
        assert segment.variables == [(*variable, "float32") for variable in LAYOUT]
        assert segment.version == 0
        assert not segment.seeded
        assert not segment.joined
    assert len({s.handle for s in (first, second, third)}) == 3
    assert client.segments() == [
        {"name": "run", "job_id": "job-1", "center_bytes": 3 * 64, "live_members": 0}
    ]
    client.free("run")
    assert client.segments() == []
    with pytest.raises(NotFoundError, match="no segment 'run'"):
        client.attach("run")
    with pytest.raises(NotFoundError):
        client.free("run")


def test_layouts_must_be_the_same(client, segment):
    with pytest.raises(FailedPreconditionError, match=r"variable 1: here 'bias' float32\[5\]"):
        client.create("run", [("kernel", (3, 4)), ("bias", (5,)), ("scale", ())])
    with pytest.raises(FailedPreconditionError, match="2 variables here, 3 in"):
        client.create("run", LAYOUT[:2])


def test_other_jobs_segment(server, client, segment):
    segment.start(zeros(5))
    other = Client(server.address, job_id="job-2")
    with pytest.raises(FailedPreconditionError, match=r"another job \('job-1'\)"):
        other.create("run", LAYOUT)
    with pytest.raises(FailedPreconditionError, match="1 live workers"):
        other.create("run", LAYOUT, on_existing="replace")
    assert filled_with(other.create("run", LAYOUT, on_existing="resume").read(), 5)
    segment.leave()
    assert filled_with(other.create("run", LAYOUT, on_existing="replace").read(), 0)


def test_job_comes_from_the_environment(server, monkeypatch):
    assert Client(server.address).job_id != Client(server.address).job_id
    monkeypatch.setenv("TF_SMB_JOB_ID", "from-the-environment")
    assert Client(server.address).job_id == "from-the-environment"
    assert Client(server.address, job_id="argument").job_id == "argument"


@pytest.mark.parametrize("job_id", ["", "x" * 101, 5])
def test_bad_job_ids(server, job_id):
    with pytest.raises(InvalidArgumentError, match="job_id must be"):
        Client(server.address, job_id=job_id)


@pytest.mark.parametrize("name", ["", "x" * 201, "ü" * 101, "a\0b"])
def test_bad_names(client, name):
    for call in (lambda: client.create(name, LAYOUT), lambda: client.attach(name)):
        with pytest.raises(InvalidArgumentError, match="a segment name has 1 to 200 bytes"):
            call()


@pytest.mark.parametrize(
    "variable",
    [
        ("w",),
        ("w", (2,), "float32", 3),
        "w",
        5,
        (5, (2,)),
        ("w", 4),
        ("w", (2.0,)),
        ("w", ("2",)),
        ("w", (None, 3)),
        ("w", (-1,)),
        ("w", (2**63,)),
    ],
)
def test_bad_variables(client, variable):
    with pytest.raises(InvalidArgumentError, match="a name and a shape") as caught:
        client.create("run", [("good", (1,)), variable])
    assert repr(variable) in str(caught.value)
    assert client.segments() == []


def test_bad_layouts(client):
    with pytest.raises(InvalidArgumentError, match="1 to 1048576 variables, got 0"):
        client.create("run", [])
    with pytest.raises(InvalidArgumentError, match="more than 32 dimensions"):
        client.create("run", [("deep", (1,) * 33)])
    with pytest.raises(InvalidArgumentError, match="too large"):
        client.create("run", [("large", (2**40, 2**40))])


@pytest.mark.parametrize("num_workers", [0, 1025, -1, True, 2.0, "x"])
def test_bad_numbers_of_workers(client, num_workers):
    with pytest.raises(InvalidArgumentError, match="num_workers must be an integer from 1 to 1024"):
        client.create("run", LAYOUT, num_workers=num_workers)


def test_more_than_the_memory_there_is(client):
    with pytest.raises(ResourceExhaustedError, match=r"needs \d+ MiB, and \d+ MiB are available"):
        client.create("run", [("huge", (2**24, 2**22))])
    assert client.segments() == []


# --- Members -------------------------------------------------------------------------


def test_members_tell_who_is_there(client):
    a, b, c = (client.attach(client.create("run", LAYOUT).name) for _ in range(3))
    assert a.members() == []
    assert a.join() == 0
    assert b.join(7) == 7
    assert c.join(None) == 1
    with pytest.raises(AlreadyExistsError, match="worker index 7"):
        client.attach("run").join(7)
    with pytest.raises(FailedPreconditionError, match="joined already"):
        a.join()
    assert a.live_workers() == [0, 1, 7]
    b.set_training(True)
    b.exchange(zeros(), steps=12)
    c.leave()
    assert not c.joined
    with pytest.raises(FailedPreconditionError, match="not joined"):
        _ = c.worker_index
    members = a.members()
    assert [m.state for m in members] == ["live", "left", "live"]
    assert [m.worker_index for m in members] == [0, 1, 7]
    assert (members[2].training, members[2].steps, members[2].exchanges) == (True, 12, 1)
    assert (members[2].epoch, members[2].batch, members[2].phase) == (0, 12, 0)
    assert c.join(1) == 1
    assert len({m.incarnation for m in a.members()}) == 4


@pytest.mark.parametrize("worker_index", [-1, 1024, True, 1.0, "x"])
def test_bad_worker_indexes(segment, worker_index):
    with pytest.raises(InvalidArgumentError, match="worker_index must be") as caught:
        segment.join(worker_index)
    assert repr(worker_index) in str(caught.value)
    assert not segment.joined


def test_detaching_twice_and_in_a_with_block(client):
    with client.create("run", LAYOUT) as segment:
        segment.join()
        assert client.segments()[0]["live_members"] == 1
    assert client.segments()[0]["live_members"] == 0
    segment.detach()
    with pytest.raises(FailedPreconditionError):
        segment.exchange(zeros())


def _mappings():
    """The segments that this process has mapped."""
    with open("/proc/self/maps") as maps:
        return {line.split()[4] for line in maps if "/memfd:tf_smb" in line}


def test_detaching_gives_the_memory_up(server, client):
    client.segments()  # the server has accepted the connection
    before, files = _mappings(), len(os.listdir("/proc/self/fd"))
    segments = [client.create("run", LAYOUT), client.create("run", LAYOUT)]
    held = _mappings()
    client.free("run")
    for segment in segments:
        segment.join()
    segments[0].detach()
    assert segments[1].live_workers() == [1]
    segments[1].detach()
    assert held > before
    assert _mappings() == before
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == files)


AFTER_DETACH = {
    **{
        name: lambda s, name=name: getattr(s, name)
        for name, value in vars(Segment).items()
        if isinstance(value, property)
    },
    "accumulate": lambda s: s.accumulate(zeros()),
    "accumulate_slice": lambda s: s.accumulate_slice(0, 0, zeros()[1]),
    "average": lambda s: s.average(zeros()),
    "axpy": lambda s: s.axpy(1, s),
    "barrier": lambda s: s.barrier([0]),
    "begin_epoch": lambda s: s.begin_epoch(1),
    "exchange": lambda s: s.exchange(zeros()),
    "is_due": lambda s: s.is_due(1),
    "join": lambda s: s.join(),
    "leave": lambda s: s.leave(),
    "leave_unless_last": lambda s: s.leave_unless_last(),
    "live_workers": lambda s: s.live_workers(),
    "lock": lambda s: s.lock(),
    "meet": lambda s: s.meet(zeros()),
    "members": lambda s: s.members(),
    "notice": lambda s: s.notice(),
    "post_notice": lambda s: s.post_notice("text"),
    "publish_steps": lambda s: s.publish_steps(1),
    "raise_last_error": lambda s: s.raise_last_error(),
    "read": lambda s: s.read(),
    "read_into": lambda s: s.read_into(zeros()),
    "read_slice": lambda s: s.read_slice(0, 0, 1),
    "rebase": lambda s: s.rebase(zeros()),
    "request_stop": lambda s: s.request_stop(),
    "set_period": lambda s: s.set_period(1),
    "set_round_timeout": lambda s: s.set_round_timeout(1),
    "set_rule": lambda s: s.set_rule(None),
    "set_schedule": lambda s: s.set_schedule(tf_smb.Schedule([(0, ElasticAveraging())])),
    "set_statistics": lambda s: s.set_statistics(["kernel"]),
    "set_training": lambda s: s.set_training(True),
    "start": lambda s: s.start(zeros()),
    "stats": lambda s: s.stats(),
    "status": lambda s: s.status(),
    "wait": lambda s: s.wait(0),
    "wait_version": lambda s: s.wait_version(0),
    "write": lambda s: s.write(zeros()),
    "write_slice": lambda s: s.write_slice(0, 0, zeros()[1]),
}


def test_every_use_after_detach_is_refused(client):
    public = {name for name in vars(Segment) if not name.startswith("_")}
    assert set(AFTER_DETACH) == public - {"detach"}
    segment = client.create("run", LAYOUT)
    segment.join()
    lock = segment.lock()
    other = client.create("run", LAYOUT)
    segment.detach()
    for name, use in {**AFTER_DETACH, "release": lambda s: lock.release()}.items():
        with pytest.raises(FailedPreconditionError, match="segment 'run' is detached"):
            use(segment)
            pytest.fail(f"used {name}")
    with pytest.raises(FailedPreconditionError, match="segment 'run' is detached"):
        other.axpy(1, segment)
    assert other.lock_holder is None


def test_detaching_while_another_thread_uses_it(client):
    a, b = client.create("run", LAYOUT), client.create("run", LAYOUT)
    a.join(0)
    b.join(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(a.barrier, [0, 1], timeout_s=60)
        threading.Event().wait(0.1)
        a.detach()
        with pytest.raises((AbortedError, FailedPreconditionError)):
            waiting.result(60)
    assert b.live_workers() == [1]


def test_status_is_json(server, client):
    layout = [("w", (300, 300), "bfloat16"), ("n", (), "int64")]
    segment = client.create("run", layout, num_workers=3)
    idle = json.loads(json.dumps(segment.status()))
    assert idle == {
        "name": "run",
        "job_id": "job-1",
        "version": 0,
        "center_bytes": 360_000 + 64,
        "num_chunks": 2,
        "lease_s": 10.0,
        "num_workers": 3,
        "num_live": 0,
        "live": [],
        "seeded": False,
        "rounds_closed": 0,
        "phase": 0,
        "lock_holder": None,
        "members": [],
        "variables": [
            {"name": "w", "shape": [300, 300], "dtype": "bfloat16"},
            {"name": "n", "shape": [], "dtype": "int64"},
        ],
    }
    gone = client.create("run", layout)
    gone.join(4)
    gone.leave()
    arrays = [np.zeros((300, 300), np.float32), np.array(1)]
    segment.start(arrays, 1, timeout_s=0.1, announce=lambda line: None)
    segment.average(arrays, steps=7)
    segment.set_training(True)
    with segment.lock():
        busy = json.loads(json.dumps(segment.status()))
    assert {key: value for key, value in busy.items() if idle[key] != value} == {
        "version": 2,
        "num_live": 1,
        "live": [1],
        "seeded": True,
        "rounds_closed": 1,
        "lock_holder": 1,
        "members": busy["members"],
    }
    worker, other = busy["members"]
    assert (worker["worker_index"], worker["state"], worker["steps"]) == (1, "live", 7)
    assert (worker["process_id"], worker["training"]) == (os.getpid(), True)
    assert (other["worker_index"], other["state"]) == (4, "left")


def test_only_the_last_one_stays(client):
    segments = [client.create("run", LAYOUT) for _ in range(5)]
    for segment in segments:
        segment.join()
        segment.set_training(True)
    with ThreadPoolExecutor(len(segments)) as pool:
        left = list(pool.map(lambda s: s.leave_unless_last(), segments))
    assert sorted(left) == [False, True, True, True, True]
    assert [s.joined for s in segments] == [not has_left for has_left in left]
    assert len(segments[0].live_workers()) == 1


# --- Weights -------------------------------------------------------------------------


def test_write_and_read(segment):
    arrays = [np.arange(a.size, dtype=np.float32).reshape(a.shape) for a in zeros()]
    segment.write(arrays)
    for read, written in zip(segment.read(), arrays, strict=True):
        np.testing.assert_array_equal(read, written)
        assert read.shape == written.shape
    assert segment.version == 1


def _read_only(array):
    array.setflags(write=False)
    return array


def _unaligned():
    return np.frombuffer(bytearray(49), np.uint8)[1:].view(np.float32).reshape(3, 4)


BAD_ARRAYS = {
    "float64": np.zeros((3, 4)),
    "float16": np.zeros((3, 4), np.float16),
    "int32": np.zeros((3, 4), np.int32),
    "swapped": np.zeros((3, 4), ">f4"),
    "size": np.zeros((3, 5), np.float32),
    "empty": np.zeros(0, np.float32),
    "strided": np.zeros((3, 8), np.float32)[:, ::2],
    "fortran": np.asfortranarray(np.zeros((3, 4), np.float32)),
    "unaligned": _unaligned(),
    "list": [[0.0] * 4] * 3,
    "None": None,
    "text": "weights",
    "float": 0.0,
}
USES = {
    "exchange": lambda s, arrays: s.exchange(arrays),
    "write": lambda s, arrays: s.write(arrays),
    "rebase": lambda s, arrays: s.rebase(arrays),
    "read_into": lambda s, arrays: s.read_into(arrays),
    "start": lambda s, arrays: s.start(arrays),
    "meet": lambda s, arrays: s.meet(arrays),
}


@pytest.mark.parametrize("bad", BAD_ARRAYS)
@pytest.mark.parametrize("use", USES)
def test_bad_arrays(segment, use, bad):
    segment.join()
    segment.write(zeros(1))
    array = BAD_ARRAYS[bad]
    with pytest.raises(InvalidArgumentError) as caught:
        USES[use](segment, [array, *zeros()[1:]])
    message = str(caught.value)
    assert "array 0 must be C-contiguous float32 like variable 'kernel' float32[3,4]" in message
    got = str(array.dtype) if isinstance(array, np.ndarray) else type(array).__name__
    assert f"got {got}" in message
    assert filled_with(segment.read(), 1)


@pytest.mark.parametrize("use", ["exchange", "read_into", "start", "meet"])
def test_read_only_arrays(segment, use):
    segment.join()
    arrays = zeros()
    arrays[1] = _read_only(arrays[1])
    with pytest.raises(InvalidArgumentError, match="array 1 is read-only"):
        USES[use](segment, arrays)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("count", [0, 2, 4])
def test_wrong_number_of_arrays(segment, use, count):
    segment.join()
    with pytest.raises(InvalidArgumentError, match=f"has 3 variables, got {count} arrays"):
        USES[use](segment, (zeros() * 2)[:count])


def test_bad_arrays_start_and_meet_nothing(client, segment):
    with pytest.raises(InvalidArgumentError):
        segment.start(zeros()[:1])
    assert not segment.joined
    segment.start(zeros())
    with pytest.raises(InvalidArgumentError):
        segment.meet(zeros()[:1])
    other = client.create("run", LAYOUT)
    other.start(zeros())
    with ThreadPoolExecutor(2) as pool:  # both at the first meeting
        list(pool.map(lambda s: s.meet(zeros(), timeout_s=60), (segment, other)))


def test_arrays_that_were_pickled_or_are_read_only_sources(segment):
    arrays = pickle.loads(pickle.dumps(zeros(4)))
    segment.start(arrays)
    segment.exchange(arrays)
    assert filled_with(segment.read(), 4)
    segment.write([_read_only(a) for a in zeros(5)])
    assert filled_with(segment.read(), 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_refused_and_moves_nothing(client, segment, bad):
    segment.start(zeros(1))
    other = client.create("run", LAYOUT)
    other.join()
    arrays = zeros(2)
    arrays[1][3] = bad
    before = [a.copy() for a in arrays]
    with pytest.raises(InvalidArgumentError, match=r"'bias' float32\[4\].*NaN or Inf"):
        segment.exchange(arrays)
    for a, b in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert filled_with(segment.read(), 1)
    with pytest.raises(InvalidArgumentError, match="NaN or Inf"):
        segment.raise_last_error()
    segment.exchange(zeros())
    segment.raise_last_error()


@pytest.fixture
def two_of_40_mb(client):
    """Makes two workers of a 40 MB model; the first one, its arrays, and where it starts."""
    alive = []

    def make(**options):
        layout = [("first", (4_000_000,)), ("second", (6_000_000,))]
        start = [np.full(shape, 1, np.float32) for _, shape in layout]
        for _ in range(2):
            alive.append(client.create("large", layout, **options))
            alive[-1].start([array.copy() for array in start], rule=ElasticAveraging())
        arrays = [np.full(shape, 2, np.float32) for _, shape in layout]
        arrays[1][-1] = np.nan
        return alive[0], arrays, start

    return make


@pytest.mark.parametrize("use", ["exchange", "average", "accumulate"])
def test_one_bad_element_of_a_large_model_moves_nothing(two_of_40_mb, use):
    segment, arrays, start = two_of_40_mb(finite_check="before")
    before = [array.copy() for array in arrays]
    with pytest.raises(InvalidArgumentError, match=r"'second' float32\[6000000\].*NaN or Inf"):
        getattr(segment, use)(arrays)
    for center, expected in zip(segment.read(), start, strict=True):
        assert center.tobytes() == expected.tobytes()
    for array, expected in zip(arrays, before, strict=True):
        assert array.tobytes() == expected.tobytes()
    assert segment.version == 1
    arrays[1][-1] = 3
    assert segment.exchange(arrays) == "moved"


def test_finite_check_during_an_exchange(two_of_40_mb, monkeypatch):
    monkeypatch.setenv("TF_SMB_FINITE_CHECK", "during")
    segment, arrays, start = two_of_40_mb()
    with pytest.raises(InvalidArgumentError, match=r"'second' float32\[6000000\].*NaN or Inf"):
        segment.exchange(arrays)
    center = segment.read()
    assert all(np.isfinite(array).all() for array in center)
    assert center[1][-1] == 1  # what would have been NaN was left alone
    assert set(np.unique(center[0])) <= {np.float32(1), np.float32(1.45)}


@pytest.mark.parametrize("finite_check", ["", "after", True, 0])
def test_bad_finite_checks(client, segment, finite_check):
    for call in (
        lambda: client.create("other", LAYOUT, finite_check=finite_check),
        lambda: client.attach("run", finite_check=finite_check),
    ):
        with pytest.raises(InvalidArgumentError, match="finite_check must be 'before' or 'during'"):
            call()
    assert len(client.segments()) == 1


def test_exchange_needs_a_member(segment):
    with pytest.raises(FailedPreconditionError, match="segment 'run' is not joined"):
        segment.exchange(zeros())


def test_stats(client, segment):
    other = client.create("run", LAYOUT)
    segment.start(zeros(), rule=ElasticAveraging())
    other.start(zeros(), rule=ElasticAveraging())
    for _ in range(3):
        other.exchange(zeros(1))
    segment.exchange(zeros())
    stats = segment.stats()
    assert stats["exchanges"] == 1
    assert stats["last_staleness"] == 3
    assert stats["last_num_live"] == 2
    assert stats["last_rate"] == pytest.approx(0.45)
    assert stats["skipped_chunks"] == stats["skipped_exchanges"] == stats["times_fenced"] == 0
    assert stats["exchange_s"] > 0


@pytest.mark.parametrize("rule", ["elastic", 0.5, ElasticAveraging])
def test_bad_rules(segment, rule):
    with pytest.raises(InvalidArgumentError, match="rule must be"):
        segment.set_rule(rule)
    with pytest.raises(InvalidArgumentError, match="rule must be"):
        segment.start(zeros(), rule=rule)
    assert not segment.joined


# --- Starting ------------------------------------------------------------------------


def test_first_seeds_others_get_its_center(client):
    count = 4
    segments = [client.create("run", LAYOUT, num_workers=count) for _ in range(count)]
    arrays = [zeros(i + 1) for i in range(count)]

    def start(i):
        return segments[i].start(arrays[i], worker_index=i, rule=ElasticAveraging())

    with ThreadPoolExecutor(count) as pool:
        seeded = list(pool.map(start, reversed(range(count))))
    assert seeded == [False, False, False, True]  # the lowest index, come when it may
    assert all(filled_with(a, 1) for a in arrays)
    assert segments[2].seeded

    late = client.create("run", LAYOUT)
    arrays = zeros(9)
    assert late.start(arrays, worker_index=9, rule=ElasticAveraging()) is False
    assert filled_with(arrays, 1)
    for segment in [*segments, late]:
        segment.detach()


def test_start_waits_for_all_and_says_for_whom(client, monkeypatch):
    monkeypatch.setattr(box, "_QUIET_S", 0.1)
    first = client.create("run", LAYOUT, num_workers=3)
    second = client.create("run", LAYOUT)
    third = client.create("run", LAYOUT)
    said, heard = [], threading.Event()

    def announce(line):
        said.append(line)
        heard.set()

    with ThreadPoolExecutor(2) as pool:
        start = pool.submit(first.start, zeros(1), 0, announce=announce, timeout_s=60)
        assert heard.wait(60)
        assert "tf_smb: waiting for workers 1, 2 of 3 to start" in said
        assert not first.seeded
        pool.submit(second.start, zeros(2), 1, announce=announce, timeout_s=60)
        third.start(zeros(3), 2, announce=announce, timeout_s=60)
        assert start.result(60) is True
    assert filled_with(third.read(), 1)


def test_start_without_those_who_do_not_come(client):
    segment = client.create("run", LAYOUT, num_workers=3)
    said = []
    assert segment.start(zeros(1), 1, timeout_s=0.1, announce=said.append) is True
    assert said == ["tf_smb: workers 0, 2 did not come in 0.1 s: starting without"]


def test_start_does_not_wait_for_the_absent_or_those_who_left(server, client):
    segment = client.create("run", LAYOUT, num_workers=3)
    early = client.create("run", LAYOUT)
    early.join(2)
    early.leave()
    server.mark_worker_absent(0)
    assert segment.start(zeros(1), 1, timeout_s=60) is True


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), True, "x"])
def test_bad_timeouts(segment, timeout_s):
    with pytest.raises(InvalidArgumentError, match="start_timeout_s must be"):
        segment.start(zeros(), timeout_s=timeout_s)
    assert not segment.joined
    segment.join()
    with pytest.raises(InvalidArgumentError, match="end_timeout_s must be"):
        segment.meet(zeros(), timeout_s=timeout_s)


# --- Meeting -------------------------------------------------------------------------


def test_meeting_gives_everybody_the_same_bytes(client):
    count = 5
    segments = [client.create("run", LAYOUT, num_workers=count) for _ in range(count)]
    results = {}

    def train(i):
        random = np.random.default_rng(i)
        arrays = zeros()
        segments[i].start(arrays, worker_index=i, timeout_s=60)
        for meeting in range(3):
            for step in range(10 * (i + 1)):
                for array in arrays:
                    array += random.standard_normal(array.shape).astype(np.float32)
                segments[i].exchange(arrays, step)
            segments[i].meet(arrays, timeout_s=60)
            results[i, meeting] = b"".join(a.tobytes() for a in arrays)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(train, range(count)))
    for meeting in range(3):
        assert len({results[i, meeting] for i in range(count)}) == 1
    assert len({results[0, meeting] for meeting in range(3)}) == 3


def test_meeting_alone(segment):
    segment.start(zeros(1))
    segment.exchange(zeros(2))
    arrays = zeros()
    segment.meet(arrays)
    assert filled_with(arrays, 2)


def test_meeting_goes_on_without_who_makes_no_step(client):
    a, b = client.create("run", LAYOUT), client.create("run", LAYOUT)
    a.start(zeros(1), 0)
    b.start(zeros(), 1)
    said = []
    arrays = zeros()
    a.meet(arrays, timeout_s=0.2, announce=said.append)
    assert said == ["tf_smb: no step from worker 1 (step 0) in 0.2 s: going on without"]
    assert filled_with(arrays, 1)
    b.meet(arrays, timeout_s=60)  # late, but nobody waits for anybody any more


def test_meeting_waits_for_who_makes_steps(client):
    a, b = client.create("run", LAYOUT), client.create("run", LAYOUT)
    a.start(zeros(), 0)
    b.start(zeros(), 1)
    said = []
    with ThreadPoolExecutor(1) as pool:
        arrays = zeros()
        met = pool.submit(a.meet, arrays, timeout_s=1.0, announce=said.append)
        for step in range(1, 9):  # in all longer than the time without any
            threading.Event().wait(0.2)
            b.exchange(zeros(7), steps=step)
            assert not met.done()
        b.meet(zeros(), timeout_s=60)
        met.result(60)
    assert said == []
    np.testing.assert_array_equal(arrays[1], b.read()[1])


def test_meeting_needs_a_member(segment):
    with pytest.raises(FailedPreconditionError, match="not joined"):
        segment.meet(zeros())


def test_public_names():
    assert tf_smb.Server is Server
    for name in ("Client", "Lock", "Member", "Round", "Segment", "Server", "Variable"):
        assert name in tf_smb.__all__
        assert getattr(tf_smb, name) is getattr(box, name)


def test_stub_is_of_the_native_module():
    tree = ast.parse(Path(box.__file__).with_name("_smb.pyi").read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert functions | set(classes) == {name for name in vars(_smb) if not name.startswith("_")}
    for name, node in classes.items():
        stubs = {entry.name for entry in node.body} - {"__init__"}
        native = {entry for entry in vars(getattr(_smb, name)) if not entry.startswith("_")}
        assert stubs == native
