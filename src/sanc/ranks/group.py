"""A group of ranks: sums over it, and the comparison that shows whether all of them still do the same.

Transport is torch.distributed's. Everything goes through one kind of collective, a sum of flat tensors, which hands
every rank the same bits; numbers ride along with a vector in places of their own, one for each rank, so that they are
not rounded by the sum and everybody knows whose they are.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sanc.errors import ArgumentTypeError, RanksError, shown

T = TypeVar("T")

DEFAULT = "default"
"""The group that torch.distributed was initialised with, if it was."""

_PARTS = 3
"""float32 numbers that hold one float64."""


class Ranks:
    """The ranks of a process group.

    Attributes
    ----------
    size, rank : int
        How many there are, and which one this is.
    collectives, bytes : int
        How many sums were formed so far, and of how many bytes on this rank.
    wrapped : bool
        Whether a wrapper of the model was seen to average gradients by itself.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.collectives = self.bytes = 0
        self.wrapped = False

    def sum(self, tensor: Tensor, what: str, operation: Any = None) -> Tensor:
        """Sum a tensor over the ranks in place (or combine it otherwise); `what` is said where that fails."""
        with self.waiting(what, tensor):
            dist.all_reduce(tensor, op=operation or dist.ReduceOp.SUM, group=self.group)
        return tensor

    @contextmanager
    def waiting(self, what: str, tensor: Tensor) -> Iterator[None]:
        """Count a collective of so many bytes, and say of one that fails who waited, and what for."""
        self.collectives += 1
        self.bytes += tensor.numel() * tensor.element_size()
        try:
            yield
        except RuntimeError as problem:
            raise RanksError(
                f"rank {self.rank} of {self.size} could not exchange {what} with the others: one of them ended, hangs, "
                "made fewer steps or has other parameters. Look at the first error of the others, and give every rank "
                f"as many batches as the others ({str(problem).splitlines()[0]})."
            ) from problem

    def table(self, row: Tensor, what: str) -> Tensor:
        """Return everybody's row: (ranks, entries)."""
        rows = row.new_zeros(self.size, *row.shape)
        rows[self.rank] = row
        return self.sum(rows, what)

    def exchange(
        self, numbers: Sequence[float], what: str, vector: Tensor | None = None
    ) -> tuple[list[list[float]], Tensor | None]:
        """Return everybody's numbers and, where there is a vector, its sum; one collective in all."""
        dtype, device = (torch.float64, self.device) if vector is None else (vector.dtype, vector.device)
        own = _parts(torch.tensor(numbers, dtype=torch.float64), dtype)
        places = torch.zeros(self.size, *own.shape, dtype=dtype)
        places[self.rank] = own
        length = 0 if vector is None else len(vector)
        buffer = torch.empty(length + places.numel(), dtype=dtype, device=device)
        buffer[length:] = places.reshape(-1).to(buffer.device)
        if vector is not None:
            buffer[:length] = vector
        self.sum(buffer, what)
        read: list[list[float]] = buffer[length:].cpu().double().view(places.shape).sum(-1).tolist()
        return read, None if vector is None else buffer[:length]

    def any_of(self, asked: Callable[[T], bool]) -> Callable[[T], bool]:
        """Return a function that is true on all ranks where `asked` is on one at least."""

        def ask(argument: T) -> bool:
            found, _ = self.exchange([float(asked(argument))], "a decision")
            return any(row[0] > 0.0 for row in found)

        return ask

    def clock(self) -> float:
        """Return the time of rank 0, by which all decide."""
        found, _ = self.exchange([time.perf_counter()], "the clock")
        return found[0][0]

    @property
    def device(self) -> torch.device:
        """Where small tensors have to lie for this group."""
        cuda = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    # ------------------------------------------------------------------ comparing

    def compare(self, row: Tensor, names: Sequence[str], what: str, remedy: str) -> None:
        """Complain of the first of these entries, one or more 64-bit integers for each name, that is not the same."""
        table = self.table(row, what).cpu().view(self.size, len(names), -1)
        for place, name in enumerate(names):
            for rank in range(1, self.size):
                if not torch.equal(table[rank, place], table[0, place]):
                    raise RanksError(f"{name} of rank {rank} differs from that of rank 0: {remedy}")


def find_ranks(process_group: object) -> Ranks | None:
    """Return the ranks of a process group; None where there is no other than this one."""
    if process_group is None or not (dist.is_available() and dist.is_initialized()):
        if process_group is None or process_group == DEFAULT:
            return None
        raise ArgumentTypeError(
            f"process_group = {shown(process_group)} cannot be used before torch.distributed is initialised: call "
            "torch.distributed.init_process_group first, or pass None."
        )
    if process_group == DEFAULT:
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"process_group = {shown(process_group)} cannot be used: pass a torch.distributed.ProcessGroup that this "
            f'rank belongs to, "{DEFAULT}", or None.'
        )
    return Ranks(process_group) if dist.get_world_size(process_group) > 1 else None


def fingerprint(tensor: Tensor) -> Tensor:
    """Two 64-bit integers that tell tensors apart which differ in any bit, but for a chance of 2⁻⁶⁴."""
    flat = tensor.detach().reshape(-1).contiguous()
    bits = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32).long()
    places = torch.arange(1, 2 * len(bits), 2, device=bits.device) * 0x1E3779B97F4A7C15  # odd
    mixed = (bits + places) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * places
    return torch.stack([bits.sum(), mixed.sum()])


def digest(numbers: Mapping[str, Any]) -> Tensor:
    """Two 64-bit integers for numbers, the times in them left out."""
    hashed = hashlib.blake2b(repr(_timeless(numbers)).encode(), digest_size=16).digest()
    return torch.tensor([int.from_bytes(part, "little", signed=True) for part in (hashed[:8], hashed[8:])])


def _timeless(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _timeless(value) for name, value in entry.items() if name != "seconds"}
    return entry


def _parts(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Write float64 numbers as sums of numbers of a type: (numbers, parts)."""
    if dtype == torch.float64:
        return numbers[:, None]
    parts = []
    for _ in range(_PARTS):
        parts.append(numbers.to(dtype))
        numbers = (numbers - parts[-1].double()).nan_to_num(0.0, 0.0, 0.0)
    return torch.stack(parts, dim=1)
