"""Which variables of a model the box mirrors, and how they are read and written on all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_smb.errors import FailedPreconditionError, InvalidArgumentError

VariableFilter = Callable[[Any], bool]

_DTYPES = ("float32", "float64", "float16", "bfloat16")


def check_filter(variable_filter: VariableFilter | None) -> VariableFilter | None:
    """Returns the filter.

    Raises:
        InvalidArgumentError: It cannot be called.
    """
    if variable_filter is not None and not callable(variable_filter):
        raise InvalidArgumentError(
            "variable_filter must be a function of a keras.Variable that returns True or False, "
            f"got {variable_filter!r} [SMB-E408]"
        )
    return variable_filter


def choose_variables(model: keras.Model, variable_filter: VariableFilter | None) -> list[Any]:
    """Returns the Keras variables that the box mirrors: float weights, in the model's order.

    Integers (a Normalization layer's count), seeds, metrics and optimizer slots are not among
    them. The order does not depend on `trainable`, so freezing a layer changes nothing.

    Args:
        model: The model, built.
        variable_filter: Those for which it is false are left out. None: none is.

    Raises:
        FailedPreconditionError: None is left, or one is of a float type that no segment can hold.
        InvalidArgumentError: The filter's answer is not a bool.
    """
    found = [variable for variable in model.weights if "float" in _dtype(variable)]
    if not found:
        raise FailedPreconditionError(
            f"model '{model.name}' has no float weights to train [SMB-E419]"
        )
    chosen = [variable for variable in found if _passes(variable_filter, variable)]
    if not chosen:
        raise FailedPreconditionError(
            f"variable_filter is false for all {len(found)} float weights of model "
            f"'{model.name}', so nothing is left to mirror [SMB-E409]"
        )
    for variable in chosen:
        if _dtype(variable) not in _DTYPES:
            raise FailedPreconditionError(
                f"variable '{variable.path}' is {_dtype(variable)}; the box mirrors "
                f"{', '.join(_DTYPES)}: leave it out by variable_filter, or give its layer "
                "another dtype [SMB-E418]"
            )
    return chosen


def is_statistic(model: keras.Model, variables: Sequence[Any]) -> list[bool]:
    """Whether each variable was made as non-trainable: moving means and variances, and the like.

    A weight that was made to be trained and is frozen now is none.
    """
    made_so = {
        id(variable)
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
    }
    return [id(variable) in made_so for variable in variables]


def _dtype(variable: Any) -> str:
    return str(keras.backend.standardize_dtype(variable.dtype))


def _passes(variable_filter: VariableFilter | None, variable: Any) -> bool:
    if variable_filter is None:
        return True
    answer = variable_filter(variable)
    if not isinstance(answer, bool | np.bool_):
        raise InvalidArgumentError(
            f"variable_filter must return True or False, got {answer!r} for variable "
            f"'{variable.path}' [SMB-E421]"
        )
    return bool(answer)


def copies(variable: Any) -> tuple[tf.Variable, ...]:
    """Returns the TensorFlow variables behind a Keras variable: one on each device."""
    value = variable.value
    return value.values if isinstance(value, tf.distribute.DistributedValues) else (value,)


class MirroredVariables:
    """A model's mirrored variables as one list of values, whatever devices they are on.

    Copies of a weight are equal on all devices of a worker. Statistics differ, each device's
    being of its part of the batch: their mean is what is read, and all get what is written.

    Args:
        model: The model, built.
        variable_filter: See `choose_variables`.

    Attributes:
        layout: Name, shape and dtype of each.
        statistics: Whether each is a statistic.
        are_on_host: Whether all are on the first CPU, one copy of each.
    """

    def __init__(self, model: keras.Model, variable_filter: VariableFilter | None = None) -> None:
        self._variables = choose_variables(model, variable_filter)
        self._copies = [copies(variable) for variable in self._variables]
        self.statistics = is_statistic(model, self._variables)
        self.are_on_host = all(
            len(on_devices) == 1 and on_devices[0].device.endswith("CPU:0")
            for on_devices in self._copies
        )
        self.layout = [
            (variable.path, tuple(variable.shape), _dtype(variable)) for variable in self._variables
        ]

    def are_of(self, model: keras.Model, variable_filter: VariableFilter | None) -> bool:
        """Whether these are the model's variables still; `enable_lora` for one adds some."""
        now = choose_variables(model, variable_filter)
        return [id(variable) for variable in now] == [id(variable) for variable in self._variables]

    # --- Eagerly ---

    def read(self) -> list[np.ndarray]:
        """Returns copies of the values."""
        return [np.asarray(value.numpy(), order="C") for value in self.read_tensors()]

    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Overwrites the variables with these very values."""
        self.assign_tensors(values)

    def take(self, values: Sequence[Any]) -> None:
        """Overwrites the variables, and applies their constraints. Eagerly or in a graph."""
        self.assign_tensors(values)
        self._constrain()

    # --- Eagerly or in a graph ---

    def read_tensors(self) -> list[tf.Tensor]:
        """Returns the values as tensors."""
        return [
            _mean_of(on_devices) if statistic else on_devices[0].read_value()
            for on_devices, statistic in zip(self._copies, self.statistics, strict=True)
        ]

    def assign_tensors(self, values: Sequence[Any]) -> None:
        """Overwrites the variables on all devices."""
        for on_devices, value in zip(self._copies, values, strict=True):
            for variable in on_devices:
                with tf.device(variable.device):
                    variable.assign(value, read_value=False)

    def move(self, values: Sequence[tf.Tensor], deltas: Sequence[tf.Tensor]) -> None:
        """Subtracts the deltas from the values that were read, and applies the constraints."""
        parts = zip(self._copies, self.statistics, values, deltas, strict=True)
        for on_devices, statistic, value, delta in parts:
            for variable in on_devices:
                with tf.device(variable.device):
                    if statistic:  # was another one on each device
                        variable.assign(value - delta, read_value=False)
                    else:
                        variable.assign_sub(delta, read_value=False)
        self._constrain()

    def _constrain(self) -> None:
        for variable, on_devices in zip(self._variables, self._copies, strict=True):
            if variable.constraint is None:
                continue
            for copy in on_devices:
                with tf.device(copy.device):
                    copy.assign(variable.constraint(copy.read_value()), read_value=False)


def _mean_of(on_devices: Sequence[tf.Variable]) -> tf.Tensor:
    if len(on_devices) == 1:
        return on_devices[0].read_value()
    with tf.device(on_devices[0].device):
        return tf.add_n([variable.read_value() for variable in on_devices]) / len(on_devices)
