"""Running real workers: `tf-smb run` in a process of its own, and what it printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHARED_MNIST = ROOT.parent / "shared" / "data" / "mnist.npz"


@dataclass
class Finished:
    """What a run left: its exit code, its output, and each worker's RESULT line."""

    code: int
    output: str

    @property
    def results(self) -> list[dict]:
        """The JSON of each worker's `RESULT {...}` line, by worker index."""
        found = []
        for line in self.output.splitlines():
            at = line.find("RESULT {")
            if at >= 0:
                found.append(json.loads(line[at + len("RESULT ") :]))
        return sorted(found, key=lambda result: result["worker"])


def environment(**variables: str) -> dict[str, str]:
    """Returns a quiet environment without any TF_SMB_* of the caller."""
    base = {key: value for key, value in os.environ.items() if not key.startswith("TF_SMB_")}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1"}
    return {**base, **quiet, **variables}


def run(
    *command: str, timeout_s: float = 240, cwd: Path | None = None, **variables: str
) -> Finished:
    """Runs a command to its end; its output is standard output and error in one."""
    done = subprocess.run(
        command,
        env=environment(**variables),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        errors="replace",
    )
    return Finished(done.returncode, done.stdout.replace("\r", "\n"))


def launch(
    num_workers: int,
    script: str | Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    **variables: str,
) -> Finished:
    """Runs a script under `tf-smb run`, all workers' output shown."""
    path = script if isinstance(script, Path) else SCRIPTS / script
    return run(
        sys.executable,
        "-m",
        "tf_smb.cli",
        "run",
        "-n",
        str(num_workers),
        "--output",
        "all",
        *options,
        "--",
        sys.executable,
        str(path),
        *arguments,
        **variables,
    )


def digits_file(folder: Path) -> Path:
    """Returns an .npz file of real digits: MNIST where it lies beside the project.

    Else scikit-learn's 1,797 digits, enlarged to MNIST's size, six times over.
    """
    if SHARED_MNIST.exists():
        return SHARED_MNIST
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.pad(np.kron(digits.images / 16 * 255, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].astype(np.uint8), digits.target[order].astype(np.uint8)
    path = folder / "digits.npz"
    np.savez(
        path,
        x_train=np.tile(images[300:], (6, 1, 1)),
        y_train=np.tile(labels[300:], 6),
        x_test=images[:300],
        y_test=labels[:300],
    )
    return path
