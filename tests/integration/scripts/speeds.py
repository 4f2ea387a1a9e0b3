"""Workers of three speeds train and export to one path; the first epoch's start is told."""

import sys
import time

import common
import keras
import tensorflow as tf

import tf_smb

keras.utils.set_random_seed(5)
strategy = tf_smb.SMBStrategy()
with strategy.scope():
    model = common.dense()
    model.compile("sgd", "mse")


class Speed(keras.callbacks.Callback):
    start = None

    def on_train_batch_begin(self, batch, logs=None):
        if self.start is None:
            self.start = common.digest(self.model)
        time.sleep((0.0, 0.004, 0.012)[strategy.worker_index % 3])


x, y = common.data()
speed = Speed()
history = model.fit(x, y, batch_size=8, epochs=3, callbacks=[speed])
model.export(sys.argv[1], verbose=False)
model.save(sys.argv[1] + ".keras")
local = model.predict(x[:16], verbose=0)
exported = None
if strategy.is_chief:
    loaded = tf.saved_model.load(sys.argv[1])
    exported = float(abs(loaded.serve(x[:16]).numpy() - local).max())
common.result(
    strategy,
    digest=common.digest(model),
    start=speed.start,
    exported=exported,
    epochs=len(history.history["loss"]),
)
