"""Models of many kinds, each trained by two workers, on one and on two devices of each.

One run for a number of devices trains all of them; a test looks at one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest
from keras_runs import Facts, Runs
from support import SCRIPTS, Finished, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# 96 samples on 2 workers in batches of 8, 2 epochs; an exchange every 3 steps.
STEPS, EXCHANGES = 12, 4
# In several fits: the end of each but the last exchanged once more, beside the period.
IN_FITS = {
    "freezing_between_fits": (STEPS, EXCHANGES + 1),
    "two_models_in_turn": (STEPS, EXCHANGES + 1),
    "two_models_alternately": (STEPS, EXCHANGES + 1),
    "load_weights_between_fits": (18, 6 + 2),
    # The second fit has other weights, and so a segment of its own.
    "lora_between_fits": (STEPS // 2, EXCHANGES // 2),
}
CASES = (
    "sequential",
    "functional",
    "subclassed",
    "unbuilt",
    "nested",
    "shared_layers",
    "multi_output",
    "convolution",
    "lstm",
    "gru",
    "embedding",
    "transformer",
    "preprocessing",
    "lora",
    "frozen_backbone",
    *IN_FITS,
)
# Keras' own rounding in another order of sums: a SavedModel runs as one graph.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs("keras_models.py", tmp_path_factory.mktemp("keras_models"))


@pytest.fixture(scope="module")
def loaded(runs: Runs) -> Callable[[int], dict[str, Facts]]:
    """What a process without tf_smb has of each exported model, by number of devices."""

    @functools.cache
    def finished(devices: int) -> Finished:
        return run(sys.executable, str(SCRIPTS / "keras_load.py"), str(runs.folder(devices)))

    def load(devices: int) -> dict[str, Facts]:
        done = finished(devices)
        assert done.code == 0, done.output
        assert done.results[0]["loaded"] == []
        return done.results[0]["outcomes"]

    return load


def check_more(facts: Facts) -> None:
    """What the cases say of themselves, beside steps and weights."""
    for name in ("frozen", "trains"):
        assert facts.get(name, True), name
    if "other" in facts:  # of two models
        assert (facts["other"]["epochs"], facts["other"]["steps"]) == (2, STEPS)
        assert facts["other"]["exchanges"] == EXCHANGES + 1
    if "moved" in facts:  # and then loaded from a file, again
        assert facts["moved"] > 1e-3
        assert facts["off"] == 0
    if "num_weights" in facts:  # of a model that uses a layer twice
        assert facts["num_weights"] == 4
    if "statistics_error" in facts:  # of an adapted layer
        assert facts["statistics_error"] < 1e-6


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_model(
    case: str, devices: int, runs: Runs, loaded: Callable[[int], dict[str, Facts]]
) -> None:
    workers = runs.of(case, devices)
    for facts in workers:
        assert "error" not in facts, facts["error"]
        steps, exchanges = IN_FITS.get(case, (STEPS, EXCHANGES))
        assert (facts["steps"], facts["exchanges"]) == (steps, exchanges)
        assert facts["finite"]
        assert facts["is_center"]
        check_more(facts)
    assert workers[0]["digest"] == workers[1]["digest"]

    exported = loaded(devices)[case]
    assert "error" not in exported, exported["error"]
    assert exported["worst"] < ROUNDING
    assert exported["own_operations"] == []


@pytest.mark.parametrize("case", CASES)
def test_model_without_exchange(case: str, runs: Runs) -> None:
    """Without it the workers' weights differ: the comparison above can fail."""
    first, second = runs.of(case, devices=1, exchange="off")
    assert "error" not in first, first["error"]
    assert first["digest"] != second["digest"]
    assert first["steps"] == first["exchanges"] == 0  # not counted: there is no box
