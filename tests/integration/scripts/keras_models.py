"""Models of many kinds, each trained, compared with the center, and exported."""

from __future__ import annotations

from typing import Any

import common
import keras
import keras_common
import numpy as np
import tensorflow as tf
from keras_common import Facts, case, fit, held, wait_for

import tf_smb

layers = keras.layers
args = keras_common.arguments()
x, y = common.data(samples=96, features=8)
tokens = np.random.default_rng(1).integers(0, 20, size=(96, 6)).astype("int32")
classes = (y > 0).astype("int32")


def without_objects(value: Any) -> np.ndarray:
    """Returns an array that can be written without pickle: strings as bytes of one length."""
    array = np.asarray(value)
    return array.astype("S") if array.dtype == object else array


def export(strategy: tf_smb.SMBStrategy, model: keras.Model, inputs: Any) -> None:
    """Writes the SavedModel, inputs, and what the center predicts from them."""
    if not strategy.exchanges:
        return
    name = keras_common.running()
    model.export(args.out / name, verbose=False)
    if strategy.worker_index == 0:
        predicted = keras_common.as_arrays(model.predict(inputs, verbose=0))
        flat = inputs if isinstance(inputs, dict) else {"": inputs}
        np.savez(
            args.out / f"{name}.npz",
            **{f"input:{key}": without_objects(value) for key, value in flat.items()},
            **{f"output:{i}": value for i, value in enumerate(predicted)},
        )


def trained(
    strategy: tf_smb.SMBStrategy, model: keras.Model, inputs: Any, targets: Any, **compiled: Any
) -> Facts:
    """Trains a model made in the scope: 12 steps, and one in lockstep."""
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), compiled.pop("loss", "mse"), **compiled)
    facts = fit(model, inputs, targets, batch_size=8, epochs=2)
    export(strategy, model, inputs)
    return {**facts, **held(strategy, model)}


