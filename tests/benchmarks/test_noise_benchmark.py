"""The benchmark of noisy values: its derivatives, its noise, and what its table says."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
import scipy.optimize

from benchmarks import noise


@pytest.mark.parametrize("seed", range(3))
def test_derivatives_are_those_of_the_function(seed, rng):
    given = noise.problem(seed)
    x, v = given.start, rng.normal(size=len(given.start))
    np.testing.assert_allclose(given.jac(x), scipy.optimize.approx_fprime(x, given.fun, 1e-7), rtol=1e-4, atol=1e-4)
    differences = (given.jac(x + 1e-6 * v) - given.jac(x - 1e-6 * v)) / 2e-6
    np.testing.assert_allclose(given.hessp(x, v), differences, rtol=1e-5, atol=1e-5)


def test_noise_is_relative_and_the_same_at_the_same_point(rng):
    given = noise.problem(0)
    noisy, points = given.with_noise(1e-3), rng.normal(size=(400, len(given.start)))
    errors = np.array([noisy(x) / given.fun(x) - 1.0 for x in points])
    assert noisy(points[0]) == noisy(points[0].copy())
    assert np.abs(errors).max() <= 1.0001e-3 and errors.std() == pytest.approx(1e-3 / 3**0.5, rel=0.1)


def test_the_quick_run_writes_what_it_prints(tmp_path, capsys):
    assert noise.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(lzma.decompress((tmp_path / "noise.json.xz").read_bytes()))["rows"]
    assert all(noise.table(rows, exact=exact) in printed for exact in (True, False))
    ours = [row for row in rows if row["method"] == "sanc" and row["exact"]]
    assert len(ours) == 2 and all(row["solved"] and row["claims"] for row in ours)


def test_the_table_counts_solved_runs_and_claims():
    rows = [
        {"exact": False, "level": 1e-8, "method": method, "solved": k > 0, "claims": k > 1, "nfev": 10 * k}
        for method in noise.METHODS[False]
        for k in range(4)
    ]
    assert "| 1e-08 | 3 (2), 15 | 3 (2), 15 | 3 (2), 15 |   3 (2), 15 |" in noise.table(rows, exact=False)
