"""The problems of `benchmarks.bounded`, the check of end points, and the command."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import bounded
from benchmarks.bounded_problems import problems
from benchmarks.common import zoo

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
