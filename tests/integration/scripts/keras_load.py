"""Loads what keras_models.py exported, with TensorFlow alone, and compares the predictions."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

# Every import of the package fails from here on, as where it is not installed.
sys.modules["tf_smb"] = None  # type: ignore[assignment]

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
args = parser.parse_args()

outcomes: dict[str, dict[str, object]] = {}
for file in sorted(args.folder.glob("*.npz")):
    try:
        arrays = np.load(file)
        inputs = {
            key.partition(":")[2]: tf.constant(arrays[key])
            for key in arrays
            if key.startswith("input")
        }
        expected = [
            arrays[key] for key in sorted(key for key in arrays if key.startswith("output"))
        ]
        model = tf.saved_model.load(args.folder / file.stem)
        # By its signature, which is the same in all versions of Keras: tensors by name.
        serve = model.signatures["serving_default"]
        names = serve.structured_input_signature[1]
        named = dict.fromkeys(names, inputs[""]) if "" in inputs else inputs
        served = tf.nest.flatten(serve(**named))
        worst = max(
            float(np.abs(a.numpy() - b).max()) for a, b in zip(served, expected, strict=True)
        )
        operations = {
            node.op
            for function in model.signatures.values()
            for node in function.graph.as_graph_def().node
        }
        outcomes[file.stem] = {
            "worst": worst,
            "own_operations": sorted(op for op in operations if "smb" in op.lower()),
        }
    except Exception as error:
        outcomes[file.stem] = {"error": f"{type(error).__name__}: {error}"[:500]}
loaded = [name for name, module in sys.modules.items() if name.startswith("tf_smb") and module]
print("RESULT " + json.dumps({"worker": 0, "outcomes": outcomes, "loaded": loaded}), flush=True)
