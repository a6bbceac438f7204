"""Whether a run that noise in f has stalled continues."""

from __future__ import annotations

import math

from sanc.core.runs.noise_estimates import measure_noise
from sanc.core.runs.run import Run

_MAX_NOISE_FRACTION = 1e-2
"""Largest noise that is tolerated, as a fraction of f and of its decrease in the run: more would show in the result."""


def tolerable_noise(run: Run) -> float:
    """Return the noise of f with which a stalled run can continue; 0 if there is none, or too much of it.

    Where values are noisy and gradients are not, as after a quadrature or an inner iteration with a tolerance, models
    still predict steps to a minimum, but no value confirms them. Differences of values are of use with steps that suit
    the noise. A run tolerates noise only once.
    """
    oracle = run.oracle
    if run.step_monitor.noise_tolerated or not run.has_measured_sigma:
        return 0.0
    noise, value = measure_noise(oracle, run.x, run.first_length_scale), oracle.gradient(run.x)[0]
    size = max(run.findings.first_value - value, abs(value))
    return noise if noise <= _MAX_NOISE_FRACTION * size < math.inf else 0.0
