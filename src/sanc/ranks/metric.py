"""Any metric for sharded parameters: each parameter that it couples is dealt to one rank, which keeps its state.

The shards of a gradient go to the owners, M⁻¹g comes back, each with one exchange (as in Distributed Shampoo, Shi et
al. 2023), so that factors, eigenproblems and the products with the bases are distributed. Other parameters are handled
where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sanc.autograd.given import GivenGradient
from sanc.autograd.leaves import Leaves
from sanc.core.oracle import Meter
from sanc.errors import ArgumentError, shown
from sanc.minibatch.metrics.base import Metric, Preconditioner, Reduce
from sanc.ranks.group import Ranks
from sanc.ranks.modes import DataParallel
from sanc.ranks.sharded import Modules, ShardedLeaves, ShardedOracle, as_shard, require_shards, rows_of


def deal(costs: Sequence[float], size: int) -> list[int]:
    """Give things to ranks, the dearest first, each to the one who has least."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    return owners


class Dealer:
    """Tensors that are sharded by rows, each of which belongs to one rank."""

    def __init__(self, ranks: Ranks, shapes: Sequence[tuple[int, ...]], owners: Sequence[int]) -> None:
        self._ranks, self._owners = ranks, owners
        self.own = [place for place, owner in enumerate(owners) if owner == ranks.rank]
        self._sizes = []  # of tensor, of rank
        for rows, *more in shapes:
            ends = [rows_of(rows, rank, ranks.size) for rank in range(ranks.size)]
            width = int(torch.Size(more).numel())
            self._sizes.append([(end - begin) * width for begin, end in ends])

    def to_owners(self, parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return the tensors of this rank, flat and whole, given its parts of all."""
        size = self._ranks.size
        by_owner = [[part for part, owner in zip(parts, self._owners, strict=True) if owner == r] for r in range(size)]
        counts = [[self._sizes[place][rank] for place in self.own] for rank in range(size)]
        came = self._exchange(by_owner, [sum(row) for row in counts], like)
        pieces = [torch.split_with_sizes(block, row) for block, row in zip(came, counts, strict=True)]
        return [torch.cat([pieces[rank][number] for rank in range(size)]) for number in range(len(self.own))]

    def to_shards(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Undo `to_owners`."""
        size, rank = self._ranks.size, self._ranks.rank
        cut = [torch.split_with_sizes(whole, self._sizes[p]) for whole, p in zip(wholes, self.own, strict=True)]
        by_rank = [[pieces[r] for pieces in cut] for r in range(size)]
        places = [[place for place, owner in enumerate(self._owners) if owner == r] for r in range(size)]
        counts = [[self._sizes[place][rank] for place in row] for row in places]
        came = self._exchange(by_rank, [sum(row) for row in counts], like)
        parts: list[Tensor] = [like] * len(self._owners)
        for block, row, wanted in zip(came, places, counts, strict=True):
            for place, piece in zip(row, torch.split_with_sizes(block, wanted), strict=True):
                parts[place] = piece
        return parts

    def _exchange(self, lists: Sequence[Sequence[Tensor]], wanted: list[int], like: Tensor) -> Sequence[Tensor]:
        """Send a list of flat tensors to every rank, and return what comes from each."""
        sent = [torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensor in row)]) for row in lists]
        buffer, came = torch.cat(sent), like.new_empty(sum(wanted))
        with self._ranks.waiting("parts of the metric", buffer):
            dist.all_to_all_single(came, buffer, wanted, [len(row) for row in sent], group=self._ranks.group)
        return torch.split_with_sizes(came, wanted)


