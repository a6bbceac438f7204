"""A saved state with one wrong entry is rejected by name, and the optimiser goes on as if nothing had been loaded."""

from __future__ import annotations

import copy
import math
import re

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_der
from torch import nn

import sanc
from preset_options import composed
from tensors import flat
from training_styles import drive

WRONG = [math.nan, -1, "three", None, [], {}, torch.zeros(7), True, -math.inf, 1.5]
FREE = {
    "first_value",
    "reference_loss",
    "first_loss",
    "last_decrease",
    "last_loss",
    "loss_mean",
    "lowest_loss_mean",
    "checksum",
    "tested_loss_mean",
}  # numbers that may be unknown
OURS = ("settings", "hvp", "sizes")  # which may differ, with a warning or an error of its own


def optimiser(kind, preset, style="loss", steps=6, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    opt = kind(model.parameters(), seed=3, **composed(kind, preset), **options)
    data = [(torch.randn(8, 3).double(), torch.randn(8, 1).double()) for _ in range(12)]
    drive(style, model, opt, data[:steps])
    return model, opt, data[steps:]


def leaves(content, path=()):
    """Every entry of nested mappings and lists, with the way to it."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key), value
        yield from leaves(value, (*path, key))


def changed(content, path, value):
    """Return a copy with one entry changed, or left out for KeyError."""
    key, *rest = path
    content = copy.copy(content)
    if rest:
        content[key] = changed(content[key], rest, value)
    elif value is KeyError:
        del content[key]
    else:
        content[key] = value
    return content


def same(new, old):
    """Whether a change is none."""
    return type(new) is type(old) and not isinstance(new, torch.Tensor | np.ndarray) and new == old


def harmless(path, old, new):
    """Whether a change is a number of the same kind, which cannot be distinguished from the right one."""
    if path[-1] in FREE:
        return isinstance(new, float | int) and not isinstance(new, bool)
    if path[-1] in ("distance_numerator", "best_grad_norm") or isinstance(old, float):
        return same(new, 1.5) or (path[-1] == "distance_numerator" and same(new, -1))
    return isinstance(old, bool) and isinstance(new, bool)


def message_of(call):
    """Return the words of our error, or none where there was no error."""
    try:
        call()
    except sanc.SancError as error:
        return str(error)
    return ""


CASES = [
    (sanc.SANC, "robust", "loss", {}),
    (sanc.SANC, "robust", "backward", {"noise": 0.0}),
    (sanc.SANC, "robust", "gradients", {}),
    (sanc.SCR, "robust", "loss", {"curvature": False}),
    (sanc.SANC, "paper", "loss", {}),
    (sanc.SANC, "authors", "loss", {}),
    (sanc.ARC, "robust", "loss", {}),
    (sanc.CR, "paper", "loss", {}),
    (sanc.CRM, "paper", "loss", {}),
    (sanc.NCD, "paper", "loss", {}),
]
SIMILAR = [CASES[k] for k in (1, 2, 3, 7, 9)]  # most entries are those of another case


@pytest.mark.filterwarnings("ignore:the state was saved with")
@pytest.mark.parametrize(("kind", "preset", "style", "options"), CASES)
def test_every_wrong_entry_is_rejected_and_changes_nothing(kind, preset, style, options):
    is_similar = (kind, preset, style, options) in SIMILAR
    wrong_ones = [math.nan, "three", KeyError] if is_similar else [*WRONG, KeyError]
    model, opt, rest = optimiser(kind, preset, style, **options)
    state = opt.state_dict()
    del state["param_groups"][0]["run_state"]  # it is there twice
    twin, other, _ = optimiser(kind, preset, style, **options)
    rejected = 0
    for path, old in leaves(state):
        if path[:1] == ("run_state",) and len(path) > 1 and path[1] in OURS:
            continue
        if path[0] == "param_groups" and "params" in path:
            continue
        for wrong in wrong_ones:
            if wrong is KeyError and path[0] == "param_groups" and path[-1] in ("lr", "weight_decay", "frozen"):
                continue
            if same(wrong, old) or (old == {} and wrong is KeyError):  # no factors, of a parameter that needs none
                continue
            if harmless(path, old, wrong):
                continue
            said = message_of(lambda path=path, wrong=wrong: opt.load_state_dict(changed(state, path, wrong)))
            names = [str(key) for key in path if isinstance(key, str)]
            assert any(name in said for name in names), (path, wrong, said)
            assert re.search(r"pass |construct |load |choose |mean ", said, re.IGNORECASE), (path, wrong, said)
            rejected += 1
    assert rejected > 10 * len(wrong_ones)
    drive(style, model, opt, rest)
    drive(style, twin, other, rest)
    assert (
        torch.equal(flat(model), flat(twin))
        and opt.state_dict()["run_state"]["meter"] == other.state_dict()["run_state"]["meter"]
    )


@pytest.mark.parametrize("path", [("numbers",), ("numbers", "second_order"), ("meter",)])
def test_an_entry_of_another_version_is_rejected_and_changes_nothing(path):
    model, opt, rest = optimiser(sanc.SANC, "robust")
    twin, other, _ = optimiser(sanc.SANC, "robust")
    state = opt.state_dict()
    del state["param_groups"][0]["run_state"]  # it is there twice
    said = message_of(lambda: opt.load_state_dict(changed(state, ("run_state", *path, "formerly"), 1.0)))
    assert "formerly" in said and path[-1] in said
    drive("loss", model, opt, rest)
    drive("loss", twin, other, rest)
    assert torch.equal(flat(model), flat(twin))


def test_vectors_of_another_model_are_rejected():
    _, opt, _ = optimiser(sanc.SANC, "robust", "gradients")
    other = sanc.SANC(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double().parameters())
    with pytest.raises(sanc.ArgumentError, match=r"parameter 0 has the shape \(4, 3\) instead of \(3, 4\).*Construct"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(sanc.ArgumentError, match=r"have \[4\] parameters and those of this optimiser \[1\]"):
        sanc.SANC([torch.zeros(3, requires_grad=True)]).load_state_dict(opt.state_dict())
    with pytest.raises(sanc.ArgumentError, match="state_dict = None"):
        other.load_state_dict(None)


def logistic():
    rng = np.random.default_rng(0)
    return sanc.problems.Logistic(rng.standard_normal((60, 4)), rng.integers(0, 2, 60), strength=0.1)


RUNS = {
    "robust on samples": (logistic(), {"batch_size": 10}),
    "paper on samples": (logistic(), {"batch_size": 10, "preset": "paper"}),
    "a sum": (logistic(), {}),
    "a torch function": (lambda x: (x**4).sum() - (x**2).sum(), {}),
    "callables": (rosen, {"jac": rosen_der}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_resumes_from_what_it_saved_alone(run):
    problem, given = RUNS[run]
    states = []
    given = given | {"max_iter": 8, "certify": False, "tol": 1e-14}
    keep = lambda intermediate_result: states.append(copy.deepcopy(intermediate_result.state))
    start = np.full(4, 0.9)
    whole = sanc.minimize(problem, start, callback=keep, **given)
    state = states[3]
    assert np.array_equal(sanc.minimize(problem, start, resume=state, **given).x, whole.x)
    for name in ("numbers", "vectors", "meter", "oracle"):
        surplus = changed(state, (name, "formerly"), 1.5)
        assert "resume" in message_of(lambda surplus=surplus: sanc.minimize(problem, start, resume=surplus, **given)), (
            name
        )
    for path, old in leaves(state):
        for wrong in [*WRONG, KeyError, np.zeros(3), np.full(4, np.nan), np.zeros(4, np.float32)]:
            if same(wrong, old):
                continue
            if (path[-1] == "reference" and same(wrong, 1.5)) or harmless(path, old, wrong):
                continue  # which a state may have
            if path[-1] in ("offset", "first_point", "safe_point") and wrong is KeyError:
                continue  # which a state may lack
            broken = changed(state, path, wrong)
            said = message_of(lambda broken=broken: sanc.minimize(problem, start, resume=broken, **given))
            assert "resume" in said, (path, wrong, said)
