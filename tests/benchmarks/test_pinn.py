"""The equations of `benchmarks.pinn`, its table and its command."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.func import grad

from benchmarks import pinn


def test_the_solution_of_burgers_satisfies_equation_and_initial_values():
    x, t, h = torch.linspace(-0.9, 0.9, 7).double(), torch.full((7,), 0.4).double(), 1e-4
    u = lambda dx=0.0, dt=0.0: pinn.burgers_solution(torch.stack([x + dx, t + dt], 1))
    first, second = (u(h) - u(-h)) / (2 * h), (u(h) - 2 * u() + u(-h)) / h**2
    rate = (u(0.0, h) - u(0.0, -h)) / (2 * h)
    assert float((rate + u() * first - pinn.VISCOSITY * second).abs().max()) < 1e-4
    first = pinn.burgers_solution(torch.stack([x, torch.zeros_like(x)], 1))
    assert torch.allclose(first, -torch.sin(math.pi * x), atol=1e-5)


@pytest.mark.parametrize("name", ["poisson", "helmholtz"])
def test_the_solution_on_the_square_has_no_residuals(name):
    problem = pinn.equation(name, 0, "cpu", quick=True)
    interior, edge = (term.function for term in problem.residuals._terms)
    frequency = 1.0 if name == "poisson" else 4.0
    solution = lambda x: torch.sin(math.pi * x[0]) * torch.sin(frequency * math.pi * x[1])
    inside, q = problem.residuals._terms[0].points
    boundary = problem.residuals._terms[1].points[0]
    assert max(abs(float(interior(solution, x, value))) for x, value in zip(inside[:5], q[:5], strict=True)) < 1e-9
    assert max(abs(float(edge(solution, x))) for x in boundary) < 1e-12
    assert float(grad(solution)(inside[0])[0]) != 0.0


def test_the_best_rate_counts_and_the_factor_is_that_of_the_best_peer():
    run = lambda method, rate, error: {"equation": "poisson", "method": method, "rate": rate, "error": error}
    runs = [run("sanc", math.nan, 1e-6), run("lbfgs", math.nan, 1e-3)]
    runs += [run("soap", 1e-3, math.nan), run("soap", 1e-2, 1e-4)]
    assert pinn.best(runs, "poisson", "soap") == 1e-4 and np.isnan(pinn.best(runs, "burgers", "soap"))
    assert pinn.table_of(runs).splitlines()[-1].split("|")[-2].strip() == "100"


@pytest.mark.slow
def test_the_command_compares_methods(capsys, tmp_path):
    options = ["--quick", "--methods", "sanc", "lbfgs", "adamw-lbfgs", "--rates", "0.01"]
    assert pinn.main([*options, "--out", str(tmp_path)]) == 0
    assert "best peer / sanc" in capsys.readouterr().out and (tmp_path / "pinn.json").exists()
