"""Hessian products of a torch loss in several modes, and the errors for losses without second derivatives."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sanc.autograd.buffers import RestoredBuffers
from sanc.autograd.leaves import Grads, Leaves, Sample
from sanc.core.meter import Meter
from sanc.core.oracle import Operator
from sanc.core.space import Space, difference_step
from sanc.errors import SecondDerivativeError

HvpMode = Literal["auto", "double-backward", "forward-over-reverse", "finite-difference"]
HVP_MODES: tuple[HvpMode, ...] = get_args(HvpMode)
OptimizerHvpMode = Literal["auto", "double-backward", "forward-over-reverse", "finite-difference", "gauss-newton"]
OPTIMIZER_HVP_MODES: tuple[OptimizerHvpMode, ...] = get_args(OptimizerHvpMode)
"""Modes of the optimisers, whose batches may have outputs."""


COMPILED = "torch.compile"
"""How the operator of an error begins if it is compiled code."""


@dataclass(frozen=True, slots=True)
class OutputGraph:
    """The graphs of a generalised Gauss–Newton product.

    Attributes
    ----------
    output : Tensor
        z, the output of the network, as a function of the leaves.
    held : Tensor
        The same numbers as a leaf, on which the loss is computed.
    output_gradient : Tensor
        ∇_z of the loss, as a function of `held`.
    cotangent : Tensor
        u, a leaf like z.
    pullback : sequence of Tensor or None
        Jᵀu for each leaf, a linear function of u.
    """

    output: Tensor
    held: Tensor
    output_gradient: Tensor
    cotangent: Tensor
    pullback: Grads


class GradientOracle(Protocol):
    """The part of `AutogradOracle` that Hessian products use."""

    leaves: Leaves
    space: Space
    meter: Meter
    box: Any

    def load(self, x: Any) -> None: ...
    def restored_buffers(self) -> RestoredBuffers: ...
    def passes(self, sample: Sample, *, create_graph: bool = False) -> Iterator[tuple[float, Tensor, Grads]]: ...
    def pop_graph(self, x: Any, sample: Sample) -> Grads | None: ...
    def sample_gradient(self, x: Any, sample: Sample) -> Tensor: ...
    def output_graphs(self, sample: Sample) -> Iterator[tuple[float, OutputGraph]]: ...
    def fall_back(self, error: SecondDerivativeError) -> None: ...
    def avoid_compiled(self, error: SecondDerivativeError) -> bool: ...


class Hessian(Operator):
    """The Hessian of a sample's loss at a point; subclasses compute the product.

    Attributes
    ----------
    oracle : GradientOracle
        Evaluates the gradients and graphs of closures.
    x : vector
        The point.
    sample : Sample
        The sample.
    """

    def __init__(self, oracle: GradientOracle, x: Any, sample: Sample) -> None:
        self.oracle, self.x, self.sample = oracle, x, sample

    def __call__(self, v: Any) -> Any:
        oracle = self.oracle
        with torch.enable_grad():
            oracle.load(self.x)
            try:
                result = self._explained_product(v)
            except SecondDerivativeError as error:
                if not oracle.avoid_compiled(error):
                    raise
                self.release()
                result = self._explained_product(v)
        oracle.meter.count_product(self.sample.size)
        return oracle.leaves.add_decay(result, v)

    def _explained_product(self, v: Tensor) -> Tensor:
        """Return `product`; errors of torch about a missing derivative have the operator and a remedy."""
        try:
            return self.product(v)
        except RuntimeError as error:
            _raise_explained(error)

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """Return the Hessian of the loss, without weight decay, times `v`."""

    def gradient(self) -> Any:
        return self.oracle.sample_gradient(self.x, self.sample)


class DoubleBackward(Hessian):
    """Differentiates gᵀv. One graph of the gradient serves all products; each micro-batch builds a new one."""

    _graph: Grads | None = None

    def product(self, v: Tensor) -> Tensor:
        oracle = self.oracle
        with oracle.restored_buffers():
            if len(self.sample.microbatches) == 1:
                if self._graph is None:
                    self._graph = oracle.pop_graph(self.x, self.sample)
                if self._graph is None:
                    (self._graph,) = (grads for _, _, grads in oracle.passes(self.sample, create_graph=True))
                return self._differentiate(self._graph, v, retain=True)
            total = torch.zeros_like(v)
            for weight, _, grads in oracle.passes(self.sample, create_graph=True):  # one graph at a time
                total.add_(self._differentiate(grads, v, retain=False), alpha=weight)
        return total

    def _differentiate(self, grads: Grads, v: Tensor, *, retain: bool) -> Tensor:
        """Return the gradient of Σ gᵢᵀvᵢ. A gᵢ without a graph is constant and contributes zero."""
        leaves = self.oracle.leaves
        pairs = zip(grads, leaves.split(v), strict=True)
        terms = [(g, part.to(g.dtype)) for g, part in pairs if g is not None and g.requires_grad]
        if not terms:
            return torch.zeros_like(v)
        outputs, weights = zip(*terms, strict=True)
        products = torch.autograd.grad(outputs, leaves.tensors, weights, retain_graph=retain, allow_unused=True)
        return leaves.flatten(products)

    def release(self) -> None:
        self._graph = None


class ForwardOverReverse(Hessian):
    """Computes the gradient with dual numbers: the leaves have the tangent v, and Hv is the gradient's tangent."""

    def product(self, v: Tensor) -> Tensor:
        leaves = self.oracle.leaves
        total: Tensor | None = None  # allocated after the first pass, which needs the memory
        with self.oracle.restored_buffers(), self._dual_leaves(v):
            for weight, _, grads in self.oracle.passes(self.sample):
                tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]  # type: ignore[no-untyped-call]
                part = leaves.flatten(tangents)
                total = part.mul_(weight) if total is None else total.add_(part, alpha=weight)
        assert total is not None
        return total

    @contextmanager
    def _dual_leaves(self, v: Tensor) -> Iterator[None]:
        """Attach the tangent `v` to the leaves inside the block."""
        leaves = self.oracle.leaves
        pieces = zip(leaves.tensors, leaves.split(self.x), leaves.split(v.contiguous()), strict=True)
        with forward_ad.dual_level():
            with torch.no_grad():
                for leaf, primal, tangent in pieces:
                    # .data, because torch gives a view a tangent of the size of its base, which is all of x.
                    leaf.copy_(forward_ad.make_dual(primal.data, tangent))  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # it may hold casts without the tangent
            yield
        torch.clear_autocast_cache()


