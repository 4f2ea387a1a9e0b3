"""What `tf-smb run` hands out to its workers: cores and GPUs."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tf_smb.errors import InvalidArgumentError

_CGROUPS = Path("/sys/fs/cgroup")


# --- Cores ---


@dataclass(frozen=True)
class CoreShare:
    """A worker's cores.

    Attributes:
        cores: Numbers of the cores it is pinned to; empty: it is not pinned.
        threads: How many threads to compute with; 0: not set.
    """

    cores: tuple[int, ...]
    threads: int


@dataclass(frozen=True)
class CorePlan:
    """Each worker's cores, and whether there are fewer cores than they would need.

    Attributes:
        shares: One for each worker.
        usable_cores: How many cores there are to hand out.
        oversubscribed: Whether workers share cores.
    """

    shares: list[CoreShare]
    usable_cores: int
    oversubscribed: bool


def hand_out_cores(num_workers: int, cores_per_worker: str = "auto") -> CorePlan:
    """Returns which cores each worker is pinned to.

    With enough cores the sets are disjoint, of equal size, and made of neighbours: the two
    hardware threads of one physical core go to one worker. With too few, workers share cores
    in turn.

    Args:
        num_workers: Number of workers.
        cores_per_worker: A number, "auto" (an equal share) or "none" (nobody is pinned).

    Raises:
        InvalidArgumentError: More cores for one worker than there are.
    """
    cores = _neighbouring_cores()
    usable = min(len(cores), _cgroup_cores() or len(cores))
    if cores_per_worker == "none":
        return CorePlan([CoreShare((), 0)] * num_workers, usable, num_workers > usable)
    if cores_per_worker == "auto":
        size = max(1, len(cores) // num_workers)
        threads = max(1, usable // num_workers)
    else:
        size = threads = _checked_size(cores_per_worker, len(cores))
    shares = [
        CoreShare(
            tuple(cores[(worker * size + i) % len(cores)] for i in range(size)),
            min(size, threads),
        )
        for worker in range(num_workers)
    ]
    return CorePlan(shares, usable, num_workers * threads > usable)


def _checked_size(cores_per_worker: str, available: int) -> int:
    accepted = f"an integer from 1 to {available} (the cores of this process), auto or none"
    try:
        size = int(cores_per_worker)
    except ValueError:
        size = 0
    if not 1 <= size <= available:
        raise InvalidArgumentError(
            f"--cores-per-worker must be {accepted}, got {cores_per_worker!r} [SMB-E310]"
        )
    return size


def _neighbouring_cores() -> list[int]:
    """Returns this process's cores, by package and physical core."""

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package = int((topology / "physical_package_id").read_text())
            physical = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            return (0, core, core)
        return (package, physical, core)

    return sorted(os.sched_getaffinity(0), key=place)


def _cgroup_cores(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns how many cores' time the cgroups allow (a container's --cpus); None: no limit."""
    try:
        paths = [line[3:] for line in own.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return None
    folder = root / (paths[0].strip("/") if paths else "")
    limits = []
    for level in (folder, *folder.parents):
        try:
            quota, period = (level / "cpu.max").read_text().split()
            limits.append(math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):
            pass  # "max": no limit; or no such file
        if level == root:
            break
    return max(1, min(limits)) if limits else None


# --- GPUs ---


def hand_out_gpus(
    num_workers: int, choice: str, environment: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the environment variables that give each worker its GPU, if any.

    Args:
        num_workers: Number of workers.
        choice: "auto" (one for each worker, if the machine has any), "none", "share" (workers
            take turns on all GPUs) or the GPUs by name, one for each worker: "0,1".
        environment: `CUDA_VISIBLE_DEVICES` in it says which there are; else nvidia-smi does.

    Raises:
        InvalidArgumentError: More workers than GPUs, or no such GPU.
    """
    if choice == "none":
        return [{"CUDA_VISIBLE_DEVICES": "-1"}] * num_workers
    present = visible_gpus(environment)
    if choice in ("auto", "share"):
        gpus = present
        if not gpus:
            return [{}] * num_workers
    else:
        gpus = _named_gpus(choice, present)
    if len(gpus) < num_workers and choice != "share":
        raise InvalidArgumentError(_too_few_gpus(num_workers, gpus))
    given = [gpus[worker % len(gpus)] for worker in range(num_workers)]
    return [_gpu_environment(gpu, given.count(gpu) > 1, environment) for gpu in given]


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the names that CUDA_VISIBLE_DEVICES would have for the GPUs there are."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _nvidia_smi_gpus(environment)
    names = [name.strip() for name in visible.split(",")]
    for position, name in enumerate(names):
        if name in ("", "-1"):  # as CUDA has it, the list ends at the first that is none
            return names[:position]
    return names


def _nvidia_smi_gpus(environment: Mapping[str, str]) -> list[str]:
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_gpu_list(listing.stdout) if listing.returncode == 0 else []


def _parse_gpu_list(text: str) -> list[str]:
    """Returns GPUs by index; the slices of a GPU that is divided (MIG) by their UUID."""
    gpus: list[str] = []
    slices: dict[str, list[str]] = {}
    for line in text.splitlines():
        kind, _, rest = line.strip().partition(" ")
        if kind == "GPU" and not line.startswith(" "):
            gpus.append(rest.partition(":")[0])
        elif kind == "MIG" and gpus and "UUID: " in rest:
            slices.setdefault(gpus[-1], []).append(rest.partition("UUID: ")[2].strip(" )"))
    return [name for gpu in gpus for name in slices.get(gpu, [gpu])]


def _named_gpus(choice: str, present: list[str]) -> list[str]:
    names = [name.strip() for name in choice.split(",")]
    for name in names:
        if not (name.isdecimal() or name.startswith(("GPU-", "MIG-"))):
            raise InvalidArgumentError(
                f"--gpus must be auto, none, share or GPUs like 0,1, got {choice!r} [SMB-E312]"
            )
        if name.isdecimal() and name not in present:
            raise InvalidArgumentError(
                f"--gpus names GPU {name}, but the GPUs here are: {', '.join(present) or 'none'} "
                "[SMB-E313]"
            )
    return names


def _too_few_gpus(num_workers: int, gpus: list[str]) -> str:
    have = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''} ({', '.join(gpus)})"
    return (
        f"{num_workers} workers need a GPU each, but there {'are' if len(gpus) > 1 else 'is'} "
        f"{have}: start fewer workers (-n {len(gpus)}), let them share (--gpus share), or train "
        "on the CPU (--gpus none) [SMB-E311]"
    )


def _gpu_environment(gpu: str, shared: bool, environment: Mapping[str, str]) -> dict[str, str]:
    variables = {"CUDA_VISIBLE_DEVICES": gpu}
    if shared and "TF_FORCE_GPU_ALLOW_GROWTH" not in environment:
        # Else the first worker takes all of the GPU's memory.
        variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    return variables
