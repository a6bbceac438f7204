"""f, g and Hv of a torch loss by automatic differentiation.

The loss is a closure over leaf tensors, which is how both a model's parameters and the argument of a plain function
look from here. Points are flat vectors; `load` writes one into the leaves, and nothing else does.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sanc.errors import ArgumentError, ArgumentTypeError, SecondDerivativeError
from sanc.oracles.base import Meter, Operator, Oracle, Recent, difference_step
from sanc.oracles.replay import Buffers, seed_all, still_buffers, watched_buffers
from sanc.vectors import TorchSpace, Vector

HvpMode = Literal["double-backward", "forward-over-reverse", "finite-difference"]
HVP_MODES: tuple[HvpMode, ...] = ("double-backward", "forward-over-reverse", "finite-difference")

Closure = Callable[[], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A loss on one sample: closures whose weighted sum it is, its size, and the seed its randomness replays.

    Attributes
    ----------
    name : str
        The argument it came from, for messages.
    parts : sequence of (float, callable)
        Weights and closures; more than one when the sample is cut into micro-batches.
    size : int
        Components in it.
    seed : int
        What its random draws are a function of; None for a function that draws nothing.
    """

    name: str
    parts: Sequence[tuple[float, Closure]]
    size: int
    seed: int | None


class Layout:
    """How flat vectors lie in leaf tensors, and the weight decay of each stretch."""

    def __init__(self, leaves: Sequence[Tensor], decays: Sequence[float]) -> None:
        self.leaves = list(leaves)
        self._sizes = [leaf.numel() for leaf in self.leaves]
        self.dim = sum(self._sizes)
        self.kind = (self.leaves[0].dtype, self.leaves[0].device)
        self.decays: list[tuple[int, int, float]] = []
        offset = 0
        for size, decay in zip(self._sizes, decays, strict=True):
            if decay:
                if self.decays and self.decays[-1][1:] == (offset, decay):
                    self.decays[-1] = (self.decays[-1][0], offset + size, decay)
                else:
                    self.decays.append((offset, offset + size, decay))
            offset += size

    def matches(self, other: Layout) -> bool:
        """Whether vectors of one are vectors of the other: the same leaves, type and device."""
        same = len(self.leaves) == len(other.leaves) and self.kind == other.kind
        return same and all(a is b for a, b in zip(self.leaves, other.leaves, strict=True))

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Join per-leaf tensors into one new vector; a missing one is zero."""
        pieces = [
            leaf.new_zeros(leaf.numel()) if tensor is None else _dense(tensor).to(leaf.dtype).reshape(-1)
            for leaf, tensor in zip(self.leaves, tensors, strict=True)
        ]
        return torch.cat(pieces)

    def gather(self, tensors: Sequence[Tensor | None], weight: float, into: Tensor | None) -> Tensor:
        """Add weighted per-leaf tensors to a vector in place; to a new one where there is none yet."""
        if into is None:
            joined = self.flatten(tensors)
            return joined if weight == 1.0 else joined.mul_(weight)
        pairs = [(part, _dense(t)) for part, t in zip(self.split(into), tensors, strict=True) if t is not None]
        if pairs:
            parts, found = zip(*pairs, strict=True)
            torch._foreach_add_(parts, found, alpha=weight)
        return into

    def split(self, vector: Tensor) -> list[Tensor]:
        """Cut a flat vector, or a block of them, into tensors of the leaves' shapes; of a vector they are views."""
        pieces: Sequence[Tensor] = vector.split(self._sizes, dim=-1)  # type: ignore[no-untyped-call]
        rows = vector.shape[:-1]
        return [piece.reshape(rows + leaf.shape) for piece, leaf in zip(pieces, self.leaves, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Undo `split`."""
        pairs = zip(tensors, self.leaves, strict=True)
        return torch.cat([t.reshape(*t.shape[: t.ndim - leaf.ndim], leaf.numel()) for t, leaf in pairs], dim=-1)

    def write(self, vector: Tensor) -> None:
        """Copy a flat vector into the leaves."""
        with torch.no_grad():
            torch._foreach_copy_([leaf.detach() for leaf in self.leaves], self.split(vector))
        torch.clear_autocast_cache()  # it may hold casts of the old content

    def penalty(self, x: Tensor) -> float:
        """½ Σ decay·‖x‖² over the stretches that have one."""
        return sum(0.5 * decay * float(x[a:b].square().sum()) for a, b, decay in self.decays)

    def add_decay(self, result: Tensor, v: Tensor) -> Tensor:
        """Add decay·v, the penalty's gradient and Hessian product alike, in place."""
        for a, b, decay in self.decays:
            result[a:b].add_(v[a:b], alpha=decay)
        return result


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()  # an embedding may give sparse gradients


def edges(grads: Sequence[Tensor | None]) -> list[GradientEdge | None]:
    """Keep the graph of gradients, which is all that products need, and not their content.

    A gradient that requires none is constant, and its Hessian rows are zero.
    """
    return [None if g is None or not g.requires_grad else get_gradient_edge(g) for g in grads]


@contextmanager
def lent(layout: Layout, vector: Vector, held: Callable[[], list[Any]]) -> Iterator[None]:
    """Give the memory of a vector away for a while in which per-leaf tensors hold the same numbers."""
    storage = vector.untyped_storage()
    size = storage.nbytes()
    if size != vector.nbytes or not storage.resizable():  # it is part of something larger, or somebody else's
        yield
        return
    storage.resize_(0)
    try:
        yield
    finally:
        storage.resize_(size)
        with torch.no_grad():
            torch._foreach_copy_(layout.split(vector), held())


class AutogradOracle(Oracle):
    """f, g and Hv of closures over leaf tensors.

    Parameters
    ----------
    layout : Layout
        The leaves.
    gradient, hessian, objective : Sample
        The three samples; the same object where two coincide, which saves work.
    hvp : {"double-backward", "forward-over-reverse", "finite-difference"}
        How products are made.
    meter : Meter
        Where calls are counted.
    exact : bool
        Whether the samples are the whole objective in every iteration.

    Attributes
    ----------
    inspect : bool
        Whether the next graph of second order is searched for functions that are differentiable once only. Torch
        itself lets some of them pass and answers zero.
    differentiates : bool
        Whether the loss differentiates something itself, so that values too need a graph; found out when needed.
    raw_loss : Tensor or None
        Loss of the first gradient pass, without weight decay.
    """

    def __init__(
        self,
        layout: Layout,
        gradient: Sample,
        hessian: Sample,
        objective: Sample,
        *,
        hvp: HvpMode,
        meter: Meter,
        exact: bool = False,
    ) -> None:
        leaf = layout.leaves[0]
        self.layout = layout
        self.space = TorchSpace(layout.dim, leaf.dtype, leaf.device)
        self.device = leaf.device
        self.meter = meter
        self.exact = exact
        self.hvp = hvp
        self._samples = (gradient, hessian, objective)
        self._loaded: Vector | None = None
        self._values = Recent()
        self._gradients: tuple[Vector, tuple[float, Vector]] | None = None
        self._graph: tuple[Vector, Sequence[GradientEdge | None]] | None = None
        self.raw_loss: Tensor | None = None
        self.inspect = True
        self.differentiates = False
        self._training: Buffers | None = None
        self._products = True

    def begin(self, iteration: int, *, products: bool = True) -> None:
        self._products = products

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = self._samples
        return g.size, h.size, f.size

    def start(self) -> Vector:
        """Gather the leaves into the flat vector that stands for the current point."""
        x = self.layout.flatten([leaf.detach() for leaf in self.layout.leaves])
        self._loaded = x
        return x

    def load(self, x: Vector) -> None:
        """Write a point into the leaves, unless it is there already."""
        if self._loaded is not x:
            self._loaded = self._graph = None  # a graph that was built on the old content is void
            self.layout.write(x)
            self._loaded = x

    def value(self, x: Vector) -> float:
        return self._known_or_evaluated(x, self._samples[2])

    def trial(self, x: Vector) -> float:
        return self._known_or_evaluated(x, self._samples[0])

    def _known_or_evaluated(self, x: Vector, sample: Sample) -> float:
        known = self._values.get(sample, x)
        return self._values.put(self.evaluate(x, sample), sample, x) if known is None else known

    def evaluate(self, x: Vector, sample: Sample, *, graph: bool = False) -> float:
        """f(x) on a sample, with its randomness replayed and no buffer moved."""
        self.load(x)
        try:
            total = self._evaluate(sample, graph or self.differentiates)
        except RuntimeError as problem:
            if self.differentiates or graph or "does not require grad" not in str(problem):
                raise
            self.differentiates = True  # a gradient penalty, a physics-informed loss
            total = self._evaluate(sample, graph=True)
        self.meter.count_value(sample.size)
        return total + self.layout.penalty(x)

    def _evaluate(self, sample: Sample, graph: bool) -> float:
        total = 0.0
        with still_buffers(), torch.set_grad_enabled(graph):
            self.rewind(sample)
            for weight, closure in sample.parts:
                total += weight * float(self.call(closure, sample, graph=False).detach())
        return total

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        known = self._gradients
        if known is not None and known[0] is x:
            return known[1]
        sample, hessian, _ = self._samples
        keep = self._products and sample is hessian and self.hvp == "double-backward" and len(sample.parts) == 1
        self.load(x)
        first = self.raw_loss is None
        if first:  # the pass that counts as training: buffers move, as in a plain forward pass
            with watched_buffers() as self._training:
                answer = self._gradient(x, sample, keep_graph=keep)
        else:
            with still_buffers():
                answer = self._gradient(x, sample, keep_graph=keep)
        self._values.put(answer[0], sample, x)
        self._gradients = (x, answer)
        return answer

    def _gradient(self, x: Vector, sample: Sample, *, keep_graph: bool) -> tuple[float, Vector]:
        total, result = self.layout.penalty(x), None
        raw: Tensor | None = None
        self.rewind(sample)
        for weight, closure in sample.parts:
            loss = self.call(closure, sample)
            grads = self._first_order(loss, create_graph=keep_graph)
            result = self.layout.gather(grads, weight, result)
            if keep_graph:
                self._graph = (x, edges(grads))
            del grads
            raw = weight * loss.detach() if raw is None else raw + weight * loss.detach()
        assert result is not None
        assert raw is not None
        if self.raw_loss is None:
            self.raw_loss = raw
        self.meter.count_gradient(sample.size)
        return total + float(raw), self.layout.add_decay(result, x)

    def rewind(self, sample: Sample) -> None:
        """Put the random state back to where every evaluation of this sample starts."""
        if sample.seed is not None:
            seed_all(sample.seed, self.device)

    def call(self, closure: Closure, sample: Sample, *, graph: bool = True) -> Tensor:
        """Run a closure and reject what is no loss, or one that has called backward() already."""
        loss = closure()
        if any(leaf.grad is not None for leaf in self.layout.leaves):
            raise ArgumentError(
                f"{sample.name} called backward(): only return the loss, the optimiser differentiates it itself."
            )
        return check_loss(loss, sample.name, graph=graph)

    def _first_order(self, loss: Tensor, *, create_graph: bool) -> Sequence[Tensor | None]:
        if create_graph and self.inspect:
            self.inspect = False
            _refuse_once_differentiable(loss)
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, self.layout.leaves, create_graph=create_graph, allow_unused=True
        )
        return grads

    def hessian(self, x: Vector) -> Operator:
        kinds: dict[str, type[_AutogradOperator]] = {
            "double-backward": _DoubleBackward,
            "forward-over-reverse": _ForwardOverReverse,
            "finite-difference": _FiniteDifference,
        }
        return kinds[self.hvp](self, x, self._samples[1])

    def knows(self, x: Vector) -> tuple[bool, bool]:
        gradient = self._gradients is not None and self._gradients[0] is x
        return (self._samples[2], x) in self._values, gradient

    def take_graph(self, x: Vector) -> Sequence[GradientEdge | None] | None:
        """Hand over the graph that the gradient pass built at `x`, if it built one."""
        graph, self._graph = self._graph, None
        return graph[1] if graph is not None and graph[0] is x else None

    def undo_training(self) -> None:
        """Put back the buffers that the gradient pass moved, because its step is not one."""
        if self._training is not None:
            self._training.put_back()

    def close(self) -> None:
        """Drop every graph and cached point."""
        self._graph = None
        self._gradients = None
        self._values.clear()


class _AutogradOperator(Operator):
    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        self.oracle, self.x, self.sample = oracle, x, sample

    def __call__(self, v: Vector) -> Vector:
        return self._applied(v, None)

    def add(self, v: Vector, into: Vector) -> None:
        self._applied(v, into)

    def _applied(self, v: Vector, into: Vector | None) -> Vector:
        oracle = self.oracle
        with torch.enable_grad():
            oracle.load(self.x)
            try:
                result = self.product(v, into)
            except (RuntimeError, NotImplementedError) as problem:
                _explain(problem)
        oracle.meter.count_product(self.sample.size)
        return oracle.layout.add_decay(result, v)

    @abstractmethod
    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        """Return the product with the Hessian of the loss, without decay; or add it to `into`, and return that."""

    @contextmanager
    def short_of_memory(self, short: bool, tangent: Vector | None = None) -> Iterator[None]:
        """Where memory is short lend that of the point, which the leaves hold too, and of the tangent if they hold it.

        It is where the product is added to something: so the engine asks if it keeps no basis either.
        """
        layout = self.oracle.layout
        with ExitStack() as stack:
            if short:
                stack.enter_context(lent(layout, self.x, lambda: [leaf.data for leaf in layout.leaves]))
                if tangent is not None:
                    stack.enter_context(lent(layout, tangent, lambda: [_tangent(leaf) for leaf in layout.leaves]))
            yield

    def gradient(self) -> Vector:
        oracle = self.oracle
        if self.sample is oracle._samples[0]:
            return oracle.gradient(self.x)[1].clone()
        oracle.load(self.x)
        with still_buffers(), torch.enable_grad():
            result = self.first_order()
        oracle.meter.count_gradient(self.sample.size)
        return oracle.layout.add_decay(result, self.x)

    def first_order(self) -> Vector:
        """Gradient of the sample at whatever the leaves hold, without decay."""
        oracle, result = self.oracle, None
        oracle.rewind(self.sample)
        for weight, closure in self.sample.parts:
            loss = oracle.call(closure, self.sample)
            result = oracle.layout.gather(oracle._first_order(loss, create_graph=False), weight, result)
        return result


class _DoubleBackward(_AutogradOperator):
    """Differentiate the gradient once more; its graph is built once and kept for all products."""

    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        super().__init__(oracle, x, sample)
        self._grads = oracle.take_graph(x)

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        with self.short_of_memory(into is not None):
            return self._product(v, into)

    def _product(self, v: Vector, into: Vector | None) -> Vector:
        gather, parts = self.oracle.layout.gather, self.sample.parts
        if len(parts) == 1:
            if self._grads is None:
                with still_buffers():
                    self.oracle.rewind(self.sample)
                    self._grads = self._graph(parts[0][1])
            return gather(self._again(self._grads, v, retain=True), parts[0][0], into)
        with still_buffers():
            self.oracle.rewind(self.sample)
            for weight, closure in parts:  # one graph at a time, so memory does not grow with the sample
                into = gather(self._again(self._graph(closure), v, retain=False), weight, into)
        return into

    def _graph(self, closure: Closure) -> Sequence[GradientEdge | None]:
        return edges(self.oracle._first_order(self.oracle.call(closure, self.sample), create_graph=True))

    def _again(self, grads: Sequence[GradientEdge | None], v: Vector, *, retain: bool) -> Sequence[Tensor | None]:
        layout = self.oracle.layout
        pairs = [(g, w) for g, w in zip(grads, layout.split(v), strict=True) if g is not None]
        if not pairs:
            return [None] * len(layout.leaves)
        outputs, weights = zip(*pairs, strict=True)
        products: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, layout.leaves, weights, retain_graph=retain, allow_unused=True
        )
        return products

    def release(self) -> None:
        self._grads = None


