"""tf-smb bench: what each workload prints and refuses, and that it leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tf_smb import _smb
from tf_smb.bench import cli, model, mpi
from tf_smb.bench.board import Board, GivenUpError, create_board_fd
from tf_smb.bench.case import Case, Turn
from tf_smb.bench.contestants import WrongResultError, check_conserved
from tf_smb.bench.groups import GroupError, start_command, start_workers
from tf_smb.bench.report import Section, format_markdown, format_table
from tf_smb.bench.result import Result, is_noisy, json_help
from tf_smb.bench.running import available_memory_mb, run
from tf_smb.bench.workload import Options
from tf_smb.bench.workloads import WORKLOADS
from tf_smb.box import Server

_TINY = ["--params-mb", "0.5", "--repeats", "1"]
_NO_PEERS = ["--peers", "limit", "--skip-op"]


def lines_of(capfd, arguments):
    assert cli.main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


# --- Workloads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "cases"),
    [
        (["exchange", *_TINY, *_NO_PEERS, "--workers", "1,2"], [1, 2]),
        (["read", *_TINY, "--workers", "1,2"], [1, 2]),
        (["write", *_TINY, "--workers", "1,2"], [1, 2]),
        (["accumulate", *_TINY, "--workers", "1,3"], [1, 3]),
        (["barrier", "--repeats", "1", "--workers", "1,3"], [1, 3]),
        (["notify", "--repeats", "1"], [2]),
        (["scaling", *_TINY, "--workers", "3", "--seconds", "0.2"], [2, 3]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_workload_prints_a_json_object_for_each_case(capfd, arguments, cases):
    workload = WORKLOADS[arguments[0]]
    lines = lines_of(capfd, arguments)
    assert [line["workers"] for line in lines] == cases
    for line in lines:
        assert (line["workload"], line["transport"]) == (workload.name, "shm")
        assert line["left_out"] == {}
        for axis in workload.axes:
            assert axis in line
        for ratio in workload.ratios:
            assert line[ratio.key] > 0
            assert line[f"{ratio.key}_iqr"] >= 0
        for column in workload.columns:
            assert f"{column.key}_iqr_{column.unit}" in line
            if line[f"{column.key}_samples"]:
                assert line[f"{column.key}_{column.unit}"] is not None
            assert f"{column.key}_{column.unit}" in json_help(workload)


@pytest.mark.parametrize("workload", ["exchange", "read", "write", "accumulate"])
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_workload_takes_other_dtypes(capfd, workload, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    peers = _NO_PEERS if workload == "exchange" else []
    (line,) = lines_of(
        capfd, [workload, *_TINY, *peers, "--workers", "2", "--dtypes", dtype, "--threads", "2"]
    )
    assert (line["dtype"], line["threads"]) == (dtype, 2)
    assert line[WORKLOADS[workload].ratios[0].key] > 0


def test_exchange_tells_the_move_from_the_check(capfd):
    (line,) = lines_of(capfd, ["exchange", *_TINY, *_NO_PEERS, "--workers", "2"])
    for name in ("exchange", "checked_exchange", "limit", "check"):
        assert line[f"{name}_ms"] > 0
    assert line["check_cost_samples"] == line["exchange_samples"]
    assert line["op_exchange_ms"] is None and line["tf_allreduce_ms"] is None


def test_measures_delta_averaging_and_writes_markdown(capfd, tmp_path):
    report = tmp_path / "benchmarks.md"
    arguments = ["exchange", *_TINY, "--skip-op", "--workers", "2", "--peers", "none"]
    assert cli.main([*arguments, "--rule", "delta", "--markdown", str(report)]) == 0
    assert "checked exchange ms" in capfd.readouterr().out
    text = report.read_text()
    assert "tf-smb bench exchange --params-mb 0.5" in text
    assert "cores" in text
    assert "## exchange" in text


def test_all_runs_the_standard_selection_of_each(monkeypatch, capfd, tmp_path):
    for name, workload in WORKLOADS.items():
        standard = (("--workers", "1"),) if "workers" in workload.defaults else ((),)
        monkeypatch.setattr(type(workload), "standard", standard if name != "scaling" else ())
        monkeypatch.setattr(type(workload), "batches", lambda self, options: iter(()))
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["all", "--repeats", "3"]) == 0
    text = (tmp_path / "docs/benchmarks.md").read_text()
    assert text.count("\n## ") == len(WORKLOADS) - 1
    assert "tf-smb bench barrier --workers 1 --repeats 3" in text


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_standard_selection_is_a_command_line(workload):
    for arguments in workload.standard:
        cli._make_parser().parse_args([workload.name, *arguments])


def test_help_is_the_list_of_workloads(capsys):
    assert cli.main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for workload in WORKLOADS.values():
        assert f"{workload.name} {workload.summary}" in said
    assert cli.main(["read", "--help"]) == 0
    assert "read_to_memcpy" in capsys.readouterr().out


def test_leaves_out_what_does_not_fit_into_memory(capfd):
    (line,) = lines_of(
        capfd, ["read", "--params-mb", "100000", "--workers", "64", "--repeats", "1"]
    )
    assert "MB may be used" in line["left_out"]["read"]
    assert line["read_ms"] is None and line["read_to_memcpy"] is None
    assert available_memory_mb() > 0


@pytest.mark.slow
def test_measures_op_and_peers(capfd):
    (line,) = lines_of(capfd, ["exchange", *_TINY, "--workers", "2"])
    assert line["op_exchange_ms"] > 0 and line["op_update_ms"] > 0
    assert line["tf_allreduce_ms"] > 0
    if shutil.which("mpicc") and shutil.which("mpirun"):
        assert line["mpi_get_accumulate_ms"] > 0 and line["mpi_allreduce_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["elastic", "delta"])
def test_exchanges_larger_than_the_cache_equal_numpy(capfd, rule):
    arguments = ["exchange", "--params-mb", "10", "--workers", "1,2", "--rule", rule]
    for line in lines_of(capfd, [*arguments, "--peers", "none", "--repeats", "1"]):
        assert line["op_exchange_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "WORKLOAD"),
        (["swim"], "'swim'"),
        (["exchange", "--transport", "pigeon"], "pigeon"),
        (["exchange", "--params-mb", "0"], "from 0.5 to 100000"),
        (["exchange", "--workers", "2.5"], "whole numbers from 1 to 64"),
        (["exchange", "--peers", "limit,nobody"], "limit, mpi, tf"),
        (["exchange", "--repeats", "1,2"], "one number"),
        (["read", "--dtypes", "float32,int8"], "of float32, float64, float16, bfloat16"),
        (["read", "--threads", "-1"], "from 0 to 64"),
        (["scaling", "--seconds", "0"], "from 0.1 to 3600"),
        (["notify", "--workers", "3"], "--workers"),
        (["exchange", "--markdown", "/nowhere/at/all.md"], "no folder"),
        (["all", "--markdown", "/nowhere/at/all.md"], "no folder"),
    ],
)
def test_refuses_in_one_sentence(capsys, arguments, said):
    assert cli.main(arguments) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.strip().splitlines()) == 1


def test_import_leaves_tensorflow_out():
    code = "import sys, tf_smb.bench.cli; print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# --- Processes -----------------------------------------------------------------------


def _processes_of(session: int) -> list[int]:
    """Returns the live descendants of a process by the environment they inherited."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"TF_SMB_BENCH_TEST={session}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_leaves_no_process_after_a_signal(number):
    environment = {**os.environ, "TF_SMB_BENCH_TEST": str(os.getpid())}
    command = [sys.executable, "-m", "tf_smb.bench", "exchange", "--params-mb", "50"]
    command += ["--workers", "2", "--peers", "limit", "--skip-op", "--repeats", "1000"]
    bench = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(_processes_of(os.getpid())) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_processes_of(os.getpid())) >= 3
    bench.send_signal(number)
    assert bench.wait(timeout=60) == 128 + number
    assert _processes_of(os.getpid()) == []


