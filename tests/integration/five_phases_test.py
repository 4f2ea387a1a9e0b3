"""Schedules in real worker processes."""

from __future__ import annotations

import pytest
from support import launch

pytestmark = pytest.mark.slow


def test_five_phases_with_a_slow_one_a_leaver_a_late_one_and_a_dead_one():
    done = launch(4, "five_phases.py", TF_SMB_START_TIMEOUT_S="4")
    assert done.code == 128 + 9, done.output
    results = {result["role"]: result for result in done.results}
    assert results.keys() == {"slow", "leaver", "late"}, done.output
    assert results["slow"]["phases"] == [0, 1, 2, 3, 4]
    assert results["leaver"]["phases"] == [0, 1, 2]
    first = results["late"]["phases"][0]
    assert results["late"]["phases"] == list(range(first, 5))
    assert first >= 1  # not from the beginning
    assert results["slow"]["digest"] == results["late"]["digest"]
    assert results["slow"]["rounds"] >= 30
    # Nobody but the slow one makes the job last: what it spends beside its own steps is the
    # waiting for the late one's last steps at the most.
    assert results["slow"]["steps"] >= 256
    assert "did not come in 4 s: starting without" in done.output
    assert "worker 1 stopped early" in done.output
