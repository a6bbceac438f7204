"""Whether all ranks still hold the same: parameters and decisions, compared at the start and then now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sanc.ranks.group import Ranks, digest, fingerprint

_START = (
    "give all ranks the same before the optimiser is made (the same seed, a checkpoint, or DistributedDataParallel, "
    "which copies what rank 0 has), or pass process_group=None where each rank is to train for itself."
)
_LATER = (
    "the ranks have trained different models since they were last compared. Go back to a checkpoint; look for what "
    "changes parameters on one rank alone, for learning rates or weight decays that differ, and for ranks on different "
    "kinds of devices."
)


def named(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """Return the parameters of an optimiser, and what they are called in messages."""
    names, tensors = [], []
    for number, group in enumerate(groups):
        known = group.get("param_names") or [f"{place} of group {number}" for place in range(len(group["params"]))]
        names += [f"parameter {name} of shape {tuple(p.shape)}" for name, p in zip(known, group["params"], strict=True)]
        tensors += group["params"]
    return names, tensors


def compare_start(ranks: Ranks, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any], whole: bool) -> None:
    """Complain where optimisers are made of different parameters, which are compared where whole, or settings."""
    names, tensors = named(groups)
    device = tensors[0].device
    described = [str((name, p.dtype, p.requires_grad)) for name, p in zip(names, tensors, strict=True)]
    marks = [digest(settings | _options(groups)), digest({"number": len(names)}), digest(dict(enumerate(described)))]  # type: ignore[arg-type]
    kinds = ("one of the settings (seed, preset, options, lr, weight_decay …)", "the number of parameters",
             "name, shape, type or requires_grad of a parameter")  # fmt: skip
    ranks.compare(torch.cat(marks).to(device), kinds, "the settings", _START)
    if whole:
        ranks.compare(_marks(tensors), names, "the parameters", _START)


def compare_step(ranks: Ranks, groups: Sequence[Mapping[str, Any]], decisions: dict[str, Any], whole: bool) -> None:
    """Complain where parameters, or what was decided on the way to them, are not the same on all ranks."""
    names, tensors = named(groups)
    entries = ["one of lr, weight_decay and frozen", "the state of the method (σ, counts, means of the loss)"]
    row = torch.cat([digest(_options(groups)), digest(decisions)]).to(tensors[0].device)
    if whole:
        entries, row = [*names, *entries], torch.cat([_marks(tensors), row])
    ranks.compare(row, entries, "a comparison", _LATER)


def _options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what groups hold beside parameters, as far as steps depend on it."""
    return {"groups": [[float(group[name]) for name in ("lr", "weight_decay", "frozen")] for group in groups]}


def _marks(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([fingerprint(tensor) for tensor in tensors])


def compare_call(ranks: Ranks, arguments: dict[str, Any], x: Any) -> None:
    """Complain where a minimisation is started with different arguments, or at different points."""
    row = torch.cat([digest(arguments), fingerprint(torch.as_tensor(x))]).to(ranks.device)
    remedy = "call sanc.minimize with the same arguments, but for the rows of the sum, on all ranks."
    ranks.compare(row, ("one of the arguments (method, seed, limits, settings …)", "x0"), "the arguments", remedy)
