"""Deprecated names: `Judge` is `sanc.core.sigma.SigmaRule`, and the ratio test is in `sanc.core.ratio`."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

_MOVED = {
    "Judge": "sanc.core.sigma.SigmaRule",
    "SigmaUpdate": "sanc.core.sigma.SigmaUpdate",
    "Verdict": "sanc.core.ratio.Verdict",
    "classify": "sanc.core.ratio.classify",
    "ratio": "sanc.core.ratio.ratio",
}
"""Names that this module had, and where each is now."""


def __getattr__(name: str) -> Any:
    """Return an object under its earlier name, with a warning that has the new one."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"sanc.core.judge.{name} is now {_MOVED[name]}", DeprecationWarning, stacklevel=2)
    module, _, new_name = _MOVED[name].rpartition(".")
    return getattr(import_module(module), new_name)
