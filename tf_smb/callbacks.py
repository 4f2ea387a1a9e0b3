"""Keras callbacks of tf_smb."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tf_smb.errors import FailedPreconditionError


class ExchangeAtBatchEnd(keras.callbacks.Callback):
    """Exchanges between Keras' executions instead of inside the training step.

    For `jit_compile=True`, since XLA cannot hold the exchange; works without it too. An exchange
    comes at the end of the first execution (`steps_per_execution` steps) at or after each
    multiple of the rule's communication period.

    Raises:
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> model.fit(x, y, callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()])
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_batch = -1

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that there is a box to exchange with."""
        if not hasattr(self.model.distribute_strategy, "mirror"):
            raise FailedPreconditionError(
                f"ExchangeAtBatchEnd: model '{self.model.name}' was not made inside "
                "'with tf_smb.SMBStrategy().scope():' [SMB-E335]"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Batches are counted from 0 in every epoch."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the steps of the execution that ended, and exchanges if one is due."""
        strategy: Any = self.model.distribute_strategy
        done, self._last_batch = batch - self._last_batch, batch
        if not strategy.exchanges:
            return
        mirror = strategy.mirror(self.model)
        before = int(mirror.steps)
        period = int(mirror.communication_period)
        mirror.steps.assign_add(tf.constant(done, tf.int64))
        if (before + done) // period > before // period:
            mirror.exchange()
