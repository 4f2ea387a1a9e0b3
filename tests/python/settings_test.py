"""Argument over environment over default, and what is refused, with the value in the message."""

import re

import numpy as np
import pytest

from tf_smb import settings
from tf_smb.errors import InvalidArgumentError

GOOD = [
    ("num_workers", 1, 1),
    ("num_workers", 1024, 1024),
    ("num_workers", np.int64(7), 7),
    ("num_workers", "12", 12),
    ("worker_index", 0, 0),
    ("worker_index", "1023", 1023),
    ("exchange_threads", np.uint8(64), 64),
    ("start_timeout_s", 1, 1.0),
    ("start_timeout_s", "0.5", 0.5),
    ("end_timeout_s", np.float32(2.5), 2.5),
    ("end_timeout_s", 1e-9, 1e-9),
    ("on_existing", "resume", "resume"),
    ("finite_check", "during", "during"),
    ("data", "replicate", "replicate"),
    ("final", "local", "local"),
    ("exchange", "off", "off"),
    ("run_name", "x" * 100, "x" * 100),
    ("job_id", "ü" * 50, "ü" * 50),
    ("server", "shm://name", "shm://name"),
    ("run_info", "folder/" + "x" * 200, "folder/" + "x" * 200),
]

INTEGERS = [0, 1025, -1, 1.0, 2.5, True, False, "x", "1.0", "", [], float("nan"), np.bool_(True)]
SECONDS = [0, 0.0, -1.0, 1e9, float("nan"), float("inf"), True, "x", "nan", "", [], {}, 10**400]
TEXTS = [0, 1.5, True, "", "x" * 101, "ü" * 51, "a\0b", "\ud800", b"bytes", ["a"]]
CHOICES = ["", "Fail", "fail ", "other", 0, True, ["fail"], np.array(["fail", "fail"])]
BAD = [
    *(("num_workers", value) for value in [*INTEGERS, np.array([1, 2]), 10**400]),
    *(("worker_index", value) for value in [-1, 1024, "a", True, 0.0]),
    *(("exchange_threads", value) for value in [-1, 65, True, "two"]),
    *(("start_timeout_s", value) for value in SECONDS),
    *(("end_timeout_s", value) for value in SECONDS),
    *(("job_id", value) for value in TEXTS),
    *(("run_name", value) for value in TEXTS),
    *(("server", value) for value in TEXTS),
    *(("on_existing", value) for value in CHOICES),
    *(("finite_check", value) for value in ["", "Before", "after", True]),
    *(("data", value) for value in ["Shard", 1]),
    *(("final", value) for value in ["both", 1]),
    *(("exchange", value) for value in ["yes", True, False]),
    *(("run_info", value) for value in ["", 1, True, "a\0b", "x" * 5000, b"folder"]),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD)
def test_accepted(name, value, expected):
    resolved = settings.resolve(name, value, {})
    assert resolved == expected
    assert type(resolved) is type(expected)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refused_with_value_and_range(name, value):
    with pytest.raises(InvalidArgumentError) as caught:
        settings.resolve(name, value, {})
    message = str(caught.value)
    accepted = settings.SETTINGS[name].accepted
    assert message == f"{name} must be {accepted}, got {value!r} [SMB-E295]"


@pytest.mark.parametrize("name", settings.SETTINGS)
def test_environment_is_named_in_its_errors(name):
    setting = settings.SETTINGS[name]
    bad = "x" * 5000
    with pytest.raises(InvalidArgumentError, match=re.escape(f"{setting.variable} must be")):
        settings.resolve(name, None, {setting.variable: bad})


def test_argument_beats_environment_beats_default(monkeypatch):
    assert settings.resolve("num_workers", None, {}) == 1
    assert settings.resolve("num_workers", None, {"TF_SMB_NUM_WORKERS": "3"}) == 3
    assert settings.resolve("num_workers", 5, {"TF_SMB_NUM_WORKERS": "3"}) == 5
    assert settings.resolve("num_workers", 5, {"TF_SMB_NUM_WORKERS": "nonsense"}) == 5
    monkeypatch.setenv("TF_SMB_NUM_WORKERS", "4")
    assert settings.resolve("num_workers") == 4


@pytest.mark.parametrize("name", settings.SETTINGS)
def test_empty_variable_counts_as_none(name):
    setting = settings.SETTINGS[name]
    assert settings.resolve(name, None, {setting.variable: ""}) == setting.default


@pytest.mark.parametrize("setting", list(settings.SETTINGS.values()), ids=lambda s: s.name)
def test_table_is_consistent(setting):
    assert settings.SETTINGS[setting.name] is setting
    assert setting.variable == "TF_SMB_" + setting.name.upper()
    assert setting.help.endswith(".")
    if setting.default is not None:
        assert setting.parse(setting.default) == setting.default
        assert setting.parse(str(setting.default)) == setting.default  # as the environment has it
