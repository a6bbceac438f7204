"""The mode in which parameters are sharded, and everything that belongs to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from sanc.autograd.given import GivenGradient
from sanc.autograd.leaves import Leaves
from sanc.autograd.oracle import AutogradOracle
from sanc.core.oracle import Meter
from sanc.minibatch.metric import Metric
from sanc.ranks.group import Ranks
from sanc.ranks.metric import DealtMetric
from sanc.ranks.modes import DataParallel
from sanc.ranks.sharded import Modules, ShardedLeaves, ShardedOracle, require_shards


class Sharded(DataParallel):
    """Parameters, and the vectors of the method, lie in parts on the ranks."""

    def __init__(self, ranks: Ranks, every: int) -> None:
        super().__init__(ranks, every)
        self._modules = Modules()
        self._leaves: ShardedLeaves | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an optimiser of sharded parameters cannot be pickled: save its state_dict()")

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        require_shards(tensors)
        self._leaves = ShardedLeaves(self.ranks, self._modules, tensors, decays, rates)
        return self._leaves

    def oracle(self, leaves: Leaves, **how: Any) -> AutogradOracle:
        return ShardedOracle(self.ranks, leaves, **how)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        return GivenGradient(leaves, point, meter)  # averaged in the backward pass

    def metric(self, shapes: Sequence[tuple[int, ...]], kind: Any, like: Tensor, largest_side: int) -> Metric:
        assert self._leaves is not None
        return DealtMetric(self._leaves, kind, like, largest_side)

    def compared(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return ()  # each rank has others
