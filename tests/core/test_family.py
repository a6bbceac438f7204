"""The family as data: three objects a method, presets, and how options become settings."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc.core.acceptance import always, by_ratio, with_momentum
from sanc.core.escape import escape, gradient_step, stay
from sanc.core.family import METHODS, PRESETS, make_settings
from sanc.core.model import cubic_steps, no_steps
from sanc.core.settings import _KINDS, _RANGES


def test_a_method_is_three_objects():
    """The table of the specification."""
    table = {name: (method.model, method.acceptance, method.on_rejection) for name, method in METHODS.items()}
    assert table == {
        "sanc": (cubic_steps, by_ratio, escape),
        "scr": (cubic_steps, by_ratio, stay),
        "arc": (cubic_steps, by_ratio, stay),
        "cr": (cubic_steps, always, stay),
        "crm": (cubic_steps, with_momentum, stay),
        "ncd": (no_steps, always, escape),
        "sgd": (no_steps, always, gradient_step),
    }
    assert [name for name, method in METHODS.items() if method.exact] == ["arc"]
    assert METHODS["cr"].defaults == METHODS["crm"].defaults == {"sigma0": 5.0}


def test_a_preset_may_be_an_object():
    mine = sanc.Settings(sigma0=0.5, eta1=0.15, krylov_dim=7)
    by_object = sanc.minimize(rosen, [-1.2, 1.0, 0.3], jac=rosen_der, hessp=rosen_hess_prod, preset=mine, max_iter=9)
    by_name = sanc.minimize(
        rosen, [-1.2, 1.0, 0.3], jac=rosen_der, hessp=rosen_hess_prod, preset="paper", sigma0=0.5, eta1=0.15,
        krylov_dim=7, max_iter=9,
    )  # fmt: skip
    assert np.array_equal(by_object.x, by_name.x) and by_object.history[0].sigma == 0.5
    ends = []
    for given in ({"preset": mine}, {"preset": "paper", "sigma0": 0.5, "eta1": 0.15, "krylov_dim": 7}):
        w = torch.nn.Parameter(torch.tensor([1.0, -0.5], dtype=torch.float64))
        opt = sanc.SANC([w], seed=0, **given)
        for _ in range(4):
            opt.step(lambda w=w: ((w**2 - 1) ** 2).sum() + w.prod())
        ends.append(w.detach())
    assert torch.equal(*ends)


def test_settings_for_a_method():
    assert sanc.settings_for("sanc") == PRESETS["robust"]
    assert sanc.settings_for("CR", "paper", krylov_dim=3) == make_settings(METHODS["cr"], "paper", {"krylov_dim": 3})
    with pytest.raises(sanc.ArgumentError, match="method = 'sank'"):
        sanc.settings_for("sank")


def test_every_range_is_one_of_a_setting():
    names = {field.name for kind in (sanc.Settings, sanc.MinibatchSettings) for field in fields(kind)}
    assert set(_RANGES) <= names and len(_RANGES) == sum(len(kind[0].split()) for kind in _KINDS)


def test_options_beside_a_preset_object_win():
    settings = make_settings(METHODS["sanc"], sanc.Settings(eta1=0.15), {"eta1": 0.3})
    assert settings.eta1 == 0.3
    assert make_settings(METHODS["cr"], "paper", {}).sigma0 == 5.0
    assert make_settings(METHODS["cr"], sanc.Settings(sigma0=2.0), {}).sigma0 == 2.0


def test_settings_of_the_iteration_on_samples():
    robust = PRESETS["robust"].minibatch
    assert robust == sanc.MinibatchSettings() and PRESETS["paper"].minibatch is None
    method = METHODS["sanc"]
    assert make_settings(method, "robust", {"minibatch": None}).minibatch is None
    assert make_settings(method, "robust", {"metric": "none"}).minibatch == sanc.MinibatchSettings(metric="none")
    assert make_settings(method, "paper", {"renew": 7}).minibatch == sanc.MinibatchSettings(renew=7)
    own = sanc.MinibatchSettings(renew=3, averaging=0.5)
    assert make_settings(method, "paper", {"minibatch": own, "scale": 1.0}).minibatch == sanc.MinibatchSettings(
        renew=3, averaging=0.5, scale=1.0
    )
    assert make_settings(method, "robust", {"lanczos": "regenerate"}).minibatch == sanc.MinibatchSettings()


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("robst", {}, ["preset = 'robst'", "did you mean 'robust'", "sanc.Settings"]),
        (3, {}, ["preset = 3"]),
        ("paper", {"sigma_0": 1.0}, ["'sigma_0'", "did you mean 'sigma0'"]),
        ("robust", {"averging": 3}, ["'averging'", "did you mean 'averaging'"]),
        ("robust", {"minibatch": 5}, ["minibatch = 5", "MinibatchSettings"]),
        ("robust", {"metric": 0.5}, ["metric = 0.5", "kronecker"]),
        ("paper", {"eta2": 0.1}, ["eta2 = 0.1", "above eta1"]),
        ("paper", {"rounding_guard": 1}, ["rounding_guard = 1", "True or False"]),
        ("paper", {"krylov_stop": "forced"}, ["krylov_stop = 'forced'", "choose from forcing, paper"]),
        ("paper", {"resolves": 1.5}, ["resolves = 1.5", "an integer"]),
        ("paper", {"L1": float("nan")}, ["L1 = nan", "a number"]),
    ],
)
def test_bad_settings_are_named(preset, options, words):
    with pytest.raises(sanc.ArgumentError) as caught:
        make_settings(METHODS["sanc"], preset, options)
    for word in words:
        assert word in str(caught.value)
