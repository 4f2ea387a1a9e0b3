"""`tf-smb run --compare`: the arithmetic on made records, and the command with a made trainer."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tf_smb import compare


def write(folder: Path, worker: int, records: list[dict], rest: str = "") -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"worker": worker, **record}) + "\n" for record in records)
    (folder / f"worker-{worker}.jsonl").write_text(lines + rest)


def training(
    begin_s: float, rate: float, samples: float, losses=lambda share: 1 - 0.9 * share, first_s=5.0
) -> list[dict]:
    """Returns records of a fit whose first batch takes `first_s`, then `rate` samples/s."""
    records: list[dict] = [{"event": "begin", "time": begin_s, "samples": 0, "step": 0}]
    count = 0.0
    while count < samples:
        count = min(samples, count + rate * 0.2)
        time_s = begin_s + first_s + (count - rate * 0.2) / rate
        loss = losses(count / samples)
        records.append({"event": "batch", "time": time_s, "samples": count, "loss": loss})
    records.append({"event": "end", "time": records[-1]["time"], "samples": count})
    return records


@pytest.fixture
def both(tmp_path: Path):
    """A plain run, and two workers that are as fast each and learn as much from a sample."""
    write(tmp_path / "plain", 0, training(1000.0, 500, 10_000))
    for worker in range(2):
        write(tmp_path / "two", worker, training(5000.0 + worker * 0.1, 500, 5000))
    return [compare.read_report(tmp_path / name) for name in ("plain", "two")]


def test_twice_as_fast_is_seen_as_twice_as_fast(both):
    result = compare.compare_runs(2, *both, 30.0, 20.0)
    assert result.plain.samples_per_s == pytest.approx(500)
    assert result.tf_smb.samples_per_s == pytest.approx(1000)
    assert result.samples_per_s_ratio == pytest.approx(2)
    # Both pay 5 s before the first record: (5 + 10) / (5 + 20).
    assert result.time_to_loss_ratio == pytest.approx(0.6, abs=0.02)
    low, high = result.time_to_loss_ratio_range
    assert 0.55 < low <= result.time_to_loss_ratio <= high < 0.75
    assert result.target_loss == pytest.approx(0.12, abs=0.01)
    assert result.plain.wall_s == 30 and result.tf_smb.wall_s == 20
    assert result.warnings == []


def test_first_batch_and_pauses_between_fits_do_not_count(tmp_path: Path):
    records = training(0.0, 100, 1000, first_s=60.0) + training(1000.0, 100, 1000, first_s=60.0)
    write(tmp_path, 0, records)
    (worker,) = compare.read_report(tmp_path)
    assert worker.samples_per_s == pytest.approx(100)
    assert sum(batch.samples for batch in worker.batches) == 2000  # the count began again


def test_the_target_is_what_both_reach(tmp_path: Path):
    write(tmp_path / "good", 0, training(0.0, 500, 10_000))
    write(tmp_path / "bad", 0, training(0.0, 500, 10_000, lambda share: 1 - 0.5 * share))
    good, bad = (compare.read_report(tmp_path / name) for name in ("good", "bad"))
    result = compare.compare_runs(1, good, bad, 30.0, 30.0)
    assert result.target_loss == result.tf_smb.lowest_loss == result.tf_smb.final_loss
    assert result.plain.time_to_loss_s < result.tf_smb.time_to_loss_s
    assert compare.compare_runs(1, bad, good, 30.0, 30.0).target_loss == result.target_loss


def test_noise_does_not_decide(tmp_path: Path):
    noisy = [0.0]

    def losses(share: float) -> float:
        noisy[0] = (noisy[0] * 1103515245 + 12345) % 2**31
        return 1 - 0.9 * share + 0.2 * (noisy[0] / 2**31 - 0.5)

    write(tmp_path / "plain", 0, training(0.0, 500, 20_000, losses))
    for worker in range(2):
        write(tmp_path / "two", worker, training(0.0, 500, 10_000, losses))
    plain, two = (compare.read_report(tmp_path / name) for name in ("plain", "two"))
    result = compare.compare_runs(2, plain, two, 50.0, 30.0)
    assert result.time_to_loss_ratio == pytest.approx((5 + 20) / (5 + 40), abs=0.05)


def test_the_curve_is_the_mean_over_workers():
    batches = [[compare.Batch(float(t), 10, loss, None) for t in range(10)] for loss in (1.0, 3.0)]
    curve = compare.smooth([compare.WorkerRecords(0.0, one) for one in batches], 40)
    assert curve.losses == pytest.approx([2.0] * len(curve.losses), abs=0.5)
    assert curve.losses[-1] == 2.0
    assert curve.seconds[0] == 1.0  # once the window is full
    assert curve.time_to(1.0) == math.inf


def test_damaged_and_foreign_lines_are_left_out(tmp_path: Path):
    write(tmp_path, 0, training(0.0, 100, 1000), rest='[1]\nnull\n{"time": "x"}\n{"event": "ba')
    write(tmp_path, 1, [{"event": "batch", "time": 3.0, "samples": 5, "loss": None}])
    write(tmp_path, 2, [])
    first, second = compare.read_report(tmp_path)
    assert len(first.batches) == 50
    assert math.isnan(second.samples_per_s) and math.isnan(second.batches[0].loss)


def test_steps_are_counted_where_samples_are_not_known(tmp_path: Path):
    records = [
        {**record, "step": record["samples"] / 10, "samples": None}
        for record in training(0.0, 100, 1000)
    ]
    write(tmp_path, 0, records)
    workers = compare.read_report(tmp_path)
    assert workers[0].samples_per_s == pytest.approx(10)
    assert any(
        "steps were counted" in w for w in compare.compare_runs(1, workers, workers, 1, 1).warnings
    )


def test_short_runs_and_missing_workers_are_warned_about(tmp_path: Path):
    write(tmp_path, 0, training(0.0, 100, 100, first_s=0.1))
    workers = compare.read_report(tmp_path)
    result = compare.compare_runs(3, workers, workers, 1.0, 1.0)
    text = compare.format_comparison(result)
    assert "Careful: only 1 of 3 workers left records" in text
    assert "Careful: the plain run was too short to tell much: 5 records in 0.9 s" in text


def test_without_losses_only_speed_is_compared(tmp_path: Path):
    write(tmp_path, 0, training(0.0, 100, 2000, lambda share: math.nan))
    workers = compare.read_report(tmp_path)
    result = compare.compare_runs(1, workers, workers, 30.0, 30.0)
    assert result.samples_per_s_ratio == 1
    assert result.target_loss is None and result.time_to_loss_ratio is None
    assert "cannot be told" in compare.format_comparison(result)
    assert json.loads(json.dumps(result.__dict__, default=vars))["target_loss"] is None


# --- The command ---

# Sleeps as a trainer on one core would, and reports as fit does.
TRAINER = """
import json, os, pathlib, time
plain = os.environ.get("TF_SMB_PLAIN") == "1"
assert plain == ("TF_SMB_SERVER" not in os.environ)
worker = int(os.environ.get("TF_SMB_WORKER_INDEX", 0))
samples = 4000 // int(os.environ.get("TF_SMB_NUM_WORKERS", 1))
print("cores:", len(os.sched_getaffinity(0)))
with open(pathlib.Path(os.environ["TF_SMB_REPORT"], f"worker-{worker}.jsonl"), "a") as file:
    def report(event, done, loss=None):
        record = {"event": event, "time": time.time(), "worker": worker, "step": done // 10,
                  "samples": done, "loss": loss}
        print(json.dumps(record), file=file, flush=True)
    report("begin", 0)
    for done in range(100, samples + 1, 100):
        time.sleep(0.1)
        report("batch", done, 1 - done / samples)
    report("end", samples)
