"""Add to the site what docs/ does not contain: pages elsewhere in the repository, presets and the command line.

`mkdocs.yml` names this file as a hook. Links from a page to files that are no pages, such as source, become plain text,
since the site does not contain them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

import sanc
from sanc.lab.cli import app

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from addresses import addresses  # noqa: E402

ELSEWHERE = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages at the root of the repository, and their paths on the site."""
COMMANDS = ("", "run", "reproduce", "report", "datasets", "datasets get", "demo")
PRESETS = "<!-- presets -->"
"""Mark that the table of presets replaces."""


def on_config(config: Any) -> Any:
    """Take the addresses of the project from pyproject.toml."""
    known = addresses()
    config["site_url"] = f"{known['Documentation']}/"
    links = [f'<a href="{known[name]}">{name.lower()}</a>' for name in ("Source", "Issues")]
    config["copyright"] = f"sanc {sanc.__version__}, {', '.join(links)}"
    return config


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
    """Insert the table of presets, and replace links to files that the site does not contain by their text.

    The source archive has no pictures of results, and their place is then empty.
    """
    here = Path(config["docs_dir"]) / Path(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        outside = target.exists() and not target.is_relative_to(config["docs_dir"])
        return match[1] if outside else match[0]

    filled = markdown.replace(PRESETS, presets()) if PRESETS in markdown else markdown
    if not (ROOT / "docs" / "results" / "figures").is_dir():
        filled = re.sub(r"!?\[([^\]]*)\]\([^)]*(?:figures|networks)/[^)]+\.png\)", r"\1", filled)
    return re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)", replace, filled)


def presets() -> str:
    """Return a table of every setting in every preset."""
    head = [f"`{name}`" for name in sanc.PRESETS]
    lines = [f"| setting | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    composed = [preset.options() for preset in sanc.PRESETS.values()]
    for name in dict.fromkeys(name for options in composed for name in options):
        shown = [f"`{_written(options[name])}`" if name in options else "" for options in composed]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines)


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def command_line() -> str:
    """Return a page with the help of every command as printed."""
    parts = ["# Command line\n\n`python -m sanc` is the same command. [The laboratory](../lab.md) describes its use.\n"]
    plain = {"COLUMNS": "100", "TERM": "dumb"}
    for name in COMMANDS:
        said = CliRunner().invoke(app, [*name.split(), "--help"], env=plain, prog_name="sanc")
        lines = "\n".join(line.rstrip() for line in said.output.splitlines())
        parts.append(f"## `{f'sanc {name}'.strip()}`\n\n```text\n{lines.strip()}\n```\n")
    return "\n".join(parts)
