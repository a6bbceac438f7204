"""How the work of an optimiser lies on processes: on one, or on the ranks of a group, each with its own batch.

A mode makes the parts that the optimiser's driver is put together from; none of these parts asks how many ranks there
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.given import GivenGradient
from sanc.autograd.leaves import Leaves
from sanc.autograd.oracle import AutogradOracle
from sanc.core.oracle import Meter
from sanc.minibatch.metrics.base import Metric, Preconditioner
from sanc.ranks.compare import compare_start, compare_step
from sanc.ranks.group import DEFAULT, Ranks, find_ranks
from sanc.ranks.oracle import AveragingOracle, average


class OneProcess:
    """Everything is here.

    Attributes
    ----------
    path : tuple of int
        What the randomness of this rank's closures depends on beside the seed.
    """

    path: tuple[int, ...] = ()

    def seed(self, seed: int | None) -> int:
        """Return the seed given, or one from torch's generator."""
        return int(torch.randint(2**62, (), dtype=torch.int64)) if seed is None else seed

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        """Lay out parameters."""
        return Leaves(tensors, decays, rates)

    def oracle(self, leaves: Leaves, **how: Any) -> AutogradOracle:
        """Make what evaluates closures."""
        return AutogradOracle(leaves, **how)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        """Make what knows the gradients in the leaves."""
        return GivenGradient(leaves, point, meter)

    def metric(self, metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
        """Create a preconditioner."""
        return metric.create(shapes, like)

    def begin(self, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any]) -> None:
        """Hear of an optimiser that is made."""

    def loaded(self) -> None:
        """Hear that a state was loaded."""

    def stepped(self, groups: Sequence[Mapping[str, Any]], iterates: Any) -> None:
        """Hear that a step was made."""


class DataParallel(OneProcess):
    """The same parameters on all ranks, and a batch on each: what is computed from batches is averaged.

    `every` is after how many steps the ranks are compared; 0: never.
    """

    whole = True  # whether the parameters are the same on all ranks

    def __init__(self, ranks: Ranks, every: int) -> None:
        self.ranks, self._every = ranks, every
        self.path = (ranks.rank,)
        self._due = True  # whether the next step is compared whatever its number

    def __reduce__(self) -> Any:
        return rejoin, (self._every,)  # a group is of its processes, and cannot be packed

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def seed(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        own = torch.tensor([super().seed(None)], device=self.ranks.device)
        return int(self.ranks.table(own, "a seed")[0])  # of rank 0

    def oracle(self, leaves: Leaves, **how: Any) -> AutogradOracle:
        return AveragingOracle(self.ranks, leaves, **how)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        oracle = GivenGradient(leaves, point, meter)
        own = oracle.slope
        (_, mean), _ = average(self.ranks, lambda: ([], own), "a gradient", like=own, reduced="perhaps")
        assert mean is not None
        oracle.slope = mean
        return oracle

    def begin(self, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any]) -> None:
        compare_start(self.ranks, groups, settings, self.whole)

    def loaded(self) -> None:
        self._due = True

    def stepped(self, groups: Sequence[Mapping[str, Any]], iterates: Any) -> None:
        if self._every and (self._due or iterates.state.iteration % self._every == 0):
            self._due = False
            compare_step(self.ranks, groups, iterates.numbers(), self.whole)


def rejoin(every: int) -> OneProcess:
    """Return the mode for the group that is initialised now."""
    ranks = find_ranks(DEFAULT)
    return OneProcess() if ranks is None else DataParallel(ranks, every)
