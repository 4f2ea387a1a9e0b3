"""The callbacks of a fit: which may be there, and in which order they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import keras
import tensorflow as tf

from tf_smb.callbacks import EvaluateCenter, ProgressAlignment, SMBCallback
from tf_smb.errors import InvalidArgumentError
from tf_smb.strategies import data
from tf_smb.strategies.fit_record import FitRecord

# Where callbacks that are not of tf_smb stand.
_USERS = 50

_Kind = TypeVar("_Kind")


def in_order(callbacks: list[Any]) -> list[Any]:
    """Returns them sorted: those that add to the logs first; otherwise in the user's order.

    Callbacks that watch the center's evaluation find out whether more or less of it is better, and
    an EarlyStopping is asked only where there is a new one.
    """
    ordered = sorted(callbacks, key=lambda callback: getattr(callback, "tf_smb_order", _USERS))
    evaluator = find(ordered, EvaluateCenter)
    if evaluator is None:
        return ordered
    watching = [callback for callback in ordered if _watches(callback, evaluator)]
    # Not a subclass of EarlyStopping, which may do more than watch.
    asked = {
        callback: _AskedWhenNew(callback, evaluator)
        for callback in watching
        if type(callback) is keras.callbacks.EarlyStopping
    }
    ordered.insert(ordered.index(evaluator) + 1, _ChooseDirections(watching, evaluator.prefix))
    return [asked.get(callback, callback) for callback in ordered]


def check(callbacks: list[Any]) -> None:
    """Refuses callbacks that cannot work under an SMBStrategy.

    Raises:
        InvalidArgumentError: Keras' own BackupAndRestore, or two of a kind that can be there once.
    """
    if any(type(callback) is keras.callbacks.BackupAndRestore for callback in callbacks):
        raise InvalidArgumentError(
            "keras.callbacks.BackupAndRestore brings back one process, not a worker among others: "
            "use tf_smb.callbacks.BackupAndRestore instead [SMB-E430]"
        )
    kinds = Counter(
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, SMBCallback) and callback.one_of_a_kind
    )
    for name, count in kinds.items():
        if count > 1:
            raise InvalidArgumentError(
                f"fit was given {count} {name} callbacks: give one [SMB-E431]"
            )


def find(callbacks: list[Any], kind: type[_Kind]) -> _Kind | None:
    """Returns the first callback of a class; None if there is none."""
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def hand_out(callbacks: list[Any], record: FitRecord) -> None:
    """Gives the callbacks of tf_smb what is known of the model's fits."""
    for callback in callbacks:
        if isinstance(callback, SMBCallback):
            callback.record = record


def plan_end(callbacks: list[Any], arguments: dict[str, Any], initial_epoch: int) -> None:
    """Lets ProgressAlignment end the fit, where it is to go beyond its epochs.

    Args:
        callbacks: Of the fit.
        arguments: Of the fit; `epochs` is changed.
        initial_epoch: As the user gave it.
    """
    alignment = find(callbacks, ProgressAlignment)
    if alignment is None:
        return
    arguments["epochs"] = alignment.plan(
        initial_epoch,
        int(arguments["epochs"]),
        is_repeatable(arguments["x"]),
        arguments["steps_per_epoch"],
    )


def is_repeatable(x: Any) -> bool:
    """Whether training data can be gone through any number of times."""
    return data.is_arrays(x) or isinstance(x, tf.data.Dataset | keras.utils.PyDataset)


def _watches(callback: Any, evaluator: EvaluateCenter) -> bool:
    return str(getattr(callback, "monitor", "")).startswith(evaluator.prefix)


class _ChooseDirections(keras.callbacks.Callback):
    """Decides for `mode="auto"` whether more or less is better, as Keras does for `val_` names.

    Args:
        callbacks: Keras callbacks that watch the center's evaluation.
        prefix: Of the names there.
    """

    def __init__(self, callbacks: list[Any], prefix: str) -> None:
        super().__init__()
        self._callbacks = callbacks
        self._prefix = prefix

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # Not before: the model has its metrics by now.
        for callback in self._callbacks:
            if getattr(callback, "monitor_op", 0) is None:
                self._choose(callback)

    def _choose(self, callback: Any) -> None:
        monitor = callback.monitor
        callback.monitor = "val_" + monitor.removeprefix(self._prefix)
        try:
            callback._set_monitor_op()
        except ValueError:
            pass  # the callback itself says so, with the name that the user gave
        finally:
            callback.monitor = monitor


class _AskedWhenNew(keras.callbacks.Callback):
    """An EarlyStopping that counts evaluations of the center, not this worker's epochs.

    A fast worker ends several epochs while the chief, which evaluates, ends one: it would take
    the same value again for no improvement.

    Args:
        inner: The EarlyStopping.
        evaluator: Knows whether there was a new evaluation; is called before.
    """

    def __init__(self, inner: keras.callbacks.EarlyStopping, evaluator: EvaluateCenter) -> None:
        super().__init__()
        self._inner = inner
        self._evaluator = evaluator

    def set_params(self, params: Any) -> None:
        self._inner.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._inner.set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        self._inner.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._inner.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._evaluator.is_new:
            self._inner.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._inner.on_train_end(logs)
