"""The one place that changes Keras: `fit`, `save`, `save_weights` and `export` of keras.Model.

A model of an SMBStrategy trains on its share of the data, meets the other workers at the end of
`fit`, and is written once, by the chief. All other models behave as before.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from tf_smb.errors import FailedPreconditionError
from tf_smb.strategies import writing
from tf_smb.strategies.fit_session import FitSession, PlainSession

if TYPE_CHECKING:
    from tf_smb.strategies.strategy import SMBStrategy

_strategies: weakref.WeakSet[SMBStrategy] = weakref.WeakSet()
# Models in a fit whose callback exchanges, instead of the step.
_at_batch_end: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def register_strategy(strategy: SMBStrategy) -> None:
    """Makes a strategy known, so that a model made outside its scope can be told so."""
    _strategies.add(strategy)


def exchanges_at_batch_end(model: keras.Model) -> bool:
    """Whether the callback ExchangeAtBatchEnd exchanges for this model, and the step does not."""
    return model in _at_batch_end


def set_exchanges_at_batch_end(model: keras.Model, at_batch_end: bool) -> None:
    """Says who exchanges during the present fit."""
    (_at_batch_end.add if at_batch_end else _at_batch_end.discard)(model)


def install() -> None:
    """Wraps the methods; a second call changes nothing."""
    if getattr(keras.Model.fit, "_tf_smb", False):
        return
    _wrap("fit", _fit)
    for name in ("save", "save_weights", "export"):
        _wrap(name, _write_once)


def _wrap(name: str, hook: Callable[..., Any]) -> None:
    original = getattr(keras.Model, name)

    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        return hook(self, original, *args, **kwargs)

    method._tf_smb = True  # type: ignore[attr-defined]
    setattr(keras.Model, name, method)


def strategy_of(model: keras.Model) -> SMBStrategy | None:
    """Returns the SMBStrategy that the model was made in; None for any other model."""
    strategy = model.distribute_strategy
    return strategy if strategy in _strategies else None


def _fit(model: keras.Model, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    active = [candidate for candidate in _strategies if not candidate.plain]
    if strategy is None:
        if any(candidate.plain for candidate in _strategies):
            return PlainSession(model).run(original, *args, **kwargs)
        if active and active[0].exchanges:
            active[0].check_model(model)
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    del arguments["self"]
    return FitSession(strategy, model, arguments).run(original)


def _write_once(model: keras.Model, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    path = bound.arguments.get("filepath")
    if strategy is None or strategy.num_workers == 1 or not writing.is_path(path):
        return original(model, *args, **kwargs)
    if not strategy.is_chief:
        writing.say_skipped(strategy.worker_index, original.__name__, path)
        return None
    arguments = dict(bound.arguments)
    del arguments["self"]
    with writing.replacing(path) as temporary:
        arguments["filepath"] = temporary
        more = arguments.pop("kwargs", {})
        result = original(model, **arguments, **more)
    writing.say_written(original.__name__, path)
    return result


def refuse_jit_compile(model: keras.Model) -> None:
    """Refuses `jit_compile=True` without the callback that exchanges beside XLA.

    Raises:
        FailedPreconditionError: With the callback's name.
    """
    raise FailedPreconditionError(
        f"model '{model.name}' is compiled with jit_compile=True, and XLA cannot hold the "
        "exchange: add callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()] to fit, or compile with "
        "jit_compile=False [SMB-E417]"
    )
