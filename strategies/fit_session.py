"""One `fit` of one worker: its share of the data, its callbacks, its beginning and its end."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.eager import context

from tf_smb import settings
from tf_smb.callbacks import ExchangeAtBatchEnd, ProgressAlignment
from tf_smb.strategies import callback_order, data, run_info, writing
from tf_smb.strategies.console import announce
from tf_smb.strategies.ending import Settle, settling_rounds
from tf_smb.strategies.fit_record import FitRecord, record_of
from tf_smb.strategies.reporting import ProgressReporter, report_path
from tf_smb.strategies.resuming import Resuming

if TYPE_CHECKING:
    from tf_smb.strategies.mirror import ModelMirror
    from tf_smb.strategies.strategy import SMBStrategy

# Epochs of a fit that a callback ends.
_ENDLESS = 1_000_000
# Apart enough that no two workers' shuffles meet.
_SEED_STRIDE = 1_000_003


class FitSession:
    """Runs one `fit` under an SMBStrategy.

    Args:
        strategy: The model's strategy.
        model: The model.
        arguments: All arguments of `fit`, by name.
    """

    def __init__(
        self, strategy: SMBStrategy, model: keras.Model, arguments: dict[str, Any]
    ) -> None:
        self._strategy = strategy
        self._model = model
        self._arguments = arguments
        self._record = record_of(model)
        # As the user gave it: a restored training begins later.
        self._initial_epoch = int(arguments["initial_epoch"])

    def run(self, original: Callable[..., Any]) -> Any:
        """Runs Keras' own `fit` on this worker's share, and ends at the center.

        Returns:
            Keras' History.

        Raises:
            FailedPreconditionError: The model cannot train with the others, and why.
        """
        strategy, model = self._strategy, self._model
        if strategy.exchanges:
            strategy.check_model(model)
        folder = _run_info_folder()
        self._note_seed()
        self._take_share()
        self._prepare_callbacks()
        _salt_shuffle(strategy.worker_index)
        begun = time.monotonic()
        try:
            history = original(model, **self._arguments)
            self._end(original)
            if self._resuming is not None:
                self._resuming.close()
        except tf.errors.OpError:
            self._abandon(raise_cause=True)
            raise
        except BaseException:
            self._abandon(raise_cause=False)
            raise
        self._record.seconds += time.monotonic() - begun
        if folder is not None:
            run_info.write(folder, strategy.worker_index, strategy.run_info(model))
        return history

    # --- Before ---

    def _note_seed(self) -> None:
        if self._record.global_seed is None:
            self._record.global_seed = context.global_seed()

    def _xla_words(self) -> str:
        return "XLA on (jit_compile)" if self._strategy.uses_xla(self._model) else "XLA off"

    def _take_share(self) -> None:
        strategy, arguments = self._strategy, self._arguments
        workers = strategy.num_workers if strategy.shards_data else 1
        batch = data.batch_of(arguments["x"], arguments["batch_size"], arguments["steps_per_epoch"])
        index = strategy.worker_index if workers > 1 else 0
        self._resuming = Resuming.of(strategy, arguments)
        if self._resuming is not None:
            part = self._resuming.share(arguments, workers, index)
        else:
            part = data.share(
                arguments["x"],
                arguments["y"],
                arguments["sample_weight"],
                arguments["validation_data"],
                arguments["validation_split"] or 0.0,
                workers,
                index,
            )
        self._share = part
        arguments.update(x=part.x, y=part.y, sample_weight=part.sample_weight)
        if part.divided and part.validation_data is not arguments["validation_data"]:
            arguments.update(validation_data=part.validation_data, validation_split=0.0)
        if strategy.worker_index == 0 and strategy.num_workers > 1:
            if part.warning:
                announce(f"tf_smb: {part.warning}")
            announce(f"{self._first_line(part, batch)}, {self._xla_words()}")
        elif strategy.num_workers == 1 and strategy.exchanges:
            announce(f"1 worker, {self._xla_words()}")

    def _first_line(self, part: data.Share, batch: int | None) -> str:
        workers = self._strategy.num_workers
        steps = data.steps_of(part.x, batch, self._arguments["steps_per_epoch"], part.samples)
        if part.samples is not None and part.total_samples is not None:
            text = (
                f"{workers} workers: each trains on {part.samples:,} of {part.total_samples:,} "
                "samples per epoch"
            )
        elif part.divided:
            text = f"{workers} workers: each trains on 1/{workers} of the data per epoch"
        else:
            text = f"{workers} workers: each trains on all of the data"
        if batch is not None:
            text += f", batch {batch} ({batch * workers} in total)"
        if steps is not None:
            text += f", {steps} steps"
        return text

    def _prepare_callbacks(self) -> None:
        from tf_smb.strategies import keras_hooks

        strategy, arguments = self._strategy, self._arguments
        callbacks = callback_order.in_order(_as_list(arguments["callbacks"]))
        callback_order.check(callbacks)
        callback_order.hand_out(callbacks, self._record)
        callback_order.plan_end(callbacks, arguments, self._initial_epoch)
        self._alignment = callback_order.find(callbacks, ProgressAlignment)
        if strategy.exchanges:
            at_batch_end = callback_order.find(callbacks, ExchangeAtBatchEnd) is not None
            if self._model.jit_compile is True and not at_batch_end:
                keras_hooks.refuse_jit_compile(self._model)
            keras_hooks.set_exchanges_at_batch_end(self._model, at_batch_end)
        if not _is_first(strategy, self._model):
            callbacks, skipped = writing.without_file_writers(callbacks)
            if skipped:
                announce(
                    f"tf_smb: worker {strategy.worker_index}: {', '.join(skipped)} left to the "
                    "chief, since all workers would write the same files"
                )
            if arguments["verbose"] in ("auto", 1):
                arguments["verbose"] = 2
        # First, to count an epoch, and to begin its phase, before others look.
        callbacks.insert(0, self._follow_epochs())
        if strategy.exchanges:
            # Last, so that a callback that loads weights at the beginning comes before.
            callbacks.append(_BeginTraining(strategy))
        arguments["callbacks"] = _with_reporter(callbacks, strategy.worker_index, arguments)

    def _follow_epochs(self) -> _FollowEpochs:
        arguments = self._arguments
        steps, samples = arguments["steps_per_epoch"], self._share.samples
        batch = data.batch_of(arguments["x"], arguments["batch_size"], steps)
        return _FollowEpochs(self._strategy, self._record, batch, None if steps else samples)

    # --- After ---

    def _end(self, original: Callable[..., Any]) -> None:
        strategy = self._strategy
        if not strategy.exchanges:
            return
        mirror = strategy.mirror(self._model)
        aligned = self._alignment is not None and self._alignment.ended
        stopped = self._model.stop_training and not aligned
        if stopped and mirror.leave_alone(strategy.keeps_local):
            announce(
                f"tf_smb: worker {strategy.worker_index} stopped early, at step "
                f"{int(mirror.steps)}, and left; the others go on"
            )
            self._note_end(mirror)
            return
        fewest_steps = mirror.finish(strategy.end_timeout_s, announce)
        rounds = settling_rounds(
            strategy.settle_steps, fewest_steps, self._model.steps_per_execution
        )
        if rounds > 0 and len(mirror.segment.live_workers()) > 1:
            self._settle(original, mirror, rounds)
        self._note_end(mirror)
        mirror.end(strategy.keeps_local)

    def _note_end(self, mirror: ModelMirror) -> None:
        """Notes where all stand, for the next fit to count from.

        Nobody is in the next fit already: all have just met, or this one leaves before.
        """
        members = mirror.segment.members()
        self._record.steps_before = {member.worker_index: member.steps for member in members}
        self._record.notice_before = mirror.segment.notice().number

    def _settle(self, original: Callable[..., Any], mirror: ModelMirror, rounds: int) -> None:
        """Makes a few steps in lockstep with the other workers (see ending.py)."""
        model = self._model
        history, stopped = model.history, model.stop_training
        with mirror.lockstep(self._strategy.end_timeout_s, announce) as meet:
            if self._can_repeat():
                again = {
                    **self._arguments,
                    "epochs": _ENDLESS,
                    "initial_epoch": 0,
                    "verbose": 0,
                    "callbacks": [Settle(mirror, rounds, meet)],
                    "validation_data": None,
                    "validation_split": 0.0,
                }
                original(model, **again)
            else:
                for _ in range(rounds):  # without progress of its own, but there
                    meet()
        model.history, model.stop_training = history, stopped

    def _can_repeat(self) -> bool:
        """Whether the data can be gone through once more, and the weights trained on."""
        repeatable = callback_order.is_repeatable(self._arguments["x"])
        return repeatable and not getattr(self._model.optimizer, "use_ema", False)

    def _abandon(self, raise_cause: bool) -> None:
        """After an exception: nobody shall wait for this worker; its own error comes first."""
        strategy = self._strategy
        if not strategy.exchanges or not strategy.has_mirror(self._model):
            return
        segment = strategy.mirror(self._model).segment
        segment.leave()
        if raise_cause:
            segment.raise_last_error()


class PlainSession:
    """The plain side of `tf-smb run --compare`: Keras' own fit, reported."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs Keras' own `fit`, adding only the reporter."""
        bound = inspect.signature(original).bind(self._model, *args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        del arguments["self"]
        callbacks = callback_order.in_order(_as_list(arguments["callbacks"]))
        callback_order.plan_end(callbacks, arguments, int(arguments["initial_epoch"]))
        arguments["callbacks"] = _with_reporter(callbacks, 0, arguments)
        return original(self._model, **arguments)


class _BeginTraining(keras.callbacks.Callback):
    """Joins the box once the model is built and before its first step."""

    def __init__(self, strategy: SMBStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self.model.built and self.model.weights:
            self._strategy.begin_training(self.model)


class _FollowEpochs(keras.callbacks.Callback):
    """Tells the others which epoch this worker is in, and counts epochs and samples.

    Args:
        strategy: The strategy.
        record: Counts them.
        batch: Samples of a batch; None if unknown.
        samples: This worker's samples of an epoch; None if unknown.
    """

    def __init__(
        self, strategy: SMBStrategy, record: FitRecord, batch: int | None, samples: int | None
    ) -> None:
        super().__init__()
        self._strategy = strategy
        self._record = record
        self._batch = batch
        self._samples = samples
        self._batches_before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        mirror = self._started_mirror()
        if mirror is None:  # by itself, or a model that its first step builds
            return
        self._batches_before = int(mirror.batches)
        mirror.segment.begin_epoch(epoch, self._batches_before)
        if self._strategy.schedule.unit == "epoch":
            mirror.exchange_if_due()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        mirror = self._started_mirror()
        if mirror is None:
            batches = self.params.get("steps")  # by itself: nothing counts, but nothing ends it
        else:
            batches = int(mirror.batches) - self._batches_before
        self._record.add_epoch(batches, self._batch, self._samples)

    def _started_mirror(self) -> ModelMirror | None:
        if not self._strategy.has_mirror(self.model):
            return None
        mirror = self._strategy.mirror(self.model)
        return mirror if mirror.started else None


def _is_first(strategy: SMBStrategy, model: keras.Model) -> bool:
    """Who draws and writes during a fit: decided once, at its beginning."""
    if strategy.num_workers == 1:
        return True
    if not strategy.exchanges or not strategy.has_mirror(model):
        return strategy.is_chief
    live = strategy.mirror(model).segment.live_workers()
    return min(live, default=strategy.worker_index) == strategy.worker_index


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _with_reporter(callbacks: list[Any], worker_index: int, arguments: dict[str, Any]) -> list[Any]:
    path = report_path(worker_index)
    if path is None:
        return callbacks
    batch = data.batch_of(arguments["x"], arguments["batch_size"], arguments["steps_per_epoch"])
    return [*callbacks, ProgressReporter(path, worker_index, batch)]


def _run_info_folder() -> Path | None:
    """Returns where to write what there is to report; None: nowhere."""
    folder = settings.resolve("run_info")
    if folder is None:
        return None
    run_info.check_folder(Path(folder))
    return Path(folder)


def _salt_shuffle(worker_index: int) -> None:
    """Gives each worker its own order of samples where the script has set a seed."""
    seed = context.global_seed()
    if seed is not None and worker_index > 0:
        tf.random.set_seed((seed + worker_index * _SEED_STRIDE) % (2**31))
