"""`tf-smb serve`: a server of its own, for processes that are not parent and child."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tf_smb.box import Server

DEFAULT_DIRECTORY = "/dev/shm"


@dataclass(frozen=True)
class ServeOptions:
    """What `tf-smb serve` is told.

    Attributes:
        address: Where to listen: `shm://NAME`.
        lease_s: Seconds after which a silent worker is dropped.
        directory: Where segments are files. They outlive a server that crashes, and the next
            one of the same address takes them over; a clean end removes them.
    """

    address: str
    lease_s: float = 10.0
    directory: str = DEFAULT_DIRECTORY


def serve(options: ServeOptions) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; returns the exit code.

    Raises:
        AlreadyExistsError: A server of this user listens there already.
        InvalidArgumentError: Not an address.
    """
    with (
        _end_signals() as wait_for_end,
        Server(options.address, options.lease_s, options.directory) as server,
    ):
        for refused in server.refused_files:
            print(f"tf-smb serve: left alone: {refused}", file=sys.stderr)
        taken_over = ", ".join(repr(segment["name"]) for segment in server.segments())
        print(
            f"tf_smb: serving {server.address} (process {os.getpid()}; SIGTERM or Ctrl-C ends it)"
            + (f"; took over {taken_over}" if taken_over else ""),
            flush=True,
        )
        print(f"tf_smb: {wait_for_end().name}: the server ends", flush=True)
    return 0


@contextmanager
def _end_signals() -> Iterator[Callable[[], signal.Signals]]:
    """Within it SIGTERM, SIGINT and SIGHUP only end the wait of the function it gives."""
    # By a socket: a signal may come to any thread, and at any moment.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    try:
        yield lambda: signal.Signals(receiver.recv(1)[0])
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        receiver.close()
        sender.close()
