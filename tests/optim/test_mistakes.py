"""Errors and warnings of optimisers for bad options, parameters, closures and schedules."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import sanc
from classifier import loss_of, make, snapshot
from tensors import flat


def test_weight_decay_that_overflows_is_an_error():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(sanc.ArgumentError, match=r"weight_decay = 1e\+39 cannot be used with torch.float32"):
        sanc.SANC([p], weight_decay=1e39)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sigma0": 0.0}, ["sigma0 = 0.0", "positive"]),
        ({"sigma0": -1.0}, ["sigma0 = -1.0"]),
        ({"sigma0": float("nan")}, ["sigma0 = nan"]),
        ({"sigma0": "1"}, ["sigma0 = '1'", "number"]),
        ({"eta1": 0.9, "eta2": 0.5}, ["eta2 = 0.5", "above eta1 = 0.9"]),
        ({"eta1": 0.0}, ["eta1 = 0.0"]),
        ({"eta2": 1.0}, ["eta2 = 1.0"]),
        ({"gamma": 1.0}, ["gamma = 1.0", "above 1"]),
        ({"krylov_dim": 0}, ["krylov_dim = 0", "≥ 1"]),
        ({"krylov_dim": 2.5}, ["krylov_dim = 2.5", "integer"]),
        ({"L1": -1.0}, ["L1 = -1.0"]),
        ({"lanczos": "keep"}, ["lanczos = 'keep'", "store"]),
        ({"reorthogonalise": True}, ["reorthogonalise = True", "krylov_stop"]),
        ({"sigma_0": 1.0}, ["'sigma_0'", "did you mean 'sigma0'"]),
        ({"krylovdim": 3}, ["'krylovdim'", "did you mean 'krylov_dim'"]),
        ({"presets": "paper"}, ["'presets'", "did you mean 'preset'"]),
        ({"preset": "papr"}, ["preset = 'papr'", "did you mean 'paper'"]),
        ({"hvp": "double_backward"}, ["hvp = 'double_backward'", "did you mean 'double-backward'"]),
        ({"microbatch": 0}, ["microbatch = 0"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"weight_decay": -0.1}, ["weight_decay = -0.1", "≥ 0"]),
        ({"momentum": 1.0}, ["momentum = 1.0"]),
        ({"lr": -0.1}, ["lr = -0.1", "≥ 0"]),
        ({"krylov_dim": None}, ["krylov_dim = None"]),
        ({"microbatch": True}, ["microbatch = True"]),
        ({"preset": ["paper"]}, ["preset = ['paper']"]),
        ({"sigma_ceiling": 1e-9, "sigma_floor": 1.0}, ["sigma_ceiling = 1e-09"]),
    ],
)
def test_errors_name_bad_options(options, words):
    model, _, _ = make()
    with pytest.raises(sanc.SancError) as caught:
        sanc.SANC(model.parameters(), **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([], ["params is empty"]),
        (5, ["params = 5", "list"]),
        (torch.ones(3), ["params = tensor", "list"]),
        ([nn.Parameter(torch.ones(2), requires_grad=False)], ["nothing to optimise", "free"]),
        ([nn.Parameter(torch.ones(2).to(torch.float8_e5m2))], ["float8", "autocast"]),
        ([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], ["one type", "float64"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "lr": "fast"}], ["lr = 'fast'", "≥ 0"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "beta": 0.1}], ["'beta'", "not known"]),
        ([{"params": [nn.Parameter(torch.ones(2))], "frozen": 1}], ["frozen = 1"]),
    ],
)
def test_errors_name_bad_parameters(params, words):
    with pytest.raises(sanc.SancError) as caught:
        sanc.SANC(params)
    for word in words:
        assert word in str(caught.value)


def test_errors_name_bad_closures_and_nothing_changes():
    model, x, y = make()
    good = loss_of(model, x, y)
    draws = iter(range(10**6))

    def called_backward():
        loss = good()
        loss.backward()
        return loss

    cases = [
        ({"closure": lambda: nn.functional.cross_entropy(model(x), y, reduction="none")}, ["shape (60,)", "mean"]),
        ({"closure": lambda: good().item()}, ["returned float", "tensor"]),
        ({"closure": lambda: None}, ["returned NoneType"]),
        ({"closure": good, "hessian": called_backward}, ["hessian called backward()", "in all"]),
        ({"closure": called_backward, "hessian": good}, ["hessian did not call backward()", "in all"]),
        ({"closure": lambda: good().detach()}, ["does not depend on the parameters"]),
        ({"closure": lambda: torch.tensor(1)}, ["int64", "floating-point"]),
        ({"closure": lambda: good() * (1 + next(draws))}, ["at the same parameters", "check=False"]),
        ({"closure": good, "hessian": lambda: good().item()}, ["hessian returned float"]),
        ({"closure": good, "objective": lambda: good().repeat(2)}, ["objective returned", "shape (2,)"]),
        ({"closure": None}, ["closure is missing", "SANC with these settings", "function"]),
        ({"closure": None, "hessian": good}, ["closure is missing", "hessian"]),
        ({"closure": good, "hessian": 3}, ["hessian = 3", "function"]),
    ]
    for given, words in cases:
        opt = sanc.SANC(model.parameters(), preset="paper", seed=0)
        before = snapshot(model, opt)
        with pytest.raises(sanc.SancError) as caught:
            opt.step(**given)
        for word in words:
            assert word in str(caught.value), given
        after = snapshot(model, opt)
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert all(p.grad is None for p in model.parameters())


def test_errors_name_options_that_exclude_each_other():
    model, x, y = make()
    good = loss_of(model, x, y)
    with pytest.raises(sanc.SancError, match=r"microbatch = 8 cannot cut: pass sanc\.Batch"):
        sanc.SANC(model.parameters(), microbatch=8).step(good)
    with pytest.raises(sanc.SancError, match="ARC uses one exact objective"):
        sanc.ARC(model.parameters()).step(good, hessian=good)
    for parameters, word in [((3, x), "cannot be called"), ((good,), "empty"), ((good, x, y[:3]), "as many rows")]:
        with pytest.raises(sanc.SancError, match=word):
            sanc.Batch(*parameters)


@pytest.mark.parametrize("name, value", [("lr", math.nan), ("lr", -1.0), ("weight_decay", "a"), ("frozen", "no")])
def test_values_that_a_scheduler_writes_into_a_group_are_checked(name, value):
    model, x, y = make()
    opt = sanc.SANC(model.parameters(), seed=0)
    opt.step(loss_of(model, x, y))
    before, state = flat(model), copy.deepcopy(opt.state_dict())
    opt.param_groups[0][name], kept = value, opt.param_groups[0][name]
    with pytest.raises(sanc.ArgumentError, match=name):
        opt.step(loss_of(model, x, y))
    opt.param_groups[0][name] = kept
    assert torch.equal(flat(model), before) and str(opt.state_dict()) == str(state)
    opt.step(loss_of(model, x, y))


def test_a_step_inside_its_own_closure_is_an_error():
    model, x, y = make()
    opt, good = sanc.SANC(model.parameters(), seed=0), loss_of(model, x, y)
    before = flat(model)
    with pytest.raises(sanc.ArgumentError, match=r"calls step\(\)"):
        opt.step(lambda: opt.step(good))
    assert torch.equal(flat(model), before)
    opt.step(good)


def test_errors_name_parameters_that_cannot_be_optimised():
    with pytest.raises(sanc.ArgumentError, match="nothing to optimise: all are frozen, empty"):
        sanc.SANC([nn.Parameter(torch.zeros(0))])
    with pytest.raises(sanc.ArgumentTypeError, match=r"params\[0\] has entries that share memory"):
        sanc.SANC([nn.Parameter(torch.zeros(1).expand(4))])


def test_small_rates_of_all_groups_are_warned_of():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"lr = 0.001 is a factor on the step size"):
        sanc.SANC([{"params": [w], "lr": 1e-3} for w in weights])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sanc.SANC([{"params": [weights[0]], "lr": 1e-3}, {"params": [weights[1]]}])
