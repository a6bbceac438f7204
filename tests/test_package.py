"""The wheel: what is in it, and that it works on its own."""

from __future__ import annotations

import ast
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
    assert "sanc = sanc.__main__:main" in (tmp_path / "unpacked" / entry).read_text()
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


def test_names_are_imported_when_they_are_used_and_need_torch_numpy_and_scipy_only():
    code = (
        "import sys, sanc; a = 'torch' in sys.modules; sanc.minimize; b = 'torch' in sys.modules; print(a, b); "
        "sanc.SANC; extras = ('sklearn', 'matplotlib', 'rich', 'typer', 'pooch'); "
        "print(any(name in sys.modules for name in extras)); "
        "import sanc.minimisation, sanc.minimisation.certification; "
        "print(callable(sanc.minimize), callable(sanc.certificate))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False", "True", "True"]
    assert set(sanc.__all__) <= set(dir(sanc)) and all(getattr(sanc, name) is not None for name in sanc.__all__)
    assert sanc.__version__
    with pytest.raises(AttributeError, match="no attribute 'minimise'"):
        sanc.minimise  # noqa: B018


@pytest.mark.parametrize(("name", "words"), [
    ("minimise", "did you mean 'minimize'"), ("Sanc", "did you mean 'SANC'"), ("sanc", "did you mean 'SANC'"),
    *((name, "import sanc.sklearn, which has it") for name in sanc._ESTIMATORS),
])  # fmt: skip
def test_a_name_of_another_spelling_or_place_has_a_remedy(name, words):
    with pytest.raises(AttributeError, match=f"no attribute '{name}': {words}"):
        getattr(sanc, name)


def test_the_names_of_estimators_are_those_of_their_package():
    estimators = pytest.importorskip("sanc.sklearn", reason="scikit-learn is not installed", exc_type=ImportError)
    assert set(sanc._ESTIMATORS) == set(estimators.__all__)


def test_type_checkers_see_the_names_where_they_live():
    tree = ast.parse(Path(sanc.__file__).read_text())
    block, _ = (node for node in tree.body if isinstance(node, ast.If))
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body}
    assert all(alias.asname == alias.name for node in block.body for alias in node.names)  # the name is public
    assert seen.pop("sanc") == sanc._MODULES == ("errors", "extend", "problems", "theory")
    assert seen == sanc._HOMES
