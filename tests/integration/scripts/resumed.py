"""A job to be killed and started again: each worker writes down what it trains on.

Arguments: the folder of the backups, a folder for the notes, seconds to sleep after each batch.
"""

import json
import os
import sys
import time
from pathlib import Path

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb

backups, notes, pause_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
SAMPLES, BATCH = 603, 5  # the last batches are ragged

keras.utils.set_random_seed(2)
strategy = tf_smb.SMBStrategy(
    schedule=tf_smb.Schedule(
        [
            (0, tf_smb.PeriodicAveraging(1)),
            (15, tf_smb.ElasticAveraging(communication_period=4)),
            (100_000, tf_smb.DeltaAveraging(communication_period=4)),
        ]
    ),
    settle_steps=0,  # which go through some data once more
)
(notes / f"{strategy.worker_index}.pid").write_text(str(os.getpid()))
note = (notes / f"{strategy.worker_index}.jsonl").open("a")
epoch_now = -1


def write_down(samples):
    note.write(json.dumps([epoch_now, samples.astype(int).tolist()]) + "\n")
    note.flush()
    return np.int64(0)


class Noting(keras.Model):
    def train_step(self, data):
        x, _ = data
        noted = tf.numpy_function(write_down, [x["number"]], tf.int64)
        with tf.control_dependencies([noted]):
            return super().train_step(data)


class Pacing(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        global epoch_now
        epoch_now = epoch

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(pause_s)


with strategy.scope():
    x, number = keras.Input((8,), name="x"), keras.Input((), name="number")
    dropped = keras.layers.Dropout(0.1)(keras.layers.Dense(16, activation="relu")(x))
    model = Noting({"x": x, "number": number}, keras.layers.Dense(1)(dropped))
    model.compile(keras.optimizers.Adam(1e-3), "mse")

x, y = common.data(SAMPLES)
history = model.fit(
    {"x": x, "number": np.arange(SAMPLES)},
    y,
    batch_size=BATCH,
    epochs=6,
    verbose=0,
    callbacks=[Pacing(), tf_smb.callbacks.BackupAndRestore(backups, every_steps=3)],
)
common.result(
    strategy,
    digest=common.digest(model),
    steps=int(strategy.stats(model)["steps"]),
    iterations=int(model.optimizer.iterations),
)
