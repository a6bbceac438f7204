"""The ways to make Hessian products of a torch loss, and what is said of a loss that has none."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, Protocol, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sanc.autograd.leaves import Grads, Leaves, Sample
from sanc.autograd.randomness import StillBuffers
from sanc.core.oracle import Meter, Operator, difference_step
from sanc.core.space import Space
from sanc.errors import SecondDerivativeError

HvpMode = Literal["auto", "double-backward", "forward-over-reverse", "finite-difference"]
HVP_MODES: tuple[HvpMode, ...] = get_args(HvpMode)


class Evaluates(Protocol):
    """What products ask of the oracle they belong to."""

    leaves: Leaves
    space: Space
    meter: Meter

    def load(self, x: Any) -> None: ...
    def still(self) -> StillBuffers: ...
    def passes(self, sample: Sample, *, create_graph: bool = False) -> Iterator[tuple[float, Tensor, Grads]]: ...
    def take_graph(self, x: Any, sample: Sample) -> Grads | None: ...
    def sample_gradient(self, x: Any, sample: Sample) -> Tensor: ...
    def fall_back(self, problem: SecondDerivativeError) -> None: ...


class Hessian(Operator):
    """The Hessian of a sample's loss at a point: a class around one product."""

    def __init__(self, oracle: Evaluates, x: Any, sample: Sample) -> None:
        self.oracle, self.x, self.sample = oracle, x, sample

    def __call__(self, v: Any) -> Any:
        oracle = self.oracle
        with torch.enable_grad():
            oracle.load(self.x)
            try:
                result = self.product(v)
            except RuntimeError as problem:
                _explain(problem)
        oracle.meter.count_product(self.sample.size)
        return oracle.leaves.add_decay(result, v)

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """Return the product with the Hessian of the loss, without decay."""

    def gradient(self) -> Any:
        return self.oracle.sample_gradient(self.x, self.sample)


class DoubleBackward(Hessian):
    """Differentiate the gradient once more; its graph is built once and kept for all products."""

    _graph: Grads | None = None

    def product(self, v: Tensor) -> Tensor:
        oracle = self.oracle
        with oracle.still():
            if len(self.sample.parts) == 1:
                if self._graph is None:
                    self._graph = oracle.take_graph(self.x, self.sample)
                if self._graph is None:
                    (self._graph,) = (grads for _, _, grads in oracle.passes(self.sample, create_graph=True))
                return self._again(self._graph, v, retain=True)
            total = torch.zeros_like(v)
            for weight, _, grads in oracle.passes(self.sample, create_graph=True):  # one graph at a time
                total.add_(self._again(grads, v, retain=False), alpha=weight)
        return total

    def _again(self, grads: Grads, v: Tensor, *, retain: bool) -> Tensor:
        """Differentiate Σ gᵢᵀvᵢ; a gradient that has no graph is constant, and its Hessian is zero."""
        leaves = self.oracle.leaves
        pairs = zip(grads, leaves.split(v), strict=True)
        bent = [(g, part.to(g.dtype)) for g, part in pairs if g is not None and g.requires_grad]
        if not bent:
            return torch.zeros_like(v)
        outputs, weights = zip(*bent, strict=True)
        found = torch.autograd.grad(outputs, leaves.tensors, weights, retain_graph=retain, allow_unused=True)
        return leaves.flatten(found)

    def release(self) -> None:
        self._graph = None


