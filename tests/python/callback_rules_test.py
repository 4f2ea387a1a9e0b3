"""The callbacks of tf_smb, against a made-up strategy."""

import math
import os
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tf_smb.callbacks import (
    CenterCheckpoint,
    EvaluateCenter,
    ExchangeAtBatchEnd,
    ExchangeLogger,
    ProgressAlignment,
    SetCommunicationPeriod,
)
from tf_smb.callbacks.center_checkpoint import _delete_oldest
from tf_smb.callbacks.exchange_logger import mean_staleness
from tf_smb.errors import FailedPreconditionError, InvalidArgumentError
from tf_smb.strategies import callback_order
from tf_smb.strategies.fit_record import FitRecord

DATA = (np.zeros((4, 2), "float32"), np.zeros((4, 1), "float32"))
NOT_COUNTS = [0, -1, 1.5, True, "two"]


@pytest.mark.parametrize(
    ("make", "anchor", "values"),
    [
        (lambda v: SetCommunicationPeriod({0: 1}, by=v), "E337", ["batch", None, 1]),
        (lambda v: SetCommunicationPeriod(max, by=v), "E338", ["step"]),
        (SetCommunicationPeriod, "E339", [{}, 5, None, [1], {-1: 2}, {"0": 1}, {True: 1}]),
        (lambda v: SetCommunicationPeriod({0: v}), "E340", [*NOT_COUNTS, None, 10**9 + 1]),
        (lambda v: EvaluateCenter(DATA, every=v), "E341", [*NOT_COUNTS, None]),
        (lambda v: EvaluateCenter(DATA, prefix=v), "E342", ["", None, 3]),
        (CenterCheckpoint, "E343", ["a.h5", "a.keras", "", ".weights.h5", "d/.weights.h5", 3]),
        (
            lambda v: CenterCheckpoint(v + ".weights.h5"),
            "E344",
            ["{batch}", "{}", "{0}", "{epoch", "epoch}", "{{epoch}}", "{epoch!r}", "{epoch}/a"],
        ),
        (lambda v: CenterCheckpoint("a.weights.h5", 1, v), "E345", [1, 0]),
        (lambda v: CenterCheckpoint("a.weights.h5", every_epochs=v), "E346", NOT_COUNTS),
        (lambda v: CenterCheckpoint("a.weights.h5", every_steps=v), "E346", NOT_COUNTS),
        (lambda v: CenterCheckpoint("a.weights.h5", keep=v), "E346", NOT_COUNTS),
        (ProgressAlignment, "E347", ["last", None, 1]),
        (lambda v: ProgressAlignment(steps=v), "E348", NOT_COUNTS),
        (lambda v: ExchangeLogger(every=v), "E349", [*NOT_COUNTS, None, "step"]),
    ],
)
def test_bad_arguments_are_refused_with_their_value(make, anchor, values):
    for value in values:
        with pytest.raises(InvalidArgumentError, match=rf"\[SMB-{anchor}\]$") as refused:
            make(value)
        assert repr(value) in str(refused.value) or repr(value)[1:-1] in str(refused.value)


@pytest.mark.parametrize(
    "callback",
    [
        SetCommunicationPeriod({0: 1}),
        EvaluateCenter(DATA),
        CenterCheckpoint("a.weights.h5"),
        ProgressAlignment(),
        ExchangeLogger(),
        ExchangeAtBatchEnd(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_model_without_strategy_is_refused_by_name(callback, monkeypatch):
    monkeypatch.delenv("TF_SMB_PLAIN", raising=False)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)], name="outside")
    model.compile("sgd", "mse")
    with pytest.raises(FailedPreconditionError, match=r"model 'outside' .* \[SMB-E335\]$") as error:
        model.fit(*DATA, callbacks=[callback], verbose=0)
    assert str(error.value).startswith(type(callback).__name__)


# --- A made-up strategy ----------------------------------------------------------------


class Job:
    """A segment, a mirror and a strategy in one, of worker 0 of several."""

    exchanges = started = True
    worker_index = 0

    def __init__(self, others=()):
        self.distribute_strategy = self.segment = self
        self.stop_training = self.stop_requested = False
        self.steps = 0
        self.periods = []
        self.others = others

    def has_mirror(self, model):
        return True

    def mirror(self, model):
        return self

    def set_period(self, period):
        self.periods.append((self.steps, period))

    def publish_steps(self, steps):
        self.published = steps

    def request_stop(self):
        self.stop_requested = True

    def members(self):
        return [member(0, self.steps), *self.others]