class _ForwardOverReverse(_AutogradOperator):
    """Push a tangent through the gradient computation: the leaves carry it in place while the gradient is taken."""

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        short = into is not None
        with still_buffers():
            self.oracle.rewind(self.sample)
            for weight, closure in self.sample.parts:
                into = self._part(closure, v, weight, into, short=short)
        return into

    def _part(self, closure: Closure, v: Vector, weight: float, into: Vector | None, *, short: bool) -> Vector:
        """Add the product of one micro-batch; only the end of a dual level lets go of all that was made in it."""
        layout = self.oracle.layout
        with forward_ad.dual_level():
            with torch.no_grad():
                for leaf, primal, tangent in zip(
                    layout.leaves, layout.split(self.x), layout.split(v.contiguous()), strict=True
                ):
                    # Of a view torch would make a tangent as long as all of x.
                    leaf.copy_(forward_ad.make_dual(primal.data, tangent))  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # it would hold casts without the tangent
            with self.short_of_memory(short, v):
                into = layout.gather(self._tangents(closure, one_by_one=short), weight, into)
        torch.clear_autocast_cache()
        return into

    def _tangents(self, closure: Closure, *, one_by_one: bool) -> list[Tensor | None]:
        """Tangents of the gradients; one by one each gradient goes when its tangent is known."""
        oracle, loss = self.oracle, self.oracle.call(closure, self.sample)
        if not one_by_one:
            return [_tangent(g) for g in oracle._first_order(loss, create_graph=False)]
        tangents: list[Tensor | None] = [None] * len(oracle.layout.leaves)

        def keep(place: int, g: Tensor) -> Tensor:
            tangents[place] = _tangent(g)
            return g.new_zeros(()).expand_as(g)

        handles = [
            leaf.register_hook(partial(keep, place))  # type: ignore[no-untyped-call]
            for place, leaf in enumerate(oracle.layout.leaves)
        ]
        try:
            oracle._first_order(loss, create_graph=False)
        finally:
            for handle in handles:
                handle.remove()
        return tangents


