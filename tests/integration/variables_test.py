"""What the box mirrors of a model, what it leaves alone, and what holds after an exchange."""

from __future__ import annotations

import sys

import pytest
from support import launch, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def finished():
    done = launch(2, "variables.py", timeout_s=400)
    assert done.code == 0, done.output
    return done


@pytest.fixture
def of(finished):
    """What the two workers have of a case."""
    return lambda case: [result["outcomes"][case] for result in finished.results]


def same(outcomes: list[dict], key: str = "digest") -> bool:
    return len({outcome[key] for outcome in outcomes}) == 1


def test_statistics_are_between_the_workers_and_never_negative(of):
    outcomes = of("statistics")
    assert same(outcomes)
    for outcome in outcomes:
        assert outcome["center_is_held"]
        assert not outcome["negative"]
        # Worker 0's inputs have mean 0 and variance 0.0001, worker 1's 5 and 9.
        assert 0.5 < outcome["mean"] < 4.5
        assert 0.5 < outcome["variance"] < 8.5


def test_statistics_are_what_was_made_so_and_not_what_is_frozen(of):
    for outcome in of("statistics"):
        assert outcome["chosen"] == ["normal/moving_mean", "normal/moving_variance"]


@pytest.mark.parametrize("rule", ["DeltaAveraging", "PeriodicAveraging"])
def test_constraints_hold_after_every_exchange_and_at_the_end(of, rule):
    outcomes = of(f"constraints_{rule}")
    assert same(outcomes)
    for outcome in outcomes:
        assert outcome["during"] < 1e-5
        assert outcome["at_end"] < 1e-5
        assert (outcome["rounds"] > 0) == (rule == "PeriodicAveraging")


def test_integers_and_seeds_stay_each_workers_own(of):
    outcomes = of("counting")
    assert [outcome["number"] for outcome in outcomes] == [7, 8]
    first, second = (outcome["seed"] for outcome in outcomes)
    assert first[0] != second[0]
    assert first[1] == second[1] > 0  # as many draws
    assert same(outcomes, "kernel")


def test_filter_leaves_variables_to_each_worker(of):
    outcomes = of("filtered")
    assert same(outcomes, "body")
    assert not same(outcomes, "head")
    assert all(outcome["variables"] == 2 for outcome in outcomes)


def test_filters_that_differ_are_refused_with_the_first_difference():
    done = launch(2, "filters_differ.py")
    assert done.code == 1
    assert "the models differ" in done.output
    assert "float32[8,16]" in done.output and "float32[16]" in done.output


def test_float_types_train_together(of):
    outcomes = of("typed")
    assert same(outcomes)
    for outcome in outcomes:
        types = ("float32", "bfloat16", "float16", "float64", "float32")
        assert outcome["dtypes"] == [dtype for dtype in types for _ in range(2)]
        assert outcome["exchanges"] >= 8
        assert outcome["losses"][-1] < outcome["losses"][0]
        assert outcome["center"] == outcome["digest"] and outcome["back"]


def test_lora_after_training(of):
    outcomes = of("adapted")
    assert same(outcomes)
    for outcome in outcomes:
        assert outcome["kernel_kept"]
        assert outcome["b_moved"] > 0
        assert outcome["variables"] == 6
        assert outcome["steps"] == 16


def test_center_at_the_end_is_the_mean_of_all_moving_averages(of):
    outcomes = of("averaged")
    assert same(outcomes)
    own = [outcome["own"] for outcome in outcomes]
    assert own[0] != own[1]
    mean = [(a + b) / 2 for a, b in zip(*own, strict=True)]
    for outcome in outcomes:
        assert outcome["held"] == pytest.approx(mean, abs=1e-5)


def test_schedule_and_period_change_without_a_new_trace(of):
    outcomes = of("scheduled")
    assert same(outcomes)
    for outcome in outcomes:
        assert outcome["traced_anew"] == 0
        assert outcome["steps"] == 64
        assert outcome["rounds"] == 5  # steps 2, 4, 6, 8 and 10
        assert outcome["phase"] == 1
        assert outcome["changes"][0] == [2, 0, 2]
        # Exactly where they are due, in the middle of executions of 8 steps.
        assert [13, 1, 3] in outcome["changes"]
        assert any(phase == 1 and period == 5 for _, phase, period in outcome["changes"])
        assert outcome["rule"] == "PeriodicAveraging(communication_period=2)"


def test_unstable_rule_is_said_once(finished):
    lines = [line for line in finished.output.splitlines() if "is not stable with 2" in line]
    assert 1 <= len(lines) <= 2  # each worker, once
    assert "moving_rate must be below 2 / (workers + 1) = 0.667" in lines[0]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("variable_filter=3", "variable_filter must be a function of a keras.Variable"),
        ("variable_filter=lambda v: None", "variable_filter must return True or False, got None"),
        ("variable_filter=lambda v: False", "variable_filter is false for all 4 float weights"),
        (
            "rule=tf_smb.DeltaAveraging(), schedule=3",
            "give rule= or schedule=, not both",
        ),
        ("min_workers=0", "min_workers must be an integer from 1 to 1024"),
    ],
)
def test_wrong_arguments(code, sentence):
    done = run(
        sys.executable,
        "-c",
        f"import keras, tf_smb\ns = tf_smb.SMBStrategy({code})\n"
        "with s.scope():\n"
        "    m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), "
        "keras.layers.Dense(1)])\n"
        "s.start(m)",
    )
    assert done.code == 1
    assert sentence in done.output.splitlines()[-1]
    assert "Traceback" not in done.output
