"""Evaluating the center during training, once for all workers."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np

from tf_smb.callbacks.common import SMBCallback, acting_worker, announce, slices
from tf_smb.errors import InvalidArgumentError

_KIND = "center evaluation"


class EvaluateCenter(SMBCallback):
    """Evaluates the center at epoch ends, and gives every worker's logs the newest values.

    One worker evaluates for all: the chief, the lowest live worker in training, at the ends of its
    own epochs. It takes the center for that time; its own weights, metrics and step count are
    then as before. The other workers do not wait for it, except for the first evaluation: at
    their epoch ends they take the newest values there are, which can be of an older or a newer
    epoch than theirs. If the chief dies, or is through its epochs, the next one evaluates.

    `center_val_loss`, `center_val_<metric>` and `center_val_epoch`, the epoch of the chief (from
    0) that they are of, are in the logs of all callbacks, wherever this one stands in the list:
    EarlyStopping, ModelCheckpoint, ReduceLROnPlateau and CSVLogger can watch them. An EarlyStopping
    that watches one of them counts evaluations, not epochs: at the end of an epoch for which there
    is no new one, it is not asked.

    Where a process trains by itself, its own weights are the center.

    Args:
        validation_data: As for `fit`: `(x, y)`, `(x, y, sample_weight)`, a `tf.data.Dataset` or
            a `keras.utils.PyDataset`. Not divided between the workers.
        batch_size: As for `evaluate`.
        steps: As for `evaluate`.
        every: Evaluate at the end of the chief's first epoch, and then of each so many.
        prefix: Of the names in the logs.

    Raises:
        InvalidArgumentError: `every` or `prefix` is not acceptable; the message has the value.
        FailedPreconditionError: The model was not made under an SMBStrategy.

    If the chief makes no step for `end_timeout_s` while a worker waits for the first evaluation,
    that worker says so and goes on with NaN as `center_val_loss`.

    Example:
        >>> model.fit(
        ...     x, y, epochs=20,
        ...     callbacks=[
        ...         tf_smb.callbacks.EvaluateCenter((x_val, y_val)),
        ...         keras.callbacks.EarlyStopping("center_val_loss", patience=3),
        ...     ],
        ... )
    """

    # Before all that reads logs.
    tf_smb_order = 20

    def __init__(
        self,
        validation_data: Any,
        batch_size: int | None = None,
        steps: int | None = None,
        every: int = 1,
        prefix: str = "center_val_",
    ) -> None:
        super().__init__()
        if not _is_positive(every):
            raise InvalidArgumentError(
                f"EvaluateCenter: every must be an integer number of epochs from 1 on, got "
                f"{every!r} [SMB-E341]"
            )
        if not isinstance(prefix, str) or not prefix:
            raise InvalidArgumentError(
                f"EvaluateCenter: prefix must be a text, of one character or more, got {prefix!r} "
                "[SMB-E342]"
            )
        self.prefix = prefix
        # Whether the last epoch's end brought values that this worker did not have before.
        self.is_new = False
        self._data = _as_arguments(validation_data)
        self._evaluate_with = {"batch_size": batch_size, "steps": steps}
        self._every = int(every)
        self._first_epoch: int | None = None
        self._values: dict[str, float] | None = None
        self._seen = 0  # the number of the newest notice

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the values of an earlier fit."""
        super().on_train_begin(logs)
        self._first_epoch = self._values = None
        self._seen = 0 if self.record is None else self.record.notice_before

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts epochs from the first one of this fit."""
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Evaluates, if it is this worker's turn, and adds the newest values to the logs."""
        before = self._values
        mirror = self.mirror
        if mirror is None:
            if self._is_due(epoch):
                self._values = self._evaluate(epoch)
        else:
            self._look(mirror.segment)
            self._act(mirror.segment, epoch)
        self.is_new = self._values is not before
        if logs is not None and self._values is not None:
            logs.update({self.prefix + name: value for name, value in self._values.items()})

    def _act(self, segment: Any, epoch: int) -> None:
        """Evaluates as the chief; else waits if there was no evaluation yet."""
        if self._is_ours(segment):
            if self._is_due(epoch):
                self._evaluate_for_all(segment, epoch)
        elif self._values is None:
            self._wait_for_first(segment, epoch)

    def _is_due(self, epoch: int) -> bool:
        return self._values is None or (epoch - (self._first_epoch or 0)) % self._every == 0

    def _is_ours(self, segment: Any) -> bool:
        return acting_worker(segment) in (None, segment.worker_index)

    def _look(self, segment: Any) -> None:
        """Takes the newest values that were posted."""
        notice = segment.notice()
        if notice.number <= self._seen:
            return
        self._seen = notice.number
        said = _decode(notice.text)
        if said is not None:
            self._values = said

    def _evaluate_for_all(self, segment: Any, epoch: int) -> None:
        self._values = self._evaluate(epoch)
        self._seen = segment.post_notice(json.dumps({"kind": _KIND, "values": self._values}))

    def _wait_for_first(self, segment: Any, epoch: int) -> None:
        timeout_s = self.strategy.end_timeout_s
        for _ in slices(segment, timeout_s, lambda: _progress(segment)):
            self._look(segment)
            if self._values is not None:
                return
            if self._is_ours(segment):
                self._evaluate_for_all(segment, epoch)
                return
            self._take_part()
        what, _ = _progress(segment)
        announce(f"tf_smb: {what}: nothing in {timeout_s:g} s, going on without")
        self._values = {"loss": math.nan, "epoch": math.nan}

    def _take_part(self) -> None:
        """While this worker waits, makes the rounds that the chief cannot do without it."""
        mirror = self.mirror
        mirror.exchange_if_due()
        _, rule = self.strategy.schedule.phases[mirror.segment.phase]
        if rule.core_rule().synchronous:
            mirror.exchange()

    def _evaluate(self, epoch: int) -> dict[str, float]:
        model: Any = self.model
        with ExitStack() as stack:
            stack.enter_context(_untouched(model))
            if self.strategy is not None:
                stack.enter_context(self.strategy.center_weights(model))
            values = model.evaluate(
                **self._data, **self._evaluate_with, verbose=0, return_dict=True
            )
        return {**{name: float(value) for name, value in values.items()}, "epoch": float(epoch)}


def _is_positive(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        return False


def _as_arguments(validation_data: Any) -> dict[str, Any]:
    """Returns `evaluate`'s x, y and sample_weight."""
    if not isinstance(validation_data, tuple | list):
        return {"x": validation_data}
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(validation_data))
    return {"x": x, "y": y, "sample_weight": sample_weight}


def _decode(text: str) -> dict[str, float] | None:
    """Returns the values of a notice of ours; None for another one."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or said.get("kind") != _KIND:
        return None
    return said["values"]


def _progress(segment: Any) -> tuple[str, Any]:
    """Returns what a worker without values waits for, and how far that is."""
    acting = acting_worker(segment)
    for member in segment.members():
        if member.worker_index == acting:
            progress = (acting, member.steps, member.epoch, member.batch)
            return f"worker {acting} (step {member.steps}) to evaluate the center", progress
    return "a worker to evaluate the center", None


@contextmanager
def _untouched(model: Any) -> Iterator[None]:
    """Within it the model can be evaluated; its metrics and its stop flag come back after."""
    variables = list(model.metrics_variables)
    values = [np.array(variable) for variable in variables]
    stop_training = model.stop_training
    try:
        yield
    finally:
        model.stop_training = stop_training
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
