"""What a closure is tried for before the first step, since it would only show later, or not at all."""

from __future__ import annotations

import inspect
import math

import torch
from torch import Tensor, nn

from sanc.autograd.batches import Batch
from sanc.autograd.leaves import Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.randomness import derive
from sanc.errors import ArgumentError, ArgumentTypeError

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_TOLERANCE = 1e-3
"""Relative difference of two losses that should be the same; rounding makes less."""


def check_callable(name: str, closure: object) -> None:
    """Reject what cannot be called without arguments."""
    if not callable(closure):
        raise ArgumentTypeError(
            f"{name} = {closure!r:.60} cannot be called: pass a function of no arguments that returns the mean loss."
        )
    try:
        signature = inspect.signature(closure.forward if isinstance(closure, nn.Module) else closure)
    except ValueError:  # some functions of C have none
        return
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in _OPTIONAL]
    if needed:
        raise ArgumentTypeError(
            f"{name} = {closure!r:.60} needs arguments ({', '.join(needed)}): pass a function of none, such as "
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
            _check_slope(oracle, x)


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
    """Complain of micro-batches where the loss of one is not the mean of those of its halves.

    Where the loss draws random numbers, or modules train buffers on each batch, the halves differ anyway.
    """
    sample = oracle.samples[0]
    part = sample.parts[0][1]
    if len(sample.parts) == 1 or not isinstance(part, Batch) or len(part) < 2 or oracle.trains_buffers:
        return
    halves = part.parts((len(part) + 1) // 2)
    ways = ([(1.0, part)], sample.seed), ([(1.0, part)], derive(0)), (halves, sample.seed)
    whole, again, cut = (oracle.evaluate_here(x, Sample("closure", parts, 1, seed)) for parts, seed in ways)
    if whole == again and _differ(whole, cut):
        raise ArgumentError(
            f"the loss of a micro-batch of {len(part)} rows is {whole!r} and the mean of its halves {cut!r}: cut like "
            "this, microbatch would change the loss. Return the mean over rows; where the mean is over something else "
            "(tokens that are not ignored), pass weight= to sanc.Batch; where rows depend on each other, leave "
            "microbatch out. check=False turns this test off."
        )


def _check_slope(oracle: AutogradOracle, x: Tensor) -> None:
    """Complain of a closure that calls backward() on another loss than it returns, such as a scaled one."""
    if oracle.by_backward and not oracle.slope_is_right(x):
        raise ArgumentError(
            "closure leaves gradients that are far too long for the loss that it returns: call backward() on that "
            "loss, once. With a GradScaler step without a closure (scaler.step(opt)), or use bfloat16 instead; "
            "check=False turns this test off."
        )
