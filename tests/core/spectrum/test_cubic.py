"""The cubic solver against identities, brute force in high precision, and GALAHAD."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sanc.core.spectrum import cubic


def dense(diagonal, off):
    return np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)


def model(u, T, c, sigma):
    return c @ u + 0.5 * u @ T @ u + sigma / 3 * np.linalg.norm(u) ** 3


def check_optimal(diagonal, off, c, sigma, tolerance=1e-10):
    """Every identity of a global minimiser, relative to the size of the terms."""
    T = dense(diagonal, off)
    eigen = cubic.compute_spectrum(diagonal, off)
    step = cubic.solve(eigen, c, sigma)
    u, norm = step.u, np.linalg.norm(step.u)
    terms = np.array([c @ u, u @ T @ u, sigma * norm**3])
    scale = np.abs(terms).sum() + np.abs(T).max() * norm**2  # eigenvalues are exact to the size of T, no further
    if scale == 0.0:
        assert np.all(c == 0) and eigen.leftmost >= 0 and step.decrease == 0.0
        return step
    assert abs(terms.sum()) <= tolerance * scale  # gᵀs + sᵀBs + σ‖s‖³ = 0
    assert terms[1] + terms[2] >= -tolerance * scale  # sᵀBs + σ‖s‖³ ≥ 0
    assert step.decrease >= sigma / 6 * norm**3 * (1 - 1e-10)
    assert abs(step.decrease + model(u, T, c, sigma)) <= tolerance * scale
    assert math.isclose(step.norm, norm, rel_tol=1e-10)
    # the characterisation of the global minimiser: (T + μI)u = −c with T + μI positive semidefinite
    mu = step.multiplier
    assert math.isclose(mu, sigma * norm, rel_tol=1e-10)
    size = np.abs(T).max(initial=0.0) + mu
    assert np.linalg.norm((T + mu * np.eye(len(c))) @ u + c) <= 1e-10 * (size * norm + np.linalg.norm(c))
    assert eigen.leftmost + mu >= -1e-12 * size
    return step


scales = st.floats(-6, 6).map(lambda e: 10.0**e)


@st.composite
def problems(draw):
    j = draw(st.integers(1, 8))
    unit = st.one_of(st.just(0.0), st.floats(1e-9, 1), st.floats(-1, -1e-9))  # cubes of less underflow
    diagonal = np.array(draw(st.lists(unit, min_size=j, max_size=j))) * draw(scales)
    off = np.abs(np.array(draw(st.lists(unit, min_size=j - 1, max_size=j - 1)))) * draw(scales)
    gamma0 = draw(st.one_of(st.just(0.0), st.floats(-12, 8).map(lambda e: 10.0**e)))
    sigma = 10.0 ** draw(st.floats(-12, 12))
    c = np.zeros(j)
    c[0] = gamma0
    return diagonal, off, c, sigma


@settings(max_examples=250, deadline=None)
@given(problems())
def test_identities_hold_for_any_tridiagonal_matrix(problem):
    check_optimal(*problem)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(problems())
def test_identities_hold_for_many_tridiagonal_matrices(problem):
    check_optimal(*problem)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(2, 6),
    st.floats(-12, 12).map(lambda e: 10.0**e),
    st.one_of(st.just(0.0), st.floats(-30, -1).map(lambda e: 10.0**e)),
    st.floats(0.01, 10),
    st.integers(0, 2**32 - 1),
)
def test_hard_and_nearly_hard_cases(j, sigma, coupling, gap, seed):
    """c has (almost) no part in the left-most eigenvector, and σ is so small that this matters."""
    rng = np.random.default_rng(seed)
    values = np.sort(np.concatenate([[-1.0], -1.0 + gap * (1 + rng.random(j - 1))]))
    eigen = cubic.Spectrum(values, np.eye(j))
    c = np.concatenate([[coupling], rng.standard_normal(j - 1)])
    c[1:] *= rng.random() * (1 / sigma) * gap / max(np.linalg.norm(c[1:]), 1e-300)  # ‖u(−λ1)‖ < −λ1/σ: hard if c1 = 0
    step = cubic.solve(eigen, c, sigma)
    assert step.hard_case == (coupling == 0.0)
    T = np.diag(values)
    norm = np.linalg.norm(step.u)
    assert math.isclose(step.norm, norm, rel_tol=1e-10)
    terms = np.array([c @ step.u, step.u @ T @ step.u, sigma * norm**3])
    assert abs(terms.sum()) <= 1e-10 * np.abs(terms).sum()
    assert terms[1] + terms[2] >= -1e-10 * np.abs(terms).sum()
    assert step.decrease >= sigma / 6 * norm**3 * (1 - 1e-10)
    # no worse than the pure curvature step, in either sign
    for sign in (1, -1):
        other = np.zeros(j)
        other[0] = sign * 1.0 / sigma
        assert model(step.u, T, c, sigma) <= model(other, T, c, sigma) + 1e-10 * np.abs(terms).sum()


def test_both_signs_of_the_hard_case_are_minimisers():
    eigen = cubic.Spectrum(np.array([-2.0, 1.0]), np.eye(2))
    c = np.array([0.0, 0.1])
    plus, minus = (cubic.solve(eigen, c, 1.0, sign) for sign in (1.0, -1.0))
    assert plus.hard_case and minus.hard_case
    assert plus.u[0] == -minus.u[0] > 0
    assert plus.decrease == minus.decrease


def brute_force(T, c, sigma):
    """The secular equation by bisection with 60 digits: an independent way to the global minimum."""
    with mpmath.workdps(60):
        matrix = mpmath.matrix(T.tolist())
        values, vectors = mpmath.eigsy(matrix)
        cc = vectors.T * mpmath.matrix(c.tolist())
        n = len(c)
        low = max(mpmath.mpf(0), -min(values))

        def excess(mu):
            return mpmath.sqrt(sum((cc[i] / (values[i] + mu)) ** 2 for i in range(n))) * sigma - mu

        a, b = low + mpmath.mpf(10) ** -50, low + 1
        while excess(b) > 0:
            b *= 2
        if excess(a) < 0:
            return None  # the hard case has its own tests
        for _ in range(400):
            middle = (a + b) / 2
            a, b = (middle, b) if excess(middle) > 0 else (a, middle)
        u = [-sum(vectors[i, k] * cc[k] / (values[k] + b) for k in range(n)) for i in range(n)]
        norm = mpmath.sqrt(sum(x * x for x in u))
        quadratic = sum(u[i] * matrix[i, k] * u[k] for i in range(n) for k in range(n))
        return float(sum(x * y for x, y in zip(u, c.tolist(), strict=True)) + quadratic / 2 + sigma * norm**3 / 3)


@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 60))])
def test_against_sixty_digits(seed):
    rng = np.random.default_rng(seed)
    j = int(rng.integers(1, 6))
    diagonal = rng.standard_normal(j) * 10 ** rng.uniform(-3, 3)
    off = np.abs(rng.standard_normal(j - 1)) * 10 ** rng.uniform(-3, 3)
    c = np.zeros(j)
    c[0] = 10 ** rng.uniform(-6, 3)
    sigma = 10 ** rng.uniform(-12, 12)
    reference = brute_force(dense(diagonal, off), c, sigma)
    if reference is None:
        pytest.fail("a random case is never exactly hard")
    assert -cubic.solve(cubic.compute_spectrum(diagonal, off), c, sigma).decrease == pytest.approx(reference, rel=1e-9)


GALAHAD = """
import json, sys
import numpy as np
from galahad import rqs
answers = []
for diagonal, off, c, sigma in json.load(sys.stdin):
    j = len(diagonal)
    rows = np.concatenate([np.arange(j), np.arange(1, j)])
    columns = np.concatenate([np.arange(j), np.arange(j - 1)])
    values = np.array(diagonal + off)
    options = rqs.initialize()
    rqs.load(j, "coordinate", len(values), rows, columns, None, options)
    answers.append(np.asarray(rqs.solve_problem(j, 3.0, sigma, 0.0, np.array(c), len(values), values)).tolist())
    rqs.terminate()
