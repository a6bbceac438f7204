"""Checks of a closure before the first step, for mistakes that later steps would report late or not at all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from sanc.autograd.batches import Batch
from sanc.autograd.buffers import EvaluationMode
from sanc.autograd.closures import LOSS_TOLERANCE
from sanc.autograd.generators import derive_seed
from sanc.autograd.guards import uncompiled
from sanc.autograd.internals import nodes
from sanc.autograd.leaves import Grads, Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.errors import ArgumentError, ArgumentTypeError, shown

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""Kinds of parameters that need no argument."""
_ABSOLUTE_LOSS_TOLERANCE = 1e-6
"""The same as an absolute difference, for losses near zero: about ten times the precision of float32 at 1."""
_LOW_PRECISION_TOLERANCE = 0.02
"""Relative difference for losses and gradients in bfloat16: five times its rounding error, 2⁻⁸ = 0.004."""


_NOT_RECOMPUTED_MESSAGE = (
    "closure uses a loss that was computed before the step, or part of it was: it does not change with the parameters. "
    "Compute the output of the model and the loss inside the closure, as in opt.step(lambda: loss(model(x), y))."
)


def check_callable(name: str, closure: object) -> None:
    """Raise an error if `closure` cannot be called without arguments."""
    if not callable(closure):
        raise ArgumentTypeError(
            f"{name} = {shown(closure)} cannot be called: pass a function of no arguments that returns the mean loss."
        )
    try:
        signature = inspect.signature(closure.forward if isinstance(closure, nn.Module) else closure)
    except ValueError:  # some functions written in C have no signature
        return
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in _OPTIONAL]
    if required:
        raise ArgumentTypeError(
            f"{name} = {shown(closure)} needs arguments ({', '.join(required)}): pass a function of none, such as "
            "lambda: loss(model(x), y)."
        )


def check_closure(oracle: AutogradOracle, x: Tensor, *, first: bool) -> None:
    """Evaluate the loss and, before the first step, check that it can be optimised.

    The evaluation runs without compilation, because compiled code hides its modules from the oracle. A new oracle
    needs this evaluation also after a run was resumed.
    """
    with uncompiled():
        returned = _ReturnedLosses()
        sample = returned.recorded(oracle.samples[0])
        value = oracle.evaluate(x, sample, graph=True)
        oracle.usual_module_calls = oracle.module_calls
        if first:
            inputs = returned.graph_inputs(oracle.leaves)
            try:
                second_value = oracle.evaluate(x, sample, graph=bool(inputs))
            except RuntimeError as error:
                if "backward through the graph a second time" not in str(error):
                    raise
                raise ArgumentError(_NOT_RECOMPUTED_MESSAGE) from error
            _check_repeatable(value, second_value)
            if inputs & returned.graph_nodes():
                raise ArgumentError(_NOT_RECOMPUTED_MESSAGE)
            if math.isfinite(value):
                oracle.check(lambda: _check_parts(oracle, x))
            if oracle.style == "backward":
                oracle.check(lambda: _check_backward_value(oracle, x))


def _differ(a: float, b: float) -> bool:
    """Return whether two losses differ by more than rounding; NaN differs from everything."""
    return not abs(a - b) <= LOSS_TOLERANCE * max(abs(a), abs(b)) + _ABSOLUTE_LOSS_TOLERANCE


class _ReturnedLosses:
    """The loss that the last call of the closures of a sample returned, with its graph."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def recorded(self, sample: Sample) -> Sample:
        """Return the sample with closures whose losses are kept; a `Batch` computes its loss in the call."""
        if any(isinstance(closure, Batch) for _, closure in sample.microbatches):
            return sample
        return replace(
            sample, microbatches=[(weight, self._recording(closure)) for weight, closure in sample.microbatches]
        )

    def _recording(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the closure, which also stores its loss."""

        def call() -> Tensor:
            loss = closure()
            self._losses = [loss] if isinstance(loss, Tensor) else []
            return loss

        return call

    def graph_nodes(self) -> set[Any]:
        """Return all nodes of the graph."""
        return {node for loss in self._losses for node in nodes(loss.grad_fn)}

    def graph_inputs(self, leaves: Leaves) -> set[Any]:
        """Return the nodes that have only leaves as inputs, and release the rest of the graph.

        A call that computes the loss anew has other nodes. Those kept here have no activations behind them.
        """
        graph, input_nodes = self.graph_nodes(), set()
        of_leaves = {get_gradient_edge(leaf).node for leaf in leaves.tensors} if graph else set()
        for node in graph - of_leaves:
            parents = {parent for parent, _ in node.next_functions if parent is not None}
            if parents and parents <= of_leaves:
                input_nodes.add(node)
        self._losses = []
        return input_nodes


def _check_repeatable(value: float, second_value: float) -> None:
    """Raise an error if two calls of the closure differ, for example because each call draws a new batch."""
    if math.isfinite(value) and _differ(value, second_value):
        raise ArgumentError(
            f"closure returned {value!r} and then {second_value!r} at the same parameters: fix the batch before the "
            "step and return the loss on it, so that values can be compared. If another thread draws random numbers "
            "beside a closure that draws from the same generator, give the thread its own; check=False turns this test "
            "off."
        )


