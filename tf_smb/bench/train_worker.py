"""Training by real workers: what `tf-smb run` starts, and what starts it.

`python -m tf_smb.bench.train_worker JSON` is one worker: the user's side of the package, a
strategy and `model.fit`, and nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tf_smb.bench.rule_specs import RuleSpec, parse_rule
from tf_smb.errors import FailedPreconditionError
from tf_smb.launch_setup import LaunchOptions
from tf_smb.launcher import launch


@dataclass(frozen=True)
class Job:
    """What the workers are told, as JSON.

    Attributes:
        data: Path of the .npz file.
        samples: How many of its training samples; None: all.
        rule: As on the command line.
        epochs: Passes over all data, by all workers together.
        batch: Of a worker.
        skewed: Whether each worker sees only its share of the labels.
        settle_steps: See `SMBStrategy`.
        seed: Of the first weights and the order of samples.
        learning_rate: Of all workers.
    """

    data: str
    samples: int | None
    rule: str
    epochs: int
    batch: int
    skewed: bool
    settle_steps: int
    seed: int
    learning_rate: float


@dataclass(frozen=True)
class Report:
    """What the job came to.

    Attributes:
        center_accuracy: On the test data, from 0 to 1.
        held_out_accuracy: On the held-out part of the training data.
        finite: Whether all weights are finite.
        bytes_exchanged: Read from and written to the center, by all workers.
        seconds_waiting: Of the average worker, in exchanges.
    """

    center_accuracy: float
    held_out_accuracy: float
    finite: bool
    bytes_exchanged: int
    seconds_waiting: float


def train_in_processes(job: Job, workers: int) -> Report:
    """Runs the job under the launcher, and returns its report.

    Raises:
        FailedPreconditionError: A worker failed; its own words are above.
    """
    with tempfile.TemporaryDirectory(prefix="tf_smb-train-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            *("-m", "tf_smb.bench.train_worker", json.dumps(asdict(job)), name),
        ]
        options = LaunchOptions(command, workers, log_dir=str(folder / "log"), on_failure="stop")
        ended = launch(options, stdout=sys.stderr)
        if ended.exit_code:
            raise FailedPreconditionError(
                f"the training of {job.rule} by {workers} workers ended with code "
                f"{ended.exit_code} [SMB-E477]"
            )
        reports = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    return Report(
        **reports[0]["result"],
        bytes_exchanged=sum(report["bytes_exchanged"] for report in reports),
        seconds_waiting=sum(report["seconds_waiting"] for report in reports) / len(reports),
    )


def main(text: str, folder: str) -> None:
    """Is one worker of a job.

    Args:
        text: The job as JSON.
        folder: Where each worker leaves its report.
    """
    job = Job(**json.loads(text))
    strategy = _make_strategy(job, parse_rule(job.rule))
    report = _train(job, strategy)
    path = Path(folder) / f"worker-{strategy.worker_index:03}.json"
    path.write_text(json.dumps(report))


def _make_strategy(job: Job, spec: RuleSpec) -> Any:
    # The one place where the benchmark is a user of the strategy, which lies above it.
    from tf_smb import SMBStrategy
    from tf_smb.schedule import Schedule

    # The share is made below, as the simulation makes it.
    common: dict[str, Any] = {"data": "replicate", "settle_steps": job.settle_steps}
    if len(spec.phases) == 1:
        return SMBStrategy(rule=spec.phases[0].rule, **common)
    phases = [(phase.begin_step, phase.rule) for phase in spec.phases]
    return SMBStrategy(schedule=Schedule(phases), **common)


def _train(job: Job, strategy: Any) -> dict[str, Any]:
    from tf_smb.bench import train_model

    data = train_model.load_data(Path(job.data), job.samples)
    shares = train_model.divide(data.train.y, strategy.num_workers, job.skewed)
    own = shares[strategy.worker_index]
    with strategy.scope():
        model = train_model.build_model(job.seed, data.train.x.shape[1:])
        model.compile(train_model.make_optimizer(job.learning_rate), train_model.make_loss())
    train_model.seed_order(job.seed, strategy.worker_index)
    x, y = data.train.x[own], data.train.y[own]
    model.fit(x, y, batch_size=job.batch, epochs=job.epochs, verbose=0)
    stats = strategy.stats(model)
    center_bytes = sum(array.nbytes for array in model.get_weights())
    exchanges = stats["exchanges"] + stats.get("settling_steps", 0)
    return {
        "result": train_model.measure(model, data),
        "bytes_exchanged": int(2 * exchanges * center_bytes),
        "seconds_waiting": float(stats.get("exchange_s", 0.0)),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