def _tangent(g: Tensor | None) -> Tensor | None:
    tangent: Tensor | None = None if g is None else forward_ad.unpack_dual(g).tangent  # type: ignore[no-untyped-call]
    return tangent


class _FiniteDifference(_AutogradOperator):
    """Central difference of gradients, for losses with operators that have no second derivative."""

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        product = self._difference(v, 1.0)
        return product if into is None else into.add_(product)

    def error(self, v: Vector) -> float:
        # The error of a central difference grows with h²: twice the step shows three times what one step hides.
        with torch.enable_grad():
            return self.oracle.space.norm(self._difference(v, 2.0) - self._difference(v, 1.0))

    def _difference(self, v: Vector, stretch: float) -> Vector:
        oracle = self.oracle
        norm = oracle.space.norm(v)
        if norm == 0.0:
            return torch.zeros_like(v)
        h = stretch * difference_step(oracle.space, self.x) / norm
        with still_buffers():
            oracle.load(self.x + h * v)
            ahead = self.first_order()
            oracle.load(self.x - h * v)
            behind = self.first_order()
        oracle.load(self.x)
        return (ahead - behind).mul_(0.5 / h)


def check_loss(loss: Any, name: str, *, graph: bool = True) -> Tensor:
    """Reject what is not a scalar tensor that depends on the parameters."""
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(
            f"{name} returned {type(loss).__name__} ({loss!r:.60}): return the mean loss as a tensor of one element, "
            "without .item()."
        )
    if loss.numel() != 1:
        raise ArgumentError(
            f"{name} returned a tensor of shape {tuple(loss.shape)}: return a scalar, for instance its mean()."
        )
    if not loss.is_floating_point():
        raise ArgumentTypeError(f"{name} returned a tensor of {loss.dtype}: return a real floating-point loss.")
    if graph and not loss.requires_grad:
        raise ArgumentError(
            f"{name} returned a loss that does not depend on the parameters: compute it from the model inside the "
            "closure, without torch.no_grad(), detach() or .data."
        )
    return loss.reshape(())


