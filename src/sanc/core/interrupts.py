"""Delay Ctrl-C while a step changes parameters and state, and deliver it while the caller's code runs.

Python raises KeyboardInterrupt between any two instructions, also while parameters and state are being written. During
a step our handler only records the signal. The caller's handler runs at the next closure, or after the step.
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

_pending: list[tuple[int, FrameType | None]] = []
_callers: Any = None  # the handler of the caller, while ours is installed


def _record(number: int, frame: FrameType | None) -> None:
    _pending.append((number, frame))


def _deliver() -> None:
    """Restore the caller's handler, and call it if a signal is pending."""
    signal.signal(signal.SIGINT, _callers)
    if _pending:
        last = _pending[-1]
        _pending.clear()
        _callers(*last)


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Delay Ctrl-C until the function has returned; only the main thread receives it."""

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        global _callers
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler) or handler is _record:
            return function(*args, **kwargs)  # another thread, no handler, or delayed already
        _pending.clear()
        outer, _callers = _callers, handler
        try:
            signal.signal(signal.SIGINT, _record)
            return function(*args, **kwargs)
        finally:
            try:
                _deliver()
            finally:
                _callers = outer

    return held


@contextmanager
def interruptible() -> Iterator[None]:
    """Deliver Ctrl-C inside the block."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not _record:
        yield
        return
    try:
        _deliver()
        yield
    finally:
        signal.signal(signal.SIGINT, _record)
