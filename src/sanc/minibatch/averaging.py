"""A step in the metric, and the running average of the points it leads to: what a step on samples does to vectors.

Steps are made on z, the gradient is taken at y between z and the average x, and x is what is handed out (schedule-free
learning, Defazio et al. 2024): noise averages out without the step having to die.

    y = x + (1 − β)(z − x),   z ← z − η M⁻¹∇f(y),   x ← x + c (z − x),   c = k^p / Σ_i i^p

Only x and the offset z − x are kept, so that whoever moves the parameters from outside moves both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sanc.minibatch.metric import Metric
from sanc.minibatch.scale import MEMORY


class AveragedStep:
    """The vector work of one step, which the host reads when all of it is done, so that it can be recorded.

    Parameters
    ----------
    metric : Metric
        M, whose second moments learn from every gradient.
    averaging : float
        β.
    learns : bool
        Whether its factors and the distance learn, too, which need not be in every step.
    total : callable, optional
        Adds up sums over the entries of vectors, where others hold the rest of the entries.
    """

    def __init__(
        self, metric: Metric, averaging: float, learns: bool, total: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.metric, self.averaging, self.learns, self._total = metric, averaging, learns, total

    def tensors(self) -> list[Tensor]:
        """Return what it changes in place."""
        return self.metric.tensors()

    def point(self, x: Tensor, offset: Tensor) -> Tensor:
        """Return y, where the gradient is taken."""
        return torch.add(x, offset, alpha=1.0 - self.averaging)

    def __call__(
        self,
        value: Tensor,
        g: Tensor,
        x: Tensor,
        offset: Tensor | None,
        numbers: Tensor,
        rates: Tensor | None = None,
        start: Tensor | None = None,
        drift: Tensor | None = None,
    ) -> list[Tensor]:
        """Return what the host reads, the new x, the new offset, and the new drift where there was one.

        `numbers`, in float64, are the longest g that is not cut, the factor of g, its weights in the second moments and
        in the factors, η, c and λ. Where f or g is not finite the metric learns nothing, and whoever reads that stays
        at x. What is read: f, ‖g‖, gᵀM⁻¹g (in units of the factor), ‖z − x‖², ‖x‖² before and after, and for the
        distance the 1-norms of s/η and of z − x, ⟨p, x_0 − z⟩ and the 1-norm of the drift.
        """
        norm = torch.linalg.vector_norm(g, dtype=torch.float64)
        if self._total is not None:
            norm = self._total(norm.square()).sqrt()
        usable = torch.isfinite(value + norm)
        longest, factor, *more = numbers.unbind()
        g = torch.where(usable, g * (factor * (longest / torch.maximum(norm, longest))), 0.0)
        offset = torch.zeros_like(x) if offset is None else offset
        weight, factor_weight, eta, share, trust = (torch.stack(more) * usable).to(g.dtype).unbind()
        direction = self.metric.direction(g, weight, factor_weight if self.learns else None)
        step = direction if rates is None else direction * rates
        away = torch.addcmul(offset, step, eta, value=-1.0)
        new = [torch.addcmul(x, away, share), torch.addcmul(away, away, share, value=-1.0)]
        read = [torch.dot(u, v) for u, v in ((g, direction), (away, away), (x, x), (new[0], new[0]))]
        if start is not None and drift is not None:
            new.append(torch.addcmul(MEMORY * drift, direction, trust))
            read += [step.abs().sum(), new[1].abs().sum(), torch.dot(direction, start - x - offset)]
            read.append(new[2].abs().sum())
        sums = torch.stack(read).double()
        return [torch.cat([torch.stack([value, norm]), sums if self._total is None else self._total(sums)]), *new]