class GaussNewton(Hessian):
    """Computes JᵀHJv, with the Jacobian J of the network's output z and the Hessian H of the loss as a function of z.

    H is positive semidefinite if the loss is convex in z. One graph serves all products; each micro-batch builds a new
    one. Jv is the derivative of Jᵀu, which is linear in u, by u.
    """

    _graph: OutputGraph | None = None

    def product(self, v: Tensor) -> Tensor:
        oracle = self.oracle
        with oracle.restored_buffers():
            if len(self.sample.microbatches) == 1:
                if self._graph is None:
                    ((_, self._graph),) = oracle.output_graphs(self.sample)
                return self._multiply(self._graph, v)
            total = torch.zeros_like(v)
            for weight, graph in oracle.output_graphs(self.sample):  # one graph at a time
                total.add_(self._multiply(graph, v), alpha=weight)
        return total

    def _multiply(self, graph: OutputGraph, v: Tensor) -> Tensor:
        """Return JᵀHJv of one part of the sample."""
        leaves = self.oracle.leaves
        pairs = zip(graph.pullback, leaves.split(v), strict=True)
        terms = [(g, part.to(g.dtype)) for g, part in pairs if g is not None and g.requires_grad]
        if not terms or not graph.output_gradient.requires_grad:  # the loss is linear in the output
            return torch.zeros_like(v)
        outputs, weights = zip(*terms, strict=True)
        (pushed,) = torch.autograd.grad(outputs, graph.cotangent, weights, retain_graph=True, materialize_grads=True)
        (curved,) = torch.autograd.grad(
            graph.output_gradient, graph.held, pushed, retain_graph=True, materialize_grads=True
        )
        pulled = torch.autograd.grad(graph.output, leaves.tensors, curved, retain_graph=True, allow_unused=True)
        return leaves.flatten(pulled)

    def release(self) -> None:
        self._graph = None


