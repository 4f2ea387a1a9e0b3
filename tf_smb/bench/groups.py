"""Groups of child processes that are asked and answer in lines of JSON, and always end."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tf_smb import process_guard
from tf_smb.bench.board import create_board_fd
from tf_smb.bench.case import Setup, Turn

# Between asking a process to end and killing it.
_GRACE_S = 3.0
# How long to wait for one process's answer before looking at the others'.
_LOOK_S = 0.2


class GroupError(Exception):
    """A process died, did not answer in time, or answered nonsense; the text says which."""


class _Child:
    """One process; its standard error goes to a file, for the case that it fails."""

    def __init__(self, name: str, command: Sequence[str], pass_fds: Sequence[int] = ()) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=pass_fds,
            start_new_session=True,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            raise GroupError(f"{self.name} ended: {self._last_words()}") from None

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Returns the next answer; None if there is none yet."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not line:
            raise GroupError(f"{self.name} ended: {self._last_words()}")
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            raise GroupError(f"{self.name} answered {line.strip()[:200]!r}") from None

    def _last_words(self) -> str:
        self.process.wait(timeout=_GRACE_S)
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip(" -\t")]
        return said[-1][:300] if said else f"exit code {self.process.returncode}"

    def end_input(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except OSError:
            pass  # it is gone already

    def end(self) -> None:
        process_guard.end_processes([self.process.pid], "", _GRACE_S)
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()


class Group:
    """Processes that work on one thing together.

    A context: when it ends, for whatever reason, no process of the group is left.
    """

    def __init__(self, children: list[_Child], stack: ExitStack | None = None) -> None:
        self._children = children
        self._stack = stack or ExitStack()

    def call(self, line: str, timeout_s: float) -> list[dict[str, Any]]:
        """Sends a line to all processes and returns each one's answer.

        Raises:
            GroupError: One of them failed; the group is of no use any more.
        """
        deadline = time.monotonic() + timeout_s
        for child in self._children:
            child.send(line)
        answers: dict[_Child, dict[str, Any]] = {}
        while len(answers) < len(self._children):
            # All of them in turn: whoever waits for one that died does not answer.
            for child in self._children:
                if child in answers:
                    continue
                answer = child.receive(min(_LOOK_S, timeout_s))
                if answer is not None:
                    answers[child] = answer
                elif time.monotonic() > deadline:
                    raise GroupError(f"{child.name} did not answer in {timeout_s:g} s")
        return [answers[child] for child in self._children]

    def take(self, turn: Turn, timeout_s: float) -> list[dict[str, Any]]:
        """Has all workers take a turn."""
        return self.call(json.dumps(dataclasses.asdict(turn)), timeout_s)

    def close(self) -> None:
        """Ends all processes: asked first, killed if they do not listen."""
        for child in self._children:
            child.end_input()
        deadline = time.monotonic() + _GRACE_S
        for child in self._children:
            try:
                child.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        for child in self._children:
            child.end()
        self._children = []
        self._stack.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def start_command(name: str, command: Sequence[str]) -> Group:
    """Starts one command as a group: its first process speaks for all."""
    return Group([_Child(name, command)])


def start_workers(
    role: str, count: int, cores: Sequence[Sequence[int]], server: str, job_id: str
) -> Group:
    """Starts `count` workers of this package, each on its own list of cores."""
    stack = ExitStack()
    board_fd = create_board_fd()
    stack.callback(os.close, board_fd)
    addresses = _free_addresses(count) if role == "all_reduce" else []
    children: list[_Child] = []
    group = Group(children, stack)
    try:
        for index in range(count):
            setup = Setup(
                role, index, count, list(cores[index]), board_fd, server, job_id, addresses
            )
            children.append(
                _Child(
                    f"worker {index} ({role})",
                    [
                        sys.executable,
                        "-m",
                        "tf_smb.bench.worker",
                        json.dumps(dataclasses.asdict(setup)),
                    ],
                    pass_fds=[board_fd],
                )
            )
    except BaseException:
        group.close()
        raise
    return group


def _free_addresses(count: int) -> list[str]:
    """Returns loopback addresses that nobody listens on now."""
    with ExitStack() as stack:
        addresses = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        return addresses
