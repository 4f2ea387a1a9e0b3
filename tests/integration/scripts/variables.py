"""What the box mirrors of a model, and what it leaves alone: one case after the other."""

import hashlib

import common
import keras
import numpy as np

import tf_smb

outcomes = {}
x, y = common.data(samples=256)


def make(build, optimizer=keras.optimizers.SGD, rule=None, compile_arguments=None, **arguments):
    """Returns a strategy of its own and a compiled model in it."""
    keras.utils.set_random_seed(4)
    arguments = {"settle_steps": 0, "run_name": build.__name__, **arguments}
    strategy = tf_smb.SMBStrategy(rule=rule, **arguments)
    with strategy.scope():
        model = build()
        model.compile(optimizer(), "mse", **(compile_arguments or {}))
    return strategy, model


def fit(model, inputs=x, targets=y, **arguments):
    arguments = {"batch_size": 16, "epochs": 2, "verbose": 0, **arguments}
    return model.fit(inputs, targets, **arguments)


def digest_of(variable):
    return hashlib.sha256(variable.numpy().tobytes()).hexdigest()


# --- Statistics: each worker sees inputs of its own mean and variance.


def statistics():
    inputs = keras.layers.Input((8,))
    hidden = keras.layers.BatchNormalization(momentum=0.5, name="normal")(inputs)
    frozen = keras.layers.Dense(8, name="frozen")
    hidden = frozen(hidden)
    frozen.trainable = False
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


class Negative(keras.callbacks.Callback):
    seen = False

    def on_train_batch_end(self, batch, logs=None):
        variance = self.model.get_layer("normal").moving_variance
        self.seen = self.seen or bool((variance.numpy() < 0).any())


# At the end a few steps together: what the last one to end saw is not all that counts.
strategy, model = make(
    statistics, rule=tf_smb.DeltaAveraging(1, gain=2.0), data="replicate", settle_steps=50
)
own = x * (0.01 if strategy.worker_index == 0 else 3.0) + 5 * strategy.worker_index
negative = Negative()
normal = model.get_layer("normal")
fit(model, own, epochs=3, callbacks=[negative])
mirror = strategy.mirror(model)
outcomes["statistics"] = {
    "mean": float(normal.moving_mean.numpy().mean()),
    "variance": float(normal.moving_variance.numpy().mean()),
    "negative": negative.seen,
    "digest": common.digest(model),
    "center_is_held": all(
        np.array_equal(a, b) for a, b in zip(mirror.segment.read(), mirror.local(), strict=True)
    ),
    "chosen": [
        name
        for (name, *_), chosen in zip(
            mirror._variables.layout, mirror._variables.statistics, strict=True
        )
        if chosen
    ],
}

# --- Constraints: of a set that is not convex, so that a mean of two members is none.


def constraints():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(4, kernel_constraint=keras.constraints.UnitNorm(), name="unit"),
            keras.layers.Dense(1),
        ]
    )


class Norms(keras.callbacks.Callback):
    worst = 0.0

    def on_train_batch_end(self, batch, logs=None):
        self.worst = max(self.worst, off_unit(self.model))


def off_unit(model):
    norms = np.linalg.norm(model.get_layer("unit").kernel.numpy(), axis=0)
    return float(np.abs(norms - 1).max())


for rule in (tf_smb.DeltaAveraging(1), tf_smb.PeriodicAveraging(2)):
    norms = Norms()
    strategy, model = make(
        constraints, lambda: keras.optimizers.SGD(0.02), rule, run_name=type(rule).__name__
    )
    fit(model, x * (1 + strategy.worker_index), callbacks=[norms])
    outcomes[f"constraints_{type(rule).__name__}"] = {
        "during": norms.worst,
        "at_end": off_unit(model),
        "digest": common.digest(model),
        "rounds": strategy.stats(model)["rounds"],
    }

# --- Integers and seeds.


class Counting(keras.Model):
    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)
        self.head = keras.layers.Dense(1)
        self.number = self.add_weight(shape=(), dtype="int32", trainable=False, name="number")

    def call(self, inputs, training=False):
        return self.head(self.dropout(inputs, training=training))


def counting():
    model = Counting()
    model.build((None, 8))
    return model


