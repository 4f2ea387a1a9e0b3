"""Loads an exported model with TensorFlow alone, where tf_smb need not be installed.

python examples/load_export.py exported --data mnist.npz
"""

from __future__ import annotations

import argparse
import importlib.util

import digits_data
import tensorflow as tf


def main() -> None:
    """Serves the test images with the SavedModel and prints its accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", help="the SavedModel's folder")
    parser.add_argument("--data", help="an .npz file with x_train, y_train, x_test, y_test")
    args = parser.parse_args()
    installed = importlib.util.find_spec("tf_smb") is not None
    print(f"tf_smb is {'installed' if installed else 'not installed'} here", flush=True)
    _, (x_test, y_test), name = digits_data.load(args.data)
    model = tf.saved_model.load(args.export)
    predicted = model.serve(x_test).numpy().argmax(axis=1)
    print(f"exported model's test accuracy: {(predicted == y_test).mean():.4f} ({name})")


if __name__ == "__main__":
    main()
