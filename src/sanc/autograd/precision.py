"""Autocast for the caller's closures only: the arithmetic of a step keeps the type of the parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from sanc.autograd.guards import autocast_of


class _CallersAutocast(threading.local):
    """Device type and precision of the caller's autocast in this thread, while `full_precision` disables it."""

    active: tuple[str, torch.dtype] | None = None


_AUTOCAST = _CallersAutocast()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast inside the block, except in `callers_precision`."""
    autocast = autocast_of(device)
    if autocast is None:
        yield
        return
    before, _AUTOCAST.active = _AUTOCAST.active, autocast
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _AUTOCAST.active = before


def callers_precision() -> AbstractContextManager[object]:
    """Return a context with the caller's autocast.

    Its cache is off: weights that were cast without a graph, for a value, cannot be used for a gradient.
    """
    return nullcontext() if _AUTOCAST.active is None else torch.autocast(*_AUTOCAST.active, cache_enabled=False)
