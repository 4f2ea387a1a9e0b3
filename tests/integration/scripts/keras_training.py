"""Ways to train: data, optimizers, precision, compilation, loops of one's own, callbacks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import common
import keras
import keras_common
import numpy as np
import tensorflow as tf
from keras_common import Facts, case, dense, fit, held, wait_for

import tf_smb

layers = keras.layers
args = keras_common.arguments()
# Each of two workers has 64 samples, which is 8 steps.
x, y = common.data(samples=128)
BATCH = 8


def compiled(strategy: tf_smb.SMBStrategy, optimizer: Any = None, **kwargs: Any) -> keras.Model:
    """Returns a small model, ready to train."""
    dtype, dropout = kwargs.pop("dtype", None), kwargs.pop("dropout", 0.0)
    with strategy.scope():
        model = dense(dtype=dtype, dropout=dropout)
        made = optimizer() if optimizer else keras.optimizers.SGD(0.01)
        model.compile(made, kwargs.pop("loss", "mse"), **kwargs)
    return model


def plain(strategy: tf_smb.SMBStrategy, optimizer: Any = None, **kwargs: Any) -> Facts:
    """Trains a small model for an epoch of arrays."""
    model = compiled(strategy, optimizer, **kwargs)
    return {**fit(model, x, y, batch_size=BATCH), **ended(strategy, model)}


def ended(strategy: tf_smb.SMBStrategy, model: keras.Model) -> Facts:
    """Returns what the model holds, and its loss over all data."""
    predicted = np.asarray(model(x, training=False), "float32")
    loss = float(np.mean(np.square(predicted - y)))
    return {**held(strategy, model), "loss": loss if math.isfinite(loss) else None}


def number(variable: Any) -> float:
    """Returns a variable's value, of whatever number of devices."""
    return float(keras.ops.convert_to_numpy(variable))


# --- What fit is given ---


@case
def arrays(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy)


