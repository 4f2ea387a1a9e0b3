"""The model of `tf-smb bench train`, its data, and the compiled loop that trains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_smb.errors import InvalidArgumentError

MOMENTUM = 0.9
# Of the training samples, at most a tenth: learning rates are chosen on them.
_HELD_OUT_SAMPLES = 5000
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_EVALUATION_BATCH = 1000
# Of the plain fit, at most: saves Keras the time between steps, changes no number.
_STEPS_PER_EXECUTION = 50

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Samples:
    """Images and their labels.

    Attributes:
        x: float32, from 0 to 1: (samples, height, width, 1).
        y: int32.
    """

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Data:
    """What is trained on, what learning rates are chosen on, and what the result is of."""

    train: Samples
    held_out: Samples
    test: Samples


def load_data(path: Path, samples: int | None = None) -> Data:
    """Returns the data of an .npz file with x_train, y_train, x_test and y_test.

    Args:
        path: The file.
        samples: How many of the training samples are used; None: all.

    Raises:
        InvalidArgumentError: Not such a file, or it has fewer samples.
    """
    try:
        with np.load(path) as file:
            x_train, y_train, x_test, y_test = (file[name] for name in _ARRAYS)
    except (OSError, ValueError, KeyError) as error:
        raise InvalidArgumentError(
            f"the data must be an .npz file with {', '.join(_ARRAYS)}, got {str(path)!r}: {error} "
            "[SMB-E475]"
        ) from None
    count = len(x_train) if samples is None else samples
    if count > len(x_train):
        raise InvalidArgumentError(
            f"there are {len(x_train)} training samples in {str(path)!r}, got --samples {count} "
            "[SMB-E476]"
        )
    split = count - min(_HELD_OUT_SAMPLES, count // 10)
    return Data(
        _samples(x_train[:split], y_train[:split]),
        _samples(x_train[split:count], y_train[split:count]),
        _samples(x_test, y_test),
    )


def _samples(x: np.ndarray, y: np.ndarray) -> Samples:
    return Samples((x[..., None] / 255).astype(np.float32), y.astype(np.int32))


def build_model(seed: int, image_shape: Sequence[int]) -> keras.Model:
    """Returns the network, with first weights that the seed decides."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(image_shape),
            layers.Conv2D(8, 5, strides=2, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(72, activation="relu"),
            layers.Dense(10),
        ]
    )


def first_weights(seed: int, train: Samples) -> Arrays:
    """Returns the weights that training begins with, as `build_model` makes them."""
    return build_model(seed, train.x.shape[1:]).get_weights()


def make_optimizer(learning_rate: float) -> keras.optimizers.Optimizer:
    """Returns the optimizer that every worker has one of."""
    return keras.optimizers.SGD(learning_rate, momentum=MOMENTUM)


def make_loss() -> keras.losses.Loss:
    """Returns what is minimized."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def divide(labels: np.ndarray, workers: int, skewed: bool) -> list[np.ndarray]:
    """Returns the numbers of each worker's samples.

    Args:
        labels: Of all samples.
        workers: How many shares to make.
        skewed: Sort by label and cut; else deal them out in turn, as `fit` does.
    """
    if skewed:
        return np.array_split(np.argsort(labels, kind="stable"), workers)
    return [np.arange(worker, len(labels), workers) for worker in range(workers)]


def make_batches(share: np.ndarray, steps: int, batch: int, seed: Sequence[int]) -> np.ndarray:
    """Returns which samples each step takes: (steps, batch), shuffled anew in every pass."""
    generator = np.random.default_rng(seed)
    passes = -(-steps * batch // len(share))
    stream = np.concatenate([generator.permutation(share) for _ in range(passes)])
    return stream[: steps * batch].reshape(steps, batch).astype(np.int32)


def seed_order(seed: int, worker_index: int) -> None:
    """Makes `fit` shuffle in an order that the seed decides, another one on each worker."""
    keras.utils.set_random_seed(1000 * seed + worker_index)


def measure(model: keras.Model, data: Data) -> dict[str, Any]:
    """Returns center_accuracy, held_out_accuracy and finite of a trained model."""
    return {
        "center_accuracy": _accuracy(model, data.test),
        "held_out_accuracy": _accuracy(model, data.held_out),
        "finite": all(bool(np.isfinite(array).all()) for array in model.get_weights()),
    }


def _accuracy(model: keras.Model, samples: Samples) -> float:
    predicted = model.predict(samples.x, batch_size=_EVALUATION_BATCH, verbose=0)
    return float(np.mean(predicted.argmax(axis=1) == samples.y))


def fit_plain(data: Data, batches: np.ndarray, learning_rate: float, seed: int) -> keras.Model:
    """Trains as Keras does without a box, by `model.fit` on these batches; returns the model."""
    model = build_model(seed, data.train.x.shape[1:])
    model.compile(
        make_optimizer(learning_rate),
        make_loss(),
        steps_per_execution=math.gcd(len(batches), _STEPS_PER_EXECUTION),
        jit_compile=False,
    )
    x, y = tf.constant(data.train.x), tf.constant(data.train.y)
    dataset = tf.data.Dataset.from_tensor_slices(batches).map(
        lambda batch: (tf.gather(x, batch), tf.gather(y, batch))
    )
    model.fit(dataset, shuffle=False, verbose=0)
    return model


class Loop:
    """Trains one model for many steps in one call; whose weights it has is passed in and out.

    So that one compiled loop serves all virtual workers, each with its own weights and momentum.

    Args:
        train: The samples, which stay inside the graph.
    """

    def __init__(self, train: Samples) -> None:
        self._model = build_model(0, train.x.shape[1:])
        self._optimizer: Any = make_optimizer(0.0)
        self._optimizer.build(self._model.trainable_variables)
        self._loss = make_loss()
        self._x, self._y = tf.constant(train.x), tf.constant(train.y)
        self._variables = [v.value for v in self._model.trainable_variables]
        self._momenta = [v.value for v in self._optimizer.momentums]
        self._compiled_train = tf.function(self._train_steps, reduce_retracing=True)

    def train(
        self, weights: Arrays, momenta: Arrays, batches: np.ndarray, learning_rate: float
    ) -> tuple[Arrays, Arrays]:
        """Makes one step on each batch, and returns the new weights and momenta."""
        self._optimizer.learning_rate.assign(learning_rate)
        state = self._compiled_train([*weights, *momenta], tf.constant(batches))
        arrays = [value.numpy() for value in state]
        return arrays[: len(weights)], arrays[len(weights) :]

    def measure(self, weights: Arrays, data: Data) -> dict[str, Any]:
        """Returns what `measure` does, of these weights."""
        self._model.set_weights(weights)
        return measure(self._model, data)

    def _train_steps(self, state: list[tf.Tensor], batches: tf.Tensor) -> list[tf.Tensor]:
        held = [*self._variables, *self._momenta]
        for variable, value in zip(held, state, strict=True):
            variable.assign(value)
        for batch in batches:
            self._step(batch)
        return [variable.read_value() for variable in held]

    def _step(self, batch: tf.Tensor) -> None:
        x, y = tf.gather(self._x, batch), tf.gather(self._y, batch)
        with tf.GradientTape() as tape:
            loss = self._loss(y, self._model(x, training=True))
        gradients = tape.gradient(loss, self._variables)
        self._optimizer.apply(gradients, self._model.trainable_variables)
