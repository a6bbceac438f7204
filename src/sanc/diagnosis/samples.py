"""The batches that `diagnose` is given, and their mean loss as a sample of the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor, nn

from sanc.autograd.leaves import Sample
from sanc.errors import ArgumentError, ArgumentTypeError, shown, warn

_HELD_OUT_DIVISOR = 4
"""Without held-out batches of the caller, the last quarter of the batches is held out, and at least one."""


def check_loss(loss: Any) -> None:
    """Raise an error if the loss cannot be called, or is known to return a sum."""
    if not callable(loss):
        raise ArgumentTypeError(f"loss = {shown(loss)} cannot be called: pass a criterion or a function of the model.")
    if getattr(loss, "reduction", "mean") == "sum":
        raise ArgumentError(
            f'loss = {shown(loss)} returns a sum: pass one with reduction="mean", as rows weight batches.'
        )


@dataclass(frozen=True)
class DataSamples:
    """The losses that `diagnose` evaluates.

    Attributes
    ----------
    data : Sample
        The mean loss that is differentiated.
    held_out : Sample, optional
        The mean loss on which steps are evaluated; None if the data are a single batch.
    rows : dict
        Rows of each part of a batch, of "data" and "held_out".
    """

    data: Sample
    held_out: Sample | None
    rows: Mapping[str, list[int]]


def read_samples(
    model: nn.Module,
    loss: Callable[..., Tensor],
    data: Any,
    held_out: Any,
    *,
    batches: int | None,
    microbatch: int | None,
    seed: int,
) -> DataSamples:
    """Read the batches of the caller and return their mean losses, evaluated in parts of at most `microbatch` rows."""
    used, kept = (
        [part for batch in chosen for part in _parts_of(batch, microbatch)]
        for chosen in _choose(data, held_out, batches)
    )
    return DataSamples(
        _mean_loss(model, loss, used, seed),
        _mean_loss(model, loss, kept, seed) if kept else None,
        {"data": [_count_rows(part) for part in used], "held_out": [_count_rows(part) for part in kept]},
    )


def _parts_of(batch: Any, microbatch: int | None) -> list[Any]:
    """Return the parts of a batch, with at most `microbatch` rows each."""
    rows = _count_rows(batch)
    if microbatch is None or rows <= microbatch:
        return [batch]
    return [_slice(batch, slice(begin, begin + microbatch), rows) for begin in range(0, rows, microbatch)]


def _slice(part: Any, rows: slice, count: int) -> Any:
    """Return some rows of a batch, or of one of its parts; parts without `count` rows raise an error."""
    if isinstance(part, Tensor) and part.ndim and len(part) == count:
        return part[rows]
    if isinstance(part, Mapping):
        return {name: _slice(entry, rows, count) for name, entry in part.items()}
    if isinstance(part, list | tuple):
        entries = [_slice(entry, rows, count) for entry in part]
        return entries if isinstance(part, list) else tuple(entries)
    raise ArgumentTypeError(
        f"data has a batch of {count} rows with {shown(part)}, which cannot be split: leave microbatch out, or pass "
        "batches of tensors with as many rows."
    )


def _choose(data: Any, held_out: Any, batches: int | None) -> tuple[list[Any], list[Any]]:
    """Return the batches that define the loss and those that are held out."""
    for name, given in (("data", data), ("held_out", held_out)):
        if given is None and name == "held_out":
            continue
        if isinstance(given, Tensor | str | Mapping) or not isinstance(given, Iterable):
            raise ArgumentTypeError(f"{name} = {shown(given)} is no iterable of batches: pass a list or a DataLoader.")
    used = _take("data", data, batches)
    if not used:
        raise ArgumentError("data has no batch: pass at least one; an iterator that was used before is empty.")
    if batches is not None and len(used) < batches:
        warn(f"batches = {batches}, and data has only {len(used)}: all of them are used.", RuntimeWarning)
    if held_out is not None:
        kept = _take("held_out", held_out, batches)
        if not kept:
            raise ArgumentError("held_out has no batch: pass at least one, or leave it out.")
        return used, kept
    if len(used) == 1:
        return used, []
    count = max(1, len(used) // _HELD_OUT_DIVISOR)
    return used[:-count], used[-count:]


def _take(name: str, given: Iterable[Any], count: int | None) -> list[Any]:
    """Return the first batches; raise an error if one has no row."""
    taken = list(islice(given, count))
    for index, batch in enumerate(taken):
        if _count_rows(batch) == 0:
            raise ArgumentError(f"{name} has no row in batch {index}: leave this batch out.")
    return taken


def _mean_loss(model: nn.Module, loss: Callable[..., Tensor], batches: Sequence[Any], seed: int) -> Sample:
    """Return the mean loss of batches, weighted by their rows."""
    rows = [_count_rows(batch) for batch in batches]
    microbatches = [
        (count / sum(rows), _closure(model, loss, batch)) for count, batch in zip(rows, batches, strict=True)
    ]
    return Sample("loss", microbatches, sum(rows), seed, terms=float(sum(rows)))


def _closure(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Callable[[], Tensor]:
    """Return the loss of one batch as a function without arguments."""
    if not _is_criterion(loss):

        def evaluate() -> Tensor:
            try:
                return loss(model, batch)
            except (TypeError, AttributeError) as error:
                raise ArgumentTypeError(
                    f"loss = {shown(loss)} is called as loss(model, batch), which failed ({error}): if it is a "
                    "function of outputs and targets, pass lambda model, batch: loss(model(batch[0]), batch[1])."
                ) from error

        return evaluate
    if not (isinstance(batch, list | tuple) and len(batch) == 2):
        raise ArgumentTypeError(
            f"data has a batch of {type(batch).__name__}, and loss is a criterion of outputs and targets: pass batches "
            "(inputs, targets), or loss as a function of (model, batch)."
        )
    inputs, targets = batch
    if isinstance(targets, np.ndarray):
        raise ArgumentTypeError(
            f"data has a batch of arrays, with targets {shown(targets)}: pass tensors, such as torch.as_tensor(array)."
        )
    return lambda: loss(model(inputs), targets)


def _is_criterion(loss: Any) -> bool:
    """Return whether a loss is a function of outputs and targets: a module, or a function of `torch.nn.functional`."""
    function = loss.func if isinstance(loss, partial) else loss
    return isinstance(function, nn.Module) or getattr(function, "__module__", "") == nn.functional.__name__


def _count_rows(batch: Any) -> int:
    """Return the number of rows of the first tensor of a batch that has rows."""
    return next((len(tensor) for tensor in _tensors(batch) if tensor.ndim), 1)


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(batch, Tensor):
        yield batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        yield from _tensors(part)
