"""Sharded parameters (`fully_shard`, DTensor): every vector is sharded like the parameters.

An inner product is a local sum and one collective of a number. The backward pass of `fully_shard` averages gradients.
Its graph cannot be differentiated again, because it ends in gathered parameters that are freed after the pass. So
Hessian products are differences of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from sanc.autograd.generators import derive_seed
from sanc.autograd.guards import before_forward, is_traced
from sanc.autograd.leaves import Grads, Leaves
from sanc.core.space import Space
from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.ranks.group import Ranks
from sanc.ranks.oracle import AveragingOracle


def require_shards(params: Sequence[Tensor]) -> Any:
    """Return the process group of the mesh over which all parameters are sharded; raise an error if there is none."""
    first = params[0]
    for p in params:
        if not isinstance(p, DTensor) or not isinstance(first, DTensor):
            raise ArgumentTypeError(
                "params mix sharded parameters (DTensor) with plain ones: call fully_shard on the whole model first, "
                "and construct the optimiser before a forward pass, which gathers parameters."
            )
        if p.device_mesh != first.device_mesh or p.device_mesh.ndim != 1 or not isinstance(p.placements[0], Shard):
            raise ArgumentTypeError(
                f"params hold a tensor placed as {p.placements} on {p.device_mesh}: shard all of them over one mesh of "
                "one dimension, as fully_shard(model) does."
            )
    assert isinstance(first, DTensor)
    return first.device_mesh.get_group()


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return begin and end of a rank's rows, as DTensor splits them: equal parts, of which the last may be shorter."""
    part = -(-rows // size)
    return min(rows, rank * part), min(rows, (rank + 1) * part)


class ShardedSpace(Space):
    """Vectors of which each rank holds a part; inner products and norms refer to the whole vectors."""

    def __init__(self, leaves: ShardedLeaves) -> None:
        super().__init__(sum(p.numel() for p in leaves.tensors), leaves.dtype, leaves.device)
        self._ranks, self._local_dim, self._leaves = leaves.ranks, leaves.dim, leaves
        self.sum_over_ranks = self._sum

    def _sum(self, numbers: Tensor) -> Tensor:
        return self._ranks.sum(numbers.double(), "inner products")

    def inner(self, u: Any, v: Any) -> Any:
        return self._sum(super().inner(u, v))

    def unread_norm(self, v: Any) -> Any:
        return self._sum(torch.linalg.vector_norm(v, dtype=torch.float64).square()).sqrt()

    def zeros(self) -> Any:
        return torch.zeros(self._local_dim, dtype=self.dtype, device=self.device)

    def normal(self, rng: np.random.Generator) -> Any:
        return self._leaves.local_part(torch.from_numpy(rng.standard_normal(self.dim)))

    def normal_on_device(self, seed: int) -> Any:
        generator = torch.Generator(self.device).manual_seed(derive_seed(seed, self._ranks.rank))
        return torch.randn(self._local_dim, generator=generator, dtype=self.dtype, device=self.device)

    def rows(self, count: int) -> Any:
        return torch.empty((count, self._local_dim), dtype=self.dtype, device=self.device)

    def orthogonalise(self, v: Any, rows: Any) -> Any:
        coefficients = self._sum(torch.mv(rows, v))
        v.addmv_(rows.t(), coefficients.to(self.dtype), alpha=-1.0)
        return coefficients


class ShardedLeaves(Leaves):
    """Parameters of which this rank holds a part."""

    def __init__(
        self,
        ranks: Ranks,
        modules: FullyShardedModules,
        tensors: Sequence[Tensor],
        decays: Sequence[float],
        rates: Sequence[float] = (),
    ) -> None:
        self.ranks, self._modules = ranks, modules
        super().__init__(tensors, decays, rates)

    def local_tensor(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.to_local()

    def space(self) -> Space:
        return ShardedSpace(self)

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole vector."""
        parts, sizes = [], [p.numel() for p in self.tensors]
        for leaf, piece in zip(self.tensors, torch.split_with_sizes(whole, sizes), strict=True):
            dim = leaf.placements[0].dim  # type: ignore[attr-defined]
            begin, end = row_range(leaf.shape[dim], self.ranks.rank, self.ranks.size)
            parts.append(piece.view(leaf.shape).narrow(dim, begin, end - begin).reshape(-1))
        return torch.cat(parts).to(self.device, self.dtype)

    def write(self, vector: Tensor) -> None:
        super().write(vector)
        self._modules.reshard()

    def penalised(self, loss: Tensor, x: Tensor) -> Tensor:
        """Add this rank's part of the penalty times the number of ranks, so that the mean contains all parts once."""
        return loss.detach().double() + self.ranks.size * super().penalised(torch.zeros_like(loss), x)

    def pack(self, vector: Tensor) -> list[Tensor]:
        return [as_shard(part, leaf) for part, leaf in zip(self.split(vector), self.tensors, strict=True)]


def as_shard(part: Tensor, like: Any, shape: torch.Size | None = None) -> Tensor:
    """Return the DTensor of which `part` is this rank's shard: placed as `like`, or by rows if the shape differs."""
    shape = like.shape if shape is None else shape
    whole = torch.empty(shape, device="meta")
    placements = like.placements if shape == like.shape else [Shard(0)]
    return DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class FullyShardedModules:
    """The modules under `fully_shard` that ran.

    After a pass without gradients such a module may keep its gathered parameters. It would use these stale copies after
    the optimiser changed the parameters.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[FSDPModule] = weakref.WeakSet()
        seen = self._seen

        def see(module: torch.nn.Module, inputs: object) -> None:
            if isinstance(module, FSDPModule) and not is_traced():
                seen.add(module)

        weakref.finalize(self, before_forward(see).remove)

    def reshard(self) -> None:
        """Free gathered parameters, so that the next pass gathers the current ones."""
        for module in list(self._seen):
            module.reshard()


def reshard(model: torch.nn.Module) -> None:
    """Free gathered parameters of a model under `fully_shard`, so that its parameters are sharded ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class ShardedOracle(AveragingOracle):
    """f, g and Hv of closures over sharded parameters."""

    reduced = "yes"

    def __init__(self, ranks: Ranks, leaves: Leaves, **options: Any) -> None:
        if options["hvp"] not in ("auto", "finite-difference"):
            raise ArgumentError(
                f"hvp = {options['hvp']!r} cannot be used with sharded parameters, whose backward pass cannot be "
                "differentiated: leave hvp out to use differences of gradients."
            )
        super().__init__(ranks, leaves, **options | {"hvp": "finite-difference"})

    def differentiate(self, loss: Tensor, create_graph: bool) -> Grads:
        loss.backward()  # type: ignore[no-untyped-call]
        return self._pop_grads()
