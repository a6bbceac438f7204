"""Metrics for sharded parameters: one rank, the owner, keeps the state of each parameter whose entries M couples.

One exchange sends the shards of a gradient to the owners, another sends the shards of M⁻¹g back, as in Distributed
Shampoo (Shi et al. 2023). So factors, eigenproblems and the products with the eigenbases are distributed. For other
parameters each rank handles its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sanc.autograd.gradient_only import GradientOnlyOracle
from sanc.autograd.leaves import Leaves
from sanc.core.meter import Meter
from sanc.errors import ArgumentError, shown
from sanc.minibatch.metrics.base import Metric, Preconditioner, RankReduction, create_on_meta
from sanc.ranks.group import Ranks
from sanc.ranks.modes import DataParallel
from sanc.ranks.sharded import FullyShardedModules, ShardedLeaves, ShardedOracle, as_shard, require_shards, row_range


def assign_owners(costs: Sequence[float], size: int) -> list[int]:
    """Return an owner for each parameter: the most expensive first, each to the rank with the smallest load."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


class OwnerExchange:
    """Exchanges of tensors that are sharded by rows between all ranks and the owner of each tensor.

    Attributes
    ----------
    owned : list of int
        Indices of the tensors that this rank owns.
    """

    def __init__(self, ranks: Ranks, shapes: Sequence[tuple[int, ...]], owners: Sequence[int]) -> None:
        self._ranks, self._owners = ranks, owners
        self.owned = [index for index, owner in enumerate(owners) if owner == ranks.rank]
        self._sizes = []  # entries of a tensor on each rank
        for rows, *more in shapes:
            ranges = [row_range(rows, rank, ranks.size) for rank in range(ranks.size)]
            width = int(torch.Size(more).numel())
            self._sizes.append([(end - begin) * width for begin, end in ranges])

    def to_owners(self, parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return the tensors that this rank owns, whole and flat, given its parts of all tensors."""
        size = self._ranks.size
        by_owner = [[part for part, owner in zip(parts, self._owners, strict=True) if owner == r] for r in range(size)]
        counts = [[self._sizes[index][rank] for index in self.owned] for rank in range(size)]
        received = self._exchange(by_owner, [sum(row) for row in counts], like)
        pieces = [torch.split_with_sizes(block, row) for block, row in zip(received, counts, strict=True)]
        return [torch.cat([pieces[rank][number] for rank in range(size)]) for number in range(len(self.owned))]

    def to_shards(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's parts of all tensors, given the whole tensors that it owns."""
        size, rank = self._ranks.size, self._ranks.rank
        split = [torch.split_with_sizes(whole, self._sizes[i]) for whole, i in zip(wholes, self.owned, strict=True)]
        by_rank = [[pieces[r] for pieces in split] for r in range(size)]
        owned_by = [[index for index, owner in enumerate(self._owners) if owner == r] for r in range(size)]
        counts = [[self._sizes[index][rank] for index in row] for row in owned_by]
        received = self._exchange(by_rank, [sum(row) for row in counts], like)
        parts: list[Tensor] = [like] * len(self._owners)
        for block, row, sizes in zip(received, owned_by, counts, strict=True):
            for index, piece in zip(row, torch.split_with_sizes(block, sizes), strict=True):
                parts[index] = piece
        return parts

    def _exchange(self, lists: Sequence[Sequence[Tensor]], counts: list[int], like: Tensor) -> Sequence[Tensor]:
        """Send a list of tensors to each rank, and return the flat block that comes from each, of these sizes."""
        sent = [torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in row)]) for row in lists]
        buffer, received = torch.cat(sent), like.new_empty(sum(counts))
        with self._ranks.collective("parts of the metric", buffer):
            dist.all_to_all_single(received, buffer, counts, [len(row) for row in sent], group=self._ranks.group)
        return torch.split_with_sizes(received, counts)


