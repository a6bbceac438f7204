"""The effective dimension of `sanc.diagnose` against all eigenvalues, and its error against the true one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from oracles import diagonal_oracle
from sanc.core.spectrum.extremes import find_extremes
from sanc.diagnosis.dimension import _quadrature, converged_pairs, measure_dimension

D = torch.float64
RNG = np.random.default_rng(0)
SPECTRA = {
    "inverse powers of both signs": np.where(np.arange(500) % 2, 1, -1) / np.arange(1, 501),
    "inverse squares": 1.0 / np.arange(1, 501) ** 2,
    "ten large ones and a bulk near zero": np.r_[np.linspace(1, 5, 10), 1e-3 * RNG.standard_normal(690)],
    "ten large ones and a wider bulk": np.r_[np.linspace(1, 5, 10), 1e-2 * RNG.standard_normal(690)],
    "one large one and a bulk of both signs": np.r_[5.0, 0.1 * RNG.standard_normal(699)],
    "cosines": np.cos(np.linspace(0, np.pi, 600)),
}


class Weights(nn.Module):
    """A point as a module."""

    def __init__(self, size):
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, dtype=D))

    def forward(self, x):
        return self.w


def quadratic_report(values, **options):
    eigenvalues = torch.as_tensor(values)
    return sanc.diagnose(
        Weights(len(values)), lambda model, batch: 0.5 * (eigenvalues * model(batch) ** 2).sum(), [torch.zeros(4, 1)],
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", SPECTRA)
def test_the_dimension_is_right_within_its_error(name):
    """Of the estimates of a few seeds all are within two errors."""
    values = SPECTRA[name]
    exact = np.abs(values).sum() ** 2 / (values**2).sum()
    reports = [quadratic_report(values, seed=seed) for seed in (0, 20)]
    for report in reports:
        assert abs(report.effective_dimension - exact) <= 2 * report.effective_dimension_error
        assert report.effective_dimension_error <= 0.6 * exact and report.dimension_limit == ""
        nodes, weights = report.density
        assert weights.sum() == pytest.approx(1.0)
        assert len(values) * weights @ nodes**2 == pytest.approx((values**2).sum(), rel=0.6)
    assert np.mean([report.effective_dimension for report in reports]) == pytest.approx(exact, rel=0.1)


def test_more_starts_lower_the_error():
    values = SPECTRA["ten large ones and a wider bulk"]
    errors = [quadratic_report(values, start_vectors=starts).effective_dimension_error for starts in (1, 3, 17)]
    assert errors[0] > 5 * errors[1] and errors[2] < 0.6 * errors[1]


def test_a_dimension_of_known_eigenvalues_is_exact():
    """The Lanczos process of the bounds finds all twelve."""
    values = np.r_[np.linspace(-1, 3, 12)]
    report = quadratic_report(values, relative_error=1e-12)
    assert report.effective_dimension == pytest.approx(np.abs(values).sum() ** 2 / (values**2).sum(), rel=1e-9)
    assert report.effective_dimension_error < 1e-9 and report.products == 12


def test_the_averaged_rule_estimates_its_error():
    """The estimate for |λ| is an upper bound of its error, and of the right size."""
    values = np.linspace(-1, 2, 400)
    vector = np.full(400, 400**-0.5)
    alpha, beta, q, previous = [], [], vector, np.zeros(400)
    for _ in range(10):
        w = values * q - (beta[-1] if beta else 0.0) * previous
        alpha.append(w @ q)
        w -= alpha[-1] * q
        beta.append(np.linalg.norm(w))
        previous, q = q, w / beta[-1]
    quadrature = _quadrature(np.array(alpha), np.array(beta), 400)
    truth = np.abs(values).mean()
    assert quadrature.mean_square == pytest.approx((values**2).mean()) and quadrature.weights.sum() == pytest.approx(
        1.0
    )
    assert abs(quadrature.mean_abs - truth) <= quadrature.mean_abs_error <= 0.02 * truth
    assert _quadrature(np.array(alpha[:1]), np.array(beta[:1]), 400).mean_abs_error >= truth - abs(alpha[0])
    complete = _quadrature(np.array(alpha), np.array([*beta[:-1], 0.0]), 400)
    assert complete.mean_abs_error == 0.0 and complete.mean_abs == pytest.approx(
        quadrature.weights @ np.abs(quadrature.values)
    )


def test_converged_pairs_are_the_largest_that_fit(monkeypatch):
    oracle, x = diagonal_oracle(SPECTRA["ten large ones and a bulk near zero"])
    found = find_extremes(oracle, x, relative_error=1e-3)
    pairs = converged_pairs(found, 700, keeps_basis=True)
    assert len(pairs) >= 10 and np.allclose(found.values[pairs[-10:]], np.linspace(1, 5, 10), rtol=1e-2)
    assert set(converged_pairs(found, 700, keeps_basis=False)) <= {0, len(found.values) - 1}
    monkeypatch.setattr("sanc.diagnosis.dimension._MAX_EIGENVECTOR_ENTRIES", 3 * 700)
    assert converged_pairs(found, 700, keeps_basis=True) == pairs[-3:]


def test_roundoff_is_a_part_of_the_error():
    """An error of each eigenvalue of a per cent of the largest adds up over all; then one start is enough."""
    oracle, x = diagonal_oracle(SPECTRA["one large one and a bulk of both signs"])
    found = find_extremes(oracle, x, relative_error=0.02)
    exact, limited = (
        measure_dimension(oracle, x, extremes, {}, range(4), count=4, store=True, time_is_up=lambda: False)
        for extremes in (found, replace(found, ritz_error=0.05 * math.sqrt(found.krylov.dim)))
    )
    assert limited.limited_by_product_error and not exact.limited_by_product_error
    assert limited.error > 2 * exact.error and limited.products < 0.5 * exact.products


def test_the_report_says_what_roundoff_limits():
    report = quadratic_report(np.linspace(-1, 4, 60))
    assert "roundoff" not in str(report) and f"lr < {report.safe_lr:.3g}" in str(report)
    limited = replace(report, limit="roundoff", dimension_limit="roundoff", lambda_max_bound=1e3)
    assert f"lr < {report.max_lr:.3g}, up to roundoff" in " ".join(str(limited).split())
    assert ", roundoff)" in str(limited)
