"""Prepare docstrings for the pages of the reference.

`mkdocs.yml` names this file as an extension of griffe, which reads docstrings from the source. The docstrings of the
optimisers are assembled at import, and formulas in docstrings have the marks of reStructuredText.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe


class PreparedDocstrings(griffe.Extension):
    """Show the docstrings that `help` prints, with their formulas between the marks of Markdown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Prepare the docstring of one object of this package."""
        if obj.docstring is None or not obj.path.startswith("sanc"):
            return
        text = inspect.cleandoc(obj.docstring.value)
        if obj.is_class and obj.parent is obj.module:
            text = inspect.getdoc(getattr(import_module(obj.module.path), obj.name, None)) or text
        obj.docstring.value = with_formulas(text)


def with_formulas(text: str) -> str:
    """Return the text with formulas in dollar signs, which the site renders."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    return re.sub(
        r"^\.\. math::((?: .*)?(?:\n[ ]{4}.*)*)", lambda match: f"$${' '.join(match[1].split())}$$", text, flags=re.M
    )
