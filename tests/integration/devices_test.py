"""Each way to train that Keras has, with two workers, on one and on two devices of each."""

from __future__ import annotations

import sys

import pytest
from support import SCRIPTS, launch, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# 160 samples on 2 workers in batches of 16, 2 epochs.
BATCHES = 10
PERIOD = 2
# Steps that applied an update; None: fewer than batches, and how many depends on overflows.
CELLS = {
    "plain": BATCHES,
    "steps_per_execution_3": BATCHES,
    "steps_per_execution_8": BATCHES,
    "accumulation": BATCHES // 2,
    "accumulation_3": BATCHES // 2,
    "ema": BATCHES,
    "ema_8": BATCHES,
    "eagerly": BATCHES,
    "eagerly_accumulation_3": BATCHES // 2,
    "mixed_float16": BATCHES,
    "overflow": None,
    "batch_normalization": BATCHES,
    "batch_normalization_3": BATCHES // 2,
    "two_optimizers": BATCHES,
    "jit_compile": BATCHES,
}
REFUSED = {
    (1, "jit_compile_alone"): "add callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()] to fit",
    (2, "jit_compile"): "start a worker for each device [SMB-E406]",
    (2, "jit_compile_alone"): "start a worker for each device [SMB-E406]",
}


@pytest.fixture(scope="module")
def trained():
    """What each worker has of each cell, by number of devices: each number one run."""
    runs: dict[int, list[dict]] = {}

    def get(num_devices: int, cell: str) -> list[dict]:
        if num_devices not in runs:
            done = launch(2, "devices.py", str(num_devices), timeout_s=500)
            assert done.code == 0, done.output
            runs[num_devices] = [result["cells"] for result in done.results]
        assert len(runs[num_devices]) == 2
        return [cells[cell] for cells in runs[num_devices]]

    return get


def mirrored(outcomes: list[dict]) -> bool:
    """Whether all devices of all workers came to one center."""
    return len({outcome["digest"] for outcome in outcomes}) == 1 and all(
        outcome["spread_at_end"] == 0 for outcome in outcomes
    )


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_trains(trained, num_devices, cell):
    if (num_devices, cell) in REFUSED:
        pytest.skip("refused: see test_refuses")
    outcomes = trained(num_devices, cell)
    assert mirrored(outcomes), outcomes
    assert outcomes[0]["center"] == outcomes[1]["center"]
    for outcome in outcomes:
        assert outcome["spread"] == 0
        assert outcome["center_is_held"]
        assert outcome["batches"] == BATCHES
        assert outcome["replicas"] == num_devices
        assert outcome["finite"]
        steps = CELLS[cell]
        if steps is None:
            assert 0 < outcome["steps"] < BATCHES
        else:
            assert outcome["steps"] == steps
            assert outcome["exchanges"] >= steps // PERIOD


@pytest.mark.parametrize(("num_devices", "cell"), REFUSED)
def test_refuses(trained, num_devices, cell):
    for outcome in trained(num_devices, cell):
        assert REFUSED[num_devices, cell] in outcome["refused"]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_workers_that_do_not_exchange_are_told_apart(num_devices):
    done = launch(2, "devices.py", str(num_devices), "plain", "accumulation", TF_SMB_EXCHANGE="off")
    assert done.code == 0, done.output
    for cell in ("plain", "accumulation"):
        outcomes = [result["cells"][cell] for result in done.results]
        assert not mirrored(outcomes)
        for outcome in outcomes:  # the devices of one worker train in step all the same
            assert outcome["spread"] == 0
            assert outcome["exchanges"] == 0


def test_two_devices_train_as_one_does():
    done = run(sys.executable, str(SCRIPTS / "one_and_two_devices.py"), timeout_s=400)
    assert done.code == 0, done.output
    [result] = done.results
    assert max(result["differences"].values()) < 1e-5, result["differences"]
    assert result["ragged_finite"]
    assert result["ragged_batches"] == 6


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("devices='/cpu:0'", "devices must be a list such as ['/gpu:0', '/gpu:1'], got '/cpu:0'"),
        ("devices=[]", "devices must be a list such as"),
        ("devices=['/cpu:7']", "there is no device '/cpu:7' here: devices may name '/cpu:0'"),
        ("devices=[3]", "there is no device 3 here"),
        ("devices=['/cpu:0', 'cpu:0']", "devices names '/cpu:0' more than once"),
    ],
)
def test_wrong_devices(code, sentence):
    done = run(sys.executable, "-c", f"import tf_smb; tf_smb.SMBStrategy({code})")
    assert done.code == 1
    assert sentence in done.output.splitlines()[-1]
    assert "Traceback" not in done.output


def test_custom_loop_on_two_devices_is_refused():
    done = run(
        sys.executable,
        "-c",
        "import tensorflow as tf, keras, tf_smb\n"
        "[cpu] = tf.config.list_physical_devices('CPU')\n"
        "tf.config.set_logical_device_configuration(\n"
        "    cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
        "s = tf_smb.SMBStrategy(devices=['/cpu:0', '/cpu:1'])\n"
        "with s.scope():\n"
        "    m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "s.start(m)",
    )
    assert done.code == 1
    assert "a custom loop trains on one device, and this worker has 2" in done.output
    assert done.output.rstrip().endswith("[SMB-E407]")
