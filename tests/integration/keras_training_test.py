"""Ways to train with Keras, each by two workers, on one and on two devices of each.

One run for a number of devices goes through all of them; a test looks at one. Gradient
accumulation and moving averages are in devices_test.py, what is mirrored in variables_test.py.
"""

from __future__ import annotations

import pytest
from keras_runs import Facts, Runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PERIOD = 3
ANY = None

# Epochs and steps of each of two workers. 128 samples in batches of 8: 8 steps in an epoch.
CASES: dict[str, tuple[int | None, int | None]] = {
    "arrays": (1, 8),
    "tf_data": (1, 8),
    "tf_data_of_strings": (1, 8),
    # All of it on every worker, but for batches that Keras takes from it to build the model.
    "generator": (1, ANY),
    "py_dataset": (1, 8),
    "dict_inputs": (1, 8),
    "nested_inputs": (1, 8),
    "ragged_last_batch": (1, 7),  # 101 samples: 51 and 50
    "last_batch_of_one_sample": (1, 7),  # 98 samples: 49 each
    "class_weight": (3, 24),
    "sample_weight": (1, 8),
    "validation_data": (1, 8),
    "validation_split": (1, 6),
    "several_fits": (2, 16),
    "initial_epoch": (2, 16),
    "clipnorm": (1, 8),
    "clipvalue": (1, 8),
    "global_clipnorm": (1, 8),
    "weight_decay": (1, 8),
    "learning_rate_schedule": (1, 8),
    "optimizer_slots": (1, 8),
    "loss_scale_skips_a_step": (1, ANY),
    "mixed_float16": (1, ANY),
    "mixed_bfloat16": (1, 8),
    "bfloat16": (1, 8),
    "run_eagerly": (1, 8),
    "steps_per_execution_3": (1, 8),
    "steps_per_execution_8": (1, 8),
    "jit_compile": (1, 8),
    "jit_compile_without_callback": (1, 8),
    "exchange_at_batch_end": (1, 8),
    "custom_loop": (1, 8),
    "custom_loop_two_optimizers": (1, 8),
    "train_step_overridden": (1, 8),
    "train_step_without_self_optimizer": (1, 8),
    "train_on_batch": (1, 8),
    "learning_rate_scheduler": (3, 24),
    "reduce_on_plateau": (3, 24),
    "early_stopping": (2, 16),
    "early_stopping_together": (ANY, ANY),
    "evaluate_and_predict": (1, 8),
    "metrics": (2, 16),
    "dropout_seeds": (1, 8),
    "save_and_load": (1, 8),
}
# Exchanges beside steps // PERIOD: the period begins anew at the end of a fit.
EXCHANGES = {"several_fits": 2 * (8 // PERIOD)}
# Cases in which each worker ends by itself, with the center of that moment.
APART = {"early_stopping"}
ONE_DEVICE = "or start a worker for each device"
REFUSED = {
    (1, "jit_compile_without_callback"): "callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()] to fit",
    (2, "jit_compile_without_callback"): f"compile with jit_compile=False, {ONE_DEVICE}",
    (2, "jit_compile"): f"compile with jit_compile=False, {ONE_DEVICE}",
    (2, "custom_loop"): ONE_DEVICE,
    (2, "custom_loop_two_optimizers"): ONE_DEVICE,
    (2, "train_on_batch"): ONE_DEVICE,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("keras_training.py", tmp_path_factory.mktemp("keras_training"))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_training(case: str, devices: int, runs: Runs) -> None:
    workers = runs.of(case, devices)
    if (devices, case) in REFUSED:
        for facts in workers:
            assert facts["refused"], facts
            assert REFUSED[devices, case] in facts["error"]
            assert "\n" not in facts["error"]
        return
    epochs, steps = CASES[case]
    for facts in workers:
        assert "error" not in facts, facts["error"]
        assert epochs is ANY or facts["epochs"] == epochs
        assert steps is ANY or facts["steps"] == steps
        assert facts["exchanges"] == EXCHANGES.get(case, facts["steps"] // PERIOD)
        assert facts["finite"]
        assert facts.get("loss", 0.0) is not None  # else it is NaN or Inf
    if case not in APART:
        assert workers[0]["is_center"] and workers[1]["is_center"]
        assert workers[0]["digest"] == workers[1]["digest"]
    if case in CHECKS:
        CHECKS[case](*workers)


@pytest.mark.parametrize("case", [case for case in CASES if (1, case) not in REFUSED])
def test_training_without_exchange(case: str, runs: Runs) -> None:
    """Without it the workers' weights differ: the comparison above can fail."""
    first, second = runs.of(case, devices=1, exchange="off")
    assert "error" not in first, first["error"]
    assert first["digest"] != second["digest"]
    assert first["exchanges"] == 0


# --- What a case says beside steps and weights ---


def check_generator(first: Facts, second: Facts) -> None:
    for facts in (first, second):
        assert 10 <= facts["steps"] <= 17  # more than a half of 16


def check_early_stopping_together(first: Facts, second: Facts) -> None:
    assert second["epochs"] == 2
    assert first["epochs"] < 1000


def check_class_weight(first: Facts, second: Facts) -> None:
    assert first["share_of_zeros"] > 0.8


def check_sample_weight(first: Facts, second: Facts) -> None:
    assert first["loss"] < 100  # 1e12, had one target of weight 0 counted


def check_validation(first: Facts, second: Facts) -> None:
    assert first["validated"] and second["validated"]


def check_initial_epoch(first: Facts, second: Facts) -> None:
    assert first["epoch_numbers"] == second["epoch_numbers"] == [3, 4]


def check_optimizer_slots(first: Facts, second: Facts) -> None:
    assert first["slots"] != second["slots"]


def check_skipped_step(first: Facts, second: Facts) -> None:
    assert (first["steps"], second["steps"]) == (7, 8)


def check_mixed_float16(first: Facts, second: Facts) -> None:
    """The first loss scale is too large for some steps: how many, the numbers decide."""
    for facts in (first, second):
        assert 2 <= facts["steps"] == facts["updates"] <= 8
        assert facts["dtypes"] == ["float32"]


def check_mixed_bfloat16(first: Facts, second: Facts) -> None:
    assert first["dtypes"] == ["float32"] and first["updates"] == 8


def check_bfloat16(first: Facts, second: Facts) -> None:
    assert first["dtypes"] == ["bfloat16"]


def check_two_optimizers(first: Facts, second: Facts) -> None:
    assert first["of_others"] == second["of_others"] == [[8, 2]]


def check_learning_rate_scheduler(first: Facts, second: Facts) -> None:
    assert first["rates"] == second["rates"] == [0.005, 0.0025, 0.00125]


def check_reduce_on_plateau(first: Facts, second: Facts) -> None:
    assert first["rates"] == second["rates"] == [0.0025]


def check_evaluate_and_predict(first: Facts, second: Facts) -> None:
    for facts in (first, second):
        assert facts["during"] == [[True, 128, 0]]
        assert facts["rows_after"] == 101


def check_metrics(first: Facts, second: Facts) -> None:
    assert first["marks"] == [64.0, 64.0]
    assert second["marks"] == [128.0, 128.0]


def check_dropout_seeds(first: Facts, second: Facts) -> None:
    assert first["mask"] != second["mask"]


def check_save_and_load(first: Facts, second: Facts) -> None:
    assert first["same"] and second["same"]


CHECKS = {
    "generator": check_generator,
    "early_stopping_together": check_early_stopping_together,
    "class_weight": check_class_weight,
    "sample_weight": check_sample_weight,
    "validation_data": check_validation,
    "validation_split": check_validation,
    "initial_epoch": check_initial_epoch,
    "optimizer_slots": check_optimizer_slots,
    "loss_scale_skips_a_step": check_skipped_step,
    "mixed_float16": check_mixed_float16,
    "mixed_bfloat16": check_mixed_bfloat16,
    "bfloat16": check_bfloat16,
    "custom_loop_two_optimizers": check_two_optimizers,
    "learning_rate_scheduler": check_learning_rate_scheduler,
    "reduce_on_plateau": check_reduce_on_plateau,
    "evaluate_and_predict": check_evaluate_and_predict,
    "metrics": check_metrics,
    "dropout_seeds": check_dropout_seeds,
    "save_and_load": check_save_and_load,
}
