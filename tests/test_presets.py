"""The family as data: pieces a method, presets, and how options become settings."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der, rosen_hess_prod

import sanc
from sanc.lab.authors import AUTHORS
from sanc.presets import METHODS, PRESETS, changes_from, compose


@pytest.mark.parametrize(("preset", "escape"), [("paper", "PaperEscape"), ("robust", "CheckedEscape")])
def test_a_method_is_three_pieces(preset, escape):
    """The table of docs/method.md."""
    composed = {name: sanc.method_for(name, preset) for name in METHODS}
    table = {
        name: tuple(type(piece).__name__ for piece in (method.model, method.acceptance, method.escape))
        for name, method in composed.items()
    }
    assert table == {
        "sanc": ("CubicModel", "RatioTest", escape),
        "scr": ("CubicModel", "RatioTest", "Stay"),
        "arc": ("CubicModel", "RatioTest", "Stay"),
        "cr": ("CubicModel", "AcceptAll", "Stay"),
        "crm": ("CubicModel", "Momentum", "Stay"),
        "ncd": ("KrylovModel", "AcceptAll", escape),
        "sgd": ("NoModel", "AcceptAll", "GradientStep"),
    }
    assert [name for name, method in composed.items() if method.exact] == ["arc"]
    assert composed["cr"].sigma.sigma0 == composed["crm"].sigma.sigma0 == 5.0
    assert [name for name, method in composed.items() if method.needs_products] == list(composed)[:-1]


def pieces_of(method):
    yield method
    for item in fields(method):
        if is_dataclass(getattr(method, item.name)):
            yield from pieces_of(getattr(method, item.name))


def test_every_piece_is_frozen_and_every_name_means_one_setting():
    """Two pieces may share a name only if they share its default, so that one option can set both."""
    defaults = {}
    for name in METHODS:
        for preset in (*PRESETS, AUTHORS):
            for piece in pieces_of(sanc.method_for(name, preset)):
                for item in fields(piece):
                    with pytest.raises(FrozenInstanceError):
                        setattr(piece, item.name, None)
                    if not is_dataclass(getattr(piece, item.name)):
                        defaults.setdefault(item.name, set()).add(item.default)
    assert {"epsilon", "memory", "refresh"} <= defaults.keys()
    # The authors' program, which no option can change, has its own lower bound of σ.
    assert {name for name, values in defaults.items() if len(values) > 1} == {"sigma_floor"}


def test_a_preset_may_be_an_object():
    mine = sanc.Method(
        sigma=sanc.SigmaUpdate(sigma0=0.5), acceptance=sanc.RatioTest(eta1=0.15), model=sanc.CubicModel(krylov_dim=7)
    )
    options = {"jac": rosen_der, "hessp": rosen_hess_prod, "max_iter": 9}
    by_object = sanc.minimize(rosen, [-1.2, 1.0, 0.3], preset=mine, **options)
    by_method = sanc.minimize(rosen, [-1.2, 1.0, 0.3], method=mine, **options)
    by_name = sanc.minimize(
        rosen, [-1.2, 1.0, 0.3], preset="paper", sigma0=0.5, eta1=0.15, krylov_dim=7, **options
    )  # fmt: skip
    assert np.array_equal(by_object.x, by_name.x) and by_object.history[0].sigma == 0.5
    assert np.array_equal(by_method.x, by_name.x)
    ends = []
    for given in ({"preset": mine}, {"preset": "paper", "sigma0": 0.5, "eta1": 0.15, "krylov_dim": 7}):
        w = torch.nn.Parameter(torch.tensor([1.0, -0.5], dtype=torch.float64))
        opt = sanc.SANC([w], seed=0, **given)
        for _ in range(4):
            opt.step(lambda w=w: ((w**2 - 1) ** 2).sum() + w.prod())
        ends.append(w.detach())
    assert torch.equal(*ends)


def test_method_for_composes_by_name():
    assert sanc.method_for() == PRESETS["robust"]
    assert sanc.method_for("CR", "paper", krylov_dim=3) == compose("cr", "paper", {"krylov_dim": 3})
    with pytest.raises(sanc.ArgumentError, match="method = 'sank'"):
        sanc.method_for("sank")
    options = sanc.method_for("scr", eta1=0.3, metric="diagonal").options()
    assert options["eta1"] == 0.3 and options["metric"] == "Diagonal" and options["escape"] == "Stay"


def test_options_beside_a_preset_object_win():
    mine = sanc.Method(acceptance=sanc.RatioTest(eta1=0.15))
    assert compose("sanc", mine, {"eta1": 0.3}).acceptance.eta1 == 0.3
    assert compose("cr", "paper", {}).sigma.sigma0 == 5.0
    assert compose("cr", replace(mine, sigma=sanc.SigmaUpdate(sigma0=2.0)), {}).sigma.sigma0 == 2.0


def test_an_option_sets_every_piece_that_has_it():
    method = sanc.method_for("sanc", "paper", epsilon=1e-3)
    assert method.model.epsilon == method.escape.epsilon == 1e-3


def test_settings_of_one_name_with_different_values_are_all_reported():
    method = sanc.Method(model=sanc.CubicModel(epsilon=1e-2), escape=sanc.PaperEscape())
    assert "epsilon" not in method.options()
    assert method.options()["model.epsilon"] == 1e-2 and method.options()["escape.epsilon"] == 1e-4
    assert changes_from(PRESETS["paper"], method) == ["model.epsilon=0.01"]
    assert changes_from(PRESETS["paper"], sanc.method_for("sanc", "paper", epsilon=0.5)) == ["epsilon=0.5"]
    assert changes_from(PRESETS["paper"], sanc.method_for("sanc", "paper", minibatch=sanc.Minibatch(noise=2.0))) == [
        "minibatch=Minibatch", "noise=2.0"
    ]  # fmt: skip
    weights = torch.nn.Parameter(torch.ones(2))
    saved = sanc.SANC([weights], preset=method).state_dict()
    with pytest.warns(UserWarning, match=r"model\.epsilon = 0\.01"):
        sanc.SANC([weights], preset="paper").load_state_dict(saved)


@pytest.mark.parametrize("name", ["ncd", "sgd"])
def test_a_method_without_cubic_steps_takes_no_model_that_proposes_them(name):
    assert not sanc.method_for(name).model.proposes
    assert not sanc.method_for(name, sanc.Method(model=sanc.CubicModel())).model.proposes  # its Krylov space alone
    with pytest.raises(sanc.ArgumentError, match=rf"model = .* proposes cubic steps, and {name} makes none"):
        sanc.method_for(name, model=sanc.CubicModel())


def test_an_option_without_effect_is_an_error():
    """ε is used by the stopping rule "paper" of Lanczos and by `PaperEscape`; the default has neither."""
    for given in ({"epsilon": 1e3}, {"epsilon_g": 1e3}):
        with pytest.raises(sanc.ArgumentError, match=r"epsilon.* = 1000.0 has no effect.*krylov_stop="):
            sanc.method_for(**given)
        sanc.method_for(krylov_stop="paper", **given)
        sanc.method_for(escape=sanc.PaperEscape(), **given)
    small, large = (
        sanc.minimize(lambda x: x[0] ** 2 + 9 * x[1] ** 4, torch.ones(2).double(), krylov_stop="paper", **given)
        for given in ({"epsilon": 1e-6, "max_iter": 9}, {"epsilon": 1e3, "max_iter": 9})
    )
    assert small.nhev != large.nhev


def test_an_option_may_be_a_piece_and_its_settings_apply_to_it():
    method = sanc.method_for(sigma_ceiling=5.0, sigma=sanc.SigmaUpdate(sigma0=2.0), metric=sanc.Diagonal(), memory=0.5)
    assert method.sigma == sanc.SigmaUpdate(sigma0=2.0, sigma_ceiling=5.0)
    assert method.minibatch.metric == sanc.Diagonal(memory=0.5)


def test_settings_of_the_iteration_on_samples():
    assert PRESETS["robust"].minibatch == sanc.Minibatch() and PRESETS["paper"].minibatch is None
    assert compose("sanc", "robust", {"minibatch": None}).minibatch is None
    assert compose("sanc", "robust", {"metric": "none"}).minibatch == sanc.Minibatch(metric=sanc.Identity())
    assert sanc.Minibatch(metric="diagonal") == sanc.Minibatch(metric=sanc.Diagonal())
    refreshed = sanc.Minibatch(metric=sanc.Kronecker(refresh=7))
    assert compose("sanc", "paper", {"minibatch": sanc.Minibatch(), "refresh": 7}).minibatch == refreshed
    mine = sanc.Minibatch(average=sanc.Average(averaging=0.5))
    assert compose("sanc", "paper", {"minibatch": mine, "scale": 1.0}).minibatch == replace(
        mine, step_size=sanc.StepSize(scale=1.0)
    )
    assert compose("sanc", "robust", {"lanczos": "regenerate"}).minibatch == sanc.Minibatch()


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        ("robst", {}, ["preset = 'robst'", "did you mean 'robust'", "sanc.Method"]),
        (3, {}, ["preset = 3"]),
        ("authors", {}, ["sanc.lab.authors.AUTHORS"]),
        ("paper", {"sigma_0": 1.0}, ["'sigma_0'", "did you mean 'sigma0'"]),
        ("robust", {"averging": 3}, ["'averging'", "did you mean 'averaging'"]),
        ("robust", {"minibatch": 5}, ["minibatch = 5", "sanc.Minibatch"]),
        ("robust", {"metric": 0.5}, ["metric = 0.5", "kronecker"]),
        ("robust", {"metric": "kroneker"}, ["metric = 'kroneker'", "did you mean 'kronecker'"]),
        ("robust", {"acceptance": 0.1}, ["acceptance = 0.1", "sanc.RatioTest"]),
        ("robust", {"model": sanc.CubicModel}, ["model = ", "sanc.CubicModel()"]),
        ("robust", {"escape": "paper"}, ["escape = 'paper'", "sanc.CheckedEscape"]),
        ("robust", {"sigma": 1.0}, ["sigma = 1.0", "sigma0"]),
        ("robust", {"L1": 1.0}, ["L1 = 1.0", "PaperEscape", "CheckedEscape", "escape=sanc.PaperEscape"]),
        ("robust", {"momentum": 0.5}, ["momentum = 0.5", "Momentum", "leave it out"]),
        ("robust", {"renew": 5}, ["renew = 5", "refresh"]),
        ("robust", {"estimate_constants": True}, ["escape", "CheckedEscape"]),
        ("paper", {"refresh": 7}, ["refresh = 7", "averaged phase", "leave it out", "minibatch=sanc.Minibatch()"]),
        ("paper", {"metric": "diagonal"}, ["metric = 'diagonal'", "averaged phase", "minibatch=sanc.Minibatch()"]),
        ("robust", {"minibatch": None, "scale": 1.0}, ["scale = 1.0", "averaged phase"]),
        ("paper", {"eta2": 0.1}, ["eta2 = 0.1", "above eta1"]),
        ("paper", {"rounding_guard": 1}, ["rounding_guard = 1", "True or False"]),
        ("paper", {"krylov_stop": "forced"}, ["krylov_stop = 'forced'", "choose from forcing, paper"]),
        ("paper", {"max_resolves": 1.5}, ["max_resolves = 1.5", "an integer"]),
        ("paper", {"L1": float("nan")}, ["L1 = nan", "a number"]),
        ("paper", {"sigma_ceiling": 1e-3, "sigma_floor": 1e-2}, ["sigma_ceiling", "above 0.01"]),
    ],
)
def test_bad_settings_are_named(preset, options, words):
    with pytest.raises(sanc.SancError) as caught:
        compose("sanc", preset, options)
    for word in words:
        assert word in str(caught.value)


def test_settings_of_another_method_are_named():
    with pytest.raises(sanc.ArgumentError, match=r"scale = 1\.0 is used by sanc and scr alone, not by cr"):
        compose("cr", "robust", {"scale": 1.0})
    with pytest.raises(sanc.ArgumentError, match=r"preset = 'paper'.*beside a Method"):
        sanc.minimize(rosen, [1.0, 2.0], jac=rosen_der, method=sanc.Method(), preset="paper")


@pytest.mark.parametrize(("old", "new"), [("Settings", "sanc.Method"), ("MinibatchSettings", "sanc.Minibatch"),
                                          ("settings_for", "sanc.method_for")])  # fmt: skip
def test_names_of_earlier_versions_name_the_new_ones(old, new):
    with pytest.raises(AttributeError, match=new):
        getattr(sanc, old)
    with pytest.raises(AttributeError, match=r"Branch\.AVERAGED"):
        _ = sanc.Branch.UNTESTED
