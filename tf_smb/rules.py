"""Exchange rules: how a worker's weights and the center move toward each other.

Notation: x a worker's weights, g the center, p the number of live workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple

from tf_smb.errors import InvalidArgumentError

_NAMES = (
    "tf_smb.DeltaAveraging(...), tf_smb.ElasticAveraging(...), tf_smb.PeriodicAveraging(...) or "
    "tf_smb.ReadThenAccumulate(...)"
)


def _check_period(communication_period: int) -> None:
    if (
        isinstance(communication_period, bool)
        or not isinstance(communication_period, Integral)
        or not 1 <= communication_period <= 10**9
    ):
        raise InvalidArgumentError(
            "communication_period must be an integer number of steps from 1 to 1000000000, got "
            f"{communication_period!r} [SMB-E290]"
        )


def _check_rate(name: str, value: float, highest: float, or_none: str = "") -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 0 < value <= highest  # false for NaN
    ):
        raise InvalidArgumentError(
            f"{name} must be a number above 0 and at most {highest:g}{or_none}, got {value!r} "
            "[SMB-E291]"
        )


class CoreRule(NamedTuple):
    """A rule as the C++ core takes it.

    Attributes:
        kind: "elastic" or "delta".
        rate: Of the move.
        per_worker: Whether the rate is divided by the live workers.
        atomic: Whether both sides of a chunk move at once; else the center is read whole first.
        synchronous: Whether all workers exchange together, in rounds; the others then say nothing.
    """

    kind: str
    rate: float
    per_worker: bool
    atomic: bool = True
    synchronous: bool = False


@dataclass(frozen=True)
class ExchangeRule:
    """What every rule has: the period. Use one of its subclasses.

    Attributes:
        communication_period: Local steps between two exchanges (tau in the papers; H in
            DiLoCo; `sync_every` in torchft; update interval in ShmCaffe).
    """

    communication_period: int = 10

    def __post_init__(self) -> None:
        _check_period(self.communication_period)

    def core_rule(self) -> CoreRule:
        """Returns the rule for the C++ core."""
        raise TypeError(f"ExchangeRule is a base class: use {_NAMES}")


@dataclass(frozen=True)
class ElasticAveraging(ExchangeRule):
    """Asynchronous elastic averaging: worker and center pull each other.

    Every `communication_period` steps, as one atomic move on each chunk of the weights:
    `d = a (x - g); x <- x - d; g <- g + d`. The sum of all x and g is conserved, so the center
    moves at p / (p + 1) of a worker's speed. A worker's momentum and Adam moments stay local.
    A worker alone copies its weights into the center: training alone loses nothing.

    Source: EASGD (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, equations 5 and 6), here
    with both sides moved on one snapshot; SEASGD in ShmCaffe (Ahn et al. 2018).

    Attributes:
        communication_period: Local steps between two exchanges.
        moving_rate: a, above 0 and at most 1. None: 0.9 / p, following joins and leaves.

    Raises:
        InvalidArgumentError: A value is out of range.

    Example:
        >>> ElasticAveraging(communication_period=8)
        ElasticAveraging(communication_period=8, moving_rate=None)
    """

    moving_rate: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moving_rate is not None:
            _check_rate("moving_rate", self.moving_rate, 1.0, ", or None")

    def core_rule(self) -> CoreRule:
        """Returns the rule for the C++ core."""
        if self.moving_rate is None:
            return CoreRule("elastic", 0.9, per_worker=True)
        return CoreRule("elastic", float(self.moving_rate), per_worker=False)


@dataclass(frozen=True)
class DeltaAveraging(ExchangeRule):
    """Asynchronous delta averaging: a worker adds its share of progress and takes the center.

    Every `communication_period` steps, with l the worker's weights after its last exchange, as
    one atomic move on each chunk: `g <- g + (s / p) (x - l); x <- g; l <- g`. With s = 1 and one
    worker it is plain training; when all arrive together, local SGD. Momentum and Adam moments
    stay local.

    Source: asynchronous local SGD (Liu et al. 2024, arXiv:2401.09135); FedAsync (Xie et al.
    2019, arXiv:1903.03934) with weight 1 / p.

    Attributes:
        communication_period: Local steps between two exchanges.
        gain: s, above 0 and at most 2: 1 averages the workers' progress, more than 1 goes
            further than any of them, as a larger learning rate on the center would.

    Raises:
        InvalidArgumentError: A value is out of range.

    Example:
        >>> DeltaAveraging(communication_period=8)
        DeltaAveraging(communication_period=8, gain=1.0)
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("gain", self.gain, 2.0)

    def core_rule(self) -> CoreRule:
        """Returns the rule for the C++ core."""
        return CoreRule("delta", float(self.gain), per_worker=True)


