"""What the site has beside docs/: pages that lie elsewhere in the repository, and what the program says of itself.

`mkdocs.yml` names this file as a hook. Links from a page to files that are no pages, such as source, become plain text,
since the site does not have them.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

import sanc
from sanc.lab.cli import app

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages at the root of the repository, and where the site has them."""
COMMANDS = ("", "run", "reproduce", "report", "datasets", "datasets get", "demo")
PRESETS = "<!-- presets -->"
"""Where a page has the table of presets."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](").replace("](README.md", "](index.md")
        for other, target in ELSEWHERE.items():
            text = text.replace(f"]({other}", f"]({target}")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in the table of presets, and turn links to files that the site does not have into their text."""
    here = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        outside = target.exists() and not target.is_relative_to(config["docs_dir"])
        return match[1] if outside else match[0]

    filled = markdown.replace(PRESETS, presets()) if PRESETS in markdown else markdown
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)", replace, filled)


def presets() -> str:
    """Return a table of every setting in every preset."""
    head = [f"`{name}`" for name in sanc.PRESETS]
    lines = [f"| setting | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for item in fields(sanc.Settings):
        values = [getattr(settings, item.name) for settings in sanc.PRESETS.values()]
        shown = [f"`{_written(value)}`" for value in values]
        lines.append(f"| `{item.name}` | {' | '.join(shown)} |")
    lines += ["", "The numbers of the iteration on samples, which only `robust` has:", ""]
    lines += ["| setting | value |", "|---|---|"]
    numbers = sanc.MinibatchSettings()
    lines += [f"| `{item.name}` | `{_written(getattr(numbers, item.name))}` |" for item in fields(numbers)]
    return "\n".join(lines)


def _written(value: Any) -> str:
    if isinstance(value, sanc.MinibatchSettings):
        return "MinibatchSettings()"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def command_line() -> str:
    """Return a page with the help of every command, as it is printed."""
    parts = ["# Command line\n\n`python -m sanc` is the same command; [the laboratory](../lab.md) says what it does.\n"]
    plain = {"COLUMNS": "100", "TERM": "dumb"}
    for name in COMMANDS:
        said = CliRunner().invoke(app, [*name.split(), "--help"], env=plain, prog_name="sanc")
        lines = "\n".join(line.rstrip() for line in said.output.splitlines())
        parts.append(f"## `{f'sanc {name}'.strip()}`\n\n```text\n{lines.strip()}\n```\n")
    return "\n".join(parts)
