"""Parameter groups of an optimiser: their entries, the parameters to optimise, and how messages name a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from sanc.autograd.leaves import Leaves
from sanc.autograd.masters import LOW_PRECISION
from sanc.errors import ArgumentError, ArgumentTypeError, is_number, nearest, require, require_bool, shown

Groups = Sequence[Mapping[str, Any]]

_FOREIGN_ENTRIES = {"name", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr"}
"""Entries that torch, its schedulers and loggers of learning rates write into groups, or read from them."""
_SCHEDULED_ENTRIES = {"momentum", "max_momentum", "base_momentum"}
"""Entries that OneCycleLR and CyclicLR write into groups. They have no effect, so that a caller may not pass them."""
_TYPES = (torch.float32, torch.float64, *LOW_PRECISION)
"""Types of parameters. Those of low precision may be used beside float32."""


def check_group(group: Mapping[str, Any], defaults: Mapping[str, Any], *, saved: bool = False) -> None:
    """Raise an error if a group has an unknown entry, or a value that cannot be used; `saved`: it was saved before."""
    known_entries = {"params", "lr", "weight_decay", "frozen"}
    for name, value in group.items():
        if name not in known_entries | _FOREIGN_ENTRIES | (_SCHEDULED_ENTRIES if saved else set()):
            raise ArgumentError(
                f"group option {name!r} (= {shown(value)}) is not known: {nearest(name, known_entries)}"
            )
    if "params" not in group:
        raise ArgumentError(f"group {shown(dict(group))} has no entry 'params': pass its parameters as 'params'.")
    _check_values(dict(defaults) | dict(group))


def _check_values(group: Mapping[str, Any]) -> None:
    """Raise an error if a value of a group cannot be used; schedulers may have written it."""
    for name in ("weight_decay", "lr"):
        value = group[name]
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        require(is_number(number) and 0 <= number < math.inf, name, value, "pass a finite number ≥ 0")
    require_bool("frozen", group["frozen"])


def leaves_to_optimise(
    groups: Groups, make_leaves: Callable[..., Leaves] = Leaves, last: Leaves | None = None
) -> Leaves:
    """Return the trainable parameters: those that are not frozen and require a gradient.

    They are `last` itself, the leaves of the last step, if nothing has changed since then.
    """
    for group in groups:
        _check_values(group)
    trained = [
        (p, float(group["weight_decay"]), float(group["lr"]))
        for group in groups
        if not group["frozen"]
        for p in group["params"]
        if p.requires_grad
    ]
    empty_message = (
        "params has nothing to optimise: all are frozen, empty or have requires_grad=False; free at least one."
    )
    if not trained:
        raise ArgumentError(empty_message)
    leaves, decays, rates = zip(*trained, strict=True)
    if last is not None and last.fits(leaves, decays, rates) and not any(map(_shares_entries, leaves)):
        return last
    first = leaves[0]
    for p in leaves:
        reason = _reason_against(p, first)
        if reason:
            raise ArgumentTypeError(f"params[{label_of(groups, p)}] {reason}.")
    if not any(p.numel() for p in leaves):
        raise ArgumentError(empty_message)
    layout = make_leaves(leaves, decays, rates)
    if max(decays) > torch.finfo(layout.dtype).max:
        raise ArgumentError(f"weight_decay = {max(decays)!r} cannot be used with {layout.dtype}: pass a smaller one.")
    return layout


def require_full_precision(groups: Groups, leaves: Leaves, reason: str) -> None:
    """Raise an error with this reason, if a trainable parameter is of low precision."""
    for p in leaves.tensors:
        if p.dtype in LOW_PRECISION:
            raise ArgumentTypeError(
                f"params[{label_of(groups, p)}] is of {p.dtype}, {reason}, or keep parameters in float32 and use "
                "torch.autocast for lower precision."
            )


def _reason_against(p: Tensor, first: Tensor) -> str:
    """Return why a parameter cannot be optimised together with the first one, and the remedy; empty if it can."""
    if is_lazy(p):
        return "has no shape yet: run the model on one batch before the optimiser is constructed"
    if p.device.type == "meta":
        return "is on the device 'meta' and has no values: call model.to_empty(device=…) and initialise it first"
    if p.is_complex():
        return f"is of {p.dtype}: optimise the real tensor torch.view_as_real(…) of it, and make it complex in the loss"
    if p.dtype not in _TYPES:
        return f"is of {p.dtype}: keep parameters in float32, and use torch.autocast for lower precision"
    if p.layout != torch.strided:
        return f"has the layout {p.layout}: pass dense parameters"
    if _shares_entries(p):
        return "has entries that share memory, as after expand(): pass a parameter of a contiguous tensor"
    if (p.dtype == torch.float64) != (first.dtype == torch.float64) or p.device != first.device:
        return (
            f"is of {p.dtype} on {p.device}, and the first one of {first.dtype} on {first.device}: put all parameters "
            "to optimise on one device in one type"
        )
    return ""


def _shares_entries(p: Tensor) -> bool:
    """Return whether entries of a tensor share memory, as after expand()."""
    strides = p.stride()
    return 0 in strides and any(stride == 0 and side > 1 for stride, side in zip(strides, p.shape, strict=True))


def label_of(groups: Groups, parameter: Tensor) -> str:
    """Return how messages name a parameter: by its name, if named parameters were given, or by its index."""
    for number, group in enumerate(groups):
        for index, p in enumerate(group["params"]):
            if p is parameter:
                names = group.get("param_names")
                return repr(names[index]) if names else f"{index}" if len(groups) == 1 else f"group {number}, {index}"
    return "?"
