"""The problems of `benchmarks.least_squares`, the check of end points, and the command."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from benchmarks import least_squares
from benchmarks.least_squares_problems import problems
from benchmarks.long_fits import ALL_FITS


@cache
def by_name():
    return {problem.name: problem for problem in problems()}


# Sums of squares at the solutions, from the tables of Moré, Garbow and Hillstrom (1981).
SOLUTIONS = {
    "Rosenbrock-1": ([1.0, 1.0], 0.0),
    "Freudenstein-Roth-1": ([5.0, 4.0], 0.0),
    "Powell-badly-scaled-1": ([1.098159e-5, 9.106146], 0.0),
    "Brown-badly-scaled-1": ([1e6, 2e-6], 0.0),
    "Beale-1": ([3.0, 0.5], 0.0),
    "Jennrich-Sampson-1": ([0.257825, 0.257825], 124.362),
    "Helical-valley-1": ([1.0, 0.0, 0.0], 0.0),
    "Box-3D-1": ([1.0, 10.0, 1.0], 0.0),
    "Wood-1": ([1.0] * 4, 0.0),
    "Biggs-EXP6-1": ([1.0, 10.0, 1.0, 5.0, 4.0, 3.0], 0.0),
    "Variably-dimensioned-1": ([1.0] * 10, 0.0),
    "Brown-almost-linear-1": ([1.0] * 10, 0.0),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_residuals_vanish_at_published_solutions(name):
    x, squares = SOLUTIONS[name]
    r = by_name()[name].fun(np.array(x))
    assert np.isclose(r @ r, squares, rtol=1e-5, atol=1e-7)


def test_there_are_three_starts_and_bounds_that_cut():
    assert len(by_name()) == 2 * len(ALL_FITS) + 84
    problem = by_name()["Wood-10"]
    assert np.array_equal(problem.start, 10 * by_name()["Wood-1"].start)
    cut = problem.with_cut(np.ones(4))
    assert cut.is_bounded and not problem.is_bounded
    assert cut.upper.tolist() == [0.9, np.inf, np.inf, 0.9] and np.all(cut.start <= cut.upper)


def test_the_check_distinguishes_solutions_from_saddles_and_other_points():
    problem = by_name()["Rosenbrock-1"]
    assert least_squares.is_second_order(problem, np.ones(2))
    assert not least_squares.is_second_order(problem, problem.start)
    cut = problem.with_cut(np.ones(2))
    assert least_squares.is_second_order(cut, np.array([0.9, 0.81]))
    saddle = replace(
        problem,
        residuals=lambda x: torch.stack([(x[0] - 1) * (x[1] - 1) - 1, 0.1 * (x[0] - 1), 0.1 * (x[1] - 1)]),
    )
    assert not least_squares.is_second_order(saddle, np.ones(2))


def test_the_command_writes_its_files(tmp_path, capsys):
    names = ["DanWood-2", "Rosenbrock-1"]
    least_squares.main(["--problems", *names, "--methods", "sanc", "trf-jac", "--out", str(tmp_path)])
    assert "| sanc" in capsys.readouterr().out
    assert {"least_squares.json", "least_squares.csv", "table.md"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "least_squares.csv").read_text().count("\n") >= 8
