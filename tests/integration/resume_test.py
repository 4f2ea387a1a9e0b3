"""BackupAndRestore: everything is killed, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import SCRIPTS, environment, launch, run

from tf_smb.strategies.backup_files import BackupFolder
from tf_smb.strategies.job_state import JobState

pytestmark = pytest.mark.slow

SAMPLES, EPOCHS = 603, 6


@dataclass
class Life:
    """One start of the job: what its workers noted, and the state that is gone on from."""

    notes: Path
    output: str
    state: JobState | None = None  # None: it came to its end

    def trained(self, epoch: int) -> list[int]:
        """The samples of an epoch that the center has of this life, as its positions say."""
        found = []
        for path in self.notes.glob("*.jsonl"):
            batches = [json.loads(line) for line in path.read_text().splitlines()]
            mine = [samples for noted, samples in batches if noted == epoch]
            if self.state is not None:
                position = self.state.positions[int(path.stem)]
                if position.epoch == epoch:
                    mine = mine[: position.batch]
                elif position.epoch < epoch:
                    mine = []
            found += [sample for samples in mine for sample in samples]
        return found


def start_and_kill(num_workers: int, folder: Path, notes: Path, enough) -> Life:
    """Starts the job, and kills all of it once a backup satisfies `enough`."""
    notes.mkdir()
    log = notes / "output"
    command = [sys.executable, "-m", "tf_smb.cli", "run", "-n", str(num_workers), "--output", "all"]
    with log.open("w") as output:
        launcher = subprocess.Popen(
            [*command, "--", sys.executable, str(SCRIPTS / "resumed.py"), folder, notes, "0.04"],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 200
        try:
            while not enough(newest(folder)):
                assert launcher.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        finally:
            pids = [int(path.read_text()) for path in notes.glob("*.pid")]
            for pid in [launcher.pid, *pids]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            launcher.wait()
    return Life(notes, log.read_text(), newest(folder))


def newest(folder: Path) -> JobState | None:
    backup = BackupFolder(str(folder)).newest(lambda line: None)
    return None if backup is None else JobState.from_json(backup.state)


def in_epoch(epoch: int, workers: int):
    """Whether a backup is of this job, and all its workers have come to an epoch."""

    def enough(state: JobState | None) -> bool:
        return (
            state is not None
            and state.num_workers == workers
            and state.first_epoch() >= epoch
            and max(position.batch for position in state.positions) >= 4
        )

    return enough


def resumed_line(folder: Path, state: JobState, workers: int) -> str:
    was = "" if state.num_workers == workers else f" (was {state.num_workers})"
    return (
        f"tf_smb: resumed from {folder}: epoch {state.first_epoch() + 1}, step {state.steps:,}, "
        f"phase {state.phase + 1} of 3, {workers} workers{was}"
    )


def test_killed_twice_and_with_other_workers_every_sample_is_trained_once(tmp_path):
    folder = tmp_path / "backup"
    first = start_and_kill(4, folder, tmp_path / "a", in_epoch(1, 4))
    assert first.state.phase == 1 and first.state.steps >= 31
    later = first.state.first_epoch() + 1
    second = start_and_kill(3, folder, tmp_path / "b", in_epoch(later, 3))
    assert resumed_line(folder, first.state, 3) in second.output
    assert len(second.state.deals) == 1
    # The newest is torn: the one before counts.
    torn = BackupFolder(str(folder)).numbers()[0]
    path = folder / f"backup-{torn:06}" / "arrays.npz"
    path.write_bytes(path.read_bytes()[:-100])
    second.state = newest(folder)
    notes = tmp_path / "c"
    notes.mkdir()
    done = launch(3, "resumed.py", str(folder), str(notes), "0")
    assert done.code == 0, done.output
    third = Life(notes, done.output)
    assert f"tf_smb: backup {path.parent} cannot be read (" in done.output
    assert resumed_line(folder, second.state, 3) in done.output
    for epoch in range(EPOCHS):
        trained = first.trained(epoch) + second.trained(epoch) + third.trained(epoch)
        seen = Counter(trained)
        assert sorted(seen) == list(range(SAMPLES)), epoch
        assert set(seen.values()) == {1}, epoch
    assert not third.trained(0) and not second.trained(0)
    results = done.results
    assert len(results) == 3 and len({result["digest"] for result in results}) == 1
    assert all(result["steps"] > second.state.steps for result in results)
    # The chief's optimizer went on from its own count, on all workers.
    assert all(result["iterations"] > 60 for result in results)
    assert not folder.exists()


def test_cases_of_one_worker(tmp_path):
    done = run(sys.executable, str(SCRIPTS / "resume_cases.py"), str(tmp_path))
    assert done.code == 0, done.output
    (outcomes,) = [result["outcomes"] for result in done.results]
    for name in ("arrays", "weighted", "py_dataset", "tf_data", "unbuilt"):
        outcome = outcomes[name]
        assert sorted(outcome["before"] + outcome["after"]) == sorted(outcome["all"]), name
        assert outcome["next"] == sorted(outcome["all"]), name
        assert outcome["removed"] == (name != "unbuilt"), name  # delete_checkpoint=False
        assert outcome["iterations"] == outcome["steps"] == outcome["saved_steps"], name
        batches = -(-len(outcome["all"]) // 4)  # of an epoch: no step was counted without data
        assert outcome["iterations_at_end"] == 3 * batches, name
    weighted = outcomes["weighted"]
    assert weighted["before"] + weighted["after"] == list(range(48))  # not shuffled
    assert outcomes["arrays"]["warnings"] == 0
    for name in ("generator", "steps_per_epoch", "changed_data"):
        assert outcomes[name]["after"] == outcomes[name]["all"], name
        assert f"tf_smb: the interrupted epoch begins anew: {outcomes[name]['why']}" in done.output
    assert outcomes["other_layout"].endswith("remove the folder to begin anew [SMB-E443]")
    difference = "of its weights, number 0 is kernel (8, 16) float32 there, and kernel (8, 17)"
    assert difference in outcomes["other_layout"]
    assert "of its optimizer" in outcomes["other_optimizer"]
    assert outcomes["restored"]
