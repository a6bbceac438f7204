"""f, g and Hv of a torch loss by automatic differentiation.

The loss is a closure over leaf tensors: the parameters of a model, or the argument of a plain function. Points are flat
vectors. Only `load` writes a point into the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sanc.autograd.buffers import FORWARD_HOOK, Buffers, RestoredBuffers
from sanc.autograd.leaves import Closure, Grads, Leaves, PartMoments, Sample
from sanc.autograd.passes import ClosurePasses
from sanc.autograd.products import HVP_MODES, OPERATORS, OptimizerHvpMode
from sanc.autograd.vector_work import CALLED, VectorWork
from sanc.core.caching import RecentCache
from sanc.core.meter import Meter
from sanc.core.oracle import Operator
from sanc.core.saved import state_error
from sanc.core.space import Space
from sanc.errors import SecondDerivativeError, warn

MAX_OVERFLOW_CALLS = 64
"""How often to call a closure whose scaled gradients overflow before the first step. A gradient scaler halves its scale
after each overflow, so 64 calls lower it by a factor of 2^64."""


class AutogradOracle(ClosurePasses):
    """f, g and Hv of closures over leaf tensors.

    Attributes
    ----------
    space, meter, exact
        As in `Oracle`.
    leaves, hvp, style
        As in `ClosurePasses`.
    vector_work : VectorWork
        Does the vector work of averaged steps.
    raw_loss : Tensor or None
        Loss of the first gradient pass, without weight decay.
    reached : list of bool
        Which leaves the loss of the last gradient pass depends on.
    trained_buffers : Buffers or None
        The buffers of modules before the first gradient pass, the only one that counts as training.
    is_unused : bool
        Whether nothing was evaluated yet.
    loss_differentiates : bool
        Whether the loss calls `torch.autograd.grad`, so that values need a graph, too.
    module_calls : int
        Calls of modules in the last evaluation of a value.
    usual_module_calls : int
        Calls of modules in an evaluation without compiled code.
    """

    max_overflow_calls = MAX_OVERFLOW_CALLS
    vector_work: VectorWork = CALLED

    def __init__(
        self, leaves: Leaves, *, hvp: OptimizerHvpMode = "auto", meter: Meter | None = None, exact: bool = False
    ) -> None:
        super().__init__(leaves, hvp)
        self.space: Space = leaves.space()
        self.meter = meter or Meter()
        self.exact = exact
        self._samples: tuple[Sample, Sample, Sample] | None = None
        self.loss_differentiates = False
        self.is_unused = True
        self.reached = [False] * len(leaves.tensors)
        self.module_calls = 0
        self.usual_module_calls = 0
        self.unbind()

    def bind(self, gradient: Sample, hessian: Sample, objective: Sample) -> None:
        """Set the samples. Two samples that coincide should be one object, which saves evaluations."""
        self.unbind()
        self._samples = (gradient, hessian, objective)

    def unbind(self) -> None:
        """Release the samples, the graph and all cached values and gradients."""
        self._samples = None
        self._loaded: Tensor | None = None
        self._values: dict[Sample, RecentCache[float]] = {}
        self._gradients: RecentCache[tuple[float, Any]] = RecentCache(1)
        self._graph: tuple[Tensor, Grads] | None = None
        self.raw_loss: Tensor | None = None
        self.trained_buffers: Buffers | None = None

    @property
    def has_samples(self) -> bool:
        """Whether samples are set."""
        return self._samples is not None

    @property
    def samples(self) -> tuple[Sample, Sample, Sample]:
        """The samples of the gradient, the Hessian and the objective."""
        assert self._samples is not None
        return self._samples

    @property
    def sizes(self) -> tuple[int, int, int]:
        g, h, f = self.samples
        return g.size, h.size, f.size

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return self.leaves.shapes

    @property
    def differenced_products(self) -> bool:
        return self.hvp == "finite-difference"

    def begin(self, iteration: int, *, products: bool = True) -> None:
        self._products = products

    def numbers(self) -> dict[str, Any]:
        return {"hvp": self.hvp}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        if not isinstance(numbers["hvp"], str) or numbers["hvp"] not in HVP_MODES:
            raise state_error("resume['oracle']['hvp']", numbers["hvp"], f"one of {HVP_MODES}")
        if self.hvp == "auto":
            self.hvp = numbers["hvp"]

    # Points.

    def read_point(self) -> Tensor:
        """Read the leaves into a new flat vector, which becomes the loaded point, and return it."""
        self._loaded = self.leaves.read()
        return self._loaded

    def load(self, x: Any) -> None:
        """Write a point into the leaves, unless they hold it already."""
        if self._loaded is not x:
            self._loaded = self._graph = None  # the graph belongs to the old values
            self.leaves.write(x)
            self._loaded = x

    # Buffers.

    def restored_buffers(self) -> RestoredBuffers:
        """Return a context that restores the buffers of modules at its end."""
        self.is_unused = False
        return RestoredBuffers(self._owners)

    @property
    def trains_buffers(self) -> bool:
        """Whether a module with buffers that ran before is in training mode."""
        return any(module.training for module in self._owners)

    # Values.

    def value(self, x: Any) -> float:
        return self._value(x, self.samples[2])

    def gradient_sample_value(self, x: Any) -> float:
        return self._value(x, self.samples[0])

    def _value(self, x: Any, sample: Sample) -> float:
        return self._values.setdefault(sample, RecentCache()).get(x, lambda x: self.evaluate(x, sample))

    def evaluate(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        """Return f(x) on a sample, with the random draws of its seed and unchanged buffers."""
        return self.evaluate_locally(x, sample, graph=graph)

    def check(self, closure: Callable[[], None]) -> None:
        """Call a function that raises if a sample is invalid; with several ranks, all raise if one does."""
        closure()

    def evaluate_locally(self, x: Any, sample: Sample, *, graph: bool = False) -> float:
        """Return f(x) on a sample of this process."""
        self.load(x)
        try:
            total = self.forward(sample, graph=graph)
        except RuntimeError as error:
            if graph or self.loss_differentiates or "does not require grad" not in str(error):
                raise
            self.loss_differentiates = True  # for example a gradient penalty or a physics-informed loss
            total = self.forward(sample)
        self.meter.count_value(sample.size)
        return float(self.leaves.penalised(total, x))

    def forward(self, sample: Sample, *, graph: bool = False) -> Tensor:
        """Return the loss of a sample at the values of the leaves, without decay, as a tensor on the device."""
        total: Any = 0.0
        with_graph = graph or self.loss_differentiates or self.style == "backward"
        with self.restored_buffers() as buffers, torch.set_grad_enabled(with_graph):
            self._seed(sample)
            for weight, closure in sample.parts:
                evaluate_part = partial(self._value_pass, closure, sample.name)
                (loss,) = self._repeatable(evaluate_part, sample, f"value of {sample.name}")
                total = total + weight * loss.detach().double()
                self._pop_grads()
        self._owners.update(buffers.owners)
        self.module_calls = buffers.calls
        assert isinstance(total, Tensor)
        return total

    def _value_pass(self, closure: Closure, name: str) -> tuple[Tensor]:
        """Return the loss of a closure as a tuple of one entry."""
        with self._compilation(False):
            return (self._loss(closure, name, graph=False),)

    # Gradients.

    def gradient(self, x: Any) -> tuple[float, Any]:
        return self._gradients.get(x, self._gradient)

    def _gradient(self, x: Any) -> tuple[float, Any]:
        """Return f(x) and ∇f(x), and cache the value."""
        unread, g = self.unread_gradient(x)
        return self._values.setdefault(self.samples[0], RecentCache()).put(x, float(unread)), g

    def unread_gradient(self, x: Any) -> tuple[Any, Tensor]:
        """Make the gradient pass. Return f(x) and ∇f(x) as tensors on the device, without synchronising it.

        The first pass since the samples were bound counts as training, and keeps `raw_loss` and `trained_buffers`.
        """
        sample, hessian, _ = self.samples
        double_backward = self.hvp in ("auto", "double-backward")
        keep_graph = self._products and sample is hessian and double_backward and len(sample.parts) == 1
        self.load(x)
        buffers: Buffers = self.restored_buffers()
        if self.trained_buffers is None:
            # This pass counts as training: it changes buffers as a plain forward pass does.
            buffers = self.trained_buffers = Buffers(self._owners)
        with buffers:
            try:
                loss, g = self._loss_and_gradient(x, sample, keep_graph)
            except SecondDerivativeError as error:
                keep_graph = self.avoid_compiled(error)
                if not keep_graph:
                    self.fall_back(error)
                buffers.restore()  # the pass that failed does not count as training
                loss, g = self._loss_and_gradient(x, sample, keep_graph)
        if buffers.calls < self.usual_module_calls:
            FORWARD_HOOK.is_permanent = True  # compiled code ran the other modules
        if self.raw_loss is None:
            self.raw_loss = loss
        self.meter.count_gradient(sample.size)
        return self.leaves.penalised(loss, x), self.leaves.add_decay(g, x)

    def work_at_gradient(self, work: Any, inputs: Any) -> list[Any]:
        """Return ``work(f, ∇f, inputs)``, with f and ∇f at ``work.gradient_point(inputs)``; they stay on the device.

        `work` is an `AveragedStep` of `sanc.minibatch.averaging`, and `inputs` are its `StepInputs`.
        """
        return self.vector_work.step(work, *self.unread_gradient(work.gradient_point(inputs)), inputs)

    def fall_back(self, error: SecondDerivativeError) -> None:
        """Change hvp from "auto" to differences of gradients, with a warning; raise the error for any other hvp."""
        if self.hvp != "auto":
            raise error
        self.hvp = "finite-difference"
        warn(
            f"{error} From now on, Hessian products are differences of gradients, which are not exact; "
            'with hvp="double-backward" this is an error.',
            RuntimeWarning,
        )

    def sample_gradient(self, x: Any, sample: Sample) -> Tensor:
        """Return ∇f(x) on any sample, as a new vector."""
        if sample is self.samples[0]:
            return self.gradient(x)[1].clone()  # type: ignore[no-any-return]
        self.load(x)
        with self.restored_buffers(), torch.enable_grad():
            _, g = self._loss_and_gradient(x, sample, False)
        self.meter.count_gradient(sample.size)
        return self.leaves.add_decay(g, x)

    def part_moments(self, x: Any, sample: Sample) -> PartMoments:
        """Return loss and gradient of a sample, without decay, and how the gradients of its parts differ."""
        value, mean_square, total = 0.0, 0.0, torch.zeros_like(x)
        self.load(x)
        with self.restored_buffers(), torch.enable_grad():
            for weight, loss, grads in self.passes(sample):
                g = self.leaves.flatten(grads)
                value += weight * float(loss.detach())
                mean_square += weight * self.space.norm(g) ** 2
                total.add_(g, alpha=weight)
                del g, grads, loss  # these variables would keep them during the next pass
        self.meter.count_gradient(sample.size)
        return PartMoments(value, total, mean_square, len(sample.parts))

    def undo_training(self) -> None:
        """Restore the buffers that the first gradient pass changed, because its step does not count as training."""
        if self.trained_buffers is not None:
            self.trained_buffers.restore()

    def _loss_and_gradient(self, x: Tensor, sample: Sample, keep_graph: bool) -> tuple[Tensor, Tensor]:
        """Run the passes of a sample. Return its loss and gradient, without decay, and keep which leaves they reach.

        `keep_graph`, which needs a sample of one part, keeps the graph of the gradient too.
        """
        total: Any = None
        g: Tensor | None = None
        self.reached = [False] * len(self.leaves.tensors)
        for weight, loss, grads in self.passes(sample, create_graph=keep_graph):
            self.reached = [reached or grad is not None for reached, grad in zip(self.reached, grads, strict=True)]
            if keep_graph and self.style != "backward":
                self._graph = (x, grads)
            part = self.leaves.flatten(grads)
            part = part if weight == 1.0 else part.mul_(weight)
            value = weight * loss.detach()
            total, g = (value, part) if g is None else (total + value, g.add_(part))
        assert g is not None
        return total, g

    def pop_graph(self, x: Any, sample: Sample) -> Grads | None:
        """Return the graph of the gradient pass at `x` on this sample and drop it; None if it was not kept."""
        graph, self._graph = self._graph, None
        return graph[1] if graph is not None and graph[0] is x and sample is self.samples[0] else None

    # Products.

    def hessian(self, x: Any) -> Operator:
        return OPERATORS[self.hvp](self, x, self.samples[1])

    def is_cached(self, x: Any) -> tuple[bool, bool]:
        return x in self._values.get(self.samples[2], ()), x in self._gradients