def _check_parts(oracle: AutogradOracle, x: Tensor) -> None:
    """Raise an error if the loss of two halves of a micro-batch together is not the weighted mean of their losses.

    All neighbours are compared, so that the weight of every row is checked. If the loss draws random numbers, or
    modules train buffers on each batch, the modules are in evaluation mode during the check.
    """
    sample = oracle.samples[0]
    parts = [part for _, part in sample.microbatches if isinstance(part, Batch)]
    if len(parts) < 2:
        return

    def value(weighted: Sequence[tuple[float, Batch]], seed: int | None = sample.seed) -> float:
        return oracle.evaluate_locally(x, Sample("closure", weighted, 1, seed))

    def is_random() -> bool:
        return value([(1.0, parts[0])]) != value([(1.0, parts[0])], derive_seed(0))

    with EvaluationMode() if oracle.trains_buffers or is_random() else nullcontext():
        try:
            undecided = is_random()
        except Exception:  # some models return something else in evaluation mode
            undecided = True
        if undecided:
            if parts[0].weight is None:
                raise ArgumentError(
                    "the loss draws random numbers even if modules are in evaluation mode, or fails in that mode: it "
                    "cannot be checked whether microbatch would change it. Pass weight= to sanc.Batch, such as "
                    "weight=lambda *tensors: len(tensors[0]) if the loss is the mean over rows."
                )
            return
        halves = [half for part in parts for _, half in part.parts((len(part) + 1) // 2)]
        for one, other in pairwise(halves):
            both = one.joined(other)
            joint_loss, mean_of_halves = value([(1.0, both)]), value(both.parts(len(one)))
            if _differ(joint_loss, mean_of_halves):
                raise ArgumentError(
                    f"the loss of {len(both)} rows is {joint_loss!r} and the mean of its halves {mean_of_halves!r}, so "
                    "microbatch would change the loss. Return the mean over rows; if the mean is over something else "
                    "(tokens that are not ignored), pass weight= to sanc.Batch; if rows depend on each other, leave "
                    "microbatch out. check=False turns this test off."
                )


class _BackwardCalls(TorchFunctionMode):
    """Records the values that ``backward()`` is called on, and the norms of the gradient since the last call."""

    def __init__(self, leaves: Leaves) -> None:
        super().__init__()
        self.leaves = leaves
        self.values: list[float] = []
        self.norms: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.values and func.__name__ not in ("__get__", "__set__"):
            self.record([leaf.grad for leaf in self.leaves.tensors])
        result = func(*args, **kwargs)
        if func is Tensor.backward:
            output, weight = args[0].detach(), kwargs.get("gradient")
            self.values.append(float(output if weight is None else (output * weight).sum()))
            self.norms.clear()
            self.record([leaf.grad for leaf in self.leaves.tensors])
        return result

    def record(self, grads: Grads) -> None:
        """Append the norm of the gradient."""
        self.norms.append(float(torch.linalg.vector_norm(self.leaves.flatten(grads), dtype=torch.float64)))


def _check_backward_value(oracle: AutogradOracle, x: Tensor) -> None:
    """Raise an error if the closure calls backward() on another loss than it returns, such as a scaled one.

    A closure may divide the gradients by the scale again, and clip them afterwards. It is accepted if the gradients had
    the norm of the gradient of the returned loss at any moment. If gradients overflow, the closure is called again, so
    that a GradScaler can lower its scale before the first step.
    """
    part = replace(oracle.samples[0], microbatches=oracle.samples[0].microbatches[:1])
    for _ in range(oracle.max_overflow_calls):
        oracle.load(x)
        with oracle.restored_buffers(), torch.enable_grad(), _BackwardCalls(oracle.leaves) as calls:
            _, loss, grads = next(iter(oracle.passes(part, once=True)))
        backward_value, value = sum(calls.values), float(loss.detach())
        if not (calls.values and math.isfinite(value)):
            return
        allowed = _LOW_PRECISION_TOLERANCE * max(abs(backward_value), abs(value))
        if math.isfinite(backward_value) and abs(backward_value - value) <= allowed:
            return
        calls.record(grads)
        first_norm, *later_norms = calls.norms
        if math.isfinite(later_norms[-1]):
            break
    expected_norm = first_norm * abs(value / backward_value) if backward_value else math.inf
    allowed = _LOW_PRECISION_TOLERANCE * expected_norm
    if math.isfinite(later_norms[-1]) and not any(abs(norm - expected_norm) <= allowed for norm in later_norms):
        raise ArgumentError(
            f"closure called backward() on {backward_value!r} and returned {value!r}: call it on the loss that is "
            "returned. With a GradScaler call scaler.unscale_(opt) and scaler.update() after it, inside the closure, "
            "or step without a closure (scaler.step(opt)), or use bfloat16 instead; check=False turns this test off."
        )
