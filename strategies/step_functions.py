"""What `Strategy.run` was given: a training step of a Keras model, or something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

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


def optimizer_of(model: keras.Model | None) -> Any:
    """Returns a model's optimizer, without its loss scaling; None if it was not compiled."""
    return _inner(getattr(model, "optimizer", None))


def optimizers_of(model: keras.Model) -> list[Any]:
    """Returns the optimizers that a model holds: several in a GAN, for example."""
    held: list[Any] = []
    for value in list(vars(model).values()):
        if isinstance(value, list | tuple):
            held += value
        else:
            held += value.values() if isinstance(value, dict) else [value]
    found = {id(one): one for one in held if isinstance(one, keras.optimizers.Optimizer)}
    return list(found.values())


def applied_updates(model: keras.Model) -> list[tf.Tensor]:
    """Returns how many updates each of the model's optimizers applied so far.

    Counted before and after a step, it says whether an update was applied: gradient accumulation
    and loss scaling skip some.
    """
    return [
        tf.identity(tf.convert_to_tensor(_inner(optimizer).iterations))
        for optimizer in optimizers_of(model)
    ]


def is_applied(
    model: keras.Model, before: list[tf.Tensor], after: list[tf.Tensor]
) -> tf.Tensor | bool:
    """Whether a step applied an update, by the counts before and after it.

    A `train_step` may update without an optimizer of the model's: then none of them ever counts,
    and every step is one, unless they are of a kind that does not count every step.
    """
    if not after or len(before) != len(after):  # none, or one made by the step
        return True
    moved = [tf.not_equal(*counts) for counts in zip(before, after, strict=True)]
    if not any(_skips(optimizer) for optimizer in optimizers_of(model)):
        moved.append(functools.reduce(tf.logical_and, [tf.equal(count, 0) for count in after]))
    return functools.reduce(tf.logical_or, moved)


def _inner(optimizer: Any) -> Any:
    """Returns an optimizer without its loss scaling."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _skips(optimizer: Any) -> bool:
    """Whether some steps of an optimizer are no updates."""
    inner = _inner(optimizer)
    return inner is not optimizer or bool(inner.gradient_accumulation_steps)


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
