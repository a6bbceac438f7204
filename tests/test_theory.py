"""The constants compared with values computed by hand, and the sample sizes with Monte Carlo estimates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sanc import ArgumentError, theory


def test_sigma_max_has_the_factor_that_the_lemma_omits():
    # 2 (1.5·4 + 3·0.01/0.1² + 1.5·0.2/0.1) = 2 (6 + 3 + 3)
    assert theory.sigma_max(1.0, 2.0, 4.0, 0.01, 0.2, 0.1) == pytest.approx(24.0)
    assert theory.sigma_max(100.0, 2.0, 4.0, 0.01, 0.2, 0.1) == 100.0


def test_sigma_max_bounds_sigma_in_a_real_run():
    """For an exact f, ε_g = ε_B = 0: σ stays below γ·(3/2)·L2 if it starts below."""
    import torch

    import sanc

    def f(x):
        return torch.cos(3 * x).sum() + 0.05 * (x**2).sum()  # |f'''| ≤ 27

    for seed in range(4):
        x0 = torch.tensor(np.random.default_rng(seed).standard_normal(6) * 3)
        res = sanc.minimize(f, x0, method="arc", preset="paper", sigma0=1e-3, krylov_dim=6, max_iter=200, certify=False)
        bound = theory.sigma_max(1e-3, 2.0, 27.0, 0.0, 0.0, 1e-8)
        resolved = [r.sigma for r in res.history if r.model_decrease > 1e-10]  # above the rounding error of f
        assert max(resolved) <= bound


def test_kappas_equal_values_computed_by_hand():
    assert theory.kappa_l(2.0, 3.0) == 8.0
    assert theory.kappa_s1(0.2, 0.5, 3.0, 2.0) == pytest.approx(0.1 / (36 * math.sqrt(6) * 8**1.5))
    assert theory.kappa_s2(0.2, 0.5, 3.0) == pytest.approx(0.1 / (6 * 27))
    assert theory.kappa_d(2.0) == pytest.approx(1 / 96)
    assert theory.smallest_epsilon(0.1, 3.0, 8.0) == pytest.approx(max(0.3, 3.0))


def test_complexity_bounds_equal_values_computed_by_hand():
    constants = {"eta1": 0.2, "sigma_min": 0.5, "sigma_max": 3.0, "L2": 2.0}
    bound = theory.complexity_bound(10.0, 0.01, **constants)
    s1, s2, d = theory.kappa_s1(0.2, 0.5, 3.0, 2.0), theory.kappa_s2(0.2, 0.5, 3.0), theory.kappa_d(2.0)
    assert bound.first_order == math.ceil(10 / (min(s1, d) * 0.01**1.5))
    assert bound.first_order_stated == math.ceil(10 / min(s1 * 0.01**1.5, d * 0.01**3))
    assert bound.second_order == math.ceil(10 / (min(s2, d) * 0.01**3))
    assert bound.total == bound.first_order_stated + bound.second_order + 1
    assert bound.first_order <= bound.first_order_stated


def test_gradient_sample_size_bounds_the_error_with_probability_1_minus_delta():
    """Gradients on the sphere of radius L0 have the largest variance; the bound holds in 1 − δ of the draws."""
    rng = np.random.default_rng(0)
    n, d, L0, eps, delta = 20_000, 5, 1.0, 0.3, 0.1
    G = rng.standard_normal((n, d))
    G *= L0 / np.linalg.norm(G, axis=1, keepdims=True)
    size = theory.gradient_sample_size(L0, eps, delta)
    assert size == math.ceil(4 * (1 + 2 * math.sqrt(math.log(10))) ** 2 / 0.09)
    errors = [np.linalg.norm(G[rng.choice(n, size, replace=False)].mean(0) - G.mean(0)) for _ in range(400)]
    assert np.mean(np.array(errors) <= eps) >= 1 - delta
    few = [np.linalg.norm(G[rng.choice(n, 3, replace=False)].mean(0) - G.mean(0)) for _ in range(400)]
    assert np.mean(np.array(few) <= eps) < 1 - delta  # fewer rows violate the bound


def test_hessian_sample_size_bounds_the_error_with_probability_1_minus_delta():
    rng = np.random.default_rng(1)
    n, d, L1, eps, delta = 20_000, 4, 1.0, 0.5, 0.1
    A = rng.standard_normal((n, d))
    A *= np.sqrt(L1) / np.linalg.norm(A, axis=1, keepdims=True)
    signs = rng.choice([-1.0, 1.0], n)
    size = theory.hessian_sample_size(L1, eps, delta, d)
    assert size == math.ceil(16 * math.log(80) / 0.25)
    full = (A * signs[:, None]).T @ A / n

    def error(k):
        rows = rng.choice(n, k, replace=False)
        return np.linalg.norm((A[rows] * signs[rows, None]).T @ A[rows] / k - full, 2)

    assert np.mean([error(size) <= eps for _ in range(1000)]) >= 1 - delta
    assert np.mean([error(2) <= eps for _ in range(1000)]) < 1 - delta


def test_growing_sample_sizes_follow_the_step_norm():
    assert theory.growing_sample_sizes(1.0, 1.0, (10, 20), 1000) == (10, 20)
    assert theory.growing_sample_sizes(0.5, 1.0, (10, 20), 1000) == (160, 80)  # 2⁴ and 2²
    assert theory.growing_sample_sizes(0.01, 1.0, (10, 20), 1000) == (1000, 1000)
    assert theory.growing_sample_sizes(2.0, 1.0, (10, 20), 1000) == (10, 20)
    assert theory.growing_sample_sizes(1e-300, 1.0, (10, 20), 1000) == (1000, 1000)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: theory.gradient_sample_size(-1, 0.1, 0.1), "L0 = -1"),
        (lambda: theory.gradient_sample_size(1, 0.1, 1.5), "delta = 1.5"),
        (lambda: theory.hessian_sample_size(1, 0.0, 0.1, 3), "epsilon_B = 0.0"),
        (lambda: theory.sigma_max(1, 1.0, 1, 0, 0, 1), "gamma = 1.0"),
        (lambda: theory.kappa_d(math.nan), "L2 = nan"),
        (lambda: theory.complexity_bound(1, 1.0, eta1=0.1, sigma_min=1, sigma_max=1, L2=1), "epsilon = 1.0"),
        (lambda: theory.growing_sample_sizes(0.0, 1.0, (1, 1), 10), "step_norm = 0.0"),
    ],
)
def test_errors_name_the_invalid_constant(call, word):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert word in str(caught.value)
