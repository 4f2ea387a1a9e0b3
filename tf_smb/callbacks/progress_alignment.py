"""Ending together: the workers' progress, aligned through the control block."""

from __future__ import annotations

import operator
from typing import Any

from tf_smb.callbacks.common import SMBCallback
from tf_smb.errors import InvalidArgumentError

_RULES = ("first", "mean", "all")
# Epochs of a fit that this callback ends.
_ENDLESS = 1_000_000


class ProgressAlignment(SMBCallback):
    """Ends the training of all workers together, by one rule over their steps.

    Without it each worker makes its epochs, and those that are through wait for the others. With
    it, all end at the same time: at the end of the step they are in when

    - "first": the first worker has made its steps: a slow worker never holds the job;
    - "mean": the mean of the live workers' steps is what each should make: the job makes as many
      steps in all as planned, whoever makes them;
    - "all": every live worker has made its steps.

    For "mean" and "all", workers that have made their own epochs train on meanwhile: their
    epochs count on, and `History` has them. A worker whose data cannot be gone through once more
    (a generator, without `steps_per_epoch`) waits instead. Workers that died, left, or wait at the
    end do not count.

    A worker that another callback stops (EarlyStopping) stops all with "first"; with the others
    it leaves alone.

    Args:
        stop: "first", "mean" or "all".
        steps: How many local steps each worker should make in this fit; how many epochs that
            takes does then not matter. None: those of its epochs.

    Raises:
        InvalidArgumentError: A value is not acceptable; the message has it.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> model.fit(x, y, epochs=5, callbacks=[tf_smb.callbacks.ProgressAlignment("mean")])

    Source: the three rules of ShmCaffe (Ahn, Kim, Lim, Choi, Kang, Choi 2018, ICDCS).
    """

    # Last, to see what all others made of this step.
    tf_smb_order = 90

    def __init__(self, stop: str = "first", steps: int | None = None) -> None:
        super().__init__()
        if stop not in _RULES:
            raise InvalidArgumentError(
                f"ProgressAlignment: stop must be 'first', 'mean' or 'all', got {stop!r} [SMB-E347]"
            )
        self._stop = stop
        self._steps = _check_steps(steps)
        # Whether this fit ended by the rule, and not because another callback stopped it.
        self.ended = False
        self._begin_epoch = self._end_epoch = 0  # of the plan
        self._fewest_batches = 1  # of an epoch, unless its data has run out
        self._through = False  # with its own epochs
        self._target = self._steps
        self._batches = 0  # of this epoch
        self._own_steps = 0  # counted here, for a process that trains by itself
        self._last_batch = -1

    def plan(
        self,
        begin_epoch: int,
        end_epoch: int,
        repeatable: bool = True,
        steps_per_epoch: int | None = None,
    ) -> int:
        """Notes which epochs the user asked for; returns where Keras' own end shall be.

        Args:
            begin_epoch: The first one.
            end_epoch: The one after the last.
            repeatable: Whether the data can be gone through any number of times.
            steps_per_epoch: As the user gave it: how much of other data an epoch takes.
        """
        self._begin_epoch, self._end_epoch = begin_epoch, end_epoch
        self._fewest_batches = 1 if repeatable else steps_per_epoch or 1
        by_epochs = self._stop == "first" and self._steps is None
        # Keras gives the first two batches of a generator that has run out again and again.
        goes_on = not by_epochs and (repeatable or steps_per_epoch is not None)
        return _ENDLESS if goes_on else end_epoch

    def set_params(self, params: dict[str, Any]) -> None:
        """Gives the progress bar the epochs that the user asked for."""
        if params:
            params["epochs"] = self._end_epoch
        super().set_params(params)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count."""
        super().on_train_begin(logs)
        self.ended = self._through = False
        self._own_steps = 0
        self._target = self._steps or self._planned_steps()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Batches are counted from 0 in every epoch."""
        self._batches, self._last_batch = 0, -1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Publishes this worker's steps, and looks whether the end has come."""
        made, self._last_batch = batch - self._last_batch, batch
        self._batches += made
        self._own_steps += made
        if self.mirror is not None:
            self.mirror.segment.publish_steps(int(self.mirror.steps))
        self._look()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks whether the end has come; stops where the data cannot be gone through again."""
        if self.model.stop_training and not self.ended:
            if self._stop == "first":
                self._end(ask_others=True)
            return
        if epoch + 1 >= self._end_epoch:
            self._through = True
            self._target = self._target or self._steps_of_this_fit()
        if self._ran_out():
            self._end(ask_others=False)
        else:
            self._look()

    def _ran_out(self) -> bool:
        """Whether the data did not last for the epoch, and cannot be gone through once more."""
        return not self.ended and self._batches < self._fewest_batches

    def _look(self) -> None:
        if self.ended:
            return
        mirror = self.mirror
        if mirror is not None and mirror.segment.stop_requested:
            self._end(ask_others=False)
        elif self._is_over():
            self._end(ask_others=True)

    def _end(self, ask_others: bool) -> None:
        self.ended = True
        self.model.stop_training = True
        if ask_others and self.mirror is not None:
            self.mirror.segment.request_stop()

    # --- The rules ---

    def _is_over(self) -> bool:
        if self.mirror is None:
            return self._is_through()
        if self._stop == "first":
            return self._is_through()
        if self._stop == "mean":
            return self._target is not None and self._mean_steps() >= self._target
        return self._is_through() and all(map(self._is_other_through, self._others()))

    def _is_through(self) -> bool:
        """Whether this worker has made its steps."""
        if self._steps is None:
            return self._through
        return self._steps_of_this_fit() >= self._steps

    def _is_other_through(self, member: Any) -> bool:
        if self._steps is not None:
            return self._steps_of(member) >= self._steps
        if member.epoch >= self._end_epoch:
            return True
        # Its epoch is as of its last exchange. Shares of the data differ by a batch, so with one
        # step an epoch more than this worker's it is through as well.
        epochs = self._end_epoch - self._begin_epoch
        return self._target is not None and self._steps_of(member) >= self._target + epochs

    def _mean_steps(self) -> float:
        steps = [self._steps_of_this_fit(), *map(self._steps_of, self._others())]
        return sum(steps) / len(steps)

    # --- Steps ---

    def _others(self) -> list[Any]:
        """Returns the other workers that are in training."""
        segment = self.mirror.segment
        return [
            member
            for member in segment.members()
            if member.state == "live"
            and member.training
            and member.worker_index != segment.worker_index
        ]

    def _steps_of(self, member: Any) -> int:
        """Returns another worker's steps in this fit, as far as it has published them."""
        return self._in_this_fit(member.worker_index, member.steps)

    def _steps_of_this_fit(self) -> int:
        mirror = self.mirror
        if mirror is None:
            return self._own_steps
        return self._in_this_fit(mirror.segment.worker_index, int(mirror.steps))

    def _in_this_fit(self, worker_index: int, steps: int) -> int:
        before = {} if self.record is None else self.record.steps_before
        return max(0, steps - before.get(worker_index, 0))

    def _planned_steps(self) -> int | None:
        steps = self.params.get("steps")
        return None if steps is None else steps * (self._end_epoch - self._begin_epoch)


def _check_steps(steps: Any) -> int | None:
    if steps is None:
        return None
    try:
        number = 0 if isinstance(steps, bool) else operator.index(steps)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidArgumentError(
            f"ProgressAlignment: steps must be an integer from 1 on, or None, got {steps!r} "
            "[SMB-E348]"
        )
    return number
