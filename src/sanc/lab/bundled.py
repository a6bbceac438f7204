"""Small data sets that scikit-learn ships, for trying things out where nothing is downloaded."""

from __future__ import annotations

import numpy as np

from sanc.lab.datasets import Loaded

NAMES = ("breast_cancer", "digits", "iris", "wine")
"""Names that `load` knows."""


def load(name: str, dtype: str = "float64") -> Loaded:
    """Return a bundled data set, its features scaled to mean 0 and variance 1, or to [0, 1] for the digits."""
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    if name == "digits":
        X = X / 16.0
    else:
        X = (X - X.mean(0)) / X.std(0)
    return Loaded(name=name, X=X.astype(dtype), y=y.astype(np.int64), classes=int(y.max()) + 1, note="")
