"""What is measured: the shapes and values of a model, and what an exchange makes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tf_smb.rules import DeltaAveraging, ElasticAveraging, ExchangeRule

BYTES_PER_MB = 1_000_000
SAMPLE_COUNT = 64
# Arrays are filled with a block of random numbers, again and again.
_BLOCK_ELEMENTS = 1 << 16


def model_shapes(params_mb: float) -> list[tuple[int, ...]]:
    """Returns the shapes of a made-up model of `params_mb` megabytes of float32.

    One matrix has two fifths of it, eight share most of the rest, each with a bias and two
    normalisation vectors of 64 elements; a last vector has what remains.
    """
    total = round(params_mb * BYTES_PER_MB / 4)
    shapes: list[tuple[int, ...]] = [(total * 2 // 5 // 64, 64)]
    for _ in range(8):
        shapes += [(total * 7 // 100 // 64, 64), (64,), (64,), (64,)]
    rest = total - sum(int(np.prod(shape)) for shape in shapes)
    return [*shapes, (rest,)]


def model_variables(params_mb: float) -> list[tuple[str, tuple[int, ...]]]:
    """Returns names and shapes, as `Client.create` takes them."""
    return [(f"variable_{i}", shape) for i, shape in enumerate(model_shapes(params_mb))]


def fill(arrays: Sequence[np.ndarray], seed: int) -> None:
    """Overwrites the arrays with numbers from 0.5 to 1.5 that depend on `seed` only."""
    block = np.random.default_rng(seed).random(_BLOCK_ELEMENTS, np.float32) + np.float32(0.5)
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, block.size):
            part = flat[start : start + block.size]
            part[:] = block[: part.size]


def new_model(params_mb: float, seed: int) -> list[np.ndarray]:
    """Returns the arrays of a model with the values of `fill`, all in one piece of memory."""
    shapes = model_shapes(params_mb)
    sizes = [int(np.prod(shape)) for shape in shapes]
    # Each on a multiple of 64 bytes from the first.
    starts = np.cumsum([0] + [-(-size // 16) * 16 for size in sizes])
    memory = np.empty(int(starts[-1]), np.float32)
    arrays = [
        memory[start : start + size].reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]
    fill(arrays, seed)
    return arrays


def make_rule(name: str) -> ExchangeRule:
    """Returns the rule of `--rule`, with its default rate."""
    return ElasticAveraging() if name == "elastic" else DeltaAveraging()


def move_rate(rule: str, workers: int) -> np.float32:
    """Returns the rate that the core uses with so many live workers."""
    return np.float32(0.9 if rule == "elastic" else 1.0) / np.float32(workers)


def expected_move(
    rule: str, rate: np.float32, x: np.ndarray, center: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what numpy makes of x and the center: the new x and the new center."""
    if rule == "elastic":
        moved = rate * (x - center)
        return x - moved, center + moved
    new_center = center + rate * (x - last)
    return new_center, new_center


def _sample_indexes(size: int) -> np.ndarray:
    return np.linspace(0, size - 1, num=min(size, SAMPLE_COUNT), dtype=np.int64)


def _samples(arrays: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    for array in arrays:
        yield array.reshape(-1)[_sample_indexes(array.size)]


def sample(arrays: Sequence[np.ndarray]) -> list[float]:
    """Returns some elements of each array, always the same ones."""
    return [float(value) for values in _samples(arrays) for value in values]
