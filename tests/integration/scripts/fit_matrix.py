"""Many ways to call fit, one after the other, in the same few processes."""

import time

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb

x, y = common.data()
strategy = tf_smb.SMBStrategy(rule=tf_smb.DeltaAveraging(communication_period=3))
outcomes = {}


def case(name, build, fit, **compile_arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.01), "mse", **compile_arguments)
    history = fit(model)
    stats = strategy.stats(model)
    steps = int(stats["steps"] - stats["settling_steps"])
    outcomes[name] = {
        "digest": common.digest(model),
        "steps": steps,
        # Without the final one and those in lockstep.
        "exchanges": int(stats["exchanges"]),
        "epochs": len(history.history["loss"]),
        "loss": float(model.evaluate(x, y, batch_size=128, verbose=0)),
    }
    return model


def plain(model, **arguments):
    return model.fit(x, y, batch_size=16, epochs=2, verbose=0, **arguments)


case("numpy", common.dense, plain)
case("steps_per_execution", common.dense, plain, steps_per_execution=3)
case("eager", common.dense, plain, run_eagerly=True)
case(
    "jit_compile",
    common.dense,
    lambda model: plain(model, callbacks=[tf_smb.callbacks.ExchangeAtBatchEnd()]),
    jit_compile=True,
)
case(
    "unbuilt",
    lambda: keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]),
    plain,
)
case(
    "validation_split",
    common.dense,
    lambda model: plain(model, validation_split=0.25),
)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512).batch(16)
case("tf_data", common.dense, lambda model: model.fit(dataset, epochs=2, verbose=0))


def generator():
    for begin in range(0, 512, 16):
        yield x[begin : begin + 16], y[begin : begin + 16]


case("generator", common.dense, lambda model: model.fit(generator(), epochs=1, verbose=0))


class Statistics(keras.Model):
    """Subclassed, with BatchNormalization, Dropout and an integer weight."""

    def __init__(self):
        super().__init__()
        self.normalization = keras.layers.BatchNormalization()
        self.hidden = keras.layers.Dense(16, activation="relu")
        self.dropout = keras.layers.Dropout(0.1)
        self.head = keras.layers.Dense(1)
        self.count = self.add_weight(shape=(), dtype="int32", trainable=False, name="count")

    def call(self, inputs, training=False):
        hidden = self.hidden(self.normalization(inputs, training=training))
        return self.head(self.dropout(hidden, training=training))


model = case("subclassed", Statistics, plain)
case("gradient_accumulation", common.dense, plain)
second_fit = case("second_fit", common.dense, lambda model: (plain(model), plain(model))[1])

# What the weights were changed to between two fits is what the second begins with.
with strategy.scope():
    changed = common.dense()
    changed.compile(keras.optimizers.SGD(0.0), "mse")
changed.fit(x, y, batch_size=16, verbose=0)
changed.set_weights([np.full_like(value, 0.25) for value in changed.get_weights()])
if strategy.is_chief:
    time.sleep(0.5)  # the others begin first, and must wait for its weights
changed.fit(x, y, batch_size=16, verbose=0)
outcomes["changed_between_fits"] = {
    "digest": common.digest(changed),
    "all_quarter": bool(all((value == 0.25).all() for value in changed.get_weights())),
}

# A custom loop.
with strategy.scope():
    custom = common.dense()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(custom.trainable_variables)


@tf.function
def train_on(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(custom(inputs, training=True) - targets))
    optimizer.apply(tape.gradient(loss, custom.trainable_variables), custom.trainable_variables)
    strategy.step(custom)


strategy.start(custom)
for _ in range(2):
    for inputs, targets in strategy.shard(dataset):
        train_on(inputs, targets)
strategy.finish(custom)
outcomes["custom_loop"] = {
    "digest": common.digest(custom),
    "steps": int(strategy.stats(custom)["steps"]),
}
before = common.digest(custom)
with strategy.center_weights(custom):
    inside = common.digest(custom)
outcomes["center_weights"] = {"digest": inside, "back": common.digest(custom) == before}

common.result(strategy, outcomes=outcomes)
