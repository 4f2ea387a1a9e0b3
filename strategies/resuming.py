"""One fit with BackupAndRestore: where it begins, and what it leaves for the next start."""

from __future__ import annotations

import secrets
import time
import warnings
import zlib
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_smb import settings
from tf_smb.callbacks.backup import BackupAndRestore
from tf_smb.callbacks.common import acting_worker
from tf_smb.errors import Error
from tf_smb.strategies import data, dataset_graph, model_backup
from tf_smb.strategies.backup_files import Backup, BackupFolder
from tf_smb.strategies.console import announce
from tf_smb.strategies.data_order import (
    DataOrder,
    Deal,
    DealtBatches,
    Position,
    array_batches,
    can_take,
    py_dataset_batches,
)
from tf_smb.strategies.job_state import JobState

if TYPE_CHECKING:
    from tf_smb.box import Member
    from tf_smb.strategies.mirror import ModelMirror
    from tf_smb.strategies.strategy import SMBStrategy

# How often to look for a moment in which nobody exchanges.
_TRIES = 5


class Resuming:
    """What BackupAndRestore does in one `fit`: see `tf_smb.callbacks.backup.Session`.

    Args:
        strategy: The model's strategy.
        callback: The callback.
    """

    def __init__(self, strategy: SMBStrategy, callback: BackupAndRestore) -> None:
        self._strategy = strategy
        self._callback = callback
        self._folder = BackupFolder(callback.folder)
        self._backup: Backup | None = self._folder.newest(announce)
        self._before = None if self._backup is None else JobState.from_json(self._backup.state)
        self._batches: DealtBatches | dataset_graph.SkippingDataset | None = None
        self._state: JobState  # of this job, but for what changes
        self._anew = False  # positions in the data before mean nothing
        self._short_epoch = ExitStack()
        self._ends_at: int | None = None  # this epoch, if it is short: the batches by then
        self._written_at = time.monotonic()
        self._intervals: int | None = None  # of every_steps that are over
        callback.attach(self)

    @classmethod
    def of(cls, strategy: SMBStrategy, arguments: dict[str, Any]) -> Resuming | None:
        """Returns that of the callback in the arguments of `fit`; None if there is none."""
        given = arguments["callbacks"]
        given = getattr(given, "callbacks", given)
        given = given if isinstance(given, list | tuple) else [given]
        found = [callback for callback in given if isinstance(callback, BackupAndRestore)]
        if not found:
            return None
        if not strategy.exchanges:
            if strategy.worker_index == 0:
                announce("tf_smb: BackupAndRestore does nothing while nothing is exchanged")
            return None
        return cls(strategy, found[0])

    @property
    def _own_start(self) -> Position:
        return self._state.positions[self._strategy.worker_index]

    # --- Before ---

    def share(self, arguments: dict[str, Any], num_workers: int, worker_index: int) -> data.Share:
        """Decides where this worker begins, and returns what it trains on.

        Changes `arguments` to that.
        """
        arrays = _hold_out(arguments)
        kind, why_anew = _kind_of(arrays, arguments, self._strategy.num_replicas_in_sync)
        self._state = self._first_state(kind, arrays[0], arguments, num_workers)
        if kind == "anew" or (self._before is not None and not self._fits()):
            self._begin_anew(why_anew or "its data is not what it was")
        start = self._start()
        validation = arguments["validation_data"]
        if kind in ("samples", "batches"):
            part, start = self._dealt(arrays, validation, start, num_workers, worker_index)
            arguments["shuffle"] = False
        else:
            part = data.share(*arrays, validation, 0.0, num_workers, worker_index)
        if kind == "pipeline":
            part, start = self._pipeline(part, start)
        if self._before is not None:
            arguments["initial_epoch"] = start.epoch
        return part

    def _first_state(
        self, kind: str, x: Any, arguments: dict[str, Any], num_workers: int
    ) -> JobState:
        seed = self._callback.seed
        state = JobState(
            steps=0,
            batches=0,
            phase=0,
            live=(),
            positions=(Position(int(arguments["initial_epoch"]), 0),) * self._strategy.num_workers,
            deals=(),
            kind=kind,
            total=_total_of(kind, x),
            batch_size=int(arguments["batch_size"] or 32) if kind == "samples" else 1,
            shuffle=bool(arguments["shuffle"]),
            replicated=num_workers < self._strategy.num_workers,
            seed=_seed_of_job(self._strategy.num_workers) if seed is None else seed,
        )
        return state if self._before is None else replace(state, seed=self._before.seed)

    def _fits(self) -> bool:
        """Whether the data is what it was, so that positions in it mean the same."""
        before, now = self._before, self._state
        assert before is not None
        names = ["kind", "replicated"]
        if now.kind != "pipeline":  # whose shares' lengths depend on their number
            names += ["total", "shuffle"]
        return all(getattr(before, name) == getattr(now, name) for name in names)

    def _begin_anew(self, why: str) -> None:
        if self._before is None:
            return
        if self._strategy.worker_index == 0:
            announce(f"tf_smb: the interrupted epoch begins anew: {why}")
        first = Position(self._before.first_epoch(), 0)
        self._state = replace(
            self._state, positions=(first,) * self._strategy.num_workers, deals=()
        )
        self._anew = True

    def _start(self) -> Position:
        """Returns where this worker begins; sets where all do, and the deals before."""
        before, workers = self._before, self._strategy.num_workers
        if before is None or self._anew:
            return self._own_start
        first = Position(before.first_epoch(), 0)
        if before.num_workers == workers and before.batch_size == self._state.batch_size:
            # Each goes on with its own share: also a worker that comes back to a job that lives.
            positions = tuple(max(first, position) for position in before.positions)
            deals = before.deals
        elif self._state.kind == "pipeline" or self._state.replicated:
            positions = (self._mean_position(before),) * workers
            deals = ()
        else:
            positions = (first,) * workers
            deals = (*before.deals, Deal(before.batch_size, before.positions))
        self._state = replace(self._state, positions=positions, deals=deals)
        return self._own_start

    def _mean_position(self, before: JobState) -> Position:
        """Returns how far each of the present workers would be with what was done in all."""
        workers, first = self._strategy.num_workers, before.first_epoch()
        whole = (before.total or 0) / before.batch_size
        done = sum(
            whole if position.epoch > first else position.batch
            for position in before.positions
            if position.epoch >= first
        )
        shares = before.num_workers if before.replicated else workers
        skipped = round(done * before.batch_size / self._state.batch_size / shares)
        if self._strategy.worker_index == 0:
            announce(
                f"tf_smb: {before.num_workers} workers had the data in other shares: each of "
                f"{workers} leaves out its first {skipped:,} batches, as many as were done on "
                "average"
            )
        return Position(first, skipped)

    def _dealt(
        self, arrays: Any, validation: Any, start: Position, num_workers: int, worker_index: int
    ) -> tuple[data.Share, Position]:
        state = self._state
        total = state.total or 0
        data.check_enough(total, num_workers)
        order = DataOrder(
            total=total,
            batch_size=state.batch_size,
            shuffle=state.shuffle,
            # Where all train on all of it, each does so in an order of its own.
            seed=state.seed + (self._strategy.worker_index if state.replicated else 0),
            num_workers=num_workers,
            worker_index=worker_index,
            deals=state.deals,
            start=start,
        )
        is_samples = state.kind == "samples"
        batches = (
            array_batches(order, *arrays) if is_samples else py_dataset_batches(order, arrays[0])
        )
        self._batches = batches
        part = data.Share(
            batches,
            None,
            None,
            validation,
            samples=len(range(worker_index, total, num_workers)) if is_samples else None,
            total_samples=total if is_samples else None,
            divided=num_workers > 1,
        )
        return part, Position(order.begun_epoch(), 0)

    def _pipeline(self, part: data.Share, start: Position) -> tuple[data.Share, Position]:
        """Returns the share, with its first batches left out in the first epoch."""
        # What there is to count is one worker's share.
        total = int(part.x.cardinality().numpy())
        self._state = replace(self._state, total=total)
        if 0 < total <= start.batch:
            start = Position(start.epoch + 1, 0)
        self._batches = dataset_graph.SkippingDataset(part.x, start.epoch, start.batch)
        return replace(part, x=self._batches), start

    def begin(self, model: keras.Model) -> None:
        """Restores weights, optimizer and counters, before the first contact with the box."""
        if self._backup is None or self._before is None:
            return
        mirror = self._strategy.mirror(model)
        model_backup.restore(model, mirror, self._backup, self._folder.path)
        steps, epoch = self._restored_position(self._before)
        if not mirror.started:
            # No fewer than what it has done of its epoch: see begin_epoch.
            mirror.restore(steps, max(self._before.batches, self._own_start.batch), epoch)
        if self._strategy.worker_index == 0:
            announce(self._resumed_line(self._before, steps))
        self._backup = None

    def _restored_position(self, before: JobState) -> tuple[int, int]:
        """Returns the steps and the epoch to go on from: those of the first, in the saved phase.

        The others may not have come to the next phase yet when its step was reached.
        """
        schedule = self._strategy.schedule
        begins = [begin for begin, _ in schedule.phases]
        phase = min(before.phase, len(begins) - 1)
        last = begins[phase + 1] - 1 if phase + 1 < len(begins) else None
        steps, epoch = before.steps, before.first_epoch()
        if schedule.unit == "epoch":
            epoch = max(epoch, begins[phase])
            return steps, epoch if last is None else min(epoch, last)
        return (steps if last is None else min(steps, last)), epoch

    def _resumed_line(self, before: JobState, steps: int) -> str:
        phases = len(self._strategy.schedule.phases)
        workers, was = self._strategy.num_workers, before.num_workers
        return (
            f"tf_smb: resumed from {self._folder.path}: epoch {before.first_epoch() + 1}, step "
            f"{steps:,}, phase {min(before.phase + 1, phases)} of {phases}, "
            f"{workers} worker{'s' if workers > 1 else ''}"
            + (f" (was {was})" if was != workers else "")
        )

    # --- During ---

    def begin_epoch(self, model: keras.Model, epoch: int) -> None:
        """Takes the epoch's data."""
        self._short_epoch.close()
        start = self._own_start
        if epoch == start.epoch and start.batch > 0:
            # What was done of it before counts too, for positions to mean the same.
            mirror = self._strategy.mirror(model)
            mirror.segment.begin_epoch(epoch, int(mirror.batches) - start.batch)
        self._ends_at = None
        if self._batches is None:
            return
        self._batches.begin_epoch(epoch)
        if self._batches.is_short:
            self._ends_at = int(self._strategy.mirror(model).batches) + self._batches.length
            # Keras counts on whole epochs, and would warn that the data is at its end.
            self._short_epoch.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Your input ran out of data")

    def end_batch(self, model: keras.Model) -> None:
        """Writes a backup if it is time, and up to this worker; ends an epoch that is short.

        Raises:
            StopIteration: To Keras' loop, which takes it as the end of the epoch's data.
        """
        mirror = self._strategy.mirror(model)
        if self._is_due(mirror) and acting_worker(mirror.segment) == self._strategy.worker_index:
            try:
                self._write(model, mirror)
            except (OSError, Error) as error:
                announce(f"tf_smb: no backup in {self._folder.path} this time: {error}")
        if self._ends_at is not None and int(mirror.batches) >= self._ends_at:
            # Else Keras would find it out by a step without data, which the optimizer counts.
            raise StopIteration

    def _is_due(self, mirror: ModelMirror) -> bool:
        if self._callback.every_s is not None:
            now = time.monotonic()
            due = now - self._written_at >= self._callback.every_s
            self._written_at = now if due else self._written_at
            return due
        intervals = int(mirror.steps) // (self._callback.every_steps or 1)
        due = self._intervals is not None and intervals > self._intervals
        self._intervals = intervals
        return due

    def _write(self, model: keras.Model, mirror: ModelMirror) -> None:
        segment = mirror.segment
        for _ in range(_TRIES):
            version = segment.version
            # Before the center: what comes in between is done twice, not left out.
            members = {member.worker_index: member for member in segment.members()}
            center = segment.read(wide=True)
            if segment.version == version:
                break
        state = replace(
            self._state,
            batches=int(mirror.batches),
            **_progress(members),
            positions=tuple(
                self._position(i, members.get(i)) for i in range(self._strategy.num_workers)
            ),
        )
        values = {**state.to_json(), **model_backup.describe(model), "saved_at": time.time()}
        self._folder.write(values, model_backup.values(model, center))

    def _position(self, index: int, member: Member | None) -> Position:
        """Returns a worker's position: as of its last exchange, or, before its first, its start."""
        start = self._state.positions[index]
        if member is None or member.exchanges == 0:
            return start
        record = self._callback.record
        if record is not None and member.steps <= record.steps_before.get(index, 0):
            return start  # what the member says is of the fit before
        return max(start, Position(member.epoch, member.batch))

    # --- After ---

    def end(self) -> None:
        """After this worker's epochs."""
        self._short_epoch.close()
        if self._batches is not None:
            self._batches.begin_whole_epoch()  # for steps in lockstep, if there will be any

    def close(self) -> None:
        """After a `fit` that came to its end: removes the backups."""
        self._callback.attach(None)
        if self._callback.delete_checkpoint and self._strategy.is_chief:
            self._folder.remove()


