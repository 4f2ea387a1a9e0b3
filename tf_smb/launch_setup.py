"""What `tf-smb run` decides before it starts anything: the workers' environment, cores, logs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tf_smb import settings
from tf_smb.box import new_job_id
from tf_smb.errors import InvalidArgumentError
from tf_smb.process_guard import LAUNCH_ID_VARIABLE
from tf_smb.resources import CorePlan, CoreShare, hand_out_cores, hand_out_gpus


@dataclass(frozen=True)
class LaunchOptions:
    """What to run, and how.

    Attributes:
        command: Program and arguments; the same for all workers.
        num_workers: How many workers.
        cores_per_worker: See `hand_out_cores`.
        gpus: See `hand_out_gpus`.
        output: Whose output is shown: "chief" (worker 0's) or "all".
        log_dir: Where the other workers' output goes; None: a new folder for temporary files.
        on_failure: "auto" (an exit code ends the job, a killed worker does not), "stop" (both
            do) or "continue" (neither does).
        grace_s: Seconds that workers get to end after a signal before they are killed.
    """

    command: Sequence[str]
    num_workers: int
    cores_per_worker: str = "auto"
    gpus: str = "auto"
    output: str = "chief"
    log_dir: str | None = None
    on_failure: str = "auto"
    grace_s: float = 10.0


def check_command(command: Sequence[str]) -> None:
    """Raises InvalidArgumentError unless the command can be executed."""
    if not command or not command[0]:
        raise InvalidArgumentError(
            "no command after --: give one, as in tf-smb run -n 2 -- python train.py [SMB-E315]"
        )
    program = command[0]
    if shutil.which(program):
        return
    if os.path.isfile(program):
        raise InvalidArgumentError(
            f"{program!r} is not an executable program: put what runs it before it, as in "
            f"tf-smb run -n 2 -- python {shlex.quote(program)} [SMB-E316]"
        )
    where = "" if os.sep in program else " on PATH"
    hint = f" (this Python is {sys.executable})" if program.startswith("python") else ""
    raise InvalidArgumentError(f"there is no program {program!r}{where}{hint} [SMB-E317]")


@dataclass
class LaunchSetup:
    """Everything that the workers are started with."""

    options: LaunchOptions
    plain: bool
    launch_id: str
    job_id: str
    cores: CorePlan
    gpus: list[dict[str, str]]
    log_dir: Path | None
    environment: dict[str, str]

    @classmethod
    def make(
        cls, options: LaunchOptions, environment: Mapping[str, str], launch_id: str, plain: bool
    ) -> LaunchSetup:
        """Decides all of it, and makes the folder for log files.

        Args:
            options: What to run, and how.
            environment: Where the workers' environment starts from.
            launch_id: What the workers' processes are known by.
            plain: One process without a box, as the first of `options.num_workers`.

        Raises:
            InvalidArgumentError: The options cannot be met.
        """
        job_id = settings.resolve("job_id", environment=environment) or new_job_id()
        cores = hand_out_cores(options.num_workers, options.cores_per_worker)
        gpus = hand_out_gpus(options.num_workers, options.gpus, environment)
        started = 1 if plain else options.num_workers
        return cls(
            options=options,
            plain=plain,
            launch_id=launch_id,
            job_id=job_id,
            cores=cores,
            gpus=gpus,
            log_dir=_make_log_dir(options.log_dir, job_id) if started > 1 else None,
            environment=_common_environment(environment, launch_id, job_id, started, plain),
        )

    @property
    def num_workers(self) -> int:
        """How many processes are started."""
        return 1 if self.plain else self.options.num_workers

    def worker_environment(self, worker_index: int) -> dict[str, str]:
        """Returns the whole environment of a worker."""
        environment = {**self.environment, **self.gpus[worker_index]}
        if not self.plain:
            environment["TF_SMB_WORKER_INDEX"] = str(worker_index)
        threads = self.cores.shares[worker_index].threads
        for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
            if threads:
                environment.setdefault(name, str(threads))
        return environment

    def first_line(self) -> str:
        """Returns what is said before the workers start."""
        share = self.cores.shares[0]
        if self.plain:
            return f"one plain process{_on_cores(share)}, without tf_smb"
        line = count(self.num_workers, "worker")
        if self.cores.oversubscribed:
            # True of workers that are not pinned, too.
            line += f" share {count(self.cores.usable_cores, 'core')}, and slow each other down"
        elif share.cores:
            line += _on_cores(share) + (" each" if self.num_workers > 1 else "")
        if self.log_dir is not None:
            others = "1" if self.num_workers == 2 else f"1 to {self.num_workers - 1}"
            plural = "" if self.num_workers == 2 else "s"
            line += f"; output of worker{plural} {others}: {self.log_dir}"
        return line


def _on_cores(share: CoreShare) -> str:
    return f" on {count(len(share.cores), 'core')}" if share.cores else ""


def count(number: int, noun: str) -> str:
    """Returns "1 worker", "2 workers"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _common_environment(
    environment: Mapping[str, str], launch_id: str, job_id: str, num_workers: int, plain: bool
) -> dict[str, str]:
    common = {"PYTHONUNBUFFERED": "1", **environment, LAUNCH_ID_VARIABLE: launch_id}
    # Of an outer launch, or the user's for a worker that is started by hand.
    for name in ("SERVER", "JOB_ID", "NUM_WORKERS", "WORKER_INDEX", "PLAIN"):
        common.pop(f"TF_SMB_{name}", None)
    if plain:
        common["TF_SMB_PLAIN"] = "1"
    else:
        common["TF_SMB_JOB_ID"] = job_id
        common["TF_SMB_NUM_WORKERS"] = str(num_workers)
    return common


def _make_log_dir(log_dir: str | None, job_id: str) -> Path:
    try:
        if log_dir is None:
            name = re.sub(r"[^\w.-]", "_", job_id)
            return Path(tempfile.mkdtemp(prefix=f"tf_smb-{name}-"))
        path = Path(log_dir).absolute()
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot write log files in {log_dir or tempfile.gettempdir()!r}: {error.strerror} "
            "[SMB-E318]"
        ) from None
