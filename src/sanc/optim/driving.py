"""Steps of an optimiser in three styles: closures that return the loss, closures that call backward(), and gradients.

The first step fixes the style for all later ones. The oracle calls the closures and detects whether they call
``backward()``.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from sanc.autograd.batches import Batch
from sanc.autograd.buffers import FORWARD_HOOK
from sanc.autograd.generators import derive_seed
from sanc.autograd.guards import accumulated_batches
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.masters import MasterValues
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.precision import callers_precision
from sanc.autograd.products import OptimizerHvpMode
from sanc.autograd.randomness import DrawTests, UndoneDraws, repeatable_draws
from sanc.autograd.vector_work import CALLED, VectorWork
from sanc.core.interrupts import interruptible, uninterrupted
from sanc.core.meter import Meter
from sanc.core.method import Method
from sanc.core.record import Record
from sanc.errors import ArgumentError, ArgumentTypeError, warn
from sanc.graphs.capture import Capture
from sanc.graphs.work import RecordedWork
from sanc.minibatch.iteration import MinibatchIteration
from sanc.minibatch.training import SecondOrderTraining, TrainingIteration
from sanc.optim.first_step import check_callable, check_closure
from sanc.ranks.modes import Mode

STYLES = {
    "": "not driven yet",
    "loss": "driven by closures that return the loss",
    "backward": "driven by closures that call backward()",
    "gradients": "driven by gradients, without closures",
}
"""The styles, and how `repr` describes each."""


class Driver:
    """Makes the steps of an optimiser, in the style of the first step.

    Attributes
    ----------
    method : Method
        The pieces that steps are composed from.
    hvp : str
        How Hessian products are computed, as the caller passed it; the oracle may use another mode.
    microbatch : int or None
        Largest number of rows of a `Batch` that are in memory at a time; None: all.
    check : bool
        Whether closures are checked before the first step.
    capture : Capture or None
        The CUDA graphs that replay steps with closures; None: all these steps are eager.
    vector_work : VectorWork
        Does the vector work of averaged steps, from CUDA graphs where possible.
    meter : Meter
        The counters of all steps.
    unreached : list of Tensor
        Parameters that the first loss does not reach; empty after the warning.
    mode : Mode
        How the work is distributed: one process, or the ranks of a group.
    iteration : TrainingIteration
        The iteration, with its state.
    oracle : AutogradOracle
        Evaluates the closures; it is kept from step to step.
    last_leaves : Leaves or None
        The leaves of the last step, which the vectors of the state belong to.
    at_average : bool
        Whether the parameters are the average; if not, they are the point at which gradients are taken.
    masters : MasterValues
        The float32 values of parameters of bfloat16 and float16.
    """

    def __init__(
        self,
        method: Method,
        leaves: Leaves,
        *,
        hvp: OptimizerHvpMode,
        microbatch: int | None,
        capture: bool | None,
        check: bool,
        seed: int,
        mode: Mode,
    ) -> None:
        self.method, self.mode = method, mode
        leaves.masters = self.masters = MasterValues()
        self.hvp = hvp
        self.microbatch, self.check = microbatch, check
        self.meter = Meter()
        self._record: Record | None = None
        self.last_leaves: Leaves | None = None
        self._warned_of_train_mode = False  # whether the warning about saving in train mode was given
        self.at_average = True
        self._evaluates_first = False  # whether eval() was called last before the first step
        self._draw_tests: dict[str, DrawTests] = {}  # by global generator: whether closures draw from it
        self.unreached: list[Tensor] = []
        self._clears_grads = False  # whether the closure has cleared gradients itself
        # Gradients from before this optimiser was constructed, by parameter.
        earlier_grads = {id(leaf): leaf.grad for leaf in leaves.tensors if leaf.grad is not None}
        self._earlier_grads = weakref.WeakValueDictionary(earlier_grads)
        self.oracle = self._new_oracle(leaves, hvp, "")
        self.iteration: TrainingIteration
        if method.on_samples:
            self.iteration = MinibatchIteration(method, seed, mode.preconditioner)
        else:
            self.iteration = SecondOrderTraining(method, seed)
        self.capture = Capture(method) if capture else None
        self.vector_work: VectorWork = CALLED
        if capture is not False and not mode.is_distributed:
            self.vector_work = RecordedWork(requested=capture is True)

    def __getstate__(self) -> dict[str, Any]:
        oracle = self.oracle.leaves, self.oracle.hvp, self.oracle.style
        return self.__dict__ | {"oracle": oracle, "_earlier_grads": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.oracle = self._new_oracle(*state["oracle"])

    def _new_oracle(self, leaves: Leaves, hvp: str, style: str) -> AutogradOracle:
        """Return an oracle without samples, which counts in the meter of this optimiser."""
        oracle = self.mode.oracle(leaves, hvp=cast(OptimizerHvpMode, hvp), meter=self.meter, exact=self.method.exact)
        oracle.style = style
        return oracle

    def leaves(self, tensors: Sequence[Tensor], decays: Sequence[float], rates: Sequence[float] = ()) -> Leaves:
        """Return the flat layout of parameters, with the master values of this optimiser."""
        leaves = self.mode.leaves(tensors, decays, rates)
        leaves.masters = self.masters
        return leaves

    @property
    def record(self) -> Record | None:
        """The record of the last step; a GPU may have to finish the step first."""
        late_record = self.iteration.read_record()
        if late_record is not None:
            self._record = replace(late_record, style="gradients")
        return self._record

    def clear_record(self) -> None:
        """Delete the record, since the state of another run was restored."""
        self._record = None

    @property
    def without_closures(self) -> bool:
        """Whether steps have no closure."""
        return self.oracle.style == "gradients"

    # Steps with closures.

    def step(self, closures: tuple[Any, Any, Any], leaves: Leaves, parameters: Sequence[Tensor]) -> Tensor:
        """Make an iteration on the samples of gradient, Hessian and objective, and return the loss.

        `closures` belong to the three samples; None for the second or third means the first. `parameters` are those of
        all groups, also the frozen ones.
        """
        if self.without_closures:
            raise ArgumentError(
                "closure cannot be used: earlier steps had none. Construct another optimiser to step with closures."
            )
        if self.oracle.has_samples:
            raise ArgumentError("closure calls step() of the optimiser that called it: only compute the loss in it.")
        samples = self._samples(closures)
        first = self.iteration.state.iteration == 0
        self._check_unused_gradients(closures[0], leaves)
        with _replaced_grads(parameters, [None] * len(parameters)), torch.enable_grad():
            captured = None
            if self.capture is not None and self.oracle.style != "backward":
                captured = self.capture.oracle(closures, leaves, self.oracle.hvp, self.microbatch, first=first)
            if captured is not None:  # its loss draws no random numbers
                captured.fill(closures, self.meter)
                captured.vector_work = self.vector_work
                return self._iterate(captured, leaves.rates)
            repeats = not self.mode.is_distributed  # ranks evaluate together, so that none may repeat a call
            with repeatable_draws(leaves.device, self._draw_tests, repeats=repeats), FORWARD_HOOK:  # one for all calls
                loss = self._iterate(self._bind_oracle(leaves, samples), leaves.rates)
        if first:
            reached = zip(leaves.tensors, self.oracle.reached, strict=True)
            self.unreached = [leaf for leaf, is_reached in reached if not is_reached]
        return loss

    def _check_unused_gradients(self, closure: Callable[[], Tensor], leaves: Leaves) -> None:
        """Raise an error if gradients were accumulated or clipped before the step, which would not use them.

        Gradients from before the optimiser was constructed belong to another loop and are accepted. A closure that
        clears gradients itself, as `torch.optim.LBFGS` needs it, does not use them either.
        """
        batches = accumulated_batches(leaves.tensors)
        if batches > 1:
            raise ArgumentError(
                f"closure cannot be used while accelerate accumulates over {batches} batches: it skips the steps in "
                "between together with their closures. Call accelerator.backward(loss) and step() without a closure, "
                "or set gradient_accumulation_steps = 1."
            )
        new = [p for p in leaves.tensors if p.grad is not None and p.grad is not self._earlier_grads.get(id(p))]
        if self._clears_grads or not any(bool(leaves.local_tensor(cast(Tensor, p.grad)).any()) for p in new):
            return
        self._clears_grads = not isinstance(closure, Batch) and self._closure_clears(new, closure, leaves)
        if not self._clears_grads:
            raise ArgumentError(
                "parameters hold gradients from before the step, which a step with a closure does not use. If they are "
                "left over, call zero_grad() first. If they were accumulated, step without a closure; in Lightning "
                "leave accumulate_grad_batches at 1, or use manual optimisation with manual_backward(loss) and step(). "
                "To clip them, call zero_grad(), backward() and clip_grad_norm_() inside the closure."
            )

    def _closure_clears(self, parameters: Sequence[Tensor], closure: Callable[[], Tensor], leaves: Leaves) -> bool:
        """Call the closure with gradients of NaN, and return whether it clears them; nothing else changes."""
        nan_grads = [torch.full_like(p, math.nan) for p in parameters]
        with (
            _replaced_grads(parameters, nan_grads),
            UndoneDraws(leaves.device),
            self.oracle.restored_buffers(),
            torch.enable_grad(),
        ):
            with interruptible(), callers_precision():
                closure()
            grads = [leaves.local_tensor(p.grad) for p in parameters if p.grad is not None]
            return not any(bool(grad.isnan().any()) for grad in grads)

    def _samples(self, closures: tuple[Any, Any, Any]) -> list[Sample]:
        """Return the samples of gradient, Hessian and objective; by default the gradient sample."""
        samples: list[Sample] = []
        for role, (name, closure) in enumerate(zip(("closure", "hessian", "objective"), closures, strict=True)):
            if closure is None and role > 0:
                samples.append(samples[0])
                continue
            if self.iteration.state.iteration == 0 or not callable(closure):
                check_callable(name, closure)
            seed = derive_seed(self.iteration.state.seed, self.iteration.state.iteration, role, *self.mode.rank_key)
            if isinstance(closure, Batch):
                # The weight of the batch among the batches of all ranks.
                terms = closure.terms() if self.mode.is_distributed else None
                samples.append(Sample(name, closure.parts(self.microbatch), len(closure), seed, terms))
            elif self.microbatch is not None:
                raise ArgumentTypeError(
                    f"{name} is a plain function, which microbatch = {self.microbatch} cannot cut: pass "
                    "sanc.Batch(loss, *tensors)."
                )
            else:
                samples.append(Sample(name, [(1.0, closure)], 1, seed))
        return samples

    def _bind_oracle(self, leaves: Leaves, samples: list[Sample]) -> AutogradOracle:
        """Bind the oracle of this optimiser to these samples and return it."""
        if not leaves.matches(self.oracle.leaves) or leaves.decays != self.oracle.leaves.decays:
            self.oracle = self._new_oracle(leaves, self.oracle.hvp, self.oracle.style)
        self.oracle.meter, self.oracle.vector_work = self.meter, self.vector_work
        self.oracle.bind(*samples)
        return self.oracle

    def _iterate(self, oracle: AutogradOracle, rates: Sequence[float]) -> Tensor:
        """Make one iteration and return the loss; after an exception nothing has changed.

        `rates` are the factors of the step size, one for each parameter.
        """
        x = point = oracle.read_point()
        iteration, last_leaves = self.iteration, self.last_leaves
        meter, snapshot, style_and_hvp = replace(self.meter), iteration.snapshot(), (self.oracle.style, self.oracle.hvp)
        masters = self.masters.values
        try:
            first = iteration.state.iteration == 0
            if oracle is self.oracle and (first or oracle.is_unused):
                self._check_closures(oracle, x, first=first)
            self._adapt_to(oracle.leaves, x)
            point, record = iteration.iterate(x, oracle, rates=rates)  # type: ignore[assignment]
            if iteration.has_returned or not (math.isfinite(record.grad_norm) and math.isfinite(record.value)):
                oracle.undo_training()
        except BaseException:
            oracle.undo_training()
            iteration.roll_back(snapshot)
            self.last_leaves, self.meter, self.masters.values = last_leaves, meter, masters
            self.oracle.style, self.oracle.hvp = style_and_hvp
            raise
        finally:
            oracle.load(point)
            loss = oracle.raw_loss
            oracle.unbind()
        self._record = replace(record, style=self.oracle.style)
        assert loss is not None
        return loss

    def _adapt_to(self, leaves: Leaves, x: Tensor) -> None:
        """If the trainable parameters differ from the last step's, keep the state of those that stay."""
        last, self.last_leaves = self.last_leaves, leaves
        if last is not None and last.matches(leaves):
            return
        self.masters.keep_only(leaves.tensors)
        earlier_indices = [] if last is None else leaves.indices_in(last)
        if last is None or all(index is None for index in earlier_indices):
            self.iteration.reset()
            return

        def vector_map(vector: Tensor | None, fill: Tensor) -> Tensor:
            """Return the parts of a vector that belong to leaves that stay, and those of `fill` for the others."""
            parts = None if vector is None else last.split(vector)
            new_parts = []
            for index, new in zip(earlier_indices, leaves.split(fill), strict=True):
                new_parts.append(new if index is None else torch.zeros_like(new) if parts is None else parts[index])
            return torch.cat([part.reshape(-1) for part in new_parts])

        self.iteration.rearrange(earlier_indices, vector_map, x, leaves.shapes)

    def _check_closures(self, oracle: AutogradOracle, x: Tensor, *, first: bool) -> None:
        """Check the closures before the first step, or with a new oracle; these evaluations are not counted."""
        oracle.meter = Meter()
        try:
            if self.check:
                check_closure(oracle, x, first=first)
            if first and self.iteration.averages and not self.iteration.state.averaged:
                # An operator without a second derivative raises here, not halfway through a step.
                operator = oracle.hessian(x)
                operator(torch.ones_like(x))
                operator.release()
        finally:
            oracle.meter = self.meter

    # Steps without a closure.

    def run_empty_closure(self, closure: Callable[[], Tensor | None], parameters: Sequence[Tensor]) -> bool:
        """Call a closure if gradients exist, and return whether it computed no loss.

        Lightning passes closures that compute none in some modes; its hooks may change gradients, such as clip them.
        """
        with_grad = [p for p in parameters if p.grad is not None]
        if (
            self.oracle.style not in ("", "gradients")
            or not with_grad
            or isinstance(closure, Batch)
            or not callable(closure)
        ):
            return False
        if self.without_closures:
            with interruptible(), callers_precision():
                return closure() is None
        grads = [cast(Tensor, p.grad) for p in with_grad]
        copies = [grad.clone() for grad in grads]  # a closure that computes a loss may change them
        _set_grads(with_grad, copies)
        with UndoneDraws(with_grad[0].device), self.oracle.restored_buffers(), interruptible(), callers_precision():
            is_empty = closure() is None and all(p.grad is copy for p, copy in zip(with_grad, copies, strict=True))
        if not is_empty:
            _set_grads(with_grad, grads)
        return is_empty

    @torch.no_grad()
    def step_on_gradients(self, leaves: Leaves) -> None:
        """Make an averaged step from the point where the gradients in ``.grad`` were taken."""
        self._require_gradients(leaves)
        iteration, last_leaves, at_average = self.iteration, self.last_leaves, self.at_average
        first = iteration.state.iteration == 0
        meter, snapshot, masters = replace(self.meter), iteration.snapshot(), self.masters.values
        moves = last_leaves is not None and last_leaves.intact and not last_leaves.matches(leaves)
        earlier_values = last_leaves.read() if last_leaves is not None and moves else None
        try:
            x, y = self._average_and_gradient_point(leaves)
            oracle = self.mode.gradient_oracle(leaves, y, self.meter)
            oracle.vector_work = self.vector_work
            point, record = iteration.iterate(x, oracle, rates=leaves.rates)
        except BaseException:
            iteration.roll_back(snapshot)
            self.last_leaves, self.at_average, self.meter = last_leaves, at_average, meter
            self.masters.values = masters
            if last_leaves is not None and earlier_values is not None:
                last_leaves.write(earlier_values)
            raise
        leaves.write(iteration.pop_gradient_point(point))  # type: ignore[arg-type]
        self.at_average = False
        self.oracle.style = "gradients"
        self._record = replace(record, style="gradients")
        if first:
            self.unreached = [leaf for leaf in leaves.tensors if leaf.grad is None]

    def _require_gradients(self, leaves: Leaves) -> None:
        """Raise an error unless a step without a closure is possible."""
        if not self.iteration.averages:
            raise ArgumentError(
                f"closure is missing: {self.method.name.upper()} with these settings needs values and Hessian "
                'products. Pass a function that returns the loss, or use SANC or SCR with preset="robust", without '
                "minibatch = None."
            )
        if self.oracle.style not in ("", "gradients"):
            raise ArgumentError(
                "closure is missing: earlier steps had one. Pass it again, or construct another optimiser to step "
                "without closures."
            )
        if all(leaf.grad is None for leaf in leaves.tensors):
            raise ArgumentError(
                "closure is missing and no parameter has a gradient: call loss.backward() before step()."
            )
        if self.at_average if self.without_closures else self._evaluates_first:
            raise ArgumentError("the parameters are at the average since eval(): call train() before the next pass.")

    def _average_and_gradient_point(self, leaves: Leaves) -> tuple[Any, Tensor]:
        """Return the average x and the point y of the gradients, after parameters have joined or left."""
        last = self.last_leaves
        if last is not None and last.matches(leaves):
            y = leaves.read()
            return self.iteration.average(y), y
        if last is not None and last.intact:
            self.move(at_average=True)  # parameters that are frozen from now on stay at the average
        x = leaves.read()
        self._adapt_to(leaves, x)
        return x, cast(Tensor, self.iteration.gradient_point(x))

    def warn_of_train_mode(self, call: str) -> None:
        """Warn once if a call saves the state while the parameters are not at the average."""
        if self.without_closures and not self.at_average and not self._warned_of_train_mode:
            self._warned_of_train_mode = True
            warn(
                f"{call} in train mode: the parameters are where gradients are taken, not at the "
                "average. Call eval() of the optimiser before you save or evaluate the model, and train() afterwards. "
                "The state of the optimiser resumes in either mode."
            )

    def compare_ranks(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise `RanksError` if the ranks, which all call this, differ in parameters, options, decisions or mode."""
        self.mode.compare(groups, self.iteration, at_average=self.at_average)

    def before_saving(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Prepare for saving the state. All ranks that share the parameters call this, after the same calls."""
        self.mode.before_saving(groups, self.iteration, at_average=self.at_average)
        if self.last_leaves is not None:
            self.iteration.before_saving(self.last_leaves.space())

    @uninterrupted
    @torch.no_grad()
    def move(self, *, at_average: bool) -> None:
        """Move the parameters to the average, or to the point of gradients; with closures nothing is moved.

        Before the first step both points are the same.
        """
        iteration = self.iteration
        self._evaluates_first = at_average
        if not self.without_closures or at_average is self.at_average:
            return
        assert self.last_leaves is not None
        current = self.last_leaves.read()
        target = cast(Tensor, iteration.average(current) if at_average else iteration.gradient_point(current))
        iteration.on_move(current, target, self.last_leaves.space())
        self.last_leaves.write(target)
        self.at_average = at_average


@contextmanager
def _replaced_grads(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Iterator[None]:
    """Replace ``.grad`` of these parameters inside the block, and restore it after."""
    saved_grads = [p.grad for p in parameters]
    try:
        _set_grads(parameters, grads)
        yield
    finally:
        _set_grads(parameters, saved_grads)


def _set_grads(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Set ``.grad`` of these parameters."""
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
