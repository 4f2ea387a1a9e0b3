"""200 workers killed at random: tests/soak/soak.py, with a seed of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "soak" / "soak.py"


@pytest.mark.slow
def test_200_random_kills():
    soak = subprocess.run(
        [sys.executable, SOAK, "--kills", "200", "--workers", "6", "--seed", "20261130"],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert "passed: 200 kills of 6 workers" in soak.stdout
