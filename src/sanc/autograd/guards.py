"""The only module that reads or changes states of other libraries that hold for the whole process.

The random generators of torch are in `generators.py`, and the hook that finds the modules of a step in `buffers.py`.

Such a state may belong to another object of the process, such as an optimiser of another model. Each function therefore
takes the object that it examines as an argument, and returns a result for that object only.

Two other libraries are detected elsewhere, from values of the call: `sanc.ranks` detects DistributedDataParallel from
the gradients of the ranks, and `sanc.optim.first_step` a GradScaler from the gradients that the closure leaves.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
ReturnT = TypeVar("ReturnT")


def accumulated_batches(parameters: Sequence[Tensor]) -> int:
    """Return the number of batches over which accelerate accumulates gradients for this step of these parameters.

    accelerate has one such number for the whole process. It matters only for steps that are called by accelerate's
    wrapper of the optimiser, which skips some of them. The wrapper is searched for among the callers; 1 without one.
    """
    state, wrappers = sys.modules.get("accelerate.state"), sys.modules.get("accelerate.optimizer")
    if state is None or wrappers is None or (batches := int(state.GradientState().num_steps)) == 1:
        return 1
    stepped = set(map(id, parameters))
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(wrappers):
            caller = frame.f_locals.get("self")
            if isinstance(caller, wrappers.AcceleratedOptimizer):
                wrapped = {id(p) for group in caller.param_groups for p in group["params"]}
                if stepped <= wrapped:
                    return batches
        frame = frame.f_back  # type: ignore[assignment]
    return 1


def autocast_of(device: torch.device) -> tuple[str, torch.dtype] | None:
    """Return the device type and precision of autocast in this thread on devices of this type; None if it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return device.type, torch.get_autocast_dtype(device.type)


def is_imported(package: str) -> bool:
    """Return whether the process has imported a package, so that values may be of its types."""
    return package in sys.modules


def is_traced() -> bool:
    """Return whether torch.compile is tracing the calling function, instead of running it."""
    return torch.compiler.is_compiling()


def runs_uncompiled(function: Callable[P, ReturnT]) -> Callable[P, ReturnT]:
    """Return a function that runs as it was written where a function under torch.compile calls it: the graph breaks."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> ReturnT:
        if is_traced():
            return torch.compiler.disable(function)(*args, **options)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **options)

    return call


class _Uncompiled:
    """The state of `uncompiled`: the first block that begins sets torch's stance, the last one that ends resets it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._blocks:
                self._stance = torch.compiler.set_stance("force_eager")
            self._blocks += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._stance.__exit__(None, None, None)


_UNCOMPILED = _Uncompiled()


def uncompiled() -> AbstractContextManager[None]:
    """Return a context in which functions under torch.compile run as they were written.

    It applies to all threads, whose results do not depend on it, apart from rounding. Blocks may be nested, and several
    threads may enter it.
    """
    return _UNCOMPILED


def donates_buffers(error: RuntimeError) -> bool:
    """Return whether compiled code rejects a gradient with a graph, because it overwrites what the graph would need.

    torch.compile decides this in the first backward pass of the code, if that has no graph. Models of one class share
    code, so that pass may belong to another optimiser or an earlier model. Such code has no second derivative either;
    without donated buffers it raises that error later. If torch changes the message, its own error is raised.
    """
    return "compiled with non-empty donated buffers" in str(error)


def before_forward(hook: Callable[[nn.Module, Any], None]) -> RemovableHandle:
    """Call a hook before the forward pass of every module of the process, also modules of other optimisers."""
    return register_module_forward_pre_hook(hook)
