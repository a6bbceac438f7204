"""The lower bound of the distance to a solution, against its definition."""

from __future__ import annotations

import numpy as np
import pytest

from sanc.minibatch.distance import DistanceBound, DistanceSums, is_due


def test_the_bound_is_the_quotient_of_its_sums():
    """d = Σ λ_i⟨p_i, x_0 − z_i⟩/‖Σ λ_i p_i‖_1/u with λ_i = 0.002·d_i² and sums that decay by 0.998."""
    rng = np.random.default_rng(0)
    bound, numerator, direction_sum, d = DistanceBound(), 0.0, np.zeros(4), 1e-6
    for steps in range(60):
        p, offset = rng.standard_normal(4), rng.standard_normal(4)
        numerator = 0.998 * numerator + 0.002 * d * d * (p @ offset)
        direction_sum = 0.998 * direction_sum + 0.002 * d * d * p
        d = max(d, numerator / np.abs(direction_sum).sum() / 0.1)
        sums = DistanceSums(1.0, 0.5, p @ offset, np.abs(direction_sum).sum())
        bound = bound.after(steps, sums, eta=0.1, average_weight=0.2, parameter_unit=0.1)
        assert bound.distance_bound == pytest.approx(d, rel=1e-9)
    assert d > 1e-4
    unchanged = bound.after(60, DistanceSums(1.0, 0.5, 1.0, 0.0), eta=0.1, average_weight=0.2, parameter_unit=0.1)
    assert unchanged.distance_bound == bound.distance_bound


def test_steps_are_aligned_if_the_offset_is_nearly_the_sum_of_their_norms():
    """After 20 steps an update stands for five, and their norms decay as z − x does."""
    for steps, kept in ((19, 0.8), (20, 0.8**5)):
        before = DistanceBound(step_norm1_sum=3.0)
        interval = 1 if steps < 20 else 5
        total = 3.0 * kept + 0.8 * interval * 0.1 * 2.0
        for fraction, aligned in ((0.69, False), (0.71, True)):
            sums = DistanceSums(2.0, fraction * total, 0.0, 1.0)
            after = before.after(steps, sums, eta=0.1, average_weight=0.2, parameter_unit=1.0)
            assert after.step_norm1_sum == pytest.approx(total, rel=1e-12) and after.is_aligned == aligned
    assert [k for k in range(41) if is_due(k)] == [*range(20), 20, 25, 30, 35, 40]
