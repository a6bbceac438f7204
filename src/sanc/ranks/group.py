"""A group of ranks: sums over the group, and the comparison that detects ranks that differ.

torch.distributed transports the data. Almost every exchange is one collective: a sum of flat tensors, which gives every
rank the same bits. Numbers of a rank are appended to such a tensor in entries of its own, where the others have zeros:
they are not rounded, and every rank receives the numbers of all others.

A step begins with a claim: a few digests that must be equal on all ranks. It is appended to the first exchange of the
step. That exchange has the size of the first exchange of the last step, on which the ranks agreed, also on a rank whose
parameters have changed since. So all ranks learn of the difference before a collective of different sizes can fail.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sanc.errors import ArgumentTypeError, RanksError, shown, without_addresses

T = TypeVar("T")

DEFAULT = "default"
"""The group that torch.distributed was initialised with, if it was."""

_FLOAT32_PARTS = 3
"""float32 numbers whose sum is one float64: its significand has 53 bits, and theirs have 24 each."""

_INDEX_FACTOR = 0x1E3779B97F4A7C15
"""The increment of SplitMix64 (Steele et al. 2014), 2⁶⁴ over the golden ratio, with its top bit cleared for int64."""

_MIX_FACTOR, _MIX_SHIFT = 0x2545F4914F6CDD1D, 29
"""The multiplier of xorshift64* (Vigna 2016), and a shift near half the word, so that high bits change low ones."""


_DIGEST_BYTES = 6
"""Bytes of a digest that is sent as one float64: its significand of 53 bits holds 6 bytes."""

_ROW_WIDTH = 32
"""Neighbouring 32-bit words that `quick_fingerprint` adds. Mixing the sums of rows then costs little beside one pass
over the words, as it handles a 32nd of them."""

_INTEGER_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integers as wide as an entry, by bytes; wider entries are made of words of 64 bits."""

Size = tuple[int, tuple[int, torch.dtype, torch.device] | None]
"""The size of an exchange: how many numbers; length, type and device of the vector, or None if there is none."""

Differences = Mapping[int, Sequence[float]]
"""Columns of a claim that differ between the ranks, by index: one entry for each rank."""


