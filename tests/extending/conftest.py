"""The pieces of docs/extending.md."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"


@pytest.fixture(scope="session")
def blocks():
    """The blocks of Python on the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def pieces(blocks):
    """The classes of the page."""
    page = sys.modules["extending_page"] = ModuleType("extending_page")  # dataclasses look their module up
    for block in blocks:
        exec(block, page.__dict__)
    return page
