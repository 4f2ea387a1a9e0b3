"""Ends the processes of a `tf-smb run` that would outlive it, whatever kills it.

The launcher runs this file as a script, with nothing but the standard library, twice over:

* `guard`: a process that blocks on a pipe from the launcher. At the pipe's end without a
  goodbye (the launcher was killed) it ends the workers. It is in its own session, holds no
  terminal and no output, and ends with the launcher.
* `start`: what a worker is until it becomes its command. It tells the guard its process id
  over the same pipe before it executes the command, which closes its end: the guard sees no
  end of the pipe, and so cannot finish, while a worker is on its way that it does not know.

A worker leads a session, so what it starts can be found by session id. What went on into
sessions of its own is found by the environment variable `TF_SMB_LAUNCH_ID`; a program that is
meant to outlive the job takes that variable out of its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from types import TracebackType

LAUNCH_ID_VARIABLE = "TF_SMB_LAUNCH_ID"
# Held back while a worker starts, so that none hits a Python that is not ready for it.
HELD_SIGNALS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
)
# Between SIGTERM and SIGKILL when the launcher is gone: nobody is there to wait for more.
_ORPHAN_GRACE_S = 3.0
# A killed process may hang in the kernel; after this long it is given up.
KILLED_TIMEOUT_S = 10.0
_POLL_S = 0.05


# --- Finding and ending processes ---


def find_processes(sessions: Collection[int], launch_id: str = "") -> list[int]:
    """Returns the processes, zombies left out, of these sessions or with this launch id."""
    marker = f"{LAUNCH_ID_VARIABLE}={launch_id}".encode() if launch_id else b""
    return [
        process_id
        for process_id, session in _processes()
        if session in sessions or (marker and marker in _environment(process_id))
    ]


def live_sessions(sessions: Collection[int]) -> set[int]:
    """Returns those sessions of which a process is left, zombies not counted."""
    return {session for _, session in _processes() if session in sessions}


def _processes() -> Iterator[tuple[int, int]]:
    """Yields process id and session id of each process but this one and zombies."""
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # After the name, which may hold spaces and brackets: state ppid pgrp session.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields and fields[0] not in (b"Z", b"X"):
            yield int(name), int(fields[3])


def _environment(process_id: int) -> list[bytes]:
    try:
        with open(f"/proc/{process_id}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []  # ended, or another user's


def send_signal(process_ids: Collection[int], signal_number: int) -> None:
    """Sends a signal to each process that is still there."""
    for process_id in process_ids:
        try:
            os.kill(process_id, signal_number)
            if signal_number == signal.SIGTERM:
                os.kill(process_id, signal.SIGCONT)  # a stopped process gets no SIGTERM
        except (ProcessLookupError, PermissionError):
            pass


def end_processes(sessions: Collection[int], launch_id: str, grace_s: float) -> list[int]:
    """Ends processes: SIGTERM, and SIGKILL for those still there after `grace_s`.

    Args:
        sessions: Those of which all processes end.
        launch_id: Processes with this launch id in their environment end too.
        grace_s: Seconds between the two signals.

    Returns:
        The processes that even SIGKILL did not end in time.
    """
    kill_at_s = time.monotonic() + grace_s
    asked: set[int] = set()
    while found := find_processes(sessions, launch_id):
        # A session that is empty once stays so; its number may be someone else's later.
        sessions = live_sessions(sessions)
        now_s = time.monotonic()
        if now_s > kill_at_s + KILLED_TIMEOUT_S:
            return found
        if now_s >= kill_at_s:
            send_signal(found, signal.SIGKILL)
        else:
            send_signal(set(found) - asked, signal.SIGTERM)
            asked.update(found)
        time.sleep(_POLL_S)
    return []


# --- The guard, seen from the launcher ---


class ProcessGuard:
    """The guard process of one launch, for as long as the context lasts.

    When the context ends with an exception, the guard ends the workers.

    Args:
        launch_id: What the workers have as `TF_SMB_LAUNCH_ID`.
    """

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id

    def __enter__(self) -> ProcessGuard:
        read_fd, self._pipe = os.pipe()
        try:
            # Executed anew, not just forked: no thread, lock or descriptor of ours is in it.
            self._process = subprocess.Popen(
                [*_this_script(), "guard"],
                stdin=read_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={},
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(read_fd)
        self._tell(f"launch {self._launch_id}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._tell("done")
        os.close(self._pipe)
        try:
            self._process.wait(timeout=_ORPHAN_GRACE_S + KILLED_TIMEOUT_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def process_id(self) -> int:
        """The guard's process id."""
        return self._process.pid

    @property
    def pipe(self) -> int:
        """The descriptor that a starting worker inherits, see `start_command`."""
        return self._pipe

    def start_command(self, command: Sequence[str], cores: Collection[int]) -> list[str]:
        """Returns the command line that tells the guard, pins itself and becomes `command`."""
        pinned = ",".join(str(core) for core in sorted(cores)) or "-"
        return [*_this_script(), "start", str(self._pipe), pinned, *command]

    def forget(self, session: int) -> None:
        """Says that nothing of a worker's session is left."""
        self._tell(f"ended {session}")

    def reap(self) -> None:
        """Collects the exit status of a guard that someone killed."""
        self._process.poll()

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, f"{line}\n".encode())  # short enough to be written whole
        except BrokenPipeError:
            pass  # someone killed the guard


def _this_script() -> list[str]:
    # Isolated and without site-packages: starts in some 10 ms, and nobody's code is in it.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__)]


# --- The two scripts ---


def _guard() -> None:
    """Waits for the end of the pipe; without a goodbye, ends what was announced."""
    for signal_number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, signal.SIG_IGN)  # it ends with the launcher, not before
    _set_process_name("tf-smb-guard")
    sessions: set[int] = set()
    launch_id = ""
    for line in sys.stdin.buffer:
        word, _, value = line.decode().strip().partition(" ")
        if word == "launch":
            launch_id = value
        elif word == "worker":
            sessions.add(int(value))
        elif word == "ended":
            sessions.discard(int(value))
        elif word == "done":
            return
    end_processes(sessions, launch_id, _ORPHAN_GRACE_S)


def _set_process_name(name: str) -> None:
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass


def _start(pipe: int, pinned: str, command: list[str]) -> None:
    """Tells the guard, pins this process to its cores, and becomes the command."""
    for signal_number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signal_number, signal.SIG_DFL)  # what Python has changed
    try:
        os.write(pipe, f"worker {os.getpid()}\n".encode())
    except BrokenPipeError:
        pass
    os.set_inheritable(pipe, False)
    if pinned != "-":
        os.sched_setaffinity(0, [int(core) for core in pinned.split(",")])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(
            f"tf-smb: cannot run {command[0]!r}: {error.strerror} [SMB-E320]",
            file=sys.stderr,
            flush=True,
        )
        os._exit(127)


if __name__ == "__main__":
    if sys.argv[1] == "guard":
        _guard()
    else:
        _start(int(sys.argv[2]), sys.argv[3], sys.argv[4:])
