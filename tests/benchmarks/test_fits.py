"""The fits agree with NIST's certified values, and the minimiser solves them."""

from __future__ import annotations

import numpy as np
import pytest

import sanc
from benchmarks import fits
from benchmarks.common import zoo
from benchmarks.long_fits import ALL_FITS


def test_there_are_twenty_fits_with_two_starts_each():
    assert len(fits.FITS) == 20 and len(fits.problems()) == 40
    assert len(ALL_FITS) == 27 and len({fit.name for fit in ALL_FITS}) == 27
    assert max(float(fit(fits.numbers(fit.starts[0]))) for fit in fits.FITS) > 1e8


@pytest.mark.parametrize("fit", ALL_FITS, ids=lambda fit: fit.name)
def test_the_certified_parameters_have_the_certified_sum_of_squares(fit):
    found = float(fit(fit.certified))
    if fit.name == "Lanczos1":  # its sum is the roundoff of its data, below eleven digits
        assert found < 1e-20
    else:
        assert found == pytest.approx(fit.squares, rel=1e-9)


NAMES = ["Misra1a-1", "BoxBOD-1", "Rat42-1", "MGH09-2", "Thurber-2", "ENSO-1", "Eckerle4-1", "Rat43-1", "Nelson-2"]


@pytest.mark.parametrize("name", NAMES)
def test_fits_are_solved(name):
    problem = next(problem for problem in fits.problems() if problem.name == name)
    f, jac, _, hessp = zoo.numpy_functions(problem)
    result = sanc.minimize(f, problem.x0, jac=jac, hessp=hessp, tol=problem.gtol, max_iter=500)
    assert problem.reached(result.fun) is not None
    fit = next(fit for fit in fits.FITS if name.startswith(fit.name))
    np.testing.assert_allclose(result.x, fit.certified.numpy(), rtol=1e-4)
    values = np.array([record.value for record in result.history])  # no increase above roundoff
    assert np.all(np.diff(values) <= 1e-9 * values[0])


def test_a_stalled_fit_continues_in_scaled_variables():
    """Nelson's model leaves the far start towards second derivatives that differ by 32 orders of magnitude."""
    fit = next(fit for fit in fits.FITS if fit.name == "Nelson")
    start = fits.numbers(fit.starts[0])
    result = sanc.minimize(fit, start)
    assert result.success and "continued in variables scaled" in result.message
    assert float(result.fun) == pytest.approx(fit.squares, rel=1e-9)
    np.testing.assert_allclose(result.x.numpy(), fit.certified.numpy(), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1])
def test_the_default_limits_suffice_for_mgh10(k):
    fit = next(fit for fit in fits.FITS if fit.name == "MGH10")
    result = sanc.minimize(fit, fits.numbers(fit.starts[k]))
    assert result.success, result.message
    assert float(result.fun) == pytest.approx(fit.squares, rel=1e-9)
    np.testing.assert_allclose(result.x.numpy(), fit.certified.numpy(), rtol=1e-6)


def test_a_stalled_fit_with_bounds_names_the_scales_of_its_variables():
    fit = next(fit for fit in fits.FITS if fit.name == "Nelson")
    stalled = sanc.minimize(fit, fits.numbers(fit.starts[0]), bounds=[(-10.0, 10.0)] * 3, max_iter=500)
    assert stalled.status is sanc.Status.STALLED
    assert "second derivatives by single variables" in stalled.message and "scale the variables" in stalled.message
