"""Comparison of settings, parameters and decisions over the ranks: at the start, in every step, and in full at times.

Every step sends four digests with an exchange that it makes anyway. Only if they differ, further collectives find out
which parameter or option it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from sanc.errors import RanksError
from sanc.ranks.group import Differences, Ranks, digest, fingerprint, quick_fingerprint, short_digest

_PARAMETERS, _OPTIONS, _VALUES, _DECISIONS, _SIZE, _FAILED = range(6)
"""Columns of a claim: the four digests of `claim_step`, and the two that `Ranks.claim` appends."""

_REMEDY_AT_START = (
    "make them equal on all ranks before you construct the optimiser (the same seed, a checkpoint, or "
    "DistributedDataParallel, which copies the parameters of rank 0), or pass process_group=None to train each rank "
    "on its own."
)
_REMEDY_FOR_DECISIONS = (
    "the ranks have trained different models since the last comparison. Load a checkpoint. Then check for code that "
    "changes parameters on one rank only, for learning rates or weight decays that differ, and for ranks on different "
    "kinds of devices."
)

_REMEDY_FOR_OPTIONS = (
    "change parameters, requires_grad, lr, weight_decay and frozen on all ranks alike, between the same steps. If the "
    "ranks have trained different models, load a checkpoint."
)

_REMEDY_FOR_CALLS = (
    "call load_state_dict, add_param_group, eval and train of the optimiser on all ranks, between the same steps."
)

_REMEDY_FOR_VALUES = (
    "it was changed on one rank only, or eval() or train() was called on one rank only, or the ranks have "
    "trained different models. Change parameters and call these methods on all ranks alike, use ranks on one kind of "
    "device, and load a checkpoint to continue."
)


def named_parameters(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """Return the names of an optimiser's parameters, for messages, and the parameters."""
    names, tensors = [], []
    for number, group in enumerate(groups):
        labels = group.get("param_names") or [f"{index} of group {number}" for index in range(len(group["params"]))]
        names += [
            f"parameter {name} of shape {tuple(p.shape)}" for name, p in zip(labels, group["params"], strict=True)
        ]
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
    kinds = (
        "one of the settings (seed, preset, options, lr, compare_every …)",
        "the number of parameters",
        "name, shape, type or requires_grad of a parameter",
    )
    ranks.compare(torch.cat(digests).to(device), kinds, "the settings", _REMEDY_AT_START)
    if whole:
        ranks.compare(_fingerprints(tensors), names, "the parameters", _REMEDY_AT_START)


class RankFailedError(RanksError):
    """Another rank raised an error before the first exchange of a step; nothing else differs."""


