"""Runs of the Keras scripts: each once, and what each of two workers then has of each case."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from support import Finished, launch

Facts = dict[str, Any]


class Runs:
    """The runs of one script, each made at first use.

    Args:
        script: In scripts/: one that prints the facts of its cases (see keras_common.py).
        folder: For what the runs write.
    """

    def __init__(self, script: str, folder: Path) -> None:
        self._script = script
        self._folder = folder
        self._done: dict[tuple[int, str], Finished] = {}

    def of(self, case: str, devices: int, exchange: str = "on") -> list[Facts]:
        """Returns what each worker has of a case, of so many devices a worker."""
        done = self.run(devices, exchange)
        facts = [result["facts"] for result in done.results if result["case"] == case]
        assert len(facts) == 2, done.output  # by worker
        return facts

    def run(self, devices: int, exchange: str = "on") -> Finished:
        """Returns the finished run of all cases."""
        key = (devices, exchange)
        if key not in self._done:
            self.folder(devices, exchange).mkdir()
            try:
                self._done[key] = launch(
                    2,
                    self._script,
                    "--devices",
                    str(devices),
                    "--out",
                    str(self.folder(devices, exchange)),
                    timeout_s=500,
                    TF_SMB_EXCHANGE=exchange,
                    TF_SMB_END_TIMEOUT_S="60",
                )
            except subprocess.TimeoutExpired as late:
                # The cases that came before are good; the others then fail with this output.
                output = late.stdout or b""
                text = output.decode() if isinstance(output, bytes) else output
                self._done[key] = Finished(-1, text.replace("\r", "\n"))
        return self._done[key]

    def folder(self, devices: int, exchange: str = "on") -> Path:
        """Returns where a run writes."""
        return self._folder / f"{devices}_{exchange}"
