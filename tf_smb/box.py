"""The Soft Memory Box from Python, on numpy arrays, without TensorFlow.

`Server` lends memory as named segments, `Client` reaches them, `Segment` is one of them: a
center that several workers exchange their weights with.
"""

from __future__ import annotations

import atexit
import operator
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from tf_smb import _smb, settings
from tf_smb.errors import DeadlineExceededError, InvalidArgumentError
from tf_smb.rules import ExchangeRule, check_rule

# How long a request to a server may take.
REQUEST_TIMEOUT_S = 10.0
# How long a client waits for a server to appear: launchers start it before the workers.
CONNECT_TIMEOUT_S = 3.0
# Reading or writing a whole center: bounded by a stopped process that holds a chunk.
TRANSFER_TIMEOUT_S = 60.0
# After this long, a wait says whom it waits for.
_QUIET_S = 3.0
# Between two looks at a wait's condition and at the keyboard.
_SLICE_S = 0.2

Variables = Sequence[tuple[str, Sequence[int]]]
Announce = Callable[[str], None]

_live_segments: weakref.WeakSet[Segment] = weakref.WeakSet()


def new_job_id() -> str:
    """Returns a job id that no other job has."""
    return "job-" + secrets.token_hex(6)


@dataclass(frozen=True)
class Member:
    """A worker of a segment, as the control block has it.

    Attributes:
        worker_index: Its number.
        state: "live", "left" (said goodbye) or "dead" (process gone or lease lapsed).
        process_id: In its own PID namespace.
        incarnation: Counts joins of the segment: tells a restarted worker from its former self.
        steps: Local steps, as of its last exchange.
        exchanges: Exchanges since it joined.
        training: Whether it is inside `fit`.
    """

    worker_index: int
    state: str
    process_id: int
    incarnation: int
    steps: int
    exchanges: int
    training: bool


class Server:
    """Lends memory as named segments, from this process, until it is closed.

    Args:
        address: Where to listen: `shm://NAME`. None: a random name.
        lease_s: Seconds after which a worker that gives no sign of life is dropped.

    Raises:
        AlreadyExistsError: A server of this user listens there already.
        InvalidArgumentError: Not an address, or an unknown transport.

    Example:
        >>> with Server() as server:
        ...     client = Client(server.address)
    """

    def __init__(self, address: str | None = None, lease_s: float = 10.0) -> None:
        if isinstance(lease_s, bool) or not isinstance(lease_s, Real) or not 0.1 <= lease_s <= 3600:
            raise InvalidArgumentError(f"lease_s must be 0.1 to 3600 seconds, got {lease_s!r}")
        if address is None:
            address = f"shm://{os.getpid()}-{secrets.token_hex(6)}"
        self._server: _smb.Server | None = _smb.Server(address=address, lease_s=float(lease_s))

    @property
    def address(self) -> str:
        """The address that clients connect to."""
        return self._checked().address

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
            raise InvalidArgumentError("this server is closed")
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
        >>> segment = client.create("run", [("kernel", (3, 4)), ("bias", (4,))])
        >>> segment.start([np.zeros((3, 4), np.float32), np.zeros(4, np.float32)])
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
    ) -> Segment:
        """Creates a segment, or joins the one that another worker of this job created.

        Args:
            name: 1 to 200 bytes.
            variables: Name and shape of each float32 variable, in order.
            num_workers: How many workers the job starts. None: `TF_SMB_NUM_WORKERS`, else 1.
            on_existing: What to do if the segment is of another or a finished job: "fail",
                "resume" (join it) or "replace" (start anew).
            exchange_threads: 0 or None: one for each core of this process, at most 4.

        Raises:
            FailedPreconditionError: Another layout (the first difference is named), or another
                job's or a finished job's segment.
            InvalidArgumentError: A name, shape or number is out of range.
            ResourceExhaustedError: Not enough memory.
        """
        return Segment(
            self._client.open(
                name,
                self.job_id,
                settings.resolve("num_workers", num_workers),
                settings.resolve("on_existing", on_existing),
                _check_variables(variables),
                settings.resolve("exchange_threads", exchange_threads),
                REQUEST_TIMEOUT_S,
            )
        )

    def attach(self, name: str, exchange_threads: int | None = None) -> Segment:
        """Attaches an existing segment, whoever created it.

        Raises:
            NotFoundError: No such segment; the message lists those there are.
        """
        threads = settings.resolve("exchange_threads", exchange_threads)
        return Segment(self._client.attach(name, threads, REQUEST_TIMEOUT_S))

    def free(self, name: str) -> None:
        """Takes the name away; the memory goes when the last worker detaches.

        Raises:
            NotFoundError: No such segment.
        """
        self._client.free(name, REQUEST_TIMEOUT_S)

    def segments(self) -> list[dict[str, Any]]:
        """Returns name, job_id, center_bytes and live_members of each segment."""
        return self._client.list(REQUEST_TIMEOUT_S)


