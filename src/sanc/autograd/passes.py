"""Passes through closures: losses, gradients and graphs of the micro-batches of a sample.

A pass calls one closure, in the precision of its caller and with the random draws of its sample. It checks what the
closure returned, and differentiates the loss by the leaves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sanc.autograd import internals
from sanc.autograd.batches import Batch
from sanc.autograd.buffers import RepeatableBuffers
from sanc.autograd.closures import call_closure, checked_loss, explained_error
from sanc.autograd.generators import seed_all
from sanc.autograd.guards import donates_buffers, uncompiled
from sanc.autograd.leaves import Closure, Grads, Leaves, Sample
from sanc.autograd.precision import callers_precision
from sanc.autograd.products import COMPILED, OutputGraph, no_second_derivative
from sanc.autograd.randomness import current_step
from sanc.core.interrupts import interruptible
from sanc.core.oracle import Oracle
from sanc.errors import ArgumentError, SecondDerivativeError

_Result = TypeVar("_Result", bound=tuple[Any, ...])


class ClosurePasses(Oracle):
    """The passes from which `AutogradOracle` computes values, gradients and products.

    Attributes
    ----------
    leaves : Leaves
        The layout of the leaf tensors in the flat vectors.
    hvp : str
        How torch computes the Hessian products.
    style : str
        "backward" if closures call backward() themselves, "loss" if they do not, "gradients" if steps have no closure,
        empty before the first step.
    """

    def __init__(self, leaves: Leaves, hvp: str) -> None:
        self.leaves, self.hvp, self.style = leaves, hvp, ""
        self._products = True  # whether the iteration computes Hessian products
        self._owners: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules with buffers that ran before
        self._inspected = False  # whether a graph was searched for once-differentiable functions
        self._avoids_compiled = False  # whether compiled code was found that cannot be differentiated twice

    def passes(
        self, sample: Sample, *, create_graph: bool = False, once: bool = False
    ) -> Iterator[tuple[float, Tensor, Grads]]:
        """Iterate over weight, loss and per-leaf gradients of each micro-batch of a sample, at the leaves.

        Each closure is called once if `once`; otherwise perhaps again, to find out whether it draws random numbers.
        """
        self._seed(sample)
        for weight, closure in sample.microbatches:
            evaluate_microbatch = partial(self._pass, closure, sample.name, create_graph)
            if once:
                loss, grads = evaluate_microbatch()
            else:
                loss, grads = self._repeatable(evaluate_microbatch, sample, f"gradient of {sample.name}")
            yield weight, loss, grads
            del grads  # this variable would keep the graph of the last micro-batch alive

    def _pass(self, closure: Closure, name: str, create_graph: bool) -> tuple[Tensor, Grads]:
        """Return the loss of a closure and its gradient with respect to each leaf."""
        with self._compilation(create_graph):
            loss = self._loss(closure, name)
            if self.style == "backward":
                return loss, self._pop_grads()
            grads = self.differentiate(loss, create_graph)
        if all(grad is None for grad in grads):
            raise ArgumentError(
                f"{name} returned a loss that reaches none of this optimiser's parameters: pass the parameters of the "
                "model that computes it, and check that nothing detaches it from them (detach(), a reentrant "
                "checkpoint)."
            )
        return loss, grads

    def differentiate(self, loss: Tensor, create_graph: bool) -> Grads:
        """Return the gradient of a loss with respect to each leaf."""
        if create_graph and not self._inspected:
            name = internals.once_differentiable(loss)
            if name:
                raise no_second_derivative(f"{name} (marked once_differentiable)")
            self._inspected = True
        try:
            return torch.autograd.grad(loss, self.leaves.tensors, create_graph=create_graph, allow_unused=True)
        except RuntimeError as error:
            if create_graph and donates_buffers(error):
                raise no_second_derivative(f"{COMPILED} with aot_autograd") from error
            if cause := explained_error(error):
                raise cause from error
            raise

    def output_graphs(self, sample: Sample) -> Iterator[tuple[float, OutputGraph]]:
        """Iterate over weight and graphs of each micro-batch of a sample of batches with outputs."""
        self._seed(sample)
        for weight, closure in sample.microbatches:
            evaluate_microbatch = partial(self._output_graph, closure, sample.name)
            (graph,) = self._repeatable(evaluate_microbatch, sample, f"outputs of {sample.name}")
            yield weight, graph

    def _output_graph(self, closure: Closure, name: str) -> tuple[OutputGraph]:
        """Return the graphs of a batch with outputs, as a tuple."""
        if not isinstance(closure, Batch) or closure.outputs is None:
            raise ArgumentError(
                f'{name} is no batch with outputs, which hvp = "gauss-newton" needs: pass sanc.Batch(loss, *tensors, '
                "outputs=...), or leave hvp out."
            )
        with self._compilation(True), interruptible(), callers_precision():
            output = closure.output()
            held = output.detach().requires_grad_()
            loss = closure.loss(held, *closure.tensors)
            has_graph = isinstance(loss, Tensor) and loss.requires_grad
            (output_gradient,) = (
                torch.autograd.grad(loss, held, create_graph=True, allow_unused=True) if has_graph else (None,)
            )
            if output_gradient is None:
                raise ArgumentError(
                    f"{name} has a loss that does not depend on the outputs: compute it from its first argument."
                )
            cotangent = torch.zeros_like(output, requires_grad=True)
            pullback = torch.autograd.grad(output, self.leaves.tensors, cotangent, create_graph=True, allow_unused=True)
        return (OutputGraph(output, held, output_gradient, cotangent, pullback),)

    def _loss(self, closure: Closure, name: str, *, graph: bool = True) -> Tensor:
        """Call a closure and return its loss; raise unless it is a scalar that depends on the leaves.

        The first call sets `style`: whether closures call ``backward()`` themselves. Later closures must do the same.
        """
        loss = call_closure(closure, name)
        called_backward = any(leaf.grad is not None for leaf in self.leaves.tensors)
        self._check_style(name, called_backward)
        return checked_loss(loss, name, needs_graph=graph and not called_backward)

    def _check_style(self, name: str, called_backward: bool) -> None:
        """Set the style at the first call; raise an error if a later closure has another one."""
        if not self.style:
            self.style = "backward" if called_backward else "loss"
            if called_backward:
                self._use_differences(name)
        if called_backward and self.style != "backward":
            raise ArgumentError(
                f"{name} called backward(), but earlier closures only returned the loss: do one of the two in all "
                "closures."
            )
        if self.style == "backward" and not called_backward:
            raise ArgumentError(
                f"{name} did not call backward(), or backward() reached no parameter, but earlier closures called it: "
                "call backward() in all closures, or in none."
            )

    def _use_differences(self, name: str) -> None:
        """Set hvp to differences of gradients, because the backward pass of a closure leaves no graph."""
        if self.hvp not in ("auto", "finite-difference"):
            raise ArgumentError(
                f"hvp = {self.hvp!r} cannot be used with a {name} that calls backward(): only return the loss, or "
                "leave hvp out."
            )
        self.hvp = "finite-difference"

    def _compilation(self, create_graph: bool) -> AbstractContextManager[None]:
        """Return a context in which compiled code runs as it was written if a product needs its graph.

        All evaluations of a step with products run so: compiled code rounds in another way, and draws other numbers.
        """
        return uncompiled() if self._avoids_compiled and (create_graph or self._products) else nullcontext()

    def avoid_compiled(self, error: SecondDerivativeError) -> bool:
        """Evaluate without compiled code where products need it; return whether that may solve the problem."""
        solves = error.operator.startswith(COMPILED) and not self._avoids_compiled
        self._avoids_compiled = self._avoids_compiled or solves
        return solves

    def _seed(self, sample: Sample) -> None:
        """Seed the random generators, as before every evaluation of this sample."""
        if sample.seed is None:
            return
        step = current_step()
        if step is None:
            seed_all(sample.seed, self.leaves.device)
        else:
            step.seed(sample.seed)

    def _repeatable(self, evaluate_microbatch: Callable[[], _Result], sample: Sample, kind: str) -> _Result:
        """Evaluate one micro-batch of a sample with the random draws of the sample's seed.

        `kind` names the evaluation: whether it draws random numbers is tested once for each kind.
        """
        step = current_step()
        if step is None or step.seeds_all or sample.seed is None:
            return evaluate_microbatch()
        with RepeatableBuffers(self._owners) as buffers:

            def undo() -> None:
                buffers.restore()
                self._pop_grads()

            return step.call(evaluate_microbatch, undo, sample.seed, kind)

    def _pop_grads(self) -> Grads:
        """Return the gradients that a closure's ``backward()`` computed, and remove them from the leaves."""
        grads = [leaf.grad for leaf in self.leaves.tensors]
        for leaf in self.leaves.tensors:
            leaf.grad = None
        return grads
