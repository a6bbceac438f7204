"""Ctrl-C waits while a step changes things, and comes through while the caller's own code runs.

Python raises KeyboardInterrupt between any two instructions, also halfway through writing parameters and state. While a
step works a handler of ours only notes it; the caller's handler answers at the next closure, or after the step.
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

_waiting: list[tuple[int, FrameType | None]] = []
_theirs: Any = None  # the caller's handler; of no meaning unless ours is in its place


def _note(number: int, frame: FrameType | None) -> None:
    _waiting.append((number, frame))


def _answer() -> None:
    """Put the caller's handler back, and let it answer what came meanwhile."""
    signal.signal(signal.SIGINT, _theirs)
    if _waiting:
        last = _waiting[-1]
        _waiting.clear()
        _theirs(*last)


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """Hold Ctrl-C back until the function has ended; only the main thread ever sees one."""

    @wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        global _theirs
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler) or handler is _note:
            return function(*args, **kwargs)  # not ours to hold, nobody waits for it, or it is held
        _waiting.clear()
        outer, _theirs = _theirs, handler
        try:
            signal.signal(signal.SIGINT, _note)
            return function(*args, **kwargs)
        finally:
            try:
                _answer()
            finally:
                _theirs = outer

    return held


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C through again inside the block."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not _note:
        yield
        return
    try:
        _answer()
        yield
    finally:
        signal.signal(signal.SIGINT, _note)
