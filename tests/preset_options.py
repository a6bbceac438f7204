"""The options of a method in a preset, of which that of the authors is an object, and the classes of public pieces."""

from __future__ import annotations

from typing import Any

import sanc
from sanc.lab.authors import AUTHORS

PIECES = tuple(
    kind
    for kind in (getattr(sanc, name) for name in sanc.__all__)
    if isinstance(kind, type) and issubclass(kind, sanc.extend.Piece)
)
PRESETS = {"paper": "paper", "authors": AUTHORS, "robust": "robust"}


def composed(method: Any, preset: str, **settings: Any) -> dict[str, Any]:
    """Return the argument `preset`, and those of the settings that the method has in it."""
    name = method if isinstance(method, str) else method.method
    chosen: dict[str, Any] = {"preset": PRESETS[preset]}
    if preset == "authors" and name in ("cr", "crm"):
        chosen["sigma0"] = 5.0
    known = sanc.method_for(name, **chosen).options()
    return chosen | {name: value for name, value in settings.items() if name in known}
