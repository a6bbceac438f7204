"""The held-out loss as a function of the strengths of penalties: its derivatives are those of `sanc.argmin`."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.nn import functional

import sanc
from sanc.problems import Logistic, Softmax
from sanc.sklearn.strengths import HeldOutLoss

ROWS, FEATURES, GROUPS = 25, 5, np.array([0, 1, 1, 2, 0])
T = np.array([0.5, -0.5, 1.0])


def table(classes):
    rng = np.random.default_rng(classes)
    X, weights = rng.standard_normal((3 * ROWS, FEATURES)), rng.uniform(0.5, 2.0, 3 * ROWS)
    y = (X @ rng.standard_normal((FEATURES, classes)) + rng.gumbel(size=(3 * ROWS, classes))).argmax(1)
    return X, y, weights


def held_out(classes, intercept, sparse=False):
    """Return the loss of two folds."""
    X, y, weights = table(classes)
    A = scipy.sparse.csr_matrix(X) if sparse else X

    def build(fold, strengths):
        left = np.arange(3 * ROWS) // ROWS == fold
        sums = []
        for rows, penalty, strength in ((~left, "l2", strengths / weights[~left].sum()), (left, "none", 0.0)):
            how = {"penalty": penalty, "strength": strength, "weights": weights[rows], "intercept": intercept}
            sums.append(
                Logistic(A[rows], y[rows], **how) if classes == 2 else Softmax(A[rows], y[rows], classes, **how)
            )
        return tuple(sums)

    method = sanc.method_for("sanc", "robust")
    return HeldOutLoss(build, 2, GROUPS, tol=1e-9, max_iter=100, method=method)


def by_argmin(classes, intercept):
    """Return the same loss as a function of a tensor, through `sanc.argmin`."""
    X, y, weights = map(torch.as_tensor, table(classes))
    rows = 1 if classes == 2 else classes

    def losses(w, X, y):
        z = X @ w[: rows * FEATURES].reshape(rows, FEATURES).T
        if intercept:
            b = w[rows * FEATURES :]
            z = z + (b if classes == 2 else torch.cat([b, -b.sum().reshape(1)]))
        if classes == 2:
            return functional.softplus(torch.where(y == 1, -z[:, 0], z[:, 0]))
        return functional.cross_entropy(z, y, reduction="none")

    def value(t):
        total = 0.0
        for fold in range(2):
            left = torch.arange(3 * ROWS) // ROWS == fold
            s = weights[~left] / weights[~left].sum()

            def train(w, t, left=left, s=s):
                square = (w[: rows * FEATURES].reshape(rows, FEATURES) ** 2).sum(0)
                penalty = 0.5 * (torch.exp(-t)[GROUPS] * square).sum() / weights[~left].sum()
                return (s * losses(w, X[~left], y[~left])).sum() + penalty

            count = rows * FEATURES + (max(1, rows - 1) if intercept else 0)
            w = sanc.argmin(train, torch.zeros(count, dtype=torch.float64), t, tol=1e-8)
            total = total + 0.5 * (weights[left] * losses(w, X[left], y[left])).sum() / weights[left].sum()
        return total

    return value


@pytest.mark.parametrize(("classes", "intercept"), [(2, False), (2, True), (3, True)])
def test_gradient_and_hessian_are_those_of_argmin(classes, intercept):
    loss, reference = held_out(classes, intercept), by_argmin(classes, intercept)
    t = torch.tensor(T, requires_grad=True)
    value = reference(t)
    (gradient,) = torch.autograd.grad(value, t, create_graph=True)
    hessian = np.array([torch.autograd.grad(entry, t, retain_graph=True)[0].numpy() for entry in gradient])
    assert loss.value(T) == pytest.approx(value.item(), rel=1e-8)
    assert loss.gradient(T) == pytest.approx(gradient.detach().numpy(), abs=1e-7)
    assert loss.hessian(T) == pytest.approx(hessian, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_krylov_spaces_and_matrices_give_the_same_derivatives(classes):
    dense, sparse = held_out(classes, True), held_out(classes, True, sparse=True)
    assert sparse.gradient(T) == pytest.approx(dense.gradient(T), abs=1e-6)
    assert sparse.hessian(T) == pytest.approx(dense.hessian(T), abs=1e-5)


def test_a_loose_tolerance_is_reduced_where_the_loss_is_not_precise():
    exact, loose = held_out(2, True), held_out(2, True)
    loose._tol = loose._needed_tol[:] = 0.1
    assert loose.value(T) == pytest.approx(exact.value(T), rel=2e-4)


def test_points_keep_their_loss_when_groups_are_split():
    loss = held_out(2, True)
    loss._groups = np.zeros(FEATURES, int)
    value = loss.value(np.array([0.5]))
    loss.split(GROUPS)
    assert loss.evaluations[0].t.tolist() == [0.5] * 3 and loss.value(np.full(3, 0.5)) == value
    assert len(loss.evaluations) == 1 and loss.gradient(np.full(3, 0.5)).shape == (3,)
    for shift in (0.1, 0.2, 0.3):  # matrices of old points are dropped, and formed again
        loss.value(np.full(3, 0.5 + shift))
    again = held_out(2, True)
    assert loss.gradient(np.full(3, 0.5)) == pytest.approx(again.gradient(np.full(3, 0.5)), abs=1e-7)
