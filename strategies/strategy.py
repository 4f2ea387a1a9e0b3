"""SMBStrategy: trains a Keras model together with other workers, through a Soft Memory Box."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tf_smb import settings
from tf_smb.box import Client, Segment, Server, new_job_id
from tf_smb.errors import Error, FailedPreconditionError, InvalidArgumentError
from tf_smb.rules import ExchangeRule, check_rule
from tf_smb.strategies import data, keras_hooks, short_errors, versions
from tf_smb.strategies.console import announce
from tf_smb.strategies.mirror import ModelMirror
from tf_smb.strategies.step_functions import training_model


def _graph_in_xla(graph: Any) -> bool:
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


class SMBStrategy(tf.distribute.OneDeviceStrategy):
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
        device: The device to train on. None: the first GPU if there is one, else the CPU.

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

    def __init__(
        self,
        server: str | None = None,
        rule: ExchangeRule | None = None,
        run_name: str | None = None,
        on_existing: str | None = None,
        data: str | None = None,
        final: str | None = None,
        settle_steps: int | None = None,
        num_workers: int | None = None,
        worker_index: int | None = None,
        device: str | None = None,
    ) -> None:
        versions.check_versions(tf.__version__, keras.__version__, keras.backend.backend())
        self._server_address = settings.resolve("server", server)
        self._rule = check_rule(rule)
        self._run_name = settings.resolve("run_name", run_name)
        self._on_existing = settings.resolve("on_existing", on_existing)
        self._data = settings.resolve("data", data)
        self._final = settings.resolve("final", final)
        self._settle_steps = settings.resolve("settle_steps", settle_steps)
        self._num_workers = settings.resolve("num_workers", num_workers)
        self._worker_index = settings.resolve("worker_index", worker_index)
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
        self._mirrors: weakref.WeakKeyDictionary[keras.Model, ModelMirror] = (
            weakref.WeakKeyDictionary()
        )
        super().__init__(device or _default_device())
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
        live = started[0].segment.live_workers()
        return min(live, default=-1) == self._worker_index

    @property
    def rule(self) -> ExchangeRule:
        """How weights and center meet."""
        return self._rule

    # --- tf.distribute ---

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context to make model and optimizer in."""
        return contextlib.nullcontext(self) if self._plain else super().scope()

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns the dataset itself: one device takes it as it is.

        Dividing training data between workers is `fit`'s work, and `shard`'s in a custom loop.
        """
        del options
        return dataset

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Runs a step that Keras made; after a training step, counts it and exchanges if due.

        Raises:
            InvalidArgumentError: `fn` is not one of Keras' steps: see `step`.
        """
        model = training_model(fn)
        if model is None or not self._exchanges_on:
            return super().run(fn, args, kwargs, options)
        before = _applied_updates(model)
        outputs = super().run(fn, args, kwargs, options)
        if keras_hooks.exchanges_at_batch_end(model) or _graph_in_xla(
            tf.compat.v1.get_default_graph()
        ):
            return outputs
        mirror = self._started_mirror(model)
        # At the end of data of unknown length Keras runs the step once more, without data: what
        # does not depend on the step's outputs would happen all the same.
        tensors = [value for value in tf.nest.flatten(outputs) if tf.is_tensor(value)]
        with tf.control_dependencies(tensors):
            mirror.count_step(_is_applied(before, _applied_updates(model)))
        return outputs

    # --- Custom loops ---

    def start(self, model: keras.Model) -> None:
        """Joins the box and makes the model start from the center. `fit` does it by itself.

        Raises:
            FailedPreconditionError: The model was made outside the scope, is not built, or differs
                from the other workers' models (the first difference is named).
        """
        if self._active:
            self.check_model(model)
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
        """Exchanges now; returns "moved", "unchanged" or "skipped".

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

        Keys: steps (local steps), settling_steps (those among them made in lockstep after the
        last epoch), exchanges, skipped_exchanges, skipped_chunks,
        times_fenced, exchange_s, last_staleness, last_rate, last_num_live.
        """
        if not self._active:
            return {"steps": 0, "settling_steps": 0, "exchanges": 0}
        mirror = self.mirror(model)
        return {
            "steps": int(mirror.steps),
            "settling_steps": mirror.settling_steps,
            **mirror.segment.stats(),
        }

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
            if len(self._mirrors) != 1:
                raise InvalidArgumentError(
                    f"this strategy has {len(self._mirrors)} models in the box: say which one "
                    "[SMB-E413]"
                )
            model = next(iter(self._mirrors))
        if model not in self._mirrors:
            client = self._connect()
            mirror = ModelMirror(
                model,
                client,
                f"{self._run_name}/{self._num_mirrored}",
                self._rule,
                self._num_workers,
                self._worker_index,
                self._on_existing,
                self._exchange_threads,
            )
            self._num_mirrored += 1
            self._mirrors[model] = mirror
            weakref.finalize(model, _release, mirror.segment, client).atexit = False
        return self._mirrors[model]

    def _started_mirror(self, model: keras.Model) -> ModelMirror:
        """The mirror, after its first contact: made eagerly, also from inside a trace."""
        if model in self._mirrors and self._mirrors[model].started:
            return self._mirrors[model]
        with tf.init_scope():
            mirror = self.mirror(model)
            if not mirror.started:
                mirror.start(self._start_timeout_s, announce)
        return mirror

    def _connect(self) -> Client:
        if self._client is None:
            address = self._server_address
            if address is None:
                self._embedded = Server()
                address = self._embedded.address
            self._client = Client(address, job_id=self._job_id)
        return self._client

    def check_model(self, model: keras.Model) -> None:
        """Refuses a model or an optimizer that was made outside the scope.

        Raises:
            FailedPreconditionError: With what to write instead.
        """
        if model.distribute_strategy is not self:
            raise FailedPreconditionError(
                f"model '{model.name}' was made outside strategy.scope(), so its weights are not "
                "in the box: make it, and compile it, inside 'with strategy.scope():' [SMB-E414]"
            )
        optimizer = _optimizer_of(model)
        made_in = getattr(optimizer, "_distribution_strategy", self)
        if optimizer is not None and made_in is not self:
            raise FailedPreconditionError(
                f"the optimizer '{optimizer.name}' of model '{model.name}' was made outside "
                "strategy.scope(): make it, and compile the model, inside 'with strategy.scope():' "
                "[SMB-E415]"
            )

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
        first = not (model in self._mirrors and self._mirrors[model].started)
        mirror = self._started_mirror(model)
        if not first:
            mirror.resume(self.is_chief, announce)
        mirror.segment.set_training(True)


def _release(segment: Segment, client: Client) -> None:
    """Gives a segment's memory back when its model is gone from the last worker."""
    with contextlib.suppress(Error):  # detached already, or no server any more
        name = segment.name
        segment.leave()
        is_last = not segment.live_workers()
        segment.detach()
        if is_last:
            client.free(name)


def _default_device() -> str:
    return "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"


def _optimizer_of(model: keras.Model) -> Any:
    """Returns the model's optimizer, without its loss scaling; None if it was not compiled."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _applied_updates(model: keras.Model) -> tf.Tensor | None:
    """Returns the optimizer's count of applied updates, now; None if it cannot be told.

    Counted before and after a step, it says whether an update was applied: gradient accumulation
    and loss scaling skip some.
    """
    optimizer = _optimizer_of(model)
    if optimizer is None or not hasattr(optimizer, "iterations"):
        return None
    return tf.identity(tf.convert_to_tensor(optimizer.iterations))


def _is_applied(before: tf.Tensor | None, after: tf.Tensor | None) -> tf.Tensor:
    if before is None or after is None:
        return tf.constant(True)
    return tf.not_equal(before, after)


short_errors.install()
keras_hooks.install()