strategy, model = make(counting)
model.number.assign(7 + strategy.worker_index)
fit(model)
[seed] = [v for v in model.variables if "seed_generator_state" in v.path]
outcomes["counting"] = {
    "number": int(model.number.numpy()),
    "seed": [int(value) for value in seed.numpy()],
    "kernel": digest_of(model.head.kernel),
}

# --- A filter.


def filtered():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(4, name="body"),
            keras.layers.Dense(1, name="own_head"),
        ]
    )


strategy, model = make(filtered, variable_filter=lambda variable: "own_head" not in variable.path)
fit(model, x * (1 + strategy.worker_index))
outcomes["filtered"] = {
    "body": digest_of(model.get_layer("body").kernel),
    "head": digest_of(model.get_layer("own_head").kernel),
    "variables": len(strategy.mirror(model).segment.variables),
}

# --- Types.


def typed():
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            *(
                keras.layers.Dense(8, activation="relu", dtype=dtype)
                for dtype in ("float32", "bfloat16", "float16", "float64")
            ),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )


strategy, model = make(typed, lambda: keras.optimizers.SGD(0.01), tf_smb.DeltaAveraging(2))
history = fit(model)
outcomes["typed"] = {
    "digest": common.digest(model),
    "dtypes": [variable.dtype for variable in strategy.mirror(model).segment.variables],
    "exchanges": strategy.stats(model)["exchanges"],
    "losses": history.history["loss"],
}
before = common.digest(model)
with strategy.center_weights(model):
    outcomes["typed"]["center"] = common.digest(model)
outcomes["typed"]["back"] = common.digest(model) == before

# --- LoRA, after the model was trained.


def adapted():
    return keras.Sequential(
        [keras.layers.Input((8,)), keras.layers.Dense(16, name="base"), keras.layers.Dense(1)]
    )


strategy, model = make(adapted)
fit(model)
base = model.get_layer("base")
frozen = base._kernel.numpy()
base.enable_lora(2)
with strategy.scope():
    model.compile("sgd", "mse")
fit(model)
outcomes["adapted"] = {
    "digest": common.digest(model),
    "kernel_kept": bool(np.array_equal(base._kernel.numpy(), frozen)),
    "b_moved": float(np.abs(base.lora_kernel_b.numpy()).max()),
    "variables": len(strategy.mirror(model).segment.variables),
    "steps": strategy.stats(model)["steps"],
}

# --- Moving averages of the optimizer.


def averaged():
    return common.dense()


strategy, model = make(averaged, lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.8))
fit(model, x * (1 + strategy.worker_index))
outcomes["averaged"] = {
    "own": [
        float(average.numpy().sum(dtype="float64"))
        for average in model.optimizer._model_variables_moving_average
    ],
    "held": [float(np.sum(weight, dtype="float64")) for weight in model.get_weights()],
    "digest": common.digest(model),
}

# --- A schedule, a period that changes, and executions that neither divides.


class Traced(keras.layers.Layer):
    traces = 0

    def call(self, inputs):
        Traced.traces += 1
        return inputs


def scheduled():
    return keras.Sequential([keras.layers.Input((8,)), Traced(), keras.layers.Dense(1)])


class SetPeriod(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 4:
            self.before = Traced.traces
            strategy.mirror(self.model).set_period(5)


schedule = tf_smb.Schedule(
    [(0, tf_smb.PeriodicAveraging(2)), (10, tf_smb.ElasticAveraging(communication_period=3))]
)
strategy, model = make(scheduled, schedule=schedule, compile_arguments={"steps_per_execution": 8})
set_period = SetPeriod()
fit(model, epochs=8, callbacks=[set_period])  # 8 steps each
stats = strategy.stats(model)
outcomes["scheduled"] = {
    "digest": common.digest(model),
    "rounds": stats["rounds"],
    "changes": [(c["steps"], c["phase"], c["period"]) for c in stats["changes"]],
    "traced_anew": Traced.traces - set_period.before,
    "steps": stats["steps"],
    "phase": strategy.mirror(model).segment.phase,
    "rule": repr(strategy.rule),
}

# --- A rule that is not stable with two workers in step.


def unstable():
    return common.dense()


strategy, model = make(
    unstable, lambda: keras.optimizers.SGD(0.0), tf_smb.ReadThenAccumulate(moving_rate=0.8)
)
fit(model, epochs=1)

common.result(strategy, outcomes=outcomes)
