"""Checks of what the pieces of a method return: subspaces, decisions, and vectors like x."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from sanc.core.pieces import Decision, Subspace, required_members
from sanc.core.point import Point
from sanc.core.record import Branch
from sanc.core.settings import is_user_defined
from sanc.errors import ArgumentError, ArgumentTypeError, shown

_SUBSPACES: WeakSet[type] = WeakSet()
"""Types of subspaces that have all members of the protocol."""


def checked_subspace(model: object, subspace: Subspace | None) -> Subspace | None:
    """Return what a model has built; raise an error if it is no subspace. Each type is checked once."""
    if subspace is None or type(subspace) in _SUBSPACES:
        return subspace
    members = dir(subspace)  # which evaluates no property
    missing = [name for name in required_members(Subspace) if name not in members and not hasattr(subspace, name)]
    if missing:
        raise ArgumentTypeError(
            f"model = {shown(model)} cannot be used, since build() returned {shown(subspace)}, which has no "
            f"{', '.join(missing)}: return an object with the members of sanc.extend.Subspace, or None."
        )
    _SUBSPACES.add(type(subspace))
    return subspace


def completed_decision(here: Point, name: str, rule: object, decision: object, branch: Branch) -> Decision:
    """Check the decision of an acceptance or escape rule, and return it with a branch and a step norm.

    They are added if the decision moves without them; `branch` is the one to add.
    """
    if not isinstance(decision, Decision):
        raise ArgumentTypeError(
            f"{name} = {shown(rule)} cannot be used, since it returned {shown(decision)}: return a sanc.Decision."
        )
    if not 0.0 <= decision.sigma < math.inf:
        if is_user_defined(here.sigma_rule) and not is_user_defined(rule):
            raise ArgumentError(
                f"sigma cannot be used: its rule {shown(here.sigma_rule)} returned {decision.sigma!r}. Return a finite "
                "number that is not negative."
            )
        raise ArgumentError(
            f"{name} = {shown(rule)} cannot be used, since it returned sigma = {decision.sigma!r}: return a finite "
            "number that is not negative, for example from here.sigma_rule."
        )
    if decision.point is None:
        return decision
    if not is_like_x(here, decision.point):
        raise ArgumentTypeError(
            f"{name} = {shown(rule)} cannot be used, since it returned point = {shown(decision.point)}: return "
            f"{description_of_x(here)}."
        )
    if not here.oracle.is_inside(decision.point):
        raise ArgumentError(
            f"{name} = {shown(rule)} cannot be used, since it returned a point outside the bounds: form it with "
            "here.oracle.move(x, d), which projects x + d."
        )
    if decision.branch is not Branch.STAYED and decision.step_norm > 0.0:
        return decision
    step_norm = decision.step_norm or here.space.norm(decision.point - here.x)
    if not math.isfinite(step_norm):
        raise ArgumentError(
            f"{name} = {shown(rule)} cannot be used, since it returned a point that is not finite: return "
            "Decision(None, sigma) to stay at x."
        )
    return replace(
        decision, branch=branch if decision.branch is Branch.STAYED else decision.branch, step_norm=step_norm
    )


def is_like_x(here: Point, entry: Any) -> bool:
    """Return whether an object is a vector of the type and shape of x."""
    x: Any = here.x
    return isinstance(entry, type(x)) and entry.shape == x.shape


def description_of_x(here: Point) -> str:
    """Return what a vector like x is, for a message."""
    shape = tuple(here.space.tensor(here.x).shape)
    return f"a vector like x, which is {type(here.x).__name__} of shape {shape}"
