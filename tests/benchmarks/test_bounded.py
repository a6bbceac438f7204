"""The problems of `benchmarks.bounded`, the check of end points, and the command."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bounded
from benchmarks.bounded_problems import problems
from benchmarks.common import zoo
from benchmarks.reporting import read_rows

PROBLEMS = problems()


def test_the_collection_has_two_halves():
    assert len({problem.name for problem in PROBLEMS}) == len(PROBLEMS) >= 60
    assert sum(problem.unseen for problem in PROBLEMS) == len(PROBLEMS) // 2
    assert min(problem.n for problem in PROBLEMS) == 2 and max(problem.n for problem in PROBLEMS) == 1000
    for problem in PROBLEMS:
        assert np.all(problem.lower <= problem.upper) and bounded.is_feasible(problem, problem.start)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.n <= 200], ids=lambda problem: problem.name)
def test_functions_are_finite_at_their_start(problem):
    value, g = zoo.value_and_gradient(problem.fun, problem.start)
    assert np.isfinite(value) and np.isfinite(g).all()


def test_the_check_detects_saddles_and_points_that_are_not_stationary():
    by_name = {problem.name: problem for problem in PROBLEMS}
    saddle = by_name["SADDLE-FACE"]
    g = zoo.value_and_gradient(saddle.fun, np.zeros(2))[1]
    assert bounded.projected_gradient(saddle, np.zeros(2), g) == 0.0 and bounded.lambda_min(saddle, np.zeros(2)) < -0.5
    corner = by_name["HS45"]
    assert bounded.lambda_min(corner, corner.upper) == np.inf
    assert not bounded.is_feasible(corner, corner.upper + 1.0)


def test_the_command_compares_methods(tmp_path, capsys):
    bounded.main(["--problems", "HS4", "HS5", "SADDLE-FACE", "--methods", "sanc", "L-BFGS-B", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| sanc     | –           |\n| L-BFGS-B | SADDLE-FACE |" in printed
    assert {"bounded.json", "bounded.csv", "table.md", "bounded.png"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "bounded.csv").read_text().count("\n") == 7
    certified = [run["method"] for run in read_rows(tmp_path / "bounded.csv") if run["certificate"]]
    assert set(certified) == {"sanc"}


def test_the_sentence_compares_with_l_bfgs_b():
    counts = {"sanc": (4, 3, 5, 1), "L-BFGS-B": (10, 10, 0, 0)}
    runs = [
        {"problem": p, "method": m, "solved": (m, p) != ("L-BFGS-B", "r"), "saddle": False, "outside": 0,
         "wrong": (m, p) == ("L-BFGS-B", "r"), "nfev": f, "njev": g, "products": h, "certificate": c}
        for p in "pqr" for m, (f, g, h, c) in counts.items()
    ]  # fmt: skip
    text = bounded.in_words(runs)
    assert "solves 3 of 3 problems with bounds, and 0 of its successes are wrong; L-BFGS-B solves 2, and 1" in text
    assert f"needs {7 / 20:.2f} times the evaluations" in text
    assert f"L-BFGS-B does {30 / (4 + 6 + 4 * 6):.2f} times the work" in text


def test_products_and_work_include_the_certificate():
    run = {"method": "sanc", "solved": True, "nfev": 5, "njev": 3, "products": 7, "certificate": 2}
    kinds = ("fg", "products", "work")
    assert [float(bounded.costs([run], "sanc", kind)[0]) for kind in kinds] == [8.0, 9.0, 5 + 2 * 3 + 4 * 9]
