"""Delay Ctrl-C while a step changes parameters and state, and deliver it while the caller's code runs.

Python raises KeyboardInterrupt between any two instructions, also while parameters and state are being written. During
a step our handler only stores the signal. The caller's handler runs at the next closure, or after the step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_pending: list[tuple[int, FrameType | None]] = []  # arguments of the delayed signals
_caller_handler: Any = None  # while ours is installed


def _defer(number: int, frame: FrameType | None) -> None:
    """Handle the signal later."""
    _pending.append((number, frame))


def _deliver() -> None:
    """Restore the caller's handler, and call it if a signal is pending."""
    signal.signal(signal.SIGINT, _caller_handler)
    if _pending:
        last_signal = _pending[-1]
        _pending.clear()
        _caller_handler(*last_signal)


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Delay Ctrl-C until the function has returned. Only the main thread receives the signal."""

    @wraps(function)
    def delayed(*args: P.args, **kwargs: P.kwargs) -> T:
        global _caller_handler
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler) or handler is _defer:
            return function(*args, **kwargs)  # another thread, no Python handler, or already inside a delayed call
        _pending.clear()
        outer_handler, _caller_handler = _caller_handler, handler
        try:
            signal.signal(signal.SIGINT, _defer)
            return function(*args, **kwargs)
        finally:
            try:
                _deliver()
            finally:
                _caller_handler = outer_handler

    return delayed


@contextmanager
def interruptible() -> Iterator[None]:
    """Deliver Ctrl-C inside the block."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not _defer:
        yield
        return
    try:
        _deliver()
        yield
    finally:
        signal.signal(signal.SIGINT, _defer)
