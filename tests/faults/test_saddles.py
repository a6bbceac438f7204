"""Starts at and beside saddles and maxima: no run ends there, whatever the type, dimension and constant of f."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc

pytestmark = pytest.mark.slow

FUNCTIONS = {
    "double wells": (lambda x: (x**4 / 4 - x**2 / 2).sum(), lambda n: -0.25 * n),
    "cosines": (lambda x: torch.cos(x).sum(), lambda n: -1.0 * n),
    "one direction": (lambda x: (x[1:] ** 2).sum() - x[0] ** 2 / 2 + x[0] ** 4 / 4, lambda n: -0.25),
    "bell": (lambda x: torch.exp(-(x @ x) / 2) + 0.01 * (x**4).sum(), None),
}
"""Functions with a saddle or maximum at 0, and their minimum in n dimensions."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["sanc", "arc"])
def test_starts_beside_saddles(dtype, method, tally):
    cases, failures = 0, []
    for distance in (0.0, *(10.0**-k for k in (4, 6, 8, 10, 12, 14, 16, 20, 25, 30))):
        for n in (2, 10, 100):
            for constant in (0.0, 1.0, 1e4 if dtype == torch.float64 else 1e2):
                generator = torch.Generator().manual_seed(n)
                x0 = (distance * torch.randn(n, generator=generator, dtype=torch.float64)).to(dtype)
                for name, (fun, minimum) in FUNCTIONS.items():
                    result = sanc.minimize(lambda x, fun=fun, c=constant: fun(x) + c, x0, method=method)
                    cases += 1
                    value = float(fun(result.x.double()))
                    reached = minimum is None or value < minimum(n) + 1e-2 * abs(minimum(n))
                    lowest = float(torch.linalg.eigvalsh(torch.func.hessian(fun)(result.x.double()))[0])
                    if not (result.success and reached and lowest > -1e-2):
                        failures.append((name, distance, n, constant, result.status.name, value, lowest))
    tally(f"starts beside saddles, {method}, {dtype}", cases, failures)


def test_differences_of_functions_with_large_constants(tally):
    """At a saddle λ_min is −4; beside it the gradient is roundoff. No success there, with any scheme and tolerance."""
    cases, failures = 0, []
    for scheme in ("2-point", "3-point"):
        for constant in (0.0, 1.0, 1e4, 1e6, 1e8, 1e10, -1e9, 1e12):
            for tol in (None, 1e-2, 1e-3, 1e-5, 1e-7):
                for start in (0.0, 1e-9, 1e-3):

                    def fun(x, constant=constant):
                        return float((x[0] ** 2 - 1) ** 2 + x[1] ** 2 + 0.1 * x[0] * x[1]) + constant

                    result = sanc.minimize(fun, np.full(2, start), jac=scheme, tol=tol)
                    cases += 1
                    if result.success and abs(abs(result.x[0]) - 1.0) > 0.1:
                        failures.append((scheme, constant, tol, start, result.status.name, result.x))
    tally("differences of functions with large constants", cases, failures)
