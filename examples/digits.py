"""Handwritten digits: a small convolutional network, trained by one or several workers.

    python examples/digits.py                          # alone
    tf-smb run -n 2 -- python examples/digits.py       # two workers on this machine
    tf-smb run --compare -n 2 -- python examples/digits.py

The data is MNIST, from --data FILE or Keras' own download; where neither is to be had, the 1,797
small digits that scikit-learn brings.
"""

from __future__ import annotations

import argparse
import time

import digits_data
import keras

import tf_smb


def build(image_shape: tuple[int, ...]) -> keras.Model:
    """Returns a convolutional network of about 60,000 parameters."""
    return keras.Sequential(
        [
            keras.layers.Input(image_shape),
            keras.layers.Conv2D(16, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu", padding="same"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


class CenterHistory(keras.callbacks.Callback):
    """Keeps the center's weights every `every` steps, to be evaluated when training is over.

    Looking at them during training would give the other workers time.
    """

    def __init__(self, strategy: tf_smb.SMBStrategy, every: int = 10) -> None:
        super().__init__()
        self._strategy, self._every = strategy, every
        self._kept: list[tuple[int, float, list]] = []
        self._steps = 0
        self._began: float | None = None

    def on_train_batch_begin(self, batch, logs=None) -> None:
        """Starts the clock at the first step, when all workers are there."""
        if self._began is None:
            self._began = time.monotonic()

    def on_train_batch_end(self, batch, logs=None) -> None:
        """Keeps the center, on the chief."""
        self._steps += 1
        if self._steps % self._every == 0 and self._strategy.worker_index == 0:
            seconds = time.monotonic() - self._began
            with self._strategy.center_weights():
                self._kept.append((self._steps, seconds, self.model.get_weights()))

    def say_when(self, accuracy: float, x, y) -> None:
        """Prints the first of the kept centers that reaches a test accuracy."""
        final = self.model.get_weights()
        for steps, seconds, weights in self._kept:
            self.model.set_weights(weights)
            reached = self.model.evaluate(x, y, batch_size=1000, verbose=0)[1]
            if reached >= accuracy:
                print(
                    f"center test accuracy {reached:.4f} after {steps} steps a worker and "
                    f"{seconds:.2f} s of training",
                    flush=True,
                )
                break
        self.model.set_weights(final)


def main() -> None:
    """Trains, evaluates the center, and exports it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="an .npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--epochs", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=64, help="of each worker")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of one worker")
    parser.add_argument("--period", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--export", help="folder for a SavedModel of the center")
    parser.add_argument("--say-when", type=float, help="say when the center reached this accuracy")
    args = parser.parse_args()

    (x_train, y_train), (x_test, y_test), name = digits_data.load(args.data)
    keras.utils.set_random_seed(args.seed)

    strategy = tf_smb.SMBStrategy(rule=tf_smb.DeltaAveraging(args.period))
    with strategy.scope():
        model = build(x_train.shape[1:])
        # Twice the workers, twice the samples a step: the learning rate grows with them (the
        # linear scaling rule, Goyal et al. 2017, arXiv:1706.02677).
        optimizer = keras.optimizers.Adam(args.learning_rate * strategy.num_workers)
        model.compile(
            optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    history = CenterHistory(strategy)
    callbacks = [history] if args.say_when else []
    epochs = args.epochs or digits_data.enough_epochs(len(x_train))
    model.fit(x_train, y_train, batch_size=args.batch_size, epochs=epochs, callbacks=callbacks)
    if args.say_when:
        history.say_when(args.say_when, x_test, y_test)

    # Every worker holds the same center now; each says so.
    accuracy = model.evaluate(x_test, y_test, batch_size=1000, verbose=0)[1]
    print(f"worker {strategy.worker_index} {dict(strategy.stats())}", flush=True)
    print(f"center test accuracy: {accuracy:.4f} ({name})", flush=True)
    if args.export:
        model.export(args.export)  # written once, by the chief


if __name__ == "__main__":
    main()
