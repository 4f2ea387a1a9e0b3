"""What is refused is refused as a new user meets it: one sentence, soon, no page of frames."""

from __future__ import annotations

import re
import sys

import pytest
from support import SCRIPTS, launch, run

pytestmark = pytest.mark.slow

ANCHOR = re.compile(r" \[SMB-E\d{3}\]$")
ALONE = {
    "model_outside": "was made outside strategy.scope()",
    "optimizer_outside": "the optimizer 'adam' of model",
    "jit_compile": "tf_smb.callbacks.ExchangeAtBatchEnd()",
    "diverged": "holds NaN or Inf, so nothing of it reached the center",
    "custom_run": "call your step function itself, and strategy.step(model) after it",
    "not_built": "is not built, so it has no weights yet",
    "other_job": "from another job ('another')",
    "finished_job": "from an earlier run of this job that is finished",
    "same_index": "worker index 0 is taken by live process",
}


def _own_lines(output: str) -> list[str]:
    """The lines that are not TensorFlow's start-up log."""
    noise = ("WARNING: All log messages", "I0000", "W0000", "E0000", "To enable the following")
    return [line for line in output.splitlines() if line.strip() and not line.startswith(noise)]


@pytest.mark.parametrize("mistake", ALONE)
def test_mistake_of_one_process(mistake):
    done = run(sys.executable, str(SCRIPTS / "refused.py"), mistake)
    lines = _own_lines(done.output)
    assert done.code == 1, done.output
    assert ALONE[mistake] in lines[-1]
    assert len(lines) <= 3, done.output
    assert "Traceback" not in done.output
    assert "refused.py:" in lines[-1]  # the user's own line
    assert ANCHOR.search(lines[-1])


def test_different_models():
    done = launch(2, "refused.py", "different_models")
    assert done.code == 1
    assert "the models differ at variable 0: here " in done.output
    assert "float32[8,16]" in done.output and "float32[7,16]" in done.output
    assert "Traceback" not in done.output


def test_fewer_samples_than_workers():
    done = launch(2, "refused.py", "few_samples")
    assert done.code == 1
    assert "1 training samples are fewer than 2 workers: start at most 1" in done.output


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("tf_smb.SMBStrategy(num_workers=4)", "no server is given that they could share"),
        (
            "tf_smb.SMBStrategy(server='shm://x', num_workers=2, worker_index=2)",
            "worker_index must be below num_workers, which is 2, got 2",
        ),
        (
            "tf_smb.SMBStrategy(min_workers=3)",
            "min_workers must be at most num_workers, which is 1, got 3",
        ),
        ("tf_smb.SMBStrategy(on_existing='maybe')", "on_existing must be 'fail', 'resume' or"),
        ("tf_smb.SMBStrategy(data='split')", "data must be 'shard' or 'replicate', got 'split'"),
        (
            "tf_smb.SMBStrategy(rule=10)",
            "rule must be tf_smb.DeltaAveraging(...), tf_smb.ElasticAveraging(...), ",
        ),
        (
            "tf_smb.SMBStrategy(server='smb://host/x').start(1)",
            "unknown transport 'smb' in smb://host/x; this build has: shm",
        ),
    ],
)
def test_wrong_arguments(code, sentence):
    if ".start(1)" in code:
        code = (
            "import keras; s = tf_smb.SMBStrategy(server='smb://host/x')\n"
            "with s.scope():\n"
            "    m = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
            "s.start(m)"
        )
    done = run(sys.executable, "-c", f"import tf_smb\n{code}")
    assert done.code == 1
    assert sentence in done.output.splitlines()[-1]
    assert ANCHOR.search(done.output.splitlines()[-1])
    assert "Traceback" not in done.output
