"""Make the page of the package: README.md with links that lead to the repository; all else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from addresses import readme

setup(long_description=readme(), long_description_content_type="text/markdown")
