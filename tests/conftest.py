"""Shared fixtures: one thread, seeded generators, a sum and its counter, and the skip of GPU tests."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scipy.sparse
import torch

from sanc.problems import Logistic

torch.set_num_threads(1)  # the models of the tests are too small to share


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20190609)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def wide_problem():
    """Sparse rows of zeros and ones like those of a9a: columns from rare to frequent, and noisy labels."""

    def make(rng, strength, n=3000, d=60):
        X = (rng.random((n, d)) < np.geomspace(0.005, 0.8, d)).astype(float)
        y = (X @ rng.standard_normal(d) + rng.standard_normal(n) > 0).astype(int)
        return Logistic(scipy.sparse.csr_matrix(X), y, penalty="nonconvex", strength=strength)

    return make


@pytest.fixture
def readings(monkeypatch):
    """Count of products X @ w and Xᵀ @ r of logistic regression."""
    seen = Counter()
    for name in ("_scores", "_pull"):
        plain = getattr(Logistic, name)

        def call(self, block, v, name=name, plain=plain):
            seen[name] += 1
            return plain(self, block, v)

        monkeypatch.setattr(Logistic, name, call)
    return seen
