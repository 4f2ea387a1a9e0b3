"""SMBStrategy in real worker processes, as users start it."""

from __future__ import annotations

import math
import re
import sys

import pytest
from support import EXAMPLES, digits_file, launch, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return digits_file(tmp_path_factory.mktemp("digits"))


def test_center_knows_what_each_worker_saw(digits):
    done = launch(2, "skewed.py", str(digits))
    assert done.code == 0, done.output
    first, second = done.results
    assert first["accuracy"] >= 0.90
    assert first["digest"] == second["digest"]
    assert first["exchanges"] > 10


def test_without_exchange_each_worker_knows_its_own_digits_only(digits):
    done = launch(2, "skewed.py", str(digits), TF_SMB_EXCHANGE="off")
    assert done.code == 0, done.output
    for result in done.results:
        assert result["accuracy"] <= 0.55
        assert result["exchanges"] == 0
    assert done.results[0]["digest"] != done.results[1]["digest"]


def test_three_speeds_end_at_one_center_and_start_anew_each_time(tmp_path):
    runs = [launch(4, "speeds.py", str(tmp_path / f"export{i}")) for i in range(2)]
    for i, done in enumerate(runs):
        assert done.code == 0, done.output
        results = done.results
        assert [result["worker"] for result in results] == [0, 1, 2, 3]
        assert len({result["digest"] for result in results}) == 1
        assert len({result["start"] for result in results}) == 1
        assert all(result["epochs"] == 3 for result in results)
        assert results[0]["exported"] < 1e-6
        assert (tmp_path / f"export{i}.keras").exists()
        # No temporary file is left beside what was written.
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
        assert (
            "4 workers: each trains on 128 of 512 samples per epoch, batch 8 (32 in total), "
            "16 steps" in done.output
        )
    assert runs[0].results[0]["start"] == runs[1].results[0]["start"]


def test_fit_in_many_ways():
    done = launch(2, "fit_matrix.py")
    assert done.code == 0, done.output
    first, second = (result["outcomes"] for result in done.results)
    assert first.keys() == second.keys()
    for name in first:
        assert first[name]["digest"] == second[name]["digest"], name
    for outcomes in (first, second):
        for name in (
            "numpy",
            "steps_per_execution",
            "eager",
            "jit_compile",
            "unbuilt",
            "subclassed",
        ):
            assert outcomes[name]["steps"] == 32, name  # 256 of 512 samples, batch 16, 2 epochs
            assert outcomes[name]["exchanges"] >= 32 // 3, name
            assert outcomes[name]["epochs"] == 2, name
            assert math.isfinite(outcomes[name]["loss"]), name
        assert outcomes["tf_data"]["steps"] == 32
        assert outcomes["validation_split"]["steps"] == 24  # 192 of 384 samples
        assert outcomes["generator"]["steps"] == 32  # all of it, on every worker
        assert outcomes["second_fit"]["steps"] == 64
        assert outcomes["changed_between_fits"]["all_quarter"]
        assert outcomes["custom_loop"]["steps"] == 32
        assert outcomes["center_weights"]["back"]
    assert done.output.count("a generator cannot be divided") == 1


def test_worker_that_stops_early_leaves_alone(tmp_path):
    done = launch(3, "early.py", str(tmp_path))
    assert done.code == 0, done.output
    by_worker = {result["worker"]: result for result in done.results}
    assert by_worker[1]["epochs"] == 1
    assert by_worker[0]["epochs"] == by_worker[2]["epochs"] == 4
    assert by_worker[0]["digest"] == by_worker[2]["digest"]
    assert by_worker[0]["chief"] and not by_worker[1]["chief"] and not by_worker[2]["chief"]
    assert "worker 1 stopped early, at step 4, and left" in done.output
    assert "CSVLogger, ModelCheckpoint left to the chief" in done.output
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 1 + 4
    assert (tmp_path / "checkpoint.keras").exists()
    assert (tmp_path / "export" / "saved_model.pb").exists()


@pytest.mark.parametrize("example", ["digits.py", "custom_loop.py"])
def test_keras_examples(example, digits, tmp_path):
    export = ["--export", str(tmp_path / "export")] if example == "digits.py" else []
    done = launch(2, EXAMPLES / example, "--data", str(digits), "--epochs", "1", *export)
    assert done.code == 0, done.output
    lines = [line for line in done.output.splitlines() if "center test accuracy: " in line]
    accuracies = [float(line.split("center test accuracy: ")[1].split()[0]) for line in lines]
    assert len(accuracies) == 2
    assert accuracies[0] == accuracies[1] >= 0.90
    if export:
        assert (tmp_path / "export" / "saved_model.pb").exists()


def test_numpy_example_alone_and_launched():
    alone = run(sys.executable, str(EXAMPLES / "numpy_box.py"))
    launched = launch(3, EXAMPLES / "numpy_box.py")
    for done, workers in ((alone, 2), (launched, 3)):
        assert done.code == 0, done.output
        lines = re.findall(r"y = (\S+) x \+ (\S+),", done.output)
        assert len(lines) == workers
        assert len(set(lines)) == 1  # all workers hold the same center
        slope, offset = (float(number) for number in lines[0])
        # Each worker alone sees a stretch of length 1: together they find the line.
        assert abs(slope - 3) < 0.2 and abs(offset + 1) < 0.3


def test_killed_worker_is_dropped_and_the_rest_end_together():
    done = launch(3, "killed.py")
    assert done.code == 128 + 9, done.output
    assert [result["worker"] for result in done.results] == [0, 1]
    assert {result["epochs"] for result in done.results} == {3}
    assert len({result["digest"] for result in done.results}) == 1
    assert all(result["states"][2] == "dead" for result in done.results)
