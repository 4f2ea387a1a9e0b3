"""`tf-smb run` as real processes: what workers get, what is shown, exit codes."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tf_smb import resources, worker_output
from tf_smb.errors import InvalidArgumentError

# Each worker writes what it got.
TELL = """
import json, os, pathlib
got = {"cores": sorted(os.sched_getaffinity(0)), "environment": dict(os.environ)}
out = pathlib.Path(os.environ["OUT"], "got-" + os.environ.get("TF_SMB_WORKER_INDEX", "plain"))
out.write_text(json.dumps(got))
"""
CORES = sorted(os.sched_getaffinity(0))

Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs `tf-smb run` with options and a Python script as the workers."""

    def run_script(*options: str, script: str = TELL, **environment: str):
        (tmp_path / "worker.py").write_text(script)
        base = {name: value for name, value in os.environ.items() if not is_ours(name)}
        return subprocess.run(
            [
                *(sys.executable, "-m", "tf_smb.cli", "run", *options),
                *("--", sys.executable, str(tmp_path / "worker.py")),
            ],
            env={**base, "OUT": str(tmp_path), "TMPDIR": str(tmp_path), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run_script


def is_ours(name: str) -> bool:
    return name.startswith(("TF_SMB_", "TF_NUM_", "OMP_", "CUDA_", "PYTHONUNBUFFERED"))


def got(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("got-*"), key=lambda path: int(path.name[4:]))
    return [json.loads(path.read_text()) for path in paths]


# --- What workers get ---


def test_workers_get_a_box_their_number_and_a_job_id(run: Run, tmp_path: Path):
    runs = []
    for _ in range(2):
        assert run("-n", "3").returncode == 0
        runs.append([worker["environment"] for worker in got(tmp_path)])
        assert [env["TF_SMB_WORKER_INDEX"] for env in runs[-1]] == ["0", "1", "2"]
        assert {env["TF_SMB_NUM_WORKERS"] for env in runs[-1]} == {"3"}
        assert {env["PYTHONUNBUFFERED"] for env in runs[-1]} == {"1"}
        assert len({env["TF_SMB_SERVER"] for env in runs[-1]}) == 1
        assert len({env["TF_SMB_JOB_ID"] for env in runs[-1]}) == 1
    for name in ("TF_SMB_SERVER", "TF_SMB_JOB_ID", "TF_SMB_LAUNCH_ID"):
        assert runs[0][0][name] != runs[1][0][name]  # a second run resumes nothing


def test_what_the_user_set_stays(run: Run, tmp_path: Path):
    mine = {
        "TF_SMB_JOB_ID": "mine",
        "PYTHONUNBUFFERED": "",
        "OMP_NUM_THREADS": "7",
        "TF_NUM_INTEROP_THREADS": "5",
    }
    assert run("-n", "1", **mine).returncode == 0
    (worker,) = got(tmp_path)
    assert {name: worker["environment"][name] for name in mine} == mine


def test_an_outer_job_is_not_passed_on(run: Run, tmp_path: Path):
    outer = {"TF_SMB_SERVER": "shm://outer", "TF_SMB_NUM_WORKERS": "9", "TF_SMB_WORKER_INDEX": "8"}
    assert run("-n", "1", TF_SMB_PLAIN="1", **outer).returncode == 0
    environment = got(tmp_path)[0]["environment"]
    assert environment["TF_SMB_SERVER"] != "shm://outer"
    assert environment["TF_SMB_NUM_WORKERS"] == "1"
    assert "TF_SMB_PLAIN" not in environment


def test_cores_are_divided(run: Run, tmp_path: Path):
    count = min(len(CORES), 2)
    assert run("-n", str(count)).returncode == 0
    workers = got(tmp_path)
    each = len(CORES) // count
    assert all(len(worker["cores"]) == each for worker in workers)
    assert len({core for worker in workers for core in worker["cores"]}) == each * count
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        threads = {int(worker["environment"][name]) for worker in workers}
        assert len(threads) == 1 and 1 <= threads.pop() <= each


def test_more_workers_than_cores_take_turns_and_it_is_said(run: Run, tmp_path: Path):
    count = 2 * len(CORES)
    if count > 64:
        pytest.skip("would start too many workers on this machine")
    result = run("-n", str(count))
    assert result.returncode == 0
    pinned = [worker["cores"] for worker in got(tmp_path)]
    assert sorted(core for cores in pinned for core in cores) == sorted(2 * CORES)
    assert f"{count} workers share" in result.stderr


def test_cores_per_worker(run: Run, tmp_path: Path):
    assert run("-n", "1", "--cores-per-worker", "1").returncode == 0
    assert len(got(tmp_path)[0]["cores"]) == 1
    assert run("-n", "1", "--cores-per-worker", "none").returncode == 0
    (worker,) = got(tmp_path)
    assert worker["cores"] == CORES
    assert "OMP_NUM_THREADS" not in worker["environment"]


def test_threads_of_one_physical_core_stay_together(monkeypatch):
    monkeypatch.setattr(resources, "_neighbouring_cores", lambda: [0, 4, 1, 5, 2, 6, 3, 7])
    monkeypatch.setattr(resources, "_cgroup_cores", lambda: None)
    shares = resources.hand_out_cores(2).shares
    assert [share.cores for share in shares] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert [share.threads for share in shares] == [4, 4]
    assert not resources.hand_out_cores(8).oversubscribed
    assert resources.hand_out_cores(9).oversubscribed
    assert resources.hand_out_cores(3).shares[0].cores == (0, 4)  # the same for all


def test_a_containers_share_of_time_counts(monkeypatch, tmp_path: Path):
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod/cpu.max").write_text("250000 100000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "self").write_text("0::/pod\n")
    assert resources._cgroup_cores(tmp_path, tmp_path / "self") == 3
    (tmp_path / "pod/cpu.max").write_text("max 100000\n")
    assert resources._cgroup_cores(tmp_path, tmp_path / "self") is None
    monkeypatch.setattr(resources, "_neighbouring_cores", lambda: list(range(16)))
    monkeypatch.setattr(resources, "_cgroup_cores", lambda: 2)
    plan = resources.hand_out_cores(2)
    assert [len(share.cores) for share in plan.shares] == [8, 8]  # any of them, for all we know
    assert [share.threads for share in plan.shares] == [1, 1]
    assert resources.hand_out_cores(4).oversubscribed


# --- GPUs ---


@pytest.fixture
def nvidia_smi(tmp_path: Path) -> Callable[[str], str]:
    """Puts an nvidia-smi that lists GPUs on a PATH, and returns that."""

    def make(listing: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{listing}\nEND\n")
        (folder / "nvidia-smi").chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    return make


TWO_GPUS = "GPU 0: NVIDIA H200 (UUID: GPU-1a)\nGPU 1: NVIDIA H200 (UUID: GPU-2b)"


def test_each_worker_gets_a_gpu(run: Run, tmp_path: Path, nvidia_smi):
    assert run("-n", "2", PATH=nvidia_smi(TWO_GPUS)).returncode == 0
    workers = [worker["environment"] for worker in got(tmp_path)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in workers] == ["0", "1"]
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in workers[0]


def test_too_few_gpus_are_refused_with_the_ways_out(run: Run, tmp_path: Path, nvidia_smi):
    result = run("-n", "3", PATH=nvidia_smi(TWO_GPUS))
    assert result.returncode == 2
    assert result.stderr == (
        "tf-smb run: 3 workers need a GPU each, but there are 2 GPUs (0, 1): start fewer workers "
        "(-n 2), let them share (--gpus share), or train on the CPU (--gpus none) [SMB-E311]\n"
    )
    assert not got(tmp_path)


def test_gpus_shared_or_none(run: Run, tmp_path: Path, nvidia_smi):
    path = nvidia_smi(TWO_GPUS)
    assert run("-n", "3", "--gpus", "share", PATH=path).returncode == 0
    workers = [worker["environment"] for worker in got(tmp_path)]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in workers] == ["0", "1", "0"]
    assert [env.get("TF_FORCE_GPU_ALLOW_GROWTH") for env in workers] == ["true", None, "true"]
    assert run("-n", "3", "--gpus", "none", PATH=path).returncode == 0
    assert {w["environment"]["CUDA_VISIBLE_DEVICES"] for w in got(tmp_path)} == {"-1"}


def test_named_gpus(run: Run, tmp_path: Path):
    visible = {"CUDA_VISIBLE_DEVICES": "2,3,5"}
    assert run("-n", "2", "--gpus", "5,2", **visible).returncode == 0
    assert [w["environment"]["CUDA_VISIBLE_DEVICES"] for w in got(tmp_path)] == ["5", "2"]
    result = run("-n", "2", "--gpus", "0,1", **visible)
    assert (result.returncode, result.stderr) == (
        2,
        "tf-smb run: --gpus names GPU 0, but the GPUs here are: 2, 3, 5 [SMB-E313]\n",
    )
    result = run("-n", "2", "--gpus", "all", **visible)
    assert result.returncode == 2 and "got 'all'" in result.stderr


def test_gpu_names():
    parse = resources._parse_gpu_list
    divided = "  MIG 1g.5gb Device  0: (UUID: MIG-a)\n  MIG 1g.5gb Device  1: (UUID: MIG-b)"
    assert parse(f"GPU 0: A100 (UUID: GPU-1)\n{divided}\nGPU 1: A100 (UUID: GPU-2)\n") == [
        *("MIG-a", "MIG-b", "1")
    ]
    assert parse("") == []
    for value, names in (("", []), ("-1", []), ("1, 3", ["1", "3"]), ("0,-1,2", ["0"])):
        assert resources.visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names
    assert resources.visible_gpus({"PATH": "/nowhere"}) == []


def test_without_gpus_nothing_is_said(run: Run, tmp_path: Path):
    result = run("-n", "2", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and "GPU" not in result.stderr
    assert got(tmp_path)[0]["environment"]["CUDA_VISIBLE_DEVICES"] == ""


# --- Output ---

PROGRESS = """
import os, sys
i = os.environ["TF_SMB_WORKER_INDEX"]
print(f"hello from {i}")
for step in (1, 2, 3):
    sys.stdout.write(f"\\r\\x1b[1m{step}/3\\x1b[0m worker {i}" + "\\b" * 5)
    sys.stdout.flush()
print()
print("to stderr", file=sys.stderr)
sys.stdout.write("no end")
"""


def test_only_the_chief_is_shown(run: Run, tmp_path: Path):
    logs = tmp_path / "a" / "logs"
    result = run("-n", "3", "--log-dir", str(logs), script=PROGRESS)
    assert result.returncode == 0
    assert "hello from 0" in result.stdout and "worker 1" not in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("tf-smb: 3 workers ")
    assert first.endswith(f"; output of workers 1 to 2: {logs}")
    assert second == "to stderr"
    for index in (1, 2):
        log = (logs / f"worker-{index}.log").read_text()
        assert f"hello from {index}\n" in log and "to stderr\n" in log
    assert not (logs / "worker-0.log").exists()


def test_log_folder_is_named_after_the_job(run: Run, tmp_path: Path):
    result = run("-n", "2", script=PROGRESS, TF_SMB_JOB_ID="my/job")
    folder = Path(re.search(r"output of worker 1: (.*)", result.stderr)[1])
    assert folder.parent == tmp_path and folder.name.startswith("tf_smb-my_job-")
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert "hello from 1" in (folder / "worker-1.log").read_text()


def test_all_output_comes_line_by_line_with_its_worker(run: Run):
    result = run("-n", "3", "--output", "all", script=PROGRESS)
    lines = result.stdout.splitlines()
    for index in (1, 2):
        assert [line for line in lines if line.startswith(f"[worker {index}] ")] == [
            f"[worker {index}] hello from {index}",
            f"[worker {index}] 3/3 worker {index}",
            f"[worker {index}] to stderr",
            f"[worker {index}] no end",
        ]
    # Worker 0's lines are whole, too, whatever comes between them.
    assert [line for line in lines if not line.startswith("[")] == [
        *("hello from 0", "3/3 worker 0", "no end")
    ]
    assert "to stderr" in result.stderr.splitlines()


def test_the_chief_has_the_terminal_itself(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text("import os\nif os.isatty(1): print('tty:', os.ttyname(1))")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tf_smb.cli", "run", "-n", "2", "--log-dir", str(tmp_path)),
            *("--", sys.executable, str(script)),
        ],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as launcher:
        name = os.ttyname(theirs)
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:
            pass  # Linux's end of file of a terminal
        os.close(ours)
    assert launcher.returncode == 0
    assert f"tty: {name}" in shown.decode()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain", "plain"),
        (b"\r1/3\r2/3\r3/3\r\n", "3/3"),
        (b"\x1b[32mgreen\x1b[0m \x1b]0;title\x07end", "green end"),
        (b"\xff broken", "\N{REPLACEMENT CHARACTER} broken"),
        (b"", ""),
        (b"\r\r", ""),
        (b"  indented", "  indented"),
    ],
)
def test_visible_line(line: bytes, shown: str):
    assert worker_output.visible_line(line) == shown


