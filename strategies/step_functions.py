"""What `Strategy.run` was given: a training step of a Keras model, or something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras

from tf_smb.errors import InvalidArgumentError


def training_model(function: Callable[..., Any]) -> keras.Model | None:
    """Returns the model whose `train_step` this is; None for evaluation and prediction.

    Keras hands `run` a bound `train_step` or `test_step`, perhaps inside a `tf.function` or a
    `functools.wraps` wrapper, and for prediction a function of its own.

    Raises:
        InvalidArgumentError: It cannot be told; the message says what to write instead.
    """
    inner = _unwrap(function)
    owner = getattr(inner, "__self__", None)
    if isinstance(owner, keras.Model):
        if inner.__name__ == "train_step":
            return owner
        if inner.__name__ in ("test_step", "predict_step"):
            return None
    if getattr(inner, "__module__", "").split(".")[0] == "keras":
        return None
    raise InvalidArgumentError(
        f"SMBStrategy.run cannot tell whether {getattr(inner, '__name__', inner)!r} trains a "
        "model: in a custom loop call your step function itself, and strategy.step(model) after it "
        "[SMB-E416]"
    )


def _unwrap(function: Callable[..., Any]) -> Any:
    """Follows tf.function, functools.wraps and functools.partial to what they wrap."""
    for _ in range(16):
        for attribute in ("python_function", "__wrapped__", "func"):
            inner = inspect.getattr_static(function, attribute, None)
            if inner is not None:
                function = getattr(function, attribute)
                break
        else:
            return function
    return function
