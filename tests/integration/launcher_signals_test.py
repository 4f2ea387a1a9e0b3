"""`tf-smb run` under signals, as real processes: what ends, with which code, what is left."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

DEADLINE_S = 60.0
# A worker that says it is there and then runs until someone ends it.
SLEEP = """
import os, pathlib, time
up = pathlib.Path(os.environ["OUT"], "up-" + os.environ["TF_SMB_WORKER_INDEX"])
up.write_text(str(os.getpid()))
while True:
    time.sleep(0.1)
"""
# The same, deaf to what can be ignored.
DEAF = (
    "import signal\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\n"
    + SLEEP
)
# Notes which signals come, and ends on USR2.
NOTING = (
    """
import os, pathlib, signal, sys, time
name = pathlib.Path(os.environ["OUT"], "got-" + os.environ["TF_SMB_WORKER_INDEX"])
def note(number, frame):
    with open(name, "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
"""
    + SLEEP
)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for: {what}"
        time.sleep(0.02)


def processes() -> dict[int, tuple[int, str, str]]:
    """Returns parent, state and start time of each process."""
    found = {}
    for name in os.listdir("/proc"):
        try:
            stat = Path("/proc", name, "stat").read_bytes() if name.isdecimal() else b""
        except OSError:
            continue
        if stat:
            fields = stat.rpartition(b")")[2].split()
            found[int(name)] = (int(fields[1]), fields[0].decode(), fields[19].decode())
    return found


def descendants(process_id: int) -> set[tuple[int, str]]:
    """Returns a process and all below it, each with its start time."""
    table = processes()
    family = {process_id}
    while more := {pid for pid, entry in table.items() if entry[0] in family} - family:
        family |= more
    return {(pid, table[pid][2]) for pid in family if pid in table}


def signal_set(process_id: int, kind: str) -> set[int]:
    """Returns the signals that a process ignores (SigIgn) or blocks (SigBlk)."""
    mask = int(
        Path(f"/proc/{process_id}/status").read_text().partition(f"{kind}:")[2].split()[0], 16
    )
    return {number for number in range(1, 32) if mask & 1 << number - 1}


@dataclass
class Job:
    process: subprocess.Popen
    out: Path
    mark: str

    def kill(self, number: int) -> None:
        self.process.send_signal(number)

    def worker_pid(self, index: int) -> int:
        path = self.out / f"up-{index}"
        wait_for(lambda: path.exists() and path.read_text(), f"worker {index} to start")
        return int(path.read_text())

    def wait(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    def messages(self) -> str:
        return (self.out / "stderr").read_text()

    def marked(self) -> list[int]:
        """Returns the processes that came from this job, found by an environment variable."""
        found = []
        for pid, (_, state, _) in processes().items():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in environment and state != "Z":
                found.append(pid)
        return found

    def family(self) -> set[tuple[int, str]]:
        return descendants(self.process.pid)

    def assert_nothing_left(self, family: set[tuple[int, str]] = frozenset()) -> None:
        """Checks for processes of this job: marked ones, and those seen before (the guard)."""

        def left() -> set[tuple[int, str]]:
            now = {(pid, entry[2]) for pid, entry in processes().items() if entry[1] != "Z"}
            return family & now

        wait_for(lambda: not self.marked() and not left(), "all processes to be gone")
        for address in self.out.glob("address-*"):
            name = address.read_text().removeprefix("shm://")
            assert name and name not in Path("/proc/net/unix").read_text()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `tf-smb run` with options and a script or command as the workers, or bare commands."""
    jobs = []

    def start_job(
        *options: str, script: str = "", command: list[str] | None = None, bare: bool = False
    ) -> Job:
        mark = "TF_SMB_TEST_MARK=" + uuid.uuid4().hex
        path = tmp_path / "worker.py"
        if script:
            path.write_text(script)
        line = [sys.executable, "-m", "tf_smb.cli", "run", "--log-dir", str(tmp_path / "logs")]
        with open(tmp_path / "stderr", "w") as stderr, open(tmp_path / "stdout", "w") as stdout:
            process = subprocess.Popen(
                command if bare else [*line, *options, "--", *(command or [sys.executable, path])],
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "OUT": str(tmp_path), **dict([mark.split("=")])},
            )
        jobs.append(Job(process, tmp_path, mark))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for pid in [*job.marked(), job.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        job.process.wait()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stop_signals_reach_all_workers(start: Start, number: int, code: int):
    job = start("-n", "2", script=NOTING)
    for index in range(2):
        job.worker_pid(index)
    family = job.family()
    assert len(family) == 4  # launcher, guard, two workers
    job.kill(number)
    assert job.wait() == code
    for index in range(2):
        assert (job.out / f"got-{index}").read_text() == signal.Signals(number).name + "\n"
    job.assert_nothing_left(family)
    assert f"{signal.Signals(number).name}: stopping 2 workers" in job.messages()


def test_user_signals_are_passed_on_and_end_nothing(start: Start):
    job = start("-n", "2", script=NOTING)
    for index in range(2):
        job.worker_pid(index)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        job.kill(number)
        for index in range(2):
            path = job.out / f"got-{index}"
            name = signal.Signals(number).name
            wait_for(lambda p=path, n=name: p.exists() and n in p.read_text(), f"{name}")
    assert job.wait() == 0  # NOTING ends with 0 on USR2
    job.assert_nothing_left()


def test_workers_that_ignore_ctrl_c_are_killed(start: Start):
    job = start("-n", "2", "--grace-seconds", "0.5", script=DEAF)
    family = {entry for index in range(2) for entry in descendants(job.worker_pid(index))}
    family |= job.family()
    job.kill(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left(family)
    assert "workers 0, 1 still running: sending SIGTERM" in job.messages()
    assert "workers 0, 1 still running: sending SIGKILL" in job.messages()


def test_a_signal_that_a_native_thread_gets_counts(start: Start):
    job = start("-n", "1", script=SLEEP)
    job.worker_pid(0)
    threads = {int(name) for name in os.listdir(f"/proc/{job.process.pid}/task")}
    thread = max(threads - {job.process.pid})  # the server's
    assert ctypes.CDLL(None).tgkill(job.process.pid, thread, signal.SIGINT) == 0
    assert job.wait() == 130
    job.assert_nothing_left()


def test_second_ctrl_c_kills(start: Start):
    job = start("-n", "2", "--grace-seconds", "600", script=DEAF)
    for index in range(2):
        job.worker_pid(index)
    job.kill(signal.SIGINT)
    wait_for(lambda: "stopping" in job.messages(), "the first Ctrl-C")
    job.kill(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


def test_a_signal_reaches_the_program_behind_a_shell(start: Start, tmp_path: Path):
    shell = ["bash", "-c", f"{sys.executable} {tmp_path}/worker.py; true"]
    job = start("-n", "1", script=NOTING, command=shell)
    job.worker_pid(0)
    job.kill(signal.SIGTERM)
    assert job.wait() == 143
    assert (job.out / "got-0").read_text() == "SIGTERM\n"
    job.assert_nothing_left()


def test_ctrl_c_works_where_the_shell_ignores_it_for_background_jobs(start: Start, tmp_path: Path):
    (tmp_path / "worker.py").write_text(SLEEP)
    run = f"{sys.executable} -m tf_smb.cli run -n 1 -- {sys.executable} {tmp_path}/worker.py"
    job = start(command=["sh", "-c", f"{run} & echo $! > pid; wait $!; echo $? > code"], bare=True)
    job.worker_pid(0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGINT)
    assert job.wait() == 0
    assert (tmp_path / "code").read_text() == "130\n"


def test_nohup_stays_in_force(start: Start, tmp_path: Path):
    (tmp_path / "worker.py").write_text(SLEEP)
    run = ["nohup", sys.executable, "-m", "tf_smb.cli", "run", "-n", "1", "--"]
    job = start(command=[*run, sys.executable, str(tmp_path / "worker.py")], bare=True)
    for process_id in (job.worker_pid(0), job.process.pid):
        assert signal_set(process_id, "SigIgn") >= {signal.SIGHUP}
    job.kill(signal.SIGTERM)
    assert job.wait() == 143


def test_workers_begin_with_all_signals_as_they_should_be(start: Start):
    job = start("-n", "1", command=["sh", "-c", "echo $$ > $OUT/up-0; exec sleep 1000"])
    worker = job.worker_pid(0)
    wait_for(lambda: Path(f"/proc/{worker}/comm").read_text() == "sleep\n", "sleep")
    for kind in ("SigIgn", "SigBlk"):
        assert signal_set(worker, kind) == set()
    job.kill(signal.SIGTERM)
    assert job.wait() == 143


def test_killed_worker_does_not_end_the_others(start: Start):
    script = (
        SLEEP.replace("while True:\n    time.sleep(0.1)", "")
        + 'while not pathlib.Path(os.environ["OUT"], "go").exists(): time.sleep(0.05)\n'
    )
    job = start("-n", "3", script=script)
    pids = [job.worker_pid(index) for index in range(3)]
    family = job.family()
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: "worker 1 was killed by SIGKILL" in job.messages(), "the line about it")
    assert "the other 2 workers go on" in job.messages()
    (job.out / "go").touch()
    assert job.wait() == 137
    job.assert_nothing_left(family)


def test_killed_worker_ends_the_job_if_told_so(start: Start):
    job = start("-n", "2", "--on-failure", "stop", script=SLEEP)
    pids = [job.worker_pid(index) for index in range(2)]
    os.kill(pids[0], signal.SIGKILL)
    assert job.wait() == 137
    job.assert_nothing_left()


EXCHANGING = """
import os, pathlib, time
import numpy as np
import tf_smb
out, index = pathlib.Path(os.environ["OUT"]), int(os.environ["TF_SMB_WORKER_INDEX"])
(out / f"address-{index}").write_text(os.environ["TF_SMB_SERVER"])
segment = tf_smb.Client(os.environ["TF_SMB_SERVER"]).create("run", [("w", (1000,))])
if index == 2:
    (out / "up-2").write_text(str(os.getpid()))
    time.sleep(1000)  # and is killed before it joins
arrays = [np.full(1000, float(index), np.float32)]
segment.start(arrays, worker_index=index)
(out / f"up-{index}").write_text(str(os.getpid()))
step = 0
while not (out / "go").exists():
    step += 1
    segment.exchange(arrays, step)
    time.sleep(0.01)
segment.meet(arrays)
(out / f"final-{index}").write_bytes(arrays[0].tobytes())
"""


def test_nobody_waits_for_a_killed_worker(start: Start):
    job = start("-n", "4", script=EXCHANGING)
    os.kill(job.worker_pid(2), signal.SIGKILL)  # before it joined: the others wait for it
    for index in (0, 1, 3):
        job.worker_pid(index)  # so they started without it
    family = job.family()
    os.kill(job.worker_pid(1), signal.SIGKILL)  # in the middle of training
    (job.out / "go").touch()
    assert job.wait() == 137
    assert (job.out / "final-0").read_bytes() == (job.out / "final-3").read_bytes()
    assert not (job.out / "final-1").exists()
    job.assert_nothing_left(family)


@pytest.mark.parametrize("wrapped", [False, True], ids=["directly", "by a shell"])
def test_launcher_killed(start: Start, tmp_path: Path, wrapped: bool):
    shell = ["bash", "-c", f"{sys.executable} {tmp_path}/worker.py; true"]
    job = start("-n", "2", script=SLEEP, command=shell if wrapped else None)
    for index in range(2):
        job.worker_pid(index)
    family = job.family()
    assert len(family) == (6 if wrapped else 4)
    job.kill(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.assert_nothing_left(family)


def test_launcher_killed_with_deaf_stopped_and_escaped_workers(start: Start, tmp_path: Path):
    # One sleeper in another session, and one that has nothing of our environment.
    sleepers = """
import subprocess
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.Popen(["sleep", "1000"], env={})
while True"""
    job = start("-n", "2", script=DEAF.replace("\nwhile True", sleepers))
    wait_for(lambda: len(job.family()) == 8, "the sleepers to start")
    family = job.family()
    os.kill(job.worker_pid(1), signal.SIGSTOP)
    job.kill(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.assert_nothing_left(family)


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4])
def test_launcher_killed_while_it_starts(start: Start, delay_s: float):
    job = start("-n", "4", script=SLEEP)
    time.sleep(delay_s)
    family = job.family()
    job.kill(signal.SIGKILL)
    job.wait()
    job.assert_nothing_left(family)


@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.3])
def test_ctrl_c_while_it_starts(start: Start, delay_s: float):
    job = start("-n", "4", command=["sleep", "1000"])
    time.sleep(delay_s)
    family = job.family()
    job.kill(signal.SIGINT)
    try:
        job.process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        job.kill(signal.SIGINT)  # Python drops one that meets a weak reference's callback
    assert job.wait() in (130, -signal.SIGINT, 1)  # the others: it was still importing
    assert job.process.returncode != 130 or "Traceback" not in job.messages()
    job.assert_nothing_left(family)


