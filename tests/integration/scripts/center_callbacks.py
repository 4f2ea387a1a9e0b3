"""Evaluates, logs and writes the center while training, in several orders of the callbacks."""

import csv
import sys
import time
from pathlib import Path

import common
import keras

import tf_smb
from tf_smb.callbacks import (
    CenterCheckpoint,
    EvaluateCenter,
    ExchangeLogger,
    SetCommunicationPeriod,
)

folder = Path(sys.argv[1])
x, y = common.data()
strategy = tf_smb.SMBStrategy(rule=tf_smb.DeltaAveraging(communication_period=4))
outcomes = {}
models = []  # kept, so that no segment is given back on one worker before it is on the other


class Probe(keras.callbacks.Callback):
    """Sees whether evaluating the center changed this worker's model, and slows it down."""

    def __init__(self):
        super().__init__()
        self.changed = []
        self.periods = []

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.002 * strategy.worker_index)
        self.before = self.state()
        self.last_logs = dict(logs)

    def on_epoch_begin(self, epoch, logs=None):
        self.periods.append(strategy.mirror(self.model).segment.period)

    def on_epoch_end(self, epoch, logs=None):
        if self.state() != self.before or logs["loss"] != self.last_logs["loss"]:
            self.changed.append(epoch)

    def state(self):
        metrics = [float(variable.numpy().sum()) for variable in self.model.metrics_variables]
        return common.digest(self.model), int(self.model.optimizer.iterations), metrics


def fit(name, order, epochs=4, **arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = common.dense()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    models.append(model)
    path = folder / name
    probe = Probe()
    early = keras.callbacks.EarlyStopping(
        "center_val_loss", patience=2, min_delta=arguments.pop("min_delta", 0)
    )
    given = {
        "evaluate": EvaluateCenter((x, y), batch_size=128),
        "early": early,
        "log": ExchangeLogger(path / "logs"),
        "period": SetCommunicationPeriod({1: 2, 2: 8}),
        "probe": probe,
        "file": CenterCheckpoint(path / "{epoch}-{step}.weights.h5", keep=2),
        "csv": keras.callbacks.CSVLogger(str(path.with_suffix(".csv"))),
        "best": keras.callbacks.ModelCheckpoint(
            str(path / "best.keras"), monitor="center_val_mae", save_best_only=True
        ),
    }
    path.mkdir(exist_ok=True)
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=epochs,
        verbose=0,
        callbacks=[given[part] for part in order],
        **arguments,
    )
    rows = []
    if path.with_suffix(".csv").exists():
        with path.with_suffix(".csv").open() as file:
            rows = list(csv.DictReader(file))
    outcomes[name] = {
        "history": history.history,
        "changed": probe.changed,
        "periods": probe.periods,
        "columns": list(rows[0]) if rows else [],
        "num_rows": len(rows),
        "stopped": early.stopped_epoch,
        "digest": common.digest(model),
        "steps": int(strategy.mirror(model).steps),
        "traces": model.train_function.experimental_get_tracing_count()
        if hasattr(model.train_function, "experimental_get_tracing_count")
        else 1,
    }


parts = ["evaluate", "early", "log", "period", "probe", "file", "csv", "best"]
fit("as_written", parts)
fit("reversed", parts[::-1])
fit("mixed", ["csv", "early", "probe", "log", "best", "evaluate", "file", "period"])
fit("stops", parts[::-1], epochs=40, min_delta=1e9)
common.result(strategy, outcomes=outcomes)
