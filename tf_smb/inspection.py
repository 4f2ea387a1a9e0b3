"""`tf-smb ls`, `stat` and `rm`: the segments of this user's servers on this host."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tf_smb.box import Client
from tf_smb.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from tf_smb.serve import DEFAULT_DIRECTORY

_MB = 1e6


@dataclass(frozen=True)
class ListedSegment:
    """A segment as `tf-smb ls` shows it.

    Attributes:
        name: Its name.
        server: Address of its server; of one that crashed, where it would be taken over.
        job_id: The job that created it; None without a server.
        center_bytes: Of the center; None without a server.
        live_members: Its live workers; None without a server.
        path: The file that a crashed server left; None with a server.
    """

    name: str
    server: str
    job_id: str | None = None
    center_bytes: int | None = None
    live_members: int | None = None
    path: str | None = None


def find_servers() -> list[str]:
    """Returns the addresses of this user's servers on this host, sorted."""
    prefix = f"@tf_smb/{os.geteuid()}/"
    names = set()
    for line in Path("/proc/net/unix").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.startswith(prefix):
            names.add(path.removeprefix(prefix))
    return sorted(f"shm://{name}" for name in names)


def list_segments(server: str | None = None) -> list[ListedSegment]:
    """Returns the segments of one server, or of all of this user's, sorted.

    Those that a crashed server left in its folder are among them.

    Raises:
        UnavailableError: The server that is named is not there.
    """
    segments = []
    servers = find_servers() if server is None else [server]
    for address in servers:
        try:
            found = Client(address, timeout_s=0.5).segments()
        except UnavailableError:
            if server is not None:
                raise
            continue  # it ended meanwhile
        segments += [
            ListedSegment(
                summary["name"],
                address,
                summary["job_id"],
                summary["center_bytes"],
                summary["live_members"],
            )
            for summary in found
        ]
    if server is None:
        segments += _left_behind(servers)
    return sorted(segments, key=lambda segment: (segment.server, segment.name))


def _left_behind(servers: Sequence[str], directory: str = DEFAULT_DIRECTORY) -> Iterator[Any]:
    pattern = re.compile(rf"tf_smb\.{os.geteuid()}\.([^.]+)\.([^.]+)")
    for path in Path(directory).glob(f"tf_smb.{os.geteuid()}.*"):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        server, name = (urllib.parse.unquote(part) for part in match.groups())
        if f"shm://{server}" not in servers:
            yield ListedSegment(name, f"shm://{server}", path=str(path))


def find_segment(name: str, server: str | None) -> ListedSegment:
    """Returns the one segment of that name.

    Raises:
        NotFoundError: There is none; the message lists those there are.
        InvalidArgumentError: Several servers have one.
    """
    segments = list_segments(server)
    found = [segment for segment in segments if segment.name == name]
    if not found:
        names = ", ".join(f"'{segment.name}'" for segment in segments[:20])
        raise NotFoundError(
            f"there is no segment '{name}' at {server or 'any server of this user'}; there are: "
            f"{names or 'none'} [SMB-E325]"
        )
    if len(found) > 1:
        servers = ", ".join(segment.server for segment in found)
        raise InvalidArgumentError(
            f"several servers have a segment '{name}': say which one with --server: {servers} "
            "[SMB-E326]"
        )
    return found[0]


def print_list(server: str | None, as_json: bool) -> None:
    """Prints the segments, a line each."""
    segments = list_segments(server)
    if as_json:
        print(json.dumps([vars(segment) for segment in segments]))
        return
    rows = [("SEGMENT", "SERVER", "JOB", "MB", "LIVE")]
    for segment in segments:
        if segment.path is not None:
            rows.append((segment.name, segment.server, "-", "-", "no server"))
        else:
            size = f"{(segment.center_bytes or 0) / _MB:.1f}"
            rows.append(
                (
                    segment.name,
                    segment.server,
                    segment.job_id or "",
                    size,
                    f"{segment.live_members}",
                )
            )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def print_status(name: str, server: str | None, as_json: bool) -> None:
    """Prints what there is to know about a segment.

    Raises:
        NotFoundError: No such segment.
        FailedPreconditionError: Its server crashed.
    """
    found = find_segment(name, server)
    if found.path is not None:
        raise FailedPreconditionError(
            f"segment '{name}' was left by the server {found.server}, which is gone: start it "
            f"again with 'tf-smb serve --name {found.server.removeprefix('shm://')}', or remove "
            f"the segment with 'tf-smb rm {name}' [SMB-E327]"
        )
    with Client(found.server).attach(name) as segment:
        status = {"server": found.server, **segment.status()}
    if as_json:
        print(json.dumps(status))
        return
    for key in ("name", "server", "job_id", "version", "seeded", "rounds_closed", "lock_holder"):
        value = status[key]
        print(f"{key + ':':15}{'none' if value is None else value}")
    print(f"{'center:':15}{status['center_bytes'] / _MB:.1f} MB in {status['num_chunks']} chunks")
    print(
        f"{'workers:':15}{status['num_live']} live of {status['num_workers']} meant, "
        f"lease {status['lease_s']:g} s"
    )
    for member in status["members"]:
        training = ", training" if member["training"] else ""
        print(
            f"  worker {member['worker_index']}: {member['state']}{training}, process "
            f"{member['process_id']}, {member['steps']} steps, {member['exchanges']} exchanges"
        )
    print(f"{'variables:':15}{len(status['variables'])}")
    for variable in status["variables"]:
        print(f"  {variable['name']}: {variable['dtype']}{variable['shape']}")


def remove(name: str, server: str | None, force: bool) -> None:
    """Frees a segment; without a server, removes the file that it left.

    Raises:
        NotFoundError: No such segment.
        FailedPreconditionError: It has live workers, and `force` was not said.
    """
    found = find_segment(name, server)
    if found.path is not None:
        os.unlink(found.path)
        return
    if found.live_members and not force:
        raise FailedPreconditionError(
            f"segment '{name}' has {found.live_members} live workers; --force removes it all the "
            "same: they go on among themselves until they leave [SMB-E328]"
        )
    Client(found.server).free(name)
