"""`tf-smb serve`, `ls`, `stat` and `rm`: a real server, real processes, their files."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from children import DEADLINE_S, LAYOUT, wait_until, zeros

from tf_smb import Client, errors, inspection

SHM = Path("/dev/shm")


def tf_smb_command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "tf_smb.cli", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **options,
    )


class Serving:
    """A `tf-smb serve` of its own name."""

    def __init__(self, name, *options):
        self.name = name
        self.address = f"shm://{name}"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tf_smb.cli", "serve", "--name", name, *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_line = self.process.stdout.readline()

    def files(self):
        return sorted(SHM.glob(f"tf_smb.{os.geteuid()}.{self.name}.*"))

    def end(self, number):
        self.process.send_signal(number)
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()


@pytest.fixture
def serve():
    servers = []

    def start(name=None, *options):
        name = name or f"serve_test-{os.getpid()}-{len(servers)}"
        servers.append(Serving(name, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        for path in server.files():
            path.unlink()


USE = """
segment = Client(sys.argv[1], job_id="job").create("run", LAYOUT, num_workers=2)
segment.join(int(sys.argv[2]))
segment.accumulate(zeros(1))
say("added", segment.version)
sys.stdin.read() if len(sys.argv) > 3 else time.sleep(1000)
"""


def test_processes_that_are_not_parent_and_child_share_a_segment(serve, spawn):
    server = serve()
    assert f"serving {server.address}" in server.first_line
    for index in (0, 1):
        spawn(USE, server.address, index).wait_for("added")
    segment = Client(server.address, job_id="job").attach("run")
    assert segment.live_workers() == [0, 1]
    assert (segment.read()[0] == 2).all()


def test_files_are_this_users_alone_and_go_at_the_end(serve):
    server = serve()
    Client(server.address, job_id="job").create("a/b c", LAYOUT).detach()
    (path,) = server.files()
    assert path.name == f"tf_smb.{os.geteuid()}.{server.name}.a%2Fb%20c"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.end(signal.SIGTERM)
    assert server.process.returncode == 0
    assert server.files() == []


def test_interrupt_ends_the_server_too(serve):
    server = serve()
    server.end(signal.SIGINT)
    assert server.process.returncode == 0


def test_a_name_is_taken_once(serve):
    server = serve()
    second = tf_smb_command("serve", "--name", server.name)
    assert second.returncode == 1
    assert f"already listens at {server.address}" in second.stderr
    assert second.stderr.count("\n") == 1


def test_ls_and_stat(serve, spawn):
    server = serve()
    spawn(USE, server.address, 1).wait_for("added")
    listed = tf_smb_command("ls", "--server", server.address)
    assert listed.returncode == 0, listed.stderr
    header, line = listed.stdout.splitlines()
    assert header.split() == ["SEGMENT", "SERVER", "JOB", "MB", "LIVE"]
    assert line.split() == ["run", server.address, "job", "0.4", "1"]
    (entry,) = json.loads(tf_smb_command("ls", "--server", server.address, "--json").stdout)
    assert entry["name"] == "run" and entry["live_members"] == 1
    assert any(entry.server == server.address for entry in inspection.list_segments())

    shown = tf_smb_command("stat", "run", "--server", server.address)
    assert shown.returncode == 0, shown.stderr
    assert "worker 1: live" in shown.stdout
    assert "w: float32[100000]" in shown.stdout.replace(" ", "").replace("w:", "w: ")
    status = json.loads(tf_smb_command("stat", "run", "--server", server.address, "--json").stdout)
    assert status["version"] == 1
    assert status["job_id"] == "job"
    assert [member["worker_index"] for member in status["members"]] == [1]
    assert status["variables"][0] == {"name": "w", "shape": [100_000], "dtype": "float32"}


def test_stat_of_what_is_not_there_names_what_is(serve):
    server = serve()
    Client(server.address, job_id="job").create("run", LAYOUT).detach()
    shown = tf_smb_command("stat", "rum", "--server", server.address)
    assert shown.returncode == 1
    assert "no segment 'rum'" in shown.stderr and "'run'" in shown.stderr


def test_rm(serve, spawn):
    server = serve()
    child = spawn(USE, server.address, 0)
    child.wait_for("added")
    refused = tf_smb_command("rm", "run", "--server", server.address)
    assert refused.returncode == 1
    assert "1 live workers" in refused.stderr and "--force" in refused.stderr
    child.kill()
    assert tf_smb_command("rm", "run", "--server", server.address).returncode == 0
    assert server.files() == []
    with pytest.raises(errors.NotFoundError):
        Client(server.address).attach("run")


def test_the_next_server_takes_over_what_a_crashed_one_left(serve, spawn):
    server = serve()
    worker = spawn(USE, server.address, 0)
    worker.wait_for("added")
    server.end(signal.SIGKILL)
    (path,) = server.files()
    (left,) = [entry for entry in inspection.list_segments() if entry.server == server.address]
    assert (left.name, left.path) == ("run", str(path))
    assert "no server" in tf_smb_command("ls").stdout
    shown = tf_smb_command("stat", "run")
    assert shown.returncode == 1 and f"tf-smb serve --name {server.name}" in shown.stderr

    again = serve(server.name)
    assert "took over 'run'" in again.first_line
    segment = Client(again.address, job_id="job").attach("run")
    assert segment.live_workers() == [0]  # it never noticed
    segment.accumulate(zeros(1))
    assert (segment.read()[0] == 2).all()
    again.end(signal.SIGTERM)
    assert again.files() == []


def test_rm_removes_what_a_crashed_server_left(serve):
    server = serve()
    name = f"left-{server.name}"
    Client(server.address, job_id="job").create(name, LAYOUT).detach()
    server.end(signal.SIGKILL)
    assert len(server.files()) == 1
    assert tf_smb_command("rm", name).returncode == 0
    assert server.files() == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "open to others"])
def test_damaged_files_are_left_alone_and_told(serve, damage):
    server = serve()
    Client(server.address, job_id="job").create("run", LAYOUT).detach()
    server.end(signal.SIGKILL)
    (path,) = server.files()
    if damage == "truncated":
        os.truncate(path, 10_000)
    elif damage == "flipped":
        with path.open("r+b") as file:
            file.seek(40)
            byte = file.read(1)[0]
            file.seek(40)
            file.write(bytes([byte ^ 4]))
    else:
        path.chmod(0o644)
    again = Serving(server.name)
    try:
        assert "took over" not in again.first_line
        assert Client(again.address).segments() == []
        assert server.files() == [path]
    finally:
        again.end(signal.SIGTERM)
        path.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_has_other_servers_and_no_access(serve):
    server = serve()
    Client(server.address, job_id="job").create("run", LAYOUT).detach()
    (path,) = server.files()
    script = f"""
