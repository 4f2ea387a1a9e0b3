"""Schedules: what they accept, what they refuse, what they tell the core."""

import re

import numpy as np
import pytest

from tf_smb import DeltaAveraging, ElasticAveraging, PeriodicAveraging, Schedule
from tf_smb.errors import InvalidArgumentError
from tf_smb.rules import default_rule
from tf_smb.schedule import check_schedule

PHASES = [(0, PeriodicAveraging(1)), (500, ElasticAveraging(8)), (5000, PeriodicAveraging(16))]


def test_phases_in_order():
    schedule = Schedule(PHASES)
    assert schedule.phases == tuple(PHASES)
    assert schedule.unit == "step"
    positions = (0, 499, 500, 501, 4999, 5000, 10**15)
    assert [schedule.phase_at(position) for position in positions] == [0, 0, 1, 1, 1, 2, 2]


def test_for_the_core():
    phases = Schedule(PHASES).core_phases()
    assert [(begin, period) for begin, _, period in phases] == [(0, 1), (500, 8), (5000, 16)]
    assert [rule.synchronous for _, rule, _ in phases] == [True, False, True]


def test_values():
    assert Schedule(PHASES) == Schedule(tuple(PHASES))
    assert hash(Schedule(PHASES)) == hash(Schedule(PHASES))
    assert Schedule(PHASES) != Schedule(PHASES, unit="epoch")
    assert Schedule(PHASES) != Schedule(PHASES[:2])
    assert Schedule([(np.int64(0), DeltaAveraging())]) == Schedule([(0, DeltaAveraging())])
    assert eval(repr(Schedule(PHASES, "epoch"))) == Schedule(PHASES, "epoch")


def test_one_rule_is_one_phase():
    rule = ElasticAveraging(3)
    assert check_schedule(rule, None) == Schedule([(0, rule)])
    assert check_schedule(None, None) == Schedule([(0, default_rule())])
    schedule = Schedule(PHASES)
    assert check_schedule(None, schedule) is schedule


def test_both_are_refused():
    with pytest.raises(InvalidArgumentError, match="give rule= or schedule=, not both"):
        check_schedule(ElasticAveraging(), Schedule(PHASES))


@pytest.mark.parametrize("schedule", [PHASES, ElasticAveraging(), "sync", 5])
def test_what_is_no_schedule(schedule):
    with pytest.raises(InvalidArgumentError, match=re.escape(f"got {schedule!r} [SMB-E296]")):
        check_schedule(None, schedule)


@pytest.mark.parametrize("phases", [[], (), None, "0:elastic", 3, {0: ElasticAveraging()}])
def test_what_are_no_phases(phases):
    with pytest.raises(InvalidArgumentError, match="must be a list of pairs.*SMB-E297"):
        Schedule(phases)


@pytest.mark.parametrize(
    "phase",
    [
        (0,),
        (0, None),
        (0.0, ElasticAveraging()),
        (True, ElasticAveraging()),
        (-1, ElasticAveraging()),
        (2**62, ElasticAveraging()),
        ("0", ElasticAveraging()),
        (0, ElasticAveraging(), 1),
        ElasticAveraging(),
    ],
)
def test_what_is_no_phase(phase):
    with pytest.raises(InvalidArgumentError) as caught:
        Schedule([phase])
    assert f"got {phase!r} [SMB-E299]" in str(caught.value)


def test_a_phase_needs_a_rule():
    with pytest.raises(InvalidArgumentError, match="rule must be .*got 'elastic'"):
        Schedule([(0, "elastic")])


@pytest.mark.parametrize("begins", [[1], [0, 0], [0, 5, 4], [0, 5, 5], [5, 0]])
def test_order(begins):
    with pytest.raises(InvalidArgumentError) as caught:
        Schedule([(begin, ElasticAveraging()) for begin in begins])
    assert f"begin at step 0 and each later than the one before, got {begins}" in str(caught.value)


@pytest.mark.parametrize("unit", ["steps", "epochs", None, 1, ""])
def test_unit(unit):
    with pytest.raises(InvalidArgumentError, match=f"'step' or 'epoch', got {unit!r}"):
        Schedule(PHASES, unit=unit)


def test_at_most_64_phases():
    phases = [(begin, ElasticAveraging()) for begin in range(65)]
    assert len(Schedule(phases[:64]).phases) == 64
    with pytest.raises(InvalidArgumentError, match="at most 64 phases, got 65"):
        Schedule(phases)
