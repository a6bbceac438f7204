"""The answers of callbacks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def asks_to_stop(callback: Callable[..., Any], *args: Any, **keywords: Any) -> bool:
    """Call a callback; return whether it asks to stop, by StopIteration or by True of Python, NumPy or torch."""
    try:
        returned = callback(*args, **keywords)
    except StopIteration:
        return True
    kind, size = str(getattr(returned, "dtype", type(returned).__name__)), math.prod(getattr(returned, "shape", ()))
    return kind in ("bool", "torch.bool") and size == 1 and bool(returned)
