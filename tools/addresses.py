"""The addresses of the project, from pyproject.toml, and README.md with links that work outside the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def addresses() -> dict[str, str]:
    """Return the addresses of pyproject.toml by their names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, str] = tomllib.load(file)["project"]["urls"]
    return found


def readme() -> str:
    """Return README.md with links to the files and pictures of the repository in place of relative ones."""
    source = addresses()["Source"]

    def replace(match: re.Match[str]) -> str:
        view = "raw" if match[1] == "!" else "blob"
        return f"{match[1]}[{match[2]}]({source}/{view}/main/{match[3]})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", replace, text)
