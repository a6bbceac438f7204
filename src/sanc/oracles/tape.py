"""A linear computation, written down while it runs once and repeated for other inputs.

Forward-mode differentiation of a gradient computes it anew for every direction. The directions enter linearly, so a
recording of the operations that they reach, with everything else as constants, is the Hessian at this point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_UNREPEATABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor stands in the memory of a replay."""

    number: int


@dataclass(frozen=True, slots=True)
class _Line:
    """One operation: its arguments with places for tensors, the places of its results, and those not needed after."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[_Place | None]
    several: bool
    writes: bool
    last: list[int]


class Tape(TorchDispatchMode):
    """Record what happens to some tensors.

    Parameters
    ----------
    inputs : sequence of Tensor
        The tensors that will be others in a replay.

    Attributes
    ----------
    broken : str
        Why the recording cannot be replayed; empty where it can.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.broken = ""
        self._count = 0
        self._lines: list[_Line] = []
        self._known: dict[int, tuple[_Place, Tensor]] = {}  # what depends on the inputs, alive so that ids are unique
        self._constants: dict[int, tuple[_Place, Tensor, int]] = {}
        self._inputs = [(t.shape, t.stride(), t.dtype, t.device) for t in inputs]
        self._outputs: list[_Place | Tensor | None] = []
        for tensor in inputs:
            self._place(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = _tensors([*args, *kwargs.values()])
        written = _written(func, args, kwargs) if func._schema.is_mutable else []
        if any(tensor._is_zerotensor() for tensor in touched):
            if any(tensor._is_zerotensor() for tensor in written):
                raise NotImplementedError("ZeroTensors are immutable")
            if not _is_view(func):  # kernels would read the memory that these have not
                args, kwargs = [_solid(a) for a in args], {name: _solid(a) for name, a in kwargs.items()}
        if self.broken:
            return func(*args, **kwargs)
        if not any(id(tensor) in self._known for tensor in touched):
            for tensor in written:
                self._keep_old(tensor)
            return func(*args, **kwargs)
        if any(id(tensor) not in self._known for tensor in written):
            self.broken = f"{func} writes into a tensor from elsewhere"
        if not _UNREPEATABLE.isdisjoint(func.tags):
            self.broken = f"{func} is random, or turns a tensor into a number"
        filled = [self._argument(a) for a in args], {name: self._argument(a) for name, a in kwargs.items()}
        answer = func(*args, **kwargs)
        several = isinstance(answer, tuple | list)
        answers = answer if several else [answer]
        results = [self._place(a) if isinstance(a, Tensor) else None for a in answers]
        self._lines.append(_Line(func, *filled, results, several, bool(written), []))
        return answer

    def _place(self, tensor: Tensor) -> _Place:
        place = _Place(self._count)
        self._known[id(tensor)] = place, tensor
        self._count += 1
        return place

    def _argument(self, item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [self._argument(inner) for inner in item]
        if not isinstance(item, Tensor):
            return item
        if id(item) in self._known:
            return self._known[id(item)][0]
        if id(item) not in self._constants:
            self._constants[id(item)] = _Place(self._count), item, item._version
            self._count += 1
        return self._constants[id(item)][0]

    def _keep_old(self, written: Tensor) -> None:
        """Copy the constants that share memory with a tensor before it changes."""
        memory = written.untyped_storage().data_ptr()
        for key, (place, tensor, _) in list(self._constants.items()):
            if tensor.untyped_storage().data_ptr() == memory:
                copy = tensor.clone()
                del self._constants[key]
                self._constants[id(copy)] = place, copy, copy._version

    def finish(self, outputs: Sequence[Tensor | None]) -> None:
        """End the recording: say what a replay returns, and drop what that does not need."""
        self._outputs = [self._known[id(t)][0] if id(t) in self._known else t for t in outputs]
        if not self.broken and not self.valid():
            self.broken = "a constant changed while it was recorded"
        if any(isinstance(t, Tensor) and not t._is_zerotensor() and bool(t.any()) for t in self._outputs):
            self.broken = "something was computed out of sight"  # what the inputs do not reach is zero
        needed = {p.number for p in self._outputs if isinstance(p, _Place)}
        kept: list[_Line] = []
        for line in reversed(self._lines):
            if line.writes or any(p is not None and p.number in needed for p in line.results):
                read = {p.number for p in _places([*line.args, *line.kwargs.values()])}
                line.last.extend(read - needed)
                needed |= read
                kept.append(line)
        self._lines = kept[::-1]
        self._constants = {k: entry for k, entry in self._constants.items() if entry[0].number in needed}
        keep = {entry[0].number for entry in self._constants.values()}
        for line in self._lines:
            line.last[:] = [number for number in line.last if number not in keep]
        self._known.clear()

    def valid(self) -> bool:
        """Whether all constants are what they were."""
        return all(tensor._version == version for _, tensor, version in self._constants.values())

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Make the recorded computation with other inputs."""
        memory: list[Any] = [None] * self._count
        for number, (tensor, (shape, stride, dtype, device)) in enumerate(zip(inputs, self._inputs, strict=True)):
            # Laid out as they were, and copies, since an operation may write into them.
            memory[number] = torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)
        for place, tensor, _ in self._constants.values():
            memory[place.number] = tensor
        for line in self._lines:
            args = [_filled(a, memory) for a in line.args]
            answer = line.function(*args, **{name: _filled(a, memory) for name, a in line.kwargs.items()})
            del args
            for target, result in zip(line.results, answer if line.several else (answer,), strict=True):
                if target is not None:
                    memory[target.number] = result
            for number in line.last:
                memory[number] = None
        return [memory[p.number] if isinstance(p, _Place) else p for p in self._outputs]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([given[name] for name in changed if name in given])


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def _solid(item: Any) -> Any:
    """Give torch's tensors of nothing but zeros, which have no memory, some."""
    if isinstance(item, list | tuple):
        return [_solid(inner) for inner in item]
    if isinstance(item, Tensor) and item._is_zerotensor():
        return torch.zeros(item.shape, dtype=item.dtype, device=item.device)
    return item


def _tensors(items: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            found.extend(_tensors(item))
    return found


def _places(items: Sequence[Any]) -> Iterator[_Place]:
    for item in items:
        if isinstance(item, _Place):
            yield item
        elif isinstance(item, list):
            yield from _places(item)


def _filled(item: Any, memory: list[Any]) -> Any:
    if isinstance(item, _Place):
        return memory[item.number]
    return [_filled(inner, memory) for inner in item] if isinstance(item, list) else item
