"""f, g and Hv of a torch loss by automatic differentiation.

The loss is a closure over leaf tensors, which is how both a model's parameters and the argument of a plain function
look from here. Points are flat vectors; `load` writes one into the leaves, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sanc.errors import ArgumentError, ArgumentTypeError
from sanc.oracles.base import Meter, Operator, Oracle, Recent
from sanc.oracles.choice import REFERENCE, fastest
from sanc.oracles.layout import Closure, Layout, Sample
from sanc.oracles.products import HVP_MODES, OPERATORS, HvpMode, edge, refuse_once_differentiable
from sanc.oracles.replay import Buffers, HostDrawsError, host_state, seed_all, still_buffers, watched_buffers
from sanc.survey import Memory, Survey, look_at, read
from sanc.vectors import TorchSpace, Vector

__all__ = ["HVP_MODES", "AutogradOracle", "HvpMode", "check_loss"]


class AutogradOracle(Oracle):
    """f, g and Hv of closures over leaf tensors.

    Parameters
    ----------
    layout : Layout
        The leaves.
    gradient, hessian, objective : Sample
        The three samples; the same object where two coincide, which saves work.
    hvp : {"auto", "double-backward", "forward-over-reverse", "linearised", "finite-difference"}
        How products are made.
    meter : Meter
        Where calls are counted.
    exact : bool
        Whether the samples are the whole objective in every iteration.

    Attributes
    ----------
    hvp : str
        How products are made; no longer "auto" once that has chosen.
    expected : int
        Products that one point is to have, which share the cost of building what they need.
    inspect : bool
        Whether the next graph of second order is searched for functions that are differentiable once only. Torch
        itself lets some of them pass and answers zero.
    differentiates : bool
        Whether the loss differentiates something itself, so that values too need a graph; found out when needed.
    inference : bool
        Whether products by double backward may be made in torch's inference mode.
    needs_grad_mode : bool
        Whether they were seen to fail there, because the loss computes something of its own on the way back.
    seeds_host : bool
        Whether the global generators of NumPy and Python are seeded too. Where they are not, a closure that draws from
        one of them is an error.
    draws_host : bool
        Whether a closure was seen to draw from one.
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
        self.hvp: HvpMode = hvp
        self.expected = 5
        self._samples = (gradient, hessian, objective)
        self._loaded: Vector | None = None
        self._values = Recent()
        self._gradients: tuple[Vector, tuple[float, Vector]] | None = None
        self._graph: tuple[Vector, GradientEdge | None] | None = None
        self.raw_loss: Tensor | None = None
        self.inspect = True
        self.differentiates = False
        self.inference, self.needs_grad_mode = True, False
        self.seeds_host, self.draws_host = True, False
        self._host: tuple[bytes, bytes, float | None] | None = None
        self._training: Buffers | None = None
        self._met: dict[Sample, Buffers] = {}  # by the last pass of each sample that came to its end
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

    def shift(self, x: Vector, v: Vector, length: float) -> None:
        """Write a point that is some way off into the leaves; no vector is made of it."""
        self.load(x)
        self._loaded = self._graph = None
        with torch.no_grad():
            torch._foreach_add_(self.layout.leaves, self.layout.split(v), alpha=length)
        torch.clear_autocast_cache()

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
        return float(self.layout.penalised(total, x))

    def _evaluate(self, sample: Sample, graph: bool) -> Tensor:
        total: Tensor | None = None
        with self.still(sample), torch.set_grad_enabled(graph):
            self.rewind(sample)
            for weight, closure in sample.parts:
                part = self.call(closure, sample, graph=False).detach().double()
                part = part if weight == 1.0 else weight * part
                total = part if total is None else total + part
        assert total is not None
        return total

    def gradient(self, x: Vector) -> tuple[float, Vector]:
        known = self._gradients
        if known is not None and known[0] is x:
            return known[1]
        unread, g = self._unread_gradient(x)
        return self._remember(x, float(unread), g)

    def survey(self, x: Vector, memory: Memory) -> Survey:
        unread, g = self._unread_gradient(x)
        seen = read(self.space, *look_at(self.space, unread, g, memory), memory)
        self._remember(x, seen.value, g)
        return seen

    def _remember(self, x: Vector, value: float, g: Vector) -> tuple[float, Vector]:
        self._values.put(value, self._samples[0], x)
        self._gradients = (x, (value, g))
        return value, g

    def _unread_gradient(self, x: Vector) -> tuple[Tensor, Vector]:
        sample, hessian, _ = self._samples
        keep = self._products and sample is hessian and self.hvp == "double-backward" and len(sample.parts) == 1
        self.load(x)
        if self.raw_loss is None:  # the pass that counts as training: buffers move, as in a plain forward pass
            with watched_buffers() as self._training:
                unread = self._gradient(x, sample, keep_graph=keep)
            self._met[sample] = self._training
            return unread
        with self.still(sample):
            return self._gradient(x, sample, keep_graph=keep)

    @contextmanager
    def still(self, sample: Sample) -> Iterator[None]:
        """Hold the buffers of modules still while a sample is evaluated; where its last pass met none, there are none.

        To watch all modules takes a while, beside the time of a small network.
        """
        if self._has_no_buffers(sample):
            yield
            return
        with still_buffers() as guard:
            yield
        self._met[sample] = guard

    def guarded(self, sample: Sample) -> AbstractContextManager[Any]:
        """Hold buffers still where modules run only if what they computed was not kept: it says nothing of others."""
        return nullcontext() if self._has_no_buffers(sample) else still_buffers()

    def _has_no_buffers(self, sample: Sample) -> bool:
        return sample in self._met and self._met[sample].none

    def _gradient(self, x: Vector, sample: Sample, *, keep_graph: bool) -> tuple[Tensor, Vector]:
        result: Tensor | None = None
        raw: Tensor | None = None
        self.rewind(sample)
        for weight, closure in sample.parts:
            loss = self.call(closure, sample)
            grads = self._first_order(loss, create_graph=keep_graph)
            if keep_graph:  # there is one part only
                joined = self.layout.flatten(grads, graph=True)
                self._graph = (x, edge(joined))
                result = joined.detach() if weight == 1.0 else weight * joined.detach()
            else:
                result = self.layout.gather(grads, weight, result)
            del grads
            value = loss.detach() if weight == 1.0 else weight * loss.detach()
            raw = value if raw is None else raw + value
        assert result is not None
        assert raw is not None
        if self.raw_loss is None:
            self.raw_loss = raw
        self.meter.count_gradient(sample.size)
        return self.layout.penalised(raw, x), self.layout.add_decay(result, x)

    def rewind(self, sample: Sample) -> None:
        """Put the random state back to where every evaluation of this sample starts."""
        if sample.seed is None:
            return
        if self.seeds_host:
            self.look_for_draws()  # on the way back from the last evaluation
        seed_all(sample.seed, self.device, host=self.seeds_host)
        if self.seeds_host or self._host is None:
            self._host = host_state()

    def look_for_draws(self) -> None:
        """Note whether somebody drew from a generator of the host, which must be seeded then."""
        if self._host is not None and not self.draws_host and host_state() != self._host:
            self.draws_host = True
            if not self.seeds_host:
                raise HostDrawsError

    def stop_looking(self) -> None:
        """Take no notice of what happens to those generators before the next evaluation: somebody puts them back."""
        self._host = None

    def call(self, closure: Closure, sample: Sample, *, graph: bool = True) -> Tensor:
        """Run a closure and reject what is no loss, or one that has called backward() already."""
        loss = closure()
        self.look_for_draws()
        if any(leaf.grad is not None for leaf in self.layout.leaves):
            raise ArgumentError(
                f"{sample.name} called backward(): only return the loss, the optimiser differentiates it itself."
            )
        return check_loss(loss, sample.name, graph=graph)

    def _first_order(self, loss: Tensor, *, create_graph: bool) -> Sequence[Tensor | None]:
        if create_graph and self.inspect:
            self.inspect = False
            refuse_once_differentiable(loss)
        grads: Sequence[Tensor | None] = torch.autograd.grad(
            loss, self.layout.leaves, create_graph=create_graph, allow_unused=True
        )
        return grads

    def hessian(self, x: Vector) -> Operator:
        gradient, sample, _ = self._samples
        mode: HvpMode | None = self.hvp
        if mode == "auto":
            mode = fastest(self, x, sample, shared=sample is gradient and len(sample.parts) == 1)
            self.hvp = mode or self.hvp
        return OPERATORS[mode or REFERENCE](self, x, sample)

    def knows(self, x: Vector) -> tuple[bool, bool]:
        gradient = self._gradients is not None and self._gradients[0] is x
        return (self._samples[2], x) in self._values, gradient

    def take_graph(self, x: Vector) -> tuple[GradientEdge | None] | None:
        """Hand over the graph that the gradient pass built at `x`, if it built one."""
        graph, self._graph = self._graph, None
        return graph[1:] if graph is not None and graph[0] is x else None

    @property
    def moves_buffers(self) -> bool:
        """Whether the gradient pass met buffers that it may have moved."""
        return self._training is not None and self._training.some

    def undo_training(self) -> None:
        """Put back the buffers that the gradient pass moved, because its step is not one."""
        if self._training is not None:
            self._training.put_back()

    def close(self) -> None:
        """Drop every graph and cached point."""
        self._graph = None
        self._gradients = None
        self._values.clear()


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