@case
def sequential(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras_common.dense()
    return trained(strategy, model, x, y)


@case
def functional(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        inputs = layers.Input((8,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        model = keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([inputs, hidden])))
    return trained(strategy, model, x, y)


class Subclassed(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = layers.Dense(8, activation="relu")
        self.dropout = layers.Dropout(0.1)
        self.head = layers.Dense(1)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.scale * self.head(self.dropout(self.hidden(inputs), training=training))


@case
def subclassed(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = Subclassed()
    return trained(strategy, model, x, y)


@case
def unbuilt(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
    return trained(strategy, model, x, y)


@case
def nested(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        inner = keras.Sequential([layers.Input((8,)), layers.Dense(8, activation="relu")])
        inputs = layers.Input((8,))
        model = keras.Model(inputs, Subclassed()(inner(inputs)))
    return trained(strategy, model, x, y)


@case
def shared_layers(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        shared = layers.Dense(8, activation="relu")
        inputs = layers.Input((8,))
        model = keras.Model(inputs, layers.Dense(1)(shared(shared(inputs))))
    facts = trained(strategy, model, x, y)
    return {**facts, "num_weights": len(model.weights)}


@case
def multi_output(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        inputs = layers.Input((8,))
        hidden = layers.Dense(8, activation="relu")(inputs)
        outputs = {
            "value": layers.Dense(1, name="value")(hidden),
            "sign": layers.Dense(1, activation="sigmoid", name="sign")(hidden),
        }
        model = keras.Model(inputs, outputs)
    return trained(
        strategy,
        model,
        x,
        {"value": y, "sign": classes},
        loss={"value": "mse", "sign": "binary_crossentropy"},
        loss_weights={"value": 1.0, "sign": 0.5},
        metrics={"value": ["mae"], "sign": ["accuracy"]},
    )


@case
def convolution(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((8,)),
                layers.Reshape((8, 1)),
                layers.Conv1D(4, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
    return trained(strategy, model, x, y)


def recurrent(strategy: tf_smb.SMBStrategy, layer: type[keras.layers.Layer]) -> Facts:
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((8,)), layers.Reshape((4, 2)), layer(4), layers.Dense(1)]
        )
    return trained(strategy, model, x, y)


@case
def lstm(strategy: tf_smb.SMBStrategy) -> Facts:
    return recurrent(strategy, layers.LSTM)


@case
def gru(strategy: tf_smb.SMBStrategy) -> Facts:
    return recurrent(strategy, layers.GRU)


@case
def embedding(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras.Sequential(
            [
                layers.Input((6,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
    return trained(strategy, model, tokens, y)


@case
def transformer(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        inputs = layers.Input((6,), dtype="int32")
        hidden = layers.Embedding(20, 8)(inputs)
        attended = layers.MultiHeadAttention(num_heads=2, key_dim=4, dropout=0.1)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attended)
        hidden = layers.LayerNormalization()(hidden + layers.Dense(8, activation="gelu")(hidden))
        model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden)))
    return trained(strategy, model, tokens, y)


@case
def preprocessing(strategy: tf_smb.SMBStrategy) -> Facts:
    """Adapted statistics, a lookup table, strings; from tf.data, as Keras takes strings."""
    words = np.array(["red", "green", "blue", "grey"])[tokens[:, 0] % 4]
    with strategy.scope():
        normalization = layers.Normalization()
        normalization.adapt(x)
        lookup = layers.StringLookup(vocabulary=["red", "green", "blue"])
        numbers = layers.Input((8,), name="numbers")
        word = layers.Input((1,), dtype="string", name="word")
        color = layers.Flatten()(layers.Embedding(4, 2)(lookup(word)))
        hidden = layers.Concatenate()([normalization(numbers), color])
        model = keras.Model({"numbers": numbers, "word": word}, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.Adam(0.01), "mse")
    inputs = {"numbers": x, "word": words[:, None]}
    dataset = tf.data.Dataset.from_tensor_slices((inputs, y)).batch(8)
    facts = fit(model, dataset, epochs=2)
    tensors = {"numbers": tf.constant(x), "word": tf.constant(words[:, None])}
    export(strategy, model, tensors)
    mean = np.asarray(normalization.mean).ravel()
    return {
        **facts,
        **held(strategy, model),
        "statistics_error": float(abs(mean - x.mean(axis=0)).max()),
    }


# --- What does not train ---


@case
def lora(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        adapted = layers.Dense(8, activation="relu")
        model = keras.Sequential([layers.Input((8,)), adapted, layers.Dense(1)])
        adapted.enable_lora(2)
    frozen: list[np.ndarray] = []
    lora_b = next(weight for weight in adapted.trainable_weights if "lora" in weight.path)
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: frozen.append(adapted._kernel.numpy())
    )
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    facts = fit(model, x, y, batch_size=8, epochs=2, callbacks=[begin])
    export(strategy, model, x)
    return {
        **facts,
        **held(strategy, model),
        "frozen": bool(all((adapted._kernel.numpy() == value).all() for value in frozen)),
        "trains": bool(lora_b.numpy().any()),
    }


@case
def lora_between_fits(strategy: tf_smb.SMBStrategy) -> Facts:
    """Fine-tuning: the model gets other weights, and with them another segment."""
    with strategy.scope():
        model = keras_common.dense()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    first = fit(model, x, y, batch_size=8)
    kernel = model.layers[0].kernel.numpy()
    with strategy.scope():
        model.layers[0].enable_lora(2)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    second = fit(model, x, y, batch_size=8)
    export(strategy, model, x)
    return {
        **second,
        **held(strategy, model),
        "frozen": bool((model.layers[0]._kernel.numpy() == kernel).all()),
        "trains": len(model.trainable_weights) == 5 and first["steps"] == 6,
    }


@case
def frozen_backbone(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        backbone = keras_common.dense()
        backbone.trainable = False
        model = keras.Sequential([layers.Input((8,)), backbone, layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    before: list[str] = []
    begin = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: before.append(common.digest(backbone))
    )
    facts = fit(model, x, y, batch_size=8, epochs=2, callbacks=[begin])
    export(strategy, model, x)
    return {
        **facts,
        **held(strategy, model),
        "frozen": set(before) == {common.digest(backbone)},
        "trains": len(model.trainable_weights) == 2,
    }


@case
def freezing_between_fits(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras_common.dense()
        model.compile(keras.optimizers.Adam(0.01), "mse")
    first = fit(model, x, y, batch_size=8)
    kernel, head = (model.layers[i].kernel.numpy() for i in (0, -1))
    model.layers[0].trainable = False
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    second = fit(model, x, y, batch_size=8)
    export(strategy, model, x)
    return {
        **second,
        **held(strategy, model),
        "epochs": first["epochs"] + second["epochs"],
        "frozen": bool((model.layers[0].kernel.numpy() == kernel).all()),
        "trains": bool((model.layers[-1].kernel.numpy() != head).any()),
    }


# --- Several, and changed ---


def two_models(strategy: tf_smb.SMBStrategy, turns: list[int]) -> Facts:
    models = []
    for features in (8, 4):
        with strategy.scope():
            models.append(keras_common.dense(features=features))
            models[-1].compile(keras.optimizers.Adam(0.01), "mse")
    facts: list[Facts] = [{}, {}]
    epochs = [0, 0]
    for i in turns:
        facts[i] = fit(models[i], x[:, : (8, 4)[i]], y, batch_size=8)
        epochs[i] += facts[i]["epochs"]
    export(strategy, models[0], x)
    return {
        **facts[0],
        **held(strategy, *models),
        "epochs": epochs[0],
        "other": {**facts[1], "epochs": epochs[1]},
    }


@case
def two_models_in_turn(strategy: tf_smb.SMBStrategy) -> Facts:
    return two_models(strategy, [0, 0, 1, 1])


@case
def two_models_alternately(strategy: tf_smb.SMBStrategy) -> Facts:
    return two_models(strategy, [0, 1, 0, 1])


def distance(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


@case
def load_weights_between_fits(strategy: tf_smb.SMBStrategy) -> Facts:
    with strategy.scope():
        model = keras_common.dense()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    first = fit(model, x, y, batch_size=8)
    path = args.out / "between.weights.h5"
    saved = model.get_weights()
    model.save_weights(path)
    fit(model, x, y, batch_size=8)
    moved = distance(model.get_weights(), saved)
    if strategy.exchanges:
        model.load_weights(wait_for(path))
    model.optimizer.learning_rate = 0.0  # so that the fit ends with what it began with
    last = fit(model, x, y, batch_size=8)
    export(strategy, model, x)
    return {
        **last,
        **held(strategy, model),
        "epochs": 2 * first["epochs"] + last["epochs"],
        "moved": moved,
        "off": distance(model.get_weights(), saved),
    }


keras_common.run_cases(args)
