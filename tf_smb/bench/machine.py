"""What the numbers depend on: the machine and the versions of what runs on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

from tf_smb import _smb


def machine_facts() -> list[str]:
    """Returns a few lines."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return [
        f"{_cpu_model()}, {cores} cores, {_last_cache()} of last-level cache, "
        f"{memory_gib:.0f} GiB of memory; kernels: {_smb.kernel_instruction_set()}",
        f"Linux {platform.release()}, Python {platform.python_version()}, {_versions()}",
    ]


def _versions() -> str:
    versions = []
    for package in ("tf_smb", "numpy", "tensorflow", "tensorflow-cpu"):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if shutil.which("mpirun"):
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60)
        versions.append(done.stdout.partition("\n")[0].replace("mpirun (Open MPI)", "Open MPI"))
    return ", ".join(versions)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _last_cache() -> str:
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    if not sizes:
        return "unknown size"
    return f"{int(sizes[-1].read_text().strip().removesuffix('K')) / 1024:g} MiB"
