"""The backups of BackupAndRestore: whole or not there, two of them, and none of another model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tf_smb import errors
from tf_smb.callbacks import BackupAndRestore
from tf_smb.strategies.backup_files import BackupFolder
from tf_smb.strategies.data_order import Deal, Position
from tf_smb.strategies.job_state import JobState


def state(**changes):
    values = {
        "steps": 1234,
        "batches": 1300,
        "phase": 1,
        "live": (0, 2),
        "positions": (Position(2, 5), Position(1, 9), Position(3, 0)),
        "deals": (Deal(8, (Position(1, 4),)),),
        "kind": "samples",
        "total": 1000,
        "batch_size": 16,
        "shuffle": True,
        "replicated": False,
        "seed": 7,
        **changes,
    }
    return JobState(**values)


def arrays(value=1.0):
    bfloat16 = tf.bfloat16.as_numpy_dtype
    return {
        "weight0": np.full((3, 4), value, np.float32),
        "scalar": np.array(5, np.int64),
        "empty": np.zeros((0, 2), np.float64),
        "half": np.full(3, 1.5, bfloat16),
    }


def test_what_is_written_is_read_back(tmp_path):
    folder = BackupFolder(str(tmp_path / "a" / "b"))
    assert folder.newest(print) is None
    folder.write(state().to_json(), arrays())
    backup = folder.newest(print)
    assert JobState.from_json(backup.state) == state()
    for name, array in arrays().items():
        assert backup.arrays[name].dtype == array.dtype, name
        np.testing.assert_array_equal(backup.arrays[name], array)


def test_two_are_kept_and_all_are_removed(tmp_path):
    folder = BackupFolder(str(tmp_path / "backup"))
    for i in range(4):
        folder.write({}, arrays(i))
    assert folder.numbers() == [4, 3]
    assert sorted(path.name for path in folder.path.iterdir()) == ["backup-000003", "backup-000004"]
    folder.remove()
    assert not folder.path.exists()


def test_other_files_are_left_alone(tmp_path):
    folder = BackupFolder(str(tmp_path))
    (tmp_path / "mine.txt").write_text("mine")
    folder.write({}, arrays())
    folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_removal_shows_nobody_half_a_backup(tmp_path, monkeypatch):
    folder = BackupFolder(str(tmp_path))
    folder.write({"i": 0}, arrays())
    # Killed at the beginning of the removal: what is left is no backup.
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    folder.remove()
    assert folder.newest(print) is None
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    folder.remove()
    assert not tmp_path.exists()


def tear_file(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 1  # in the first array's data
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["arrays.npz", "state.json"])
@pytest.mark.parametrize("damage", ["torn", "empty", "gone"])
def test_spoiled_newest_is_skipped_with_a_line(tmp_path, file, damage):
    folder = BackupFolder(str(tmp_path))
    for i in range(2):
        folder.write({"i": i}, arrays(i))
    path = tmp_path / "backup-000002" / file
    {"torn": tear_file, "empty": lambda p: p.write_bytes(b""), "gone": lambda p: p.unlink()}[
        damage
    ](path)
    lines = []
    assert folder.newest(lines.append).state["i"] == 0
    assert len(lines) == 1
    assert lines[0].startswith(f"tf_smb: backup {tmp_path}/backup-000002 cannot be read (")
    folder.write({"i": 2}, arrays(2))
    assert folder.newest(print).state["i"] == 2


def test_flipped_bit_is_noticed(tmp_path):
    folder = BackupFolder(str(tmp_path))
    for i in range(2):
        folder.write({"i": i}, arrays(i))
    flip_byte(tmp_path / "backup-000002" / "arrays.npz")
    assert folder.newest(print).state["i"] == 0


def test_when_none_can_be_read_nothing_begins_anew_silently(tmp_path):
    folder = BackupFolder(str(tmp_path))
    folder.write({}, arrays())
    tear_file(tmp_path / "backup-000001" / "arrays.npz")
    with pytest.raises(errors.DataLossError, match="remove the folder to begin anew"):
        folder.newest(print)


def test_later_format_is_refused(tmp_path):
    folder = BackupFolder(str(tmp_path))
    folder.write({}, arrays())
    path = tmp_path / "backup-000001" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(errors.FailedPreconditionError, match="later version"):
        folder.newest(print)


def test_failed_write_leaves_nothing(tmp_path):
    class Unwritable:
        dtype = np.dtype(np.float32)

        def __array__(self, *arguments, **options):
            raise OSError("no space left")

    folder = BackupFolder(str(tmp_path))
    folder.write({"i": 0}, arrays())
    with pytest.raises(OSError):
        folder.write({"i": 1}, {"weight0": Unwritable()})
    assert [path.name for path in tmp_path.iterdir()] == ["backup-000001"]


def test_first_epoch_is_that_of_the_slowest_live_worker():
    assert state().first_epoch() == 2  # worker 1 had died
    assert state(live=()).first_epoch() == 1


@pytest.mark.parametrize(
    ("arguments", "anchor"),
    [
        ({"folder": ""}, "E370"),
        ({"folder": 5}, "E370"),
        ({"every_steps": 3, "every_s": 3}, "E371"),
        ({"every_steps": 0}, "E372"),
        ({"every_steps": True}, "E372"),
        ({"every_steps": 2.5}, "E372"),
        ({"every_s": 0}, "E373"),
        ({"every_s": float("nan")}, "E373"),
        ({"every_s": "60"}, "E373"),
        ({"seed": -1}, "E374"),
        ({"seed": 2**32}, "E374"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, anchor):
    with pytest.raises(errors.InvalidArgumentError, match=f"SMB-{anchor}"):
        BackupAndRestore(**{"folder": "x", **arguments})


def test_default_is_a_backup_each_minute(tmp_path):
    callback = BackupAndRestore(tmp_path)
    assert (callback.folder, callback.every_steps, callback.every_s) == (str(tmp_path), None, 60.0)
