"""Worker 0 sees digits 0 to 4, worker 1 digits 5 to 9; then each says what its model knows."""

import sys

import common
import keras
import numpy as np

import tf_smb

with np.load(sys.argv[1]) as file:
    x, y = file["x_train"] / np.float32(255), file["y_train"].astype("int32")
    x_test, y_test = file["x_test"] / np.float32(255), file["y_test"].astype("int32")

keras.utils.set_random_seed(3)
strategy = tf_smb.SMBStrategy(data="replicate")
mine = (y < 5) if strategy.worker_index == 0 else (y >= 5)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input(x.shape[1:]),
            keras.layers.Reshape((*x.shape[1:], 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
model.fit(x[mine], y[mine], batch_size=64, epochs=1, verbose=2)
accuracy = model.evaluate(x_test, y_test, batch_size=500, verbose=0)[1]
common.result(
    strategy,
    accuracy=float(accuracy),
    digest=common.digest(model),
    exchanges=int(strategy.stats()["exchanges"]),
)