class ParameterDigests:
    """Digests of the set of trainable parameters, and of their options; computed again only after a change.

    Attributes
    ----------
    changed : bool
        Whether the trainable parameters are others than in the last step.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the digests of the last step, after which the ranks may differ."""
        self._parameters: Any = None
        self._options: Any = None
        self._digests = (0, 0)
        self.changed = True

    def update(self, groups: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
        """Compute the digests of trainable parameters and of options again if these have changed, and return both."""
        options = _group_options(groups)
        parameters = [
            [(tuple(p.shape), p.dtype, p.device.type, p.layout, _takes_part(group, p)) for p in group["params"]]
            for group in groups
        ]
        self.changed = parameters != self._parameters
        if self.changed or options != self._options:
            self._parameters, self._options = parameters, options
            self._digests = short_digest({"parameters": parameters}), short_digest(options)
        return self._digests


def _takes_part(group: Mapping[str, Any], p: Tensor) -> bool:
    """Return whether steps change a parameter."""
    return p.requires_grad and not group["frozen"]


def claim_step(
    ranks: Ranks,
    digests: ParameterDigests,
    groups: Sequence[Mapping[str, Any]],
    iteration: Any,
    whole: bool,
    *,
    complete: bool,
    due: bool = False,
) -> None:
    """Claim digests of what must agree in a step, for its first exchange to compare.

    The digests are those of the trainable parameters, of the options of the groups, of the values of these
    parameters if every rank holds the `whole` ones, and of the decisions so far. Unless `complete`, only
    the first is sent. `due`: all parameters are compared after the step, because a state was loaded or it is the first.
    """
    parameters, options = digests.update(groups)
    values = decisions = 0
    taking_part = [p.detach() for group in groups for p in group["params"] if _takes_part(group, p)]
    one_kind = len({(p.dtype == torch.float64, p.device, p.layout) for p in taking_part}) == 1
    if complete and whole and one_kind and taking_part[0].layout == torch.strided and not taking_part[0].is_meta:
        values = quick_fingerprint(torch.cat([p.reshape(-1) for p in taking_part]))
    if complete:
        decisions = short_digest(iteration.numbers() | {"due": due})
    claimed = (parameters, options if complete else 0, values, decisions)
    ranks.claim(claimed, partial(raise_difference, ranks, digests, groups, iteration, due))


def raise_difference(
    ranks: Ranks,
    digests: ParameterDigests,
    groups: Sequence[Mapping[str, Any]],
    iteration: Any,
    due: bool,
    different: Differences,
) -> NoReturn:
    """Find what differs between the ranks, given which digests of `claim_step` do, and raise `RanksError`."""
    digests.reset()
    if _PARAMETERS in different or _OPTIONS in different:
        _raise_different_parameters(ranks, groups)
    if _VALUES in different:
        names, tensors = named_parameters(groups)
        ranks.compare(_fingerprints(tensors), names, "a comparison", _REMEDY_FOR_VALUES)
    if _DECISIONS in different:
        _raise_different_decisions(ranks, iteration)
        kinds = ["the last call of load_state_dict"]
        ranks.compare(digest({"due": due}).to(ranks.device), kinds, "a comparison", _REMEDY_FOR_CALLS)
    if failed := [rank for rank, mark in enumerate(different.get(_FAILED, ())) if mark]:
        raise RankFailedError(
            f"rank {failed[0]} failed before the first exchange of the step: read its error. Rank {ranks.rank} and the "
            "other ranks have left their parameters unchanged."
        )
    raise RanksError(
        f"rank {ranks.rank} and the other ranks do not make the same kind of step: pass closures of the same style on "
        "all ranks, and make the same calls of the optimiser before the step."
    )


def _raise_different_parameters(ranks: Ranks, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RanksError` with the first parameter whose shape, type or options differ between the ranks."""
    names, _ = named_parameters(groups)
    rows = [_described(group, p) for group in groups for p in group["params"]]
    numbers = torch.cat([digest({"number": len(rows)}), digest({"number": len(groups)})]).to(ranks.device)
    kinds = ["the number of parameters", "the number of parameter groups"]
    ranks.compare(numbers, kinds, "a comparison", _REMEDY_FOR_CALLS)
    row = torch.cat([digest(row) for row in rows]).to(ranks.device)
    difference = ranks.first_difference(row, len(rows), "a comparison")
    if difference is None:
        return
    index, rank = difference
    texts = ranks.gather_texts("\n".join(f"{name} = {value}" for name, value in rows[index].items()))
    its_lines, our_lines = texts[rank].split("\n"), texts[0].split("\n")
    pairs = [(its, ours) for its, ours in zip(its_lines, our_lines, strict=True) if its != ours]
    label, _, _ = names[index].partition(" of shape")
    its, ours = (", ".join(pair[side] for pair in pairs) for side in (0, 1))
    raise RanksError(f"{label} has {its} on rank {rank} and {ours} on rank 0: {_REMEDY_FOR_OPTIONS}")


def _raise_different_decisions(ranks: Ranks, iteration: Any) -> None:
    """Raise `RanksError` with the first number of the iteration's state that differs between the ranks."""
    state = {f"{name!r} in the state of the method": value for name, value in _flat(iteration.numbers()).items()}
    row = torch.cat([digest({name: value}) for name, value in state.items()]).to(ranks.device)
    ranks.compare(row, list(state), "a comparison", _REMEDY_FOR_DECISIONS)


def _described(group: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return what of a parameter must be equal on all ranks beside its value."""
    kind = {"shape": tuple(p.shape), "dtype": p.dtype, "device": p.device.type, "layout": p.layout}
    kind |= {"requires_grad": p.requires_grad}
    return kind | {name: _number(group[name]) for name in ("lr", "weight_decay")} | {"frozen": group["frozen"]}


def _flat(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested mappings by their paths, without times."""
    flattened: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            flattened |= _flat(value, f"{prefix}{name}.")
        elif name != "seconds":
            flattened[prefix + name] = value
    return flattened


def compare_between_steps(
    ranks: Ranks, groups: Sequence[Mapping[str, Any]], iteration: Any, whole: bool, *, at_average: bool
) -> None:
    """Raise `RanksError` with the first parameter, option or decision that differs between the ranks.

    Options and decisions are compared first, since the number of parameters determines the size of the next exchange.
    `at_average`, whether `eval` was called last, says of sharded parameters which values these are.
    """
    described = {"groups": [[_described(group, p) for p in group["params"]] for group in groups]}
    calls = digest({"at_average": at_average and not whole})
    row = torch.cat([digest(described), digest(iteration.numbers()), calls]).to(ranks.device)
    if ranks.first_difference(row, 3, "a comparison") is not None:
        _raise_different_parameters(ranks, groups)
        _raise_different_decisions(ranks, iteration)
        ranks.compare(calls.to(ranks.device), ["the last call of eval or train"], "a comparison", _REMEDY_FOR_CALLS)
    if whole:
        names, tensors = named_parameters(groups)
        ranks.compare(_fingerprints(tensors), names, "a comparison", _REMEDY_FOR_VALUES)


def _group_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of parameter groups that steps depend on."""
    return {"groups": [[_number(group[name]) for name in ("lr", "weight_decay", "frozen")] for group in groups]}


def _number(value: Any) -> float | str:
    """Return a number as a float, and anything else, which steps reject, as text."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return repr(value)


def _fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Return two 64-bit integers for each tensor, in one row."""
    return torch.cat([fingerprint(tensor) for tensor in tensors])


def compare_model(
    ranks: Ranks,
    named: Sequence[tuple[str, Tensor]],
    arguments: dict[str, Any],
    batches: Mapping[str, Any],
    whole: bool,
) -> None:
    """Raise `RanksError` if the ranks measure different models, with other arguments or numbers of batches.

    `batches` has what must agree of the batches, by description. The values of parameters are compared only if every
    rank holds the `whole` parameters.
    """
    remedy = "call sanc.diagnose with the same model and arguments on all ranks; only the rows of batches may differ."
    described = {"parameters": [(name, tuple(p.shape), p.dtype) for name, p in named]}
    digests = [digest(arguments), digest(described), *(digest({"batches": value}) for value in batches.values())]
    kinds = ("one of the arguments (seed, confidence, max_products …)", "name, shape or type of a parameter", *batches)
    ranks.compare(torch.cat(digests).to(ranks.device), kinds, "the arguments", remedy)
    if whole:
        names = [f"parameter {name} of shape {tuple(p.shape)}" for name, p in named]
        ranks.compare(_fingerprints([p for _, p in named]), names, "the parameters", remedy)


def compare_call(ranks: Ranks, arguments: dict[str, Any], x: Any) -> None:
    """Raise `RanksError` if the ranks start a minimisation with different arguments or at different points."""
    row = torch.cat([digest(arguments), fingerprint(torch.as_tensor(x))]).to(ranks.device)
    remedy = "call sanc.minimize with the same arguments on all ranks; only the rows of the sum may differ."
    ranks.compare(row, ("one of the arguments (method, seed, limits, settings …)", "x0"), "the arguments", remedy)
