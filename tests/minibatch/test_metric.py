"""The metric of steps on samples against dense float64 computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sanc.minibatch.metrics.kronecker import Kronecker, orthonormal
from sanc.minibatch.settings import METRICS

SHAPES = [(4, 3), (5,), (2, 3, 2, 2), (4, 3), (), (1, 6), (7, 2)]
LIKE = torch.zeros(1, dtype=torch.float64)


def gradients(count, seed=0):
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((count, size)) * np.linspace(0.1, 3, size))


def pieces(vector):
    return [part.reshape(shape) for part, shape in zip(
        torch.split(vector, [int(np.prod(shape)) for shape in SHAPES]), SHAPES, strict=True
    )]  # fmt: skip


def states(metric):
    """Second moments, factors and bases of each parameter."""
    return metric.save()


def refresh_all(metric):
    for part in range(metric.parts):
        metric.refresh(part)


def learnt(kind, gs, weights, refresh_after=(), **settings):
    metric = METRICS[kind](**settings).create(SHAPES, LIKE)
    for k, (g, weight) in enumerate(zip(gs, weights, strict=True)):
        direction = metric.update(g, weight)
        if k in refresh_after:
            refresh_all(metric)
    return metric, direction


@pytest.mark.parametrize("refresh_after", [(), (0,), (0, 1, 2)])
def test_the_direction_is_the_dense_one(refresh_after):
    """M = Q diag(√V) Qᵀ with Q = Q_L ⊗ Q_R, written out as a matrix, for each parameter."""
    gs, weights = gradients(4), [1.0, 0.5, 0.25, 0.3]
    metric, direction = learnt("kronecker", gs, weights, refresh_after)
    for parts, g, found, shape in zip(states(metric), pieces(gs[-1]), pieces(direction), SHAPES, strict=True):
        g = g.numpy().ravel()
        if "left" not in parts:
            Q = np.eye(len(g))
        else:
            Q = np.kron(parts["left_basis"].numpy(), parts["right_basis"].numpy())
            assert np.allclose(Q.T @ Q, np.eye(len(g)), atol=1e-7)
            assert len(parts["left_basis"]) == shape[0]
        M = Q @ np.diag(np.sqrt(parts["second_moment"].numpy().ravel())) @ Q.T
        assert np.allclose(M @ found.numpy().ravel(), g, rtol=1e-4, atol=1e-5)


def test_means_are_weighted_as_asked():
    """The factors and, where no basis was rotated, the squares, from their definitions."""
    gs, weights = gradients(5), [1.0, 0.5, 0.2, 0.2, 0.1]
    metric, _ = learnt("kronecker", gs, weights)
    share = np.array([w * np.prod([1 - v for v in weights[k + 1 :]]) for k, w in enumerate(weights)])
    assert share.sum() == pytest.approx(1.0)
    for place, parts in enumerate(states(metric)):
        blocks = np.stack([pieces(g)[place].reshape(1 if not SHAPES[place] else SHAPES[place][0], -1) for g in gs])
        square = np.einsum("k,kij->ij", share, blocks**2)
        assert np.allclose(parts["second_moment"].numpy().ravel(), square.ravel())
        if "left" in parts:
            assert np.allclose(parts["left"], np.einsum("k,kij,klj->il", share, blocks, blocks))
            assert np.allclose(parts["right"], np.einsum("k,kij,kil->jl", share, blocks, blocks))


def test_refreshing_finds_the_eigenvectors_of_the_factors():
    gs = gradients(40, seed=1)  # whose factors have distinct eigenvalues
    metric, _ = learnt("kronecker", gs, [max(0.05, 1 / (k + 1)) for k in range(40)])
    for _ in range(400):
        refresh_all(metric)
    for parts in states(metric):
        for side in ("left", "right"):
            if side in parts:
                rotated = parts[f"{side}_basis"].mT @ parts[side] @ parts[f"{side}_basis"]
                assert np.allclose(rotated, torch.diag(torch.linalg.eigvalsh(parts[side]).flip(0)), atol=1e-8)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", [1, 7, 300])
def test_a_basis_is_orthonormal_and_that_of_reflections(kind, side):
    """As badly conditioned as the power method can make it: one eigenvalue, and nothing else but δ."""
    rng = torch.Generator().manual_seed(side)
    orthogonal = torch.linalg.qr(torch.randn(2, side, side, generator=rng, dtype=torch.float64)).Q
    u = torch.randn(2, side, 1, generator=rng, dtype=torch.float64)
    a = ((u @ u.mT / u.square().mean(1, keepdim=True) + 1e-3 * torch.eye(side)) @ orthogonal).to(kind)
    q, fine = orthonormal(a)
    assert fine.all()
    rounding = 2 * torch.finfo(kind).eps + 1e-16 * (side / 1e-3) ** 2
    assert (q.mT @ q - torch.eye(side)).abs().max() < 5 * rounding
    reflected, r = torch.linalg.qr(a.double())
    reflected = reflected * r.diagonal(dim1=1, dim2=2).sign()[:, None]
    assert torch.allclose(q.double(), reflected, rtol=0, atol=5 * rounding)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_matrix_without_a_basis_is_identified(bad):
    good = torch.eye(3)
    q, fine = orthonormal(torch.stack([good, good * bad, 2 * good]))
    assert fine.tolist() == [True, False, True]
    assert torch.equal(q[2], good)


def test_refreshing_carries_the_second_moments_over():
    """A covariance that is diagonal in the old basis: its diagonal in the new one is what is held."""
    metric, _ = learnt("kronecker", gradients(3), [1.0, 0.5, 0.3])
    before = states(metric)
    refresh_all(metric)
    for old, new in zip(before, states(metric), strict=True):
        if "left" in old:
            Q_old = np.kron(old["left_basis"], old["right_basis"])
            Q_new = np.kron(new["left_basis"], new["right_basis"])
            covariance = Q_old @ np.diag(old["second_moment"].numpy().ravel()) @ Q_old.T
            assert np.allclose(np.diag(Q_new.T @ covariance @ Q_new), new["second_moment"].numpy().ravel())


def test_the_null_space_of_a_factor_keeps_its_basis():
    """One gradient of rank 1: rounding decides nothing."""
    metric = Kronecker().create([(6, 5)], LIKE)
    u, v = torch.arange(1.0, 7.0, dtype=torch.float64), torch.arange(1.0, 6.0, dtype=torch.float64)
    g = torch.outer(u, v).reshape(-1)
    metric.update(g, 1.0)
    metric.refresh()
    other = Kronecker().create([(6, 5)], LIKE)
    nearly = g * (1 + 1e-13 * torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    other.update(nearly, 1.0)
    other.refresh()
    for a, b in zip(metric.tensors()[1:], other.tensors()[1:], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6 * float(a.abs().max()))


def test_a_diagonal_metric_is_adams_and_none_is_one_number():
    gs = gradients(2)
    _, direction = learnt("diagonal", gs, [1.0, 0.5])
    assert torch.allclose(direction, gs[1] / (0.5 * gs[0] ** 2 + 0.5 * gs[1] ** 2).sqrt(), rtol=1e-4)
    _, direction = learnt("none", gs, [1.0, 0.5])
    assert torch.allclose(
        direction, gs[1] / (0.5 * gs[0].square().mean() + 0.5 * gs[1].square().mean()).sqrt(), rtol=1e-4
    )


@pytest.mark.parametrize(("shape", "limit", "blocks"), [
    ((7, 3), 4, ((3, 3, 1), (3,))),  # a long side has blocks no longer than the other side
    ((7, 6), 4, ((4, 3), (3, 3))),
    ((2, 9), 3, ((2,), (2, 2, 2, 2, 1))),
])  # fmt: skip
def test_a_long_side_is_rotated_in_blocks(shape, limit, blocks):
    """Against the dense metric: factors are the diagonal blocks of mean GGᵀ and mean GᵀG."""
    rng = np.random.default_rng(3)
    gs, weights = rng.standard_normal((4, *shape)) * np.linspace(1, 3, shape[1]), [1.0, 0.5, 0.4, 0.3]
    metric = Kronecker(largest_side=limit).create([shape], LIKE)
    for g, weight in zip(gs, weights, strict=True):
        direction = metric.update(torch.from_numpy(g).reshape(-1), weight)
        if weight != weights[-1]:
            refresh_all(metric)
    share = np.array([w * np.prod([1 - v for v in weights[k + 1 :]]) for k, w in enumerate(weights)])
    (held,) = states(metric)
    bases = []
    for name, lengths, second in (("left", blocks[0], "kij,klj->kil"), ("right", blocks[1], "kij,kil->kjl")):
        factor, length = np.einsum("k,kij->ij", share, np.einsum(second, gs, gs)), max(lengths)
        basis, begin = np.zeros_like(factor), 0
        for block, size in enumerate(lengths):
            rows = slice(block * length, block * length + size)
            part = slice(begin, begin + size)
            assert np.allclose(held[name][rows, :size], factor[part, part])
            basis[part, part] = held[f"{name}_basis"][rows, :size]
            begin += size
        assert np.allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-7) and begin == len(factor)
        bases.append(basis)
    H = bases[0].T @ gs[-1] @ bases[1]
    expected = bases[0] @ (H / np.sqrt(held["second_moment"].numpy())) @ bases[1].T
    assert np.allclose(direction.reshape(shape), expected, rtol=1e-4, atol=1e-5)


def test_matrices_of_experts_are_a_stack():
    """A tensor of 3 × 40 × 33 has the directions of its three matrices."""
    rng = torch.Generator().manual_seed(0)
    gs = torch.randn(3, 3, 40, 33, generator=rng, dtype=torch.float64)
    stack = Kronecker().create([(3, 40, 33)], LIKE)
    apart = Kronecker().create([(40, 33)] * 3, LIKE)
    for g in gs:
        found, expected = (metric.update(g.reshape(-1), 0.5) for metric in (stack, apart))
        assert torch.allclose(found, expected, rtol=1e-9)
        refresh_all(stack)
        refresh_all(apart)
    other = Kronecker().create([(3, 40, 33)], LIKE)
    other.restore(stack.save())
    assert torch.equal(other.apply(g.reshape(-1)), stack.apply(g.reshape(-1)))


def test_an_embedding_needs_a_bounded_number_of_entries():
    metric = Kronecker().create([(50_000, 64)], torch.empty(0, device="meta"))
    entries = sum(tensor.numel() for tensor in metric.tensors())
    assert entries < 3.1 * 50_000 * 64  # second moments, and factors and bases of the blocks of rows


@pytest.mark.parametrize("size", [1e-140, 1e-12, 1.0, 1e12, 1e140])
@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "none"])
def test_the_direction_has_no_units(kind, size):
    gs, weights = gradients(4), [1.0, 0.5, 0.3, 0.3]
    _, expected = learnt(kind, gs, weights, (0, 2))
    _, found = learnt(kind, gs * size, weights, (0, 2))
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "none"])
def test_a_restored_metric_goes_on_bit_for_bit(kind):
    gs = gradients(6)
    metric, _ = learnt(kind, gs[:4], [1.0, 0.5, 0.3, 0.3], (1,))
    other = METRICS[kind]().create(SHAPES, LIKE)
    other.restore(metric.save())
    for g in gs[4:]:
        for one in (metric, other):
            refresh_all(one)
        assert torch.equal(metric.update(g, 0.2), other.update(g, 0.2))


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "none"])
def test_a_zero_gradient_has_no_direction(kind):
    metric = METRICS[kind]().create(SHAPES, LIKE)
    zero = torch.zeros_like(gradients(1)[0])
    metric.update(zero, 1.0)
    refresh_all(metric)
    assert torch.equal(metric.update(zero, 0.5), zero)


@pytest.mark.parametrize("kind", ["kronecker", "diagonal", "none"])
def test_applying_changes_nothing_and_repeats_the_update(kind):
    gs = gradients(4)
    metric, direction = learnt(kind, gs, [1.0, 0.5, 0.3, 0.3], (0, 1))
    before = [tensor.clone() for tensor in metric.tensors()]
    assert torch.equal(metric.apply(gs[-1]), direction)
    assert all(torch.equal(a, b) for a, b in zip(before, metric.tensors(), strict=True))
