"""The norms of gradients in the averaged phase: which are clipped, which count, and whether the first were outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RELIABLE_MEAN_STEPS = 20
"""Averaged steps after which running means are reliable."""
_CLIPPING_FACTOR = 5.0
"""A gradient norm this many times the typical one is clipped to that, so that one bad batch changes little. The typical
norm is the root mean square. In the first steps it is the largest norm so far that two gradients in a row have reached,
because rare rows may have far larger gradients."""
_MAX_COUNTED_NORM_FACTOR = 100.0
"""A gradient norm this many times the typical one does not count in the mean square, unless it is the third in a row:
outliers leave it as it is, and a change of the objective is followed. Rare rows have smaller ratios: with the gradients
of one batch in n larger, the logistic regression of a bias has a ratio of n, and the mean square counts them."""
_FIRST_OUTLIERS, _REPEATED_FIRST_OUTLIERS = 100.0, 25.0
"""If the first gradient norms are all this many times the next ones, they were outliers, or the loss had another scale,
and averaging is restarted. One gradient has to be smaller by the first factor, two in a row by the second."""
_SINGLE_FIRST_STEPS = 2
"""Averaged steps within which one far smaller gradient shows that the first ones were outliers. Later it takes two in a
row, since a batch may have a small gradient by chance."""
_FULL_WEIGHT_NORM_RATIO = 0.05
"""Gradient norms below this many times the typical norm reduce the weight of their iterate, by a power of the ratio
(`_WEIGHT_POWER` in averaging.py). Otherwise x would approach a z that does not move, as after a change of the loss
scale."""


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Norms of the gradients of the averaged phase, in units of the norm of the first one.

    The methods receive the number of averaged steps made before this gradient.

    Attributes
    ----------
    grad_norm_mean_square : float
        Running mean of the squares, without outliers.
    largest_grad_norm : float
        The largest norm so far that two gradients in a row have reached, in the first steps.
    last_grad_norm : float
        The norm of the last gradient.
    smallest_grad_norm : float
        The smallest norm in the first steps, without those far smaller than all before.
    far_smaller_gradients : int
        Consecutive gradients far smaller than all before.
    far_larger_gradients : int
        Consecutive gradients far larger than the typical one.
    """

    grad_norm_mean_square: float = 1.0
    largest_grad_norm: float = 1.0
    last_grad_norm: float = 1.0
    smallest_grad_norm: float = 1.0
    far_smaller_gradients: int = 0
    far_larger_gradients: int = 0

    def clip_norm(self, steps: int) -> float:
        """Return the largest norm that is not clipped; the first gradient never is."""
        return _CLIPPING_FACTOR * self._typical_norm(steps)

    def full_weight_norm(self, steps: int) -> float:
        """Return the smallest norm whose iterate has its full weight in the average."""
        return _FULL_WEIGHT_NORM_RATIO * self._typical_norm(steps) if steps > RELIABLE_MEAN_STEPS else 0.0

    def after(self, steps: int, norm: float, clipped_norm: float, weight: float) -> GradientNorms:
        """Return the norms with one more, before and after clipping, of this weight in the mean."""
        mean_square, is_early = self.grad_norm_mean_square, steps <= RELIABLE_MEAN_STEPS
        is_far_larger = norm > _MAX_COUNTED_NORM_FACTOR * math.sqrt(mean_square) and not is_early
        counts = not is_far_larger or self.far_larger_gradients >= 2
        updated = replace(
            self,
            grad_norm_mean_square=mean_square + weight * (clipped_norm**2 - mean_square) * counts,
            last_grad_norm=clipped_norm,
            far_larger_gradients=self.far_larger_gradients + 1 if is_far_larger else 0,
        )
        if not is_early:
            return updated
        largest = max(self.largest_grad_norm, min(clipped_norm, self.last_grad_norm))
        if self._is_far_smaller(clipped_norm):
            return replace(updated, largest_grad_norm=largest, far_smaller_gradients=self.far_smaller_gradients + 1)
        smallest = min(self.smallest_grad_norm, clipped_norm)
        return replace(updated, largest_grad_norm=largest, smallest_grad_norm=smallest, far_smaller_gradients=0)

    def began_with_outliers(self, steps: int, norm: float) -> bool:
        """Return whether this gradient, or this one and the last, are so small that all before were outliers."""
        is_single = steps <= _SINGLE_FIRST_STEPS and _FIRST_OUTLIERS * norm < self.smallest_grad_norm
        is_repeated = self.far_smaller_gradients > 0 and self._is_far_smaller(norm)
        return 0 < steps <= RELIABLE_MEAN_STEPS and (is_single or is_repeated)

    def _typical_norm(self, steps: int) -> float:
        """Return the typical norm."""
        return math.sqrt(self.grad_norm_mean_square) if steps > RELIABLE_MEAN_STEPS else self.largest_grad_norm

    def _is_far_smaller(self, norm: float) -> bool:
        """Return whether a norm is far smaller than all before."""
        return _REPEATED_FIRST_OUTLIERS * norm < self.smallest_grad_norm