def test_a_line_without_end_is_shown_in_pieces(tmp_path: Path):
    shown: list[str] = []
    (tmp_path / "log").write_bytes(b"x" * (5 << 20))
    follower = worker_output.LogFollower(tmp_path / "log", shown.append)
    follower.show_new()
    follower.show_rest()
    assert sum(map(len, shown)) == 5 << 20 and len(shown) > 1


# --- Failures ---


def fail(worker: int, how: str, others: str = "import time; time.sleep(1000)") -> str:
    return f"""
import os, signal, sys
if int(os.environ["TF_SMB_WORKER_INDEX"]) == {worker}:
    for number in range(40):
        print("line", number)
    sys.stdout.flush()
    {how}
else:
    {others}
"""


def test_first_failure_stops_the_others_and_is_shown(run: Run):
    result = run("-n", "3", script=fail(1, "raise RuntimeError('oh dear')"))
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert "tf-smb: worker 1 exited with code 1: stopping the other 2 workers" in lines
    (at,) = [i for i, line in enumerate(lines) if line.startswith("tf-smb: the last lines of")]
    assert lines[at].endswith("worker-1.log:")
    tail = lines[at + 1 :]
    assert len(tail) == 20 and tail[-1] == "    RuntimeError: oh dear"
    assert "    line 39" in tail and "    line 1" not in tail


