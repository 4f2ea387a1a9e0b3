"""One worker alone, on one device and on two: the same training, so the same weights."""

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
x, y = common.data(samples=80)
tokens = (np.abs(x) * 4).astype("int32") % 10


def dense():
    return keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])


def embedded():
    return keras.Sequential(
        [keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
    )


def sgd(**arguments):
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


def scaled(optimizer):
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**8)


CASES = {
    "sgd": (dense, x, sgd),
    "clipped": (dense, x, lambda: sgd(global_clipnorm=0.5)),
    "decayed": (dense, x, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "accumulation": (dense, x, lambda: sgd(gradient_accumulation_steps=3)),
    "ema": (dense, x, lambda: sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2)),
    "loss_scale": (dense, x, lambda: scaled(sgd(gradient_accumulation_steps=2))),
    "embedding": (embedded, tokens, lambda: sgd(gradient_accumulation_steps=2)),
}


def train(devices, build, inputs, optimizer):
    keras.utils.set_random_seed(1)
    strategy = tf_smb.SMBStrategy(devices=devices)
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse", metrics=["mae"], steps_per_execution=2)
    model.fit(inputs, y, batch_size=16, epochs=3, verbose=0, shuffle=False)
    metrics = model.evaluate(inputs, y, batch_size=16, verbose=0)
    return [*model.get_weights(), model.predict(inputs, batch_size=32, verbose=0), *metrics]


def difference(case):
    one, two = (train(devices, *case) for devices in (["/cpu:0"], ["/cpu:0", "/cpu:1"]))
    assert len(one) == len(two)
    return max(float(np.abs(a - b).max()) for a, b in zip(one, two, strict=True))


# The last batch is of one sample: the second device has none, and no mean of anything.
strategy = tf_smb.SMBStrategy(devices=["/cpu:0", "/cpu:1"])
with strategy.scope():
    ragged = keras.Sequential(
        [keras.layers.BatchNormalization(), keras.layers.Dense(1, dtype="float64")]
    )
    ragged.compile("sgd", "mse")
ragged.fit(x[:33], y[:33], batch_size=16, epochs=2, verbose=0)

common.result(
    strategy,
    differences={name: difference(case) for name, case in CASES.items()},
    ragged_finite=bool(all(np.isfinite(value).all() for value in ragged.get_weights())),
    ragged_batches=strategy.stats(ragged)["batches"],
)
