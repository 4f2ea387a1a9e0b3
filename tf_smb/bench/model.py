"""What is measured: the shapes and values of a model, and what an exchange makes of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tf_smb.rules import DeltaAveraging, ElasticAveraging, ExchangeRule

BYTES_PER_MB = 1_000_000
DTYPES = ("float32", "float64", "float16", "bfloat16")
SAMPLE_COUNT = 64
# Arrays are filled with a block of random numbers, again and again.
_BLOCK_ELEMENTS = 1 << 16
_ALIGNMENT = 64
# Of what `fill` writes if it is asked for coarse numbers.
_COARSE_STEP = 2.0**-7
# Sums of thousands of coarse numbers times this have no rounding errors in float32.
COARSE_SCALE = 2.0**-10


def numpy_dtype(name: str) -> np.dtype:
    """Returns numpy's dtype of one of `DTYPES`.

    Raises:
        ImportError: bfloat16 without the package ml_dtypes.
    """
    if name != "bfloat16":
        return np.dtype(name)
    return np.dtype(importlib.import_module("ml_dtypes").bfloat16)


def center_dtype(name: str) -> np.dtype:
    """Returns the dtype in which the center holds a variable of this dtype."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def element_bytes(name: str) -> int:
    """Returns the bytes of an element in the worker's arrays."""
    return {"float64": 8, "float32": 4}.get(name, 2)


def element_count(params_mb: float, dtype: str) -> int:
    """Returns how many elements have so many megabytes."""
    return round(params_mb * BYTES_PER_MB / element_bytes(dtype))


def model_shapes(params_mb: float, dtype: str = "float32") -> list[tuple[int, ...]]:
    """Returns the shapes of a made-up model of `params_mb` megabytes.

    One matrix has two fifths of it, eight share most of the rest, each with a bias and two
    normalisation vectors of 64 elements; a last vector has what remains.
    """
    total = element_count(params_mb, dtype)
    shapes: list[tuple[int, ...]] = [(total * 2 // 5 // 64, 64)]
    for _ in range(8):
        shapes += [(total * 7 // 100 // 64, 64), (64,), (64,), (64,)]
    rest = total - sum(int(np.prod(shape)) for shape in shapes)
    return [*shapes, (rest,)]


def model_variables(params_mb: float, dtype: str) -> list[tuple[Any, ...]]:
    """Returns names, shapes and dtypes, as `Client.create` takes them."""
    return [
        (f"variable_{i}", shape, dtype) for i, shape in enumerate(model_shapes(params_mb, dtype))
    ]


def fill(arrays: Sequence[np.ndarray], seed: int, coarse: bool = False) -> None:
    """Overwrites the arrays with numbers from 0.5 to 1.5 that depend on `seed` only.

    Coarse ones are the same in every dtype, and add without rounding errors.
    """
    block = np.random.default_rng(seed).random(_BLOCK_ELEMENTS, np.float32) + np.float32(0.5)
    if coarse:
        block = np.round(block / _COARSE_STEP) * np.float32(_COARSE_STEP)
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, block.size):
            part = flat[start : start + block.size]
            part[:] = block[: part.size].astype(part.dtype)


def empty(count: int, dtype: Any) -> np.ndarray:
    """Returns an array as numpy allocates it, from a multiple of 64 bytes on."""
    size_bytes = count * np.dtype(dtype).itemsize
    memory = np.empty(size_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size_bytes].view(dtype)


def empty_model(params_mb: float, dtype: str, memory_dtype: np.dtype) -> list[np.ndarray]:
    """Returns arrays of `memory_dtype` for the model of `dtype`, all in one piece of memory.

    Each begins at a multiple of 64 bytes, as TensorFlow's variables do.
    """
    shapes = model_shapes(params_mb, dtype)
    sizes = [int(np.prod(shape)) for shape in shapes]
    alignment = _ALIGNMENT // memory_dtype.itemsize
    starts = np.cumsum([0] + [-(-size // alignment) * alignment for size in sizes])
    memory = empty(int(starts[-1]), memory_dtype)
    return [
        memory[start : start + size].reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def flat_bytes(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the one piece of memory that all arrays of a model lie in."""
    first, last = arrays[0], arrays[-1]
    memory = first.base
    assert memory is not None
    start = first.ctypes.data - memory.ctypes.data
    return memory[start : last.ctypes.data + last.nbytes - memory.ctypes.data]


def new_model(
    params_mb: float, seed: int, dtype: str = "float32", coarse: bool = False
) -> list[np.ndarray]:
    """Returns the arrays of a model with the values of `fill`."""
    arrays = empty_model(params_mb, dtype, numpy_dtype(dtype))
    fill(arrays, seed, coarse)
    return arrays


def make_rule(name: str) -> ExchangeRule:
    """Returns the rule of `--rule`, with its default rate."""
    return ElasticAveraging() if name == "elastic" else DeltaAveraging()


def move_rate(rule: str, workers: int) -> float:
    """Returns the rate that the core uses with so many live workers."""
    return (0.9 if rule == "elastic" else 1.0) / workers


def expected_move(
    rule: str, rate: float, x: np.ndarray, center: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what numpy makes of x and the center: the new x and the new center.

    It computes in the center's dtype, and rounds to the dtype of x.
    """
    held = center.dtype.type
    wide = x.astype(held)
    if rule == "elastic":
        moved = held(rate) * (wide - center)
        return (wide - moved).astype(x.dtype), center + moved
    new_center = center + held(rate) * (wide - last.astype(held))
    return new_center.astype(x.dtype), new_center


def _sample_indexes(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, num=min(size, SAMPLE_COUNT), dtype=np.int64)


def _samples(arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    for array in arrays:
        yield array.reshape(-1)[_sample_indexes(array.size)]


def sample(arrays: Sequence[np.ndarray]) -> list[float]:
    """Returns some elements of each array, always the same ones."""
    return [float(value) for values in _samples(arrays) for value in values]
