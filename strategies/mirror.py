"""ModelMirror: one model's weights, mirrored in a segment of the box."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_smb import ops
from tf_smb.box import Client, Segment
from tf_smb.errors import FailedPreconditionError
from tf_smb.rules import DeltaAveraging, ExchangeRule

# A salt large enough that workers' seeds do not meet by counting up.
_SEED_STRIDE = 1_000_003
# A communication period that no training reaches.
_NEVER = 2**62


def mirrored_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables that the box mirrors: all float weights, in order.

    Integers (a Normalization layer's count), seeds, metrics and optimizer slots are not among
    them. The order does not depend on `trainable`, so freezing a layer changes nothing.

    Raises:
        FailedPreconditionError: The model has none, or one that is not float32.
    """
    variables = []
    for variable in model.weights:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if "float" not in dtype:
            continue
        if dtype != "float32":
            raise FailedPreconditionError(
                f"variable '{variable.path}' is {dtype}; this version of tf_smb mirrors float32 "
                "weights only: mixed precision (a policy such as 'mixed_bfloat16') keeps them so "
                "[SMB-E418]"
            )
        variables.append(variable)
    if not variables:
        raise FailedPreconditionError(
            f"model '{model.name}' has no float weights to train [SMB-E419]"
        )
    return variables