@case
def tf_data(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(128).batch(BATCH).prefetch(1)
    return {**fit(model, dataset), **ended(strategy, model)}


@case
def tf_data_of_strings(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    texts = tf.strings.as_string(tf.constant(x))
    dataset = tf.data.Dataset.from_tensor_slices((texts, y))
    dataset = dataset.map(lambda text, target: (tf.strings.to_number(text), target)).batch(BATCH)
    return {**fit(model, dataset), **ended(strategy, model)}


@case
def generator(strategy: tf_smb.SMBStrategy) -> Facts:
    """A generator cannot be divided: every worker trains on all of it."""

    def batches() -> Iterator[Any]:
        for begin in range(0, 128, BATCH):
            yield x[begin : begin + BATCH], y[begin : begin + BATCH]

    model = compiled(strategy)
    return {**fit(model, batches()), **ended(strategy, model)}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return len(x) // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


@case
def py_dataset(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    return {**fit(model, Batches()), **ended(strategy, model)}


@case
def dict_inputs(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        a, b = layers.Input((4,), name="a"), layers.Input((4,), name="b")
        model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Concatenate()([a, b])))
        model.compile("sgd", "mse")
    inputs = {"a": x[:, :4], "b": x[:, 4:]}
    return {**fit(model, inputs, y, batch_size=BATCH), **held(strategy, model)}


class Nested(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        (a, b), c = inputs["pair"], inputs["single"]
        return {"out": self.head(keras.ops.concatenate([a, b, c], axis=-1))}


@case
def nested_inputs(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = Nested()
        model.compile("sgd", {"out": "mse"})
    inputs = {"pair": (x[:, :2], x[:, 2:4]), "single": x[:, 4:]}
    return {**fit(model, inputs, {"out": y}, batch_size=BATCH), **held(strategy, model)}


@case
def ragged_last_batch(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    return {**fit(model, x[:101], y[:101], batch_size=BATCH), **ended(strategy, model)}


@case
def last_batch_of_one_sample(strategy: tf_smb.SMBStrategy) -> Facts:
    """With two devices, one of them gets nothing in the last step."""
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((8,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return {**fit(model, x[:98], y[:98], batch_size=BATCH), **ended(strategy, model)}


@case
def class_weight(strategy: tf_smb.SMBStrategy) -> Facts:
    """Class 1 weighs nothing, so the model learns to say 0 only."""
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss)
    labels = (y > 0).astype("int32")
    weights = {0: 1.0, 1: 0.0}
    facts = fit(model, x, labels, batch_size=BATCH, epochs=3, class_weight=weights)
    zeros = (model.predict(x, verbose=0).argmax(axis=1) == 0).mean()
    return {**facts, **held(strategy, model), "share_of_zeros": float(zeros)}


@case
def sample_weight(strategy: tf_smb.SMBStrategy) -> Facts:
    """Targets that are far off weigh nothing."""
    model = compiled(strategy)
    weight = np.ones(128, "float32")
    weight[::3] = 0
    targets = np.where(weight[:, None] > 0, y, 1e6)
    facts = fit(model, x, targets, batch_size=BATCH, sample_weight=weight)
    return {**facts, **ended(strategy, model)}


@case
def validation_data(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    seen: list[dict[str, float]] = []
    logs_of = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    facts = fit(
        model, x, y, batch_size=BATCH, validation_data=(x[:40], y[:40]), callbacks=[logs_of]
    )
    return {**facts, **ended(strategy, model), "validated": "val_loss" in seen[-1]}


@case
def validation_split(strategy: tf_smb.SMBStrategy) -> Facts:
    """A quarter is held out, the same on all workers: 96 samples are left, 6 steps each."""
    model = compiled(strategy)
    seen: list[dict[str, float]] = []
    logs_of = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs))
    facts = fit(model, x, y, batch_size=BATCH, validation_split=0.25, callbacks=[logs_of])
    return {**facts, **ended(strategy, model), "validated": "val_loss" in seen[-1]}


@case
def several_fits(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    first = fit(model, x, y, batch_size=BATCH)
    second = fit(model, x, y, batch_size=BATCH)
    return {
        **second,
        **ended(strategy, model),
        # The end of the first fit exchanged once more, beside the period.
        "exchanges": max(0, second["exchanges"] - 1),
        "epochs": first["epochs"] + second["epochs"],
    }


@case
def initial_epoch(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    epochs: list[int] = []
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    facts = fit(model, x, y, batch_size=BATCH, initial_epoch=3, epochs=5, callbacks=[count])
    return {**facts, **ended(strategy, model), "epoch_numbers": epochs}


# --- Optimizers ---


@case
def clipnorm(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, lambda: keras.optimizers.SGD(0.01, clipnorm=0.5))


@case
def clipvalue(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, lambda: keras.optimizers.SGD(0.01, clipvalue=0.5))


@case
def global_clipnorm(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.5))


@case
def weight_decay(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1))


@case
def learning_rate_schedule(strategy: tf_smb.SMBStrategy) -> Facts:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 4, 0.5)
    return plain(strategy, lambda: keras.optimizers.Adam(schedule))


@case
def optimizer_slots(strategy: tf_smb.SMBStrategy) -> Facts:
    """Momenta stay each worker's own: they are not exchanged."""
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01))
    facts = fit(model, x, y, batch_size=BATCH)
    slots = [value.tobytes() for value in keras_common.as_arrays(_numpy(model.optimizer.variables))]
    return {
        **facts,
        **ended(strategy, model),
        "slots": hashlib.sha256(b"".join(slots)).hexdigest(),
    }


def _numpy(variables: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


# --- Precision ---


@case
def loss_scale_skips_a_step(strategy: tf_smb.SMBStrategy) -> Facts:
    """Worker 0's second batch holds an Inf: that step is skipped, and not counted."""
    model = compiled(
        strategy,
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.01), initial_scale=256.0
        ),
    )
    bad = x.copy()
    bad[2 * BATCH] = np.inf
    facts = fit(model, bad, y, batch_size=BATCH, shuffle=False)
    return {**facts, **ended(strategy, model), "finite": True}


def with_policy(strategy: tf_smb.SMBStrategy, policy: str) -> Facts:
    keras.config.set_dtype_policy(policy)
    model = compiled(strategy)
    dtypes = sorted({str(weight.dtype) for weight in model.weights})
    facts = fit(model, x, y, batch_size=BATCH)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    updates = int(number(inner.iterations))
    return {**facts, **ended(strategy, model), "dtypes": dtypes, "updates": updates}


@case
def mixed_float16(strategy: tf_smb.SMBStrategy) -> Facts:
    return with_policy(strategy, "mixed_float16")


@case
def mixed_bfloat16(strategy: tf_smb.SMBStrategy) -> Facts:
    return with_policy(strategy, "mixed_bfloat16")


@case
def bfloat16(strategy: tf_smb.SMBStrategy) -> Facts:
    return with_policy(strategy, "bfloat16")


# --- How steps are run ---


@case
def run_eagerly(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, run_eagerly=True)


@case
def steps_per_execution_3(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, steps_per_execution=3)


@case
def steps_per_execution_8(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, steps_per_execution=8)


@case
def jit_compile(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy, jit_compile=True)
    callbacks = [tf_smb.callbacks.ExchangeAtBatchEnd()]
    facts = fit(model, x, y, batch_size=BATCH, callbacks=callbacks)
    return {**facts, **ended(strategy, model)}


@case
def jit_compile_without_callback(strategy: tf_smb.SMBStrategy) -> Facts:
    return plain(strategy, jit_compile=True)


@case
def exchange_at_batch_end(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy, steps_per_execution=2)
    callbacks = [tf_smb.callbacks.ExchangeAtBatchEnd()]
    return {**fit(model, x, y, batch_size=BATCH, callbacks=callbacks), **ended(strategy, model)}


# --- Loops and steps of one's own ---


def looped(strategy: tf_smb.SMBStrategy, step: Callable[..., None], *models: keras.Model) -> Facts:
    """Trains in a custom loop: `step` is a tf.function that calls strategy.step for each model."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for model in models:
        strategy.start(model)
    for inputs, targets in strategy.shard(dataset):
        step(inputs, targets)
    stats = [strategy.stats(model) for model in models]
    for model in models:
        strategy.finish(model)
    return {
        "epochs": 1,
        "finite": True,
        "steps": int(stats[0]["steps"]),
        "exchanges": int(stats[0]["exchanges"]),
        "of_others": [[int(each["steps"]), int(each["exchanges"])] for each in stats[1:]],
        **held(strategy, *models),
    }


@case
def custom_loop(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = dense()
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        strategy.step(model)

    return looped(strategy, step, model)


@case
def custom_loop_two_optimizers(strategy: tf_smb.SMBStrategy) -> Facts:
    """Like a GAN: one model makes what the other judges, and each has an optimizer."""
    with strategy.scope():
        maker = keras.Sequential([layers.Input((8,)), layers.Dense(4), layers.Dense(1)])
        judge = keras.Sequential([layers.Input((1,)), layers.Dense(4), layers.Dense(1)])
        optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)]
        for optimizer, model in zip(optimizers, (maker, judge), strict=True):
            optimizer.build(model.trainable_variables)

    @tf.function
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            made = maker(inputs, training=True)
            judged, real = judge(made, training=True), judge(targets, training=True)
            losses = [tf.reduce_mean(tf.nn.softplus(-judged))]
            losses.append(tf.reduce_mean(tf.nn.softplus(judged) + tf.nn.softplus(-real)))
        for optimizer, model, loss in zip(optimizers, (maker, judge), losses, strict=True):
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            strategy.step(model)

    return looped(strategy, step, maker, judge)


class OwnStep(keras.Model):
    """Overrides train_step, in the way of Keras' guide."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dense()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.inner(inputs, training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, targets, self(inputs, training=True))
        self.optimizer.apply_gradients(
            zip(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True
            )
        )
        return {"loss": loss}


@case
def train_step_overridden(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = OwnStep()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    return {**fit(model, x, y, batch_size=BATCH), **held(strategy, model)}


class TwoOptimizers(OwnStep):
    """Has optimizers of its own, and none that Keras knows of."""

    def compile(self, first: Any, second: Any) -> None:
        super().compile(loss="mse")
        self.optimizer = None
        self.first, self.second = first, second

    def train_step(self, data: Any) -> dict[str, Any]:
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(inputs, training=True) - targets))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.first.apply(gradients[:2], variables[:2])
        self.second.apply(gradients[2:], variables[2:])
        return {"loss": loss}


