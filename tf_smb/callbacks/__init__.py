"""Keras callbacks of tf_smb.

They work on a model made under an SMBStrategy. `fit` brings them into the right order with each
other and with all other callbacks: those that add to the logs come before those that read them.
Under `TF_SMB_EXCHANGE=off`, and on the plain side of `tf-smb run --compare`, a process trains by
itself, and its own weights are the center.
"""

from __future__ import annotations

from tf_smb.callbacks.backup import BackupAndRestore
from tf_smb.callbacks.center_checkpoint import CenterCheckpoint
from tf_smb.callbacks.common import SMBCallback
from tf_smb.callbacks.communication_period import SetCommunicationPeriod
from tf_smb.callbacks.evaluate_center import EvaluateCenter
from tf_smb.callbacks.exchange_at_batch_end import ExchangeAtBatchEnd
from tf_smb.callbacks.exchange_logger import ExchangeLogger
from tf_smb.callbacks.progress_alignment import ProgressAlignment

__all__ = [
    "BackupAndRestore",
    "CenterCheckpoint",
    "EvaluateCenter",
    "ExchangeAtBatchEnd",
    "ExchangeLogger",
    "ProgressAlignment",
    "SMBCallback",
    "SetCommunicationPeriod",
]