class ShardedPreconditioner(Preconditioner):
    """The preconditioner of any metric for sharded parameters.

    A parameter that is sharded by rows, and whose entries M couples, is assigned to one rank, its owner. For all other
    parameters each rank handles its shard as a vector.
    """

    def __init__(self, metric: Metric, leaves: ShardedLeaves, like: Tensor) -> None:
        self._ranks, self._leaves, self._like = leaves.ranks, leaves, like.new_empty(0)
        self._sizes = [part.numel() for part in leaves.split(like)]
        shapes = [tuple(p.shape) for p in leaves.tensors]
        by_rows = [p.placements[0].dim == 0 for p in leaves.tensors]  # type: ignore[attr-defined]
        self._assigned = [index for index, shape in enumerate(shapes) if metric.couples(shape) and by_rows[index]]
        self._sharded = [index for index in range(len(shapes)) if index not in self._assigned]
        assigned_shapes = [shapes[index] for index in self._assigned]
        self._owners = assign_owners([_cost(shape) for shape in assigned_shapes], self._ranks.size)
        self._exchange = OwnerExchange(self._ranks, assigned_shapes, self._owners)
        self._owned = [self._assigned[number] for number in self._exchange.owned]
        sharded_shapes = [(self._sizes[index],) for index in self._sharded]
        coupled = [index for index in self._sharded if metric.couples((math.prod(shapes[index]),))]
        if coupled:
            raise ArgumentError(
                f"metric = {shown(metric)} couples the entries of a parameter of shape {shapes[coupled[0]]}, which is "
                "not sharded by rows: shard it by rows, as fully_shard does by default, or use sanc.Kronecker or "
                "sanc.Diagonal."
            )
        self._on_owned = metric.create([shapes[index] for index in self._owned], like) if self._owned else None
        entries = sum(math.prod(shapes[index]) for index in self._sharded)
        self._on_shards = metric.create(sharded_shapes, like, self._reduce(entries)) if self._sharded else None
        # Parts, and names and shapes of the saved tensors, also of parameters of other ranks; "meta" needs no memory.
        self._whole = create_on_meta(metric, shapes)
        self.always_finite = self._whole.always_finite

    def _reduce(self, entries: int) -> RankReduction:
        """Return the sums and maxima over the ranks that hold these entries together."""
        ranks = self._ranks
        return RankReduction(
            total=lambda tensor: ranks.sum(tensor, "a sum over entries"),
            largest=lambda tensor: ranks.sum(tensor, "a largest entry", dist.ReduceOp.MAX),
            entries=entries,
        )

    def update(self, g: Tensor, weight: Tensor | float) -> Tensor:
        return self._applied(g, lambda inner, part: inner.update(part, weight))

    def apply(self, g: Tensor) -> Tensor:
        return self._applied(g, lambda inner, part: inner.apply(part))

    def _applied(self, g: Tensor, work: Callable[[Preconditioner, Tensor], Tensor]) -> Tensor:
        """Return M⁻¹g, where `work` returns it for each of the two inner preconditioners."""
        pieces = torch.split_with_sizes(g, self._sizes)
        directions: dict[int, Tensor] = {}
        if self._on_shards is not None:
            shards = work(self._on_shards, torch.cat([self._like, *(pieces[index] for index in self._sharded)]))
            parts = torch.split_with_sizes(shards, [self._sizes[index] for index in self._sharded])
            directions |= dict(zip(self._sharded, parts, strict=True))
        if self._assigned:
            blocks = self._exchange.to_owners([pieces[index] for index in self._assigned], self._like)
            if self._on_owned is not None:
                whole = work(self._on_owned, torch.cat(blocks))
                blocks = list(torch.split_with_sizes(whole, [len(block) for block in blocks]))
            directions |= dict(zip(self._assigned, self._exchange.to_shards(blocks, self._like), strict=True))
        return torch.cat([directions[index] for index in range(len(self._sizes))])

    @property
    def parts(self) -> int:
        return self._whole.parts

    def part_of(self, index: int) -> int:
        return self._whole.part_of(index)

    def refresh(self, part: int = 0) -> None:
        """Refresh what a single process would refresh, so that the steps do not depend on the number of ranks."""
        for inner, indices in ((self._on_shards, self._sharded), (self._on_owned, self._owned)):
            if inner is None:
                continue
            first: dict[int, int] = {}  # by part of `inner`: the part of the whole in which it is refreshed
            for number, index in enumerate(indices):
                first.setdefault(inner.part_of(number), self.part_of(index))
            for inner_part, whole_part in first.items():
                if whole_part == part:
                    inner.refresh(inner_part)

    def tensors(self) -> list[Tensor]:
        return [tensor for inner in self._inner() for tensor in inner.tensors()]

    def _inner(self) -> list[Preconditioner]:
        return [inner for inner in (self._on_shards, self._on_owned) if inner is not None]

    def _saved_layout(self) -> tuple[list[tuple[int, str]], list[tuple[int, ...]], OwnerExchange]:
        """Return parameter index and name of each saved tensor, the shapes, and the exchange for these tensors."""
        names, shapes, owners = [], [], []
        layout = self._whole.save()
        for index, owner in zip(self._assigned, self._owners, strict=True):
            for name, tensor in layout[index].items():
                names.append((index, name))
                shapes.append(tuple(tensor.shape))
                owners.append(owner)
        return names, shapes, OwnerExchange(self._ranks, shapes, owners)

    def save(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each parameter's state, sharded by rows or like the parameter."""
        state: list[dict[str, Tensor]] = [{} for _ in self._sizes]
        if self._assigned:
            names, shapes, exchange = self._saved_layout()
            owned = dict(zip(self._owned, self._on_owned.save(), strict=True)) if self._on_owned is not None else {}
            wholes = [owned[names[number][0]][names[number][1]].reshape(-1) for number in exchange.owned]
            parts = exchange.to_shards(wholes, self._like)
            for (index, name), shape, part in zip(names, shapes, parts, strict=True):
                like = self._leaves.tensors[index]
                state[index][name] = as_shard(part.reshape(-1, *shape[1:]), like, torch.Size(shape))
        if self._on_shards is not None:
            for index, saved in zip(self._sharded, self._on_shards.save(), strict=True):
                leaf = self._leaves.tensors[index]
                for name, tensor in saved.items():
                    if name in self._on_shards.like_parameter:
                        state[index][name] = as_shard(tensor.view(self._leaves.local_tensor(leaf).shape), leaf)
                    else:  # the tensor is the same on all ranks
                        begin, end = row_range(len(tensor), self._ranks.rank, self._ranks.size)
                        state[index][name] = as_shard(tensor[begin:end].clone(), leaf, tensor.shape)
        return state

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        local_tensor = self._leaves.local_tensor
        if self._on_shards is not None:
            shards = []
            for index in self._sharded:
                entry = {}
                for name, tensor in saved[index].items():
                    part = local_tensor(tensor).reshape(-1)
                    entry[name] = part if name in self._on_shards.like_parameter else self._gathered(part, tensor.shape)
                shards.append(entry)
            self._on_shards.restore(shards)
        if not self._assigned:
            return
        names, shapes, exchange = self._saved_layout()
        parts: list[Any] = [local_tensor(saved[index][name]).reshape(-1) for index, name in names]
        wholes = dict(zip(exchange.owned, exchange.to_owners(parts, self._like), strict=True))
        owned: dict[int, dict[str, Tensor]] = {index: {} for index in self._owned}
        for number, whole in wholes.items():
            owned[names[number][0]][names[number][1]] = whole.view(shapes[number])
        if self._on_owned is not None:
            self._on_owned.restore(list(owned.values()))

    def _gathered(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return the whole tensor of which each rank holds some rows."""
        whole = part.new_zeros(shape)
        begin, end = row_range(shape[0], self._ranks.rank, self._ranks.size)
        whole[begin:end] = part.view(-1, *shape[1:])
        return self._ranks.sum(whole, "the metric")


def _cost(shape: Sequence[int]) -> float:
    """Return the cost of a parameter: eigenproblems and products with both eigenbases grow as n³."""
    rows = shape[0] if len(shape) > 1 else 1
    return float(rows**3 + (math.prod(shape) // max(rows, 1)) ** 3)


class Sharded(DataParallel):
    """Parameters and the vectors of the method are sharded over the ranks."""

    whole = False

    def __init__(self, ranks: Ranks, every: int) -> None:
        super().__init__(ranks, every)
        self._modules = FullyShardedModules()
        self._leaves: ShardedLeaves | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an optimiser of sharded parameters cannot be pickled: save its state_dict(), or call sanc.save_checkpoint"
        )

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        require_shards(tensors)
        self._leaves = ShardedLeaves(self.ranks, self._modules, tensors, decays, rates)
        return self._leaves

    def oracle(self, leaves: Leaves, **options: Any) -> ShardedOracle:
        return ShardedOracle(self.ranks, leaves, **options)

    def gradient_oracle(self, leaves: Leaves, point: Tensor, meter: Meter) -> GradientOnlyOracle:
        self.ranks.agree()
        return GradientOnlyOracle(leaves, point, meter)  # fully_shard averages in the backward pass

    def preconditioner(self, metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
        assert self._leaves is not None
        return ShardedPreconditioner(metric, self._leaves, like)
