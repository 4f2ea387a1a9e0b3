"""A training loop of one's own: `start`, `shard`, `step` and `finish` of the strategy.

tf-smb run -n 2 -- python examples/custom_loop.py
"""

from __future__ import annotations

import argparse

import digits_data
import keras
import tensorflow as tf

import tf_smb


def main() -> None:
    """Trains a dense network with plain TensorFlow code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="an .npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--epochs", type=int, default=None)
    args = parser.parse_args()
    (x_train, y_train), (x_test, y_test), name = digits_data.load(args.data)
    keras.utils.set_random_seed(1)

    strategy = tf_smb.SMBStrategy(rule=tf_smb.ElasticAveraging(communication_period=4))
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input(x_train.shape[1:]),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train_on(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        strategy.step(model)  # counts the step, and exchanges when one is due
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60_000).batch(64)
    strategy.start(model)
    for epoch in range(args.epochs or digits_data.enough_epochs(len(x_train))):
        for x, y in strategy.shard(dataset):
            loss = train_on(x, y)
        print(f"worker {strategy.worker_index} epoch {epoch}: loss {float(loss):.4f}", flush=True)
    strategy.finish(model)

    predicted = model.predict(x_test, batch_size=1000, verbose=0).argmax(axis=1)
    print(f"center test accuracy: {(predicted == y_test).mean():.4f} ({name})", flush=True)


if __name__ == "__main__":
    main()
