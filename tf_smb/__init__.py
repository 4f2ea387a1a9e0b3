"""tf_smb: train a Keras model on several workers that need not wait for each other.

The workers keep the model's weights mirrored in a Soft Memory Box: memory that a server lends
them, over shared memory. In a script:

    import tf_smb

    strategy = tf_smb.SMBStrategy()
    with strategy.scope():
        model = build()
        model.compile(...)
    model.fit(dataset, epochs=5)

and `tf-smb run -n 4 -- python train.py` trains it with four workers on one machine.

Importing tf_smb does not import TensorFlow: what needs it is loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tf_smb import errors
from tf_smb.box import Client, Lock, Member, Round, Segment, Server, Variable
from tf_smb.rules import (
    DeltaAveraging,
    ElasticAveraging,
    ExchangeRule,
    PeriodicAveraging,
    ReadThenAccumulate,
)
from tf_smb.schedule import Schedule

if TYPE_CHECKING:
    from tf_smb import callbacks
    from tf_smb.strategies import SMBStrategy

__version__ = "0.1.0"

__all__ = [
    "Client",
    "DeltaAveraging",
    "ElasticAveraging",
    "ExchangeRule",
    "Lock",
    "Member",
    "PeriodicAveraging",
    "ReadThenAccumulate",
    "Round",
    "SMBStrategy",
    "Schedule",
    "Segment",
    "Server",
    "Variable",
    "callbacks",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "SMBStrategy":
        return importlib.import_module("tf_smb.strategies").SMBStrategy
    if name == "callbacks":
        return importlib.import_module("tf_smb.callbacks")
    raise AttributeError(f"module 'tf_smb' has no attribute {name!r}")
