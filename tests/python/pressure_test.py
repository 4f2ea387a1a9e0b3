"""Too little memory, other namespaces, processes that stand still: done to real ones."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from children import DEADLINE_S, LAYOUT, PRELUDE, wait_until, zeros

from tf_smb import Client, ElasticAveraging, Server, errors

MB = 1_000_000


def run_python(script, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **options,
    )


CREATE_LARGE = """
with Server() as server:
    client = Client(server.address, job_id="job")
    try:
        client.create("large", [("w", (int(sys.argv[1]) // 4,))])
        say("created")
    except errors.ResourceExhaustedError as error:
        say("refused", error)
    client.create("small", LAYOUT).write(zeros(1))
    say("went on")
"""


# --- Too little memory ---


@pytest.fixture
def small_tmpfs(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_tmpfs_is_told_and_leaves_nothing(small_tmpfs):
    with Server(directory=str(small_tmpfs)) as server:
        client = Client(server.address, job_id="job")
        with pytest.raises(errors.ResourceExhaustedError, match=r"needs \d+ MiB, and \d MiB are"):
            client.create("large", [("w", (2_000_000,))])
        assert list(small_tmpfs.iterdir()) == []
        # What is left free is less than what the next one needs.
        fill = small_tmpfs / "fill"
        fill.write_bytes(b"x" * 2 * MB)
        with pytest.raises(errors.ResourceExhaustedError):
            client.create("medium", [("w", (500_000,))])
        assert list(small_tmpfs.iterdir()) == [fill]
        fill.unlink()
        with client.create("small", LAYOUT) as segment:
            segment.write(zeros(1))
            assert (segment.read()[0] == 1).all()


@pytest.mark.parametrize("limit", ["RLIMIT_FSIZE", "RLIMIT_AS"])
def test_a_resource_limit_is_told(limit):
    allowed = {"RLIMIT_FSIZE": 50 * MB, "RLIMIT_AS": 2_000 * MB}[limit]

    def set_limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(getattr(resource, limit), (allowed, allowed))

    wanted = {"RLIMIT_FSIZE": 100 * MB, "RLIMIT_AS": 3_000 * MB}[limit]
    said = run_python(CREATE_LARGE, wanted, preexec_fn=set_limit)
    assert "refused" in said.stdout, said.stdout + said.stderr
    assert "'large'" in said.stdout or "of a segment" in said.stdout
    assert "went on" in said.stdout


@contextlib.contextmanager
def memory_cgroup(limit_bytes):
    """A cgroup below this process' own; yields the file to write a process id to."""
    for root, limit_file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        own = next(
            (
                line.split(":", 2)[2]
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if (":memory:" in line) == (root.name == "memory")
                and (root.name == "memory" or line.startswith("0::"))
            ),
            "/",
        )
        folder = root / own.lstrip("/") / f"tf_smb_test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit_file).write_text(str(limit_bytes))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            wait_until(lambda procs=folder / "cgroup.procs": not procs.read_text())
            folder.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


def test_a_cgroup_limit_is_told_before_the_kernel_kills():
    with memory_cgroup(200 * MB) as procs:
        said = run_python(
            CREATE_LARGE, 400 * MB, preexec_fn=lambda: procs.write_text(str(os.getpid()))
        )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "segment 'large' needs 38" in said.stdout
    assert "available on this machine or in its cgroup" in said.stdout
    assert "went on" in said.stdout


# --- Other namespaces ---

HOLD = """
segment = attach(2)
segment.start(zeros(), 1, announce=quiet)
say("started", os.getpid())
while True:
    segment.exchange(zeros(1))
"""


def in_pid_namespace(command):
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]


@pytest.mark.skipif(
    subprocess.run(in_pid_namespace(["true"]), capture_output=True).returncode != 0,
    reason="no PID namespace can be made here",
)
def test_an_owner_in_another_pid_namespace_is_seen_dead(server):
    segment = Client(server.address, job_id="job").create("run", LAYOUT, num_workers=2)
    outside = subprocess.Popen(
        in_pid_namespace([sys.executable, "-c", PRELUDE + HOLD, server.address]),
        stdout=subprocess.PIPE,
        text=True,
    )
    segment.join(0)
    segment.set_rule(ElasticAveraging())
    # Its number there may be that of another process here, or of nobody.
    segment.start(zeros(), announce=lambda line: None)
    assert int(outside.stdout.readline().split()[1]) < 10
    for _ in range(50):
        segment.exchange(zeros())
    assert segment.live_workers() == [0, 1]
    outside.kill()  # and, by --kill-child, all within
    outside.wait(DEADLINE_S)
    outside.stdout.close()
    wait_until(lambda: segment.live_workers() == [0])
    before = segment.stats()["skipped_chunks"]
    segment.exchange(zeros())
    assert segment.stats()["skipped_chunks"] == before


# --- A process that stands still under a lock ---


@pytest.mark.slow
def test_a_lock_holder_that_stands_still_for_60_s_holds_up_nobody(spawn):
    """The others go on without its chunk, and take it in again when it comes back."""
    with Server(lease_s=2.0) as server:
        layout = [("w", (4_000_000,))]  # 62 chunks: it holds one nearly all the time
        script = """
segment = Client(sys.argv[1], job_id="job").create("run", [("w", (4_000_000,))])
weights = [np.ones(4_000_000, np.float32)]
segment.start(weights, 1, rule=ElasticAveraging(moving_rate=0.5), announce=quiet)
say("started")
while True:
    segment.exchange(weights)
"""
        segment = Client(server.address, job_id="job").create("run", layout)
        weights = [np.zeros(4_000_000, np.float32)]
        segment.start(weights, 0, rule=ElasticAveraging(moving_rate=0.5), announce=lambda _: None)
        child = spawn(script, server.address)
        child.wait_for("started")
        while True:  # until it is stopped with a chunk in its hands
            child.process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            segment.exchange(weights)
            if segment.stats()["skipped_chunks"] > 0:
                break
            child.process.send_signal(signal.SIGCONT)
            time.sleep(0.005)
        stopped_at, longest_s, exchanges = started, time.monotonic() - started, 0
        while time.monotonic() - stopped_at < 60:
            started = time.monotonic()
            assert segment.exchange(weights) in ("moved", "unchanged")
            longest_s = max(longest_s, time.monotonic() - started)
            exchanges += 1
            time.sleep(0.01)
        assert longest_s <= 2.0 + 1.0
        assert exchanges > 100  # only the first one waited
        assert segment.live_workers() == [0]  # fenced after its lease
        skipped = segment.stats()["skipped_chunks"]
        child.process.send_signal(signal.SIGCONT)
        wait_until(lambda: segment.live_workers() == [0, 1])
        child.kill()
        segment.exchange(weights)
        assert segment.stats()["skipped_chunks"] == skipped
        assert np.isfinite(segment.read()[0]).all()
