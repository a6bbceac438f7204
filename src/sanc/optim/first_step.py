"""What a closure is tried for before the first step, since it would only show later, or not at all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Grads, Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.randomness import InEvaluation, derive
from sanc.errors import ArgumentError, ArgumentTypeError, shown

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TOLERANCE = 1e-3
"""Relative difference of two losses that should be the same; rounding makes less."""
_SIMILAR = 0.02
"""The same for losses that may have been added up in low precision."""


def check_callable(name: str, closure: object) -> None:
    """Reject what cannot be called without arguments."""
    if not callable(closure):
        raise ArgumentTypeError(
            f"{name} = {shown(closure)} cannot be called: pass a function of no arguments that returns the mean loss."
        )
    try:
        signature = inspect.signature(closure.forward if isinstance(closure, nn.Module) else closure)
    except ValueError:  # some functions of C have none
        return
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in _OPTIONAL]
    if needed:
        raise ArgumentTypeError(
            f"{name} = {shown(closure)} needs arguments ({', '.join(needed)}): pass a function of none, such as "
            "lambda: loss(model(x), y)."
        )


def check_closure(oracle: AutogradOracle, x: Tensor, *, first: bool) -> None:
    """Evaluate the loss and, before the first step, try whether it is one that can be optimised.

    The evaluation runs as the loss is written, not as it may be compiled, so that modules are seen which compiled code
    hides; a new oracle needs that also where a run is resumed.
    """
    with torch.compiler.set_stance("force_eager"):
        value = oracle.evaluate(x, oracle.samples[0], graph=True)
        oracle.usual_calls = oracle.calls
        if first:
            _check_repeats(oracle, x, value)
            oracle.check(lambda: _check_parts(oracle, x))
            if oracle.style == "backward":
                oracle.check(lambda: _check_roots(oracle, x))


def _differ(a: float, b: float) -> bool:
    return not abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) + 1e-6


def _check_repeats(oracle: AutogradOracle, x: Tensor, value: float) -> None:
    """Complain of a closure that changes between two calls, such as one that draws a new batch each time."""
    again = oracle.evaluate(x, oracle.samples[0])
    if math.isfinite(value) and _differ(value, again):
        raise ArgumentError(
            f"closure returned {value!r} and then {again!r} at the same parameters: fix the batch before the step and "
            "return the loss on it, so that values can be compared; check=False turns this test off."
        )


def _check_parts(oracle: AutogradOracle, x: Tensor) -> None:
    """Complain of micro-batches where the loss of two halves together is not the mean of their losses.

    All neighbours are compared, so that every row is seen to weigh as much as its micro-batch says. Where the loss
    draws random numbers, or modules train buffers on each batch, the modules are in evaluation mode meanwhile.
    """
    sample = oracle.samples[0]
    parts = [part for _, part in sample.parts if isinstance(part, Batch)]
    if len(parts) < 2:
        return

    def value(weighted: Sequence[tuple[float, Batch]], seed: int | None = sample.seed) -> float:
        return oracle.evaluate_here(x, Sample("closure", weighted, 1, seed))

    def is_random() -> bool:
        return value([(1.0, parts[0])]) != value([(1.0, parts[0])], derive(0))

    with InEvaluation() if oracle.trains_buffers or is_random() else nullcontext():
        try:
            unclear = is_random()
        except Exception:  # there are models that return something else in evaluation mode
            unclear = True
        if unclear:
            if parts[0].weight is None:
                raise ArgumentError(
                    "the loss draws random numbers also while modules are in evaluation mode, or does not work then: "
                    "it cannot be seen whether microbatch would change it. Pass weight= to sanc.Batch, such as "
                    "weight=lambda *tensors: len(tensors[0]) where the loss is the mean over rows."
                )
            return
        halves = [half for part in parts for _, half in part.parts((len(part) + 1) // 2)]
        for one, other in pairwise(halves):
            both = one.joined(other)
            whole, cut = value([(1.0, both)]), value(both.parts(len(one)))
            if _differ(whole, cut):
                raise ArgumentError(
                    f"the loss of {len(both)} rows is {whole!r} and the mean of its halves {cut!r}: cut like this, "
                    "microbatch would change the loss. Return the mean over rows; where the mean is over something "
                    "else (tokens that are not ignored), pass weight= to sanc.Batch; where rows depend on each other, "
                    "leave microbatch out. check=False turns this test off."
                )


class _Roots(TorchFunctionMode):
    """Adds up what ``backward()`` is called on, and follows the length of the gradient after the last call."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__()
        self.leaves = leaves
        self.values: list[float] = []
        self.lengths: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.values and func.__name__ not in ("__get__", "__set__"):
            self.look([leaf.grad for leaf in self.leaves.tensors])
        result = func(*args, **kwargs)
        if func is Tensor.backward:
            root, weight = args[0].detach(), kwargs.get("gradient")
            self.values.append(float(root if weight is None else (root * weight).sum()))
            self.lengths.clear()
            self.look([leaf.grad for leaf in self.leaves.tensors])
        return result

    def look(self, grads: Grads) -> None:
        """Note how long the gradient is."""
        self.lengths.append(float(torch.linalg.vector_norm(self.leaves.flatten(grads), dtype=torch.float64)))


def _check_roots(oracle: AutogradOracle, x: Tensor) -> None:
    """Complain of a closure that calls backward() on another loss than it returns, such as a scaled one.

    One that divides the gradients again is right, whatever it does with them then: at some moment they have the length
    of those of the loss. A scale that it lowers, because gradients overflow, is left to find its place before the first
    step.
    """
    part = replace(oracle.samples[0], parts=oracle.samples[0].parts[:1])
    for _ in range(oracle.tries):
        oracle.load(x)
        with oracle.still(), torch.enable_grad(), _Roots(oracle.leaves) as roots:
            _, loss, grads = next(iter(oracle.passes(part)))
        found, value = sum(roots.values), float(loss.detach())
        if not (roots.values and math.isfinite(value)):
            return
        if math.isfinite(found) and abs(found - value) <= _SIMILAR * max(abs(found), abs(value)):
            return
        roots.look(grads)
        scaled, *others = roots.lengths
        if math.isfinite(others[-1]):
            break
    wanted = scaled * abs(value / found) if found else math.inf
    if math.isfinite(others[-1]) and not any(abs(length - wanted) <= _SIMILAR * wanted for length in others):
        raise ArgumentError(
            f"closure called backward() on {found!r} and returned {value!r}: call it on the loss that is returned. "
            "With a GradScaler call scaler.unscale_(opt) and scaler.update() after it, inside the closure, or step "
            "without a closure (scaler.step(opt)), or use bfloat16 instead; check=False turns this test off."
        )
