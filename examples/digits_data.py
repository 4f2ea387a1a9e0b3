"""Where the examples' digits come from."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import numpy as np

Split = tuple[np.ndarray, np.ndarray]


def load(path: str | None = None) -> tuple[Split, Split, str]:
    """Returns (x_train, y_train), (x_test, y_test) and the data's name.

    Args:
        path: An .npz file with x_train, y_train, x_test, y_test. None: Keras' download of MNIST,
            or else scikit-learn's digits.

    Returns:
        Images as float32 in [0, 1] with one channel; labels as int32.
    """
    if path is not None:
        with np.load(path) as file:
            train, test = (file["x_train"], file["y_train"]), (file["x_test"], file["y_test"])
        return _prepared(train, 255.0), _prepared(test, 255.0), Path(path).name
    mnist = _keras_mnist()
    if mnist is not None:
        return _prepared(mnist[0], 255.0), _prepared(mnist[1], 255.0), "MNIST"
    print("MNIST cannot be downloaded here: using scikit-learn's 1,797 digits of 8 x 8", flush=True)
    return _scikit_learn_digits()


def enough_epochs(num_samples: int) -> int:
    """Returns how many epochs train the example's network well."""
    return 3 if num_samples > 10_000 else 40


def _prepared(split: Split, brightest: float) -> Split:
    images, labels = split
    return (images / brightest).astype("float32")[..., np.newaxis], labels.astype("int32")


def _keras_mnist() -> tuple[Split, Split] | None:
    import keras

    # One worker downloads, the others then find the file.
    with open(Path(tempfile.gettempdir()) / "tf_smb_mnist.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return keras.datasets.mnist.load_data()
        except Exception as error:  # keras.utils.get_file raises a bare Exception offline
            print(f"MNIST: {error}", flush=True)
            return None


def _scikit_learn_digits() -> tuple[Split, Split, str]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.images[order], digits.target[order]
    held_out = len(labels) // 5
    train = _prepared((images[held_out:], labels[held_out:]), 16.0)
    test = _prepared((images[:held_out], labels[:held_out]), 16.0)
    return train, test, "scikit-learn's digits"