_MISSING = re.compile(
    r"derivative for '?(?:aten::)?(\w+)'? is not implemented"
    r"|forward AD with (?:aten::)?(\w+) that does not support it"
    r"|jvp function for (custom autograd\.Function)"
    r"|(ZeroTensors) are immutable"
)


def _explain(problem: Exception) -> NoReturn:
    """Turn autograd's complaint about a missing second derivative into one that names operator and remedy."""
    match = _MISSING.search(str(problem))
    if match is None:
        raise problem
    forward = "forward" in str(problem) or "ZeroTensors" in str(problem)
    raise _no_second_derivative(next(filter(None, match.groups())), forward=forward) from problem


def _refuse_once_differentiable(loss: Tensor) -> None:
    """Find a torch.autograd.Function in the graph whose backward is marked once_differentiable."""
    seen: set[Any] = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and _once(function.backward):
            raise _no_second_derivative(f"{function.__name__} (marked once_differentiable)", forward=False)
        stack.extend(parent for parent, _ in node.next_functions)


def _once(backward: Any) -> bool:
    """Whether torch's once_differentiable is among the wrappers of this function."""
    while backward is not None:
        if getattr(backward, "__code__", None) and backward.__code__.co_qualname.startswith("once_differentiable."):
            return True
        backward = getattr(backward, "__wrapped__", None)
    return False


def _no_second_derivative(operator: str, *, forward: bool) -> SecondDerivativeError:
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
    return SecondDerivativeError(
        f"the operator {operator} has no {kind} in torch {torch.__version__}, so the loss has no exact Hessian product "
        f"in this way. {remedy}.",
        operator,
    )
