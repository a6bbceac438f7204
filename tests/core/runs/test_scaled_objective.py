"""Functions near the limits of their number type, which are scaled by a power of two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sanc


def made(kind, s):
    """Rosenbrock's function, a quadratic, or a saddle at the start, times s: in torch, and a start."""
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    return {
        "valley": (lambda x: s * (100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2), [-1.2, 1.0]),
        "quadratic": (lambda x: s * (1 + (weights.to(x.dtype) * (x - 1) ** 2).sum()), [0.0] * 5),
        "saddle": (lambda x: s * ((x[0] ** 2 - 1) ** 2 + x[1] ** 2), [0.0, 0.0]),
    }[kind]


@pytest.mark.parametrize("kind", ["valley", "quadratic", "saddle"])
@pytest.mark.parametrize(
    ("exponent", "dtype"), [(-880, torch.float64), (1000, torch.float64), (-100, torch.float32), (100, torch.float32)]
)
def test_f_near_the_limits_of_its_type_has_the_steps_of_f(kind, exponent, dtype):
    """With a power of two the points are equal bit for bit, and results are in the units of f.

    A value of f may be zero because it is below the smallest number of the type.
    """

    def rounded(value):
        return float(torch.tensor(value, dtype=dtype))

    tol, s = 1e-3 if dtype == torch.float32 else 1e-6, 2.0**exponent
    results = []
    for factor in (1.0, s):
        f, x0 = made(kind, factor)
        x0, how = torch.tensor(x0, dtype=dtype), {"tol": tol * factor, "curvature_tol": 1e-2 * factor}
        results.append(sanc.minimize(f, x0, **how))
    plain, scaled = results
    assert plain.success and scaled.success and torch.equal(plain.x, scaled.x) and plain.nit == scaled.nit > 0
    assert float(scaled.fun) == rounded(s * float(plain.fun)) and torch.equal(scaled.jac, s * plain.jac)
    for ours, theirs in zip(scaled.history, plain.history, strict=True):
        assert ours.value == rounded(s * theirs.value)
        assert (ours.grad_norm, ours.sigma) == (s * theirs.grad_norm, s * theirs.sigma)
    ours, theirs = scaled.certificate, plain.certificate
    assert ours.gradient_tolerance == s * tol and ours.curvature_tolerance == s * 1e-2 and ours.second_order
    assert ours.lambda_min == pytest.approx(s * theirs.lambda_min, rel=1e-6)


def test_a_scaled_run_resumes_bit_for_bit():
    f, x0 = made("valley", 2.0**1000)
    states = []
    whole = sanc.minimize(
        f, np.array(x0), callback=lambda intermediate_result: states.append(intermediate_result.state)
    )
    again = sanc.minimize(f, np.array(x0), resume=states[5])
    assert whole.success and (again.x == whole.x).all() and again.nit == whole.nit
    assert [record.value for record in again.history] == [record.value for record in whole.history[6:]]
    for wrong in (2000, 1.0, None):
        states[5]["oracle"]["exponent"] = wrong
        with pytest.raises(sanc.ArgumentError, match=r"resume\['oracle'\]\['exponent'\] = "):
            sanc.minimize(f, np.array(x0), resume=states[5])