class ModelMirror:
    """Keeps one model and its segment together.

    Not thread-safe: one thread trains a model.

    Attributes:
        segment: The segment, attached; joined once `start` ran.
        steps: int64 variable: local steps that applied an update.
        communication_period: int64 variable: steps between exchanges; may be assigned at any
            time, without retracing.
    """

    def __init__(
        self,
        model: keras.Model,
        client: Client,
        segment_name: str,
        rule: ExchangeRule,
        num_workers: int,
        worker_index: int,
        on_existing: str,
        exchange_threads: int,
    ) -> None:
        self._keras_variables = mirrored_variables(model)
        self._seeds = [
            variable
            for variable in model.variables
            if variable.path.endswith("seed_generator_state")
        ]
        self._rule = rule
        self._worker_index = worker_index
        layout = [(variable.path, tuple(variable.shape)) for variable in self._keras_variables]
        self.segment: Segment = client.create(
            segment_name, layout, num_workers, on_existing, exchange_threads
        )
        self._left_with: list[np.ndarray] | None = None
        self._local_at_end: list[np.ndarray] | None = None
        self.settling_steps = 0  # made at the end of fit, in lockstep with the others
        # On the host: the op that reads them is there.
        with tf.device("/cpu:0"):
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="tf_smb_steps")
            self.communication_period = tf.Variable(
                rule.communication_period, dtype=tf.int64, trainable=False, name="tf_smb_period"
            )

    # --- Weights, eagerly ---

    @property
    def variables(self) -> list[tf.Variable]:
        """The TensorFlow variables behind the model's mirrored weights."""
        return [variable.value for variable in self._keras_variables]

    def local(self) -> list[np.ndarray]:
        """Returns copies of the model's weights."""
        return [np.array(variable, np.float32, order="C") for variable in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        """Overwrites the model's weights."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    # --- A worker's life ---

    @property
    def started(self) -> bool:
        """Whether this worker is a member of the segment."""
        return self.segment.joined

    def start(self, timeout_s: float, announce: Callable[[str], None]) -> None:
        """Joins, and starts from the center: the lowest worker's weights.

        Raises:
            AlreadyExistsError: A live worker has this index.
        """
        values = self.local()
        if not self.segment.start(
            values, self._worker_index, self._rule, timeout_s=timeout_s, announce=announce
        ):
            self.assign(values)
        self._salt_seeds()

    def resume(self, is_chief: bool, announce: Callable[[str], None]) -> None:
        """Begins another `fit`: weights that the user changed since the last one are noticed.

        The chief's become the center, the other workers take it.
        """
        if self._left_with is None:
            return
        local = self.local()
        same = all(np.array_equal(a, b) for a, b in zip(local, self._left_with, strict=True))
        self._left_with = None
        if same:
            return
        if is_chief:
            announce("tf_smb: the weights were changed since the last fit: they are the new center")
            self.segment.write(local)
        else:
            announce(
                "tf_smb: the weights were changed since the last fit: this worker takes the "
                "center, which the chief sets"
            )
            self.segment.read_into(local)
            self.assign(local)
        self.segment.rebase(local)

    def finish(self, timeout_s: float, announce: Callable[[str], None]) -> int:
        """Puts the last progress into the center, meets the others there, and takes it.

        Returns:
            The fewest steps that any worker made in this training: the same number on all.
        """
        self._local_at_end = self.local()
        values = [value.copy() for value in self._local_at_end]
        self.segment.exchange(values, int(self.steps))
        fewest_steps = self.segment.meet(values, timeout_s=timeout_s, announce=announce)
        self.assign(values)
        self._left_with = values
        return fewest_steps

    @contextmanager
    def lockstep(
        self, timeout_s: float, announce: Callable[[str], None]
    ) -> Iterator[Callable[[], None]]:
        """Within it the step does not exchange; the function it gives makes a synchronous round.

        A round: every worker adds its share of its progress since the last one, and takes the
        mean of all. Begins where `finish` ended.
        """
        period = int(self.communication_period)
        self.communication_period.assign(_NEVER)
        self.segment.set_rule(DeltaAveraging())
        self.segment.rebase(self._left_with or self.local())

        def meet() -> None:
            values = self.local()
            self.segment.exchange(values, int(self.steps))
            self.segment.meet(values, timeout_s=timeout_s, announce=announce)
            self.assign(values)
            self._left_with = values

        try:
            yield meet
        finally:
            self.communication_period.assign(period)
            self.segment.set_rule(self._rule)

    def end(self, keep_local: bool) -> None:
        """Leaves the model with the center, or with its own weights of the end of training."""
        if keep_local and self._local_at_end is not None:
            self.assign(self._local_at_end)
            self._left_with = self._local_at_end
        self._local_at_end = None

    def leave_alone(self, keep_local: bool) -> bool:
        """Ends training before the others do; False, and nothing done, if no other trains."""
        local = self.local()
        values = [value.copy() for value in local]
        self.segment.exchange(values, int(self.steps))
        if not self.segment.leave_unless_last():
            return False
        self.segment.read_into(values)
        self._left_with = local if keep_local else values
        self.assign(self._left_with)
        return True

    def exchange(self) -> str:
        """Exchanges now, eagerly; returns what happened, as `Segment.exchange`."""
        values = self.local()
        outcome = self.segment.exchange(values, int(self.steps))
        if outcome == "moved":
            self.assign(values)
        return outcome

    @contextmanager
    def center_weights(self) -> Iterator[None]:
        """Within it the model holds the center; afterwards its own weights again."""
        local = self.local()
        self.assign(self.segment.read())
        try:
            yield
        finally:
            self.assign(local)

    def _salt_seeds(self) -> None:
        """Gives each worker's dropout its own masks; worker 0 keeps the seeds of plain Keras."""
        for seed in self._seeds:
            value = np.array(seed)
            value[0] = (int(value[0]) + self._worker_index * _SEED_STRIDE) % (2**31)
            seed.assign(value)
        self._seeds = []

    # --- In the graph ---

    def count_step(self, applied: tf.Tensor) -> None:
        """Counts a local step if its update was applied, and exchanges when one is due.

        Graph or eager. The exchange itself runs when the period divides the step count.
        """
        self.steps.assign_add(tf.cast(applied, tf.int64))
        due = tf.logical_and(
            applied, tf.equal(tf.math.floormod(self.steps, self.communication_period), 0)
        )
        tf.cond(due, self._exchange_in_graph, lambda: tf.constant(ops.UNCHANGED))

    def _exchange_in_graph(self) -> tf.Tensor:
        variables = self.variables
        outcome, deltas = ops.exchange(
            self.segment.handle,
            self.steps.read_value(),
            [variable.read_value() for variable in variables],
        )

        def apply() -> tf.Tensor:
            for variable, delta in zip(variables, deltas, strict=True):
                variable.assign_sub(delta, read_value=False)
            return outcome

        return tf.cond(tf.equal(outcome, ops.MOVED), apply, lambda: outcome)