print(json.dumps(answers))
"""


def test_against_galahad_rqs():
    """GALAHAD solves min ½uᵀTu + cᵀu + (σ/3)‖u‖³ too, with a general sparse solver.

    It runs in a process of its own: it returns zeros unless OpenMP is set up in this way, which would slow the rest.
    """
    if importlib.util.find_spec("galahad") is None:
        pytest.skip("galahad-optrove is not installed; the same is compared with sixty digits above")
    rng = np.random.default_rng(5)
    cases = []
    for _ in range(300):
        j = int(rng.integers(2, 9))
        c = np.zeros(j)
        c[0] = 10 ** rng.uniform(-4, 2)
        cases.append((rng.standard_normal(j), np.abs(rng.standard_normal(j - 1)), c, 10 ** rng.uniform(-3, 3)))
    environment = os.environ | {"OMP_CANCELLATION": "TRUE", "OMP_PROC_BIND": "TRUE"}
    given = json.dumps([[d.tolist(), o.tolist(), c.tolist(), s] for d, o, c, s in cases])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GALAHAD], input=given, capture_output=True, text=True, env=environment,
        check=True,
    )  # fmt: skip
    answers = [np.array(x) for x in json.loads(done.stdout.splitlines()[-1])]
    assert sum(bool(np.any(x)) for x in answers) >= 290, "GALAHAD returned zeros"
    for (diagonal, off, c, sigma), x in zip(cases, answers, strict=True):
        if np.any(x):
            ours = -cubic.solve(cubic.compute_spectrum(diagonal, off), c, sigma).decrease
            theirs = model(x, dense(diagonal, off), c, sigma)
            assert ours <= theirs + 1e-9 * abs(ours)
            assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("value", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("sigma", [1e-12, 1.0, 1e12])
def test_dimension_one_has_a_closed_form(value, sigma):
    gamma0 = 0.7
    # u = −r with σr² + λr − γ0 = 0, the positive root in the form that does not cancel
    root_of_discriminant = math.sqrt(value**2 + 4 * sigma * gamma0)
    if value >= 0:
        root = 2 * gamma0 / (value + root_of_discriminant)
    else:
        root = (-value + root_of_discriminant) / (2 * sigma)
    step = check_optimal(np.array([value]), np.array([]), np.array([gamma0]), sigma)
    assert step.u[0] == pytest.approx(-root, rel=1e-9)


def test_no_gradient_and_no_curvature_is_no_step():
    step = cubic.solve(cubic.compute_spectrum(np.array([1.0, 2.0]), np.array([0.5])), np.zeros(2), 1.0)
    assert np.all(step.u == 0) and step.decrease == 0.0


def test_no_gradient_at_a_saddle_is_the_curvature_step():
    step = cubic.solve(cubic.compute_spectrum(np.array([-3.0, 2.0]), np.array([0.0])), np.zeros(2), 2.0)
    assert step.hard_case
    assert np.abs(step.u) == pytest.approx([1.5, 0.0])
    assert step.decrease == pytest.approx(3.0**3 / (6 * 2.0**2))


def test_spectrum_of_a_long_matrix_agrees_with_the_dense_one(rng):
    diagonal, off = rng.standard_normal(40), np.abs(rng.standard_normal(39))
    eigen = cubic.compute_spectrum(diagonal, off)
    assert eigen.values == pytest.approx(np.linalg.eigvalsh(dense(diagonal, off)), abs=1e-12)
    assert np.allclose(eigen.vectors @ np.diag(eigen.values) @ eigen.vectors.T, dense(diagonal, off), atol=1e-12)


@pytest.mark.parametrize("gamma0", [1e-300, 1e-170, 1e-100, 1e150])
@pytest.mark.parametrize("value", [-1.0, 0.5])
def test_tiny_and_huge_gradients(gamma0, value):
    """Near convergence squares of the gradient underflow; the step is still the Newton or the curvature step."""
    step = cubic.solve(cubic.Spectrum(np.array([value, 2.0]), np.eye(2)), np.array([gamma0, gamma0]), 1.0)
    assert np.all(np.isfinite(step.u))
    mu = step.multiplier
    assert (np.array([value, 2.0]) + mu) * step.u == pytest.approx([-gamma0] * 2, rel=1e-6, abs=1e-15)
    if gamma0 < 1 and value > 0:
        assert step.u == pytest.approx([-gamma0 / value, -gamma0 / 2.0], rel=1e-12, abs=0.0)


@pytest.mark.parametrize("sigma", [1e-300, 1e-200, 1e-150])
def test_the_decrease_of_a_newton_step_does_not_underflow(sigma):
    """The dimensionless form has a factor of σ², but the step is −c/λ and the decrease c²/(2λ)."""
    step = cubic.solve(cubic.Spectrum(np.array([1e-4]), np.eye(1)), np.array([3e-16]), sigma)
    assert step.norm == pytest.approx(3e-12, rel=1e-12) and step.decrease == pytest.approx(4.5e-28, rel=1e-12)


def test_the_share_of_negative_curvature():
    """Two directions that do not mix, −½ and 1: what each of them earns can be written down."""
    linear = np.array([1.0, 2.0])
    step = cubic.solve(cubic.compute_spectrum(np.array([-0.5, 1.0]), np.array([0.0])), linear, 0.3)
    negative, positive = -linear * step.u - 0.5 * np.array([-0.5, 1.0]) * step.u**2
    assert negative > positive > 0
    assert step.curvature_share == pytest.approx(negative / (negative + positive), rel=1e-12)
    assert (
        cubic.solve(cubic.compute_spectrum(np.array([1.0, 2.0]), np.array([0.3])), linear, 0.3).curvature_share == 0.0
    )
    nowhere = cubic.solve(cubic.compute_spectrum(np.array([1.0, 2.0]), np.array([0.3])), np.zeros(2), 0.3)
    assert math.isnan(nowhere.curvature_share) and nowhere.norm == 0.0


def test_a_linear_term_that_is_nothing_beside_the_rest():
    """Where the part along the left-most vector is lost in underflow, there is no gap to divide it by."""
    eigen = cubic.Spectrum(np.array([-110568.65, 28939.6, 138419.7]), np.eye(3))
    c, sigma = np.array([-9.117e-298, 0.074, -0.0462]), 1e-16
    step = cubic.solve(eigen, c, sigma)
    assert step.norm == pytest.approx(110568.65 / sigma) == abs(step.u[0])
    assert step.u[1:] == pytest.approx(-c[1:] / (eigen.values[1:] + 110568.65))


@pytest.mark.parametrize(
    ("size", "of_sigma"),
    [(1e-120, 1e-120), (1e75, 1e75), (1e120, 1e120), (1e80, 1.0), (1e-80, 1.0), (1e-45, 1e-150), (1e45, 1e150)],
)
def test_the_decrease_of_huge_and_tiny_matrices(size, of_sigma):
    """With T times a, σ times b and c times a²/b the step is a/b times as long, and the decrease a³/b² times as large.

    In the last two cases ‖u‖³ alone is too large or too small for a number.
    """
    diagonal, off, c = np.array([-2.0, 1.0]), np.array([0.5]), np.array([1.0, 0.0])
    usual = cubic.solve(cubic.compute_spectrum(diagonal, off), c, 0.7)
    ratio = size / of_sigma
    scaled = cubic.solve(cubic.compute_spectrum(size * diagonal, size * off), size * ratio * c, 0.7 * of_sigma)
    assert scaled.u / ratio == pytest.approx(usual.u, rel=1e-9)
    assert scaled.decrease / size / ratio / ratio == pytest.approx(usual.decrease, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_lower_bound_of_sigma_for_a_length_is_never_too_large(seed):
    """At the bound the step is still as long as that, and where it falls slowly hardly longer."""
    rng = np.random.default_rng(seed)
    j, sigma = int(rng.integers(1, 9)), 10.0 ** rng.uniform(-6, 3)
    diagonal, off = rng.standard_normal(j) + rng.choice([0.0, 3.0]), rng.standard_normal(j - 1)
    c = np.eye(j)[0] * 10.0 ** rng.uniform(-3, 3)
    eigen = cubic.compute_spectrum(diagonal, off)
    step = cubic.solve(eigen, c, sigma)
    for share in (0.9, 0.3, 1e-3):
        least = cubic.sigma_lower_bound(eigen, c, step, share * step.norm)
        assert least >= sigma
        assert share * step.norm * (1 - 1e-9) <= cubic.solve(eigen, c, least).norm <= 1.5 * share * step.norm


def test_the_lower_bound_of_sigma_for_the_hard_case_is_not_known():
    eigen, c = cubic.compute_spectrum(np.array([-1.0, 2.0]), np.zeros(1)), np.array([0.0, 1.0])
    step = cubic.solve(eigen, c, 1e-3)
    assert step.hard_case and cubic.sigma_lower_bound(eigen, c, step, 0.1 * step.norm) == 0.0


def test_the_lower_bound_of_sigma_for_a_linear_term_beyond_all_bounds_raises_nothing():
    eigen, c = cubic.compute_spectrum(np.array([1.0, 2.0]), np.array([0.5])), np.array([1e302, 0.0])
    step = cubic.solve(eigen, c, 1e-3)
    for longest in (1e-30, 1.0, 1e100):
        assert not cubic.sigma_lower_bound(eigen, c, step, longest) < 0.0