class Segment:
    """The center of one model, shared by the workers that train it.

    Made by `Client.create` and `Client.attach`. Arrays are C-contiguous float32, one for each
    variable, in the order and of the sizes of `variables`.

    A worker's life: `start` (joins; the first worker's weights become the center, the others'
    arrays are set to it), `exchange` every so many steps, `meet` at the end (everybody gets the
    same center), `detach`.
    """

    def __init__(self, segment: _smb.Segment) -> None:
        self._segment: _smb.Segment = segment
        self._rule: ExchangeRule | None = None
        self._detached = False
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
    def variables(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of each variable."""
        return self._segment.variables

    @property
    def handle(self) -> int:
        """The number that the TensorFlow op knows it by, in this process."""
        return self._segment.handle

    @property
    def version(self) -> int:
        """Exchanges and writes applied to the center, by all workers."""
        return self._segment.version

    @property
    def seeded(self) -> bool:
        """Whether the center holds weights yet."""
        return self._segment.seeded

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
        """Leaves, for good. The server keeps the segment until it is freed."""
        if not self._detached:
            self._detached = True
            self._segment.leave()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # --- Weights ---

    def set_rule(self, rule: ExchangeRule | None) -> None:
        """Sets how `exchange` moves the weights; None: the default rule."""
        self._rule = check_rule(rule)
        self._segment.set_rule(*self._rule.core_rule())

    def start(
        self,
        arrays: Sequence[np.ndarray],
        worker_index: int | None = None,
        rule: ExchangeRule | None = None,
        timeout_s: float | None = None,
        announce: Announce = print,
    ) -> bool:
        """Joins, waits for the others, and makes all workers start at one center.

        Waits until all `num_workers` have joined (those that died do not count), then the lowest
        live worker's arrays become the center and every other worker's arrays are overwritten
        with it. A worker that comes later takes the center as it is.

        Args:
            arrays: This worker's first weights; overwritten unless it seeds.
            worker_index: None: the lowest that no live worker has.
            rule: How `exchange` moves the weights; None: the default rule.
            timeout_s: How long to wait for the others; then it starts with those who are there.
                None: `TF_SMB_START_TIMEOUT_S`.
            announce: Called with a line of text while waiting.

        Returns:
            Whether this worker's arrays became the center.
        """
        arrays = list(arrays)
        self._segment.check_arrays(arrays, writeable=True)
        timeout_s = settings.resolve("start_timeout_s", timeout_s)
        self.set_rule(rule)
        if not self.joined:
            self.join(worker_index)
        self._wait_for_start(timeout_s, announce)
        seeded_it = self._seed_or_wait(arrays, announce)
        if not seeded_it:
            self.read_into(arrays)
        self._segment.rebase(arrays)
        return seeded_it

    def read(self) -> list[np.ndarray]:
        """Returns the center as new arrays."""
        arrays = [np.empty(shape, np.float32) for _, shape in self.variables]
        self.read_into(arrays)
        return arrays

    def read_into(self, arrays: Sequence[np.ndarray]) -> None:
        """Overwrites the arrays with the center."""
        self._segment.read(list(arrays), TRANSFER_TIMEOUT_S)

    def write(self, arrays: Sequence[np.ndarray]) -> None:
        """Overwrites the center with the arrays: what others put into it since is lost."""
        self._segment.write(list(arrays), TRANSFER_TIMEOUT_S)

    def rebase(self, arrays: Sequence[np.ndarray]) -> None:
        """Says that this worker goes on from `arrays`, for delta averaging to measure from."""
        self._segment.rebase(list(arrays))

    def exchange(self, arrays: Sequence[np.ndarray], steps: int = 0) -> str:
        """Moves the arrays and the center toward each other, in place, by the rule.

        Args:
            arrays: This worker's weights.
            steps: Its step count, for others to see.

        Returns:
            "moved"; "unchanged" (alone: the center is now a copy of the arrays); "skipped" (its
            lease had lapsed, and it is joining again).

        Raises:
            InvalidArgumentError: The arrays hold NaN or Inf, none of which reaches the center, or
                they do not fit.
            FailedPreconditionError: Not a member.
        """
        return self._segment.exchange(list(arrays), steps)

    def stats(self) -> Mapping[str, float]:
        """Returns exchanges, skipped_exchanges, skipped_chunks, times_fenced, exchange_s, ..."""
        return self._segment.stats()

    def raise_last_error(self) -> None:
        """Raises what made the last exchange fail, if it failed."""
        self._segment.raise_last_error()

    # --- Meeting ---

    def meet(
        self,
        arrays: Sequence[np.ndarray],
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

    def wait(self, timeout_s: float) -> None:
        """Returns at the next change among the members, or after `timeout_s`."""
        self._segment.wait_for_change(self._segment.changes, timeout_s)

    def _wait_for_start(self, timeout_s: float, announce: Announce) -> None:
        wait = _Wait(self._segment, timeout_s, announce)
        while not self.seeded:
            present = {member["worker_index"] for member in self._segment.members()}
            missing = [
                index
                for index in range(self.num_workers)
                if index not in present and not self._segment.is_absent(index)
            ]
            if not missing:
                return
            names = _count_names("worker", missing)
            if not wait.once(f"waiting for {names} of {self.num_workers} to start", None):
                announce(f"tf_smb: {names} did not come in {timeout_s:g} s: starting without")
                return

    def _seed_or_wait(self, arrays: Sequence[np.ndarray], announce: Announce) -> bool:
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
                    f"{TRANSFER_TIMEOUT_S:g} s"
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


def _check_variables(variables: Variables) -> list[tuple[str, list[int]]]:
    def check(variable: Any) -> tuple[str, list[int]]:
        try:
            name, shape = variable
            dimensions = [operator.index(dimension) for dimension in shape]
            fits = isinstance(name, str) and all(0 <= d < 2**48 for d in dimensions)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise InvalidArgumentError(
                "each variable must be a name and a shape of integers from 0 to 2**48 - 1, got "
                f"{variable!r}"
            )
        return name, dimensions

    return [check(variable) for variable in variables]


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
