"""The chief kills itself in its first epoch, before any evaluation of the center."""

import os
import signal
import time

import common
import keras

import tf_smb

keras.utils.set_random_seed(2)
strategy = tf_smb.SMBStrategy()
with strategy.scope():
    model = common.dense()
    model.compile("sgd", "mse", metrics=["mae"])


class Die(keras.callbacks.Callback):
    """The others are through with their epoch long before, and wait."""

    def on_train_batch_end(self, batch, logs=None):
        if strategy.worker_index == 0:
            time.sleep(0.5)
            if batch == 8:
                os.kill(os.getpid(), signal.SIGKILL)


x, y = common.data()
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    callbacks=[Die(), tf_smb.callbacks.EvaluateCenter((x, y))],
)
common.result(strategy, history=history.history, digest=common.digest(model))
