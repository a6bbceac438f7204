"""Fixtures of the tests of `minimize`: a logistic regression."""

from __future__ import annotations

import numpy as np
import pytest

from sanc.problems import Logistic


@pytest.fixture
def problem(rng):
    X = rng.standard_normal((200, 6))
    y = (X @ np.array([1.0, -2, 0.5, 0, 0, 1]) + 0.5 * rng.standard_normal(200) > 0).astype(int)
    return Logistic(X, y, penalty="nonconvex", strength=0.05)
