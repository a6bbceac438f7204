"""The panels of the paper, their settings and variants, and the shapes of its networks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sanc
from made_runs import LOGISTIC
from sanc.lab import experiments, models, runs
from sanc.lab.experiments import FIGURES, RunSpec


def test_the_panels_have_the_settings_of_the_paper():
    assert {name: [panel.data for panel in panels] for name, panels in FIGURES.items()} == {
        "fig1": ["w1a", "higgs", "ijcnn1", "covtype"],
        "fig2a": ["w1a", "higgs"],
        "fig2b": ["seismic", "segment"],
        "fig2c": ["mnist", "cifar10"],
        "fig3": ["w8a", "a9a", "covtype", "ijcnn1"],
        "fig4": ["w8a", "a9a"],
        "fig5": ["mnist", "cifar10"],
    }
    for name in ("fig1", "fig4"):
        assert all(p.options["sigma0"] == 0.001 and p.methods == ("sanc", "scr") for p in FIGURES[name])
    for name in ("fig2a", "fig3"):
        assert all(
            p.options["sigma0"] == 1.0 and {"sanc", "scr", "cr", "ncd", "sgd"} <= set(p.methods) for p in FIGURES[name]
        )
    for name, kind in (("fig2c", "tanh"), ("fig5", "relu")):
        for p in FIGURES[name]:
            assert (p.activation, p.batch, p.strength, p.methods) == (kind, 128, 0.01, ("sanc", "scr", "ncd", "sgd"))
            assert p.options["eta1"] == 0.1 and p.options["eta2"] == 0.3


def test_options_of_a_run_depend_on_method_data_and_preset():
    panel = FIGURES["fig3"][2]  # covtype
    by = {method: RunSpec(panel, method, 0).variant.options for method in panel.methods}
    assert by["sanc"] == {"L1": 10.0, "L2": 100.0, "sigma0": 1.0}
    assert by["cr"]["sigma0"] == 5.0 and by["sgd"] == {"lr": 0.01}
    network = FIGURES["fig2c"][1]
    assert RunSpec(network, "sgd", 0).variant.options == {"lr": 0.001}
    assert RunSpec(network, "sanc", 0).variant.options["L1"] == 1000.0
    assert panel.batch_size(2477, "paper") == 124 and panel.batch_size(2477, "authors") == 123
    assert panel.budget(1000) == 20_000 and network.budget(1000) == 750_000


def test_panels_are_selected_by_figure_data_and_method():
    assert len(experiments.select(["all"])) == sum(len(panels) for panels in FIGURES.values())
    (one,) = experiments.select(["fig3"], data=["a9a"], methods=["sanc"])
    assert one.name == "fig3-a9a" and one.methods == ("sanc",)
    for given, word in [
        ((["fig9"],), "'fig9'"),
        ((["fig1"], ["mnist"]), "'mnist'"),
        ((["fig1"], None, ["adam"]), "'adam'"),
    ]:
        with pytest.raises(sanc.ArgumentError, match=word):
            experiments.select(*given)


def test_networks_have_the_shapes_of_the_paper():
    cnn = models.cnn(1, 28, 10)
    shapes = [tuple(p.shape) for p in cnn.parameters() if p.ndim > 1]
    assert shapes == [(32, 1, 5, 5), (64, 32, 5, 5), (1000, 3136), (10, 1000)]
    models.initialise(cnn, 0)
    x, y = torch.rand(20, 1, 28, 28), torch.randint(0, 10, (20,))
    assert models.training_loss(cnn, x, y, 0.01) == pytest.approx(10.4, abs=0.4)  # where the paper's curve starts
    mlp = models.mlp(19, 7)
    assert [tuple(p.shape) for p in mlp.parameters() if p.ndim > 1] == [(300, 19), (500, 300), (7, 500)]
    other = models.mlp(19, 7)
    models.initialise(mlp, 3), models.initialise(other, 3)
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), other.parameters(), strict=True))
    decays = models.groups(mlp, 0.01)
    assert [len(g["params"]) for g in decays] == [3, 3] and [g["weight_decay"] for g in decays] == [0.01, 0.0]
    by_hand = torch.nn.functional.cross_entropy(mlp(torch.ones(5, 19)), torch.zeros(5, dtype=torch.long))
    by_hand = by_hand + 0.005 * sum((p**2).sum() for p in mlp.parameters() if p.ndim > 1)
    ours = models.training_loss(mlp, torch.ones(5, 19), torch.zeros(5, dtype=torch.long), 0.01, chunk=2)
    assert ours == pytest.approx(by_hand.item(), rel=1e-5)
    with pytest.raises(sanc.ArgumentError, match="'gelu'"):
        models.mlp(3, 2, "gelu")


def test_a_setting_makes_a_variant_of_every_method_that_has_it():
    panel = replace(LOGISTIC, name="fig2a-w1a", figure="fig2a", data="w1a")
    (varied,) = experiments.by_settings([panel], {"eta1": [0.1, 0.4], "sigma0": [1e-5]}, "paper")
    assert varied.name == "fig2a-w1a-by-eta1-sigma0" and varied.figure == "fig2a-by-eta1-sigma0"
    assert varied.methods == (
        "sanc-eta1=0.1-sigma0=1e-05", "sanc-eta1=0.4-sigma0=1e-05", "scr-eta1=0.1-sigma0=1e-05",
        "scr-eta1=0.4-sigma0=1e-05", "cr-sigma0=1e-05", "ncd-sigma0=1e-05", "sgd-sigma0=1e-05",
    )  # fmt: skip
    composed = RunSpec(varied, "sanc-eta1=0.4-sigma0=1e-05", 0).variant.composed()
    assert (composed.name, composed.acceptance.eta1, composed.sigma.sigma0, composed.escape.L1) == (
        "sanc",
        0.4,
        1e-5,
        10,
    )
    assert (composed.acceptance.eta2, composed.model.krylov_dim) == (0.8, 5)  # the others are the paper's
    assert "σ0" not in runs.configuration(RunSpec(varied, varied.methods[0], 0), 10, 2, "")["subtitle"]


def test_methods_without_a_setting_are_unchanged_and_networks_have_the_rate_of_torch():
    mlp = next(panel for panel in FIGURES["fig2b"] if panel.data == "segment")
    (varied,) = experiments.by_settings([mlp], {"lr": [0.01, 0.1]}, "paper")
    assert varied.methods == ("sanc", "scr", "cr", "crm", "ncd", "sgd-lr=0.01", "sgd-lr=0.1")
    assert RunSpec(varied, "sgd-lr=0.1", 0).variant.options == {"lr": 0.1}
    assert RunSpec(varied, "sanc", 0).variant == RunSpec(mlp, "sanc", 0).variant
    assert experiments.by_settings([mlp], {}, "paper") == [mlp]
