"""The devices of one worker: one, or several that train in step on parts of each batch.

Several devices are TensorFlow's MirroredStrategy underneath, with one difference that makes all
of Keras work on them: gradients are summed over the devices before the optimizer sees them, and
from there on each device computes the same update by itself. TensorFlow's own way is to sum and
update in the middle of the optimizer, which fails in a `tf.cond`, where gradient accumulation,
moving averages and loss scaling update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.distribute_lib import StrategyExtendedV1
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.framework import device as device_lib

from tf_smb.errors import InvalidArgumentError
from tf_smb.strategies.step_functions import optimizers_of

# Of this thread: a replica's. Whether it is inside an optimizer that has its gradients summed.
_thread = threading.local()


def choose_devices(devices: Sequence[str] | None) -> list[str]:
    """Returns the devices to train on: those given, else the first GPU, else the CPU.

    Raises:
        InvalidArgumentError: Not a list of devices that are here, each once.
    """
    if devices is None:
        return ["/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"]
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise InvalidArgumentError(
            f"devices must be a list such as ['/gpu:0', '/gpu:1'], got {devices!r} [SMB-E403]"
        )
    here = [device.name for device in tf.config.list_logical_devices() if _computes(device)]
    chosen = [_short_name(device) for device in devices]
    known = [_short_name(name) for name in here]
    for given, name in zip(devices, chosen, strict=True):
        if name not in known:
            raise InvalidArgumentError(
                f"there is no device {given!r} here: devices may name "
                f"{', '.join(repr(name) for name in known)} [SMB-E404]"
            )
        if chosen.count(name) > 1:
            raise InvalidArgumentError(
                f"devices names {given!r} more than once: {list(devices)!r} [SMB-E405]"
            )
    return chosen


def _computes(device: Any) -> bool:
    return device.device_type in ("CPU", "GPU")


def _short_name(device: Any) -> str:
    """Returns '/gpu:0' for '/job:localhost/replica:0/task:0/device:GPU:0'; '' for no device."""
    try:
        spec = device_lib.DeviceSpec.from_string(device)
    except (ValueError, TypeError, AttributeError):
        return ""
    if spec.device_type is None:
        return ""
    return f"/{spec.device_type.lower()}:{spec.device_index or 0}"


def extended_for(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> Any:
    """Returns what makes a `tf.distribute.Strategy` one of these devices."""
    if len(devices) == 1:
        return OneDeviceExtended(strategy, devices[0])
    return _DevicesInStep(strategy, devices)


def _reduction(devices: Sequence[str]) -> Any:
    gpus = all(device.startswith("/gpu") for device in devices)
    # Two logical devices on one GPU cannot talk to each other by NCCL.
    whole = len(tf.config.list_logical_devices("GPU")) == len(
        tf.config.list_physical_devices("GPU")
    )
    if gpus and whole:
        return tf.distribute.NcclAllReduce()
    return tf.distribute.ReductionToOneDevice()


class _DevicesInStep(MirroredExtended):
    """Several devices, whose variables each change by themselves once gradients are summed."""

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]) -> None:
        super().__init__(strategy, devices=list(devices), cross_device_ops=_reduction(devices))

    def _use_merge_call(self) -> bool:
        return False

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        aggregation = kwargs.get("aggregation")
        if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            # The optimizer's step counter: counted on each device, without a broadcast, which
            # cannot be in a tf.cond.
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        elif aggregation == tf.VariableAggregation.SUM and kwargs.get("synchronization") in (
            None,
            tf.VariableSynchronization.AUTO,
        ):
            # Metrics of Keras before it said so itself; else their sums double at every step.
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
        return super()._create_variable(next_creator, **kwargs)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if getattr(_thread, "summed", False):
            return value
        return StrategyExtendedV1._replica_ctx_all_reduce(self, reduce_op, value, options)

    def _get_cross_device_ops(self, value: Any) -> Any:
        del value
        return self._cross_device_ops


@contextmanager
def summing_gradients_first(model: keras.Model) -> Iterator[None]:
    """Within it the model's optimizers sum gradients over the devices before anything else."""
    with ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(_summing_first(optimizer))
        yield


@contextmanager
def _summing_first(optimizer: Any) -> Iterator[None]:
    apply = optimizer.apply

    def summed_and_applied(grads: Any, trainable_variables: Any = None) -> Any:
        if getattr(_thread, "summed", False) or tf.distribute.in_cross_replica_context():
            return apply(grads, trainable_variables)
        summed = _summed(list(grads))
        _thread.summed = True
        try:
            return apply(summed, trainable_variables)
        finally:
            _thread.summed = False

    # Past Keras' tracking of attributes: for the length of a step.
    optimizer.__dict__["apply"] = summed_and_applied
    try:
        yield
    finally:
        del optimizer.__dict__["apply"]


def _summed(gradients: list[Any]) -> list[Any]:
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if present:
        values = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, [gradients[i] for i in present]
        )
        for i, value in zip(present, values, strict=True):
            gradients[i] = value
    return gradients


def with_no_empty_part(batch: Any) -> Any:
    """Returns a batch divided over the devices, its empty parts replaced with its first one.

    A last batch of fewer samples than devices leaves devices without any, and means over
    nothing, such as BatchNormalization's, would be NaN.
    """
    flat = tf.nest.flatten(batch)
    at = [i for i, value in enumerate(flat) if value is not None]
    if not at or not all(_has_rows(flat[i]) for i in at):
        return batch
    parts = list(zip(*(flat[i].values for i in at), strict=True))  # a device's, in one tuple
    if all(value.shape[0] for part in parts for value in part):  # known, and not 0
        return batch
    first = parts[0]
    filled = [first]
    for own in parts[1:]:
        empty = tf.equal(tf.shape(own[0])[0], 0)
        filled.append(tf.cond(empty, lambda: first, lambda own=own: own))
    for i, *values in zip(at, *filled, strict=True):
        flat[i] = distribute_utils.regroup(tuple(values))
    return tf.nest.pack_sequence_as(batch, flat)


def _is_divided(value: Any) -> bool:
    return isinstance(value, tf.distribute.DistributedValues) and isinstance(
        value, tf.__internal__.CompositeTensor
    )


def _has_rows(value: Any) -> bool:
    return _is_divided(value) and all(
        isinstance(part, tf.Tensor) and part.shape.rank for part in value.values
    )


def first_part(batch: Any) -> Any:
    """Returns the first device's part of a batch."""
    return tf.nest.map_structure(
        lambda value: value.values[0] if _is_divided(value) else value, batch
    )
