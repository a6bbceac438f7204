"""Mini-batches: a loss with the rows it is evaluated on, and a sampler of three independent samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from sanc.core.saved import require_count, require_mapping
from sanc.errors import ArgumentError, ArgumentTypeError, call_mismatch, require_integer, shown

__all__ = ["Batch", "ThreeSamples"]

_IGNORED_TARGET = -100
"""Default `ignore_index` of torch's losses."""


class Batch:
    """A loss on a batch of rows: a closure with a length, which can be split into micro-batches.

    Parameters
    ----------
    loss : callable
        ``loss(*tensors)`` returns the **mean** loss over the rows as a scalar tensor.
    *tensors : Tensor
        Inputs, targets and so on; the first dimension of each counts the rows.
    weight : callable, optional
        ``weight(*tensors)`` returns the number of terms in the mean loss of these rows, by which micro-batches are
        weighted. The default is the number of rows. A cross-entropy that ignores some targets needs
        ``lambda x, y: (y != -100).sum()``.
    outputs : callable, optional
        ``outputs(*tensors)`` returns the network's output z, a tensor; the loss is then ``loss(z, *tensors)``, convex
        in z and without other parameters. The optimisers need it for ``hvp="gauss-newton"``.

    Examples
    --------
    >>> import torch, sanc
    >>> model = torch.nn.Linear(3, 1)
    >>> loss = lambda x, y: (model(x) - y).square().mean()
    >>> batch = sanc.Batch(loss, torch.randn(10, 3), torch.randn(10, 1))
    >>> len(batch)
    10
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        *tensors: Tensor,
        weight: Callable[..., Tensor | float] | None = None,
        outputs: Callable[..., Tensor] | None = None,
    ) -> None:
        if not callable(loss):
            raise ArgumentTypeError(f"loss = {shown(loss)} cannot be called: pass a function of the batch's tensors.")
        if weight is not None and not callable(weight):
            raise ArgumentTypeError(f"weight = {shown(weight)} cannot be called: pass a function of the tensors.")
        if outputs is not None and not callable(outputs):
            raise ArgumentTypeError(f"outputs = {shown(outputs)} cannot be called: pass a function of the tensors.")
        if not tensors:
            raise ArgumentError("tensors is empty: pass at least one tensor whose first dimension counts the rows.")
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                raise ArgumentTypeError(
                    f"tensors[{position}] = {shown(tensor)} is not a tensor with rows: pass one (torch.as_tensor)."
                )
            if len(tensor) != len(tensors[0]):
                raise ArgumentError(
                    f"tensors[{position}] has {len(tensor)} rows and tensors[0] has {len(tensors[0])}: "
                    "pass tensors with as many rows as tensors[0]."
                )
        of = "" if outputs is None else "the output and "
        if mismatch := call_mismatch(loss, len(tensors) + (outputs is not None)):
            raise ArgumentTypeError(
                f"loss = {shown(loss)} cannot be called with {of}the {len(tensors)} tensors ({mismatch}): pass a "
                "function of as many arguments."
            )
        if len(tensors[0]) == 0:
            raise ArgumentError("tensors have 0 rows: pass a batch with at least one row.")
        self.loss = loss
        self.tensors = tensors
        self.weight = weight
        self.outputs = outputs

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __call__(self) -> Tensor:
        return self.loss(*self.tensors) if self.outputs is None else self.loss(self.output(), *self.tensors)

    def output(self) -> Tensor:
        """Return the network's output z."""
        assert self.outputs is not None
        z = self.outputs(*self.tensors)
        if not isinstance(z, Tensor) or not z.is_floating_point():
            raise ArgumentTypeError(f"outputs returned {shown(z)}: return the network's output, one real tensor.")
        return z

    def terms(self) -> float:
        """Return the number of terms in the mean loss, by which several ranks weight their batches."""
        self._reject_ignored_targets("a rank's batch")
        return sum(self._counts([self]))

    def _counts(self, parts: Sequence[Batch]) -> list[float]:
        """Return the number of terms in the mean loss of each part."""
        counts = [float(len(part) if part.weight is None else part.weight(*part.tensors)) for part in parts]
        if not 0.0 < sum(counts) < math.inf or min(counts) < 0.0:
            raise ArgumentError(
                f"weight returned {counts} for the batches: return the number of terms in the mean loss, finite and "
                "≥ 0, and above 0 in at least one batch."
            )
        return counts

    def parts(self, microbatch: int | None) -> list[tuple[float, Batch]]:
        """Return weights and micro-batches whose weighted sum is the mean loss over all rows."""
        if microbatch is None or microbatch >= len(self):
            return [(1.0, self)]
        slices = [slice(begin, begin + microbatch) for begin in range(0, len(self), microbatch)]
        parts = [
            Batch(self.loss, *(tensor[rows] for tensor in self.tensors), weight=self.weight, outputs=self.outputs)
            for rows in slices
        ]
        self._reject_ignored_targets("a micro-batch", parts)
        counts = self._counts(parts)
        return [(count / sum(counts), part) for count, part in zip(counts, parts, strict=True) if count > 0.0]

    def joined(self, other: Batch) -> Batch:
        """Return the loss on the rows of both batches."""
        return Batch(
            self.loss,
            *map(torch.cat, zip(self.tensors, other.tensors, strict=True)),
            weight=self.weight,
            outputs=self.outputs,
        )

    def _reject_ignored_targets(self, weighted: str, parts: Sequence[Batch] = ()) -> None:
        """Raise if rows are the weights and targets may be ignored; accept parts with equal fractions of these.

        `weighted` names what the weights belong to.
        """
        for position, tensor in enumerate(self.tensors):
            not_targets = tensor.is_floating_point() or tensor.is_complex()
            if self.weight is not None or not_targets or not bool((tensor == _IGNORED_TARGET).any()):
                continue
            fractions = {float((part.tensors[position] == _IGNORED_TARGET).double().mean()) for part in parts}
            if len(fractions) != 1:
                raise ArgumentError(
                    f"tensors[{position}] holds {_IGNORED_TARGET}, which torch's losses ignore by default, so the "
                    f"rows of {weighted} are not its weight: pass weight=lambda *tensors: "
                    f"(tensors[{position}] != {_IGNORED_TARGET}).sum(), or, if the loss ignores no target, "
                    "weight=lambda *tensors: len(tensors[0])."
                )


