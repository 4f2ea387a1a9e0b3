"""Mistakes that a new user makes, one for each name."""

import sys

import common
import keras
import numpy as np

import tf_smb

mistake = sys.argv[1]
x, y = common.data()


def strategy(**arguments):
    return tf_smb.SMBStrategy(**arguments)


if mistake == "model_outside":
    smb = strategy()
    model = common.dense()
    with smb.scope():
        model.compile("sgd", "mse")
    model.fit(x, y)
elif mistake == "optimizer_outside":
    smb = strategy()
    optimizer = keras.optimizers.Adam()
    with smb.scope():
        model = common.dense()
        model.compile(optimizer, "mse")
    model.fit(x, y)
elif mistake == "jit_compile":
    with strategy().scope():
        model = common.dense()
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(x, y)
elif mistake == "diverged":
    with strategy().scope():
        model = common.dense()
        model.compile(keras.optimizers.SGD(1e30), "mse")
    model.fit(x, y, verbose=0)
elif mistake == "custom_run":
    smb = strategy()
    with smb.scope():
        model = common.dense()
    smb.run(lambda: model(x))
elif mistake == "not_built":
    smb = strategy()
    with smb.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    smb.start(model)
elif mistake == "different_models":
    smb = strategy()
    with smb.scope():
        model = common.dense() if smb.worker_index == 0 else common.dense(features=7)
        model.compile("sgd", "mse")
    model.fit(x[:, : model.input_shape[1]], y)
elif mistake == "few_samples":
    with strategy().scope():
        model = common.dense()
        model.compile("sgd", "mse")
    model.fit(x[:1], y[:1])
elif mistake in ("other_job", "finished_job", "same_index"):
    with tf_smb.Server() as server:
        job = "mine" if mistake != "other_job" else "another"
        client = tf_smb.Client(server.address, job_id=job)
        layout = [(v.path, tuple(v.shape)) for v in common.dense().weights]
        segment = client.create("run/0", layout)
        segment.start([np.zeros(shape, np.float32) for _, shape in layout], worker_index=0)
        if mistake == "finished_job":
            segment.detach()
        import os

        os.environ["TF_SMB_JOB_ID"] = "mine"
        with strategy(server=server.address).scope():
            model = common.dense()
            model.compile("sgd", "mse")
        model.fit(x, y)
else:
    raise SystemExit(f"no such mistake: {mistake}")
