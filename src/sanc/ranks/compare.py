"""Comparison of settings, parameters and decisions over the ranks, at the start and at regular intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sanc.ranks.group import Ranks, digest, fingerprint

_REMEDY_AT_START = (
    "make them equal on all ranks before you construct the optimiser (the same seed, a checkpoint, or "
    "DistributedDataParallel, which copies the parameters of rank 0), or pass process_group=None to train each rank "
    "on its own."
)
_REMEDY_LATER = (
    "the ranks have trained different models since the last comparison. Load a checkpoint. Then check for code that "
    "changes parameters on one rank only, for learning rates or weight decays that differ, and for ranks on different "
    "kinds of devices."
)


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """Return the names of an optimiser's parameters, for messages, and the parameters."""
    names, tensors = [], []
    for number, group in enumerate(groups):
        known = group.get("param_names") or [f"{index} of group {number}" for index in range(len(group["params"]))]
        names += [f"parameter {name} of shape {tuple(p.shape)}" for name, p in zip(known, group["params"], strict=True)]
        tensors += group["params"]
    return names, tensors


def compare_start(ranks: Ranks, groups: Sequence[Mapping[str, Any]], settings: dict[str, Any], whole: bool) -> None:
    """Raise `RanksError` if the ranks construct optimisers with different settings or parameters.

    The values of parameters are compared only if every rank holds the `whole` parameters.
    """
    names, tensors = named_parameters(groups)
    device = tensors[0].device
    described = [str((name, p.dtype, p.requires_grad)) for name, p in zip(names, tensors, strict=True)]
    options = settings | _group_options(groups)
    digests = [digest(options), digest({"number": len(names)}), digest(dict(enumerate(described)))]  # type: ignore[arg-type]
    kinds = ("one of the settings (seed, preset, options, lr, weight_decay …)", "the number of parameters",
             "name, shape, type or requires_grad of a parameter")  # fmt: skip
    ranks.compare(torch.cat(digests).to(device), kinds, "the settings", _REMEDY_AT_START)
    if whole:
        ranks.compare(_fingerprints(tensors), names, "the parameters", _REMEDY_AT_START)


def compare_step(ranks: Ranks, groups: Sequence[Mapping[str, Any]], decisions: dict[str, Any], whole: bool) -> None:
    """Raise `RanksError` if parameters or decisions differ between the ranks after a step."""
    names, tensors = named_parameters(groups)
    entries = ["one of lr, weight_decay and frozen", "the state of the method (σ, counts, means of the loss)"]
    row = torch.cat([digest(_group_options(groups)), digest(decisions)]).to(tensors[0].device)
    if whole:
        entries, row = [*names, *entries], torch.cat([_fingerprints(tensors), row])
    ranks.compare(row, entries, "a comparison", _REMEDY_LATER)


def _group_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of parameter groups that steps depend on."""
    return {"groups": [[float(group[name]) for name in ("lr", "weight_decay", "frozen")] for group in groups]}


def _fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([fingerprint(tensor) for tensor in tensors])


def compare_call(ranks: Ranks, arguments: dict[str, Any], x: Any) -> None:
    """Raise `RanksError` if the ranks start a minimisation with different arguments or at different points."""
    row = torch.cat([digest(arguments), fingerprint(torch.as_tensor(x))]).to(ranks.device)
    remedy = "call sanc.minimize with the same arguments on all ranks; only the rows of the sum may differ."
    ranks.compare(row, ("one of the arguments (method, seed, limits, settings …)", "x0"), "the arguments", remedy)