import os
os.setgid(65534); os.setuid(65534)
from tf_smb import Client, errors, inspection
try:
    Client({server.address!r}, timeout_s=0.1)
    print("connected")
except errors.UnavailableError as error:
    print("refused", error)
try:
    open({str(path)!r}, "rb")
    print("opened")
except PermissionError:
    print("closed")
print("sees", [entry.server for entry in inspection.list_segments()])
"""
    # Imported before the user changes: the package may lie where others cannot read.
    script = "import tf_smb, tf_smb.inspection\n" + script
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "refused no server of this user listens" in said.stdout, said.stderr
    assert "closed" in said.stdout
    assert server.address not in said.stdout.rpartition("sees")[2]


def test_a_stopped_server_holds_up_no_worker(serve):
    server = serve()
    client = Client(server.address, job_id="job")
    segment = client.create("run", LAYOUT)
    segment.join(0)
    server.process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        for _ in range(20):
            segment.accumulate(zeros(1))
        assert time.monotonic() - started < 5  # of milliseconds each
        np.testing.assert_array_equal(segment.read()[0], 20)
        with pytest.raises(errors.DeadlineExceededError, match="did not answer in time"):
            client.attach("run")
    finally:
        server.process.send_signal(signal.SIGCONT)
    wait_until(lambda: len(Client(server.address).segments()) == 1)
