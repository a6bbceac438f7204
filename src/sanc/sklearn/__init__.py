"""Estimators for scikit-learn: logistic regression and the nonconvex support vector machine.

They minimise the finite sums of `sanc.problems` with `sanc.minimize`, and need scikit-learn ≥ 1.7.
"""

from sanc.sklearn.estimators import LogisticRegression, LogisticRegressionCV, NonconvexSVM

__all__ = ["LogisticRegression", "LogisticRegressionCV", "NonconvexSVM"]
