"""The end of a fit: a few steps in lockstep, so that the center knows what every worker knows.

Asynchronous workers come to their ends one after the other, and what the last one saw pulls the
center its way: where workers see different classes, some twenty steps are enough to unlearn the
others'. So when all are through their epochs, they make a few more steps together: each trains
one step from the center, and the center becomes the exact mean of their weights, as in
synchronous training with all workers' batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from tf_smb.strategies.mirror import ModelMirror


class Settle(keras.callbacks.Callback):
    """Makes each execution of a short extra fit one round in lockstep with the other workers.

    Args:
        mirror: The model's mirror; the workers stand at one center when the fit begins.
        rounds: How many rounds.
        meet: Puts this worker's progress into the center, waits for the others, takes the mean.
    """

    def __init__(self, mirror: ModelMirror, rounds: int, meet: Callable[[], None]) -> None:
        super().__init__()
        self._mirror = mirror
        self._rounds = rounds
        self._meet = meet

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._steps_before = int(self._mirror.steps)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._meet()
        self._rounds -= 1
        if self._rounds <= 0:
            self.model.stop_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._mirror.settling_steps += int(self._mirror.steps) - self._steps_before


def settling_rounds(settle_steps: int, fewest_steps: int, steps_per_execution: int) -> int:
    """Returns how many rounds all workers make: a tenth of a short fit, `settle_steps` of a long.

    Args:
        settle_steps: The most steps to make.
        fewest_steps: The fewest steps that any worker made: the same number on all workers.
        steps_per_execution: Steps of a round.
    """
    return -(-min(settle_steps, fewest_steps // 10) // max(1, steps_per_execution))
