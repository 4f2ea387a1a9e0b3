"""SMBStrategy: trains a Keras model together with other workers, through a Soft Memory Box."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_smb import settings
from tf_smb.box import Client, Segment, Server, new_job_id
from tf_smb.errors import Error, FailedPreconditionError, InvalidArgumentError
from tf_smb.rules import ExchangeRule, ReadThenAccumulate
from tf_smb.schedule import Schedule, check_schedule
from tf_smb.strategies import data, keras_hooks, short_errors, versions
from tf_smb.strategies.console import announce
from tf_smb.strategies.devices import (
    choose_devices,
    extended_for,
    first_part,
    summing_gradients_first,
    with_no_empty_part,
)
from tf_smb.strategies.mirror import ModelMirror
from tf_smb.strategies.step_functions import (
    applied_updates,
    is_applied,
    optimizer_of,
    training_model,
)
from tf_smb.strategies.variables import VariableFilter, check_filter


def _graph_in_xla(graph: Any) -> bool:
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


class SMBStrategy(tf.distribute.Strategy):
    """Asynchronous training of one Keras model by several worker processes.

    Every worker trains a model of its own, on its own share of the data; every so many steps its
    weights and the center in the box move toward each other, inside the training step. Nobody
    waits for anybody until the end of `fit`, where the workers meet: all then hold the center.

    Started alone, a process has a box of its own and trains as plain Keras does. Under
    `tf-smb run -n 4 -- python train.py` four workers share the launcher's.

    Args:
        server: The box, for example `shm://NAME`. None: `TF_SMB_SERVER`, which `tf-smb run`
            sets, else an embedded one.
        rule: How weights and center meet. None: `tf_smb.rules.default_rule()`.
        schedule: Several rules, one after the other, instead of `rule`.
        run_name: Name of the segments, for several runs on one server. None: `TF_SMB_RUN_NAME`,
            else "run".
        on_existing: What to do about a segment of that name from another or a finished job:
            "fail", "resume" or "replace". None: `TF_SMB_ON_EXISTING`, else "fail".
        data: "shard" gives each worker its share of the training data in `fit`, "replicate"
            gives it all. None: `TF_SMB_DATA`, else "shard". The batch size is per worker.
        final: What the model holds after `fit`: "center" or "local". None: `TF_SMB_FINAL`, else
            "center".
        settle_steps: Steps in lockstep at the end of `fit`, at most a tenth of its steps (see
            `docs/how_it_works.md`). None: `TF_SMB_SETTLE_STEPS`, else 50.
        num_workers: How many workers the job starts. None: `TF_SMB_NUM_WORKERS`, else 1.
        worker_index: This one's number. None: `TF_SMB_WORKER_INDEX`, else 0.
        min_workers: The fewest workers to begin with, when the time to wait for all is over. None:
            `TF_SMB_MIN_WORKERS`, else 1.
        round_timeout_s: How long a round of `PeriodicAveraging` waits for live workers that do
            not come. None: `TF_SMB_ROUND_TIMEOUT_S`, else 600.
        devices: The devices of this worker, such as `["/gpu:0", "/gpu:1"]`: each trains on its
            part of every batch, in step. None: the first GPU if there is one, else the CPU.
        variable_filter: A function of a `keras.Variable`: only variables for which it is true are
            mirrored, the others stay each worker's own. The same on all workers. None: all float
            weights.

    Raises:
        InvalidArgumentError: A value is not acceptable; the message has it and what is accepted.
        FailedPreconditionError: TensorFlow or Keras is too old.

    Example:
        >>> strategy = tf_smb.SMBStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        >>> model.fit(x, y, epochs=5)
        >>> model.export("exported")  # a plain SavedModel, written once, by the chief
    """

    # What MirroredExtended asks its strategy for.
    _collective_key_base = 0

    def __init__(
        self,
        server: str | None = None,
        rule: ExchangeRule | None = None,
        schedule: Schedule | None = None,
        run_name: str | None = None,
        on_existing: str | None = None,
        data: str | None = None,
        final: str | None = None,
        settle_steps: int | None = None,
        num_workers: int | None = None,
        worker_index: int | None = None,
        min_workers: int | None = None,
        round_timeout_s: float | None = None,
        devices: Sequence[str] | None = None,
        variable_filter: VariableFilter | None = None,
    ) -> None:
        versions.check_versions(tf.__version__, keras.__version__, keras.backend.backend())
        self._server_address = settings.resolve("server", server)
        self._schedule = check_schedule(rule, schedule)
        self._run_name = settings.resolve("run_name", run_name)
        self._on_existing = settings.resolve("on_existing", on_existing)
        self._data = settings.resolve("data", data)
        self._final = settings.resolve("final", final)
        self._settle_steps = settings.resolve("settle_steps", settle_steps)
        self._num_workers = settings.resolve("num_workers", num_workers)
        self._worker_index = settings.resolve("worker_index", worker_index)
        self._min_workers = settings.resolve("min_workers", min_workers)
        self._round_timeout_s = settings.resolve("round_timeout_s", round_timeout_s)
        self._variable_filter = check_filter(variable_filter)
        self._job_id = settings.resolve("job_id") or new_job_id()
        self._exchanges_on = settings.resolve("exchange") == "on"
        self._exchange_threads = settings.resolve("exchange_threads")
        self._start_timeout_s = settings.resolve("start_timeout_s")
        self._end_timeout_s = settings.resolve("end_timeout_s")
        self._check_settings()
        # Under `tf-smb run --compare`: the same script as plain Keras.
        self._plain = os.environ.get("TF_SMB_PLAIN") == "1"
        self._embedded: Server | None = None
        self._client: Client | None = None
        self._num_mirrored = 0
        self._warned_of: set[ExchangeRule] = set()
        self._mirrors: weakref.WeakKeyDictionary[keras.Model, ModelMirror] = (
            weakref.WeakKeyDictionary()
        )
        self._devices = choose_devices(devices)
        super().__init__(extended_for(self, self._devices))
        keras_hooks.register_strategy(self)

    def _check_settings(self) -> None:
        if self._server_address is None and self._num_workers > 1:
            raise InvalidArgumentError(
                f"num_workers is {self._num_workers}, but no server is given that they could "
                "share: start them with 'tf-smb run', or give server= (or TF_SMB_SERVER) "
                "[SMB-E410]"
            )
        if self._worker_index >= self._num_workers:
            raise InvalidArgumentError(
                f"worker_index must be below num_workers, which is {self._num_workers}, got "
                f"{self._worker_index} [SMB-E411]"
            )
        if self._min_workers > self._num_workers:
            raise InvalidArgumentError(
                f"min_workers must be at most num_workers, which is {self._num_workers}, got "
                f"{self._min_workers} [SMB-E422]"
            )

    # --- Who we are ---

    @property
    def num_workers(self) -> int:
        """How many workers the job starts."""
        return 1 if self._plain else self._num_workers

    @property
    def worker_index(self) -> int:
        """This worker's number, from 0."""
        return 0 if self._plain else self._worker_index

    @property
    def is_chief(self) -> bool:
        """Whether this is the lowest live worker: the one that exports and draws progress bars."""
        started = [mirror for mirror in self._mirrors.values() if mirror.segment.seeded]
        if not started:
            return self.worker_index == 0
        # The newest: of an older model another worker may have let go already.
        live = started[-1].segment.live_workers()
        return min(live, default=-1) == self._worker_index

    @property
    def rule(self) -> ExchangeRule:
        """How weights and center meet: the rule of the schedule's first phase."""
        return self._schedule.phases[0][1]

    @property
    def schedule(self) -> Schedule:
        """Which rule holds when; of one phase if a rule was given."""
        return self._schedule

    # --- tf.distribute ---

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context to make model and optimizer in."""
        return contextlib.nullcontext(self) if self._plain else super().scope()

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns the dataset divided over this worker's devices; itself if there is one.

        Dividing training data between workers is `fit`'s work, and `shard`'s in a custom loop.
        """
        if len(self._devices) == 1:
            return dataset
        return super().experimental_distribute_dataset(dataset, options)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        if axis is None and isinstance(value, tuple | list | dict):
            # Keras asks for a batch to build the model with; parts of it differ in shape.
            return first_part(value)
        return super().reduce(reduce_op, value, axis)

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs a step that Keras made; after a training step, counts it and exchanges if due.

        Raises:
            InvalidArgumentError: `fn` is not one of Keras' steps: see `step`.
        """
        model = training_model(fn)
        if model is None:
            return super().run(fn, args, kwargs, options)
        before = applied_updates(model) if self._active else []
        outputs = self._run_on_devices(model, fn, args, kwargs, options)
        if (
            not self._active
            or keras_hooks.exchanges_at_batch_end(model)
            or _graph_in_xla(tf.compat.v1.get_default_graph())
        ):
            return outputs
        mirror = self._started_mirror(model)
        # At the end of data of unknown length Keras runs the step once more, without data: what
        # does not depend on the step's outputs would happen all the same.
        flat = tf.nest.flatten(outputs, expand_composites=True)
        with tf.control_dependencies([value for value in flat if tf.is_tensor(value)]):
            mirror.count_step(is_applied(model, before, applied_updates(model)))
        return outputs

    def _run_on_devices(
        self, model: keras.Model, fn: Callable[..., Any], args: Any, kwargs: Any, options: Any
    ) -> Any:
        if len(self._devices) == 1:
            return super().run(fn, args, kwargs, options)
        args = tuple(with_no_empty_part(batch) for batch in args)
        with summing_gradients_first(model):
            return super().run(fn, args, kwargs, options)

    # --- Custom loops ---

    def start(self, model: keras.Model) -> None:
        """Joins the box and makes the model start from the center. `fit` does it by itself.

        Raises:
            FailedPreconditionError: The model was made outside the scope, is not built, or differs
                from the other workers' models (the first difference is named); or this worker
                has several devices.
        """
        if self._active:
            self.check_model(model)
            self._check_custom_loop()
            if not model.built:
                raise FailedPreconditionError(
                    f"model '{model.name}' is not built, so it has no weights yet: call it once, "
                    "or model.build(input_shape), inside 'with strategy.scope():' [SMB-E412]"
                )
            self._started_mirror(model)
            self.mirror(model).segment.set_training(True)

    def step(self, model: keras.Model) -> None:
        """Counts one training step of a custom loop, and exchanges if one is due.

        Call it after each update, eagerly or inside the loop's `tf.function`.

        Example:
            >>> strategy.start(model)
            >>> for x, y in strategy.shard(dataset):
            ...     train_on(x, y)
            ...     strategy.step(model)
            >>> strategy.finish(model)
        """
        if self._active:
            self._started_mirror(model).count_step(tf.constant(True))

    def finish(self, model: keras.Model) -> None:
        """Meets the other workers; the model then holds the center. `fit` does it by itself."""
        if self._active:
            mirror = self.mirror(model)
            mirror.finish(self._end_timeout_s, announce)
            mirror.end(keep_local=self.keeps_local)

    def shard(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns this worker's share of a batched `tf.data` pipeline, for a custom loop."""
        return data.share(dataset, None, None, None, 0.0, self.num_workers, self.worker_index).x

    def exchange(self, model: keras.Model | None = None) -> str:
        """Exchanges now; returns "moved", "unchanged", "replaced" (by a round) or "skipped".

        Args:
            model: None: the only model of this strategy.
        """
        return self.mirror(model).exchange() if self._active else "skipped"

    @contextmanager
    def center_weights(self, model: keras.Model | None = None) -> Iterator[None]:
        """Within it the model holds the center, for evaluating it; afterwards its own weights.

        It always swaps back, also after an exception.
        """
        with ExitStack() as stack:
            if self._active:
                stack.enter_context(self.mirror(model).center_weights())
            yield

    def stats(self, model: keras.Model | None = None) -> Mapping[str, float]:
        """Returns what the exchanges of a model did so far.

        Keys: steps (local steps), batches, settling_steps (steps made in lockstep after the last
        epoch), and those of `Segment.stats`: exchanges, rounds, exchange_s, last_staleness, ...
        """
        if not self._active:
            return {"steps": 0, "batches": 0, "settling_steps": 0, "exchanges": 0}
        mirror = self.mirror(model)
        return {
            "steps": int(mirror.steps),
            "batches": int(mirror.batches),
            "settling_steps": mirror.settling_steps,
            **mirror.segment.stats(),
        }

    def run_info(self, model: keras.Model | None = None) -> dict[str, Any]:
        """Returns what this worker ran, with what, and how it went, for reports: plain values.

        Args:
            model: None: the only model of this strategy.
        """
        from tf_smb.strategies import run_info

        model = self._only_model() if model is None else model
        return run_info.collect(self, model, self.mirror(model) if self._active else None)

    # --- For the hooks of Keras ---

    @property
    def _active(self) -> bool:
        return self._exchanges_on and not self._plain

    def mirror(self, model: keras.Model | None = None) -> ModelMirror:
        """Returns the model's mirror; attaches its segment at first use.

        Raises:
            InvalidArgumentError: No model given, and there is not exactly one.
        """
        if model is None:
            model = self._only_model()
        if model not in self._mirrors:
            self._mirrors[model] = self._make_mirror(model)
        return self._mirrors[model]

    def _only_model(self) -> keras.Model:
        if len(self._mirrors) != 1:
            raise InvalidArgumentError(
                f"this strategy has {len(self._mirrors)} models in the box: say which one "
                "[SMB-E413]"
            )
        return next(iter(self._mirrors))

    def _make_mirror(self, model: keras.Model) -> ModelMirror:
        client = self._connect()
        mirror = ModelMirror(
            model,
            client,
            f"{self._run_name}/{self._num_mirrored}",
            self._schedule,
            self._num_workers,
            self._worker_index,
            self._on_existing,
            self._exchange_threads,
            self._variable_filter,
        )
        mirror.segment.set_round_timeout(self._round_timeout_s)
        self._num_mirrored += 1
        weakref.finalize(model, _release, mirror.segment, client).atexit = False
        return mirror

    def _started_mirror(self, model: keras.Model) -> ModelMirror:
        """The mirror, after its first contact: made eagerly, also from inside a trace."""
        if model in self._mirrors and self._mirrors[model].started:
            return self._mirrors[model]
        with tf.init_scope():
            mirror = self.mirror(model)
            if not mirror.started:
                mirror.start(self._start_timeout_s, announce, self._min_workers)
                self._warn_if_unstable(mirror.segment.live_workers())
        return mirror

    def _warn_if_unstable(self, live_workers: Sequence[int]) -> None:
        """Once for each rule: the exchange inside the step has no way to say it."""
        count = len(live_workers)
        for _, rule in self._schedule.phases:
            if isinstance(rule, ReadThenAccumulate) and not rule.is_stable(count):
                if rule not in self._warned_of:
                    self._warned_of.add(rule)
                    announce(
                        f"tf_smb: {rule!r} is not stable with {count} workers in step: "
                        f"moving_rate must be below 2 / (workers + 1) = {2 / (count + 1):.3g}"
                    )

    def _connect(self) -> Client:
        if self._client is None:
            address = self._server_address
            if address is None:
                self._embedded = Server()
                address = self._embedded.address
            self._client = Client(address, job_id=self._job_id)
        return self._client

    def check_model(self, model: keras.Model) -> None:
        """Refuses a model or an optimizer that was made outside the scope, or that cannot train.

        Raises:
            FailedPreconditionError: With what to write instead.
        """
        if model.distribute_strategy is not self:
            raise FailedPreconditionError(
                f"model '{model.name}' was made outside strategy.scope(), so its weights are not "
                "in the box: make it, and compile it, inside 'with strategy.scope():' [SMB-E414]"
            )
        optimizer = optimizer_of(model)
        made_in = getattr(optimizer, "_distribution_strategy", self)
        if optimizer is not None and made_in is not self:
            raise FailedPreconditionError(
                f"the optimizer '{optimizer.name}' of model '{model.name}' was made outside "
                "strategy.scope(): make it, and compile the model, inside 'with strategy.scope():' "
                "[SMB-E415]"
            )
        if len(self._devices) > 1 and self.uses_xla(model):
            raise FailedPreconditionError(
                f"model '{model.name}' is compiled with jit_compile=True, which trains on one "
                f"device of a worker, and this one has {len(self._devices)}: compile with "
                "jit_compile=False, or start a worker for each device [SMB-E406]"
            )

    def _check_custom_loop(self) -> None:
        if len(self._devices) > 1:
            raise FailedPreconditionError(
                f"a custom loop trains on one device, and this worker has {len(self._devices)}: "
                "use model.fit, with a train_step of your own if need be, or start a worker for "
                "each device [SMB-E407]"
            )

    def uses_xla(self, model: keras.Model) -> bool:
        """Whether the model's steps are compiled by XLA; "auto" is off under a strategy."""
        return model.jit_compile is True

    @property
    def variable_filter(self) -> VariableFilter | None:
        """Which variables are mirrored; None: all float weights."""
        return self._variable_filter

    @property
    def shards_data(self) -> bool:
        """Whether `fit` divides its training data."""
        return self._data == "shard" and self.num_workers > 1

    @property
    def keeps_local(self) -> bool:
        """Whether the model keeps its own weights after `fit`."""
        return self._final == "local"

    @property
    def settle_steps(self) -> int:
        """How many steps the end of `fit` makes in lockstep, at most."""
        return self._settle_steps

    @property
    def end_timeout_s(self) -> float:
        """How long the end of `fit` waits for workers that make no step."""
        return self._end_timeout_s

    @property
    def exchanges(self) -> bool:
        """Whether this process trains with the box at all."""
        return self._active

    @property
    def plain(self) -> bool:
        """Whether the strategy does nothing: the plain side of `tf-smb run --compare`."""
        return self._plain

    def has_mirror(self, model: keras.Model) -> bool:
        """Whether the model has met its segment."""
        return model in self._mirrors

    def begin_training(self, model: keras.Model) -> None:
        """What the beginning of `fit` does, once the model is built."""
        self._let_go_if_changed(model)
        first = not (model in self._mirrors and self._mirrors[model].started)
        mirror = self._started_mirror(model)
        if not first:
            mirror.resume(lambda: self.is_chief, self._start_timeout_s, announce)
        mirror.segment.set_training(True)

    def _let_go_if_changed(self, model: keras.Model) -> None:
        """Gives a model whose weights became others (`enable_lora`) a new segment."""
        mirror = self._mirrors.get(model)
        if mirror is None or mirror.is_of(model):
            return
        del self._mirrors[model]
        _release(mirror.segment, self._connect())
        model.make_train_function(force=True)  # the old one exchanges with the old segment


def _release(segment: Segment, client: Client) -> None:
    """Gives a segment's memory back when its model is gone from the last worker."""
    with contextlib.suppress(Error):  # detached already, or no server any more
        name = segment.name
        segment.leave()
        is_last = not segment.live_workers()
        segment.detach()
        if is_last:
            client.free(name)


short_errors.install()
keras_hooks.install()
