"""What the test scripts share: small models, data, and the RESULT line."""

import hashlib
import json

import keras
import numpy as np


def data(samples=512, features=8, seed=0):
    """Returns a learnable regression problem, the same on all workers."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(samples, features)).astype("float32")
    y = (x @ np.arange(1, features + 1, dtype="float32"))[:, None] / features
    return x, y


def dense(features=8):
    return keras.Sequential(
        [
            keras.layers.Input((features,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def digest(model):
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(value).tobytes() for value in model.get_weights())
    ).hexdigest()


def result(strategy, **values):
    print("RESULT " + json.dumps({"worker": strategy.worker_index, **values}), flush=True)
