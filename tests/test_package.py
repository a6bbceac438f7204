"""The wheel: what is in it, and that it works on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sanc

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_everything_and_imports(tmp_path):
    """Built from the tree, unpacked elsewhere, imported from there: nothing may lean on the checkout."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "unpacked")
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "sanc").rglob("*.py")}
    assert modules <= names
    assert {"sanc/py.typed", "sanc/lab/page.html", "sanc/lab/page.css", "sanc/lab/page.js"} <= names
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in names)
    (entry,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "sanc = sanc.lab.cli:main" in (tmp_path / "unpacked" / entry).read_text()
    code = (
        "import sanc, torch, sys; print(sanc.__file__); "
        "print(sanc.minimize(lambda x: (x ** 2).sum(), torch.ones(2)).success); print('sklearn' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "unpacked")},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    place, success, lab = done.stdout.splitlines()
    assert place.startswith(str(tmp_path)) and success == "True"
    assert lab == "False"  # the core imports nothing of the laboratory


def test_the_core_needs_torch_numpy_and_scipy_only():
    code = (
        "import sanc, sys; print([m for m in ('sklearn', 'matplotlib', 'rich', 'typer', 'pooch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert sanc.__version__
