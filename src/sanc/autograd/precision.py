"""Autocast around a step is for the caller's closures: the arithmetic of the step keeps the type of the parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


class _Here(threading.local):
    """The caller's autocast in this thread, while it is off."""

    theirs: tuple[str, torch.dtype] | None = None


_HERE = _Here()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Turn autocast off inside the block, except in `callers_precision`."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    before, _HERE.theirs = _HERE.theirs, (device.type, torch.get_autocast_dtype(device.type))
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _HERE.theirs = before


def callers_precision() -> AbstractContextManager[object]:
    """Return a context with the autocast that the caller had.

    Weights that it cast without a graph, for a value, are of no use for a gradient: they are not kept.
    """
    return nullcontext() if _HERE.theirs is None else torch.autocast(*_HERE.theirs, cache_enabled=False)
