"""`tf-smb run`: starts the workers of a job on this machine, and leaves nothing behind.

One thread and one loop: signals and ended children wake it, everything else has a deadline.
A worker's first process leads a session of its own; a worker is over when that process has
ended and nothing of its session is left. See `tf_smb.process_guard` for what happens when the
launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from tf_smb.box import Server
from tf_smb.launch_setup import LaunchOptions, LaunchSetup, check_command, count
from tf_smb.process_guard import (
    HELD_SIGNALS,
    KILLED_TIMEOUT_S,
    ProcessGuard,
    end_processes,
    find_processes,
    live_sessions,
    send_signal,
)
from tf_smb.worker_output import WorkerOutputs, last_lines, print_line

# The exit code of a process that a signal ended is, in a shell, this plus the signal.
_SIGNAL_EXIT = 128
_SIGNAL_NUMBERS = range(1, 65)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After the first failure: time for the others to fail of the same cause and say so.
_SETTLE_S = 0.5
# What is left of the job after its last worker gets this long between SIGTERM and SIGKILL.
_LEFTOVER_GRACE_S = 2.0
# Between SIGTERM and SIGKILL for workers that did not answer Ctrl-C; at most the grace.
_TERM_GRACE_S = 5.0
_POLL_S = 0.1
_TAIL_LINES = 20
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class LaunchResult:
    """How a job ended.

    Attributes:
        exit_code: 0; the first failure's; or 128 + N when signal N ended a worker or the job.
        wall_s: Seconds from the start of the first worker to the end of the last.
    """

    exit_code: int
    wall_s: float


def launch(
    options: LaunchOptions,
    extra_environment: Mapping[str, str] | None = None,
    plain: bool = False,
    stdout: TextIO | None = None,
) -> LaunchResult:
    """Runs a job to its end.

    Args:
        options: What to run, and how.
        extra_environment: More environment variables for the workers.
        plain: Run the command once, by itself and without a box (`TF_SMB_PLAIN=1`), on the
            cores and the GPU that worker 0 would get.
        stdout: Where shown output goes; None: standard output.

    Raises:
        InvalidArgumentError: The options cannot be met; nothing was started.
    """
    check_command(options.command)
    stdout = stdout or sys.stdout
    launch_id = secrets.token_hex(8)
    setup = LaunchSetup.make(options, {**os.environ, **(extra_environment or {})}, launch_id, plain)
    with _Signals() as signals, ProcessGuard(launch_id) as guard:
        with contextlib.nullcontext() if plain else Server() as server:
            if server is not None:
                setup.environment["TF_SMB_SERVER"] = server.address
            _say(setup.first_line())
            outputs = WorkerOutputs(setup.log_dir, options.output == "all", stdout)
            return _Job(setup, signals, guard, server, outputs).run()


def _say(text: str) -> None:
    print_line(f"tf-smb: {text}", sys.stderr)


# --- Signals ---


class _Signals:
    """Collects the signals that arrive, for as long as the context lasts.

    They are read from the pipe that the interpreter's C handler writes their numbers to, whichever
    thread the kernel gives a signal to; no Python code runs at the arrival.
    """

    def __enter__(self) -> _Signals:
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old = {}
        for number in (*HELD_SIGNALS, signal.SIGCHLD):
            # Under nohup a hangup is not for us. A background job that ignores Ctrl-C is no
            # such wish: shells set that for every one.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._old[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, timeout_s: float | None) -> list[int]:
        """Waits for a signal or the timeout; returns those that came, SIGCHLD left out."""
        select.select([self._read_fd], [], [], timeout_s)
        arrived = b""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._read_fd, 4096):
                arrived += piece
        return [number for number in arrived if number != signal.SIGCHLD]


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Holds signals back: a process started meanwhile begins with them held back."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


# --- The job ---


@dataclass
class _Worker:
    """A worker that was started."""

    index: int
    process: subprocess.Popen[bytes]
    # Until the first process has ended.
    running: bool = True
    # Until nothing of the session is left either.
    alive: bool = True
    # When what the first process left in the session is killed.
    kill_at_s: float | None = None

    @property
    def session(self) -> int:
        return self.process.pid


@dataclass(frozen=True)
class _Failure:
    worker: _Worker
    exit_code: int

    @property
    def signal(self) -> int | None:
        """The signal that killed it: directly, or what its shell ran last."""
        number = self.exit_code - _SIGNAL_EXIT
        return number if number in _SIGNAL_NUMBERS else None


@dataclass
class _Job:
    """A job while it runs."""

    setup: LaunchSetup
    signals: _Signals
    guard: ProcessGuard
    server: Server | None
    outputs: WorkerOutputs
    workers: list[_Worker] = field(default_factory=list)
    failures: list[_Failure] = field(default_factory=list)
    # The signal to the launcher that ended the job, if one did.
    stopped_by: int | None = None
    # What the workers get, and when: signals, at last None: they are given up.
    escalation: list[tuple[float, int | None]] = field(default_factory=list)
    # Whether they were told to end: how they do it then is no failure.
    told_to_end: bool = False
    failed_to_start: bool = False

    def run(self) -> LaunchResult:
        """Starts the workers and waits for their end."""
        _become_subreaper()
        started_s = time.monotonic()
        self._start_workers()
        while any(worker.alive for worker in self.workers):
            for number in self.signals.wait(self._timeout_s()):
                self._pass_on(number)
            self._reap()
            self._end_sessions()
            self._escalate()
            self.outputs.show_new()
        wall_s = time.monotonic() - started_s
        self._end_leftovers()
        self.outputs.show_rest()
        self._show_failed_log()
        return LaunchResult(self._exit_code(), wall_s)

    def _exit_code(self) -> int:
        if self.failed_to_start:
            return 1
        if self.stopped_by is not None:
            return _SIGNAL_EXIT + self.stopped_by
        return self.failures[0].exit_code if self.failures else 0

    def _timeout_s(self) -> float | None:
        waits = [_POLL_S] if self.outputs.following else []
        if any(worker.alive and not worker.running for worker in self.workers):
            waits.append(_POLL_S)
        if self.escalation:
            waits.append(max(0.0, self.escalation[0][0] - time.monotonic()))
        return min(waits, default=None)

    # --- Start ---

    def _start_workers(self) -> None:
        for index in range(self.setup.num_workers):
            try:
                self._start_worker(index)
            except OSError as error:
                _say(f"cannot start worker {index}: {error.strerror} [SMB-E319]")
                self.failed_to_start = True
                self._plan_end((0.0, signal.SIGTERM), (self._grace_s, signal.SIGKILL))
                return

    def _start_worker(self, index: int) -> None:
        with self.outputs.open(index) as (stdout, stderr), _signals_held():
            process = subprocess.Popen(
                self.guard.start_command(
                    self.setup.options.command, self.setup.cores.shares[index].cores
                ),
                stdin=None if index == 0 else subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.setup.worker_environment(index),
                start_new_session=True,
                pass_fds=[self.guard.pipe],
            )
            self.workers.append(_Worker(index, process))

    # --- Output ---

    def _show_failed_log(self) -> None:
        """Shows the end of the first failure's log, unless it has been on the screen."""
        if not self.failures or self.outputs.following or self.stopped_by is not None:
            return
        failure = self.failures[0]
        if any(other.worker.index == 0 for other in self.failures):
            return
        log_path = self.outputs.log_path(failure.worker.index)
        if failure.signal in (signal.SIGKILL, signal.SIGTERM) or log_path is None:
            return
        lines = last_lines(log_path, _TAIL_LINES)
        _say(f"the last lines of {log_path}:" if lines else f"nothing was written to {log_path}")
        for line in lines:
            print_line(f"    {line}", sys.stderr)

    # --- Signals ---

    @property
    def _grace_s(self) -> float:
        return self.setup.options.grace_s

    def _pass_on(self, number: int) -> None:
        """Gives the workers a signal that came to the launcher."""
        if number not in _STOP_SIGNALS:
            self._signal_groups(number)
        elif self.stopped_by is not None and number == signal.SIGINT:
            self._plan_end((0.0, signal.SIGKILL))
        else:
            self._stop(number)

    def _stop(self, number: int) -> None:
        first = self.stopped_by is None
        if first:
            self.stopped_by = number
            running = count(sum(worker.running for worker in self.workers), "worker")
            again = " (once more kills them)" if number == signal.SIGINT else ""
            _say(f"{_signal_name(number)}: stopping {running}{again}")
        self._signal_groups(number)
        self.told_to_end = True
        if first and number == signal.SIGTERM:
            self._plan_end((self._grace_s, signal.SIGKILL))
        elif first:
            # Programs may ignore these, or not see them inside a long native call.
            self._plan_end(
                (self._grace_s, signal.SIGTERM),
                (self._grace_s + min(self._grace_s, _TERM_GRACE_S), signal.SIGKILL),
            )

    def _signal_groups(self, number: int) -> None:
        """Signals each worker's process group, as a terminal does with its foreground job."""
        for worker in self.workers:
            if worker.alive:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.session, number)

    def _plan_end(self, *plan: tuple[float, int]) -> None:
        """Sets in how many seconds from now the workers get which signals."""
        now_s = time.monotonic()
        give_up = (now_s + plan[-1][0] + KILLED_TIMEOUT_S, None)
        self.escalation = [*((now_s + delay_s, number) for delay_s, number in plan), give_up]

    def _escalate(self) -> None:
        if not self.escalation or time.monotonic() < self.escalation[0][0]:
            return
        _, number = self.escalation.pop(0)
        alive = [worker for worker in self.workers if worker.alive]
        if number is None:
            _give_up(alive)
            return
        if self.told_to_end and alive:
            _say(f"{_worker_names(alive)} still running: sending {_signal_name(number)}")
        self.told_to_end = True
        send_signal(find_processes({worker.session for worker in alive}), number)

    # --- Ends ---

    def _reap(self) -> None:
        """Takes note of every child that has ended; as a subreaper, also of orphans."""
        by_process = {worker.process.pid: worker for worker in self.workers if worker.running}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if ended.si_pid in by_process:
                self._on_end(by_process.pop(ended.si_pid))
            elif ended.si_pid == self.guard.process_id:
                self.guard.reap()
            else:
                os.waitpid(ended.si_pid, 0)

    def _on_end(self, worker: _Worker) -> None:
        worker.running = False
        exit_code = worker.process.wait()
        if self.server is not None:
            self.server.mark_worker_absent(worker.index)
        if exit_code and not self.told_to_end:
            self._on_failure(
                _Failure(worker, exit_code if exit_code > 0 else _SIGNAL_EXIT - exit_code)
            )

    def _on_failure(self, failure: _Failure) -> None:
        self.failures.append(failure)
        policy = self.setup.options.on_failure
        ends_job = policy == "stop" or (policy == "auto" and failure.signal is None)
        others = sum(worker.running for worker in self.workers)
        already_ending = bool(self.escalation)
        if ends_job and not already_ending:
            self._plan_end((_SETTLE_S, signal.SIGTERM), (_SETTLE_S + self._grace_s, signal.SIGKILL))
        then = ""
        if others and not already_ending:
            whom = "the other worker" if others == 1 else f"the other {others} workers"
            then = f": stopping {whom}" if ends_job else f": {whom} go{'es' * (others == 1)} on"
        self.outputs.show_new()
        _say(f"worker {failure.worker.index} {_how_it_ended(failure)}{then}")

    def _end_sessions(self) -> None:
        """Ends what is left of the sessions of workers whose first process has ended."""
        ended = [worker for worker in self.workers if worker.alive and not worker.running]
        if not ended:
            return
        live = live_sessions({worker.session for worker in ended})
        now_s = time.monotonic()
        for worker in ended:
            if worker.session not in live:
                worker.alive = False
                self.guard.forget(worker.session)
            elif self.escalation:
                continue  # ended with the rest of the job
            elif worker.kill_at_s is None:
                send_signal(find_processes({worker.session}), signal.SIGTERM)
                worker.kill_at_s = now_s + self._grace_s
            elif now_s >= worker.kill_at_s + KILLED_TIMEOUT_S:
                _give_up([worker])
            elif now_s >= worker.kill_at_s:
                send_signal(find_processes({worker.session}), signal.SIGKILL)

    def _end_leftovers(self) -> None:
        """Ends what workers moved into sessions of its own, and collects it."""
        if left := end_processes(set(), self.setup.launch_id, _LEFTOVER_GRACE_S):
            _say(f"could not kill: {', '.join(map(str, left))}")
        self._reap()


def _give_up(workers: Sequence[_Worker]) -> None:
    if workers:
        _say(f"{_worker_names(workers)} cannot be killed: going without")
    for worker in workers:
        worker.alive = False


def _how_it_ended(failure: _Failure) -> str:
    if failure.signal is None:
        return f"exited with code {failure.exit_code}"
    memory = " (out of memory?)" if failure.signal == signal.SIGKILL else ""
    return f"was killed by {_signal_name(failure.signal)}{memory}"


def _worker_names(workers: Sequence[_Worker]) -> str:
    numbers = [str(worker.index) for worker in workers]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"worker{'s' if len(numbers) > 1 else ''} {shown}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time signal


def _become_subreaper() -> None:
    """Makes orphans of workers our children: in a container, nobody else may reap them."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
