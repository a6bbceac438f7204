"""Which gradients are clipped, which count in the mean, and whether the first ones were outliers."""

from __future__ import annotations

import math

import pytest

from sanc.minibatch.gradient_norms import GradientNorms


def after_norms(*values, steps=0, weight=0.05):
    """Return the norms after these, without clipping, and the number of steps."""
    norms = GradientNorms()
    for k, value in enumerate(values, steps):
        norms = norms.after(k, value, value, weight)
    return norms, steps + len(values)


def test_norms_are_clipped_at_five_times_the_typical_one():
    """First the largest norm that two gradients in a row have reached, then the root mean square."""
    norms, steps = after_norms(1.0, 3.0, 2.0, 7.0)
    assert norms.clip_norm(steps) == 5 * 2.0 and norms.full_weight_norm(steps) == 0.0
    norms, steps = after_norms(2.0, 4.0, steps=21, weight=0.5)
    root = math.sqrt(0.5 * (0.5 * 1.0 + 0.5 * 4.0) + 0.5 * 16.0)
    assert norms.clip_norm(steps) == pytest.approx(5 * root, rel=1e-15)
    assert norms.full_weight_norm(steps) == pytest.approx(0.05 * root, rel=1e-15)


def test_two_outliers_in_a_row_do_not_count_and_a_third_does():
    norms, steps = after_norms(150.0, 150.0, steps=30)
    assert (norms.grad_norm_mean_square, norms.far_larger_gradients) == (1.0, 2)
    assert norms.after(steps, 150.0, 5.0, 0.05).grad_norm_mean_square == pytest.approx(0.95 + 0.05 * 25.0)
    norms, _ = after_norms(150.0, 1.0, 150.0, 150.0, steps=30)
    assert norms.grad_norm_mean_square == pytest.approx(1.0) and norms.far_larger_gradients == 2


@pytest.mark.parametrize(
    ("earlier", "norm", "expected"),
    [
        ((1.0,), 0.009, True),  # one gradient, a hundredth
        ((1.0,), 0.011, False),
        ((1.0, 1.0, 1.0), 0.009, False),  # later it takes two in a row, of a twenty-fifth
        ((1.0, 1.0, 1.0, 0.03), 0.039, True),
        ((1.0, 1.0, 1.0, 0.03, 1.0), 0.039, False),
        ((1.0, 1.0, 1.0, 0.03), 0.041, False),
        ((1.0,) * 20 + (0.03,), 0.03, False),  # no first steps
        ((), 0.001, False),
    ],
)
def test_first_gradients_far_larger_than_the_next_were_outliers(earlier, norm, expected):
    norms, steps = after_norms(*earlier)
    assert norms.began_with_outliers(steps, norm) == expected
