"""ModelMirror: one model's weights, mirrored in a segment of the box."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_smb import ops
from tf_smb.box import Client, Segment
from tf_smb.errors import AbortedError, DeadlineExceededError, FailedPreconditionError
from tf_smb.schedule import Schedule
from tf_smb.strategies.step_functions import optimizer_of
from tf_smb.strategies.variables import (
    MirroredVariables,
    VariableFilter,
    choose_variables,
    copies,
)

# Between two looks at who the chief is.
_LOOK_S = 1.0
# A salt large enough that workers' seeds do not meet by counting up.
_SEED_STRIDE = 1_000_003

Announce = Callable[[str], None]


def mirrored_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables of a strategy's model that the box mirrors, in order."""
    return choose_variables(model, getattr(model.distribute_strategy, "variable_filter", None))


class ModelMirror:
    """Keeps one model and its segment together.

    Not thread-safe: one thread trains a model.

    Attributes:
        segment: The segment, attached; joined once `start` ran.
        steps: int64 variable: local steps that applied an update.
        batches: int64 variable: batches trained on; more than steps under gradient accumulation.
        settling_steps: Steps made at the end of `fit`, in lockstep with the others.
    """

    def __init__(
        self,
        model: keras.Model,
        client: Client,
        segment_name: str,
        schedule: Schedule,
        num_workers: int,
        worker_index: int,
        on_existing: str,
        exchange_threads: int,
        variable_filter: VariableFilter | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._variables = MirroredVariables(model, variable_filter)
        self._variable_filter = variable_filter
        self._seeds = [
            variable
            for variable in model.variables
            if variable.path.endswith("seed_generator_state")
        ]
        self._schedule = schedule
        self._worker_index = worker_index
        self._first_position = 0
        self.segment: Segment = client.create(
            segment_name, self._variables.layout, num_workers, on_existing, exchange_threads
        )
        self.segment.set_statistics(self._variables.statistics)
        self._left_with: list[np.ndarray] | None = None
        self._left_at_version = 0  # of the center
        self._local_at_end: list[np.ndarray] | None = None
        self.settling_steps = 0
        # On the host: the op that reads them is there.
        with tf.device("/cpu:0"):
            self.steps = _variable(0, tf.int64, "tf_smb_steps")
            self.batches = _variable(0, tf.int64, "tf_smb_batches")
            self._step_exchanges = _variable(True, tf.bool, "tf_smb_step_exchanges")

    def is_of(self, model: keras.Model) -> bool:
        """Whether the model has the weights still that it had when this was made."""
        return self._variables.are_of(model, self._variable_filter)

    # --- Weights, eagerly ---

    def local(self) -> list[np.ndarray]:
        """Returns copies of the model's weights: on several devices of their means."""
        return self._variables.read()

    def assign(self, values: list[np.ndarray]) -> None:
        """Overwrites the model's weights."""
        self._variables.assign(values)

    def _take(self, values: list[np.ndarray]) -> list[np.ndarray]:
        """Overwrites the model's weights within their constraints; returns what they are then."""
        self._variables.take(values)
        return self.local()

    # --- A worker's life ---

    @property
    def started(self) -> bool:
        """Whether this worker is a member of the segment."""
        return self.segment.joined

    def restore(self, steps: int, batches: int, epoch: int = 0) -> None:
        """Sets how far this worker was, before `start`: a schedule then begins there."""
        self.steps.assign(steps)
        self.batches.assign(batches)
        self._first_position = epoch if self._schedule.unit == "epoch" else steps

    def start(self, timeout_s: float, announce: Announce, min_workers: int = 1) -> None:
        """Joins, and starts from the center: the lowest worker's weights.

        Raises:
            AlreadyExistsError: A live worker has this index.
        """
        values = self.local()
        seeded = self.segment.start(
            values,
            self._worker_index,
            timeout_s=timeout_s,
            announce=announce,
            schedule=self._schedule,
            min_workers=min_workers,
            position=self._first_position,
            warn_unstable=False,  # the strategy does, at once
        )
        if not seeded:
            self.assign(values)
        self._salt_seeds()

    def resume(self, is_chief: Callable[[], bool], timeout_s: float, announce: Announce) -> None:
        """Begins another `fit`: weights that the user changed since the last one are noticed.

        The chief's become the center, the other workers wait for that and take it.
        """
        if self._left_with is None:
            return
        local = self.local()
        same = all(np.array_equal(a, b) for a, b in zip(local, self._left_with, strict=True))
        self._left_with = None
        if same:
            return
        if not is_chief():
            announce(
                "tf_smb: the weights were changed since the last fit: this worker takes the "
                "center, which the chief sets"
            )
            self._await_chief(is_chief, timeout_s)
        if is_chief():
            announce("tf_smb: the weights were changed since the last fit: they are the new center")
            self.segment.write(local)
        else:
            self.segment.read_into(local)
            self.assign(local)
        self.segment.rebase(local)

    def _await_chief(self, is_chief: Callable[[], bool], timeout_s: float) -> None:
        """Until the center is another than at the last `fit`'s end, or this is the chief."""
        ends_at = time.monotonic() + timeout_s
        while not is_chief() and time.monotonic() < ends_at:
            with suppress(DeadlineExceededError):
                self.segment.wait_version(self._left_at_version + 1, timeout_s=_LOOK_S)
                return

    def finish(self, timeout_s: float, announce: Announce) -> int:
        """Puts the last progress into the center, meets the others there, and takes it.

        Where the optimizer has put moving averages into the weights (`use_ema`), which is no
        progress to add, the center becomes their mean over the workers.

        Returns:
            The fewest steps that any worker made in this training: the same number on all.
        """
        self._local_at_end = self.local()
        values = [value.copy() for value in self._local_at_end]
        if not self._ends_with_averages():
            self.segment.exchange(values, int(self.steps), int(self.batches))
        fewest_steps = self.segment.meet(values, timeout_s=timeout_s, announce=announce)
        if self._ends_with_averages():
            values = self._average(self._local_at_end, timeout_s, announce)
        self._left_with = self._take(values)
        return fewest_steps

    @contextmanager
    def lockstep(self, timeout_s: float, announce: Announce) -> Iterator[Callable[[], None]]:
        """Within it the step does not exchange; the function it gives makes a synchronous round.

        In a round all workers' weights, and the center, become their mean. Begins where `finish`
        ended.
        """

        def meet() -> None:
            self._left_with = self._take(self._average(self.local(), timeout_s, announce))

        self._step_exchanges.assign(False)
        try:
            yield meet
        finally:
            self._step_exchanges.assign(True)
            self.segment.rebase(self._left_with or self.local())

    def _average(
        self, local: list[np.ndarray], timeout_s: float, announce: Announce
    ) -> list[np.ndarray]:
        """Returns the mean of all workers' values; the center if it was made without this one."""
        values = [value.copy() for value in local]
        try:
            self.segment.average(
                values, 1.0, int(self.steps), timeout_s=timeout_s, announce=announce
            )
        except (AbortedError, FailedPreconditionError):
            return self.segment.read()
        return values

    def end(self, keep_local: bool) -> None:
        """Leaves the model with the center, or with its own weights of the end of training."""
        if keep_local and self._local_at_end is not None:
            self.assign(self._local_at_end)
            self._left_with = self._local_at_end
        self._local_at_end = None
        self._left_at_version = self.segment.version

    def leave_alone(self, keep_local: bool) -> bool:
        """Ends training before the others do; False, and nothing done, if no other trains."""
        local = self.local()
        values = [value.copy() for value in local]
        if not self._ends_with_averages():
            self.segment.exchange(values, int(self.steps), int(self.batches))
        if not self.segment.leave_unless_last():
            return False
        if keep_local:
            self.assign(local)
            self._left_with = local
        else:
            self.segment.read_into(values)
            self._left_with = self._take(values)
        return True

    def exchange(self) -> str:
        """Exchanges now, eagerly; returns what happened, as `Segment.exchange`."""
        values = self.local()
        outcome = self.segment.exchange(values, int(self.steps), int(self.batches))
        if outcome in ("moved", "replaced"):
            self._variables.take(values)
        return outcome

    def exchange_if_due(self) -> str | None:
        """Exchanges, eagerly, if the schedule says so; else returns None."""
        if not self.segment.is_due(int(self.steps), int(self.batches)):
            return None
        return self.exchange()

    def set_period(self, communication_period: int) -> None:
        """Sets the steps between two exchanges, until the schedule's next phase begins.

        At any time: nothing is traced again.
        """
        self.segment.set_period(communication_period)

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Within it the model holds the center; afterwards its own weights again."""
        local = self.local()
        self._take(self.segment.read())
        try:
            yield
        finally:
            self.assign(local)

    def _ends_with_averages(self) -> bool:
        """Whether Keras' `fit` overwrites the weights with their moving averages at its end."""
        optimizer = optimizer_of(self._model())
        return bool(getattr(optimizer, "use_ema", False))

    def _salt_seeds(self) -> None:
        """Gives each device its own dropout masks; worker 0's first keeps those of plain Keras."""
        for seed in self._seeds:
            on_devices = copies(seed)
            for i, variable in enumerate(on_devices):
                value = variable.numpy()
                salt = (self._worker_index * len(on_devices) + i) * _SEED_STRIDE
                value[0] = (int(value[0]) + salt) % (2**31)
                variable.assign(value)
        self._seeds = []

    # --- In the graph ---

    def count_step(self, applied: tf.Tensor | bool) -> None:
        """Counts a batch, and a local step if an update was applied; exchanges if one is due.

        Graph or eager. Which periods and phases there are is not in the graph: it asks the
        segment.
        """
        batches = self.batches.assign_add(1)
        steps = self.steps.assign_add(tf.cast(applied, tf.int64))
        due = tf.logical_and(
            self._step_exchanges.read_value(), ops.is_due(self.segment.handle, steps, batches)
        )
        outcome = tf.cond(
            due,
            lambda: self._exchange_in_graph(steps, batches),
            lambda: tf.constant(ops.UNCHANGED),
        )
        if self._variables.are_on_host and not tf.executing_eagerly():
            _keep_as_one_op(outcome)

    def _exchange_in_graph(self, steps: tf.Tensor, batches: tf.Tensor) -> tf.Tensor:
        values = self._variables.read_tensors()
        outcome, results = ops.exchange(self.segment.handle, steps, batches, values)

        def move() -> tf.Tensor:
            self._variables.move(values, results)
            return outcome

        def replace() -> tf.Tensor:
            self._variables.take(results)
            return outcome

        return tf.cond(
            tf.equal(outcome, ops.MOVED),
            move,
            lambda: tf.cond(tf.equal(outcome, ops.REPLACED), replace, lambda: outcome),
        )


def _keep_as_one_op(result: tf.Tensor) -> None:
    """Keeps a `tf.cond` one op of the graph, by its result.

    Else TensorFlow makes it a switch for each variable that a branch uses, and all of them are
    looked at in every step: 95 us for 100 variables, instead of 23. As one op its branches run
    on its own device only, the host.
    """
    op = result.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type == "If":
        op._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))


def _variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    return tf.Variable(value, dtype=dtype, trainable=False, name=name)
