"""Workers of three speeds end together, by each of the rules."""

import time

import common
import keras

import tf_smb

x, y = common.data()
strategy = tf_smb.SMBStrategy()
outcomes = {}


class Speed(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep((0.002, 0.006, 0.018)[strategy.worker_index % 3])


def build():
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = common.dense()
        model.compile("sgd", "mse")
    return model


def fit(name, model, alignment, **arguments):
    before = int(strategy.stats(model)["steps"]) if strategy.has_mirror(model) else 0
    settled = strategy.stats(model)["settling_steps"] if before else 0
    history = model.fit(x, y, batch_size=8, verbose=0, callbacks=[alignment, Speed()], **arguments)
    stats = strategy.stats(model)
    settling_steps = stats["settling_steps"] - settled
    outcomes[name] = {
        "steps": int(stats["steps"] - before - settling_steps),
        "epochs": history.epoch,
        "digest": common.digest(model),
        "states": [member.state for member in strategy.mirror(model).segment.members()],
    }


for rule in ("first", "mean", "all"):
    fit(rule, build(), tf_smb.callbacks.ProgressAlignment(rule), epochs=3)
again = build()
fit("before", again, tf_smb.callbacks.ProgressAlignment("mean", steps=20), epochs=1)
fit("again", again, tf_smb.callbacks.ProgressAlignment("mean", steps=30), epochs=1)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if strategy.worker_index == 1 and batch == 9:
            self.model.stop_training = True


stopped = build()
before = time.monotonic()
history = stopped.fit(
    x,
    y,
    batch_size=8,
    epochs=50,
    verbose=0,
    callbacks=[tf_smb.callbacks.ProgressAlignment("first"), Speed(), Stop()],
)
outcomes["stopped"] = {
    "epochs": history.epoch,
    "digest": common.digest(stopped),
    "states": [member.state for member in strategy.mirror(stopped).segment.members()],
}


def generator():
    for begin in range(0, 512, 16):
        yield x[begin : begin + 16], y[begin : begin + 16]


once = build()
history = once.fit(
    generator(),
    epochs=1,
    verbose=0,
    callbacks=[tf_smb.callbacks.ProgressAlignment("all"), Speed()],
)
outcomes["once"] = {
    "steps": int(strategy.stats(once)["steps"] - strategy.stats(once)["settling_steps"]),
    "digest": common.digest(once),
}
common.result(strategy, outcomes=outcomes)
