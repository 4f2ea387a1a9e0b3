"""Exchanges beside the training step, for steps that cannot hold them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_smb.callbacks.common import SMBCallback


class ExchangeAtBatchEnd(SMBCallback):
    """Exchanges between Keras' executions instead of inside the training step.

    For `jit_compile=True`, since XLA cannot hold the exchange; works without it too. An exchange
    comes at the end of the first execution (`steps_per_execution` steps) at which one is due.

    Raises:
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> model.fit(x, y, callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()])
    """

    # First, as the exchange inside the step is: all others then see what came of it.
    tf_smb_order = 10

    def __init__(self) -> None:
        super().__init__()
        self._last_batch = -1
        self._updates = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that there is a box to exchange with."""
        super().on_train_begin(logs)
        self._updates = _applied_updates(self.model) or 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Batches are counted from 0 in every epoch."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the execution that ended, and exchanges if one is due."""
        batches, self._last_batch = batch - self._last_batch, batch
        mirror = self.mirror
        if mirror is None:
            return
        mirror.steps.assign_add(tf.constant(self._steps_of(batches), tf.int64))
        mirror.batches.assign_add(tf.constant(batches, tf.int64))
        mirror.exchange_if_due()

    def _steps_of(self, batches: int) -> int:
        """Returns how many of these batches updated the weights: accumulation skips some."""
        updates = _applied_updates(self.model)
        if updates is None or (updates == 0 and not _skips_updates(self.model)):
            return batches  # a train_step that updates by other means
        steps, self._updates = updates - self._updates, updates
        return max(0, steps)


def _skips_updates(model: Any) -> bool:
    optimizer: Any = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner is not optimizer or bool(inner.gradient_accumulation_steps)


def _applied_updates(model: Any) -> int | None:
    optimizer: Any = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "iterations"):
        return None
    # On several devices it is a variable of several copies.
    return int(tf.convert_to_tensor(optimizer.iterations))
