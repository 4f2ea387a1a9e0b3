"""What to report about a run: versions, settings, and what the exchanges did, as JSON values."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

import tf_smb
from tf_smb.errors import InvalidArgumentError
from tf_smb.strategies.console import announce
from tf_smb.strategies.fit_record import record_of
from tf_smb.writing import replacing

if TYPE_CHECKING:
    from tf_smb.strategies.mirror import ModelMirror
    from tf_smb.strategies.strategy import SMBStrategy

# Counts rise when a key changes its meaning or goes.
FORMAT = 1


def collect(
    strategy: SMBStrategy, model: keras.Model, mirror: ModelMirror | None
) -> dict[str, Any]:
    """Returns what a paper or a bug report needs to say about this worker's run.

    Args:
        strategy: The model's strategy.
        model: The model.
        mirror: Its mirror; None if it did not exchange.

    Returns:
        Values that JSON can hold: see docs/callbacks.md for the keys.
    """
    return {
        "format": FORMAT,
        "versions": _versions(),
        "machine": _machine(),
        "job": _job(strategy, mirror),
        "model": _model(strategy, model),
        "schedule": _schedule(strategy),
        "training": _training(model, mirror),
        "exchanges": None if mirror is None else _exchanges(mirror),
    }


def check_folder(folder: Path) -> None:
    """Makes the folder, at the beginning of a fit: an error at the end would come late.

    Raises:
        InvalidArgumentError: It cannot be made, or not written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidArgumentError(
            "run_info (TF_SMB_RUN_INFO) must be a folder that can be made and written to, got "
            f"'{folder}': {error} [SMB-E432]"
        ) from None


def write(folder: Path, worker_index: int, info: dict[str, Any]) -> None:
    """Writes `run_info-<worker>.json`; says so if it cannot, since training is done by then."""
    path = folder / f"run_info-{worker_index}.json"
    try:
        with replacing(path) as temporary:
            Path(temporary).write_text(json.dumps(info, indent=2) + "\n")
    except OSError as error:
        announce(f"tf_smb: worker {worker_index}: no run info is written: {error}")


def _versions() -> dict[str, str]:
    return {
        "tf_smb": tf_smb.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "cores_of_this_process": len(os.sched_getaffinity(0)),
        "devices": [device.name for device in tf.config.list_logical_devices()],
    }


def _job(strategy: SMBStrategy, mirror: ModelMirror | None) -> dict[str, Any]:
    return {
        "job_id": None if mirror is None else mirror.segment.job_id,
        "num_workers": strategy.num_workers,
        "worker_index": strategy.worker_index,
        "command": sys.argv,
    }


def _model(strategy: SMBStrategy, model: keras.Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "parameters": int(model.count_params()) if model.built else None,
        "dtype_policy": model.dtype_policy.name,
        "xla": strategy.uses_xla(model),
        "steps_per_execution": int(getattr(model, "steps_per_execution", 1) or 1),
    }


def _schedule(strategy: SMBStrategy) -> dict[str, Any]:
    schedule = strategy.schedule
    return {
        "words": repr(schedule),
        "unit": schedule.unit,
        "phases": [{"begin": begin, "rule": repr(rule)} for begin, rule in schedule.phases],
    }


def _training(model: keras.Model, mirror: ModelMirror | None) -> dict[str, Any]:
    record = record_of(model)
    return {
        "global_seed": record.global_seed,
        "steps": None if mirror is None else int(mirror.steps),
        "batches": None if mirror is None else int(mirror.batches),
        "settling_steps": 0 if mirror is None else int(mirror.settling_steps),
        "epochs": record.epochs,
        "samples": record.samples,
        "seconds": record.seconds,
    }


def _exchanges(mirror: ModelMirror) -> dict[str, Any]:
    stats = mirror.segment.stats()
    changes = [dict(change) for change in stats["changes"]]
    return {
        "exchanges": int(stats["exchanges"]),
        "rounds": int(stats["rounds"]),
        "skipped": int(stats["skipped_exchanges"]),
        "moved_bytes": int(stats["moved_bytes"]),
        "exchange_s": float(stats["exchange_s"]),
        "waiting_s": float(stats["waiting_s"]),
        # Counts of 0, 1, 2-3, 4-7, ... exchanges of others between two of this worker's.
        "staleness_histogram": [int(count) for count in stats["staleness_histogram"]],
        # One entry where any of these was different from the exchange before.
        "over_time": changes,
        "changes_forgotten": int(stats["changes_forgotten"]),
    }
