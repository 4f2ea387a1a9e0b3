"""Exchange rules: what they accept, what they refuse, what they tell the core."""

import dataclasses
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tf_smb import rules
from tf_smb.errors import InvalidArgumentError
from tf_smb.rules import (
    CoreRule,
    DeltaAveraging,
    ElasticAveraging,
    PeriodicAveraging,
    ReadThenAccumulate,
)

RULES = [ElasticAveraging, DeltaAveraging, PeriodicAveraging, ReadThenAccumulate]
NO_NUMBERS = [True, False, np.bool_(True), "0.5", b"1", [0.5], (1,), {}, object(), 1j, Decimal(1)]
NO_RATES = [0, 0.0, -0.0, -0.1, float("nan"), float("inf"), -float("inf"), np.float32("nan")]
HUGE = 10**400


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("period", [1, 10, 10**9, np.int64(3), np.uint8(200)])
def test_period_accepted(rule, period):
    assert rule(communication_period=period).communication_period == period


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "period", [*NO_NUMBERS, None, 0, -1, 10**9 + 1, HUGE, 1.0, 10.0, np.float64(2), np.array([1])]
)
def test_period_refused(rule, period):
    with pytest.raises(InvalidArgumentError) as caught:
        rule(communication_period=period)
    assert str(caught.value).startswith(
        "communication_period must be an integer number of steps from 1 to 1000000000, got "
        f"{period!r} [SMB-E290]"
    )


@pytest.mark.parametrize(
    "rate", [1e-6, 0.5, 1, 1.0, np.float32(0.25), np.float16(0.5), np.int32(1), Fraction(1, 2)]
)
@pytest.mark.parametrize("rule", [ElasticAveraging, ReadThenAccumulate])
def test_moving_rate_accepted(rule, rate):
    core = rule(moving_rate=rate).core_rule()
    assert core == CoreRule("elastic", float(rate), False, rule is ElasticAveraging)
    assert type(core.rate) is float


@pytest.mark.parametrize("rate", [*NO_NUMBERS, *NO_RATES, 1.0000001, 2, HUGE, np.array([0.5])])
@pytest.mark.parametrize(
    ("rule", "or_none"), [(ElasticAveraging, ", or None"), (ReadThenAccumulate, "")]
)
def test_moving_rate_refused(rule, or_none, rate):
    with pytest.raises(InvalidArgumentError) as caught:
        rule(moving_rate=rate)
    assert str(caught.value).startswith(
        f"moving_rate must be a number above 0 and at most 1{or_none}, got {rate!r}"
    )


def test_moving_rate_none_follows_the_live_workers():
    assert ElasticAveraging().core_rule() == ("elastic", 0.9, True, True, False)


def test_periodic_averaging_is_synchronous():
    assert PeriodicAveraging().communication_period == 16
    assert PeriodicAveraging(3).core_rule().synchronous
    assert not any(
        rule().core_rule().synchronous for rule in RULES if rule is not PeriodicAveraging
    )


def test_read_then_accumulate_is_the_papers():
    assert ReadThenAccumulate() == ReadThenAccumulate(1, 0.2)
    with pytest.raises(InvalidArgumentError):
        ReadThenAccumulate(moving_rate=None)


@pytest.mark.parametrize(
    ("rate", "stable"), [(0.2, 8), (0.21, 8), (0.5, 2), (2 / 3, 1), (0.9, 1), (1.0, 0)]
)
def test_stability_bound_by_simulation(rate, stable):
    """`is_stable` is what happens: workers in step that read one center, then all add to it."""
    rule = ReadThenAccumulate(moving_rate=rate)
    assert rule.is_stable(stable)
    assert not rule.is_stable(stable + 1)
    for workers in (stable, stable + 1):
        x, center = np.arange(1.0, workers + 1), 0.0
        apart = []
        for _ in range(600):
            d = rate * (x - center)
            x, center = x - d, center + d.sum()
            apart.append(abs(x.mean() - center) if workers else 0.0)
        assert (apart[-1] < 1e-3) == (workers == stable)


@pytest.mark.parametrize("gain", [1e-6, 1, 1.5, 2.0, np.float64(2)])
def test_gain_accepted(gain):
    assert DeltaAveraging(gain=gain).core_rule() == CoreRule("delta", float(gain), True)


@pytest.mark.parametrize("gain", [None, *NO_NUMBERS, *NO_RATES, 2.0000001, HUGE])
def test_gain_refused(gain):
    with pytest.raises(InvalidArgumentError) as caught:
        DeltaAveraging(gain=gain)
    assert "gain must be a number above 0 and at most 2" in str(caught.value)
    assert repr(gain) in str(caught.value)


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_values(rule):
    assert rule() == rule()
    assert rule(5) != rule(6)
    assert hash(rule(5)) == hash(rule(5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule().communication_period = 3


def test_none_is_the_default():
    assert rules.check_rule(None) == rules.default_rule() == DeltaAveraging()


@pytest.mark.parametrize(
    "rule", [ElasticAveraging(3), DeltaAveraging(4), PeriodicAveraging(2), ReadThenAccumulate()]
)
def test_check_rule_gives_it_back(rule):
    assert rules.check_rule(rule) is rule


@pytest.mark.parametrize(
    "rule", ["elastic", 0.5, ElasticAveraging, DeltaAveraging, rules.ExchangeRule(), [], {}]
)
def test_check_rule_names_the_classes(rule):
    with pytest.raises(InvalidArgumentError) as caught:
        rules.check_rule(rule)
    for name in ("ElasticAveraging", "DeltaAveraging", "PeriodicAveraging", "ReadThenAccumulate"):
        assert f"tf_smb.{name}(...)" in str(caught.value)
    assert repr(rule) in str(caught.value)


def test_base_class_has_no_rule():
    with pytest.raises(TypeError, match="use tf_smb.DeltaAveraging"):
        rules.ExchangeRule().core_rule()
