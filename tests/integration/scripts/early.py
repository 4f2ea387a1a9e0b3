"""Worker 1 stops early; the others train on, and the chief's files are written once."""

import sys
from pathlib import Path

import common
import keras

import tf_smb

folder = Path(sys.argv[1])
keras.utils.set_random_seed(2)
strategy = tf_smb.SMBStrategy()
with strategy.scope():
    model = common.dense()
    model.compile("sgd", "mse")


class StopEarly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.worker_index == 1 and batch == 3:
            self.model.stop_training = True


x, y = common.data()
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=4,
    verbose=0,
    callbacks=[
        StopEarly(),
        keras.callbacks.CSVLogger(str(folder / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(folder / "checkpoint.keras")),
    ],
)
was_chief = strategy.is_chief
model.export(str(folder / "export"), verbose=False)
common.result(
    strategy, epochs=len(history.history["loss"]), chief=was_chief, digest=common.digest(model)
)
