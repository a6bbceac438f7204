"""The estimators in scikit-learn's pipelines and searches, beside scikit-learn's own.

python examples/fit_a_table.py
"""

import numpy as np
import sklearn.linear_model
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from sanc.sklearn import LogisticRegression, NonconvexSVM

X, y = load_breast_cancer(return_X_y=True)
print("breast cancer, five folds:")
for estimator in (LogisticRegression(), NonconvexSVM(), sklearn.linear_model.LogisticRegression()):
    scores = cross_val_score(make_pipeline(StandardScaler(), estimator), X, y, cv=5)
    whose = type(estimator).__module__.split(".")[0]
    print(f"  {whose:8s} {estimator!s:24s} {scores.mean():.4f} ± {scores.std():.4f}")

search = GridSearchCV(
    make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced")),
    {"logisticregression__C": [0.01, 0.1, 1.0]},
    cv=5,
).fit(X, y)
print("  the best of a search:", search.best_params_, f"{search.best_score_:.4f}")

X, y = load_digits(return_X_y=True)
ours = LogisticRegression(tol=1e-6).fit(X / 16, y)
theirs = sklearn.linear_model.LogisticRegression(tol=1e-6, max_iter=1000).fit(X / 16, y)
difference = np.abs(ours.predict_proba(X / 16) - theirs.predict_proba(X / 16)).max()
print(f"digits, ten classes: probabilities differ from scikit-learn's by at most {difference:.1e}")
