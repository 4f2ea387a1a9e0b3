"""Evaluates the center where all meet in every step, and the chief's epochs are the longest."""

import common
import keras

import tf_smb
from tf_smb.callbacks import EvaluateCenter, ExchangeLogger, ProgressAlignment

keras.utils.set_random_seed(4)
strategy = tf_smb.SMBStrategy(
    schedule=tf_smb.Schedule(
        [(0, tf_smb.PeriodicAveraging(1)), (2, tf_smb.DeltaAveraging(4))], unit="epoch"
    )
)
with strategy.scope():
    model = common.dense()
    model.compile(keras.optimizers.SGD(0.01), "mse")
phases = []
x, y = common.data(samples=3 * 64 + 1)  # the chief has one batch more in each epoch
history = model.fit(
    x,
    y,
    batch_size=16,
    epochs=4,
    verbose=0,
    callbacks=[
        ProgressAlignment("all"),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: phases.append(strategy.mirror(model).segment.phase)
        ),
        ExchangeLogger(),
        EvaluateCenter((x, y), every=2),
    ],
)
common.result(
    strategy,
    history=history.history,
    phases=phases,
    digest=common.digest(model),
    info=strategy.run_info(model),
)
