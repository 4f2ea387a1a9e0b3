"""One worker writes the center by steps, and what the center was beside it."""

import sys
from pathlib import Path

import common
import keras
import numpy as np

import tf_smb

folder = Path(sys.argv[1])
keras.utils.set_random_seed(3)
strategy = tf_smb.SMBStrategy(rule=tf_smb.DeltaAveraging(communication_period=5))
with strategy.scope():
    model = common.dense()
    model.compile("adam", "mse", jit_compile="jit" in sys.argv)


class Beside(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        written = sorted(folder.glob("*.weights.h5"), key=lambda path: path.stat().st_mtime_ns)
        if written and not written[-1].with_suffix(".npz").exists():
            center = strategy.mirror(model).segment.read()
            np.savez(written[-1].with_suffix(".npz"), *center)


x, y = common.data()
callbacks = [
    tf_smb.callbacks.CenterCheckpoint(folder / "{step:04d}.weights.h5", every_steps=7, keep=3),
    Beside(),
]
if "jit" in sys.argv:
    callbacks.append(tf_smb.callbacks.ExchangeAtBatchEnd())
model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
common.result(strategy, steps=int(strategy.mirror(model).steps), info=strategy.run_info(model))
