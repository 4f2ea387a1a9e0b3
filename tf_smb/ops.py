"""The TensorFlow ops of tf_smb, in Python.

The library is one file for every supported TensorFlow: it uses TensorFlow's C API only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_smb import _smb
from tf_smb.errors import FailedPreconditionError

# What `exchange` returns first: ExchangeOutcome in cc/client/attached_segment.h.
MOVED = 0
UNCHANGED = 1
SKIPPED = 2
REPLACED = 3


def library_path() -> Path:
    """Returns the path of the op library."""
    return Path(_smb.__file__).with_name("_tf_smb_ops.so")


@functools.cache
def _library() -> Any:
    try:
        return tf.load_op_library(str(library_path()))
    except (tf.errors.NotFoundError, OSError) as error:
        raise FailedPreconditionError(
            f"the op library of tf_smb does not load in TensorFlow {tf.__version__} "
            f"(it needs 2.16 or newer): {error} [SMB-E336]"
        ) from None


def is_due(handle: int, steps: tf.Tensor, batches: tf.Tensor) -> tf.Tensor:
    """Whether an exchange is due now, as a TensorFlow op on the host: `Segment.is_due`.

    Args:
        handle: `Segment.handle` of a segment that this process has joined.
        steps: int64 scalar: this worker's step count.
        batches: int64 scalar: how many batches it has trained on, in all.

    Returns:
        bool scalar.

    Raises:
        tf.errors.FailedPreconditionError: Not joined, or in a forked child.
    """
    with tf.device("/cpu:0"):
        return _library().tf_smb_is_due(
            handle=tf.constant(handle, tf.int64), steps=steps, batches=batches
        )


def exchange(
    handle: int, steps: tf.Tensor, batches: tf.Tensor, local: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """One exchange of a model's weights with its center, as a TensorFlow op on the host.

    By the segment's schedule: in a phase of rounds it waits for the other workers. Ctrl-C ends
    the wait: the op comes back with `SKIPPED`, and Python raises KeyboardInterrupt.

    Args:
        handle: `Segment.handle` of a segment that this process has joined.
        steps: int64 scalar: this worker's step count.
        batches: int64 scalar: how many batches it has trained on, in all.
        local: The weights, one for each variable of the segment, of its dtype.

    Returns:
        outcome: int32 scalar: `MOVED`, `UNCHANGED` (alone: the center took the weights),
            `REPLACED` (a round) or `SKIPPED`.
        deltas: If the outcome is `MOVED`, what to subtract from each of `local`; if it is
            `REPLACED`, what to set it to; else not to be used.

    Raises:
        tf.errors.InvalidArgumentError: The weights hold NaN or Inf, or do not fit the segment.
        tf.errors.FailedPreconditionError: Not joined, or in a forked child.
    """
    with tf.device("/cpu:0"):
        outcome, deltas = _library().tf_smb_exchange(
            handle=tf.constant(handle, tf.int64), steps=steps, batches=batches, local=list(local)
        )
    return outcome, deltas
