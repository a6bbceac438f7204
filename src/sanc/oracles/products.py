"""The ways to make Hessian products of a torch loss, and what is said of a loss that has none."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.autograd import Variable, forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import has_torch_function

from sanc.errors import ArgumentError, SecondDerivativeError, nearest
from sanc.oracles.base import Operator, difference_step
from sanc.oracles.factors import Terms, Use, gradients, nodes, uses_apart
from sanc.oracles.replay import still_buffers
from sanc.oracles.tape import Tape
from sanc.vectors import Vector

if TYPE_CHECKING:
    from sanc.oracles.autograd import AutogradOracle
    from sanc.oracles.layout import Closure, Layout, Sample

HvpMode = Literal["auto", "double-backward", "forward-over-reverse", "linearised", "finite-difference"]
HVP_MODES: tuple[HvpMode, ...] = ("auto", "double-backward", "forward-over-reverse", "linearised", "finite-difference")


_AS_IT_IS = nullcontext()
_LARGE = 2**16
"""Entries of a weight above which it is worth time to spare a copy of it, where memory is short."""
_REPEATS = 5.0
"""What uses of leaves may weigh in a graph of second order, in vectors, before their terms are added one by one: the
gradient of a plain network uses a weight three times."""


def require_mode(hvp: object) -> None:
    """Accept the name of a way to make products."""
    if hvp not in HVP_MODES:
        raise ArgumentError(f"hvp = {hvp!r} is not known: {nearest(str(hvp), HVP_MODES)}.")


def edge(joined: Tensor) -> GradientEdge | None:
    """Keep the graph of a flat gradient, which is all that products need, and not its content.

    A gradient that has none is constant, and its Hessian is zero.
    """
    return get_gradient_edge(joined) if joined.requires_grad else None


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


class AutogradOperator(Operator):
    """The Hessian of a sample's loss at a point.

    Attributes
    ----------
    builds : bool
        Whether the first product builds what later ones share.
    """

    builds = False

    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        self.oracle, self.x, self.sample = oracle, x, sample

    def __call__(self, v: Vector, out: Vector | None = None) -> Vector:
        return self._applied(v, None, out)

    def add(self, v: Vector, into: Vector) -> None:
        self._applied(v, into)

    def _applied(self, v: Vector, into: Vector | None, out: Vector | None = None) -> Vector:
        oracle = self.oracle
        with _AS_IT_IS if torch.is_grad_enabled() else torch.enable_grad():
            oracle.load(self.x)
            try:
                result = self.product(v, into) if out is None else self.product_in(out, v)
            except (RuntimeError, NotImplementedError) as problem:
                _explain(problem)
        oracle.meter.count_product(self.sample.size)
        return oracle.layout.add_decay(result, v)

    @abstractmethod
    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        """Return the product with the Hessian of the loss, without decay; or add it to `into`, and return that."""

    def product_in(self, out: Vector, v: Vector) -> Vector:
        """Return the product in `out`, where that saves a copy, or as a fresh vector."""
        return self.product(v)

    @contextmanager
    def short_of_memory(self, point: bool, tangent: Vector | None = None) -> Iterator[None]:
        """Where memory is short lend that of the point, which the leaves hold too, and of the tangent if they hold it.

        It is short where the product is added to something: so the engine asks if it keeps no basis either.
        """
        layout = self.oracle.layout
        with ExitStack() as stack:
            if point:
                stack.enter_context(lent(layout, self.x, lambda: [leaf.data for leaf in layout.leaves]))
            if tangent is not None:
                stack.enter_context(lent(layout, tangent, lambda: [_tangent(leaf) for leaf in layout.leaves]))
            yield

    def repeated_uses(self, root: Any, most: float) -> list[tuple[int, Use]]:
        """Return the uses of leaves whose terms are added one by one; who has none at first is not looked at again.

        See `sanc.oracles.factors.uses_apart`; this is for where memory is not short, and time matters more.
        """
        seen, kind = self.oracle.layout.repeats, type(self).__name__
        if seen.get(kind) is False:
            return []
        found = uses_apart(self.oracle.layout, [root], most)
        seen[kind] = bool(found)
        return found

    def gradient(self) -> Vector:
        oracle = self.oracle
        if self.sample is oracle._samples[0]:
            return oracle.gradient(self.x)[1].clone()
        oracle.load(self.x)
        with still_buffers(), torch.enable_grad():
            result = self.first_order()
        oracle.meter.count_gradient(self.sample.size)
        return oracle.layout.add_decay(result, self.x)

    def first_order(self, scale: float = 1.0, into: Vector | None = None, *, short: bool = False) -> Vector:
        """Gradient of the sample at whatever the leaves hold, without decay; multiplied, and added to `into`."""
        oracle = self.oracle
        oracle.rewind(self.sample)
        for weight, closure in self.sample.parts:
            loss = oracle.call(closure, self.sample)
            apart = uses_apart(oracle.layout, [loss.grad_fn], 1.0) if short else []
            if apart:
                assert into is not None
                _add_pulled(oracle.layout, loss, None, scale * weight, into, apart)
            else:
                into = oracle.layout.gather(oracle._first_order(loss, create_graph=False), scale * weight, into)
        return into


class DoubleBackward(AutogradOperator):
    """Differentiate the gradient once more; its graph is built once and kept for all products."""

    builds = True

    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        super().__init__(oracle, x, sample)
        self._built = oracle.take_graph(x)
        self._inference = torch.inference_mode()

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        if into is None:
            return self._product(v, None, short=False)
        with self.short_of_memory(True):
            return self._product(v, into, short=True)

    def product_in(self, out: Vector, v: Vector) -> Vector:
        if len(self.sample.parts) > 1 or self.sample.parts[0][0] != 1.0:
            return self.product(v)
        with self.oracle.guarded(self.sample):
            if self._uses_kept(short=False):
                return self._add_kept(v, out.zero_(), short=False)
            return self.oracle.layout.flatten(self._kept(v), out)

    def _add_kept(self, v: Vector, into: Vector | None, *, short: bool) -> Vector:
        uses = self._uses_kept(short)
        assert self._built is not None
        return self._add(self._built[0], v, self.sample.parts[0][0], into, uses, retain=True)

    def _product(self, v: Vector, into: Vector | None, *, short: bool) -> Vector:
        parts = self.sample.parts
        if len(parts) == 1:
            with self.oracle.guarded(self.sample):
                return self._add_kept(v, into, short=short)
        with still_buffers():
            self.oracle.rewind(self.sample)
            for weight, closure in parts:  # one graph at a time, so memory does not grow with the sample
                graph = self._graph(closure)
                into = self._add(graph, v, weight, into, self._apart(graph, short), retain=False)
                del graph
        assert into is not None
        return into

    def _add(
        self,
        graph: GradientEdge | None,
        v: Vector,
        weight: float,
        into: Vector | None,
        uses: list[tuple[int, Use]],
        *,
        retain: bool,
    ) -> Vector:
        """Add the product of one graph to a vector, or to a new one."""
        layout = self.oracle.layout
        if not uses:
            found = self._kept(v) if retain else self._again(graph, v, retain=False)
            return layout.gather(found, weight, into)
        assert graph is not None
        if into is None:
            into = self.oracle.space.zeros()
        _add_pulled(layout, graph, v, weight, into, uses, retain=retain)
        return into

    def prepare(self) -> None:
        if self._built is None and len(self.sample.parts) == 1:
            self.oracle.load(self.x)
            with torch.enable_grad(), self.oracle.still(self.sample):
                self.oracle.rewind(self.sample)
                self._built = (self._graph(self.sample.parts[0][1]),)

    def _graph(self, closure: Closure) -> GradientEdge | None:
        oracle = self.oracle
        grads = oracle._first_order(oracle.call(closure, self.sample), create_graph=True)
        return edge(oracle.layout.flatten(grads, graph=True))

    _uses: list[tuple[int, Use]] | None = None  # of the graph that is kept

    def _uses_kept(self, short: bool) -> list[tuple[int, Use]]:
        self.prepare()
        if self._uses is None:
            assert self._built is not None
            self._uses = self._apart(self._built[0], short)
        return self._uses

    def _apart(self, graph: GradientEdge | None, short: bool) -> list[tuple[int, Use]]:
        """Return the uses of leaves whose terms are added one by one."""
        if graph is None:
            return []
        return uses_apart(self.oracle.layout, [graph.node], 1.0) if short else self.repeated_uses(graph.node, _REPEATS)

    def _kept(self, v: Vector) -> Sequence[Tensor | None]:
        """Make a product by the graph that is kept.

        Nothing of it is differentiated once more, and in inference mode torch does not prepare for that. Where a loss
        computes something of its own on the way back, such as activations that were not kept, it may need to; the
        product is then made once more, as are all others, without.
        """
        self.prepare()
        assert self._built is not None
        if self.oracle.inference:
            try:
                with self._inference:
                    return self._again(self._built[0], v, retain=True)
            except RuntimeError:
                self.oracle.inference, self.oracle.needs_grad_mode = False, True
        return self._again(self._built[0], v, retain=True)

    def _again(self, graph: GradientEdge | None, v: Vector, *, retain: bool) -> Sequence[Tensor | None]:
        leaves = self.oracle.layout.leaves
        return [None] * len(leaves) if graph is None else _pull(graph, leaves, v, retain)

    def release(self) -> None:
        self._built = self._uses = None


class ForwardOverReverse(AutogradOperator):
    """Push a tangent through the gradient computation: the leaves carry it in place while the gradient is taken.

    The gradient of a leaf comes with three more tensors of its size: two terms of torch's product rule and their sum.
    Where one leaf is most of the model the point is lent for that; where no basis is kept, or the leaf is used more
    than once, the terms are added to the result one after the other.
    """

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        short = into is not None
        with still_buffers():
            self.oracle.rewind(self.sample)
            for weight, closure in self.sample.parts:
                into = self._part(closure, v, weight, into, short=short)
        return into

    def _part(self, closure: Closure, v: Vector, weight: float, into: Vector | None, *, short: bool) -> Vector:
        """Add the product of one micro-batch; only the end of a dual level lets go of all that was made in it."""
        oracle = self.oracle
        point = short or (oracle.lends and max(oracle.layout.shares) > 1 / 2)
        with self._carrying(v), self.short_of_memory(point, v if short or oracle.lends else None):
            # In one line, so that nothing of it is alive when what was lent comes back.
            return self._sum(*self._backward(oracle.call(closure, self.sample), short), weight, into)

    def _sum(
        self, tangents: Sequence[Tensor | None], terms: Sequence[tuple[int, Terms]], weight: float, into: Vector | None
    ) -> Vector:
        """Add what `_backward` returned to a vector, or to a new one."""
        layout = self.oracle.layout
        if terms and into is None:
            into = self.oracle.space.zeros()
        into = layout.gather(tangents, weight, into)
        if terms:
            parts = layout.split(into)
            with torch.no_grad():
                for place, pair in terms:
                    pair.add(weight, parts[place])
        return into

    @contextmanager
    def _carrying(self, v: Vector) -> Iterator[None]:
        """Give the leaves the tangent `v` inside the block."""
        layout = self.oracle.layout
        pieces = zip(layout.leaves, layout.split(self.x), layout.split(v.contiguous()), strict=True)
        with forward_ad.dual_level():
            with torch.no_grad():
                for leaf, primal, tangent in pieces:
                    # Of a view torch would make a tangent as long as all of x.
                    leaf.copy_(forward_ad.make_dual(primal.data, tangent))  # type: ignore[no-untyped-call]
            torch.clear_autocast_cache()  # it would hold casts without the tangent
            yield
        torch.clear_autocast_cache()

    def _backward(self, loss: Tensor, short: bool) -> tuple[list[Tensor | None], list[tuple[int, Terms]]]:
        """Return the tangents of the gradients; of heavy leaves, by their places, what those are made from.

        Where memory is short there are few tensors at a time: each gradient goes when its tangent is known.
        """
        oracle, leaves = self.oracle, self.oracle.layout.leaves
        node = loss.grad_fn
        apart = uses_apart(oracle.layout, [node], 1.0, 1 / 3) if short else self.repeated_uses(node, 1.0)
        gone = {place for place, _ in apart}
        others = [place for place in range(len(leaves)) if place not in gone]
        tangents: list[Tensor | None] = [None] * len(leaves)

        def keep(place: int, g: Tensor) -> Tensor:
            tangents[place] = _tangent(g)
            return g.new_zeros(()).expand_as(g)

        handles = [leaves[p].register_hook(partial(keep, p)) for p in others] if short else []  # type: ignore[no-untyped-call]
        try:
            grads, arrived = gradients(loss, [leaves[place] for place in others], [use for _, use in apart])
        finally:
            for handle in handles:
                handle.remove()
        if not short:
            for place, g in zip(others, grads, strict=True):
                tangents[place] = _tangent(g)
        ends = zip(apart, arrived, strict=True)
        return tangents, [(place, use.terms(g)) for (place, use), g in ends if g is not None]


class Linearised(ForwardOverReverse):
    """Record the first product, forward over reverse, and replay for the others what the tangent reaches.

    Where that cannot be recorded, the sample is cut into parts, or memory is short, every product is the first.
    """

    builds = True

    def __init__(self, oracle: AutogradOracle, x: Vector, sample: Sample) -> None:
        super().__init__(oracle, x, sample)
        self._tape: Tape | None = None
        self._terms: list[tuple[int, Terms]] = []  # of heavy leaves; what changes of them comes from the tape
        self._recordable = len(sample.parts) == 1

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        if not self._recordable or into is not None:
            return super().product(v, into)
        if self._tape is None or not self._tape.valid():
            return self._record(v)
        layout = self.oracle.layout
        with torch.no_grad(), torch.autocast(self.oracle.device.type, enabled=False):
            answers = self._tape.replay(layout.split(v))
            count = len(layout.leaves)
            changes = zip(self._terms, answers[count::2], answers[count + 1 :: 2], strict=True)
            terms = [(place, replace(pair, slope=slope, tangent=other)) for (place, pair), slope, other in changes]
            return self._sum(answers[:count], terms, self.sample.parts[0][0], None)

    def _record(self, v: Vector) -> Vector:
        (weight, closure), layout = self.sample.parts[0], self.oracle.layout
        # A recording holds all it met until it is finished: only then does the point need its memory again.
        lends = self.oracle.lends
        with still_buffers(), self._carrying(v), self.short_of_memory(lends, v if lends else None):
            tape = Tape([_carried(leaf) for leaf in layout.leaves])
            self.oracle.rewind(self.sample)
            with tape:
                tangents, terms = self._backward(self.oracle.call(closure, self.sample), short=False)
            tape.finish([*tangents, *(change for _, pair in terms for change in (pair.slope, pair.tangent))])
        self._recordable = not tape.broken
        self._tape = tape if self._recordable else None
        self._terms = terms
        return self._sum(tangents, terms, weight, None)

    def release(self) -> None:
        self._tape, self._terms = None, []


def _add_pulled(
    layout: Layout,
    root: GradientEdge | Tensor,
    v: Vector | None,
    weight: float,
    into: Vector,
    apart: Sequence[tuple[int, Use]],
    *,
    retain: bool = False,
) -> None:
    """Add what `torch.autograd.grad` gives for the leaves, with that of some leaves made use by use."""
    gone = {place for place, _ in apart}
    others = [leaf for place, leaf in enumerate(layout.leaves) if place not in gone]
    found, arrived = gradients(root, others, [use for _, use in apart], v, retain=retain)
    rest = iter(found)
    layout.gather([None if place in gone else next(rest) for place in range(len(layout.leaves))], weight, into)
    parts = layout.split(into)
    with torch.no_grad():
        for (place, use), g in zip(apart, arrived, strict=True):
            if g is not None:
                use.add(g, use.other, weight, parts[place])


def _pull(graph: GradientEdge, leaves: list[Tensor], v: Vector, retain: bool) -> Sequence[Tensor | None]:
    """Return ``torch.autograd.grad(graph, leaves, v, retain_graph=retain, allow_unused=True)``.

    Torch's function looks at all of its arguments in Python, which are known to be right here, and gives them to the
    engine.
    """
    products: Sequence[Tensor | None]
    if has_torch_function(leaves) or not hasattr(Variable, "_execution_engine"):
        products = torch.autograd.grad(graph, leaves, v, retain_graph=retain, allow_unused=True)
    else:
        engine = Variable._execution_engine
        try:
            products = engine.run_backward((graph,), (v,), retain, False, tuple(leaves), True, accumulate_grad=False)
        except TypeError:  # another torch may want other arguments
            products = torch.autograd.grad(graph, leaves, v, retain_graph=retain, allow_unused=True)
    return products


def _tangent(g: Tensor | None) -> Tensor | None:
    tangent: Tensor | None = None if g is None else forward_ad.unpack_dual(g).tangent  # type: ignore[no-untyped-call]
    return tangent


def _carried(leaf: Tensor) -> Tensor:
    tangent = _tangent(leaf)
    assert tangent is not None
    return tangent


class FiniteDifference(AutogradOperator):
    """Central difference of gradients, for losses with operators that have no second derivative."""

    def product(self, v: Vector, into: Vector | None = None) -> Vector:
        return self._difference(v, 1.0, into)

    def error(self, v: Vector) -> float:
        # The error of a central difference grows with h²: twice the step shows three times what one step hides.
        with torch.enable_grad():
            return self.oracle.space.norm(self._difference(v, 2.0) - self._difference(v, 1.0))

    def _difference(self, v: Vector, stretch: float, into: Vector | None = None) -> Vector:
        oracle = self.oracle
        norm = oracle.space.norm(v)
        if norm == 0.0:
            return torch.zeros_like(v) if into is None else into
        # A power of two, so that what is the same on both sides cancels to the last bit.
        h, short = 2.0 ** round(math.log2(stretch * difference_step(oracle.space, self.x) / norm)), into is not None
        with still_buffers(), self._without_copies() if short else _AS_IT_IS:
            for side in (h, -h):
                oracle.shift(self.x, v, side)
                into = self.first_order(0.5 / side, into, short=short)
        oracle.load(self.x)
        return into

    @contextmanager
    def _without_copies(self) -> Iterator[None]:
        """Keep a convolution that is most of a large model from oneDNN, which holds another gradient of its weight."""
        layout, before = self.oracle.layout, torch._C._get_mkldnn_enabled()
        heavy = any(
            leaf.dim() > 2 and leaf.numel() > _LARGE and share > 0.5
            for leaf, share in zip(layout.leaves, layout.shares, strict=True)
        )
        if not heavy or self.oracle.device.type != "cpu":
            yield
            return
        torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags would set more, and warn of that
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(before)


# How each mode but "auto", which is one of the others, makes its products.
OPERATORS: dict[str, type[AutogradOperator]] = {
    "double-backward": DoubleBackward,
    "forward-over-reverse": ForwardOverReverse,
    "linearised": Linearised,
    "finite-difference": FiniteDifference,
}


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


def refuse_once_differentiable(loss: Tensor) -> None:
    """Find a torch.autograd.Function in the graph whose backward is marked once_differentiable."""
    for node in nodes(loss.grad_fn):
        function = getattr(node, "_forward_cls", None)
        if function is not None and _once(function.backward):
            raise _no_second_derivative(f"{function.__name__} (marked once_differentiable)", forward=False)


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
