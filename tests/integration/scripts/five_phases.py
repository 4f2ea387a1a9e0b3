"""Five phases; worker 0 is slow, 1 leaves, 2 is killed, 3 joins late."""

import os
import signal
import time

import common
import keras

import tf_smb

ROLE = {0: "slow", 1: "leaver", 2: "killed", 3: "late"}
STEP_S = 0.01
SCHEDULE = tf_smb.Schedule(
    [
        (0, tf_smb.PeriodicAveraging(1)),
        (30, tf_smb.ElasticAveraging(4)),
        (70, tf_smb.DeltaAveraging(5)),
        (120, tf_smb.PeriodicAveraging(8)),
        (160, tf_smb.DeltaAveraging(10)),
    ]
)


class Play(keras.callbacks.Callback):
    """Plays this worker's part, and notes the phases that it goes through."""

    def __init__(self, role):
        super().__init__()
        self.role = role
        self.phases = []
        self.steps_s = 0.0

    def on_train_batch_end(self, batch, logs=None):
        segment = strategy.mirror(self.model).segment
        steps = int(strategy.mirror(self.model).steps)
        if not self.phases or self.phases[-1] != segment.phase:
            self.phases.append(segment.phase)
        wait_s = STEP_S * (5 if self.role == "slow" else 1)
        time.sleep(wait_s)
        self.steps_s += wait_s
        if self.role == "leaver" and segment.phase == 2:
            self.model.stop_training = True
        if self.role == "killed" and segment.phase == 3 and steps % 3 == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_phase(phase):
    """Returns when the job has come to a phase."""
    client = tf_smb.Client(os.environ["TF_SMB_SERVER"])
    while not client.segments():
        time.sleep(0.05)
    with client.attach("run/0") as segment:
        while segment.status()["phase"] < phase:
            time.sleep(0.05)


strategy = tf_smb.SMBStrategy(schedule=SCHEDULE, settle_steps=8)
role = ROLE[strategy.worker_index]
keras.utils.set_random_seed(1)
x, y = common.data(samples=4 * 64 * 8)
with strategy.scope():
    model = common.dense()
    model.compile(keras.optimizers.SGD(0.01), "mse")
play = Play(role)
if role == "late":
    wait_for_phase(1)  # the others begin without it: start_timeout_s
began = time.monotonic()
model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[play])
stats = strategy.stats(model)
common.result(
    strategy,
    role=role,
    phases=play.phases,
    digest=common.digest(model),
    rounds=stats["rounds"],
    exchanges=stats["exchanges"],
    steps=stats["steps"],
    seconds=time.monotonic() - began,
    own_seconds=play.steps_s,
    waiting_s=stats["waiting_s"],
)