class ThreeSamples:
    """Draw the three independent mini-batches of an iteration: for the gradient, the Hessian and the objective.

    Each is drawn without replacement from the whole data set and independently of the others. Draw ``t`` is a
    function of (`seed`, ``t``) alone, so the sampler can resume from one integer.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset
        A data set with a length. A `TensorDataset` is indexed once for each batch.
    batch_size : int or sequence of three int
        Rows of each sample, or of (gradient, Hessian, objective).
    seed : int
        Seed of the draws.
    collate_fn : callable, optional
        Makes a batch of a list of rows. The default is torch's.
    device : torch.device or str, optional
        Device of the batches.

    Attributes
    ----------
    sizes : tuple of three int
        Rows of each sample.
    draws : int
        Number of draws so far.

    Examples
    --------
    >>> import torch, sanc
    >>> data = torch.utils.data.TensorDataset(torch.randn(100, 3), torch.randn(100, 1))
    >>> samples = sanc.ThreeSamples(data, batch_size=16, seed=0)
    >>> (xg, yg), (xb, yb), (xf, yf) = samples.draw()
    >>> xg.shape
    torch.Size([16, 3])
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | Sequence[int],
        *,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise ArgumentTypeError(
                f"dataset = {shown(dataset)} is a DataLoader, which draws batches itself: pass its data set, "
                "loader.dataset."
            )
        try:
            n = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentTypeError(
                f"dataset = {shown(dataset)} has no length: pass a map-style data set, with __len__ and __getitem__."
            ) from None
        sizes = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,) * 3
        if len(sizes) != 3 or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
            raise ArgumentError(f"batch_size = {batch_size!r} cannot be used: pass one integer, or three.")
        for size in sizes:
            if not 1 <= size <= n:
                raise ArgumentError(
                    f"batch_size = {size} does not fit the data set of {n} rows: pass a number from 1 to {n}."
                )
        require_integer("seed", seed, 0)
        if collate_fn is not None and not callable(collate_fn):
            raise ArgumentTypeError(
                f"collate_fn = {shown(collate_fn)} cannot be called: pass a function of a list of rows, or None."
            )
        self.dataset = dataset
        self.sizes = sizes
        self.seed = int(seed)
        self.draws = 0
        self._n = n
        self._collate = collate_fn or default_collate
        self._indexable = type(dataset) is TensorDataset and collate_fn is None
        self._device = torch.device(device) if device is not None else None

    def draw(self) -> tuple[Any, Any, Any]:
        """Draw the next three batches, and return them."""
        rng = np.random.default_rng((self.seed, self.draws))
        batches = [self._fetch(rng.choice(self._n, size, replace=False)) for size in self.sizes]
        self.draws += 1
        return batches[0], batches[1], batches[2]

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        """Draw without end."""
        while True:
            yield self.draw()

    def _fetch(self, rows: Any) -> Any:
        """Return the batch of these rows, on the device."""
        if self._indexable:
            index = torch.from_numpy(rows)
            batch: Any = tuple(
                tensor[index.to(tensor.device)]
                for tensor in self.dataset.tensors  # type: ignore[attr-defined]
            )
        elif hasattr(self.dataset, "__getitems__"):
            batch = self._collate(self.dataset.__getitems__(rows.tolist()))
        else:
            batch = self._collate([self.dataset[row] for row in rows.tolist()])
        return batch if self._device is None else _move(batch, self._device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a resumed sampler draws the same batches."""
        return {"seed": self.seed, "draws": self.draws, "rows": self._n, "sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        missing = {"seed", "draws", "rows", "sizes"} - set(require_mapping("state", state))
        if missing:
            raise ArgumentError(f"state lacks {sorted(missing)}: pass what state_dict() returned.")
        if state["rows"] != self._n:
            raise ArgumentError(
                f"state was saved with a data set of {state['rows']} rows and this one has {self._n}: use the same "
                "data set."
            )
        if state["sizes"] != list(self.sizes):
            raise ArgumentError(
                f"state was saved with batch_size = {state['sizes']} and this one is {list(self.sizes)}: use the same "
                "batch_size."
            )
        for name in ("seed", "draws"):
            require_count(f"state[{name!r}]", state[name])
        self.seed, self.draws = state["seed"], state["draws"]


def _move(batch: Any, device: torch.device) -> Any:
    """Copy every tensor of a nested batch to the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _move(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_move(item, device) for item in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_move(item, device) for item in batch)
    return batch
