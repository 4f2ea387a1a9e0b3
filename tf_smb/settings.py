"""Settings: an argument beats the environment, the environment beats the default.

`SETTINGS` is the one table of `TF_SMB_*` names; `docs/settings.md` is its text for users.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from tf_smb.errors import InvalidArgumentError

MAX_WORKERS = 1024


def _integer(lowest: int, highest: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool):
            raise ValueError
        if not isinstance(value, str | Integral):
            raise ValueError
        number = int(value)
        if not lowest <= number <= highest:
            raise ValueError
        return number

    return parse


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    number = float(value)
    if not 0 < number < 1e9:
        raise ValueError
    return number


def _choice(*accepted: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise ValueError
        return value

    return parse


def _text(value: Any) -> str:
    # Surrogates, which no UTF-8 can hold, raise here.
    if not isinstance(value, str) or not 1 <= len(value.encode()) <= 100 or "\0" in value:
        raise ValueError
    return value


def _folder(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str) or not 1 <= len(path.encode()) <= 4096 or "\0" in path:
        raise ValueError
    return path


@dataclass(frozen=True)
class Setting:
    """One setting: its name, what it accepts, its default and what it is for."""

    name: str
    parse: Callable[[Any], Any]
    accepted: str
    default: Any
    help: str

    @property
    def variable(self) -> str:
        """The environment variable, for example `TF_SMB_SERVER`."""
        return "TF_SMB_" + self.name.upper()


def _workers(lowest: int, highest: int) -> tuple[Callable[[Any], int], str]:
    return _integer(lowest, highest), f"an integer from {lowest} to {highest}"


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting(
            "server",
            _text,
            "an address like shm://NAME",
            None,
            "The box to train with. `tf-smb run` sets it. None: an embedded one, to train alone.",
        ),
        Setting(
            "job_id",
            _text,
            "a text of 1 to 100 bytes",
            None,
            "What tells one job's segments from another's. None: a new random one.",
        ),
        Setting(
            "run_name",
            _text,
            "a text of 1 to 100 bytes",
            "run",
            "Name of the segments: `NAME/0` for the first model, `NAME/1` for the second.",
        ),
        Setting("num_workers", *_workers(1, MAX_WORKERS), 1, "How many workers the job starts."),
        Setting(
            "worker_index",
            *_workers(0, MAX_WORKERS - 1),
            0,
            "This worker's number. No two live workers may have the same.",
        ),
        Setting(
            "on_existing",
            _choice("fail", "resume", "replace"),
            "'fail', 'resume' or 'replace'",
            "fail",
            "What to do about a segment of this name from another or a finished job.",
        ),
        Setting(
            "data",
            _choice("shard", "replicate"),
            "'shard' or 'replicate'",
            "shard",
            "Whether `fit` gives each worker its share of the training data, or all of it.",
        ),
        Setting(
            "final",
            _choice("center", "local"),
            "'center' or 'local'",
            "center",
            "What the model holds when `fit` returns.",
        ),
        Setting(
            "exchange",
            _choice("on", "off"),
            "'on' or 'off'",
            "on",
            "'off': every worker trains by itself; to see what the exchange is worth.",
        ),
        Setting(
            "settle_steps",
            _integer(0, 10_000),
            "an integer from 0 to 10000",
            50,
            "Steps in lockstep at the end of `fit`, at most a tenth of its steps; 0: none.",
        ),
        Setting(
            "exchange_threads",
            *_workers(0, 64),
            0,
            "Threads of an exchange. 0: one for each core of this process, at most 4.",
        ),
        Setting(
            "finite_check",
            _choice("before", "during"),
            "'before' or 'during'",
            "before",
            "When an exchange looks for NaN and Inf: 'before' it moves anything, or 'during'.",
        ),
        Setting(
            "start_timeout_s",
            _seconds,
            "a number of seconds above 0",
            600.0,
            "How long the first `fit` waits for the other workers to come.",
        ),
        Setting(
            "min_workers",
            *_workers(1, MAX_WORKERS),
            1,
            "The fewest workers to begin with, when `start_timeout_s` is over.",
        ),
        Setting(
            "round_timeout_s",
            _seconds,
            "a number of seconds above 0",
            600.0,
            "How long a round of periodic averaging waits for live workers that do not come.",
        ),
        Setting(
            "end_timeout_s",
            _seconds,
            "a number of seconds above 0",
            600.0,
            "How long the end of `fit` waits for workers that make no step any more.",
        ),
        Setting(
            "run_info",
            _folder,
            "the path of a folder",
            None,
            "Where each worker writes `run_info-<worker>.json` at the end of `fit`. None: nowhere.",
        ),
    )
}


def resolve(name: str, argument: Any = None, environment: Mapping[str, str] | None = None) -> Any:
    """Returns the value of a setting.

    Args:
        name: A key of `SETTINGS`.
        argument: The value given in code; None if none was given.
        environment: Read instead of `os.environ`. An empty variable counts as none.

    Raises:
        InvalidArgumentError: The value is not acceptable; the message says where it came from.
    """
    setting = SETTINGS[name]
    environment = os.environ if environment is None else environment
    source, value = name, argument
    if value is None:
        source, value = setting.variable, environment.get(setting.variable) or None
    if value is None:
        return setting.default
    try:
        return setting.parse(value)
    except (ValueError, TypeError, OverflowError):
        raise InvalidArgumentError(
            f"{source} must be {setting.accepted}, got {value!r} [SMB-E295]"
        ) from None
