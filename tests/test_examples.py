"""Every example runs, and shows what it says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SAYS = {
    "train_digits.py": ["accuracy", "gradients in all"],
    "resume_training.py": ["bit for bit the same: True"],
    "escape_a_saddle.py": ["L-BFGS:", "negative curvature was found", "sanc.minimize:", "a second-order point"],
    "scipy_habits.py": ["message: Converged", "3-point: error", "iterations in all"],
    "fit_a_table.py": ["LogisticRegression()", "NonconvexSVM()", "the best of a search"],
    "own_finite_sum.py": ["{}: error 0.0", "Converged to a second-order point", "'batch_size': 100"],
}


def test_all_examples_are_known_and_described():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SAYS)
    assert all(len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 40 for name in scripts)
    page = (ROOT / "docs" / "examples.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


@pytest.mark.parametrize("name", SAYS)
def test_a_script_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for words in SAYS[name]:
        assert words in said


def test_the_notebook_runs_from_top_to_bottom(capsys):
    """Its cells are plain Python, so that no kernel is needed to run them."""
    book = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    namespace = {"__name__": "notebook"}
    with mpl.rc_context({"backend": "agg"}):
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                exec(compile("".join(cell["source"]), cell["id"], "exec"), namespace)
    said = capsys.readouterr().out
    assert "certificate:" in said and namespace["fitted"].score(namespace["X"], namespace["labels"]) > 0.95
    values = [record.value for record in namespace["records"]]
    assert sum(values[-6:]) < 0.7 * sum(values[:6])
