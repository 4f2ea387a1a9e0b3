"""The last worker kills itself in the middle of training; the others go on."""

import os
import signal

import common
import keras

import tf_smb

keras.utils.set_random_seed(2)
strategy = tf_smb.SMBStrategy()
with strategy.scope():
    model = common.dense()
    model.compile("sgd", "mse")


class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.worker_index == strategy.num_workers - 1 and batch == 13:
            os.kill(os.getpid(), signal.SIGKILL)


x, y = common.data()
history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Die()])
members = strategy.mirror(model).segment.members()
common.result(
    strategy,
    epochs=len(history.history["loss"]),
    digest=common.digest(model),
    states=[member.state for member in members],
)
