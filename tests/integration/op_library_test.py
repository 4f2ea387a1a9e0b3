"""One op library file for every supported TensorFlow."""

from __future__ import annotations

import os
import sys

import pytest
from support import ROOT, SCRIPTS, run

OLD_PYTHON = ROOT / ".venv-tf216" / "bin" / "python"


def test_op_in_this_tensorflow():
    done = run(sys.executable, str(SCRIPTS / "op_exchange.py"))
    assert done.code == 0, done.output
    (result,) = done.results
    print(f"TensorFlow {result['tensorflow']}: sha256 {result['sha256']}")


@pytest.mark.slow
def test_same_file_in_tensorflow_2_16():
    if not OLD_PYTHON.exists():
        assert os.environ.get("CI") != "true" or sys.version_info >= (3, 13)
        pytest.skip("no TensorFlow 2.16 here: make test-tf216 installs it")
    new = run(sys.executable, str(SCRIPTS / "op_exchange.py"))
    # This checkout's package, with the very files that the newest TensorFlow loads.
    old = run(str(OLD_PYTHON), str(SCRIPTS / "op_exchange.py"), PYTHONPATH=str(ROOT))
    assert new.code == 0, new.output
    assert old.code == 0, old.output
    (newest,), (oldest,) = new.results, old.results
    for result in (newest, oldest):
        print(f"TensorFlow {result['tensorflow']}: sha256 {result['sha256']}")
    assert oldest["tensorflow"].startswith("2.16.")
    assert oldest["tensorflow"] != newest["tensorflow"]
    assert oldest["sha256"] == newest["sha256"]
