"""Prepare docstrings for the pages of the reference.

`mkdocs.yml` names this file as an extension of griffe, which reads docstrings from the source. The docstrings of the
optimisers are assembled at import, and formulas in docstrings have the marks of reStructuredText.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Set
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"


class PreparedDocstrings(griffe.Extension):
    """Show the docstrings that `help` prints, with formulas between the marks of Markdown, and with links."""

    def __init__(self) -> None:
        super().__init__()
        pages = (page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
        self.documented = {name for text in pages for name in re.findall(r"^::: (sanc\.[\w.]+)$", text, re.M)}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Prepare the signature and the docstring of one object of this package."""
        if not obj.path.startswith("sanc"):
            return
        if isinstance(obj, griffe.Function):
            without_catch_alls(obj)
        elif isinstance(obj, griffe.Class) and isinstance(init := obj.members.get("__init__"), griffe.Function):
            for parameter in init.parameters:
                parameter.default = default_of(parameter.default)
        if obj.docstring is None:
            return
        text = inspect.cleandoc(obj.docstring.value)
        if obj.is_class and obj.parent is obj.module:
            thing = getattr(import_module(obj.module.path), obj.name, None)
            text = inspect.getdoc(thing) or text
        obj.docstring.value = with_links(with_formulas(text), self.documented - {obj.path})


def without_catch_alls(function: griffe.Function) -> None:
    """Remove the parameters that accept nothing, and exist for the text of an error."""
    for name in [parameter.name for parameter in function.parameters if str(parameter.annotation) == "Never"]:
        del function.parameters[name]


def default_of(value: Any) -> Any:
    """Return the default of a field whose value also has the range of a setting."""
    is_setting = isinstance(value, griffe.ExprCall) and str(value.function) == "setting"
    return value.arguments[0] if is_setting else value


def with_links(text: str, documented: Set[str]) -> str:
    """Return the text with links from names such as `sanc.Method` to their entries, outside examples."""

    def linked(match: re.Match[str]) -> str:
        return f"[{match[0]}][{match[1]}]" if match[1] in documented else match[0]

    return re.sub(r"(?<![`\[])`(sanc\.[\w.]+)`(?!`)", linked, text)


def with_formulas(text: str) -> str:
    """Return the text with formulas in dollar signs, which the site renders."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    return re.sub(
        r"^\.\. math::((?: .*)?(?:\n[ ]{4}.*)*)", lambda match: f"$${' '.join(match[1].split())}$$", text, flags=re.M
    )