class ForwardOverReverse(Hessian):
    """Push a tangent through the gradient computation: the leaves carry it while the gradient is taken."""

    def product(self, v: Tensor) -> Tensor:
        leaves, total = self.oracle.leaves, torch.zeros_like(v)
        with self.oracle.still(), self._carrying(v):
            for weight, _, grads in self.oracle.passes(self.sample):
                tangents = [None if g is None else forward_ad.unpack_dual(g).tangent for g in grads]  # type: ignore[no-untyped-call]
                total.add_(leaves.flatten(tangents), alpha=weight)
        return total

    @contextmanager
    def _carrying(self, v: Tensor) -> Iterator[None]:
        """Give the leaves the tangent `v` inside the block."""
        leaves = self.oracle.leaves
        pieces = zip(leaves.tensors, leaves.split(self.x), leaves.split(v.contiguous()), strict=True)
        with forward_ad.dual_level():
            with torch.no_grad():
                for leaf, primal, tangent in pieces:
                    # Of a view torch would make a tangent as long as all of x.
                    leaf.copy_(forward_ad.make_dual(primal.data, tangent))  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # it would hold casts without the tangent
            yield
        torch.clear_autocast_cache()


class FiniteDifference(Hessian):
    """Central difference of gradients, for losses with operators that have no second derivative."""

    def product(self, v: Tensor) -> Tensor:
        return self._difference(v, 1.0)

    def error(self, v: Any, product: Any) -> float:
        # The error of a central difference grows with h²: twice the step shows three times what one step hides.
        with torch.enable_grad():
            coarse = self.oracle.leaves.add_decay(self._difference(v, 2.0), v)
        return self.oracle.space.norm(coarse - product)

    def _difference(self, v: Tensor, stretch: float) -> Tensor:
        oracle = self.oracle
        norm, total = oracle.space.norm(v), torch.zeros_like(v)
        if norm == 0.0:
            return total
        # A power of two, so that what is the same on both sides cancels to the last bit.
        h = 2.0 ** round(math.log2(stretch * difference_step(oracle.space, self.x) / norm))
        for side in (h, -h):
            oracle.load(self.x + v * side)
            with oracle.still():
                for weight, _, grads in oracle.passes(self.sample):
                    total.add_(oracle.leaves.flatten(grads), alpha=0.5 * weight / side)
        oracle.load(self.x)
        return total


class Exact(DoubleBackward):
    """hvp="auto": exact products, and differences from then on where an operator has no second derivative."""

    _instead: FiniteDifference | None = None

    def __call__(self, v: Any) -> Any:
        if self._instead is None:
            try:
                return super().__call__(v)
            except SecondDerivativeError as problem:
                self.oracle.fall_back(problem)
                self.release()
                self._instead = FiniteDifference(self.oracle, self.x, self.sample)
        return self._instead(v)

    def error(self, v: Any, product: Any) -> float:
        return 0.0 if self._instead is None else self._instead.error(v, product)


OPERATORS: dict[str, type[Hessian]] = {
    "auto": Exact,
    "double-backward": DoubleBackward,
    "forward-over-reverse": ForwardOverReverse,
    "finite-difference": FiniteDifference,
}
"""How each mode makes its products."""

_MISSING = re.compile(
    r"derivative for '?(?:aten::)?(\w+)'? is not implemented"
    r"|forward AD with (?:aten::)?(\w+) that does not support it"
    r"|jvp function for (custom autograd\.Function)"
    r"|(ZeroTensors) are immutable"
    r"|(torch\.compile with aot_autograd) does not currently support double backward"
)


def _explain(problem: Exception) -> NoReturn:
    """Turn autograd's complaint about a missing second derivative into one that names operator and remedy."""
    match = _MISSING.search(str(problem))
    if match is None:
        raise problem
    forward = "forward" in str(problem) or "ZeroTensors" in str(problem)
    raise no_second_derivative(next(filter(None, match.groups())), forward=forward) from problem


def no_second_derivative(operator: str, *, forward: bool = False) -> SecondDerivativeError:
    """Return the error for an operator that cannot be differentiated twice."""
    if operator == "ZeroTensors":  # what torch says where an input of a fused loss carries no tangent
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
    if operator.startswith("torch.compile"):
        remedy += "; or give the optimiser a loss of the model that is not compiled, which has the same parameters"
    return SecondDerivativeError(
        f"the operator {operator} has no {kind} in torch {torch.__version__}, so the loss has no exact Hessian product "
        f"in this way. {remedy}.",
        operator,
    )
