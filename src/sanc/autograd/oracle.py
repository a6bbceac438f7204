"""f, g and Hv of a torch loss by automatic differentiation.

The loss is a closure over leaf tensors, which is how both a model's parameters and the argument of a plain function
look from here. Points are flat vectors; `load` writes one into the leaves, and nothing else does.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sanc.autograd import internals
from sanc.autograd.leaves import Closure, Grads, Leaves, Sample
from sanc.autograd.precision import callers_precision
from sanc.autograd.products import HVP_MODES, OPERATORS, HvpMode, no_second_derivative
from sanc.autograd.randomness import HOOK, Buffers, StillBuffers, seed_all
from sanc.core.interrupts import interruptible
from sanc.core.oracle import Meter, Operator, Oracle, Recent
from sanc.core.saved import refuse
from sanc.core.space import Space
from sanc.errors import ArgumentError, ArgumentTypeError, SecondDerivativeError, shown


class AutogradOracle(Oracle):
    """f, g and Hv of closures over leaf tensors.

    Attributes
    ----------
    raw_loss : Tensor or None
        Loss of the first gradient pass, without weight decay.
    reached : list of bool
        Which leaves the loss of the last gradient pass depends on.
    training : Buffers or None
        What the buffers of modules held before that pass, which is the one that counts as training.
    """

    tries = 64
    """How often a closure whose scaled gradients overflow is called before the first step: it may lower the scale."""

    def __init__(
        self, leaves: Leaves, *, hvp: HvpMode = "auto", meter: Meter | None = None, exact: bool = False
    ) -> None:
        self.leaves = leaves
        self.space: Space = leaves.space()
        self.meter = meter or Meter()
        self.exact = exact
        self.hvp: str = hvp
        self._samples: tuple[Sample, Sample, Sample] | None = None
        self._inspected = False  # whether a graph was searched for functions that are differentiable once only
        self.style = ""  # "backward" where closures call backward() themselves, "loss" where not; "": not seen yet
        self._differentiates = False  # whether the loss differentiates something itself, so that values need a graph
        self._products = True
        self.fresh = True  # whether nothing was evaluated yet
        self.reached = [False] * len(leaves.tensors)
        self.calls = 0  # of modules, that the last evaluation made
        self.usual_calls = 0  # those of an evaluation that ran as it is written
        self._owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with buffers that were seen to run
        self.unbind()

    def bind(self, gradient: Sample, hessian: Sample, objective: Sample) -> None:
        """Answer on these samples from now on; the same object where two coincide, which saves work."""
        self.unbind()
        self._samples = (gradient, hessian, objective)

    def unbind(self) -> None:
        """Let go of the samples, of every graph and of every point that is remembered."""
        self._samples = None
        self._loaded: Tensor | None = None
        self._values: dict[Sample, Recent[float]] = {}
        self._gradients: Recent[tuple[float, Any]] = Recent(1)
        self._graph: tuple[Tensor, Grads] | None = None
        self.raw_loss: Tensor | None = None
        self.training: Buffers | None = None

    @property
    def bound(self) -> bool:
        """Whether it answers now."""
        return self._samples is not None

    @property
    def samples(self) -> tuple[Sample, Sample, Sample]:
        """Those of the gradient, the Hessian and the objective."""
        assert self._samples is not None
        return self._samples

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = self.samples
        return g.size, h.size, f.size

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return self.leaves.shapes

    def begin(self, iteration: int, *, products: bool = True) -> None:
        self._products = products

    def numbers(self) -> dict[str, Any]:
        return {"hvp": self.hvp}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        if not isinstance(numbers["hvp"], str) or numbers["hvp"] not in HVP_MODES:
            raise refuse("resume['oracle']['hvp']", numbers["hvp"], f"one of {HVP_MODES}")
        if self.hvp == "auto":
            self.hvp = numbers["hvp"]

    # ------------------------------------------------------------------ points

    def start(self) -> Tensor:
        """Gather the leaves into the flat vector that stands for the current point."""
        self._loaded = self.leaves.read()
        return self._loaded

    def load(self, x: Any) -> None:
        """Write a point into the leaves, unless it is there already."""
        if self._loaded is not x:
            self._loaded = self._graph = None  # a graph that was built on the old content is void
            self.leaves.write(x)
            self._loaded = x

    # ------------------------------------------------------------------ buffers

    def still(self) -> StillBuffers:
        """Return a context that puts the buffers of modules back."""
        self.fresh = False
        return StillBuffers(self._owners)

    @property
    def trains_buffers(self) -> bool:
        """Whether modules with buffers that were seen to run are in training mode."""
        return any(module.training for module in self._owners)

    # ------------------------------------------------------------------ values

    def value(self, x: Any) -> float:
        return self._value(x, self.samples[2])

    def trial(self, x: Any) -> float:
        return self._value(x, self.samples[0])

    def _value(self, x: Any, sample: Sample) -> float:
        return self._values.setdefault(sample, Recent()).answer(x, lambda x: self.evaluate(x, sample))

    def evaluate(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        """f(x) on a sample, with its randomness replayed and no buffer moved."""
        return self.evaluate_here(x, sample, graph=graph)

    def check(self, closure: Callable[[], None]) -> None:
        """Call what raises where something is wrong with a sample; where it does for one process it does for all."""
        closure()

    def evaluate_here(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        """f(x) on a sample of this process."""
        self.load(x)
        try:
            total = self.forward(sample, graph=graph)
        except RuntimeError as problem:
            if graph or self._differentiates or "does not require grad" not in str(problem):
                raise
            self._differentiates = True  # a gradient penalty, a physics-informed loss
            total = self.forward(sample)
        self.meter.count_value(sample.size)
        return float(self.leaves.penalised(total, x))

    def forward(self, sample: Sample, *, graph: bool = False) -> Tensor:
        """Evaluate a sample's loss at whatever the leaves hold, without decay; unread."""
        total: Any = 0.0
        with_graph = graph or self._differentiates or self.style == "backward"
        with self.still() as buffers, torch.set_grad_enabled(with_graph):
            self._rewind(sample)
            for weight, closure in sample.parts:
                total = total + weight * self._loss(closure, sample.name, graph=False).detach().double()
                self._take_grads()
        self._owners.update(buffers.owners)
        self.calls = buffers.calls
        assert isinstance(total, Tensor)
        return total

    # ------------------------------------------------------------------ gradients

    def gradient(self, x: Any) -> tuple[float, Any]:
        return self._gradients.answer(x, self._gradient)

    def _gradient(self, x: Any) -> tuple[float, Any]:
        """Read the value that comes with a gradient, and remember it."""
        unread, g = self.unread_gradient(x)
        return self._values.setdefault(self.samples[0], Recent()).put(x, float(unread)), g

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        """F and ∇f on the gradient sample; the value not yet read."""
        sample, hessian, _ = self.samples
        twice = self.hvp in ("auto", "double-backward")
        keep = self._products and sample is hessian and twice and len(sample.parts) == 1
        self.load(x)
        buffers: Buffers = self.still()
        if self.training is None:  # the pass that counts as training: buffers move, as in a plain forward pass
            buffers = self.training = Buffers(self._owners)
        with buffers:
            try:
                loss, g = self._sum(x, sample, keep)
            except SecondDerivativeError as problem:
                self.fall_back(problem)
                loss, g = self._sum(x, sample, False)
        if buffers.calls < self.usual_calls:
            HOOK.stays = True  # compiled code ran the others
        if self.raw_loss is None:
            self.raw_loss = loss
        self.meter.count_gradient(sample.size)
        return self.leaves.penalised(loss, x), self.leaves.add_decay(g, x)

    def advance(self, work: Any, x: Any, offset: Any, *tensors: Any) -> list[Any]:
        """Return ``work(f, ∇f, x, offset, *tensors)`` with the gradient where the work takes it; f is not read."""
        return list(work(*self.unread_gradient(work.point(x, offset)), x, offset, *tensors))

    def fall_back(self, problem: SecondDerivativeError) -> None:
        """Where hvp is "auto", make differences of gradients from now on, and say so; elsewhere it is an error."""
        if self.hvp != "auto":
            raise problem
        self.hvp = "finite-difference"
        warnings.warn(
            f"{problem} From here on products are differences of gradients, which are not exact; "
            'hvp="double-backward" makes this an error.',
            RuntimeWarning,
            stacklevel=2,
        )

    def sample_gradient(self, x: Any, sample: Sample) -> Tensor:
        """∇f on any sample, as a fresh vector."""
        if sample is self.samples[0]:
            return self.gradient(x)[1].clone()  # type: ignore[no-any-return]
        self.load(x)
        with self.still(), torch.enable_grad():
            _, g = self._sum(x, sample, False)
        self.meter.count_gradient(sample.size)
        return self.leaves.add_decay(g, x)

    def undo_training(self) -> None:
        """Put back the buffers that the pass moved which counts as training, because its step is not one."""
        if self.training is not None:
            self.training.put_back()

    def _sum(self, x: Tensor, sample: Sample, keep: bool) -> tuple[Tensor, Tensor]:
        """Return loss and gradient of a sample, without decay; `keep` keeps the graph, of which there is one."""
        total: Any = None
        g: Tensor | None = None
        self.reached = [False] * len(self.leaves.tensors)
        for weight, loss, grads in self.passes(sample, create_graph=keep):
            self.reached = [found or grad is not None for found, grad in zip(self.reached, grads, strict=True)]
            if keep and self.style != "backward":
                self._graph = (x, grads)
            part = self.leaves.flatten(grads)
            part = part if weight == 1.0 else part.mul_(weight)
            value = weight * loss.detach()
            total, g = (value, part) if g is None else (total + value, g.add_(part))
        assert g is not None
        return total, g

    def passes(self, sample: Sample, *, create_graph: bool = False) -> Iterator[tuple[float, Tensor, Grads]]:
        """Weight, loss and per-leaf gradients of each part of a sample, at whatever the leaves hold."""
        self._rewind(sample)
        for weight, closure in sample.parts:
            loss = self._loss(closure, sample.name)
            if self.style == "backward":
                yield weight, loss, self._take_grads()
                continue
            grads = self.differentiate(loss, create_graph)
            if all(grad is None for grad in grads):
                raise ArgumentError(
                    f"{sample.name} returned a loss that reaches none of this optimiser's parameters: pass those of "
                    "the model that it is computed from, and check that nothing cuts the graph (detach, a reentrant "
                    "checkpoint)."
                )
            yield weight, loss, grads
            del grads  # a name of ours would keep the graph of the last part alive

    def differentiate(self, loss: Tensor, create_graph: bool) -> Grads:
        """Return the gradients of a loss, one for each leaf."""
        if create_graph and not self._inspected:
            name = internals.once_differentiable(loss)
            if name:
                raise no_second_derivative(f"{name} (marked once_differentiable)")
            self._inspected = True
        return torch.autograd.grad(loss, self.leaves.tensors, create_graph=create_graph, allow_unused=True)

    def take_graph(self, x: Any, sample: Sample) -> Grads | None:
        """Hand over the graph that the gradient pass built at `x`, if it built one on this sample."""
        graph, self._graph = self._graph, None
        return graph[1] if graph is not None and graph[0] is x and sample is self.samples[0] else None

    def _rewind(self, sample: Sample) -> None:
        """Put the random state back to where every evaluation of this sample starts."""
        if sample.seed is not None:
            seed_all(sample.seed, self.leaves.device)

    def _take_grads(self) -> Grads:
        """Take what a closure's own ``backward()`` left in the leaves out of them."""
        grads = [leaf.grad for leaf in self.leaves.tensors]
        for leaf in self.leaves.tensors:
            leaf.grad = None
        return grads

    def _loss(self, closure: Closure, name: str, *, graph: bool = True) -> Tensor:
        """Run a closure; reject what is no scalar that depends on the leaves.

        The first call shows whether closures call ``backward()`` themselves; later ones have to do as it did.
        """
        with interruptible(), callers_precision():
            loss = closure()
        called = any(leaf.grad is not None for leaf in self.leaves.tensors)
        if not self.style:
            self.style = "backward" if called else "loss"
            if called:
                self._only_first_derivatives(name)
        if called and self.style != "backward":
            raise ArgumentError(
                f"{name} called backward(), and the closures before only returned the loss: do one of the two in all."
            )
        if self.style == "backward" and not called:
            raise ArgumentError(
                f"{name} did not call backward(), or it reached no parameter, and the closures before did: call "
                "backward() in all of them, or in none."
            )
        graph = graph and not called
        if not isinstance(loss, Tensor):
            raise ArgumentTypeError(
                f"{name} returned {type(loss).__name__} ({shown(loss)}): return the mean loss as a tensor of one "
                "element, without .item()."
            )
        if loss.numel() != 1:
            raise ArgumentError(
                f"{name} returned a tensor of shape {tuple(loss.shape)}: return a scalar, for instance its mean()."
            )
        if not loss.is_floating_point():
            raise ArgumentTypeError(f"{name} returned a tensor of {loss.dtype}: return a real floating-point loss.")
        if graph and not loss.requires_grad:
            what = "x: compute it from x" if name == "fun" else "the parameters: compute it from the model inside it"
            raise ArgumentError(
                f"{name} returned a loss that does not depend on {what}, without torch.no_grad(), detach() or .data."
            )
        return loss.reshape(())

    def _only_first_derivatives(self, name: str) -> None:
        """Make products as differences of gradients, since a closure's own backward pass leaves no graph."""
        if self.hvp not in ("auto", "finite-difference"):
            raise ArgumentError(
                f"hvp = {self.hvp!r} cannot be used with a {name} that calls backward(): only return the loss, or "
                "leave hvp out."
            )
        self.hvp = "finite-difference"

    # ------------------------------------------------------------------ products

    def hessian(self, x: Any) -> Operator:
        return OPERATORS[self.hvp](self, x, self.samples[1])

    def knows(self, x: Any) -> tuple[bool, bool]:
        return x in self._values.get(self.samples[2], ()), x in self._gradients
