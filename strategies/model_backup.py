"""What a backup has of a model: its weights, its optimizer's variables, and their layout."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_smb.errors import FailedPreconditionError
from tf_smb.strategies.backup_files import Backup
from tf_smb.strategies.mirror import mirrored_variables
from tf_smb.strategies.variables import copies

if TYPE_CHECKING:
    from tf_smb.strategies.mirror import ModelMirror


def values(model: keras.Model, center: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns all arrays to save, by name."""
    arrays = {f"weight{i}": value for i, value in enumerate(center)}
    arrays |= _values("other", _others(model))
    arrays |= _values("optimizer", _optimizer_variables(model))
    return arrays | _values("seed", _seeds(model))


def restore(model: keras.Model, mirror: ModelMirror, backup: Backup, folder: Path) -> None:
    """Puts a backup into a model.

    Raises:
        FailedPreconditionError: The model is not built, or it or its optimizer is another.
    """
    _check_built(model, folder)
    _check_layout(model, folder, backup.state)
    arrays = backup.arrays
    # The center has half precision weights in float32.
    dtypes = [tf.as_dtype(v.dtype).as_numpy_dtype for v in mirrored_variables(model)]
    mirror.assign([arrays[f"weight{i}"].astype(dtype) for i, dtype in enumerate(dtypes)])
    _assign("other", _others(model), arrays)
    _assign("optimizer", _optimizer_variables(model), arrays)
    _restore_seeds(model, arrays)


def _others(model: keras.Model) -> list[Any]:
    """Returns the weights that are not in the box: integers, and those of a variable_filter."""
    mirrored = {id(variable) for variable in mirrored_variables(model)}
    return [variable for variable in model.weights if id(variable) not in mirrored]


def _seeds(model: keras.Model) -> list[Any]:
    return [v for v in model.variables if v.path.endswith("seed_generator_state")]


def _values(prefix: str, variables: list[Any]) -> dict[str, np.ndarray]:
    return {f"{prefix}{i}": copies(v)[0].numpy() for i, v in enumerate(variables)}


def _assign(prefix: str, variables: list[Any], arrays: Any) -> None:
    for i, variable in enumerate(variables):
        for copy in copies(variable):
            copy.assign(arrays[f"{prefix}{i}"])


def _restore_seeds(model: keras.Model, arrays: Any) -> None:
    """Takes over how many numbers were drawn; each worker's seed stays its own."""
    for i, seed in enumerate(_seeds(model)):
        saved = arrays.get(f"seed{i}")
        for copy in copies(seed) if saved is not None else ():
            copy.assign(np.array([copy.numpy()[0], saved[1]], saved.dtype))


def _optimizer_variables(model: keras.Model) -> list[Any]:
    optimizer = model.optimizer
    if optimizer is None:
        return []
    if not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    return list(optimizer.variables)


def _description(variables: list[Any], separators: str = "/") -> list[list[Any]]:
    """Returns leaf name, shape and dtype of each: what must be the same at the next start.

    Before the last separator (a pattern) are names that Keras numbers.
    """
    return [
        [re.split(separators, v.path)[-1], list(v.shape), keras.backend.standardize_dtype(v.dtype)]
        for v in variables
    ]


def describe(model: keras.Model) -> dict[str, list[list[Any]]]:
    """Returns what must be the same at the next start, as JSON can hold it."""
    return {
        "weights": _description(mirrored_variables(model)),
        "variables": _description(_others(model)),
        # An optimizer's are called adam/sequential_1_dense_kernel_momentum.
        "optimizer": _description(_optimizer_variables(model), "[/_]"),
    }


def _check_built(model: keras.Model, folder: Path) -> None:
    if not (model.built and model.weights):
        raise FailedPreconditionError(
            f"model '{model.name}' is not built, so the backup in {folder} cannot be restored "
            "into it: call it once, or model.build(input_shape), inside "
            "'with strategy.scope():' [SMB-E442]"
        )


def _check_layout(model: keras.Model, folder: Path, state: Mapping[str, Any]) -> None:
    """Refuses a backup of another model.

    Raises:
        FailedPreconditionError: With the first difference.
    """
    for what, present in describe(model).items():
        difference = _first_difference([list(entry) for entry in state[what]], present)
        if difference:
            raise FailedPreconditionError(
                f"the backup in {folder} is of another model than '{model.name}', or of "
                f"another optimizer: of its {what}, {difference}: remove the folder to begin anew "
                "[SMB-E443]"
            )


def _first_difference(saved: list[list[Any]], present: list[list[Any]]) -> str:
    for i, (there, here) in enumerate(zip(saved, present, strict=False)):
        if there != here:
            words = [f"{name} {tuple(shape)} {dtype}" for name, shape, dtype in (there, here)]
            return f"number {i} is {words[0]} there, and {words[1]} here"
    return "" if len(saved) == len(present) else f"there are {len(saved)}, and here {len(present)}"
