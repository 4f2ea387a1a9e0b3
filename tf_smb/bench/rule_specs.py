"""Exchange rules on the command line: `delta(10)`, `0:periodic(1)+500:delta(10)`.

A rule is its name and, in parentheses, its communication period in local steps, then its moving
rate or gain if it has one. A schedule is several of them, each after the local step that it
begins at, joined by `+`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tf_smb import rules
from tf_smb.errors import InvalidArgumentError

PLAIN = "plain"
ACCEPTED = (
    "plain, delta(PERIOD[,GAIN]), elastic(PERIOD[,RATE]), periodic(PERIOD), "
    "read-then-accumulate(PERIOD[,RATE]), or a schedule such as 0:periodic(1)+500:delta(10)"
)

_PHASE = re.compile(r"([a-z-]+)(?:\(([^()]*)\))?")
_COMMA_OUTSIDE = re.compile(r",(?![^()]*\))")


@dataclass(frozen=True)
class _Form:
    """How a rule is written.

    Attributes:
        make: Makes it of its period and, perhaps, its rate.
        most_numbers: How many numbers it takes at most.
    """

    make: Callable[..., rules.ExchangeRule]
    most_numbers: int


_FORMS = {
    "delta": _Form(rules.DeltaAveraging, 2),
    "elastic": _Form(rules.ElasticAveraging, 2),
    "periodic": _Form(rules.PeriodicAveraging, 1),
    "read-then-accumulate": _Form(rules.ReadThenAccumulate, 2),
}


@dataclass(frozen=True)
class PhaseSpec:
    """A rule, from a local step on.

    Attributes:
        begin_step: The step.
        rule: The rule, with its period.
    """

    begin_step: int
    rule: rules.ExchangeRule

    @property
    def is_synchronous(self) -> bool:
        """Whether an exchange waits for all workers."""
        return isinstance(self.rule, rules.PeriodicAveraging)


@dataclass(frozen=True)
class RuleSpec:
    """What stands on the command line.

    Attributes:
        text: As written.
        phases: In order, the first from step 0; none for `plain`.
    """

    text: str
    phases: tuple[PhaseSpec, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it is training without a box."""
        return not self.phases

    @property
    def ends_asynchronous(self) -> bool:
        """Whether workers are asynchronous at the end."""
        return bool(self.phases) and not self.phases[-1].is_synchronous


def parse_rules(text: str) -> list[RuleSpec]:
    """Returns the rules of a list that is separated by commas.

    Raises:
        InvalidArgumentError: One is not a rule; the message has it, and what is accepted.
    """
    return [parse_rule(part) for part in _COMMA_OUTSIDE.split(text)]


def parse_rule(text: str) -> RuleSpec:
    """Returns one rule or schedule.

    Raises:
        InvalidArgumentError: It is none; the message has it, and what is accepted.

    Example:
        >>> parse_rule("0:periodic(1)+500:delta(10)").phases[1].begin_step
        500
    """
    text = text.strip()
    if text == PLAIN:
        return RuleSpec(text, ())
    if ":" not in text:
        return RuleSpec(text, (PhaseSpec(0, _parse_phase(text)),))
    phases = tuple(_parse_begin_and_phase(part, text) for part in text.split("+"))
    begins = [phase.begin_step for phase in phases]
    if begins[0] != 0 or begins != sorted(set(begins)):
        raise InvalidArgumentError(
            "the phases of a schedule must begin at step 0 and then at later and later steps, got "
            f"{text!r} [SMB-E470]"
        )
    return RuleSpec(text, phases)


def _parse_begin_and_phase(part: str, text: str) -> PhaseSpec:
    begin, _, phase = part.partition(":")
    if not begin.strip().isdecimal():
        raise InvalidArgumentError(
            "a phase of a schedule must be STEP:RULE, as in 0:periodic(1)+500:delta(10), got "
            f"{part!r} in {text!r} [SMB-E471]"
        )
    return PhaseSpec(int(begin), _parse_phase(phase.strip()))


def _parse_phase(text: str) -> rules.ExchangeRule:
    match = _PHASE.fullmatch(text)
    form = _FORMS.get(match[1]) if match else None
    if match is None or form is None:
        raise InvalidArgumentError(f"a rule must be {ACCEPTED}, got {text!r} [SMB-E472]")
    numbers = _parse_numbers(match[2], text)
    if len(numbers) > form.most_numbers:
        raise InvalidArgumentError(
            f"{match[1]} takes at most {form.most_numbers} number(s) in its parentheses, got "
            f"{text!r} [SMB-E473]"
        )
    return form.make(*numbers)  # which checks their ranges


def _parse_numbers(inside: str | None, text: str) -> list[float]:
    """Returns the period as an integer, and what stands behind it."""
    if inside is None:
        return []
    try:
        period, *others = inside.split(",")
        return [int(period), *map(float, others)]
    except ValueError:
        raise InvalidArgumentError(
            "in parentheses must be a whole number of steps and, for some rules, a number after a "
            f"comma, as in elastic(10,0.2), got {text!r} [SMB-E474]"
        ) from None
