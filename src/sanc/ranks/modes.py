"""Modes: how an optimiser distributes its work, over one process or over the ranks of a group.

A mode constructs the components of the optimiser's driver: leaves, oracle and preconditioner. The driver itself does
not depend on the number of ranks.
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
    """All work is done by this process.

    Attributes
    ----------
    path : tuple of int
        Integers that are combined with the seed for the randomness of this rank's closures.
    """

    path: tuple[int, ...] = ()

    def seed(self, seed: int | None) -> int:
        """Return the given seed, or draw one from torch's generator."""
        return int(torch.randint(2**62, (), dtype=torch.int64)) if seed is None else seed

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        """Return the flat layout of parameters, with their weight decays and learning rates."""
        return Leaves(tensors, decays, rates)

    def oracle(self, leaves: Leaves, **options: Any) -> AutogradOracle:
        """Return the oracle that evaluates closures."""
        return AutogradOracle(leaves, **options)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        """Return the oracle of a step without a closure: the gradients in ``.grad`` of the leaves."""
        return GivenGradient(leaves, point, meter)

    def metric(self, metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
        """Return a preconditioner for parameters of these shapes."""
        return metric.create(shapes, like)

    def begin(self, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any]) -> None:
        """Prepare for an optimiser that is constructed with these groups and settings."""

    def loaded(self) -> None:
        """Prepare for the first step after a state was loaded."""

    def stepped(self, groups: Sequence[Mapping[str, Any]], iterates: Any) -> None:
        """Finish a step."""


class DataParallel(OneProcess):
    """Average over the ranks, which hold the same parameters and evaluate different batches.

    The ranks are compared after `every` steps; 0: never.

    Attributes
    ----------
    whole : bool
        Whether every rank holds the whole parameters.
    """

    whole = True

    def __init__(self, ranks: Ranks, every: int) -> None:
        self.ranks, self._every = ranks, every
        self.path = (ranks.rank,)
        self._due = True  # whether the next step is compared even if `every` does not divide its number

    def __reduce__(self) -> Any:
        return rejoin, (self._every,)  # a process group cannot be pickled

    def __deepcopy__(self, memo: Any) -> DataParallel:
        return self

    def seed(self, seed: int | None) -> int:
        if seed is not None:
            return seed
        local = torch.tensor([super().seed(None)], device=self.ranks.device)
        return int(self.ranks.all_gather(local, "a seed")[0])  # of rank 0

    def oracle(self, leaves: Leaves, **options: Any) -> AutogradOracle:
        return AveragingOracle(self.ranks, leaves, **options)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        oracle = GivenGradient(leaves, point, meter)
        local = oracle.g
        (_, mean), _ = average(self.ranks, lambda: ([], local), "a gradient", like=local, reduced="perhaps")
        assert mean is not None
        oracle.g = mean
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
    """Return the mode for the default group of this process, after an optimiser was unpickled."""
    ranks = find_ranks(DEFAULT)
    return OneProcess() if ranks is None else DataParallel(ranks, every)
