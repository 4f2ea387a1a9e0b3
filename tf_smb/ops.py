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


def exchange(
    handle: int, steps: tf.Tensor, local: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """One exchange of a model's weights with its center, as a TensorFlow op on the host.

    Args:
        handle: `Segment.handle` of a segment that this process has joined.
        steps: int64 scalar: this worker's step count, for the others to see.
        local: The weights, float32, one for each variable of the segment.

    Returns:
        outcome: int32 scalar: `MOVED`, `UNCHANGED` (alone: the center took the weights) or
            `SKIPPED`.
        deltas: What to subtract from each of `local` if the outcome is `MOVED`; else not to be
            used.

    Raises:
        tf.errors.InvalidArgumentError: The weights hold NaN or Inf, or do not fit the segment.
        tf.errors.FailedPreconditionError: Not joined, or in a forked child.
    """
    with tf.device("/cpu:0"):
        outcome, deltas = _library().tf_smb_exchange(
            handle=tf.constant(handle, tf.int64), steps=steps, local=list(local)
        )
    return outcome, deltas