def test_a_failed_chief_is_not_repeated(run: Run):
    result = run("-n", "2", script=fail(0, "sys.exit('oh dear')"))
    assert result.returncode == 1
    assert result.stdout.count("line 39") == 1
    assert result.stderr.count("oh dear") == 1
    assert "worker 0 exited with code 1: stopping the other worker" in result.stderr


def test_a_cause_that_all_share_is_shown_once(run: Run):
    result = run("-n", "2", script="import time; time.sleep(0.1); 1/0")
    assert result.returncode == 1
    assert result.stderr.count("ZeroDivisionError") == 1


def test_its_exit_code_is_returned(run: Run):
    assert run("-n", "2", script=fail(1, "sys.exit(77)")).returncode == 77


def test_failures_after_the_first_do_not_count(run: Run):
    late = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); signal.pause()"
    result = run("-n", "2", script=fail(1, "import time; time.sleep(0.5); sys.exit(3)", late))
    assert result.returncode == 3
    assert "code 9" not in result.stderr


def test_failures_can_be_gone_on_from(run: Run, tmp_path: Path):
    others = "open(os.path.join(os.environ['OUT'], 'finished'), 'w')"
    script = fail(1, "sys.exit(5)", f"import time; time.sleep(1.5); {others}")
    result = run("-n", "2", "--on-failure", "continue", script=script)
    assert result.returncode == 5
    assert "worker 1 exited with code 5: the other worker goes on" in result.stderr
    assert (tmp_path / "finished").exists()


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGSEGV)", "sys.exit(128 + 11)"])
def test_a_crash_does_not_stop_the_others(run: Run, how: str):
    result = run("-n", "2", script=fail(1, how, "import time; time.sleep(1)"))
    assert result.returncode == 139  # of a shell that passes its child's end on, too
    assert "worker 1 was killed by SIGSEGV: the other worker goes on" in result.stderr


def test_a_command_that_cannot_be_executed(tmp_path: Path):
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    result = subprocess.run(
        [sys.executable, "-m", "tf_smb.cli", "run", "-n", "1", "--", str(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 127
    assert f"tf-smb: cannot run '{program}': No such file or directory" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_not_taken_for_others(tmp_path: Path, closed: str):
    line = f"exec {sys.executable} -m tf_smb.cli run -n 1 -- sh -c 'ls -l /proc/self/fd > $OUT'"
    out = tmp_path / "out"
    environment = {**os.environ, "OUT": str(out)}
    result = subprocess.run(["sh", "-c", f"{line} {closed}"], env=environment, timeout=60)
    assert result.returncode == 0
    assert "pipe:" not in out.read_text() or closed != "<&- >&- 2>&-"


def test_core_counts_out_of_range():
    for value in ("0", "-1", "x", str(len(CORES) + 1), "1.5"):
        with pytest.raises(InvalidArgumentError, match=f"got '{value}'"):
            resources.hand_out_cores(2, value)