@case
def train_step_without_self_optimizer(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = TwoOptimizers()
        model(x[:1])
        first, second = keras.optimizers.SGD(0.01), keras.optimizers.Adam(0.01)
        first.build(model.trainable_variables[:2])
        second.build(model.trainable_variables[2:])
        model.compile(first, second)
    return {**fit(model, x, y, batch_size=BATCH), **held(strategy, model)}


@case
def train_on_batch(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    dataset = strategy.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    strategy.start(model)
    losses = [float(model.train_on_batch(*batch)) for batch in dataset]
    stats = strategy.stats(model)
    strategy.finish(model)
    return {
        "epochs": 1,
        "finite": all(math.isfinite(loss) for loss in losses),
        "steps": int(stats["steps"]),
        "exchanges": int(stats["exchanges"]),
        **ended(strategy, model),
    }


# --- Callbacks, evaluation, files ---


@case
def learning_rate_scheduler(strategy: tf_smb.SMBStrategy) -> Facts:
    model = compiled(strategy)
    rates: list[float] = []
    facts = fit(
        model,
        x,
        y,
        batch_size=BATCH,
        epochs=3,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: rates.append(number(model.optimizer.learning_rate))
            ),
        ],
    )
    return {**facts, **ended(strategy, model), "rates": [round(rate, 6) for rate in rates]}