def test_group_tells_how_a_process_ended():
    command = ["sh", "-c", "read line; echo no such thing >&2; exit 3"]
    with start_command("the peer", command) as group, pytest.raises(GroupError) as error:
        group.call("{}", timeout_s=30)
    assert str(error.value) == "the peer ended: no such thing"


def test_group_gives_up_at_its_deadline():
    with start_command("the peer", ["sleep", "60"]) as group, pytest.raises(GroupError) as error:
        group.call("{}", timeout_s=0.1)
    assert "the peer did not answer in 0.1 s" in str(error.value)


def test_group_does_not_wait_for_those_who_wait_for_a_dead_worker():
    case = Case("scaling", 2, params_mb=0.5, seconds=600)
    with Server() as server, start_workers("scaling", 2, [[], []], server.address, "job") as group:
        killing = threading.Timer(2.0, group._children[1].process.kill)
        killing.start()
        with pytest.raises(GroupError, match=r"worker 1 \(scaling\) ended: exit code -9"):
            group.take(Turn(case, "", "bench/x", check=False), timeout_s=60)
        killing.join()


def test_wrong_result_of_one_worker_ends_the_turn_of_all(monkeypatch, tmp_path):
    # For worker 0 nothing equals anything.
    (tmp_path / "sitecustomize.py").write_text(
        """
import json, sys
if '"index": 0' in "".join(sys.orig_argv):
    from tf_smb.bench import segments
    def differ(*_):
        raise segments.CheckFailedError("a read differs from numpy")
    segments.check_same = differ
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    options = Options(params_mb=(0.5,), workers=(2,), repeats=1)
    with pytest.raises(WrongResultError, match="a read differs from numpy"):
        list(run(WORKLOADS["read"], options))


def test_missing_mpi_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GroupError, match="no mpicc"):
        mpi.compile_peer(tmp_path)


def test_board_gives_up_when_somebody_is_missing():
    fd = create_board_fd()
    try:
        with pytest.raises(TimeoutError):
            Board(fd, index=0, count=2, yielding=True, timeout_s=0.05).wait()
        assert Board(fd, index=0, count=1, yielding=False, timeout_s=1).maximum(2.5) == 2.5
        Board(fd, index=1, count=2, yielding=False, timeout_s=60).give_up()
        with pytest.raises(GivenUpError):
            Board(fd, index=0, count=2, yielding=True, timeout_s=60).wait()
    finally:
        os.close(fd)


@pytest.mark.parametrize("params_mb", [0.5, 1, 7.3])
def test_model_has_the_size_asked_for(params_mb):
    for dtype in model.DTYPES:
        shapes = model.model_shapes(params_mb, dtype)
        count = round(params_mb * 1e6 / model.element_bytes(dtype))
        assert sum(int(np.prod(shape)) for shape in shapes) == count
        assert min(int(np.prod(shape)) for shape in shapes) > 0


# --- Results -------------------------------------------------------------------------


def test_sums_must_be_conserved():
    shown = [{"local": [1.0, 2.0], "center": [3.0, 4.0]}, {"local": [5.0, 6.0]}]
    check_conserved(shown, shown, tolerance=1e-9)
    with pytest.raises(WrongResultError, match="2 workers at once do not conserve the sum"):
        check_conserved(shown, [shown[0], {"local": [5.0, 7.0]}], tolerance=1e-5)


def test_exchange_in_numpy_rounds_as_the_box_does():
    x, center = np.array([1.5, 0.1], np.float16), np.array([0.5, 0.3], np.float32)
    new_x, new_center = model.expected_move("elastic", 0.45, x, center, x)
    assert (new_x.dtype, new_center.dtype) == (np.float16, np.float32)
    moved = np.float32(0.45) * (x.astype(np.float32) - center)
    assert np.array_equal(new_center, center + moved)


def test_table_shows_ratios_spread_and_gaps():
    workload = WORKLOADS["exchange"]
    result = Result(workload, Case("exchange", 2, 100.0), pinned=True)
    result.samples = {
        "exchange": [9.0, 10.0, 11.0],
        "checked_exchange": [12.0, 12.0, 12.0],
        "limit": [5.0, 5.0, 5.0],
        "op_exchange": [18.0],
        "tf_allreduce": [10.0, 20.0, 30.0],
    }
    result.reasons = {"mpi_allreduce": "there is no mpicc here"}
    table = format_table(workload, [result])
    assert "2 ± 0.1, missed" in table
    assert "18 (1.50x)" in table
    assert "20 (2.00x)" in table
    assert "mpi_allreduce (100 MB float32 2 workers): there is no mpicc here" in table
    line = result.to_json()
    assert (line["exchange_ms"], line["exchange_iqr_ms"]) == (10.0, 1.0)
    assert line["exchange_to_limit"] == 2.0
    assert line["mpi_allreduce_ms"] is None
    assert line["noisy"] == ["tf_allreduce"]
    text = format_markdown([Section(workload, "tf-smb bench exchange", [result])], "make bench")
    assert "there is no mpicc here" in text


@pytest.mark.parametrize(
    ("values", "noisy"), [([], False), ([3.0], False), ([9, 10, 11], False), ([7, 10, 13], True)]
)
def test_noise_is_a_spread_above_15_percent(values, noisy):
    assert is_noisy(values) == noisy


# --- Yardsticks ----------------------------------------------------------------------


def test_native_loops_compute_what_they_say():
    a, b = np.array([1, 2, 3], np.float32), np.array([3, 2, 1], np.float32)
    _smb.move_loop(0.5, a, b)
    assert a.tolist() == [2, 2, 2] and b.tolist() == [2, 2, 2]
    _smb.add_loop(0.5, a, b)
    assert b.tolist() == [3, 3, 3]
    _smb.copy_loop(b.view(np.uint8), a.view(np.uint8))
    assert a.tolist() == [3, 3, 3]
    assert _smb.all_finite("float32", a.view(np.uint8))
    a[1] = np.nan
    assert not _smb.all_finite("float32", a.view(np.uint8))


def test_native_meetings_refuse_and_time_out():
    words = np.zeros(16, np.uint32)
    _smb.futex_barrier(words, 1, 1.0)
    with pytest.raises(TimeoutError):
        _smb.futex_barrier(words, 2, 0.01)
    with pytest.raises(TimeoutError):
        _smb.futex_answer(words, 0.01)
    with pytest.raises(ValueError, match="a meeting needs 12 bytes, got 4"):
        _smb.futex_answer(words[:1].copy(), 0.01)
    with pytest.raises(ValueError, match="the same size, got 16 and 1"):
        _smb.copy_loop(np.zeros(16, np.uint8), np.zeros(1, np.uint8))
