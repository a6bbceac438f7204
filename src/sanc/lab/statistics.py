"""Intervals and tests of differences that are paired by seed, and the correction for several tests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def mean_interval(differences: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return the mean with the ends of its confidence interval by Student's t; infinite ends for fewer than two."""
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return (float(values.mean()) if len(values) else math.nan), -math.inf, math.inf
    mean, error = float(values.mean()), float(stats.sem(values))
    reach = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean, mean - reach, mean + reach


def below(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of the hypothesis that the mean is at least `margin`: small if the mean is surely below it.

    Fewer than two differences give 1. Equal differences have no variance; then the p-value is 0 or 1.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) < 2:
        return 1.0
    mean, error = float(values.mean()), float(stats.sem(values))
    if error <= np.finfo(np.float64).eps * max(abs(mean), abs(margin)):
        return 0.0 if mean < margin else 1.0
    return float(stats.t.cdf((mean - margin) / error, len(values) - 1))


def above(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of the hypothesis that the mean is at most `margin`."""
    return below([-difference for difference in differences], -margin)


def equivalent(differences: Sequence[float], margin: float) -> float:
    """Return the p-value of the two one-sided tests (TOST): small if the mean surely lies within ±`margin`.

    Schuirmann (1987). It is below 5 % if the 90 % interval of the mean lies within ±`margin`.
    """
    return max(below(differences, margin), above(differences, -margin))


def sign_test(wins: int, losses: int) -> float:
    """Return the p-value of the hypothesis that a win is at most as likely as a loss; ties are left out."""
    trials = wins + losses
    return float(stats.binomtest(wins, trials, alternative="greater").pvalue) if trials else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for testing them all (Holm 1979), in the same order."""
    adjusted, running, count = [0.0] * len(p_values), 0.0, len(p_values)
    for rank, index in enumerate(np.argsort(p_values, kind="stable")):
        running = max(running, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted
