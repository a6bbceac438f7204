"""The metric of sharded parameters: every matrix is dealt to one rank, which keeps its factors and its bases.

The shards of a gradient go to the owners of the matrices, M⁻¹g comes back, each with one exchange (as in Distributed
Shampoo, Shi et al. 2023), so that factors, eigenproblems and the products with the bases are shared out. What is not
turned is worked on where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from sanc.autograd.given import GivenGradient
from sanc.autograd.leaves import Leaves
from sanc.core.oracle import Meter
from sanc.minibatch.metric import Metric, MetricKind, floor, turned_sides
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


class DealtMetric(Metric):
    """M of sharded parameters; a matrix that is not sharded by rows is not turned."""

    def __init__(self, leaves: ShardedLeaves, kind: MetricKind, like: Tensor, largest_side: int) -> None:
        self._ranks, self._leaves, self._like = leaves.ranks, leaves, like.new_empty(0)
        self._scalar, self._largest_side = kind == "none", largest_side
        self._sizes = [part.numel() for part in leaves.split(like)]
        shapes = {}
        for place, p in enumerate(leaves.tensors):
            sides = turned_sides(tuple(p.shape), largest_side) if kind == "kronecker" else None
            if sides is not None and p.placements[0].dim == 0:  # type: ignore[attr-defined]
                shapes[place] = sides
        self._places, self._shapes = list(shapes), list(shapes.values())
        self._unturned = [place for place in range(len(self._sizes)) if place not in shapes]
        costs = [float(sum(side**3 for side in sides if side <= largest_side)) for sides in self._shapes]
        self._owners = deal(costs, self._ranks.size)
        self._dealer = Dealer(self._ranks, self._shapes, self._owners)
        mine = [self._shapes[place] for place in self._dealer.own]
        self._mine = Metric(mine, "kronecker", like, largest_side) if mine else None
        lengths = [self._sizes[place] for place in self._unturned]
        self._square, self._floor = like.new_zeros(sum(lengths)), like.new_zeros(())
        self._entries = sum(leaves.tensors[place].numel() for place in self._unturned)

    def direction(self, g: Tensor, weight: Tensor | float, factor_weight: Tensor | float | None = None) -> Tensor:
        pieces = torch.split_with_sizes(g, self._sizes)
        rest = torch.cat([self._like, *(pieces[place] for place in self._unturned)])
        square = rest.square()
        if self._scalar:
            square = (self._ranks.sum(square.sum().double(), "a mean") / self._entries).to(g.dtype).expand_as(square)
        self._square.lerp_(square, weight)
        rest = rest / (self._square.sqrt() + self._floor)
        turned: list[Tensor] = []
        if self._places:
            blocks = self._dealer.to_owners([pieces[place] for place in self._places], self._like)
            if self._mine is not None:
                found = self._mine.direction(torch.cat(blocks), weight, factor_weight)
                blocks = list(torch.split_with_sizes(found, [len(block) for block in blocks]))
            turned = self._dealer.to_shards(blocks, self._like)
        return self._put_together(rest, turned)

    def _put_together(self, rest: Tensor, turned: Sequence[Tensor]) -> Tensor:
        """Bring what is not turned, and the parts of the matrices, into the order of the parameters."""
        lengths = [self._sizes[place] for place in self._unturned]
        found = dict(zip(self._unturned, torch.split_with_sizes(rest, lengths), strict=True))
        found |= dict(zip(self._places, turned, strict=True))
        return torch.cat([found[place] for place in range(len(self._sizes))])

    def renew(self) -> None:
        largest = torch.cat([self._square, self._square.new_zeros(1)]).amax()
        self._floor.copy_(floor(self._ranks.sum(largest, "a largest entry", dist.ReduceOp.MAX)))
        if self._mine is not None:
            self._mine.renew()

    def tensors(self) -> list[Tensor]:
        return [self._square, self._floor, *(self._mine.tensors() if self._mine is not None else ())]

    def squares(self) -> Tensor:
        """Return this rank's part of V; of a matrix, rows of the V that its owner has in the basis of the matrix."""
        whole: list[Tensor] = []
        if self._mine is not None:
            sizes = [self._shapes[place][0] * self._shapes[place][1] for place in self._dealer.own]
            whole = list(torch.split_with_sizes(self._mine.squares(), sizes))
        turned = self._dealer.to_shards(whole, self._like) if self._places else []
        return self._put_together(self._square, turned)

    def _factor_dealer(self) -> tuple[list[tuple[int, str]], list[tuple[int, int]], Dealer]:
        """Return whose the factors and bases are and what they are called, their shapes, and who deals them."""
        names, shapes, owners = [], [], []
        for place, sides, owner in zip(self._places, self._shapes, self._owners, strict=True):
            for number, name in enumerate(("left", "right", "left_basis", "right_basis")):
                side = sides[number % 2]
                if side <= self._largest_side:
                    names.append((place, name))
                    shapes.append((side, side))
                    owners.append(owner)
        return names, shapes, Dealer(self._ranks, shapes, owners)

    def factors(self) -> list[dict[str, Tensor]]:
        """Return for every parameter its factors and bases, sharded by rows."""
        found: list[dict[str, Tensor]] = [{} for _ in self._sizes]
        if not self._places:
            return found
        names, shapes, dealer = self._factor_dealer()
        mine = dict(zip(self._own_places(), self._mine.factors(), strict=True)) if self._mine is not None else {}
        wholes = [mine[names[number][0]][names[number][1]].reshape(-1) for number in dealer.own]
        parts = dealer.to_shards(wholes, self._like)
        for (place, name), shape, part in zip(names, shapes, parts, strict=True):
            like = self._leaves.tensors[place]
            found[place][name] = as_shard(part.reshape(-1, shape[1]), like, torch.Size(shape))
        return found

    def _own_places(self) -> list[int]:
        return [self._places[number] for number in self._dealer.own]

    def floors(self) -> list[float]:
        """Return ε of every matrix, and that of the rest."""
        row = self._floor.new_zeros(len(self._places) + 1)
        if self._mine is not None:
            for number, value in zip(self._mine.turned(), self._mine.floors(), strict=True):
                row[self._dealer.own[number]] = value
        found: list[float] = self._ranks.sum(row, "ε of the metric").tolist()
        return [*found[:-1], float(self._floor)]

    def restore(self, squares: Tensor, factors: Sequence[Mapping[str, Tensor]], floors: Sequence[float]) -> None:
        pieces = torch.split_with_sizes(squares, self._sizes)
        self._floor.fill_(floors[-1])
        self._square.copy_(torch.cat([self._like, *(pieces[place] for place in self._unturned)]))
        if not self._places:
            return
        names, shapes, dealer = self._factor_dealer()
        parts: list[Any] = [self._leaves.held(factors[place][name]).reshape(-1) for place, name in names]
        wholes = dict(zip(dealer.own, dealer.to_owners(parts, self._like), strict=True))
        found: dict[int, dict[str, Tensor]] = {place: {} for place in self._own_places()}
        for number, whole in wholes.items():
            found[names[number][0]][names[number][1]] = whole.view(shapes[number])
        mine = self._dealer.to_owners([pieces[place] for place in self._places], self._like)
        if self._mine is not None:
            for held in found.values():
                for name in ("left", "right", "left_basis", "right_basis"):
                    held.setdefault(name, self._like.new_zeros(0, 0))
            own = [floors[self._dealer.own[number]] for number in self._mine.turned()]
            self._mine.restore(torch.cat(mine), list(found.values()), own)


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

    def metric(self, shapes: Sequence[tuple[int, ...]], kind: Any, like: Tensor, largest_side: int) -> Metric:
        assert self._leaves is not None
        return DealtMetric(self._leaves, kind, like, largest_side)
