"""Print the oldest versions that pyproject.toml admits, as constraints for pip: `tools/oldest.py pyproject.toml`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("sklearn", "lab", "test")
"""Extras whose minima are printed beside those of the package itself: what the tests run with."""


def oldest(text: str) -> list[str]:
    """Return ``name==minimum`` for every requirement of the package and of `EXTRAS` that states one."""
    project = tomllib.loads(text)["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    pins = []
    for line in wanted:
        match = re.match(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)", line)
        if match:
            pins.append(f"{match[1]}=={match[2]}")
        elif not line.startswith("sanc["):
            raise SystemExit(f"pyproject.toml asks for {line!r} without a minimum: write name>=version.")
    return pins


if __name__ == "__main__":
    print("\n".join(oldest(Path(sys.argv[1]).read_text(encoding="utf-8"))))
