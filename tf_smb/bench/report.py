"""Results for people: a table, and docs/benchmarks.md."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tf_smb.bench.exchange import RESULTS, Result, available_memory_mb

_TITLES = {
    "exchange": "exchange",
    "op_exchange": "through the op",
    "limit": "limit",
    "mpi_get_accumulate": "MPI get+acc",
    "mpi_get_accumulate_shared": "MPI get+acc, shared",
    "mpi_get_accumulate_default": "MPI get+acc, default",
    "mpi_allreduce": "MPI allreduce",
    "mpi_allreduce_default": "MPI allreduce, default",
    "tf_allreduce": "TF all-reduce",
}

METHOD = """\
How it is measured:

- **exchange**: `Segment.exchange` on numpy arrays in place, one process a worker, one model of 34
  variables; 1 MB is 10^6 bytes of float32. **through the op**: the same from a `tf.function` on
  `tf.Variable`s, with the apply, and with what the next optimizer update takes longer after it
  than without it.
- **limit**: `d = r (a - b); a -= d; b += d` on two arrays of the model's size that belong to the
  process alone: what memory allows without sharing, locks or checks.
- **MPI get+acc**: the elastic move on an OpenMPI window on rank 0: get, compute, accumulate, under
  an exclusive lock, so atomic as ours. **shared**: under a shared lock or lock_all: two ranks may
  get the same value before either adds to it, so this is another algorithm. **MPI allreduce**: a
  sum in place. Each is the best of many settings, tried in the same run: the program's pieces,
  OpenMPI's components, algorithms, segment sizes. **default**: what a program gets that calls
  OpenMPI once for the whole array, under an exclusive lock, and sets nothing.
  **TF all-reduce**: `MultiWorkerMirroredStrategy`, rings over gRPC on the loopback device.
- All contestants take turns, and again, in one run. All workers begin an iteration together, and
  its time is the slowest worker's; the numbers are medians over all iterations. With as many
  cores as workers each worker is pinned to one, else they share them all.
- In the first round results are compared with numpy: an exchange bit for bit.
- One worker alone copies its weights into the center; it has nobody to reduce with.
"""


def _cell(result: Result, name: str) -> str:
    """Returns milliseconds, and how many times those of the exchange."""
    value, ours = result.median(name), result.median("exchange")
    if value is None:
        return "-"
    if name == "exchange":
        return f"{value:.2f} ± {(result.iqr(name) or 0) / 2:.2f}"
    return f"{value:.2f} ({value / ours:.2f}x)" if ours else f"{value:.2f}"


def _rows(results: Sequence[Result]) -> list[list[str]]:
    names = [name for name in RESULTS if any(name in result.samples for result in results)]
    rows = [["MB", "workers", *(f"{_TITLES[name]} ms" for name in names)]]
    for result in results:
        cells = [_cell(result, name) for name in names]
        rows.append([f"{result.case.params_mb:g}", str(result.case.workers), *cells])
    return rows


def format_table(results: Sequence[Result]) -> str:
    """Returns the results in columns; in brackets: times the exchange."""
    rows = _rows(results)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join([*lines, "In brackets: how many times the exchange's time."])


def format_markdown(results: Sequence[Result], command: str) -> str:
    """Returns the text of docs/benchmarks.md."""
    rows = _rows(results)
    table = ["| " + " | ".join(row) + " |" for row in rows]
    table.insert(1, "|" + "---:|" * len(rows[0]))
    facts = [f"- {fact}" for fact in machine_facts()]
    missing = [
        f"- {result.case.params_mb:g} MB, {result.case.workers} workers, {name}: {reason}"
        for result in results
        for name, reason in result.reasons.items()
    ]
    parts = [
        "# Benchmarks",
        f"Written by `make bench`, which runs:\n\n```sh\n{command}\n```",
        "Milliseconds; in brackets, how many times the exchange's time: more than 1 is slower.",
        "\n".join(table),
        *(["Not measured:\n\n" + "\n".join(missing)] if missing else []),
        METHOD.strip(),
        "The machine:\n\n" + "\n".join(facts),
    ]
    return "\n\n".join(parts) + "\n"


def machine_facts() -> list[str]:
    """Returns what the numbers depend on."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return [
        f"{_cpu_model()}, {cores} cores, {memory_gib:.0f} GiB of memory "
        f"({available_memory_mb() / 1e3:.0f} GB available)",
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