@dataclass(frozen=True)
class PeriodicAveraging(ExchangeRule):
    """Synchronous averaging: every so many steps all workers wait for each other and average.

    In a round the center becomes the mean of all live workers' weights, each weighted by the
    steps w it made since the last round, and every worker takes it:
    `g <- sum(w x) / sum(w); x <- g`. A worker that dies or leaves is not waited for; one that
    comes later takes part from the next round on. Shares are added in the order of the worker
    indexes, so that the same members with the same weights give the same bits.

    **`PeriodicAveraging(1)` averages weights after every step, not gradients.** With plain SGD,
    equal batches and one learning rate the two are the same; with momentum or Adam they are not:
    each worker keeps the momentum and the moments of its own gradients. What all workers see in
    one step is then one batch of all their batches together, but each moves by its own gradient
    and only the mean of the moves counts.

    It holds up to a period of some 16 to 32 steps; beyond it the workers drift apart between
    rounds.

    Source: local SGD (Stich 2019, arXiv:1805.09767, algorithm 1); post-local SGD (Lin et al.
    2018, arXiv:1808.07217), which begins with a period of 1; weights by steps as in federated
    averaging (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).

    Attributes:
        communication_period: Local steps between two rounds (tau or H in the papers).

    Raises:
        InvalidArgumentError: The period is out of range.

    Example:
        >>> PeriodicAveraging(communication_period=8)
        PeriodicAveraging(communication_period=8)
    """

    communication_period: int = 16

    def core_rule(self) -> CoreRule:
        """Returns the rule for the C++ core."""
        return CoreRule("elastic", 1.0, per_worker=True, synchronous=True)


@dataclass(frozen=True)
class ReadThenAccumulate(ExchangeRule):
    """SEASGD as in the ShmCaffe paper: read the center, move, then add to the center.

    Every `communication_period` steps the worker reads the whole center g into g', and then, with
    d = a (x - g'): `x <- x - d; g <- g + d`. Between the read and the addition other workers may
    move the center, so nobody's pull is measured from the same g, and p workers in step pull it p
    times as far as one: **it is stable only for moving_rate < 2 / (p + 1) with p workers in
    step**; beyond it center and workers swing around each other ever more widely.
    `ElasticAveraging`, which moves both sides at once, has no such bound. This rule is here to
    compare with the paper.

    A worker alone copies its weights into the center, as with the other rules.

    Source: SEASGD in ShmCaffe (Ahn, Kim, Lim, Kang, Choi 2018, ICDCS), which is EASGD (Zhang,
    Choromanska, LeCun 2015, arXiv:1412.6651, algorithm 1) on a shared memory box.

    Attributes:
        communication_period: Local steps between two exchanges (update interval in ShmCaffe).
        moving_rate: a, above 0 and at most 1.

    Raises:
        InvalidArgumentError: A value is out of range.

    Example:
        >>> ReadThenAccumulate(moving_rate=0.1)
        ReadThenAccumulate(communication_period=1, moving_rate=0.1)
    """

    communication_period: int = 1
    moving_rate: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("moving_rate", self.moving_rate, 1.0)

    def core_rule(self) -> CoreRule:
        """Returns the rule for the C++ core."""
        return CoreRule("elastic", float(self.moving_rate), per_worker=False, atomic=False)

    def is_stable(self, num_workers: int) -> bool:
        """Whether so many workers in step come to rest: moving_rate < 2 / (num_workers + 1)."""
        return self.moving_rate * (num_workers + 1) < 2


def default_rule() -> ExchangeRule:
    """Returns the rule that `SMBStrategy()` and `Segment` use when none is given."""
    return DeltaAveraging()


def check_rule(rule: ExchangeRule | None) -> ExchangeRule:
    """Returns the rule, or the default for None.

    Raises:
        InvalidArgumentError: It is not a rule; the message names the classes.
    """
    if rule is None:
        return default_rule()
    if not isinstance(
        rule, ElasticAveraging | DeltaAveraging | PeriodicAveraging | ReadThenAccumulate
    ):
        raise InvalidArgumentError(f"rule must be {_NAMES}, got {rule!r} [SMB-E292]")
    return rule
