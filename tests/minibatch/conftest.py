"""The objective of the tests of the iteration on samples."""

import pytest
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

import sanc


@pytest.fixture(scope="module")
def problem():
    X, y = load_breast_cancer(return_X_y=True)
    return sanc.problems.Logistic(scale(X), y, penalty="nonconvex", strength=1.0)
