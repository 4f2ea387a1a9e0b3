"""Exchange rules: how a worker's weights and the center move toward each other.

Notation: x a worker's weights, g the center, p the number of live workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

from tf_smb.errors import InvalidArgumentError


def _check_period(communication_period: int) -> None:
    if (
        isinstance(communication_period, bool)
        or not isinstance(communication_period, Integral)
        or not 1 <= communication_period <= 10**9
    ):
        raise InvalidArgumentError(
            "communication_period must be an integer number of steps from 1 to 1000000000, got "
            f"{communication_period!r}"
        )


def _check_rate(name: str, value: float, highest: float, or_none: str = "") -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 0 < value <= highest  # false for NaN
    ):
        raise InvalidArgumentError(
            f"{name} must be a number above 0 and at most {highest:g}{or_none}, got {value!r}"
        )


@dataclass(frozen=True)
class ExchangeRule:
    """What every rule has: the period. Use `ElasticAveraging` or `DeltaAveraging`.

    Attributes:
        communication_period: Local steps between two exchanges (tau in the papers; H in
            DiLoCo; `sync_every` in torchft; update interval in ShmCaffe).
    """

    communication_period: int = 10

    def __post_init__(self) -> None:
        _check_period(self.communication_period)

    def core_rule(self) -> tuple[str, float, bool]:
        """Returns kind, rate and "divide the rate by the live workers", for the C++ core."""
        raise TypeError("ExchangeRule is a base class: use ElasticAveraging or DeltaAveraging")


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

    def core_rule(self) -> tuple[str, float, bool]:
        """Returns kind, rate and "divide the rate by the live workers", for the C++ core."""
        if self.moving_rate is None:
            return ("elastic", 0.9, True)
        return ("elastic", float(self.moving_rate), False)


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

    def core_rule(self) -> tuple[str, float, bool]:
        """Returns kind, rate and "divide the rate by the live workers", for the C++ core."""
        return ("delta", float(self.gain), True)


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
    if not isinstance(rule, ElasticAveraging | DeltaAveraging):
        raise InvalidArgumentError(
            f"rule must be tf_smb.ElasticAveraging(...) or tf_smb.DeltaAveraging(...), got {rule!r}"
        )
    return rule