def test_orphans_of_a_killed_shell_end_with_it(start: Start, tmp_path: Path):
    shell = ["bash", "-c", f"{sys.executable} {tmp_path}/worker.py; true"]
    job = start("-n", "1", script=SLEEP, command=shell)
    python = job.worker_pid(0)
    family = job.family()
    os.kill(processes()[python][0], signal.SIGKILL)  # the shell
    assert job.wait() == 137
    job.assert_nothing_left(family)


def test_what_workers_leave_running_ends_with_the_job(start: Start):
    leave = "sleep 1000 & setsid sleep 1000 & (sleep 1000 &) ; sleep 0.2; echo done"
    job = start("-n", "2", command=["bash", "-c", leave])
    assert job.wait() == 0
    job.assert_nothing_left()
    assert (job.out / "stdout").read_text() == "done\n"


def test_killed_guard_does_no_harm(start: Start):
    job = start("-n", "1", script=NOTING)
    worker = job.worker_pid(0)
    children = {pid for pid, entry in processes().items() if entry[0] == job.process.pid}
    (guard,) = children - {worker}
    os.kill(guard, signal.SIGKILL)
    job.kill(signal.SIGUSR2)
    assert job.wait() == 0
    job.assert_nothing_left()


def test_guard_holds_no_output_and_no_descriptor(start: Start):
    job = start("-n", "1", script=SLEEP)
    worker = job.worker_pid(0)
    children = {pid for pid, entry in processes().items() if entry[0] == job.process.pid}
    (guard,) = children - {worker}
    targets = {
        os.readlink(entry.path).partition(":")[0] for entry in os.scandir(f"/proc/{guard}/fd")
    }
    assert targets == {"pipe", "/dev/null"}
    assert {int(entry.name) for entry in os.scandir(f"/proc/{worker}/fd")} == {0, 1, 2}
    job.kill(signal.SIGTERM)
    assert job.wait() == 143
