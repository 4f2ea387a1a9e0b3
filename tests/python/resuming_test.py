"""Where a fit with BackupAndRestore begins, for all kinds of data: without a box and processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_smb import DeltaAveraging, ElasticAveraging, PeriodicAveraging, Schedule, errors
from tf_smb.callbacks import BackupAndRestore
from tf_smb.strategies import model_backup
from tf_smb.strategies.backup_files import Backup, BackupFolder
from tf_smb.strategies.data_order import Deal, Position
from tf_smb.strategies.job_state import JobState
from tf_smb.strategies.resuming import Resuming

X = np.arange(120, dtype="float32")[:, None]
STATE = JobState(
    steps=50,
    batches=50,
    phase=0,
    live=(0, 1, 2, 3),
    positions=(Position(1, 2), Position(1, 4), Position(2, 1), Position(1, 1)),
    deals=(),
    kind="samples",
    total=120,
    batch_size=6,
    shuffle=True,
    replicated=False,
    seed=9,
)


def arguments(callback, x=X, **changes):
    values = {
        "x": x,
        "y": None,
        "sample_weight": None,
        "batch_size": 6,
        "validation_data": None,
        "validation_split": 0.0,
        "shuffle": True,
        "class_weight": None,
        "steps_per_epoch": None,
        "initial_epoch": 0,
        "callbacks": [callback],
    }
    return {**values, **changes}


def begin(folder, num_workers, x=X, replicated=False, **changes):
    """Returns (resuming, share, arguments) of each worker."""
    begun = []
    for index in range(num_workers):
        strategy = SimpleNamespace(
            worker_index=index, num_workers=num_workers, exchanges=True, num_replicas_in_sync=1
        )
        given = arguments(BackupAndRestore(folder), x, **changes)
        resuming = Resuming.of(strategy, given)
        part = resuming.share(given, 1 if replicated else num_workers, 0 if replicated else index)
        begun.append((resuming, part, given))
    return begun


def samples_of(resuming, part, epoch):
    """What a worker trains on in an epoch."""
    model = SimpleNamespace()
    segment = SimpleNamespace(begin_epoch=lambda *_: None)
    resuming._strategy.mirror = lambda _: SimpleNamespace(segment=segment, batches=100)
    resuming.begin_epoch(model, epoch)
    batches = (
        [part.x[i] for i in range(part.x.num_batches)] if hasattr(part.x, "num_batches") else part.x
    )
    found = []
    for batch in batches:
        batch = batch[0] if isinstance(batch, tuple) else batch
        found += np.asarray(batch).ravel().astype(int).tolist()
    return found


@pytest.fixture
def saved(tmp_path):
    def write(**changes):
        state = replace(STATE, **changes)
        BackupFolder(str(tmp_path)).write(state.to_json(), {})
        return tmp_path

    return write


def all_samples(begun, epoch):
    return sorted(s for resuming, part, _ in begun for s in samples_of(resuming, part, epoch))


def test_fresh_start(tmp_path):
    begun = begin(tmp_path / "none", 3)
    for resuming, part, given in begun:
        assert given["initial_epoch"] == 0 and given["shuffle"] is False
        assert (part.samples, part.total_samples, part.y) == (40, 120, None)
        assert part.x.batch_size == 6
        assert len(samples_of(resuming, part, 0)) == 40
    assert all_samples(begun, 0) == list(range(120))


def test_same_workers_go_on_where_each_was(saved):
    begun = begin(saved(), 4)
    assert [given["initial_epoch"] for _, _, given in begun] == [1, 1, 2, 1]
    # A share is 30 samples, 5 batches.
    lengths = [len(samples_of(r, part, g["initial_epoch"])) for r, part, g in begun]
    assert lengths == [18, 6, 24, 24]
    assert all_samples(begun, 3) == list(range(120))


@pytest.mark.parametrize(("num_workers", "batch_size"), [(3, 6), (5, 6), (4, 10)])
def test_others_share_what_is_left(saved, num_workers, batch_size, capsys):
    folder = saved()
    before = begin("/nowhere/backup", 4)
    done = {1: [], 2: []}
    for (resuming, part, _), position in zip(before, STATE.positions, strict=True):
        resuming._state = replace(resuming._state, seed=9)
        part.x._order = replace(part.x._order, seed=9)
        for epoch in (1, 2):
            mine = samples_of(resuming, part, epoch)
            if epoch > position.epoch:
                mine = []
            done[epoch] += mine[: position.batch * 6] if epoch == position.epoch else mine
    begun = begin(folder, num_workers, batch_size=batch_size)
    for resuming, _, given in begun:
        assert given["initial_epoch"] == 1
        assert resuming._state.deals == (Deal(6, STATE.positions),)
    for epoch in (1, 2):
        assert sorted(done[epoch] + all_samples(begun, epoch)) == list(range(120))
    assert all_samples(begun, 3) == list(range(120))
    assert "begins anew" not in capsys.readouterr().out


def test_worker_that_died_long_ago_does_not_bring_its_epoch_back(saved):
    positions = (Position(5, 2), Position(1, 3), Position(5, 2), Position(5, 2))
    folder = saved(positions=positions, live=(0, 2, 3))
    begun = begin(folder, 3)
    assert {given["initial_epoch"] for _, _, given in begun} == {5}
    assert len(all_samples(begun, 5)) == 120 - 3 * 12  # its share is dealt to all
    again = begin(folder, 4)
    assert [given["initial_epoch"] for _, _, given in again] == [5] * 4
    lengths = [len(samples_of(resuming, part, 5)) for resuming, part, _ in again]
    assert lengths == [18, 30, 18, 18]


def test_finished_epoch_is_not_begun_again(saved):
    folder = saved(positions=(Position(1, 5),) * 4)
    for num_workers in (4, 3):
        begun = begin(folder, num_workers)
        assert [given["initial_epoch"] for _, _, given in begun] == [2] * num_workers
        assert all_samples(begun, 2) == list(range(120))


def test_validation_split_is_set_aside_first(saved):
    begun = begin(saved(total=90), 2, validation_split=0.25)
    assert begun[0][2]["validation_split"] == 0.0
    held_out = begun[0][2]["validation_data"][0]
    assert held_out.ravel().tolist() == list(range(90, 120))
    assert max(all_samples(begun, 5)) == 89


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return (X[index * 6 : (index + 1) * 6],)


def test_py_dataset_is_dealt_by_its_batches(saved):
    folder = saved(kind="batches", total=20, batch_size=1)
    begun = begin(folder, 3, Batches(), batch_size=None)
    assert {given["initial_epoch"] for _, _, given in begun} == {1}
    # 5 batches are a share; one worker had done all of epoch 1.
    assert len(all_samples(begun, 1)) == 6 * (20 - 2 - 4 - 5 - 1)
    assert len(all_samples(begun, 2)) == 6 * (20 - 1)
    assert all_samples(begun, 3) == list(range(120))


def pipeline():
    return tf.data.Dataset.from_tensor_slices(X).batch(6)


def test_pipeline_with_the_same_workers_skips_what_each_did(saved):
    begun = begin(saved(kind="pipeline", total=5, batch_size=1), 4, pipeline())
    assert [given["initial_epoch"] for _, _, given in begun] == [1, 1, 2, 1]
    lengths = [len(samples_of(r, part, g["initial_epoch"])) for r, part, g in begun]
    assert lengths == [18, 6, 24, 24]
    assert all(int(part.x.cardinality()) == 5 for _, part, _ in begun)  # to Keras
    assert all_samples(begun, 3) == list(range(120))


def test_pipeline_with_other_workers_skips_the_mean(saved, capsys):
    begun = begin(saved(kind="pipeline", total=5, batch_size=1), 2, pipeline())
    # 2 + 4 + 5 + 1 batches were done, so each of two workers leaves out 6 of its 10.
    assert [given["initial_epoch"] for _, _, given in begun] == [1, 1]
    lengths = [len(samples_of(resuming, part, 1)) for resuming, part, _ in begun]
    assert lengths == [24, 24]
    said = "4 workers had the data in other shares: each of 2 leaves out its first 6 batches"
    assert capsys.readouterr().out.count(said) == 1


def test_replicated_data_is_each_workers_own(saved):
    positions = (Position(1, 3), Position(1, 9))
    folder = saved(positions=positions, live=(0, 1), replicated=True)
    same = begin(folder, 2, replicated=True)
    parts = [samples_of(resuming, part, 1) for resuming, part, _ in same]
    assert [len(part) for part in parts] == [120 - 18, 120 - 54]
    assert parts[0][:54] != parts[1][:54]
    other = begin(folder, 3, replicated=True)
    assert [len(samples_of(resuming, part, 1)) for resuming, part, _ in other] == [120 - 36] * 3


@pytest.mark.parametrize(
    ("x", "changes", "why"),
    [
        (X, {"steps_per_epoch": 3}, "with steps_per_epoch it has no end to count from"),
        (X[:60], {}, "its data is not what it was"),
        (X, {"shuffle": False}, "its data is not what it was"),
        (pipeline().filter(lambda x: True), {}, "how many batches its tf.data pipeline has"),
        (pipeline(), {"class_weight": {0: 1.0}}, "a tf.data pipeline with class_weight"),
        (iter([X]), {}, "a list_iterator cannot be begun in its middle"),
    ],
)
def test_else_the_epoch_begins_anew(saved, x, changes, why, capsys):
    begun = begin(saved(), 2, x, **changes)
    assert capsys.readouterr().out.count(f"tf_smb: the interrupted epoch begins anew: {why}") == 1
    for resuming, _, given in begun:
        assert given["initial_epoch"] == 1
        assert resuming._state.positions == (Position(1, 0),) * 2
        assert resuming._state.deals == ()


def test_without_the_callback_there_is_nothing():
    strategy = SimpleNamespace(worker_index=0, num_workers=1, exchanges=True)
    for callbacks in (None, [], keras.callbacks.History()):
        assert Resuming.of(strategy, {"callbacks": callbacks}) is None


def test_nothing_is_backed_up_where_nothing_is_exchanged(tmp_path, capsys):
    strategy = SimpleNamespace(worker_index=0, num_workers=1, exchanges=False)
    assert Resuming.of(strategy, {"callbacks": [BackupAndRestore(tmp_path)]}) is None
    assert "does nothing while nothing is exchanged" in capsys.readouterr().out


def resumed(folder, schedule=None):
    resuming, _, _ = begin(folder, 4)[0]
    resuming._strategy.schedule = schedule or Schedule([(0, PeriodicAveraging(1))])
    return resuming


SCHEDULE = [(0, PeriodicAveraging(1)), (20, ElasticAveraging(4)), (80, DeltaAveraging(4))]


@pytest.mark.parametrize(
    ("unit", "phase", "position", "line"),
    [
        ("step", 1, (50, 1), "step 50, phase 2 of 3"),
        ("step", 0, (19, 1), "step 19, phase 1 of 3"),  # others had not come to the second yet
        ("epoch", 0, (50, 1), "step 50, phase 1 of 3"),
        ("epoch", 1, (50, 20), "step 50, phase 2 of 3"),  # the slowest is in epoch 1 still
    ],
)
def test_schedule_goes_on_in_the_saved_phase(saved, unit, phase, position, line):
    resuming = resumed(saved(phase=phase), Schedule(SCHEDULE, unit))
    assert resuming._restored_position(resuming._before) == position
    words = resuming._resumed_line(resuming._before, position[0])
    assert words.endswith(f"{line}, 4 workers")


def member(**values):
    return SimpleNamespace(**{"exchanges": 5, "steps": 60, "epoch": 2, "batch": 3, **values})


def test_position_is_that_of_the_last_exchange_in_this_fit(saved):
    resuming = resumed(saved())
    assert resuming._position(1, member()) == Position(2, 3)
    assert resuming._position(1, None) == STATE.positions[1]
    assert resuming._position(1, member(exchanges=0)) == STATE.positions[1]
    assert resuming._position(1, member(epoch=0, batch=9)) == STATE.positions[1]
    resuming._callback.record = SimpleNamespace(steps_before={1: 60})  # of the fit before
    assert resuming._position(1, member()) == STATE.positions[1]


def test_backup_that_cannot_be_written_does_not_end_training(saved, capsys):
    resuming = resumed(saved())
    live = [SimpleNamespace(worker_index=0, state="live", training=True)]
    mirror = SimpleNamespace(segment=SimpleNamespace(members=lambda: live))
    resuming._strategy.mirror = lambda _: mirror
    resuming._callback.every_s = 1e-9

    def write(*_):
        raise OSError("no space left")

    resuming._write = write
    resuming.end_batch(None)
    assert "this time: no space left" in capsys.readouterr().out
    live[0].worker_index = 1  # the chief is another one
    resuming.end_batch(None)
    assert capsys.readouterr().out == ""


def test_unbuilt_model_is_refused(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(errors.FailedPreconditionError, match=r"is not built.*\[SMB-E442\]"):
        model_backup.restore(model, None, Backup(1, {}, {}), tmp_path)
