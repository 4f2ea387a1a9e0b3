"""Fits of one worker that fail in the middle of an epoch, and are begun again, case by case."""

import sys
import warnings
from pathlib import Path

import common
import keras
import numpy as np
import tensorflow as tf

import tf_smb
from tf_smb.strategies.backup_files import BackupFolder

folder = Path(sys.argv[1])
SAMPLES, BATCH = 61, 4
x, y = common.data(SAMPLES)
numbered = np.concatenate([x[:, :-1], np.arange(SAMPLES, dtype="float32")[:, None]], axis=1)
outcomes = {}


class Watch(keras.callbacks.Callback):
    """Collects the samples of each epoch, and fails where it is told to."""

    def __init__(self, fail_at):
        super().__init__()
        self.fail_at = fail_at
        self.epochs = {}
        self.begun_with = None

    def on_epoch_begin(self, epoch, logs=None):
        seen.clear()
        self.epoch = epoch
        if self.begun_with is None:
            mirror = self.model.distribute_strategy.mirror(self.model)
            center = mirror.segment.read()
            optimizer = [variable.numpy() for variable in self.model.optimizer.variables]
            self.begun_with = {
                "steps": int(mirror.steps),
                "iterations": int(self.model.optimizer.iterations),
                "center": center,
                "optimizer": optimizer,
            }

    def on_epoch_end(self, epoch, logs=None):
        self.iterations = int(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[self.epoch] = list(seen)
        if self.epoch == 1 and batch + 1 >= (self.fail_at or 1e9):
            raise FailNow


class FailNow(Exception):
    pass


seen = []


def write_down(samples):
    seen.extend(samples.astype(int).tolist())
    return np.int64(0)


class Noting(keras.Sequential):
    def train_step(self, data):
        noted = tf.numpy_function(write_down, [data[0][:, -1]], tf.int64)
        with tf.control_dependencies([noted]):
            return super().train_step(data)


def make(units=16, optimizer=None, built=True, **arguments):
    keras.utils.set_random_seed(1)
    strategy = tf_smb.SMBStrategy(rule=tf_smb.DeltaAveraging(communication_period=1))
    with strategy.scope():
        layers = [keras.layers.Dense(units, activation="relu"), keras.layers.Dense(1)]
        model = Noting([keras.layers.Input((8,)), *layers] if built else layers)
        model.compile(optimizer or keras.optimizers.Adam(1e-3), "mse", **arguments)
    return model


def case(name, fit, model_arguments=None, fit_again=None, fail_at=6, **options):
    """Fits until it fails in epoch 1, and again; notes which samples that epoch had."""
    where = folder / name
    again = fit_again or fit
    first = Watch(fail_at)

    def backup():
        return tf_smb.callbacks.BackupAndRestore(where, every_steps=1, seed=5, **options)

    try:
        fit(make(**(model_arguments or {})), callbacks=[first, backup()], epochs=3, verbose=0)
    except FailNow:
        pass
    saved = BackupFolder(str(where)).newest(print)
    second = Watch(None)
    model = make(**(model_arguments or {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again(model, callbacks=[second, backup()], epochs=3, verbose=0)
    # What was trained on since the last exchange is not in the center.
    position = saved.state["positions"][0]
    outcomes[name] = {
        "before": first.epochs[1][: position[1] * BATCH],
        "after": second.epochs[1],
        "next": sorted(second.epochs[2]),
        "all": first.epochs[0],
        "saved_steps": saved.state["steps"],
        "steps": second.begun_with["steps"],
        "iterations": second.begun_with["iterations"],
        "iterations_at_end": second.iterations,
        "warnings": len([w for w in caught if "ran out of data" in str(w.message)]),
        "removed": not where.exists(),
    }
    return saved, second


def arrays(model, **arguments):
    model.fit(numbered, y, batch_size=BATCH, **arguments)


saved, second = case(
    "arrays", lambda model, **arguments: arrays(model, class_weight={0: 2.0}, **arguments)
)
restored = all(
    np.array_equal(saved.arrays[f"weight{i}"], value)
    for i, value in enumerate(second.begun_with["center"])
) and all(
    np.array_equal(saved.arrays[f"optimizer{i}"], value)
    for i, value in enumerate(second.begun_with["optimizer"])
)
case("unbuilt", arrays, {"built": False}, delete_checkpoint=False)
case(
    "weighted",
    lambda model, **arguments: model.fit(
        numbered,
        y,
        batch_size=BATCH,
        shuffle=False,
        sample_weight=np.ones(SAMPLES),
        validation_split=0.2,
        **arguments,
    ),
    {"steps_per_execution": 3},
)


class Batches(keras.utils.PyDataset):
    @property
    def num_batches(self):
        return SAMPLES // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return numbered[rows], y[rows]


case("py_dataset", lambda model, **arguments: model.fit(Batches(), **arguments))
pipeline = tf.data.Dataset.from_tensor_slices((numbered, y))
case(
    "tf_data",
    lambda model, **arguments: model.fit(
        pipeline.shuffle(SAMPLES, seed=3, reshuffle_each_iteration=False).batch(BATCH), **arguments
    ),
)


def generator():
    while True:
        for at in range(0, SAMPLES, BATCH):
            yield numbered[at : at + BATCH], y[at : at + BATCH]


case(
    "generator",
    lambda model, **arguments: model.fit(generator(), steps_per_epoch=16, **arguments),
)
outcomes["generator"]["why"] = "with steps_per_epoch it has no end to count from"
case(
    "steps_per_epoch",
    lambda model, **arguments: model.fit(
        numbered, y, batch_size=BATCH, shuffle=False, steps_per_epoch=16, **arguments
    ),
)
outcomes["steps_per_epoch"]["why"] = "with steps_per_epoch it has no end to count from"
case(
    "changed_data",
    lambda model, **arguments: arrays(model, shuffle=False, **arguments),
    fit_again=lambda model, **arguments: model.fit(
        np.concatenate([numbered, numbered[:8]]),
        np.concatenate([y, y[:8]]),
        batch_size=BATCH,
        shuffle=False,
        **arguments,
    ),
)
outcomes["changed_data"]["why"] = "its data is not what it was"
outcomes["changed_data"]["all"] += list(range(8))


where = str(folder / "refusals")
try:
    arrays(
        make(),
        callbacks=[Watch(6), tf_smb.callbacks.BackupAndRestore(where, every_steps=1)],
        epochs=3,
        verbose=0,
    )
except FailNow:
    pass
for name, other in {"other_layout": {"units": 17}, "other_optimizer": {"optimizer": "sgd"}}.items():
    try:
        arrays(make(**other), callbacks=[tf_smb.callbacks.BackupAndRestore(where)], verbose=0)
    except tf_smb.errors.FailedPreconditionError as error:
        outcomes[name] = str(error)

outcomes["restored"] = restored
common.result(tf_smb.SMBStrategy(), outcomes=outcomes)
