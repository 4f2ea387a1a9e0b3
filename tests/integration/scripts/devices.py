"""Each way to train that Keras has, on one device of a worker or on two, one after the other.

python devices.py NUM_DEVICES CELL...
"""

import sys

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb
from tf_smb.strategies.variables import copies, is_statistic

num_devices = int(sys.argv[1])
[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
)
devices = [f"/cpu:{i}" for i in range(num_devices)]
strategy = tf_smb.SMBStrategy(
    rule=tf_smb.DeltaAveraging(communication_period=2), devices=devices, settle_steps=0
)
x, y = common.data(samples=160)


def sgd(**arguments):
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


def dense(policy=None):
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16, activation="relu", dtype=policy),
            keras.layers.Dense(1, dtype=policy),
        ]
    )


def normalized():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(1),
        ]
    )


class TwoOptimizers(keras.Model):
    """Each layer has an optimizer of its own, as a GAN's halves have; Keras knows neither."""

    def __init__(self):
        super().__init__()
        self.body, self.head = keras.layers.Dense(16), keras.layers.Dense(1)
        self.body_optimizer = sgd(gradient_accumulation_steps=2)
        self.head_optimizer = sgd()

    def build(self, shape):
        self.body.build(shape)
        self.head.build((None, 16))
        self.body_optimizer.build(self.body.trainable_variables)
        self.head_optimizer.build(self.head.trainable_variables)
        self.built = True

    def call(self, inputs):
        return self.head(self.body(inputs))

    def train_step(self, batch):
        inputs, targets = batch
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(inputs) - targets)) / num_devices
        for layer, optimizer in (
            (self.body, self.body_optimizer),
            (self.head, self.head_optimizer),
        ):
            weights = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss * num_devices}


def two_optimizers():
    model = TwoOptimizers()
    model.build((None, 8))
    return model


def loss_scaled(scale):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=scale)


# Model, optimizer, what compile gets, what fit gets.
CELLS = {
    "plain": (dense, sgd, {}, {}),
    "steps_per_execution_3": (dense, sgd, {"steps_per_execution": 3}, {}),
    "steps_per_execution_8": (dense, sgd, {"steps_per_execution": 8}, {}),
    "accumulation": (dense, lambda: sgd(gradient_accumulation_steps=2), {}, {}),
    "accumulation_3": (
        dense,
        lambda: sgd(gradient_accumulation_steps=2),
        {"steps_per_execution": 3},
        {},
    ),
    "ema": (dense, lambda: sgd(use_ema=True, ema_overwrite_frequency=3), {}, {}),
    "ema_8": (
        dense,
        lambda: sgd(use_ema=True, ema_overwrite_frequency=3),
        {"steps_per_execution": 8},
        {},
    ),
    "eagerly": (dense, sgd, {"run_eagerly": True}, {}),
    "eagerly_accumulation_3": (
        dense,
        lambda: sgd(gradient_accumulation_steps=2),
        {"run_eagerly": True, "steps_per_execution": 3},
        {},
    ),
    "mixed_float16": (lambda: dense("mixed_float16"), sgd, {"steps_per_execution": 3}, {}),
    # The first steps overflow, and are no updates.
    "overflow": (lambda: dense("mixed_float16"), lambda: loss_scaled(2.0**20), {}, {}),
    "batch_normalization": (normalized, sgd, {}, {}),
    "batch_normalization_3": (
        normalized,
        lambda: sgd(gradient_accumulation_steps=2),
        {"steps_per_execution": 3},
        {},
    ),
    "two_optimizers": (two_optimizers, None, {}, {}),
    "jit_compile": (
        dense,
        sgd,
        {"jit_compile": True},
        {"callbacks": [tf_smb.callbacks.ExchangeAtBatchEnd()]},
    ),
    "jit_compile_alone": (dense, sgd, {"jit_compile": True}, {}),
}


def spread(model, statistics):
    """Returns how far apart the copies of a model's weights on its devices are, at most."""
    floats = [v for v in model.weights if "float" in v.dtype]
    chosen = [
        v
        for v, is_one in zip(floats, is_statistic(model, floats), strict=True)
        if statistics or not is_one
    ]
    return max(
        float(np.abs(copies(v)[0].numpy() - copy.numpy()).max())
        for v in chosen
        for copy in copies(v)
    )


class Watch(keras.callbacks.Callback):
    """Compares the copies of the weights after every execution."""

    spread = 0.0

    def on_train_batch_end(self, batch, logs=None):
        self.spread = max(self.spread, spread(self.model, statistics=False))


def train(name):
    build, optimizer, compile_arguments, fit_arguments = CELLS[name]
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        if optimizer is None:
            model.compile(loss="mse", **compile_arguments)
        else:
            model.compile(optimizer(), "mse", **compile_arguments)
    watch = Watch()
    callbacks = [watch, *fit_arguments.get("callbacks", ())]
    try:
        history = model.fit(
            x, y, batch_size=16, epochs=2, verbose=0, shuffle=False, callbacks=callbacks
        )
    except tf_smb.errors.Error as error:
        return {"refused": str(error)}
    stats = strategy.stats(model)
    center = local = []
    if strategy.exchanges:
        mirror = strategy.mirror(model)
        center, local = mirror.segment.read(), mirror.local()
    return {
        "spread": watch.spread,
        "spread_at_end": spread(model, statistics=True),
        "digest": common.digest(model),
        "center": [float(np.sum(value, dtype="float64")) for value in center],
        "center_is_held": all(np.array_equal(a, b) for a, b in zip(center, local, strict=True)),
        "steps": stats["steps"],
        "batches": stats["batches"],
        "exchanges": stats["exchanges"],
        "finite": bool(np.isfinite(history.history["loss"]).all()),
        "replicas": strategy.num_replicas_in_sync,
    }


cells = sys.argv[2:] or list(CELLS)
common.result(strategy, cells={name: train(name) for name in cells})
