"""`tf-smb run --compare`: the same script once plain and once with n workers.

Under `TF_SMB_REPORT=FOLDER`, `fit` appends JSON lines to `FOLDER/worker-<index>.jsonl`:
`{"event": "begin"|"batch"|"end", "time": unix seconds, "worker": i, "step": n, "samples":
samples trained on so far or null, "loss": mean training loss since the last record}`, "batch"
about every 0.2 s. This module reads them.

*Samples per second*: for each worker, between its first and last "batch" record of each `fit`,
so that imports and building the graph do not count; summed over the workers.

*Time to equal loss*: each run's records, of all workers in the order of time, are averaged over
a sliding window of the same number of samples in both runs: equal noise, equal lag. The target
is the lowest loss that both reach; the time counts from the run's first "begin".
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tf_smb.errors import FailedPreconditionError
from tf_smb.launch_setup import LaunchOptions
from tf_smb.launcher import LaunchResult, launch
from tf_smb.resources import hand_out_cores

# The window of the loss curve, as a share of the shorter run's samples.
_WINDOW_SHARE = 0.05
# Below these, a run is too short to tell.
_MIN_RECORDS = 10
_MIN_SECONDS = 3.0
# Other targets, as shares of the way from the first smoothed loss to the lowest that both
# reach: how much the ratio of times differs between them shows how far to trust it.
_OTHER_TARGETS = (0.7, 0.8, 0.9, 0.95)


# --- Reading the records ---


@dataclass(frozen=True)
class Batch:
    """A "batch" record: what was trained since the one before it of the same worker.

    Attributes:
        time_s: Unix time.
        samples: Samples since the record before.
        loss: Mean training loss over them; NaN if there is none.
        since_s: Time of the "batch" record before in the same `fit`; None: it is the first.
    """

    time_s: float
    samples: float
    loss: float
    since_s: float | None


@dataclass(frozen=True)
class WorkerRecords:
    """What one worker reported.

    Attributes:
        begin_s: Unix time at which its first `fit` began.
        batches: Its "batch" records, in order.
        in_steps: Whether steps are counted instead of samples, for want of a batch size.
    """

    begin_s: float
    batches: list[Batch]
    in_steps: bool = False

    @property
    def samples_per_s(self) -> float:
        """Samples per second while it trained; NaN with fewer than two records of one `fit`."""
        counted = [batch for batch in self.batches if batch.since_s is not None]
        seconds = sum(batch.time_s - (batch.since_s or 0.0) for batch in counted)
        return sum(batch.samples for batch in counted) / seconds if seconds > 0 else math.nan


def read_report(folder: Path) -> list[WorkerRecords]:
    """Returns what the workers of a run reported; workers that never called `fit` left out."""
    records = [_read_worker(path) for path in sorted(folder.glob("worker-*.jsonl"))]
    return [worker for worker in records if worker is not None]


def _read_worker(path: Path) -> WorkerRecords | None:
    begin_s: float | None = None
    batches: list[Batch] = []
    since_s: float | None = None
    seen_samples = 0.0
    in_steps = False
    for record in _json_lines(path):
        time_s, samples = float(record["time"]), _number(record.get("samples"))
        if math.isnan(samples):
            in_steps, samples = True, float(record.get("step") or 0)
        if record.get("event") == "begin":
            begin_s = time_s if begin_s is None else begin_s
            since_s = None
        if record.get("event") == "batch":
            begin_s = time_s if begin_s is None else begin_s
            # The count may start again with each `fit`.
            new = samples - seen_samples if samples >= seen_samples else samples
            batches.append(Batch(time_s, new, _number(record.get("loss")), since_s))
            since_s, seen_samples = time_s, samples
    return None if begin_s is None else WorkerRecords(begin_s, batches, in_steps)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a worker that was killed
        if isinstance(record, dict) and isinstance(record.get("time"), int | float):
            yield record


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


# --- Loss curves ---


@dataclass(frozen=True)
class Curve:
    """A smoothed loss curve: seconds since the run's first "begin", and the loss there."""

    seconds: list[float]
    losses: list[float]

    @property
    def lowest(self) -> float:
        """The lowest loss; infinite for an empty curve."""
        return min(self.losses, default=math.inf)

    def time_to(self, target: float) -> float:
        """Returns when the loss is first at most `target`; infinite if it never is."""
        for second, loss in zip(self.seconds, self.losses, strict=True):
            if loss <= target:
                return second
        return math.inf


def smooth(workers: Sequence[WorkerRecords], window_samples: float) -> Curve:
    """Returns the loss of a run over time.

    Args:
        workers: The run's records.
        window_samples: Each point is the mean over this many samples before it, of all workers;
            there is none before the window is full once.
    """
    begin_s = min((worker.begin_s for worker in workers), default=0.0)
    batches = sorted(
        (b for worker in workers for b in worker.batches if b.samples and math.isfinite(b.loss)),
        key=lambda batch: batch.time_s,
    )
    curve = Curve([], [])
    if window_samples <= 0:
        return curve
    window: deque[Batch] = deque()
    samples = total = 0.0
    for batch in batches:
        window.append(batch)
        samples += batch.samples
        total += batch.samples * batch.loss
        while samples - window[0].samples >= window_samples:
            oldest = window.popleft()
            samples -= oldest.samples
            total -= oldest.samples * oldest.loss
        if samples >= window_samples:
            curve.seconds.append(batch.time_s - begin_s)
            curve.losses.append(total / samples)
    return curve


