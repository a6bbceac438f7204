"""The ratio of actual and predicted decrease, and the classes of success."""

from __future__ import annotations

import math

import pytest

from sanc.core.ratio import Verdict, classify, ratio


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (0.81, Verdict.VERY_SUCCESSFUL),
        (0.8, Verdict.SUCCESSFUL),
        (0.2, Verdict.SUCCESSFUL),
        (0.19, Verdict.UNSUCCESSFUL),
        (-1.0, Verdict.UNSUCCESSFUL),
        (math.nan, Verdict.UNSUCCESSFUL),
        (math.inf, Verdict.UNSUCCESSFUL),
        (-math.inf, Verdict.UNSUCCESSFUL),
    ],
)
def test_classes(actual, expected):
    assert classify(actual, 1.0, 0.2, 0.8) is expected


def test_a_zero_prediction_never_divides():
    assert classify(1.0, 0.0, 0.2, 0.8) is Verdict.UNSUCCESSFUL
    assert math.isnan(ratio(1.0, 0.0))
    assert math.isnan(ratio(math.nan, 1.0))
    assert ratio(0.5, 1.0) == 0.5


def test_the_rounding_error_of_f_makes_the_ratio_of_two_roundings_one():
    assert classify(-1e-17, 1e-18, 0.1, 0.75, value_rounding=1e-14) is Verdict.VERY_SUCCESSFUL
    assert classify(-1e-17, 1e-18, 0.1, 0.75, value_rounding=0.0) is Verdict.UNSUCCESSFUL
