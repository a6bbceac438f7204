"""What every piece needs, and how errors name pieces of the caller; the examples of docs/extending.md are short."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import torch

import sanc
from sanc.core import ratio
from sanc.core.method import _REQUIRED
from sanc.core.pieces import Model
from sanc.core.sigma import SigmaRule


def test_there_are_nine_examples_of_at_most_forty_lines(blocks):
    assert len(blocks) == 9
    for block in blocks:
        classes = block[: re.search(r"\n\n\n(?!class |@dataclass)(?=\w+[ ,]|print)", block).start()]
        code = [line for line in classes.splitlines() if line.strip() and not line.startswith(("import", "from"))]
        assert len(code) <= 40, block
        assert "sanc.core" not in block  # public names only


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model", {"build", "propose", "proposes", "needs_products", "max_resolves"}),
        ("escape", {"needs_products"}),
        ("sigma", {"rule"}),
    ],
)
def test_every_member_of_a_piece_is_required(name, expected):
    required, _ = _REQUIRED[name]
    assert set(required) - {"__call__"} == expected


@pytest.mark.parametrize("name", ["model", "acceptance", "escape", "sigma"])
def test_a_piece_without_one_of_its_members_is_rejected(name):
    required, _ = _REQUIRED[name]
    for lacking in required:
        given = {member: lambda *_: None for member in required if member != lacking}
        with pytest.raises(sanc.SancError, match=f"{name} = .* cannot be used, since it has no {lacking}: add that"):
            sanc.Method(**{name: type("Incomplete", (), given)()})
    with pytest.raises(sanc.SancError, match=f"{name} = None cannot be used, since it has no .*: pass"):
        sanc.Method(**{name: None})
    with pytest.raises(sanc.SancError, match=f"{name} = .* cannot be used, since it is a class: pass"):
        sanc.Method(**{name: type("Complete", (), dict.fromkeys(required, lambda *_: None))})


@dataclass(frozen=True)
class LikeMinibatch:
    """The members of `sanc.Minibatch` without its checks."""

    metric: object = "kronecker"
    step_size: object = None
    average: object = None
    curvature: bool = True
    noise: float = 1.0


class DerivedMinibatch(sanc.Minibatch):
    """Of the class whose checks are required."""


def test_settings_of_samples_are_rejected_wherever_they_are_passed():
    """They were accepted in a `Method`, and by `minimize` on samples, but not by optimisers."""
    match = "minibatch = .* cannot be used: pass a sanc.Minibatch, whose metric"
    for value in (LikeMinibatch(), sanc.Minibatch, "kronecker", sanc.StepSize()):
        for build in (sanc.Method, sanc.method_for, lambda **options: sanc.SANC([torch.ones(2)], **options)):
            with pytest.raises(sanc.ArgumentTypeError, match=match):
                build(minibatch=value)
    weights = torch.nn.Parameter(torch.ones(2))
    assert sanc.SANC([weights], preset=sanc.Method(minibatch=DerivedMinibatch(noise=2.0))).param_groups


@dataclass(frozen=True)
class Lenient:
    """A rule with a setting that σ has, too, and one that only it has."""

    gamma: float = 3.0
    window: int = 5

    def __call__(self, here, subspace, step, trial, trial_count):
        return sanc.Decision(here.sigma_rule.after_failure(step.sigma))


def test_an_option_that_two_pieces_have_is_rejected_if_one_is_of_the_caller():
    for options, match in (
        (
            {"gamma": 2.5},
            r"gamma = 2.5 is a setting of Lenient and SigmaUpdate: set it .* acceptance=Lenient\(gamma=2.5\)",
        ),
        ({"windw": 3}, r"option 'windw' .* did you mean 'window'"),
    ):
        with pytest.raises(sanc.ArgumentError, match=match):
            sanc.method_for(acceptance=Lenient(), **options)
    method = sanc.method_for(acceptance=Lenient(gamma=4.0), window=7)
    assert (method.acceptance.gamma, method.acceptance.window, method.sigma.gamma) == (4.0, 7, 2.0)


def test_a_class_in_place_of_a_piece_is_named_with_its_own_remedy():
    with pytest.raises(sanc.ArgumentTypeError, match=r"since it is a class: pass an object of it, such as Lenient\(\)"):
        sanc.method_for(acceptance=Lenient)


@pytest.mark.parametrize("name", ["step_size", "average"])
@pytest.mark.parametrize("value", [0.1, "big", None, sanc.StepSize, sanc.Momentum()], ids=repr)
def test_an_object_of_another_type_in_place_of_settings_is_rejected(name, value):
    remedy = {
        "step_size": r"pass sanc\.StepSize\(…\), whose settings are scale,",
        "average": r"pass sanc\.Average\(…\)",
    }[name]
    for build in (sanc.method_for, sanc.Minibatch, lambda **options: sanc.SANC([torch.ones(2)], **options)):
        with pytest.raises(sanc.ArgumentTypeError, match=f"{name} = .* cannot be used: {remedy}"):
            build(**{name: value})


class RuleWithoutNumbers(SigmaRule):
    def after_trial(self, outcome):
        return math.nan


class UpdateWithoutNumbers(sanc.SigmaUpdate):
    rule_class = RuleWithoutNumbers


def test_a_rule_for_sigma_that_returns_no_number_is_named_and_not_the_acceptance_rule():
    with pytest.raises(sanc.ArgumentError, match=r"sigma cannot be used: its rule RuleWithoutNumbers.* returned nan"):
        sanc.minimize(lambda x: (x**4).sum(), torch.ones(2, dtype=torch.float64), sigma=UpdateWithoutNumbers())


def test_the_names_for_extensions_are_those_of_the_core():
    assert (
        sanc.extend.Model is Model
        and sanc.extend.TrialOutcome is ratio.TrialOutcome
        and sanc.extend.SigmaRule is SigmaRule
    )
    assert all(getattr(sanc.extend, name).__doc__ for name in sanc.extend.__all__)