"""


def tf_smb_compare(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess:
    (folder / "train.py").write_text(script)
    return subprocess.run(
        [
            *(sys.executable, "-m", "tf_smb.cli", "run", "--compare", "-n", "2", *options),
            *("--", sys.executable, str(folder / "train.py")),
        ],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_compare_runs_both_and_prints_one_object(tmp_path: Path):
    result = tf_smb_compare(tmp_path, TRAINER, "--json", "--cores-per-worker", "1")
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["workers"] == 2 and seen["tf_smb"]["workers"] == 2
    assert seen["plain"]["workers"] == 1 and seen["plain"]["records"] == 40
    assert 1.5 < seen["samples_per_s_ratio"] < 2.5
    assert 0.3 < seen["time_to_loss_ratio"] < 0.75
    assert result.stderr.count("cores: 1\n") == 2  # plain, worker 0
    assert "one plain process on 1 core" in result.stderr
    assert not list(tmp_path.glob("tf_smb-report-*"))


def test_compare_prints_a_table_for_people(tmp_path: Path):
    fast = TRAINER.replace("0.1)", "0.01)")
    result = tf_smb_compare(tmp_path, fast)
    assert result.returncode == 0, result.stderr
    for words in ("samples per second", "seconds to loss", "final loss", "with imports"):
        assert words in result.stdout
    assert "too short to tell" in result.stdout
    assert "differences of a few percent mean nothing" in result.stdout


def test_compare_needs_records(tmp_path: Path):
    result = tf_smb_compare(tmp_path, "print('hi')")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "tf-smb run: nothing to compare: the plain run left no records; the script must call fit "
        "on a model made under SMBStrategy.scope() [SMB-E330]"
    )


def test_compare_ends_with_the_first_run_that_fails(tmp_path: Path):
    result = tf_smb_compare(tmp_path, "import sys; print('once'); sys.exit(3)")
    assert result.returncode == 3
    assert result.stdout == "once\n"
    assert "nothing to compare: the plain run ended with code 3" in result.stderr