class FiniteDifference(Hessian):
    """Central difference of gradients, for operators without a second derivative."""

    def product(self, v: Tensor) -> Tensor:
        return self._difference(v, 1.0)

    def error(self, v: Any, product: Any) -> float:
        # The truncation error is O(h²), so the differences of h and 2h differ by three times the error of h.
        with torch.enable_grad():
            coarse = self.oracle.leaves.add_decay(self._difference(v, 2.0), v)
        return self.oracle.space.norm(coarse - product)

    def _difference(self, v: Tensor, factor: float) -> Tensor:
        """Return the central difference of gradients along `v`, with `factor` times the usual step."""
        oracle = self.oracle
        norm = oracle.space.norm(v)
        if norm == 0.0:
            return torch.zeros_like(v)
        # h is a power of two: scaling by 1/h is exact, so equal gradients on both sides cancel exactly.
        h = 2.0 ** round(math.log2(factor * difference_step(oracle.space, self.x) / norm))
        total: Tensor | None = None  # allocated after the first pass, which needs the memory
        for coefficient, point in self._points(v, h):
            oracle.load(point)
            with oracle.restored_buffers():
                for weight, _, grads in oracle.passes(self.sample):
                    part, multiple = oracle.leaves.flatten(grads), coefficient * weight / h
                    del grads  # this variable would keep them during the next pass
                    total = part.mul_(multiple) if total is None else total.add_(part, alpha=multiple)
        oracle.load(self.x)
        assert total is not None
        return total

    def _points(self, v: Tensor, h: float) -> Iterator[tuple[float, Tensor]]:
        """Yield the coefficients and points of a central difference along `h v`, or of one within the bounds."""
        if self.oracle.box is not None:
            yield from self.oracle.box.difference_points(self.x, v * h)
            return
        yield 0.5, self.x.add(v, alpha=h)
        yield -0.5, self.x.sub(v, alpha=h)


class Automatic(DoubleBackward):
    """hvp="auto": exact products, until an operator without a second derivative requires differences."""

    _fallback: FiniteDifference | None = None

    def __call__(self, v: Any) -> Any:
        if self._fallback is None:
            try:
                return super().__call__(v)
            except SecondDerivativeError as error:
                self.oracle.fall_back(error)
                self.release()
                self._fallback = FiniteDifference(self.oracle, self.x, self.sample)
        return self._fallback(v)

    def error(self, v: Any, product: Any) -> float:
        return 0.0 if self._fallback is None else self._fallback.error(v, product)


OPERATORS: dict[str, type[Hessian]] = {
    "auto": Automatic,
    "double-backward": DoubleBackward,
    "forward-over-reverse": ForwardOverReverse,
    "finite-difference": FiniteDifference,
    "gauss-newton": GaussNewton,
}
"""The operator of each `hvp`."""

_MISSING_DERIVATIVE = re.compile(
    r"derivative for '?(?:aten::)?(\w+)'? is not implemented"
    r"|forward AD with (?:aten::)?(\w+) that does not support it"
    r"|jvp function for (custom autograd\.Function)"
    r"|(ZeroTensors) are immutable"
    r"|(torch\.compile with aot_autograd) does not currently support double backward"
)
"""Torch's messages about a missing second or forward-mode derivative; a group holds the operator."""


def _raise_explained(error: Exception) -> NoReturn:
    """Raise an error with operator and remedy if torch reports a missing derivative; else raise the error."""
    match = _MISSING_DERIVATIVE.search(str(error))
    if match is None:
        raise error
    forward = "forward" in str(error) or "ZeroTensors" in str(error)
    raise no_second_derivative(next(filter(None, match.groups())), forward=forward) from error


def no_second_derivative(operator: str, *, forward: bool = False) -> SecondDerivativeError:
    """Return the error for an operator that cannot be differentiated twice."""
    if operator == "ZeroTensors":  # torch's message if an input of a fused loss has no tangent
        operator = "mse_loss or another fused loss"
    kind = "forward-mode derivative" if forward else "second derivative"
    remedy = 'Pass hvp="finite-difference", which needs first derivatives only'
    if forward:
        remedy = 'Pass hvp="double-backward"; or hvp="finite-difference", which needs first derivatives only'
    if "attention" in operator:
        remedy += (
            "; or compute attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which is differentiable"
        )
    if "cudnn_rnn" in operator:
        remedy += "; or run the model under torch.backends.cudnn.flags(enabled=False)"
    if operator.startswith(COMPILED):
        remedy += "; or compute the loss with the model that is not compiled, which has the same parameters"
    return SecondDerivativeError(
        f"the operator {operator} has no {kind} in torch {torch.__version__}, so this mode of hvp cannot compute exact "
        f"Hessian products. {remedy}.",
        operator,
    )
