"""The callbacks of tf_smb in real worker processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import SCRIPTS, environment, launch, run

pytestmark = pytest.mark.slow

EXCHANGE_LOGS = {"exchanges", "waiting_s", "distance_to_center", "staleness", "samples"}
CENTER_LOGS = {"center_val_loss", "center_val_mae", "center_val_epoch"}


@pytest.fixture(scope="module")
def center(tmp_path_factory):
    """Fits of two workers with all callbacks, in several orders."""
    folder = tmp_path_factory.mktemp("center")
    done = launch(2, "center_callbacks.py", str(folder))
    assert done.code == 0, done.output
    return folder, [result["outcomes"] for result in done.results]


ORDERS = ["as_written", "reversed", "mixed"]


@pytest.mark.parametrize("order", ORDERS)
def test_logs_have_the_newest_values_whatever_the_order(center, order):
    folder, outcomes = center
    chief, other = (outcome[order]["history"] for outcome in outcomes)
    for history in (chief, other):
        assert history.keys() == {"loss", "mae"} | CENTER_LOGS | EXCHANGE_LOGS
        assert {len(values) for values in history.values()} == {4}
    assert chief["center_val_epoch"] == [0, 1, 2, 3]
    by_epoch = dict(zip(chief["center_val_epoch"], chief["center_val_loss"], strict=True))
    # What the other one has is, to the last bit, what the chief found; of its own epochs it can
    # have evaluated some itself, after the chief was through.
    pairs = zip(other["center_val_epoch"], other["center_val_loss"], strict=True)
    for own_epoch, (epoch, loss) in enumerate(pairs):
        assert loss == by_epoch[epoch] or epoch == own_epoch
    assert chief["center_val_loss"][-1] < chief["center_val_loss"][0]
    assert CENTER_LOGS | EXCHANGE_LOGS < set(outcomes[0][order]["columns"])
    assert [outcome[order]["num_rows"] for outcome in outcomes][0] == 4


@pytest.mark.parametrize("order", ORDERS)
def test_evaluation_leaves_the_training_model_as_it_was(center, order):
    _, outcomes = center
    for outcome in outcomes:
        assert outcome[order]["changed"] == []
        assert outcome[order]["steps"] == 4 * 16 + 6  # 256 of 512 samples, and in lockstep
        assert outcome[order]["traces"] == 1
    assert outcomes[0][order]["digest"] == outcomes[1][order]["digest"]


@pytest.mark.parametrize("order", ORDERS)
def test_period_changes_by_epoch(center, order):
    _, outcomes = center
    for outcome in outcomes:
        assert outcome[order]["periods"] == [4, 2, 8, 8]
        history = outcome[order]["history"]
        # Every 4 steps, then every 2, then every 8.
        assert history["exchanges"] == [4, 12, 14, 16]
        assert history["samples"] == [256, 512, 768, 1024]
        assert all(distance >= 0 for distance in history["distance_to_center"])


def test_early_stopping_on_the_center_counts_evaluations(center):
    _, (chief, other) = center
    # min_delta makes every evaluation no improvement: the third one stops.
    assert chief["stops"]["stopped"] == 2
    assert other["stops"]["stopped"] >= 2
    # By the values: the chief's evaluation and its own can be of the same epoch.
    assert len(set(other["stops"]["history"]["center_val_loss"])) == 3


def test_checkpoints_are_the_newest_and_whole(center):
    folder, _ = center
    for order in ORDERS:
        names = {path.name for path in (folder / order).iterdir()}
        assert names == {"3-48.weights.h5", "4-64.weights.h5", "best.keras", "logs"}
        assert {path.name for path in (folder / order / "logs").iterdir()} == {
            "worker-0",
            "worker-1",
        }


def test_tensorboard_gets_scalars_by_steps(center):
    import tensorflow as tf

    folder, outcomes = center
    (file,) = (folder / "as_written" / "logs" / "worker-1").iterdir()
    found: dict[str, list[tuple[int, float]]] = {}
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            assert value.metadata.plugin_data.plugin_name == "scalars" or value.tag in found
            number = float(tf.make_ndarray(value.tensor))
            found.setdefault(value.tag, []).append((event.step, number))
    assert found.keys() == {f"tf_smb/{name}" for name in EXCHANGE_LOGS}
    assert found["tf_smb/exchanges"] == [(16, 4), (32, 12), (48, 14), (64, 16)]


def test_chief_that_is_killed_before_it_evaluated_is_replaced():
    done = launch(3, "evaluator_killed.py")
    assert done.code == 128 + 9, done.output
    first, second = done.results
    assert [first["worker"], second["worker"]] == [1, 2]
    assert first["history"]["center_val_epoch"] == [0, 1, 2]
    for epoch, loss in zip(
        second["history"]["center_val_epoch"], second["history"]["center_val_loss"], strict=True
    ):
        assert loss == first["history"]["center_val_loss"][int(epoch)]
    assert first["digest"] == second["digest"]
    assert "waiting for worker 0 (step " in done.output
    assert ") to evaluate the center since 3 s" in done.output


def test_nobody_waits_for_ever_where_all_meet_in_rounds(tmp_path):
    done = launch(3, "rounds_callbacks.py", TF_SMB_RUN_INFO=str(tmp_path / "info"))
    assert done.code == 0, done.output
    assert "going on without" not in done.output
    results = done.results
    assert len({result["digest"] for result in results}) == 1
    for result in results:
        # The second phase begins when the first worker comes to epoch 2, which is not the chief.
        phases = result["phases"]
        assert phases == sorted(phases) and phases[0] == 0 and set(phases[2:]) == {1}
        # `every=2`: after the chief's first epoch, its third, and so on until all are through.
        evaluated = result["history"]["center_val_epoch"]
        assert evaluated[0] == 0 and all(epoch % 2 == 0 for epoch in evaluated)
        steps = result["info"]["training"]["steps"] - result["info"]["training"]["settling_steps"]
        assert steps >= (20 if result["worker"] == 0 else 16)
    written = {path.name for path in (tmp_path / "info").iterdir()}
    assert written == {f"run_info-{worker}.json" for worker in range(3)}
    for result in results:
        path = tmp_path / "info" / f"run_info-{result['worker']}.json"
        _check_info(json.loads(path.read_text()), result["worker"])


def _check_info(info: dict, worker: int) -> None:
    """The keys and kinds that docs/callbacks.md promises."""
    assert info["format"] == 1
    assert set(info["versions"]) == {"tf_smb", "tensorflow", "keras", "numpy", "python"}
    assert all(isinstance(version, str) for version in info["versions"].values())
    machine = info["machine"]
    assert set(machine) == {"platform", "processor", "cores", "cores_of_this_process", "devices"}
    assert machine["devices"] and 1 <= machine["cores_of_this_process"] <= machine["cores"]
    assert set(info["job"]) == {"job_id", "num_workers", "worker_index", "command"}
    assert (info["job"]["num_workers"], info["job"]["worker_index"]) == (3, worker)
    assert info["model"] == {
        "name": "sequential",
        "parameters": 161,
        "dtype_policy": "float32",
        "xla": False,
        "steps_per_execution": 1,
    }
    assert info["schedule"]["unit"] == "epoch"
    assert [phase["begin"] for phase in info["schedule"]["phases"]] == [0, 2]
    training = info["training"]
    assert training["global_seed"] == 4
    assert training["batches"] == training["steps"]
    assert training["epochs"] >= 4 and training["seconds"] > 0
    own_steps = training["steps"] - training["settling_steps"]
    assert 16 * own_steps >= training["samples"] >= 4 * 64
    exchanges = info["exchanges"]
    counts = {"exchanges", "rounds", "skipped", "moved_bytes", "changes_forgotten"}
    assert set(exchanges) == counts | {
        "exchange_s",
        "waiting_s",
        "staleness_histogram",
        "over_time",
    }
    assert all(isinstance(exchanges[key], int) for key in counts)
    assert 10 <= exchanges["rounds"] < exchanges["exchanges"]
    assert 0 < exchanges["waiting_s"] <= exchanges["exchange_s"]
    assert sum(exchanges["staleness_histogram"]) == exchanges["exchanges"] - exchanges["rounds"]
    for change in exchanges["over_time"]:
        assert set(change) == {"steps", "phase", "period", "rate", "num_live"}
    assert {change["phase"] for change in exchanges["over_time"]} == {0, 1}


def test_workers_of_three_speeds_end_together():
    done = launch(3, "alignment.py")
    assert done.code == 0, done.output
    outcomes = [result["outcomes"] for result in done.results]

    def steps(name: str) -> list[int]:
        return [outcome[name]["steps"] for outcome in outcomes]

    planned = 3 * 22  # 171 or 170 of 512 samples, batch 8
    for name in ("first", "mean", "all", "before", "again", "stopped"):
        assert len({outcome[name]["digest"] for outcome in outcomes}) == 1, name
        assert all(outcome[name]["states"] == ["live"] * 3 for outcome in outcomes), name
    first = steps("first")
    assert max(first) == planned and min(first) < planned
    # The workers that hear of the end make at most the step that they are in.
    mean = steps("mean")
    assert planned <= sum(mean) / 3 <= planned + 3
    assert max(mean) > planned > min(mean)
    everyone = steps("all")
    assert planned <= min(everyone) <= planned + 3
    assert max(everyone) > planned
    assert 20 <= sum(steps("before")) / 3 <= 23
    # Of the second fit only, whatever each worker made in the first.
    assert 30 <= sum(steps("again")) / 3 <= 33
    for outcome in outcomes:
        for name in ("first", "mean", "all"):
            epochs = outcome[name]["epochs"]
            assert epochs == list(range(len(epochs)))  # they count on
        assert len(outcome["stopped"]["epochs"]) < 50  # one worker's own stop stopped all
        # A generator is not gone through twice: who is through waits.
        assert outcome["once"]["steps"] == 32


@pytest.mark.parametrize("xla", ["", "jit"])
def test_checkpoint_is_the_center_and_plain_keras_reads_it(tmp_path, xla):
    folder = tmp_path / "files"
    folder.mkdir()
    done = run(sys.executable, str(SCRIPTS / "checkpoint_alone.py"), str(folder), *xla.split())
    assert done.code == 0, done.output
    assert f"1 worker, XLA {'on (jit_compile)' if xla else 'off'}" in done.output
    (result,) = done.results
    assert result["steps"] == 64
    assert result["info"]["model"]["xla"] == bool(xla)
    written = sorted(path.name for path in folder.glob("*.h5"))
    assert written == ["0049.weights.h5", "0056.weights.h5", "0063.weights.h5"]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    for name in written:
        _check_plain_keras_reads(folder / name)


def _check_plain_keras_reads(path: Path) -> None:
    """Loads a checkpoint in a process that cannot import tf_smb."""
    code = f"""
import sys
sys.modules["tf_smb"] = None
import keras, numpy
model = keras.Sequential([
    keras.layers.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)
])
model.load_weights({str(path)!r})
numpy.savez({str(path) + ".loaded.npz"!r}, *model.get_weights())
"""
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, timeout=120)
    with np.load(f"{path}.loaded.npz") as loaded, np.load(path.with_suffix(".npz")) as center:
        assert len(loaded.files) == len(center.files) == 4
        for name in loaded.files:
            np.testing.assert_array_equal(loaded[name], center[name])


def test_run_info_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    done = run(
        sys.executable,
        str(SCRIPTS / "checkpoint_alone.py"),
        str(tmp_path),
        TF_SMB_RUN_INFO=str(tmp_path / "file"),
    )
    assert done.code == 1
    assert "TF_SMB_RUN_INFO" in done.output and "[SMB-E432]" in done.output


def test_plain_side_of_a_comparison_works_with_the_callbacks(tmp_path):
    done = run(
        sys.executable, str(SCRIPTS / "center_callbacks.py"), str(tmp_path), TF_SMB_PLAIN="1"
    )
    assert done.code == 0, done.output
