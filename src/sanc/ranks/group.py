"""A group of ranks: sums over the group, and the comparison that detects ranks that differ.

torch.distributed transports the data. Almost all exchanges are one collective, a sum of flat tensors, which gives every
rank the same bits. Numbers are appended to a vector, with separate entries for each rank. So the sum does not round
them, and every rank receives the numbers of each of the others.
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

_FLOAT32_PARTS = 3
"""float32 numbers whose sum is one float64: its significand has 53 bits, and theirs have 24 each."""

_INDEX_FACTOR = 0x1E3779B97F4A7C15
"""The increment of SplitMix64 (Steele et al. 2014), 2⁶⁴ over the golden ratio, with its top bit cleared for int64."""

_MIX_FACTOR, _MIX_SHIFT = 0x2545F4914F6CDD1D, 29
"""The multiplier of xorshift64* (Vigna 2016), and a shift near half the word, so that high bits change low ones."""


class Ranks:
    """The ranks of a process group.

    Attributes
    ----------
    size, rank : int
        The number of ranks, and the rank of this process.
    collectives, bytes : int
        The number of collectives so far, and of the bytes that this rank sent in them.
    wrapped : bool
        Whether a wrapper of the model, such as DistributedDataParallel, was seen to average gradients.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.collectives = self.bytes = 0
        self.wrapped = False

    def sum(self, tensor: Tensor, label: str, operation: Any = None) -> Tensor:
        """Sum a tensor over the ranks in place, or reduce it by `operation`; an error message contains `label`."""
        with self.collective(label, tensor):
            dist.all_reduce(tensor, op=operation or dist.ReduceOp.SUM, group=self.group)
        return tensor

    @contextmanager
    def collective(self, label: str, tensor: Tensor) -> Iterator[None]:
        """Count a collective on this tensor; if it fails, raise `RanksError` with this rank and the label."""
        self.collectives += 1
        self.bytes += tensor.numel() * tensor.element_size()
        try:
            yield
        except RuntimeError as problem:
            raise RanksError(
                f"rank {self.rank} of {self.size} could not exchange {label} with the others: another rank ended, "
                "hangs, made fewer steps or has different parameters. Read the first error of the other ranks, and "
                f"give all ranks the same number of batches ({str(problem).splitlines()[0]})."
            ) from problem

    def all_gather(self, row: Tensor, label: str) -> Tensor:
        """Return the rows of all ranks: (ranks, entries)."""
        rows = row.new_zeros(self.size, *row.shape)
        rows[self.rank] = row
        return self.sum(rows, label)

    def exchange(
        self, numbers: Sequence[float], label: str, vector: Tensor | None = None
    ) -> tuple[list[list[float]], Tensor | None]:
        """Return the numbers of each rank and, if a vector is given, its sum over the ranks, by one collective."""
        dtype, device = (torch.float64, self.device) if vector is None else (vector.dtype, vector.device)
        local = _split_float64(torch.tensor(numbers, dtype=torch.float64), dtype)
        table = torch.zeros(self.size, *local.shape, dtype=dtype)
        table[self.rank] = local
        dim = 0 if vector is None else len(vector)
        buffer = torch.empty(dim + table.numel(), dtype=dtype, device=device)
        buffer[dim:] = table.reshape(-1).to(buffer.device)
        if vector is not None:
            buffer[:dim] = vector
        self.sum(buffer, label)
        received: list[list[float]] = buffer[dim:].cpu().double().view(table.shape).sum(-1).tolist()
        return received, None if vector is None else buffer[:dim]

    def any_of(self, predicate: Callable[[T], bool]) -> Callable[[T], bool]:
        """Return a function that is true on all ranks if `predicate` is true on at least one."""

        def any_rank(argument: T) -> bool:
            received, _ = self.exchange([float(predicate(argument))], "a decision")
            return any(row[0] > 0.0 for row in received)

        return any_rank

    def clock(self) -> float:
        """Return the time of rank 0, so that all ranks reach a time limit in the same iteration."""
        received, _ = self.exchange([time.perf_counter()], "the clock")
        return received[0][0]

    @property
    def device(self) -> torch.device:
        """The device on which the group's backend exchanges small tensors."""
        cuda = dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    # ------------------------------------------------------------------ comparing

    def compare(self, row: Tensor, names: Sequence[str], label: str, remedy: str) -> None:
        """Raise `RanksError` with the name of the first entry that differs between the ranks.

        `row` holds the same number of 64-bit integers for each name, one or more.
        """
        table = self.all_gather(row, label).cpu().view(self.size, len(names), -1)
        for index, name in enumerate(names):
            for rank in range(1, self.size):
                if not torch.equal(table[rank, index], table[0, index]):
                    raise RanksError(f"{name} of rank {rank} differs from that of rank 0: {remedy}")


def find_ranks(process_group: object) -> Ranks | None:
    """Return the ranks of a process group; None if it has only this process."""
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
    """Return two 64-bit integers that depend on every bit: different tensors share them with a probability of 2⁻⁶⁴."""
    flat = tensor.detach().reshape(-1).contiguous()
    bits = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32).long()
    keys = torch.arange(1, 2 * len(bits), 2, device=bits.device) * _INDEX_FACTOR  # odd, so that products lose no bit
    mixed = (bits + keys) * _MIX_FACTOR
    mixed = (mixed ^ (mixed >> _MIX_SHIFT)) * keys
    return torch.stack([bits.sum(), mixed.sum()])


def digest(numbers: Mapping[str, Any]) -> Tensor:
    """Return a 128-bit hash of numbers as two 64-bit integers; times are left out."""
    hashed = hashlib.blake2b(repr(_without_times(numbers)).encode(), digest_size=16).digest()
    return torch.tensor([int.from_bytes(part, "little", signed=True) for part in (hashed[:8], hashed[8:])])


def _without_times(entry: Any) -> Any:
    if isinstance(entry, Mapping):
        return {name: _without_times(value) for name, value in entry.items() if name != "seconds"}
    return entry


def _split_float64(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of type `dtype` whose sums along the last dimension are the numbers: (numbers, parts)."""
    if dtype == torch.float64:
        return numbers[:, None]
    parts = []
    for _ in range(_FLOAT32_PARTS):
        parts.append(numbers.to(dtype))
        numbers = (numbers - parts[-1].double()).nan_to_num(0.0, 0.0, 0.0)
    return torch.stack(parts, dim=1)
