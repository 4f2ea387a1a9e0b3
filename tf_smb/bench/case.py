"""What is asked for: a case, and the turns in which it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One line of the result; a workload looks at those fields that are its axes.

    Attributes:
        workload: Its name.
        workers: How many worker processes.
        params_mb: Size of the model in MB (10^6 bytes), in the workers' dtype.
        dtype: Of the workers' arrays.
        rule: "elastic" or "delta".
        threads: Of an operation on the box. 0: one for each core of the worker.
        seconds: How long the workers go on, where that is not counted in iterations.
    """

    workload: str
    workers: int
    params_mb: float = 0.0
    dtype: str = "float32"
    rule: str = "elastic"
    threads: int = 0
    seconds: float = 0.0

    @property
    def timeout_s(self) -> float:
        """For one turn: starting TensorFlow included, and a machine that does other things."""
        return 180.0 + 0.5 * self.params_mb * self.workers + 10 * self.seconds


@dataclass
class Turn:
    """What a group of workers is asked for: one contestant, measured a few times.

    Attributes:
        case: What to measure.
        what: The contestant, where a role has several.
        name: Of the segment, if one is needed.
        check: Whether to compare all results with numpy.
        blocks: How often everything that is compared takes its place in the turn.
        block_s: How long one place lasts; one iteration is always made.
        max_iterations: How many at most.
    """

    case: Case
    what: str
    name: str
    check: bool
    blocks: int = 5
    block_s: float = 0.03
    max_iterations: int = 50


@dataclass
class Setup:
    """What a worker knows from its start.

    Attributes:
        role: A key of `worker.ROLES`.
        index: Its number.
        count: How many workers there are.
        cores: Which cores it may use; empty: all of its parent's.
        board_fd: Of `create_board_fd`.
        server: Address of the box.
        job_id: Of the box's segments.
        addresses: HOST:PORT of each worker, for TensorFlow's own communication.
        timeout_s: For every wait.
    """

    role: str
    index: int
    count: int
    cores: list[int]
    board_fd: int
    server: str
    job_id: str
    addresses: list[str] = field(default_factory=list)
    timeout_s: float = 300.0
