"""What the Keras scripts share: their arguments, their cases, and each case's facts.

Every case has a strategy, and so a segment, of its own: one that fails leaves the others alone.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb

PERIOD = 3

Facts = dict[str, Any]
Case = Callable[[tf_smb.SMBStrategy], Facts]
CASES: dict[str, Case] = {}
_running = [""]


def case(function: Case) -> Case:
    """Registers a case under its function's name."""
    CASES[function.__name__] = function
    return function


def running() -> str:
    """Returns the name of the present case."""
    return _running[0]


class Progress(keras.callbacks.Callback):
    """Takes down what `fit` did before its end, where workers meet and make a few more steps."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: Facts = {"epochs": 0, "steps": 0, "exchanges": 0, "finite": True}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.facts["epochs"] += 1
        self.facts["finite"] &= all(math.isfinite(float(value)) for value in (logs or {}).values())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        strategy = self.model.distribute_strategy
        stats = strategy.stats(self.model)
        self.facts["steps"] = int(stats["steps"])
        self.facts["exchanges"] = int(stats["exchanges"])


def fit(model: keras.Model, *args: Any, **kwargs: Any) -> Facts:
    """Runs `fit`, quietly and without shuffling unless told so; returns what it did."""
    progress = Progress()
    callbacks = [*kwargs.pop("callbacks", []), progress]
    kwargs.setdefault("verbose", 0)
    model.fit(*args, callbacks=callbacks, **kwargs)
    return progress.facts


def held(strategy: tf_smb.SMBStrategy, *models: keras.Model) -> Facts:
    """Returns what the models hold, and whether that is the center."""
    inside = []
    for model in models:
        with strategy.center_weights(model):
            inside.append(common.digest(model))
    outside = [common.digest(model) for model in models]
    return {"digest": " ".join(outside), "is_center": inside == outside}


def dense(dtype: Any = None, features: int = 8, dropout: float = 0.0) -> keras.Model:
    """Returns the smallest model that can learn."""
    layers = [
        keras.layers.Input((features,)),
        keras.layers.Dense(8, activation="relu", dtype=dtype),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(1, dtype=dtype),
    ]
    return keras.Sequential(layers)


def wait_for(path: Path) -> Path:
    """Waits for the file that the chief writes."""
    deadline = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the chief did not write {path.name}")
        time.sleep(0.02)
    return path


def arguments() -> argparse.Namespace:
    """Reads the command line, and divides the CPU before TensorFlow begins to use it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--traceback", action="store_true")
    args = parser.parse_args()
    if args.devices > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * args.devices,
        )
    return args


def run_cases(args: argparse.Namespace) -> None:
    """Runs the cases in turn and prints each one's facts; what it raises is its fact."""
    worker = int(os.environ.get("TF_SMB_WORKER_INDEX", 0))
    devices: dict[str, Any] = {}
    if args.devices > 1:
        devices["devices"] = [f"cpu:{i}" for i in range(args.devices)]
    for name, function in CASES.items():
        if args.only and name not in args.only:
            continue
        _running[0], began = name, time.process_time()
        # Other first weights on every worker: only the box can make them equal.
        keras.utils.set_random_seed(1 + worker)
        strategy = tf_smb.SMBStrategy(
            rule=tf_smb.DeltaAveraging(communication_period=PERIOD), run_name=name, **devices
        )
        try:
            facts = function(strategy)
        except Exception as error:
            if args.traceback:
                traceback.print_exc()
            facts = {
                "error": f"{type(error).__name__}: {error}"[:1000],
                "refused": isinstance(error, tf_smb.errors.Error),
            }
        finally:
            keras.config.set_dtype_policy("float32")
        facts["cpu_s"] = round(time.process_time() - began, 2)
        common.result(strategy, case=name, facts=facts)
        del strategy
        gc.collect()


def as_arrays(structure: Any) -> list[np.ndarray]:
    """Returns the leaves of a model's output."""
    return [np.asarray(leaf) for leaf in tf.nest.flatten(structure)]