def _hold_out(arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns x, y and sample_weight to train on, once the validation split is set aside."""
    arrays = (arguments["x"], arguments["y"], arguments["sample_weight"])
    split = arguments["validation_split"]
    if not split or arguments["validation_data"] is not None or not data.is_arrays(arrays[0]):
        return arrays
    train, held_out = data.split_validation(*arrays, split)
    arguments.update(validation_data=held_out, validation_split=0.0)
    return train


def _kind_of(
    arrays: tuple[Any, Any, Any], arguments: dict[str, Any], num_devices: int
) -> tuple[str, str]:
    """Returns how positions in this data are kept, and, if they are not, why."""
    x = arrays[0]
    if arguments["steps_per_epoch"]:
        return "anew", "with steps_per_epoch it has no end to count from"
    if data.is_arrays(x):
        if can_take(arrays):
            return "samples", ""
        return "anew", "sparse arrays cannot be taken from in any order"
    if isinstance(x, keras.utils.PyDataset):
        return ("batches", "") if x.num_batches is not None else ("anew", "its data has no end")
    if isinstance(x, tf.data.Dataset):
        if arguments["class_weight"] is not None:
            return "anew", "a tf.data pipeline with class_weight cannot be begun in its middle"
        if num_devices > 1:
            return "anew", "a tf.data pipeline on several devices cannot be begun in its middle"
        if int(x.cardinality().numpy()) < 0:
            return "anew", "how many batches its tf.data pipeline has is not known"
        return "pipeline", ""
    return "anew", f"a {type(x).__name__} cannot be begun in its middle"


def _seed_of_job(num_workers: int) -> int:
    """Returns a number that all workers of this job have, and other jobs do not."""
    job = settings.resolve("job_id")
    if job is None:  # nothing else is sure to be the same on several workers
        return secrets.randbits(32) if num_workers == 1 else 0
    return zlib.crc32(job.encode())


def _total_of(kind: str, x: Any) -> int | None:
    if kind == "samples":
        return data.num_samples(x)
    return int(x.num_batches) if kind == "batches" else None


def _progress(members: dict[int, Member]) -> dict[str, Any]:
    live = tuple(sorted(i for i, member in members.items() if member.state == "live"))
    present = [members[i] for i in live]
    return {
        "live": live,
        "steps": max((member.steps for member in present), default=0),
        "phase": max((member.phase for member in present), default=0),
    }
