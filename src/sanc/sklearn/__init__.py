"""Estimators for scikit-learn: logistic regression, along a path of penalties too, and the nonconvex SVM.

They minimise the finite sums of `sanc.problems` with `sanc.minimize`, and need scikit-learn ≥ 1.7.
"""

try:
    from sklearn.utils.validation import validate_data  # noqa: F401 (since scikit-learn 1.6)
except ImportError as missing:
    raise ImportError(
        f"sanc.sklearn needs scikit-learn ≥ 1.7 ({missing}): install the extra, pip install 'sanc[sklearn]'."
    ) from missing

from sanc.sklearn.cross_validation import LogisticRegressionCV, logistic_regression_path
from sanc.sklearn.logistic import LogisticRegression
from sanc.sklearn.svm import NonconvexSVM

__all__ = ["LogisticRegression", "LogisticRegressionCV", "NonconvexSVM", "logistic_regression_path"]
