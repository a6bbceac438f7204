"""The family on logistic regression: reference losses of the authors' program, and a generated data set.

The reference losses are from one run each of the authors' program on w1a, with batch ⌊n/20⌋ = 123: the training loss at
the paper_calls in `MARKS`. They need the file w1a(.bz2) in the folder SANC_DATA; the other tests need no files.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

import sanc
from preset_options import PRESETS, composed
from sanc import Branch
from sanc.lab.authors import AUTHORS
from sanc.problems import Logistic
from sanc.sums.oracle import Draws, buffered_order

MARKS = (2_500, 5_000, 10_000, 20_000, 50_000)
REFERENCE = {
    ("sanc", 1.0): (47.2, 1.28, 0.637, 0.6355, 0.6355),
    ("scr", 1.0): (47.3, 1.27, 0.641, 0.6359, 0.6358),
    ("cr", 5.0): (115.8, 61.7, 1.40, 0.672, 0.672),
    ("ncd", 1.0): (131.8, 94.0, 14.8, 0.664, 0.641),
    ("sgd", 1.0): (142.0, 118.8, 62.7, 4.87, 0.6348),
    ("sanc", 0.001): (131.9, 94.0, 0.756, 0.6364, 0.6355),
    ("scr", 0.001): (161.3, 64.5, 1.08, 0.6366, 0.6358),
}


def w1a():
    folder = os.environ.get("SANC_DATA")
    files = [Path(folder) / name for name in ("w1a.bz2", "w1a", "w1a.txt")] if folder else []
    file = next((file for file in files if file.exists()), None)
    if file is None:
        pytest.skip("SANC_DATA is not a folder with w1a, w1a.txt or w1a.bz2")
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(str(file), n_features=300)
    return Logistic(X.toarray(), (y > 0).astype(int), penalty="nonconvex", strength=1.0)


def losses(problem, method, sigma0, seed, preset="authors"):
    """Return the training loss on all rows at each mark."""
    start = np.ones(problem.dim)
    trace = [(0, problem.value(start))]

    def watch(intermediate_result):
        r = intermediate_result
        trace.append((r.record.calls.paper_calls, problem.value(r.x)))

    sanc.minimize(
        problem, start, method=method, **composed(method, preset, L1=10.0, L2=10.0) | {"sigma0": sigma0},
        batch_size=problem.n // 20, seed=seed, max_calls=MARKS[-1], callback=watch, certify=False,
    )  # fmt: skip
    return [max((c, v) for c, v in trace if c <= mark)[1] for mark in MARKS]


@pytest.mark.parametrize(("method", "sigma0"), REFERENCE)
def test_losses_agree_with_the_authors_program(method, sigma0):
    """Its loss is within three deviations of the mean of ten runs at every mark, up to its printed digits."""
    problem = w1a()
    assert problem.value(np.ones(300)) == pytest.approx(161.271, abs=5e-4)
    ours = np.array([losses(problem, method, sigma0, seed) for seed in range(10)])
    for mean, spread, theirs in zip(ours.mean(0), ours.std(0), REFERENCE[method, sigma0], strict=True):
        digits = len(str(theirs).split(".")[1])
        assert abs(mean - theirs) <= 3 * spread + 0.5 * 10.0**-digits


@pytest.fixture(scope="module")
def generated():
    rng = np.random.default_rng(0)
    X = (rng.random((2000, 60)) < 0.1) * 1.0
    y = (rng.random(2000) < 1 / (1 + np.exp(-(X @ rng.standard_normal(60))))).astype(int)
    return Logistic(X, y, penalty="nonconvex", strength=1.0)


def test_on_generated_data_the_family_ranks_as_in_the_paper(generated):
    """σ0 = 1: SANC and SCR coincide and converge first, then CR, NCD and SGD."""
    finals = {
        method: losses(generated, method, sigma0, seed=0)
        for method, sigma0 in (("sanc", 1.0), ("scr", 1.0), ("cr", 5.0), ("ncd", 1.0), ("sgd", 1.0))
    }
    at = {method: values[1] for method, values in finals.items()}  # after 5000 calls
    assert at["sanc"] < at["cr"] < at["ncd"] < at["sgd"]
    assert finals["sanc"][:2] == pytest.approx(finals["scr"][:2], rel=1e-12)
    best = sanc.minimize(generated, np.ones(60)).fun
    for method in ("sanc", "scr", "cr", "ncd"):
        assert finals[method][-1] == pytest.approx(best, rel=0.02)


def test_with_a_small_sigma_sanc_moves_while_scr_stays(generated):
    """Figure 1: with σ0 = 0.001 the first steps are rejected. SANC moves along d, SCR stays at the start."""
    start = generated.value(np.ones(60))
    sanc_at, scr_at = losses(generated, "sanc", 1e-3, 0), losses(generated, "scr", 1e-3, 0)
    assert scr_at[0] == start and sanc_at[0] < start


def test_sgd_equals_torch_optim_sgd(generated):
    """The method without curvature is compared with torch.optim on the same samples."""
    w = torch.nn.Parameter(torch.ones(60, dtype=torch.float64))
    opt = torch.optim.SGD([w], lr=0.01)
    for t in range(20):
        rows = Draws(generated.n, 3, "uniform").rows(t, 0, 100)
        X, y = torch.from_numpy(generated.X[rows]), torch.from_numpy(generated.y[rows])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(X @ w, y) + (w**2 / (1 + w**2)).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    ours = sanc.minimize(
        generated,
        np.ones(60),
        method="sgd",
        preset="paper",
        batch_size=100,
        seed=3,
        max_iter=20,
        certify=False,
    )
    assert ours.x == pytest.approx(w.detach().numpy(), abs=1e-12)


def test_cr_accepts_every_step_with_its_fixed_sigma(generated):
    res = sanc.minimize(generated, np.ones(60), method="cr", preset="paper", batch_size=100, max_iter=20, certify=False)
    assert {r.branch for r in res.history} == {Branch.UNCONDITIONAL}
    assert {r.sigma for r in res.history} == {5.0}


def test_crm_uses_momentum_only_if_it_lowers_f(generated):
    """The momentum step is used only if f there is below f at the cubic step."""
    res = sanc.minimize(generated, np.ones(60), method="crm", preset="paper", max_iter=30, certify=False)
    used = [r for r in res.history if r.note == "momentum"]
    assert used and {r.branch for r in res.history} == {Branch.UNCONDITIONAL}
    values = [r.value for r in res.history]
    assert all(b <= a + 1e-12 for a, b in pairwise(values))
    plain = sanc.minimize(generated, np.ones(60), method="cr", preset="paper", max_iter=30, certify=False)
    assert res.history[5].value <= plain.history[5].value


def test_ncd_moves_along_d_in_every_iteration(generated):
    res = sanc.minimize(
        generated, np.ones(60), method="ncd", preset="paper", batch_size=100, max_iter=20, certify=False
    )
    for r in res.history:
        assert r.branch in (Branch.GRADIENT, Branch.CURVATURE)
        expected = r.grad_norm / 10.0 if r.branch is Branch.GRADIENT else 2 * abs(r.ritz_value) / 10.0
        assert r.step_norm == pytest.approx(expected, rel=1e-9)


def test_the_buffered_order_is_that_of_a_shuffle_buffer():
    """A shuffle buffer of one batch emits every row once per epoch, less than a batch ahead of its position."""
    order = buffered_order(1000, 50, np.random.default_rng(0))
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert np.all(order <= np.arange(1000) + 49) and not np.array_equal(order, np.arange(1000))
    # a reference implementation, row by row
    rng = np.random.default_rng(0)
    draws = rng.random(1000)
    buffer, rest, reference = list(range(50)), iter(range(50, 1000)), []
    for draw in draws:
        place = int(draw * len(buffer))
        reference.append(buffer[place])
        following = next(rest, None)
        if following is None:
            buffer[place] = buffer[-1]
            buffer.pop()
        else:
            buffer[place] = following
    assert order.tolist() == reference


def test_buffered_samples_cover_distinct_rows_in_each_epoch():
    class Indices(Logistic):
        seen: ClassVar[list] = []

        def subset(self, rows):
            self.seen.append(np.array(rows))
            return super().subset(rows)

    rng = np.random.default_rng(0)
    problem = Indices(rng.standard_normal((105, 3)), rng.integers(0, 2, 105))
    sanc.minimize(problem, np.ones(3), method="sgd", preset=AUTHORS, batch_size=10, max_iter=20, certify=False)
    gradients = [rows for rows in problem.seen if len(rows) == 10]
    assert len(gradients) == 20
    for epoch in (gradients[:10], gradients[10:]):
        assert len(set(np.concatenate(epoch).tolist())) == 100  # ten full batches of 105 rows, none twice
    assert max(gradients[0]) < 20 and np.median(gradients[9]) > 80


def test_the_authors_gradient_step_uses_the_hessian_sample(generated):
    """The step −g/L1 uses the gradient on S_B in the authors' program, and that on S_g in the paper."""
    moves = {}
    for preset in ("paper", "authors"):
        res = sanc.minimize(
            generated,
            np.ones(60),
            preset=PRESETS[preset],
            sigma0=1e-3,
            batch_size=100,
            seed=2,
            max_iter=1,
            certify=False,
            sampling="uniform",
        )
        assert res.history[0].branch is Branch.GRADIENT
        moves[preset] = (np.ones(60) - res.x) * 10.0
    for preset, role in (("paper", 0), ("authors", 1)):
        rows = Draws(generated.n, 2, "uniform").rows(0, role, 100)
        assert moves[preset] == pytest.approx(generated.subset(rows).value_and_gradient(np.ones(60))[1], abs=1e-12)