def member(index, steps, epoch=0, state="live", training=True):
    return SimpleNamespace(
        worker_index=index, steps=steps, epoch=epoch, state=state, training=training
    )


def on(job, callback, record=None):
    callback.set_model(job)
    callback.record = record or FitRecord()
    callback.on_train_begin()
    return callback


def epochs(job, callback, numbers, steps=4, before_batch=lambda: None):
    """Goes through epochs as Keras does, until one is stopped."""
    for epoch in numbers:
        callback.on_epoch_begin(epoch)
        for batch in range(steps):
            before_batch()
            job.steps += 1
            callback.on_train_batch_end(batch)
            if job.stop_training:
                break
        callback.on_epoch_end(epoch, {"loss": 1.0 / (1 + epoch)})
        if job.stop_training:
            break


def test_period_by_epoch_is_set_once_and_looked_up_in_a_later_fit():
    job = Job()
    callback = on(job, SetCommunicationPeriod({1: 2, 3: 10}))
    epochs(job, callback, range(5))
    assert job.periods == [(4, 2), (12, 10)]
    callback.on_train_begin()
    epochs(job, callback, range(2, 4))
    assert [period for _, period in job.periods[2:]] == [2, 10]


def test_period_by_step():
    job = Job()
    epochs(job, on(job, SetCommunicationPeriod({0: 1, 3: 5, 4: 6, 9: 7}, by="step")), range(3))
    assert job.periods == [(0, 1), (3, 5), (4, 6), (9, 7)]


def test_period_by_a_function_of_the_logs():
    job = Job()
    callback = on(job, SetCommunicationPeriod(lambda epoch, logs: math.ceil(8 * logs["loss"])))
    epochs(job, callback, range(3))
    assert job.periods == [(4, 8), (8, 4)]
    callback = on(job, SetCommunicationPeriod(lambda epoch, logs: 0))
    with pytest.raises(InvalidArgumentError, match="the function's period must be .* got 0"):
        epochs(job, callback, range(1))


def aligned(stop, steps=None, **arguments):
    callback = ProgressAlignment(stop, steps)
    last = callback.plan(0, 3)
    job = Job(**arguments)
    callback.set_params({"epochs": last, "steps": 4})
    assert callback.params["epochs"] == 3
    return job, on(job, callback), last


def test_first_ends_with_its_own_epochs_or_steps():
    job, callback, last = aligned("first", others=[member(1, 2)])
    assert last == 3
    epochs(job, callback, range(last))
    assert (job.steps, callback.ended, job.stop_requested, job.published) == (12, True, True, 12)
    job, callback, last = aligned("first", steps=14)
    epochs(job, callback, range(last))
    assert (job.steps, job.stop_training) == (14, True)


def test_another_workers_request_ends_the_step():
    for stop in ("first", "mean", "all"):
        job, callback, last = aligned(stop, others=[member(1, 0)])

        def request(job=job):
            job.stop_requested = job.steps >= 5

        epochs(job, callback, range(last), before_batch=request)
        assert (job.steps, callback.ended) == (6, True)


def test_mean_counts_who_is_live_and_in_training():
    others = [
        member(1, 6),
        member(2, 0, state="dead"),
        member(3, 0, state="left"),
        member(4, 0, training=False),
    ]
    job, callback, last = aligned("mean", others=others)
    epochs(job, callback, range(last))
    assert job.steps == 18  # (18 + 6) / 2 == 12


def test_mean_counts_steps_of_this_fit_only():
    job, callback, last = aligned("mean", others=[member(1, 106)])
    job.steps = 50
    callback.record.steps_before = {0: 50, 1: 100}
    epochs(job, callback, range(last))
    assert job.steps == 50 + 18


def test_all_waits_for_the_last_worker():
    other = member(1, 0)
    job, callback, last = aligned("all", others=[other])

    def follow():
        other.steps = job.steps // 2
        other.epoch = other.steps // 4

    epochs(job, callback, range(last), before_batch=follow)
    assert other.epoch == 3 and 24 <= job.steps <= 26
    other = member(1, 0)
    job, callback, last = aligned("all", steps=5, others=[other])
    epochs(job, callback, range(last), before_batch=follow)
    assert other.steps == 5 and 10 <= job.steps <= 12