# --- Comparing ---


@dataclass
class RunSummary:
    """What one of the two runs came to; None where it cannot be told.

    Attributes:
        workers: How many workers left records.
        samples_per_s: Summed over the workers.
        time_to_loss_s: Seconds from the first "begin" to the target loss.
        final_loss: Smoothed loss at the end.
        lowest_loss: Lowest smoothed loss.
        wall_s: All of it, with imports.
        records: "batch" records.
    """

    workers: int
    samples_per_s: float | None
    time_to_loss_s: float | None
    final_loss: float | None
    lowest_loss: float | None
    wall_s: float
    records: int


@dataclass
class Comparison:
    """Both runs, and what they say about each other.

    Attributes:
        workers: How many workers were started.
        plain: The plain run.
        tf_smb: The run with workers.
        samples_per_s_ratio: tf_smb / plain: above 1 is faster.
        target_loss: The lowest smoothed loss that both reached.
        time_to_loss_ratio: tf_smb / plain: below 1 is faster.
        time_to_loss_ratio_range: Lowest and highest ratio for this and some higher targets.
        warnings: What speaks against trusting the numbers.
    """

    workers: int
    plain: RunSummary
    tf_smb: RunSummary
    samples_per_s_ratio: float | None = None
    target_loss: float | None = None
    time_to_loss_ratio: float | None = None
    time_to_loss_ratio_range: tuple[float, float] | None = None
    warnings: list[str] = field(default_factory=list)


def compare_runs(
    num_workers: int,
    plain: Sequence[WorkerRecords],
    shared: Sequence[WorkerRecords],
    plain_wall_s: float,
    shared_wall_s: float,
) -> Comparison:
    """Returns what the records of a plain run and of one with workers say."""
    window = _WINDOW_SHARE * min(_total_samples(plain), _total_samples(shared))
    curves = smooth(plain, window), smooth(shared, window)
    target = max(curves[0].lowest, curves[1].lowest)
    result = Comparison(
        num_workers,
        _summarize(plain, curves[0], target, plain_wall_s),
        _summarize(shared, curves[1], target, shared_wall_s),
    )
    result.samples_per_s_ratio = _ratio(result.tf_smb.samples_per_s, result.plain.samples_per_s)
    if math.isfinite(target):
        result.target_loss = target
        result.time_to_loss_ratio = _ratio(
            result.tf_smb.time_to_loss_s, result.plain.time_to_loss_s
        )
        result.time_to_loss_ratio_range = _ratio_range(curves, target)
    result.warnings = _doubts(result, plain, shared)
    return result


def _total_samples(workers: Sequence[WorkerRecords]) -> float:
    return sum(batch.samples for worker in workers for batch in worker.batches)


