"""Schedules: which exchange rule holds when."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from tf_smb.errors import InvalidArgumentError
from tf_smb.rules import CoreRule, ExchangeRule, check_rule

_MAX_PHASES = 64


class Schedule:
    """Exchange rules one after the other: asynchronous and synchronous ones in any order.

    A phase begins when the first worker comes to its step (or epoch). That worker makes one last
    exchange by the old rule; the others do the same at their next step. All workers go through
    all phases in order: none begins before every live worker has entered the one before, so two
    workers are never more than one phase apart. A phase of `PeriodicAveraging` ends with a
    round, at its last step exactly, for all workers at once. A worker that joins late begins in
    the present phase. The last phase lasts until the end.

    Nobody waits at a boundary, except for the rounds of a synchronous phase.

    Args:
        phases: Pairs of a beginning and a rule. The first begins at 0, each other one later than
            the one before.
        unit: What the beginnings count: "step" (local steps, over all `fit`s together) or "epoch"
            (Keras' epoch numbers, from 0).

    Raises:
        InvalidArgumentError: Not such pairs, or not in order; the message has the value.

    Example:
        >>> Schedule([(0, PeriodicAveraging(1)), (500, ElasticAveraging(8))])
        Schedule([(0, PeriodicAveraging(communication_period=1)), (500, ElasticAveraging(...))])

    Source: synchronous first, as in post-local SGD (Lin et al. 2018, arXiv:1808.07217, section 3).
    """

    def __init__(self, phases: Sequence[tuple[int, ExchangeRule]], unit: str = "step") -> None:
        if unit not in ("step", "epoch"):
            raise InvalidArgumentError(
                f"the unit of a schedule must be 'step' or 'epoch', got {unit!r} [SMB-E293]"
            )
        self._phases = tuple(_check_phase(phase) for phase in _check_phases(phases))
        self._unit = unit
        _check_order([begin for begin, _ in self._phases], unit)

    @property
    def phases(self) -> tuple[tuple[int, ExchangeRule], ...]:
        """Beginning and rule of each phase."""
        return self._phases

    @property
    def unit(self) -> str:
        """What the beginnings count: "step" or "epoch"."""
        return self._unit

    def phase_at(self, position: int) -> int:
        """Returns the number of the phase that a job at this step (or epoch) is in."""
        return max(i for i, (begin, _) in enumerate(self._phases) if begin <= position)

    def core_phases(self) -> list[tuple[int, CoreRule, int]]:
        """Returns beginning, rule and period of each phase for the C++ core."""
        return [
            (begin, rule.core_rule(), rule.communication_period) for begin, rule in self._phases
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (self._phases, self._unit) == (other._phases, other._unit)

    def __hash__(self) -> int:
        return hash((self._phases, self._unit))

    def __repr__(self) -> str:
        unit = "" if self._unit == "step" else f", unit={self._unit!r}"
        return f"Schedule({list(self._phases)!r}{unit})"


def check_schedule(rule: ExchangeRule | None, schedule: Schedule | None) -> Schedule:
    """Returns the schedule; a rule is one of a single phase, and None the default rule.

    Raises:
        InvalidArgumentError: Both are given, or what is given is not one.
    """
    if rule is not None and schedule is not None:
        raise InvalidArgumentError(
            "give rule= or schedule=, not both: a rule is a schedule of one phase; got "
            f"rule={rule!r} and schedule={schedule!r} [SMB-E294]"
        )
    if schedule is None:
        return Schedule([(0, check_rule(rule))])
    if not isinstance(schedule, Schedule):
        raise InvalidArgumentError(
            f"schedule must be a tf_smb.Schedule([(0, rule), (500, rule), ...]), got {schedule!r} "
            "[SMB-E296]"
        )
    return schedule


def _check_phases(phases: Any) -> Sequence[Any]:
    if not isinstance(phases, Sequence) or isinstance(phases, str) or not phases:
        raise InvalidArgumentError(
            "a schedule must be a list of pairs of a beginning and a rule, such as "
            f"[(0, PeriodicAveraging(1)), (500, ElasticAveraging(8))], got {phases!r} [SMB-E297]"
        )
    if len(phases) > _MAX_PHASES:
        raise InvalidArgumentError(
            f"a schedule must have at most {_MAX_PHASES} phases, got {len(phases)} [SMB-E298]"
        )
    return phases


def _check_phase(phase: Any) -> tuple[int, ExchangeRule]:
    try:
        begin, rule = phase
        begin = -1 if isinstance(begin, bool) else operator.index(begin)
    except (TypeError, ValueError):
        begin, rule = -1, None
    if not 0 <= begin < 2**62 or rule is None:
        raise InvalidArgumentError(
            "each phase of a schedule must be a pair of an integer from 0 on, where it begins, and "
            f"a rule, got {phase!r} [SMB-E299]"
        )
    return begin, check_rule(rule)


def _check_order(begins: Sequence[int], unit: str) -> None:
    in_order = all(a < b for a, b in zip(begins, begins[1:], strict=False))
    if begins[0] != 0 or not in_order:
        raise InvalidArgumentError(
            f"the phases of a schedule must begin at {unit} 0 and each later than the one before, "
            f"got {list(begins)} [SMB-E288]"
        )