@case
def reduce_on_plateau(strategy: tf_smb.SMBStrategy) -> Facts:
    """Nothing is an improvement, so the rate falls in every epoch but the first."""
    model = compiled(strategy)
    reduce = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=1e9, min_lr=0.0
    )
    facts = fit(model, x, y, batch_size=BATCH, epochs=3, callbacks=[reduce])
    rate = number(model.optimizer.learning_rate)
    return {**facts, **ended(strategy, model), "rates": [round(rate, 6)]}


@case
def early_stopping(strategy: tf_smb.SMBStrategy) -> Facts:
    """Stops after two epochs on all workers, each of which leaves by itself."""
    model = compiled(strategy)
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e9)
    return {
        **fit(model, x, y, batch_size=BATCH, epochs=6, callbacks=[stop]),
        **ended(strategy, model),
    }


@case
def early_stopping_together(strategy: tf_smb.SMBStrategy) -> Facts:
    """Worker 1 stops after two epochs, and with it all others."""
    model = compiled(strategy)
    epochs = 1000 if strategy.exchanges else 2
    callbacks: list[Any] = [tf_smb.callbacks.ProgressAlignment("first")]
    if strategy.worker_index == 1:
        callbacks.append(keras.callbacks.EarlyStopping(monitor="loss", patience=1, min_delta=1e9))
    return {
        **fit(model, x, y, batch_size=BATCH, epochs=epochs, callbacks=callbacks),
        **ended(strategy, model),
    }


@case
def evaluate_and_predict(strategy: tf_smb.SMBStrategy) -> Facts:
    """During training and after it: no steps are counted, and nothing is divided."""
    model = compiled(strategy)
    during: list[Any] = []

    def look(epoch: int, logs: Any) -> None:
        steps = strategy.stats(model)["steps"]
        loss = model.evaluate(x, y, batch_size=64, verbose=0)
        rows = len(model.predict(x, batch_size=64, verbose=0))
        during.append([math.isfinite(loss), rows, int(strategy.stats(model)["steps"] - steps)])

    callback = keras.callbacks.LambdaCallback(on_epoch_end=look)
    facts = fit(model, x, y, batch_size=BATCH, callbacks=[callback])
    rows = len(model.predict(x[:101], batch_size=101, verbose=0))
    return {**facts, **ended(strategy, model), "during": during, "rows_after": rows}


class Marks(keras.metrics.Metric):
    """Adds up this worker's number for every sample: what the exchange must not touch."""

    def __init__(self, mark: float) -> None:
        super().__init__(name="marks")
        self.mark = mark
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        count = keras.ops.cast(keras.ops.shape(y_true)[0], "float32")
        self.total.assign(self.total + self.mark * count)

    def result(self) -> Any:
        return self.total + 0.0


@case
def metrics(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = dense()
        model.compile("sgd", "mse", metrics=["mae", Marks(strategy.worker_index + 1.0)])
    seen: list[float] = []
    logs_of = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(float(logs["marks"]))
    )
    facts = fit(model, x, y, batch_size=BATCH, epochs=2, callbacks=[logs_of])
    return {**facts, **ended(strategy, model), "marks": seen}


@case
def dropout_seeds(strategy: tf_smb.SMBStrategy) -> Facts:
    """Same script seed, same weights at the end, other dropout masks on every worker."""
    if strategy.exchanges:
        keras.utils.set_random_seed(1)
    model = compiled(strategy, dropout=0.5)
    facts = fit(model, x, y, batch_size=BATCH)
    masked = np.asarray(model.layers[1](np.ones((4, 64), "float32"), training=True))
    return {
        **facts,
        **ended(strategy, model),
        "mask": hashlib.sha256(masked.tobytes()).hexdigest(),
    }


@case
def save_and_load(strategy: tf_smb.SMBStrategy) -> Facts:
    """A whole model, saved and loaded, holds the center, and trains on."""
    model = compiled(strategy, lambda: keras.optimizers.Adam(0.01))
    fit(model, x, y, batch_size=BATCH)
    path = args.out / "saved.keras"  # the chief's
    model.save(path)
    outside = keras.models.load_model(wait_for(path))
    with strategy.scope():
        again = keras.models.load_model(path)
    same = common.digest(model) == common.digest(outside) == common.digest(again)
    facts = fit(again, x, y, batch_size=BATCH)
    return {**facts, **ended(strategy, again), "same": same}


keras_common.run_cases(args)