def _summarize(
    workers: Sequence[WorkerRecords], curve: Curve, target: float, wall_s: float
) -> RunSummary:
    return RunSummary(
        workers=len(workers),
        samples_per_s=_known(sum(worker.samples_per_s for worker in workers)),
        time_to_loss_s=_known(curve.time_to(target)),
        final_loss=curve.losses[-1] if curve.losses else None,
        lowest_loss=_known(curve.lowest),
        wall_s=wall_s,
        records=sum(len(worker.batches) for worker in workers),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _ratio_range(curves: tuple[Curve, Curve], target: float) -> tuple[float, float] | None:
    first = min(curves[0].losses[0], curves[1].losses[0])
    if first <= target:
        return None
    targets = [target, *(first - share * (first - target) for share in _OTHER_TARGETS)]
    ratios = [_ratio(curves[1].time_to(one), curves[0].time_to(one)) for one in targets]
    known = [ratio for ratio in ratios if ratio is not None]
    return (min(known), max(known)) if known else None


def _doubts(
    result: Comparison, plain: Sequence[WorkerRecords], shared: Sequence[WorkerRecords]
) -> list[str]:
    doubts = []
    if result.tf_smb.workers < result.workers:
        doubts.append(
            f"only {result.tf_smb.workers} of {result.workers} workers left records; the others' "
            "samples are not in the sum"
        )
    for name, workers in (("plain run", plain), ("run with workers", shared)):
        records = min(len(worker.batches) for worker in workers)
        seconds = min(_trained_s(worker) for worker in workers)
        if records < _MIN_RECORDS or seconds < _MIN_SECONDS:
            doubts.append(
                f"the {name} was too short to tell much: {records} records in {seconds:.1f} s of "
                f"training (at least {_MIN_RECORDS} in {_MIN_SECONDS:g} s are needed): train longer"
            )
    if any(worker.in_steps for worker in (*plain, *shared)):
        doubts.append("the batch size is not known, so steps were counted instead of samples")
    if result.target_loss is None:
        doubts.append("there are no training losses to compare")
    return doubts


def _trained_s(worker: WorkerRecords) -> float:
    return worker.batches[-1].time_s - worker.begin_s if worker.batches else 0.0


# --- Running and printing ---


def run_compare(options: LaunchOptions, as_json: bool = False) -> int:
    """Runs the command plain, then with workers, and prints the comparison.

    Args:
        options: As for `launch`; the plain run gets the cores and the GPU of one worker.
        as_json: Print one JSON object; what the workers print goes to standard error.

    Returns:
        The exit code: 0, or that of the run that failed.

    Raises:
        FailedPreconditionError: A run left no records.
    """
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="tf_smb-report-"))
    try:
        plain = _run_once(options, folder / "plain", plain=True, as_json=as_json)
        if plain.exit_code:
            return _failed("plain run", plain)
        shared = _run_once(options, folder / "workers", plain=False, as_json=as_json)
        if shared.exit_code:
            return _failed(f"run with {options.num_workers} workers", shared)
        reports = _checked_reports(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = compare_runs(options.num_workers, *reports, plain.wall_s, shared.wall_s)
    result.warnings[:0] = _machine_doubts(options, load)
    print(json.dumps(asdict(result)) if as_json else format_comparison(result), flush=True)
    return 0


def _run_once(options: LaunchOptions, report: Path, plain: bool, as_json: bool) -> LaunchResult:
    report.mkdir()
    return launch(
        options,
        extra_environment={"TF_SMB_REPORT": str(report)},
        plain=plain,
        stdout=sys.stderr if as_json else sys.stdout,
    )


def _failed(name: str, result: LaunchResult) -> int:
    print(
        f"tf-smb: nothing to compare: the {name} ended with code {result.exit_code} [SMB-E331]",
        file=sys.stderr,
    )
    return result.exit_code


def _checked_reports(folder: Path) -> tuple[list[WorkerRecords], list[WorkerRecords]]:
    reports = read_report(folder / "plain"), read_report(folder / "workers")
    for name, report in zip(("plain run", "run with workers"), reports, strict=True):
        if not any(worker.batches for worker in report):
            raise FailedPreconditionError(
                f"nothing to compare: the {name} left no records; the script must call fit on a "
                "model made under SMBStrategy.scope() [SMB-E330]"
            )
    return reports


def _machine_doubts(options: LaunchOptions, load: float) -> list[str]:
    plan = hand_out_cores(options.num_workers, options.cores_per_worker)
    doubts = []
    if plan.oversubscribed:
        doubts.append(
            f"{options.num_workers} workers shared {plan.usable_cores} cores, so they slowed each "
            "other down: this says nothing about a machine with a core for each"
        )
    if load > 0.5 * (os.cpu_count() or 1):
        doubts.append(
            f"the machine was busy before the first run (load {load:.1f} on {os.cpu_count()} "
            "cores): what else runs on it changes the numbers"
        )
    return doubts


def format_comparison(result: Comparison) -> str:
    """Returns the comparison as a table and what it means, for people."""
    plain, shared = result.plain, result.tf_smb
    target = "?" if result.target_loss is None else f"{result.target_loss:.4g}"
    count = f"{result.workers} worker{'s' * (result.workers > 1)}"
    rows = [
        ("", "plain", count, "ratio"),
        _row("samples per second", plain.samples_per_s, shared.samples_per_s, ",.0f", "x"),
        _row(f"seconds to loss {target}", plain.time_to_loss_s, shared.time_to_loss_s, ",.1f", "x"),
        _row("final loss", plain.final_loss, shared.final_loss, ".4g", ""),
        _row("seconds in all, with imports", plain.wall_s, shared.wall_s, ",.1f", "x"),
    ]
    lines = [f"{name:<30}{left:>12}{right:>12}{ratio:>9}" for name, left, right, ratio in rows]
    lines = [line.rstrip() for line in lines] + [_meaning(result)]
    return "\n".join([*lines, *(f"Careful: {warning}." for warning in result.warnings)])


def _row(
    name: str, plain: float | None, shared: float | None, form: str, unit: str
) -> tuple[str, str, str, str]:
    ratio = _ratio(shared, plain)
    return (
        name,
        "?" if plain is None else format(plain, form),
        "?" if shared is None else format(shared, form),
        f"{ratio:.2f}{unit}" if unit and ratio is not None else "",
    )


def _meaning(result: Comparison) -> str:
    share = "" if result.time_to_loss_ratio is None else f"{result.time_to_loss_ratio:.0%} of "
    noise = ""
    if result.time_to_loss_ratio_range is not None:
        low, high = result.time_to_loss_ratio_range
        noise = f" (between {low:.0%} and {high:.0%} for this and higher losses)"
    speed = "" if result.samples_per_s_ratio is None else f"{result.samples_per_s_ratio:.2f} times "
    if not share:
        return (
            f"The workers trained on {speed}the samples per second; whether that reaches a loss "
            "sooner cannot be told from these runs."
        )
    return (
        f"The workers trained on {speed}the samples per second and needed {share}the time to the "
        f"same training loss{noise}; the loss is each worker's own, smoothed, from one run each, "
        "so differences of a few percent mean nothing."
    )
