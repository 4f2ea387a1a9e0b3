"""tf-smb bench exchange: its lines, its refusals, and that it leaves nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tf_smb.bench import cli, mpi, workload
from tf_smb.bench.board import Board, create_board_fd
from tf_smb.bench.contestants import Case
from tf_smb.bench.exchange import RESULTS, Result
from tf_smb.bench.groups import GroupError, start_command
from tf_smb.bench.report import format_markdown, format_table

_QUICK = ["exchange", "--params-mb", "0.5", "--repeats", "1", "--skip-op"]


def test_prints_one_json_object_for_each_case(capfd):
    assert cli.main([*_QUICK, "--workers", "1,2", "--peers", "limit", "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["transport"], line["params_mb"], line["workers"]) for line in lines] == [
        ("shm", 0.5, 1),
        ("shm", 0.5, 2),
    ]
    for line in lines:
        assert line["exchange_ms"] > 0 and line["limit_ms"] > 0
        assert line["exchange_iqr_ms"] >= 0
        assert {f"{name}_ms" for name in RESULTS} <= set(line)
        assert line["op_exchange_ms"] is None and line["tf_allreduce_ms"] is None


def test_measures_delta_averaging_and_writes_markdown(capfd, tmp_path):
    report = tmp_path / "benchmarks.md"
    arguments = [*_QUICK, "--workers", "2", "--peers", "none", "--rule", "delta"]
    assert cli.main([*arguments, "--markdown", str(report)]) == 0
    assert "exchange ms" in capfd.readouterr().out
    text = report.read_text()
    assert "tf-smb bench exchange --params-mb 0.5" in text
    assert "cores" in text


@pytest.mark.slow
def test_measures_op_and_peers(capfd):
    arguments = ["exchange", "--params-mb", "0.5", "--repeats", "1", "--workers", "2", "--json"]
    assert cli.main(arguments) == 0
    (line,) = [json.loads(text) for text in capfd.readouterr().out.splitlines()]
    assert line["op_exchange_ms"] > 0 and line["op_update_ms"] > 0
    assert line["tf_allreduce_ms"] > 0
    if shutil.which("mpicc") and shutil.which("mpirun"):
        assert line["mpi_get_accumulate_ms"] > 0 and line["mpi_allreduce_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["elastic", "delta"])
def test_exchanges_larger_than_the_cache_equal_numpy(capfd, rule):
    arguments = ["exchange", "--params-mb", "10", "--workers", "1,2", "--rule", rule]
    assert cli.main([*arguments, "--peers", "none", "--repeats", "1", "--json"]) == 0
    for text in capfd.readouterr().out.splitlines():
        assert json.loads(text)["op_exchange_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "exchange"),
        (["exchange", "--transport", "pigeon"], "pigeon"),
        (["exchange", "--params-mb", "0"], "from 0.5 to 100000"),
        (["exchange", "--workers", "2.5"], "whole numbers from 1 to 64"),
        (["exchange", "--peers", "limit,nobody"], "limit, mpi, tf"),
        (["exchange", "--repeats", "1,2"], "one number"),
        (["exchange", "--markdown", "/nowhere/at/all.md"], "no folder"),
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
    assert "did not answer in time" in str(error.value)


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
    finally:
        os.close(fd)


@pytest.mark.parametrize("params_mb", [0.5, 1, 7.3])
def test_model_has_the_size_asked_for(params_mb):
    shapes = workload.model_shapes(params_mb)
    assert sum(int(np.prod(shape)) for shape in shapes) == round(params_mb * 250_000)
    assert min(int(np.prod(shape)) for shape in shapes) > 0


def test_table_shows_ratios_and_gaps():
    result = Result(Case(100, 2, "elastic"), pinned=True)
    result.samples = {"exchange": [9.0, 10.0, 11.0], "limit": [5.0]}
    result.reasons = {"mpi_allreduce": "there is no mpicc here"}
    assert "5.00 (0.50x)" in format_table([result])
    assert result.to_json()["exchange_ms"] == 10.0
    assert result.to_json()["exchange_iqr_ms"] == 1.0
    assert result.to_json()["mpi_allreduce_ms"] is None
    assert "there is no mpicc here" in format_markdown([result], "tf-smb bench exchange")
