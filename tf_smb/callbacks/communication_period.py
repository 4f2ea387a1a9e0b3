"""Changing the communication period during training."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from tf_smb.callbacks.common import SMBCallback
from tf_smb.errors import InvalidArgumentError


class SetCommunicationPeriod(SMBCallback):
    """Sets the communication period at given epochs or steps, or by a function of the logs.

    Nothing is compiled anew. A period that is set holds until the next one is, or until the next
    phase of a schedule begins, which has its own. Every worker sets its own; give all the same.

    Args:
        period: A dict of epochs (or steps) and periods, or a function. A dict: from that epoch
            (or step) on, that period; before the first one, the rule's own. A function
            `f(epoch, logs) -> int` is called at each epoch's end, with all logs of the epoch, and
            returns the period for the next; `by` is then "epoch".
        by: What the dict's keys count: "epoch" (Keras' epoch numbers, from 0) or "step" (this
            worker's local steps, over all its fits together).

    Raises:
        InvalidArgumentError: Not such a dict or function, or a period out of range; the message
            has the value.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    Example:
        >>> SetCommunicationPeriod({0: 1, 5: 10})  # every step at first, then every 10
        >>> SetCommunicationPeriod({0: 1, 1000: 20}, by="step")

        AdaComm: a long period at first, when noise matters little, then a shorter one, by the
        loss F and the learning rate eta: tau = ceil(sqrt(eta_0 / eta * F / F_0) * tau_0).

        >>> first = {}
        >>> def adacomm(epoch, logs):
        ...     eta, loss = float(model.optimizer.learning_rate), logs["loss"]
        ...     eta_0, loss_0 = first.setdefault("values", (eta, loss))
        ...     return math.ceil(math.sqrt(eta_0 / eta * loss / loss_0) * 16)
        >>> model.fit(x, y, callbacks=[SetCommunicationPeriod(adacomm)])

    Source: AdaComm (Wang, Joshi 2018, arXiv:1810.08313, section 4).
    """

    # After those that add to the logs, which the function reads.
    tf_smb_order = 30

    def __init__(
        self,
        period: Mapping[int, int] | Callable[[int, dict[str, Any]], int],
        by: str = "epoch",
    ) -> None:
        super().__init__()
        if by not in ("epoch", "step"):
            raise InvalidArgumentError(
                f"SetCommunicationPeriod: by must be 'epoch' or 'step', got {by!r} [SMB-E337]"
            )
        self._function = period if callable(period) else None
        if self._function is not None and by != "epoch":
            raise InvalidArgumentError(
                "SetCommunicationPeriod: a function is called at the end of each epoch: leave by= "
                f"away, got {by!r} [SMB-E338]"
            )
        self._periods = {} if callable(period) else _check_periods(period)
        self._by = by
        # The key that is in force; None: the rule's own period.
        self._key: int | None = None
        # What the function said for the next epoch.
        self._next: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """A new fit looks up its period anew."""
        super().on_train_begin(logs)
        self._key = self._next = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the period of this epoch, or of the step that training begins with."""
        if self._next is not None:
            self._set(self._next)
            self._next = None
        self._set_newest(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the period of the step that training has come to."""
        if self._by == "step":
            self._set_newest(0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Asks the function for the next epoch's period."""
        if self._function is not None:
            self._next = _check_period(self._function(epoch, logs or {}), "the function's period")

    def _set_newest(self, epoch: int) -> None:
        """Sets the last period at or before where training is, if it is not yet."""
        mirror = self.mirror
        if mirror is None or not self._periods:
            return
        at = int(mirror.steps) if self._by == "step" else epoch
        key = max((key for key in self._periods if key <= at), default=None)
        if key is not None and key != self._key:
            self._key = key
            self._set(self._periods[key])

    def _set(self, period: int) -> None:
        mirror = self.mirror
        if mirror is not None:
            mirror.set_period(period)


def _check_periods(period: Any) -> dict[int, int]:
    def is_key(key: Any) -> bool:
        try:
            return not isinstance(key, bool) and operator.index(key) >= 0
        except TypeError:
            return False

    if not isinstance(period, Mapping) or not period or not all(map(is_key, period)):
        raise InvalidArgumentError(
            "SetCommunicationPeriod: period must be a dict such as {0: 1, 5: 10}, of integers from "
            f"0 on and periods, or a function, got {period!r} [SMB-E339]"
        )
    return {
        operator.index(key): _check_period(value, f"the period at {key}")
        for key, value in period.items()
    }


def _check_period(period: Any, name: str) -> int:
    try:
        number = 0 if isinstance(period, bool) else operator.index(period)
    except TypeError:
        number = 0
    if not 1 <= number <= 10**9:
        raise InvalidArgumentError(
            f"SetCommunicationPeriod: {name} must be an integer number of steps from 1 to "
            f"1000000000, got {period!r} [SMB-E340]"
        )
    return number
