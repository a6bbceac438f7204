"""Intervals and tests of paired differences, against SciPy and values from the literature."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sanc.lab import statistics


@pytest.fixture
def differences(rng):
    return rng.normal(0.3, 1.0, 8)


def test_the_interval_is_that_of_students_t(differences):
    mean, low, high = statistics.mean_interval(differences)
    theirs = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    assert (mean, low, high) == pytest.approx((np.mean(differences), theirs.low, theirs.high))
    assert statistics.mean_interval([2.0]) == (2.0, -math.inf, math.inf)
    assert math.isnan(statistics.mean_interval([])[0])


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.7])
def test_one_sided_tests_are_those_of_scipy(differences, margin):
    less = stats.ttest_1samp(differences, margin, alternative="less").pvalue
    greater = stats.ttest_1samp(differences, margin, alternative="greater").pvalue
    assert statistics.below(differences, margin) == pytest.approx(less)
    assert statistics.above(differences, margin) == pytest.approx(greater)


@pytest.mark.parametrize("margin", [0.2, 0.9, 1.5, 3.0])
def test_equivalence_is_a_90_percent_interval_within_the_margin(differences, margin):
    interval = stats.ttest_1samp(differences, 0.0).confidence_interval(0.90)
    within = -margin < interval.low and interval.high < margin
    assert (statistics.equivalent(differences, margin) < 0.05) == within


def test_few_or_equal_differences_have_a_verdict():
    assert statistics.below([], 1.0) == statistics.below([0.0], 1.0) == statistics.equivalent([0.0], 1.0) == 1.0
    assert statistics.below([0.1] * 3, 1.0) == 0.0 and statistics.below([1.1] * 3, 1.0) == 1.0
    assert statistics.above([1.1] * 3, 1.0) == 0.0 and statistics.equivalent([0.0] * 2, 0.1) == 0.0


def test_the_sign_test_leaves_out_ties():
    assert statistics.sign_test(5, 0) == pytest.approx(2.0**-5)
    assert statistics.sign_test(3, 1) == pytest.approx(5 / 16)
    assert statistics.sign_test(0, 0) == 1.0


def test_holms_correction_by_hand():
    """0.005·4, then 0.01·3, then max(0.03·2, before), then max(0.04·1, before)."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.9, 0.8]) == [1.0, 1.0] and statistics.holm([]) == []
