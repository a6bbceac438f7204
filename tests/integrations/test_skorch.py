"""Skorch: closures that call backward(), and lr passed by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sanc
from tensors import flat

skorch = pytest.importorskip("skorch", reason="skorch is not installed")


def data():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((240, 4)).astype(np.float32)
    return X, (X[:, 0] * X[:, 1] + X[:, 2] > 0).astype(np.int64)


def classifier(epochs=10, **options):
    torch.manual_seed(0)
    return skorch.NeuralNetClassifier(
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), criterion=nn.CrossEntropyLoss,
        optimizer=sanc.SANC, lr=1.0, optimizer__seed=0, max_epochs=epochs, batch_size=40, train_split=None, verbose=0,
        **options,
    )  # fmt: skip


def test_fit_lowers_the_loss():
    X, y = data()
    net = classifier().fit(X, y)
    assert net.optimizer_.style == "backward" and net.optimizer_._iteration.state.iteration == 60
    history = net.history[:, "train_loss"]
    assert history[-1] < 0.7 * history[0] and net.score(X, y) > 0.85


def test_a_run_resumes_from_saved_parameters(tmp_path):
    X, y = data()
    whole = classifier(8).fit(X, y)
    files = {name: str(tmp_path / name) for name in ("f_params", "f_optimizer", "f_history")}
    classifier(4).fit(X, y).save_params(**files)
    again = classifier(4).initialize()
    again.load_params(**files)
    again.partial_fit(X, y)
    for mine, theirs in zip(whole.module_.parameters(), again.module_.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_lr_is_a_factor():
    """Half the rate with twice the scale makes the same steps."""
    X, y = data()
    ends = []
    for lr in (1.0, 0.5):
        net = classifier(4, optimizer__curvature=False, optimizer__distance=0.0, optimizer__scale=0.004 / lr)
        net.set_params(lr=lr).fit(X, y)
        assert net.optimizer_.param_groups[0]["lr"] == lr
        ends.append(flat(net.module_))
    assert torch.allclose(*ends, rtol=0, atol=1e-6)


def test_cloning_pickling_and_searching():
    import pickle

    from sklearn.model_selection import GridSearchCV

    X, y = data()
    search = GridSearchCV(classifier(4), {"optimizer__weight_decay": [0.0, 1e-3]}, cv=2, scoring="accuracy").fit(X, y)
    best = search.best_estimator_
    assert np.array_equal(pickle.loads(pickle.dumps(best)).predict(X), best.predict(X))
    assert search.best_score_ > 0.6
