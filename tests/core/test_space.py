"""The arithmetic of vectors: norms near the limits of their type, and long sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sanc.core.space import NumpySpace, Space


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e200])
def test_norm_neither_overflows_nor_underflows(scale):
    assert NumpySpace(3, np.float64).norm(np.array([3.0, 4.0, 0.0]) * scale) == pytest.approx(5 * scale)


def test_norm_of_what_is_not_finite_is_not_finite():
    space = NumpySpace(2, np.float64)
    assert not math.isfinite(space.norm(np.array([1.0, np.nan])))
    assert not math.isfinite(space.norm(np.array([1.0, np.inf])))
    assert space.norm(np.zeros(2)) == 0.0


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_torch_norms_neither_overflow_nor_underflow(kind):
    dtype = getattr(torch, kind)
    space = Space(3, dtype, torch.device("cpu"))
    for scale in (0.0, 1e-30, 1e-18, 1.0, 1e18):
        assert space.norm(torch.tensor([3.0, 4.0, 0.0], dtype=dtype) * scale) == pytest.approx(5 * scale, rel=1e-6)
    assert not math.isfinite(space.norm(torch.tensor([1.0, float("nan"), 0.0], dtype=dtype)))
    assert not math.isfinite(space.norm(torch.tensor([1.0, float("inf"), 0.0], dtype=dtype)))


def test_long_sums_keep_their_digits():
    """Over more entries than a piece has, float32 sums are added in float64."""
    n = 3 * 2**20 + 5
    space = Space(n, torch.float32, torch.device("cpu"))
    v = torch.randn(n)
    exact = float(v.double().square().sum())
    assert space.dot(v, v) == pytest.approx(exact, rel=1e-5)
    assert space.norm(v) == pytest.approx(exact**0.5, rel=1e-5)


def test_the_norm_of_tensors_whose_squares_underflow():
    for dtype, exponent in ((torch.float64, -1000), (torch.float32, -120)):
        space = Space(3, dtype, torch.device("cpu"))
        v = torch.tensor([3.0, 0.0, -4.0], dtype=dtype) * 2.0**exponent
        assert space.norm(v) == pytest.approx(math.ldexp(5.0, exponent), rel=1e-6)
        assert space.norm(torch.zeros(3, dtype=dtype)) == 0.0