def test_stopped_by_another_callback():
    for stop, ended in (("first", True), ("mean", False), ("all", False)):
        job, callback, last = aligned(stop, others=[member(1, 0)])

        def stop_early(job=job):
            job.stop_training = job.steps == 2

        epochs(job, callback, range(last), before_batch=stop_early)
        assert (callback.ended, job.stop_requested) == (ended, ended)


def test_data_that_cannot_be_repeated_ends_the_fit_without_a_request():
    job, callback, last = aligned("all", others=[member(1, 0)])
    epochs(job, callback, range(3))
    epochs(job, callback, range(3, last), steps=0)
    assert job.stop_training and callback.ended and not job.stop_requested


# --- Files, logs, order ----------------------------------------------------------------


def test_oldest_files_of_the_template_are_deleted_and_no_others(tmp_path):
    names = [f"{epoch:02d}-{10 * epoch}.weights.h5" for epoch in range(1, 13)]
    others = ["best-1.weights.h5", "01-x.weights.h5", ".01-10.weights.h5.a", "01-10.weights.h5x"]
    for age, name in enumerate([*names, *others]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    _delete_oldest(str(tmp_path / "{epoch:02d}-{step}.weights.h5"), 5)
    assert {path.name for path in tmp_path.iterdir()} == {*names[-5:], *others}


def test_mean_staleness():
    assert mean_staleness(np.zeros(16)) == 0.0
    assert mean_staleness(np.array([1.0, 1.0, 0, 0])) == 0.5
    assert mean_staleness(np.array([0, 0, 2.0, 0])) == 2.5
    assert mean_staleness(np.array([0, 0, 0, 1.0])) == 5.5


def test_callbacks_are_sorted_whatever_the_users_order():
    early = keras.callbacks.EarlyStopping("center_val_loss")
    own = [keras.callbacks.LambdaCallback(), keras.callbacks.EarlyStopping("loss")]
    ours = [
        ExchangeAtBatchEnd(),
        EvaluateCenter(DATA),
        ExchangeLogger(),
        SetCommunicationPeriod({0: 1}),
        ProgressAlignment(),
    ]
    kinds = [type(callback) for callback in ours]
    for given in (
        [early, *own, *ours],
        [*reversed(ours), *own, early],
        [own[0], *ours, early, own[1]],
    ):
        callback_order.check(given)
        ordered = callback_order.in_order(given)
        assert [type(c) for c in ordered if type(c) in kinds] == kinds
        assert ordered.index(ours[1]) < ordered.index(ours[2]) < ordered.index(own[0])
        assert type(ordered[-1]) is ProgressAlignment
        assert [c for c in ordered if c in own] == own
        assert early not in ordered  # asked by another, when there is something new


def test_early_stopping_on_the_center_counts_evaluations():
    early = keras.callbacks.EarlyStopping("center_val_loss", patience=2, mode="min")
    evaluator = EvaluateCenter(DATA)
    evaluator, _, asked = callback_order.in_order([early, evaluator])
    model = SimpleNamespace(stop_training=False)
    asked.set_model(model)
    asked.on_train_begin()
    for epoch, new in enumerate([True, False, False, False, True, False]):
        evaluator.is_new = new
        asked.on_epoch_end(epoch, {"center_val_loss": 1.0})
        assert not model.stop_training
    evaluator.is_new = True
    asked.on_epoch_end(6, {"center_val_loss": 1.0})
    assert model.stop_training


def test_callbacks_that_cannot_work_are_refused():
    for given, text in (
        ([keras.callbacks.BackupAndRestore("folder")], "use tf_smb.callbacks.BackupAndRestore"),
        ([ExchangeLogger(), EvaluateCenter(DATA), ExchangeLogger()], "given 2 ExchangeLogger"),
    ):
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            callback_order.check(given)
    callback_order.check([CenterCheckpoint("a.weights.h5"), CenterCheckpoint("b.weights.h5")])


def test_record_counts_samples_where_the_data_tells():
    record = FitRecord()
    record.add_epoch(4, 16, 60)
    record.add_epoch(2, 16, 60)  # stopped early
    record.add_epoch(4, 16, None)
    assert (record.epochs, record.samples) == (3, 60 + 32 + 64)
    record.add_epoch(4, None, None)
    record.add_epoch(4, 16, 60)
    assert (record.epochs, record.samples) == (5, None)