class ShardedPreconditioner(Preconditioner):
    """Any metric for sharded parameters.

    A parameter whose entries the metric couples is dealt to one rank if it is sharded by rows. The others are handled
    where they lie, as vectors.
    """

    def __init__(self, metric: Metric, leaves: ShardedLeaves, like: Tensor) -> None:
        self._ranks, self._leaves, self._like = leaves.ranks, leaves, like.new_empty(0)
        self._sizes = [part.numel() for part in leaves.split(like)]
        shapes = [tuple(p.shape) for p in leaves.tensors]
        by_rows = [p.placements[0].dim == 0 for p in leaves.tensors]  # type: ignore[attr-defined]
        self._dealt = [p for p, shape in enumerate(shapes) if metric.couples(shape) and by_rows[p]]
        self._kept = [place for place in range(len(shapes)) if place not in self._dealt]
        dealt_shapes = [shapes[place] for place in self._dealt]
        owners = deal([_cost(shape) for shape in dealt_shapes], self._ranks.size)
        self._owners, self._dealer = owners, Dealer(self._ranks, dealt_shapes, owners)
        self._own = [self._dealt[number] for number in self._dealer.own]
        kept_shapes = [(self._sizes[place],) for place in self._kept]
        coupled = [place for place in self._kept if metric.couples((math.prod(shapes[place]),))]
        if coupled:
            raise ArgumentError(
                f"metric = {shown(metric)} couples the entries of a parameter of shape {shapes[coupled[0]]}, which is "
                "sharded: use sanc.Kronecker, sanc.Diagonal or sanc.Identity with sharded parameters."
            )
        self._mine = metric.create([shapes[place] for place in self._own], like) if self._own else None
        entries = sum(math.prod(shapes[place]) for place in self._kept)
        self._rest = metric.create(kept_shapes, like, self._reduce(entries)) if self._kept else None
        # What a rank saves of a parameter that another one owns: names and shapes, without memory.
        self._layout = metric.create(dealt_shapes, torch.empty(0, device="meta")).save() if self._dealt else []

    def _reduce(self, entries: int) -> Reduce:
        ranks = self._ranks
        return Reduce(
            total=lambda tensor: ranks.sum(tensor, "a sum over entries"),
            largest=lambda tensor: ranks.sum(tensor, "a largest entry", dist.ReduceOp.MAX),
            entries=entries,
        )

    def update(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        return self._applied(g, lambda inner, part: inner.update(part, weight, factor_weight))

    def apply(self, g: Tensor) -> Tensor:
        return self._applied(g, lambda inner, part: inner.apply(part))

    def _applied(self, g: Tensor, work: Callable[[Preconditioner, Tensor], Tensor]) -> Tensor:
        """Return M⁻¹g from the work of both preconditioners."""
        pieces = torch.split_with_sizes(g, self._sizes)
        found: dict[int, Tensor] = {}
        if self._rest is not None:
            rest = work(self._rest, torch.cat([self._like, *(pieces[place] for place in self._kept)]))
            parts = torch.split_with_sizes(rest, [self._sizes[place] for place in self._kept])
            found |= dict(zip(self._kept, parts, strict=True))
        if self._dealt:
            blocks = self._dealer.to_owners([pieces[place] for place in self._dealt], self._like)
            if self._mine is not None:
                whole = work(self._mine, torch.cat(blocks))
                blocks = list(torch.split_with_sizes(whole, [len(block) for block in blocks]))
            found |= dict(zip(self._dealt, self._dealer.to_shards(blocks, self._like), strict=True))
        return torch.cat([found[place] for place in range(len(self._sizes))])

    def refresh(self) -> None:
        if self._rest is not None:
            self._rest.refresh()
        if self._mine is not None:
            self._mine.refresh()

    def tensors(self) -> list[Tensor]:
        return [tensor for inner in (self._rest, self._mine) if inner is not None for tensor in inner.tensors()]

    def _names(self) -> tuple[list[tuple[int, str]], list[tuple[int, ...]], Dealer]:
        """Return which dealt parameter each saved tensor belongs to and its name, the shapes, and a dealer for them."""
        names, shapes, owners = [], [], []
        for place, owner, layout in zip(self._dealt, self._owners, self._layout, strict=True):
            for name, tensor in layout.items():
                names.append((place, name))
                shapes.append(tuple(tensor.shape))
                owners.append(owner)
        return names, shapes, Dealer(self._ranks, shapes, owners)

    def save(self) -> list[dict[str, Tensor]]:
        """Return for every parameter its tensors, sharded by rows, or like the parameter."""
        found: list[dict[str, Tensor]] = [{} for _ in self._sizes]
        if self._dealt:
            names, shapes, dealer = self._names()
            mine = dict(zip(self._own, self._mine.save(), strict=True)) if self._mine is not None else {}
            wholes = [mine[names[number][0]][names[number][1]].reshape(-1) for number in dealer.own]
            parts = dealer.to_shards(wholes, self._like)
            for (place, name), shape, part in zip(names, shapes, parts, strict=True):
                like = self._leaves.tensors[place]
                found[place][name] = as_shard(part.reshape(-1, *shape[1:]), like, torch.Size(shape))
        if self._rest is not None:
            for place, saved in zip(self._kept, self._rest.save(), strict=True):
                leaf = self._leaves.tensors[place]
                for name, tensor in saved.items():
                    if name in self._rest.like_parameter:
                        found[place][name] = as_shard(tensor.view(self._leaves.held(leaf).shape), leaf)
                    else:  # the same on all ranks
                        begin, end = rows_of(len(tensor), self._ranks.rank, self._ranks.size)
                        found[place][name] = as_shard(tensor[begin:end].clone(), leaf, tensor.shape)
        return found

    def restore(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        held = self._leaves.held
        if self._rest is not None:
            kept = []
            for place in self._kept:
                entry = {}
                for name, tensor in saved[place].items():
                    part = held(tensor).reshape(-1)
                    entry[name] = part if name in self._rest.like_parameter else self._gathered(part, tensor.shape)
                kept.append(entry)
            self._rest.restore(kept)
        if not self._dealt:
            return
        names, shapes, dealer = self._names()
        parts: list[Any] = [held(saved[place][name]).reshape(-1) for place, name in names]
        wholes = dict(zip(dealer.own, dealer.to_owners(parts, self._like), strict=True))
        mine: dict[int, dict[str, Tensor]] = {place: {} for place in self._own}
        for number, whole in wholes.items():
            mine[names[number][0]][names[number][1]] = whole.view(shapes[number])
        if self._mine is not None:
            self._mine.restore(list(mine.values()))

    def _gathered(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor of which each rank holds rows."""
        whole = part.new_zeros(shape)
        begin, end = rows_of(shape[0], self._ranks.rank, self._ranks.size)
        whole[begin:end] = part.view(-1, *shape[1:])
        return self._ranks.sum(whole, "the metric")


def _cost(shape: Sequence[int]) -> float:
    """Return the cost of a parameter, in products with its eigenbases."""
    rows = shape[0] if len(shape) > 1 else 1
    return float(rows**3 + (math.prod(shape) // max(rows, 1)) ** 3)


class Sharded(DataParallel):
    """Parameters, and the vectors of the method, lie in parts on the ranks."""

    whole = False

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

    def oracle(self, leaves: Leaves, **how: Any) -> ShardedOracle:
        return ShardedOracle(self.ranks, leaves, **how)

    def given(self, leaves: Leaves, point: Tensor, meter: Meter) -> GivenGradient:
        return GivenGradient(leaves, point, meter)  # averaged in the backward pass

    def metric(self, metric: Metric, shapes: Sequence[tuple[int, ...]], like: Tensor) -> Preconditioner:
        assert self._leaves is not None
        return ShardedPreconditioner(metric, self._leaves, like)
