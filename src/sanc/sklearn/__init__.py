"""Estimators for scikit-learn: logistic regression, along a path of penalties too, and the nonconvex SVM.

They minimise the finite sums of `sanc.problems` with `sanc.minimize`, and need scikit-learn ≥ 1.7.
"""

from sanc.sklearn.estimators import (
    LogisticRegression,
    LogisticRegressionCV,
    NonconvexSVM,
    logistic_regression_path,
)

__all__ = ["LogisticRegression", "LogisticRegressionCV", "NonconvexSVM", "logistic_regression_path"]
