"""The Soft Memory Box from Python, on numpy arrays and other tensors, without TensorFlow.

`Server` lends memory as named segments, `Client` reaches them, `Segment` is one of them: a
center that several workers exchange their weights with.

Arrays are used in place, never copied: numpy arrays, and tensors of other libraries that are in
the CPU's memory and have `__dlpack__` (PyTorch, JAX, TensorFlow). They are C-contiguous, of the
variable's dtype, or, for float16 and bfloat16, of the float32 that the center holds them in. A
tensor that does not say that it may be written (of JAX, TensorFlow, older PyTorch) is only read;
where it would be overwritten, pass a numpy array that shares its memory.
"""

from __future__ import annotations

import atexit
import math
import operator
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from tf_smb import _smb, settings
from tf_smb.errors import (
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from tf_smb.rules import ExchangeRule, ReadThenAccumulate, check_rule
from tf_smb.schedule import Schedule, check_schedule

# How long a request to a server may take.
REQUEST_TIMEOUT_S = 10.0
# How long a client waits for a server to appear: launchers start it before the workers.
CONNECT_TIMEOUT_S = 3.0
# Reading or writing a whole center: bounded by a stopped process that holds a chunk.
TRANSFER_TIMEOUT_S = 60.0
# Waiting for other workers, where no time is given.
WAIT_TIMEOUT_S = 600.0
# After this long, a wait says whom it waits for.
_QUIET_S = 3.0
# Between two looks at a wait's condition and at the keyboard.
_SLICE_S = 0.2

# Name, shape and perhaps dtype of each variable: see `Client.create`.
Variables = Sequence[tuple[Any, ...]]
# One numpy array, or other tensor with `__dlpack__`, for each variable.
Arrays = Sequence[Any]
Announce = Callable[[str], None]

# What the center holds another dtype in.
_WIDE = {"float16": "float32", "bfloat16": "float32"}

_live_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def new_job_id() -> str:
    """Returns a job id that no other job has."""
    return "job-" + secrets.token_hex(6)


class Variable(NamedTuple):
    """A variable of a segment.

    Attributes:
        name: As its creator called it.
        shape: Its dimensions; () for a scalar.
        dtype: numpy's name: "float32", "float64", "float16" or "bfloat16", which exchanges, rounds
            and additions work on; "bool", "int8" to "int64", "uint8" to "uint64", "complex64" or
            "complex128", which are stored, read and written only.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Round(NamedTuple):
    """What a round of `Segment.average` came to.

    Attributes:
        number: Counts the segment's rounds from 1.
        missing: The workers whose shares did not come in time; the mean is of the others.
    """

    number: int
    missing: tuple[int, ...]


class Notice(NamedTuple):
    """What `Segment.post_notice` left for all workers.

    Attributes:
        number: Counts the segment's notices from 1; 0: there was none yet.
        text: Whatever the worker that posted it wrote.
    """

    number: int
    text: str


@dataclass(frozen=True)
class Member:
    """A worker of a segment, as the control block has it.

    Attributes:
        worker_index: Its number.
        state: "live", "left" (said goodbye) or "dead" (process gone or lease lapsed).
        process_id: In its own PID namespace.
        incarnation: Counts joins of the segment: tells a restarted worker from its former self.
        steps: Local steps, as of its last exchange, or of `Segment.publish_steps`.
        epoch: The epoch of its last exchange: see `Segment.begin_epoch`.
        batch: How many batches of it it had trained on then.
        phase: Of the schedule: the one it acts by.
        exchanges: Exchanges and rounds since it joined.
        training: Whether it is inside `fit`.
    """

    worker_index: int
    state: str
    process_id: int
    incarnation: int
    steps: int
    epoch: int
    batch: int
    phase: int
    exchanges: int
    training: bool


class Server:
    """Lends memory as named segments, from this process, until it is closed.

    Args:
        address: Where to listen: `shm://NAME`. None: a random name.
        lease_s: Seconds after which a worker that gives no sign of life is dropped.
        directory: Where segments are files, of this user alone, which outlive a server that
            crashes: the next one of the same address takes them over. None: memory without a
            name, which goes with the last process that uses it.

    Raises:
        AlreadyExistsError: A server of this user listens there already.
        InvalidArgumentError: Not an address, or an unknown transport.

    Example:
        >>> with Server() as server:
        ...     client = Client(server.address)
    """

    def __init__(
        self,
        address: str | None = None,
        lease_s: float = 10.0,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(lease_s, bool) or not isinstance(lease_s, Real) or not 0.1 <= lease_s <= 3600:
            raise InvalidArgumentError(
                f"lease_s must be 0.1 to 3600 seconds, got {lease_s!r} [SMB-E270]"
            )
        if address is None:
            address = f"shm://{os.getpid()}-{secrets.token_hex(6)}"
        self._server: _smb.Server | None = _smb.Server(
            address=address, lease_s=float(lease_s), directory=_check_directory(directory)
        )

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._checked().address

    @property
    def refused_files(self) -> list[str]:
        """Files in `directory` that it could not take over, each with the reason."""
        return self._checked().refused_files

    def segments(self) -> list[dict[str, Any]]:
        """Returns name, job_id, center_bytes and live_members of each segment."""
        return self._checked().list()

    def mark_worker_absent(self, worker_index: int) -> None:
        """Says that a worker will not come (again), so that no other waits for it."""
        self._checked().mark_worker_absent(worker_index)

    def close(self) -> None:
        """Stops listening and gives the segments up; workers on them go on until they leave."""
        self._server = None

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _checked(self) -> _smb.Server:
        if self._server is None:
            raise InvalidArgumentError("this server is closed [SMB-E271]")
        return self._server


class Client:
    """A connection to a server.

    Args:
        address: `shm://NAME`.
        job_id: Whose segments are ours. None: `TF_SMB_JOB_ID`, else a new random one.
        timeout_s: How long to wait for the server to appear.

    Raises:
        UnavailableError: No server there.
        PermissionDeniedError: It belongs to another user.

    Example:
        >>> client = Client(server.address)
        >>> segment = client.create("run", [("kernel", (3, 4)), ("bias", (4,), "float64")])
        >>> segment.start([np.zeros((3, 4), np.float32), np.zeros(4)])
    """

    def __init__(
        self, address: str, job_id: str | None = None, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self.address = address
        self.job_id = settings.resolve("job_id", job_id) or new_job_id()
        self._client = _smb.Client(address, timeout_s)

    def create(
        self,
        name: str,
        variables: Variables,
        num_workers: int | None = None,
        on_existing: str | None = None,
        exchange_threads: int | None = None,
        sparse: bool = False,
        finite_check: str | None = None,
    ) -> Segment:
        """Creates a segment, or joins the one that another worker of this job created.

        Args:
            name: 1 to 200 bytes.
            variables: For each variable, in order, its name and shape (then it is float32), or
                its name, shape and dtype: a name, a numpy dtype or scalar type, or one of
                ml_dtypes. See `Variable.dtype`.
            num_workers: How many workers the job starts. None: `TF_SMB_NUM_WORKERS`, else 1.
            on_existing: What to do if the segment is of another or a finished job: "fail",
                "resume" (join it) or "replace" (start anew).
            exchange_threads: 0 or None: one for each core of this process, at most 4.
            sparse: Take memory only where the center is first touched, for a segment that is
                larger than what is used of it. If there is none left then, whoever touches it is
                killed; otherwise, all is taken now or refused now.
            finite_check: When exchanges look for NaN and Inf, of which none ever reaches the
                center: "before" they move anything, or "during" (faster; the variables before
                the first bad one have been moved). None: `TF_SMB_FINITE_CHECK`.

        Raises:
            FailedPreconditionError: Another layout (the first difference is named), or another
                job's or a finished job's segment.
            InvalidArgumentError: A name, shape or number is out of range.
            ResourceExhaustedError: Not enough memory.
        """
        check = settings.resolve("finite_check", finite_check)
        segment = self._client.open(
            name,
            self.job_id,
            settings.resolve("num_workers", num_workers),
            settings.resolve("on_existing", on_existing),
            _check_variables(variables),
            bool(sparse),
            settings.resolve("exchange_threads", exchange_threads),
            REQUEST_TIMEOUT_S,
        )
        segment.set_finite_check(check)
        return Segment(segment)

    def attach(
        self, name: str, exchange_threads: int | None = None, finite_check: str | None = None
    ) -> Segment:
        """Attaches an existing segment, whoever created it.

        Args:
            name: Its name.
            exchange_threads: See `create`.
            finite_check: See `create`.

        Raises:
            NotFoundError: No such segment; the message lists those there are.
        """
        check = settings.resolve("finite_check", finite_check)
        threads = settings.resolve("exchange_threads", exchange_threads)
        segment = self._client.attach(name, threads, REQUEST_TIMEOUT_S)
        segment.set_finite_check(check)
        return Segment(segment)

    def free(self, name: str) -> None:
        """Takes the name away; the memory goes when the last worker detaches.

        Raises:
            NotFoundError: No such segment.
        """
        self._client.free(name, REQUEST_TIMEOUT_S)

    def segments(self) -> list[dict[str, Any]]:
        """Returns name, job_id, center_bytes and live_members of each segment."""
        return self._client.list(REQUEST_TIMEOUT_S)


class Lock:
    """A segment's lock, as long as this worker has it. Made by `Segment.lock`.

    As a context manager it is released at the end of the block.
    """

    def __init__(self, segment: _smb.Segment, token: int) -> None:
        self._segment = segment
        self._token = token
        self._released = False

    @property
    def token(self) -> int:
        """The number of this grant: larger than that of any before."""
        return self._token

    def release(self) -> None:
        """Gives the lock up; harmless when that was done before.

        Raises:
            AbortedError: It had lapsed: somebody else may have had it since.
        """
        if not self._released:
            self._released = True
            self._segment.unlock(self._token)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.release()
        else:
            with suppress(Error):  # what ended the block says more
                self.release()


class Segment:
    """The center of one model, shared by the workers that train it.

    Made by `Client.create` and `Client.attach`. `arrays` are one for each variable, in the order
    and of the sizes of `variables`: see the head of this module for what they can be.

    A worker's life: `start` (joins; the first worker's weights become the center, the others'
    arrays are set to it), `exchange` whenever `is_due` says so, or `average` for all together,
    `meet` at the end (everybody gets the same center), `detach`.

    Variables that are not floats (see `Variable.dtype`) are kept beside the center: `start`,
    `meet`, `read` and `write` carry them; `exchange`, `average`, `accumulate` and `axpy` leave
    them, and the arrays for them, as they are.

    Every method raises FailedPreconditionError after `detach`, and in a forked child.
    """

    def __init__(self, segment: _smb.Segment) -> None:
        self._segment: _smb.Segment = segment
        self._indexes: dict[str, int | None] | None = None  # by name; None: several have it
        # By phase, rules that some numbers of workers make unstable, until that was said.
        self._watched_rules: dict[int, ReadThenAccumulate] = {}
        self._segment.set_round_timeout(settings.resolve("round_timeout_s", None))
        _live_segments.add(self)

    # --- What it is ---

    @property
    def name(self) -> str:
        """Its name on the server."""
        return self._segment.name

    @property
    def job_id(self) -> str:
        """The job that created it."""
        return self._segment.job_id

    @property
    def num_workers(self) -> int:
        """How many workers its creator said the job starts."""
        return self._segment.num_workers

    @property
    def created(self) -> bool:
        """Whether this very call to `create` made it."""
        return self._segment.created

    @property
    def variables(self) -> list[Variable]:
        """Name, shape and dtype of each variable, in order."""
        return [Variable(*variable) for variable in self._segment.variables]

    @property
    def handle(self) -> int:
        """The number that the TensorFlow op knows it by, in this process."""
        return self._segment.handle

    @property
    def version(self) -> int:
        """Updates (exchanges, additions, writes, rounds) applied to the center, by all workers."""
        return self._segment.version

    @property
    def seeded(self) -> bool:
        """Whether the center holds weights yet."""
        return self._segment.seeded

    @property
    def rounds_closed(self) -> int:
        """How many rounds of `average` have ended."""
        return self._segment.rounds_closed

    @property
    def lock_holder(self) -> int | None:
        """The worker that has the lock; None: nobody."""
        return self._segment.lock_holder

    def status(self) -> dict[str, Any]:
        """Returns all there is to know about the segment, in values that JSON can hold.

        Keys: name, job_id, version, center_bytes, num_chunks, lease_s (seconds), num_workers
        (meant to start), num_live, live (their indexes), seeded, rounds_closed, phase (of the
        schedule), lock_holder (an index or None), members (see `Member`), variables (name, shape,
        dtype).

        Example:
            >>> json.dumps(segment.status())
        """
        members = self.members()
        live = [member.worker_index for member in members if member.state == "live"]
        return {
            "name": self.name,
            "job_id": self.job_id,
            "version": self.version,
            "center_bytes": self._segment.center_bytes,
            "num_chunks": self._segment.num_chunks,
            "lease_s": self._segment.lease_s,
            "num_workers": self.num_workers,
            "num_live": len(live),
            "live": live,
            "seeded": self.seeded,
            "rounds_closed": self.rounds_closed,
            "phase": self._segment.center_phase,
            "lock_holder": self.lock_holder,
            "members": [asdict(member) for member in members],
            "variables": [
                {"name": name, "shape": list(shape), "dtype": dtype}
                for name, shape, dtype in self.variables
            ],
        }

    # --- Members ---

    def join(self, worker_index: int | None = None) -> int:
        """Becomes a member, under a lease that a native thread renews; returns its index.

        Args:
            worker_index: None: the lowest that no live worker has.

        Raises:
            AlreadyExistsError: A live worker has that index.
        """
        if worker_index is not None:
            worker_index = settings.resolve("worker_index", worker_index)
        self._segment.join(worker_index)
        return self._segment.worker_index

    @property
    def joined(self) -> bool:
        """Whether this process is a member now."""
        return self._segment.joined

    @property
    def worker_index(self) -> int:
        """This worker's number.

        Raises:
            FailedPreconditionError: Not a member.
        """
        return self._segment.worker_index

    def members(self) -> list[Member]:
        """Returns all members, by index: the live, those that left and those that died."""
        fields = Member.__dataclass_fields__
        return [
            Member(**{key: value for key, value in member.items() if key in fields})
            for member in self._segment.members()
        ]

    def live_workers(self) -> list[int]:
        """Returns the indexes of the live members."""
        return [member.worker_index for member in self.members() if member.state == "live"]

    def set_training(self, training: bool) -> None:
        """Says whether this worker is in the middle of training, for the others to see."""
        self._segment.set_training(training)

    def leave_unless_last(self) -> bool:
        """Leaves while another worker still trains; returns whether it did.

        One atomic decision: of several workers that stop together, one always stays.
        """
        left = self._segment.leave_unless_last()
        if left:
            self._segment.leave()
        return left

    def leave(self) -> None:
        """Ends membership; the center can still be read."""
        self._segment.leave()

    def detach(self) -> None:
        """Leaves, and gives the memory up. The server keeps the segment until it is freed.

        Harmless when that was done before. Any later use raises FailedPreconditionError.
        """
        self._segment.detach()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # --- Weights ---

    def set_rule(self, rule: ExchangeRule | None) -> None:
        """Sets what this worker's exchanges do from now on, and how often; ends a schedule.

        The other workers do not hear of it.

        Args:
            rule: None: the default rule.
        """
        rule = check_rule(rule)
        self._segment.set_rule(*rule.core_rule())
        self._segment.set_period(rule.communication_period)
        self._watched_rules = {0: rule} if isinstance(rule, ReadThenAccumulate) else {}

    def set_schedule(self, schedule: Schedule, position: int = 0) -> None:
        """Sets what exchanges do from now on, and when: see `Schedule`. `start` does it as well.

        Args:
            schedule: The same on all workers.
            position: Where training begins, a step or epoch: for one that is taken up again. Only
                the position of the worker that seeds counts.

        Raises:
            FailedPreconditionError: The workers have agreed on another schedule; the message has
                both. If this is not a member yet, `join` says it.

        Example:
            >>> segment.set_schedule(
            ...     Schedule([(0, PeriodicAveraging(1)), (500, ElasticAveraging(8))])
            ... )
        """
        schedule = check_schedule(None, schedule)
        self._segment.set_schedule(
            [(begin, *rule, period) for begin, rule, period in schedule.core_phases()],
            schedule.unit,
            _check_count("position", position),
        )
        self._watched_rules = {
            phase: rule
            for phase, (_, rule) in enumerate(schedule.phases)
            if isinstance(rule, ReadThenAccumulate)
        }

    def set_statistics(self, statistics: Sequence[bool] | Sequence[str]) -> None:
        """Says which variables are statistics, such as the moving variances of normalisation.

        Whatever the rule, exchanges average them elastically, at rate 1 / live workers: a center
        between what the workers have, where delta averaging could take a variance below zero.
        Rounds average them as all others.

        Args:
            statistics: A bool for each variable, or the names of those that are statistics.

        Raises:
            InvalidArgumentError: Neither of the two; the message has what was given.
            NotFoundError: No variable has that name.

        Example:
            >>> segment.set_statistics(["moving_mean", "moving_variance"])
        """
        self._segment.set_statistics(self._flags(statistics))

    def start(
        self,
        arrays: Arrays,
        worker_index: int | None = None,
        rule: ExchangeRule | None = None,
        timeout_s: float | None = None,
        announce: Announce = print,
        schedule: Schedule | None = None,
        min_workers: int | None = None,
        position: int = 0,
        warn_unstable: bool = True,
    ) -> bool:
        """Joins, waits for the others, and makes all workers start at one center.

        Waits until all `num_workers` have joined (those that died do not count), then the lowest
        live worker's arrays become the center and every other worker's arrays are overwritten
        with it. A worker that comes later takes the center as it is, and begins in the present
        phase of the schedule.

        Args:
            arrays: This worker's first weights; overwritten unless it seeds.
            worker_index: None: the lowest that no live worker has.
            rule: How `exchange` moves the weights, and how often: a schedule of one phase. None:
                the default rule.
            timeout_s: How long to wait for the others; then it starts with those who are there.
                None: `TF_SMB_START_TIMEOUT_S`.
            announce: Called with a line of text while waiting.
            schedule: Rules, one after the other, instead of `rule`; the same on all workers.
            min_workers: The fewest live workers to start with. None: `TF_SMB_MIN_WORKERS`, else 1.
            position: Where training begins, a step or epoch: see `set_schedule`.
            warn_unstable: Whether `exchange` warns of rules that are not stable.

        Returns:
            Whether this worker's arrays became the center.

        Raises:
            DeadlineExceededError: Fewer than `min_workers` came in time; the message names the
                missing.
            FailedPreconditionError: The other workers have another rule or schedule.
            InvalidArgumentError: An argument is out of range, or `rule` and `schedule` are both
                given.

        Example:
            >>> segment.start([kernel, bias], rule=ElasticAveraging(8), min_workers=2)
        """
        arrays = list(arrays)
        self._segment.check_arrays(arrays, writeable=True)
        timeout_s = settings.resolve("start_timeout_s", timeout_s)
        min_workers = self._check_min_workers(settings.resolve("min_workers", min_workers))
        self.set_schedule(check_schedule(rule, schedule), position)
        if not warn_unstable:
            self._watched_rules = {}
        if not self.joined:
            self.join(worker_index)
        self._wait_for_start(timeout_s, min_workers, announce)
        seeded_it = self._seed_or_wait(arrays, announce)
        if not seeded_it:
            self.read_into(arrays)
        self._segment.rebase(arrays)
        return seeded_it

    def read(self, wide: bool = False) -> list[np.ndarray]:
        """Returns the center as new arrays.

        Args:
            wide: Give float16 and bfloat16 variables as the float32 that the center holds.

        Raises:
            FailedPreconditionError: A variable is bfloat16, and there is no package ml_dtypes,
                which numpy needs for it.
            DeadlineExceededError: A stopped worker holds a part of the center.

        Example:
            >>> kernel, bias = segment.read()
        """
        arrays = [np.empty(shape, _numpy_dtype(dtype, wide)) for _, shape, dtype in self.variables]
        self.read_into(arrays)
        return arrays

    def read_into(self, arrays: Arrays) -> None:
        """Overwrites the arrays with the center.

        Raises:
            InvalidArgumentError: An array does not fit its variable, or is read-only.
            DeadlineExceededError: A stopped worker holds a part of the center.
        """
        self._segment.read(arrays, TRANSFER_TIMEOUT_S)

    def read_slice(
        self, variable: int | str, start: int, count: int, wide: bool = False
    ) -> np.ndarray:
        """Returns some elements of one variable of the center, as a new array of one dimension.

        Args:
            variable: Its number in `variables`, or its name.
            start: The first element, counted in C order.
            count: How many.
            wide: See `read`.

        Raises:
            InvalidArgumentError: The variable has no such elements, or there is no such number.
            NotFoundError: No variable has that name.

        Example:
            >>> segment.read_slice("embedding", 64 * 1_000_000, 64)  # row 1,000,000
        """
        index = self._index_of(variable)
        start, count = _check_count("start", start), _check_count("count", count)
        dtype = self._segment.slice_dtype(index, start, count)
        array = np.empty(count, _numpy_dtype(dtype, wide))
        self._segment.read_slice(index, start, array, TRANSFER_TIMEOUT_S)
        return array

    def write(self, arrays: Arrays) -> None:
        """Overwrites the center with the arrays: what others put into it since is lost.

        Raises:
            InvalidArgumentError: An array does not fit its variable.
            DeadlineExceededError: A stopped worker holds a part of the center.
        """
        self._segment.write(arrays, TRANSFER_TIMEOUT_S)

    def write_slice(self, variable: int | str, start: int, array: Any) -> None:
        """Overwrites some elements of one variable of the center: as many as the array has.

        Args and errors are those of `read_slice` and `write`.
        """
        index, start = self._index_of(variable), _check_count("start", start)
        self._segment.write_slice(index, start, array, TRANSFER_TIMEOUT_S)

    def accumulate(self, arrays: Arrays, scale: float = 1.0) -> None:
        """Adds to the center: center += scale * arrays, in the center's dtype.

        Every element is added exactly once, whatever other workers do at the same time: additions
        commute. Each chunk of the center (256 KiB) is added to all or nothing, even if this
        process is killed meanwhile.

        Args:
            arrays: What to add, one for each variable; those for variables that are not floats
                are not looked at.
            scale: A finite number.

        Raises:
            InvalidArgumentError: An array does not fit, the scale is not finite, or NaN or Inf is
                in an array or would come out.
            DeadlineExceededError: A stopped worker holds a part of the center; the rest was
                added to.

        Example:
            >>> segment.accumulate(gradients, scale=-0.01)

        Source: the server-side accumulate of SMB in ShmCaffe (Ahn et al. 2018).
        """
        self._segment.accumulate(arrays, _check_number("scale", scale), TRANSFER_TIMEOUT_S)

    def accumulate_slice(
        self, variable: int | str, start: int, array: Any, scale: float = 1.0
    ) -> None:
        """Adds to some elements of one variable of the center: to as many as the array has.

        Args and errors are those of `read_slice` and `accumulate`.

        Raises:
            InvalidArgumentError: Also for a variable that is not a float.
        """
        index, start = self._index_of(variable), _check_count("start", start)
        self._segment.accumulate_slice(
            index, start, array, _check_number("scale", scale), TRANSFER_TIMEOUT_S
        )

    def axpy(self, scale: float, source: Segment) -> None:
        """Adds another segment's center to this one: center += scale * source's center.

        Where the segments are: nothing passes through this process over a network.

        Args:
            scale: A finite number.
            source: A segment of the same server, with the same variables; may be this one.

        Raises:
            FailedPreconditionError: The variables differ; the message names the first.
            InvalidArgumentError: `source` is of another server, or NaN or Inf would come out.
            DeadlineExceededError: A stopped worker holds a part of either center.

        Example:
            >>> average.axpy(0.5, other)
        """
        if not isinstance(source, Segment):
            raise InvalidArgumentError(
                f"source must be a tf_smb.Segment, got {source!r} [SMB-E279]"
            )
        self._segment.axpy(_check_number("scale", scale), source._segment, TRANSFER_TIMEOUT_S)

    def rebase(self, arrays: Arrays) -> None:
        """Says that this worker goes on from `arrays`, for delta averaging to measure from."""
        self._segment.rebase(arrays)

    def exchange(
        self,
        arrays: Arrays,
        steps: int = 0,
        batches: int | None = None,
        announce: Announce | None = print,
    ) -> str:
        """Moves the arrays and the center toward each other, in place, by the schedule or rule.

        In a phase of `PeriodicAveraging` it waits for the other workers, up to
        `TF_SMB_ROUND_TIMEOUT_S`: see `average`. This worker's share weighs as many steps as it made
        since its last exchange.

        Args:
            arrays: This worker's weights. Those of variables that are not floats stay as they are.
            steps: Its step count, for others to see, and for the schedule.
            batches: How many batches it has trained on, in all. None: as many as steps.
            announce: Called with a line of text while waiting.

        Returns:
            "moved"; "unchanged" (alone: the center is now a copy of the arrays); "replaced" (a
            round: the arrays are the mean of all workers'); "skipped" (nothing happened: its lease
            had lapsed, and it is joining again, or a round went on without it).

        Raises:
            InvalidArgumentError: The arrays hold NaN or Inf, none of which reaches the center, or
                they do not fit.
            FailedPreconditionError: Not a member.
            KeyboardInterrupt: Ctrl-C, while waiting.

        Warns:
            RuntimeWarning: Once, if so many workers are live that `ReadThenAccumulate` is not
                stable with its moving_rate.

        Example:
            >>> for step in range(1, 1001):
            ...     train(kernel, bias)
            ...     if segment.is_due(step):
            ...         segment.exchange([kernel, bias], steps=step)

        Source: see the rules in `tf_smb.rules`.
        """
        try:
            outcome = self._segment.exchange(
                arrays, steps, steps if batches is None else batches, announce
            )
        except TypeError:
            _check_count("steps", steps)
            _check_batches(steps, batches)
            raise
        if self._watched_rules:
            self._warn_if_unstable()
        return outcome

    def average(
        self,
        arrays: Arrays,
        weight: float = 1.0,
        steps: int = 0,
        timeout_s: float | None = None,
        announce: Announce | None = print,
    ) -> Round:
        """Makes the center, and every worker's arrays, the weighted mean of all workers' arrays.

        Waits for all workers that were live when the first of them came; those that leave or die
        meanwhile are not waited for. What the center held before does not count.

        Args:
            arrays: This worker's share; overwritten with the mean, byte for byte the same on
                every worker. Those of variables that are not floats stay as they are.
            weight: Of this worker's share, above 0: for example the samples it has seen.
            steps: Its step count, for others to see.
            timeout_s: How long to wait for the others' shares, then for them to have read the
                round before; then it goes on without the missing. None: 600 seconds.
            announce: Called with a line of text while waiting.

        Returns:
            The round's number, and the workers that did not come in time.

        Raises:
            InvalidArgumentError: NaN or Inf in the arrays, a weight that is not above 0, or arrays
                that do not fit.
            FailedPreconditionError: Not a member, or the round was closed without this worker.
            AbortedError: This worker's lease lapsed.
            KeyboardInterrupt: Ctrl-C.

        Example:
            >>> segment.average([kernel, bias], weight=samples_seen)
            Round(number=1, missing=())

        Source: federated averaging (McMahan et al. 2017, arXiv:1602.05629, algorithm 1); local
        SGD (Stich 2019, arXiv:1805.09767) with equal weights.
        """
        number, missing = self._segment.average(
            arrays,
            _check_number("weight", weight),
            _check_count("steps", steps),
            _check_timeout(timeout_s),
            announce,
        )
        return Round(number, tuple(missing))

    def stats(self) -> Mapping[str, Any]:
        """Returns what this worker's exchanges came to; never waits for one.

        Keys: exchanges (rounds among them), rounds, skipped_exchanges, skipped_chunks,
        times_fenced, moved_bytes (of this worker's weights, both ways together), exchange_s (all
        time in exchanges) and waiting_s (of it, for other workers), last_staleness (exchanges of
        others since this worker's one before), staleness_histogram (how often it was 0, 1, 2-3,
        4-7, ..., 2**14 or more; rounds do not count), last_rate (1 in a round), last_num_live,
        changes (a dict of steps, phase, period, rate and num_live for each exchange at which any
        but the first was another) and changes_forgotten (how many more there were).

        Example:
            >>> segment.stats()["waiting_s"]
        """
        return self._segment.stats()

    def raise_last_error(self) -> None:
        """Raises what made the last exchange fail, if it failed."""
        self._segment.raise_last_error()

    # --- The schedule ---

    @property
    def phase(self) -> int:
        """The phase of the schedule that this worker is in, from 0; 0 without a schedule."""
        return self._segment.phase

    @property
    def period(self) -> int:
        """This worker's steps from one exchange to the next, in this phase."""
        return self._segment.period

    def is_due(self, steps: int, batches: int | None = None) -> bool:
        """Whether to `exchange` now; to be asked once in every step. Cheap.

        It is, `period` steps after the last exchange, and at the end of a phase: of this worker's
        own, or when another has ended it.

        Args:
            steps: This worker's step count, from 1.
            batches: How many batches it has trained on, in all. None: as many as steps.

        Raises:
            FailedPreconditionError: Not a member.

        Example:
            >>> if segment.is_due(step):
            ...     segment.exchange([kernel, bias], steps=step)
        """
        return self._segment.is_due(_check_count("steps", steps), _check_batches(steps, batches))

    def begin_epoch(self, epoch: int, batches: int = 0) -> None:
        """Says that an epoch begins: where phases of a schedule by epochs end; ask `is_due` next.

        Args:
            epoch: Its number, from 0.
            batches: How many batches this worker has trained on so far, in all.

        Example:
            >>> segment.begin_epoch(3, batches=3 * 468)
        """
        self._segment.begin_epoch(_check_count("epoch", epoch), _check_count("batches", batches))

    def set_period(self, period: int) -> None:
        """Sets this worker's communication period, until the next phase begins.

        Args:
            period: Steps from one exchange to the next, from 1 on.

        Raises:
            InvalidArgumentError: Out of range.

        Example:
            >>> segment.set_period(2 * segment.period)
        """
        self._segment.set_period(_check_count("period", period))

    def set_round_timeout(self, timeout_s: float | None) -> None:
        """Sets how long `exchange` waits in a round for live workers that do not come.

        Args:
            timeout_s: None: `TF_SMB_ROUND_TIMEOUT_S`, else 600 seconds.

        Example:
            >>> segment.set_round_timeout(60)
        """
        self._segment.set_round_timeout(settings.resolve("round_timeout_s", timeout_s))

    def publish_steps(self, steps: int) -> None:
        """Says how far this worker is, for those who wait for it, between exchanges. Cheap.

        Args:
            steps: Its step count.

        Raises:
            FailedPreconditionError: Not a member.
        """
        self._segment.publish_steps(_check_count("steps", steps))

    # --- Words to all ---

    def post_notice(self, text: str) -> int:
        """Leaves a text for all workers, instead of the one before; returns its number.

        Args:
            text: At most 4096 bytes of UTF-8.

        Raises:
            InvalidArgumentError: Too long, or no text.
            FailedPreconditionError: Not a member.
            AbortedError: This worker's lease lapsed.

        Example:
            >>> segment.post_notice("accuracy 0.97: ends at step 5000")
            1
        """
        if not isinstance(text, str):
            raise InvalidArgumentError(f"a notice must be a text, got {text!r} [SMB-E285]")
        return self._segment.post_notice(text)

    def notice(self) -> Notice:
        """Returns the last notice of any worker, and its number.

        Example:
            >>> segment.notice()
            Notice(number=1, text='accuracy 0.97: ends at step 5000')
        """
        return Notice(*self._segment.notice())

    def request_stop(self) -> None:
        """Asks all workers to end their training: see `stop_requested`.

        Raises:
            FailedPreconditionError: Not a member.
        """
        self._segment.request_stop()

    @property
    def stop_requested(self) -> bool:
        """Whether a worker asked all to end their training; until they have met at its end."""
        return self._segment.stop_requested

    # --- Meeting ---

    def meet(
        self,
        arrays: Arrays,
        timeout_s: float | None = None,
        announce: Announce = print,
    ) -> int:
        """Waits for all live workers to come here, and gives each the same center.

        The dead are dropped; workers that still make steps are waited for.

        Args:
            arrays: Overwritten with the center, byte for byte the same on every worker.
            timeout_s: How long to wait without any step of a worker that is missing; then it
                goes on without them. None: `TF_SMB_END_TIMEOUT_S`.
            announce: Called with a line of text while waiting.

        Returns:
            The fewest steps that any of the workers made in its training: the same number on all;
            0 if some were not waited for any longer.
        """
        timeout_s = settings.resolve("end_timeout_s", timeout_s)
        arrays = list(arrays)
        self._segment.check_arrays(arrays, writeable=True)
        meeting = self._segment.arrive()
        wait = _Wait(self._segment, timeout_s, announce)
        complete = True
        while not self._segment.try_close_meeting(meeting):
            missing = [
                member
                for member in self._segment.members()
                if member["state"] == "live" and member["arrived"] < meeting
            ]
            names = ", ".join(f"worker {m['worker_index']} (step {m['steps']})" for m in missing)
            progress = tuple((m["worker_index"], m["steps"]) for m in missing)
            if not wait.once(f"waiting at the end of training for {names}", progress):
                announce(f"tf_smb: no step from {names} in {timeout_s:g} s: going on without")
                complete = False
                break
        fewest_steps = self._segment.fewest_steps if complete else 0
        self.read_into(arrays)
        self._segment.rebase(arrays)
        self._segment.finish_meeting(meeting)
        # Until all have read, nobody may go on to change the center again.
        wait = _Wait(self._segment, TRANSFER_TIMEOUT_S, announce)
        while not self._segment.meeting_finished(meeting):
            if not wait.once("waiting for the other workers to read the center", None):
                break
        return fewest_steps

    # --- Waiting ---

    def barrier(
        self,
        workers: Sequence[int] | None = None,
        timeout_s: float | None = None,
        announce: Announce | None = print,
    ) -> None:
        """Waits until all these workers, this one among them, have come here.

        Those that left or died are not waited for; those that did not join yet are.

        Args:
            workers: Their indexes, in any order; a barrier is of those who name the same ones.
                None: those that are live now, which suits only while none joins.
            timeout_s: How long to wait. None: 600 seconds.
            announce: Called with a line of text while waiting.

        Raises:
            DeadlineExceededError: The message names the workers that did not come.
            InvalidArgumentError: An index is out of range, or this worker's is not among them.
            FailedPreconditionError: Not a member.
            AbortedError: This worker's lease lapsed.
            KeyboardInterrupt: Ctrl-C.

        Example:
            >>> segment.barrier(range(segment.num_workers))
        """
        indexes = self.live_workers() if workers is None else workers
        self._segment.barrier(
            [_check_worker_index(index) for index in indexes], _check_timeout(timeout_s), announce
        )

    def lock(
        self,
        lease_s: float = 10.0,
        timeout_s: float | None = None,
        announce: Announce | None = print,
    ) -> Lock:
        """Takes the segment's lock, which excludes those who ask for it, and nobody else.

        It ends when it is released, when its holder leaves or dies, or `lease_s` after it was
        granted: then another worker can have it.

        Args:
            lease_s: Seconds that it is needed at most.
            timeout_s: How long to wait for it; 0 takes it only if it is free. None: 600 seconds.
            announce: Called with a line of text while waiting.

        Raises:
            DeadlineExceededError: The message names the worker that has it.
            InvalidArgumentError: `lease_s` is out of range.
            FailedPreconditionError: Not a member.
            KeyboardInterrupt: Ctrl-C.

        Example:
            >>> with segment.lock(lease_s=5):
            ...     count = segment.read_slice("count", 0, 1)
            ...     segment.write_slice("count", 0, count + 1)

        Source: tokens that grow with every grant, as in Chubby (Burrows 2006, OSDI).
        """
        token = self._segment.lock(
            _check_number("lease_s", lease_s), _check_timeout(timeout_s), announce
        )
        return Lock(self._segment, token)

    def wait_version(self, version: int, timeout_s: float | None = None) -> int:
        """Waits until the center's version is at least `version`, and returns it.

        Args:
            version: See the property `version`.
            timeout_s: How long to wait. None: 600 seconds.

        Raises:
            DeadlineExceededError: The message has the version that it came to.
            KeyboardInterrupt: Ctrl-C.

        Example:
            >>> segment.wait_version(segment.version + 1)  # the next update, by anybody
        """
        return self._segment.wait_for_version(
            _check_count("version", version), _check_timeout(timeout_s)
        )

    def wait(self, timeout_s: float) -> None:
        """Returns at the next change among the members, or after `timeout_s`."""
        self._segment.wait_for_change(self._segment.changes, timeout_s)

    # --- Parts of the above ---

    def _index_of(self, variable: int | str) -> int:
        """Returns the number of a variable that is given by number or name."""
        if not isinstance(variable, str):
            return _check_count("variable", variable)
        if self._indexes is None:
            indexes: dict[str, int | None] = {}
            for index, (name, _, _) in enumerate(self.variables):
                indexes[name] = None if name in indexes else index
            self._indexes = indexes
        if variable not in self._indexes:
            names = ", ".join(f"'{name}'" for name in list(self._indexes)[:20])
            raise NotFoundError(
                f"segment '{self.name}' has no variable '{variable}'; it has {names}"
                + (", ..." if len(self._indexes) > 20 else "")
                + " [SMB-E280]"
            )
        found = self._indexes[variable]
        if found is None:
            raise InvalidArgumentError(
                f"several variables of segment '{self.name}' are named '{variable}': say its "
                "number instead [SMB-E281]"
            )
        return found

    def _flags(self, statistics: Any) -> list[bool]:
        """Returns for each variable whether it is a statistic."""
        given = None if isinstance(statistics, str) else _list_of(statistics)
        if given is not None and all(isinstance(item, str) for item in given):
            chosen = {self._index_of(name) for name in given}
            return [index in chosen for index in range(len(self.variables))]
        if given is not None and all(isinstance(item, bool | np.bool_) for item in given):
            return [bool(item) for item in given]
        raise InvalidArgumentError(
            "statistics must be a bool for each variable, or names of variables, got "
            f"{statistics!r} [SMB-E284]"
        )

    def _check_min_workers(self, min_workers: int) -> int:
        if min_workers > self.num_workers:
            raise InvalidArgumentError(
                f"min_workers must be at most num_workers, {self.num_workers} for segment "
                f"'{self.name}', got {min_workers} [SMB-E283]"
            )
        return min_workers

    def _warn_if_unstable(self) -> None:
        rule = self._watched_rules.get(self._segment.phase)
        num_live = self._segment.num_live
        if rule is None or rule.is_stable(num_live):
            return
        self._watched_rules = {}
        warnings.warn(
            f"ReadThenAccumulate with moving_rate={rule.moving_rate:g} is not stable with "
            f"{num_live} workers in step: it must be below 2 / (workers + 1) = "
            f"{2 / (num_live + 1):.3g}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _wait_for_start(self, timeout_s: float, min_workers: int, announce: Announce) -> None:
        wait = _Wait(self._segment, timeout_s, announce)
        while not self.seeded:
            present = {member["worker_index"] for member in self._segment.members()}
            missing = [
                index
                for index in range(self.num_workers)
                if index not in present and not self._segment.is_absent(index)
            ]
            enough = self._segment.num_live >= min_workers
            if not missing and enough:
                return
            names = _count_names("worker", missing) if missing else "other workers"
            if wait.once(f"waiting for {names} of {self.num_workers} to start", None):
                continue
            if not enough:
                raise DeadlineExceededError(
                    f"{self._segment.num_live} workers came to segment '{self.name}' in "
                    f"{timeout_s:g} s, of the {min_workers} that min_workers asks for: "
                    f"{names} did not [SMB-E286]"
                )
            announce(f"tf_smb: {names} did not come in {timeout_s:g} s: starting without")
            return

    def _seed_or_wait(self, arrays: Arrays, announce: Announce) -> bool:
        wait = _Wait(self._segment, TRANSFER_TIMEOUT_S, announce)
        while not self.seeded:
            lowest = min(self.live_workers(), default=self.worker_index)
            if lowest == self.worker_index and self._segment.try_seed(
                list(arrays), TRANSFER_TIMEOUT_S
            ):
                return True
            if not wait.once(f"waiting for worker {lowest} to put its weights into the box", None):
                raise DeadlineExceededError(
                    f"worker {lowest} did not put its weights into segment '{self.name}' in "
                    f"{TRANSFER_TIMEOUT_S:g} s [SMB-E272]"
                )
        return False


class _Wait:
    """Waits in slices, says whom for after a while, and ends at a deadline without progress."""

    def __init__(self, segment: _smb.Segment, timeout_s: float, announce: Announce) -> None:
        self._segment = segment
        self._timeout_s = timeout_s
        self._announce = announce
        self._progress: Any = None
        self._progress_at = self._said_at = time.monotonic()
        self._seen = segment.changes
        self._quiet_s = _QUIET_S

    def once(self, what: str, progress: Any) -> bool:
        """Waits a little; False when nothing in `progress` changed for `timeout_s`."""
        now = time.monotonic()
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        if now - self._said_at > self._quiet_s:
            self._said_at, self._quiet_s = now, min(60.0, self._quiet_s * 3)
            self._announce(f"tf_smb: {what}")
        if now - self._progress_at > self._timeout_s:
            return False
        self._segment.wait_for_change(self._seen, min(_SLICE_S, self._timeout_s))
        self._seen = self._segment.changes
        return True


def _check_variables(variables: Variables) -> list[tuple[str, list[int], str]]:
    def check(variable: Any) -> tuple[str, list[int], str]:
        try:
            name, shape, *rest = variable
            dimensions = [operator.index(dimension) for dimension in shape]
            fits = (
                isinstance(name, str) and all(0 <= d < 2**48 for d in dimensions) and len(rest) <= 1
            )
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise InvalidArgumentError(
                "each variable must be a name and a shape of integers from 0 to 2**48 - 1, and "
                f"perhaps a dtype, got {variable!r} [SMB-E273]"
            )
        return name, dimensions, _dtype_name(name, rest[0]) if rest else "float32"

    return [check(variable) for variable in variables]


def _dtype_name(variable: str, dtype: Any) -> str:
    """Returns numpy's name of a dtype; the core knows which of them a segment can hold."""
    if isinstance(dtype, str) and dtype == "bfloat16":  # also without ml_dtypes
        return dtype
    try:
        found = np.dtype(dtype) if dtype is not None else None
    except (TypeError, ValueError):
        found = None
    if found is None or not found.isnative:
        raise InvalidArgumentError(
            f"variable '{variable}' must have a dtype that numpy knows, in this machine's byte "
            f"order, got {dtype!r} [SMB-E274]"
        )
    return found.name


def _numpy_dtype(name: str, wide: bool) -> np.dtype:
    name = _WIDE.get(name, name) if wide else name
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise FailedPreconditionError(
            "for bfloat16 numpy needs the package ml_dtypes: pip install ml_dtypes, or read with "
            "wide=True for float32 [SMB-E282]"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)


def _check_directory(directory: str | os.PathLike[str] | None) -> str:
    if directory is None:
        return ""
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise InvalidArgumentError(
            f"directory must be the path of a folder, got {directory!r} [SMB-E275]"
        )
    return path


def _check_number(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{name} must be a finite number, got {value!r} [SMB-E276]")
    return number


def _check_count(name: str, value: Any) -> int:
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise InvalidArgumentError(
            f"{name} must be an integer from 0 to 2**63 - 1, got {value!r} [SMB-E277]"
        )
    return number


def _check_batches(steps: int, batches: int | None) -> int:
    return steps if batches is None else _check_count("batches", batches)


def _list_of(items: Any) -> list[Any] | None:
    try:
        return list(items)
    except TypeError:
        return None


def _check_worker_index(index: Any) -> int:
    return settings.resolve("worker_index", index)


def _check_timeout(timeout_s: float | None) -> float:
    if timeout_s is None:
        return WAIT_TIMEOUT_S
    if (
        isinstance(timeout_s, bool)
        or not isinstance(timeout_s, Real)
        or not 0 <= timeout_s <= 1e9  # false for NaN
    ):
        raise InvalidArgumentError(
            f"timeout_s must be a number of seconds from 0 to 1e9, got {timeout_s!r} [SMB-E278]"
        )
    return float(timeout_s)


def _count_names(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {shown}{more}"


@contextmanager
def embedded_server() -> Iterator[Server]:
    """A server in this process, for a worker that trains alone."""
    with Server() as server:
        yield server


@atexit.register
def _detach_all() -> None:
    # Before the interpreter goes: others then see a worker that left, not one that died.
    for segment in list(_live_segments):
        segment.detach()
