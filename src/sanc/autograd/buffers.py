"""The buffers of modules during evaluations, such as the running averages of BatchNorm.

All oracles share one hook before the forward pass of modules; it notifies the `Buffers` of the thread that runs the
module.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sanc.autograd.guards import before_forward, is_traced


class _BufferStack(threading.local):
    """The `Buffers` whose blocks this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Buffers] = []


_ACTIVE_BUFFERS = _BufferStack()


def _before_forward(module: nn.Module, _: object) -> None:
    """Notify the `Buffers` of this thread that a module is about to run; compiled code skips this."""
    if not is_traced():
        for buffers in _ACTIVE_BUFFERS.stack:
            buffers.save(module)


class _ForwardHook:
    """Context in which a hook runs before the forward pass of every module.

    The hook slows small modules down, so the last block that ends removes it. It remains if `is_permanent` is set,
    since torch would recompile a compiled model for every new hook.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._handle: RemovableHandle | None = None
        self.is_permanent = False

    def __enter__(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._handle is None:
                self._handle = before_forward(_before_forward)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks and not self.is_permanent and self._handle is not None:
                self._handle.remove()
                self._handle = None


FORWARD_HOOK = _ForwardHook()


class Buffers:
    """Context that copies the buffers of modules in training mode before they run.

    It copies the buffers of each module that the hook reports, and of its submodules, which compiled code may run
    without the hook. It also copies the buffers of `earlier_owners`, which compiled code may run as a whole.

    Attributes
    ----------
    owners : list of Module
        Modules with buffers, in training mode or not.
    calls : int
        Number of calls of modules that the hook reported. It is smaller than usual if compiled code runs some of them.
    """

    def __init__(self, earlier_owners: Iterable[nn.Module] = ()) -> None:
        self._saved: dict[tuple[int, str], tuple[nn.Module, str, Tensor, Tensor]] = {}
        self._visited: set[int] = set()
        self._earlier_owners = list(earlier_owners)
        self.owners: list[nn.Module] = []
        self.calls = 0

    def __enter__(self) -> Buffers:
        for module in self._earlier_owners:
            self._copy(module)
        FORWARD_HOOK.__enter__()
        _ACTIVE_BUFFERS.stack.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _ACTIVE_BUFFERS.stack.remove(self)
        FORWARD_HOOK.__exit__()

    def save(self, module: nn.Module) -> None:
        """Copy the buffers of a module and its submodules before its first call."""
        self.calls += 1
        if id(module) not in self._visited:
            for part in module.modules():
                self._visited.add(id(part))
                self._copy(part)

    def _copy(self, module: nn.Module) -> None:
        """Copy the buffers of a module in training mode, but not of its submodules."""
        has_buffers = False
        for name, buffer in module.named_buffers(recurse=False):
            has_buffers = True
            if module.training and (id(module), name) not in self._saved:
                self._saved[id(module), name] = (module, name, buffer, buffer.detach().clone())
        if has_buffers:
            self.owners.append(module)

    def restore(self) -> None:
        """Restore the values of all copied buffers."""
        for module, name, buffer, values in self._saved.values():
            # .data does not raise the version of the buffer, so autograd accepts a graph that is kept for more
            # products. Fused kernels update buffers without a new version, too.
            buffer.data.copy_(values)
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


class RestoredBuffers(Buffers):
    """Restores the buffers of modules in training mode at the end of the block."""

    def __exit__(self, *exception: object) -> None:
        try:
            self.restore()
        finally:
            super().__exit__(*exception)


class RepeatableBuffers(Buffers):
    """Buffers around a call that may be repeated: `restore` also resets the counts of the blocks around it."""

    def __enter__(self) -> RepeatableBuffers:
        self._counts = [(buffers, buffers.calls) for buffers in _ACTIVE_BUFFERS.stack]
        super().__enter__()
        return self

    def restore(self) -> None:
        super().restore()
        for buffers, calls in self._counts:
            buffers.calls = calls


class EvaluationMode(RestoredBuffers):
    """Switches every module that runs inside the block to evaluation mode until its end."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[nn.Module] = []

    def save(self, module: nn.Module) -> None:
        super().save(module)
        for part in module.modules():
            if part.training:
                self._trained.append(part)
                part.training = False

    def __exit__(self, *exception: object) -> None:
        for module in self._trained:
            module.training = True
        super().__exit__(*exception)