class Ranks:
    """The ranks of a process group.

    Attributes
    ----------
    group : ProcessGroup
        The group of torch.distributed.
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
        self._claim: tuple[Sequence[int], Callable[[Differences], NoReturn]] | None = None
        self._agreed: Size = (0, None)  # of the first exchange of a step

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
        except RuntimeError as error:
            raise RanksError(
                f"rank {self.rank} of {self.size} could not exchange {label} with the others: another rank ended, "
                "hangs, made fewer steps or has different parameters. Read the first error of the other ranks, and "
                f"give all ranks the same number of batches ({str(error).splitlines()[0]})."
            ) from error

    def all_gather(self, row: Tensor, label: str) -> Tensor:
        """Return the rows of all ranks: (ranks, entries)."""
        rows = row.new_zeros(self.size, *row.shape)
        rows[self.rank] = row
        return self.sum(rows, label)

    def exchange(
        self, numbers: Sequence[float], label: str, vector: Tensor | None = None
    ) -> tuple[list[list[float]], Tensor | None]:
        """Return the numbers of each rank and, if a vector is given, its sum over the ranks, by one collective.

        The first exchange after `claim` carries the claim. If its size is not the agreed one, the claim is sent alone.
        """
        if self._claim is None:
            return self._exchange(numbers, label, vector)
        size = (len(numbers), None if vector is None else (len(vector), vector.dtype, vector.device))
        agreed = self._agreed
        received, total = self._settle(size, label, numbers if size == agreed else None, vector)
        return (received, total) if size == agreed else self._exchange(numbers, label, vector)

    def claim(self, digests: Sequence[int], differ: Callable[[Differences], NoReturn]) -> None:
        """Send these digests (see `short_digest`) with the next exchange.

        If some differ between the ranks, all ranks call `differ` with the columns that do, by index, and the exchange
        ends with the error that it raises. Two columns follow the digests: the size of the exchange, and whether the
        rank failed before it.
        """
        self._claim = digests, differ

    def agree(self) -> None:
        """Exchange the claim now, by a collective of its own, unless it was sent already."""
        if self._claim is not None:
            self.exchange([], "a comparison")

    def fail(self) -> None:
        """Send the claim if it was not sent yet, with the message that this rank failed."""
        if self._claim is not None:
            self._settle(None, "a comparison", None, None)

    def _settle(
        self, size: Size | None, label: str, numbers: Sequence[float] | None, vector: Tensor | None
    ) -> tuple[list[list[float]], Tensor | None]:
        """Exchange the claim of this rank with numbers and a vector. Return those of all ranks, and the sum of vectors.

        If claims differ, the error that `claim` names is raised. The next exchange is of this `size`; None: it failed.
        The claim is appended to `numbers` and `vector`, which have the agreed size, or without numbers to zeros.
        """
        assert self._claim is not None
        (digests, differ), self._claim = self._claim, None
        (count, like), self._agreed = self._agreed, (0, None)  # after an error nothing is agreed
        claimed = [*map(float, digests), float(short_digest({"size": size_on_any_rank(size)})), float(size is None)]
        if numbers is None:
            numbers = [0.0] * count
            vector = None if like is None else torch.zeros(like[0], dtype=like[1], device=like[2])
        received, total = self._exchange([*numbers, *claimed], label, vector)
        columns = [list(column) for column in zip(*(row[count:] for row in received), strict=True)]
        differences = {index: column for index, column in enumerate(columns) if len(set(column)) > 1}
        if differences:
            differ(differences)
        self._agreed = (0, None) if size is None else size
        return [row[:count] for row in received], total

    def gather_texts(self, text: str) -> list[str]:
        """Return the text of each rank."""
        codes = list(text.encode())
        lengths, _ = self._exchange([float(len(codes))], "a message")
        row = torch.zeros(int(max(length for (length,) in lengths)), dtype=torch.int64, device=self.device)
        row[: len(codes)] = torch.tensor(codes, dtype=torch.int64)
        rows = self.all_gather(row, "a message").tolist()
        return [bytes(codes[: int(length)]).decode() for codes, (length,) in zip(rows, lengths, strict=True)]

    def _exchange(
        self, numbers: Sequence[float], label: str, vector: Tensor | None = None
    ) -> tuple[list[list[float]], Tensor | None]:
        """Return the numbers of each rank and the sum of the vectors, without a claim."""
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

    # Comparing.

    def compare(self, row: Tensor, names: Sequence[str], label: str, remedy: str) -> None:
        """Raise `RanksError` with the name of the first entry that differs between the ranks.

        `row` holds the same number of 64-bit integers for each name, one or more.
        """
        difference = self.first_difference(row, len(names), label)
        if difference is not None:
            index, rank = difference
            raise RanksError(f"{names[index]} of rank {rank} differs from that of rank 0: {remedy}")

    def first_difference(self, row: Tensor, entries: int, label: str) -> tuple[int, int] | None:
        """Return the first of the `entries` of a row that differs between the ranks, and the rank; None if none does.

        All ranks return the same.
        """
        table = self.all_gather(row, label).cpu().view(self.size, entries, -1)
        for index in range(entries):
            for rank in range(1, self.size):
                if not torch.equal(table[rank, index], table[0, index]):
                    return index, rank
        return None


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


def size_on_any_rank(size: Size | None) -> str:
    """Return the size of an exchange as text that is equal on all ranks: each rank may have a GPU of its own."""
    vector = None if size is None else size[1]
    return str(size if vector is None else (size[0], *vector[:2], vector[2].type))  # type: ignore[index]


def fingerprint(tensor: Tensor) -> Tensor:
    """Return two 64-bit integers that depend on every bit: different tensors share them with a probability of 2⁻⁶⁴."""
    flat = tensor.detach().reshape(-1).contiguous()
    bits = flat.view(_INTEGER_TYPES.get(flat.element_size(), torch.int64)).long()
    keys = (2 * torch.arange(len(bits), device=bits.device) + 1) * _INDEX_FACTOR  # odd, so that products lose no bit
    mixed = (bits + keys) * _MIX_FACTOR
    mixed = (mixed ^ (mixed >> _MIX_SHIFT)) * keys
    return torch.stack([bits.sum(), mixed.sum()])


def digest(numbers: Mapping[str, Any]) -> Tensor:
    """Return a 128-bit hash of numbers as two 64-bit integers; times and addresses of objects are left out."""
    hashed = hashlib.blake2b(_text(numbers), digest_size=16).digest()
    return torch.tensor([int.from_bytes(part, "little", signed=True) for part in (hashed[:8], hashed[8:])])


def short_digest(numbers: Mapping[str, Any]) -> int:
    """Return a hash of numbers that a float64 holds exactly: 48 bits; times are left out."""
    hashed = hashlib.blake2b(_text(numbers), digest_size=_DIGEST_BYTES).digest()
    return int.from_bytes(hashed, "little")


def quick_fingerprint(vector: Tensor) -> int:
    """Return 48 bits that depend on the sums of 32 neighbouring words of a vector.

    It costs little more than one sum over the vector. Changes that leave every sum as it is, such as two exchanged
    neighbours, are found by `fingerprint` only.
    """
    words = vector.detach().contiguous()
    words = words.view(torch.int32 if words.element_size() % 4 == 0 else _INTEGER_TYPES[words.element_size()])
    rows = len(words) // _ROW_WIDTH
    sums = words[: rows * _ROW_WIDTH].view(rows, _ROW_WIDTH).sum(1)
    mixed = fingerprint(torch.cat([sums, words[rows * _ROW_WIDTH :].long()]))
    return int(mixed[1]) & ((1 << 8 * _DIGEST_BYTES) - 1)


def _text(numbers: Mapping[str, Any]) -> bytes:
    """Return numbers as text that is equal in all processes."""
    return without_addresses(repr(_without_times(numbers))).encode()


def _without_times(entry: Any) -> Any:
    """Return nested mappings without their entries "seconds", which differ between the ranks."""
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
