"""The family as `torch.optim.Optimizer`: SANC, SCR, ARC, CR, CRM and NCD."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from sanc.autograd.batches import Batch
from sanc.autograd.given import GivenGradient
from sanc.autograd.leaves import Leaves, Sample
from sanc.autograd.oracle import AutogradOracle
from sanc.autograd.products import HvpMode, require_mode
from sanc.autograd.randomness import derive, own_randomness, still_buffers
from sanc.core.family import METHODS, make_settings
from sanc.core.interrupts import interruptible, uninterrupted
from sanc.core.iteration import Iteration
from sanc.core.oracle import Meter
from sanc.core.record import Record
from sanc.core.saved import refuse, require_count, require_fields, require_mapping, require_vector
from sanc.core.settings import Settings
from sanc.errors import ArgumentError, ArgumentTypeError, SancError, nearest, require_integer
from sanc.graphs.capture import Capture
from sanc.minibatch.iteration import KRYLOV_DIM, MinibatchIteration

__all__ = ["ARC", "CR", "CRM", "NCD", "SANC", "SCR"]

_DRIVEN = {
    "": "not driven yet",
    "loss": "driven by closures that return the loss",
    "backward": "driven by closures that call backward()",
    "gradients": "driven by gradients, without closures",
}
_SMALL_RATE = 0.5
"""Below this `lr` was probably meant as a step size."""
_OF_OTHERS = {"name", "param_names", "initial_lr"}
"""What torch, its schedulers and loggers of learning rates write into groups, or read there."""


class CubicOptimizer(Optimizer):
    """What the optimisers of the family share.

    Parameters
    ----------
    params : iterable
        Parameters, or dicts that define groups. A group may set ``weight_decay`` (a penalty of
        ``weight_decay/2 · ‖w‖²``, exact in value, gradient and Hessian products) and ``frozen`` (its parameters are
        left alone).
    preset : {"robust", "paper", "authors"} or Settings
        The set of rules and numbers to start from. "robust" has no constants to tune. In SANC and SCR it judges steps
        as long as batches agree, and averages them in a learnt metric where they do not; the parameters then hold the
        average between steps. ``minibatch=None`` takes every batch for the objective.
    lr : float
        A factor on the length of averaged steps, in every group, for schedulers to move; steps that are judged do not
        heed it. It is no step size: the method finds that itself.
    weight_decay : float
        Default weight decay of the groups.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference"}
        How Hessian products are made. "auto" differentiates the gradient once more, and where an operator of the loss
        has no second derivative takes differences of gradients from then on, with a warning.
    microbatch : int, optional
        Most rows of a `Batch` that are in memory at a time.
    capture : bool
        Record gradients, values and Krylov spaces as CUDA graphs and replay them, for samples given as `Batch`. The
        loss function must be the same in every step, draw no random numbers and decide nothing on the host; where a
        step cannot be recorded it is made as without, and a warning says why (as does `capture_reason`).
    seed : int, optional
        Seed of the optimiser and of the closures' randomness; by default it is drawn from torch's generator.
    check : bool
        Evaluate the loss twice at the first step and complain if it differs.
    **options
        Any field of `sanc.Settings` or `sanc.MinibatchSettings`: sigma0, eta1, eta2, gamma, krylov_dim, L1, L2,
        lanczos, metric, scale …

    Attributes
    ----------
    record : Record or None
        What happened in the last step.
    hvp : str
        How Hessian products are made.

    Notes
    -----
    Closures return the mean loss, and may call ``backward``; see `step`. While a step with a closure runs, the global
    random states of torch, NumPy and Python are replaced by seeds of its own, so that dropout makes the same
    draw at x and at x + s, and are put back afterwards. Module buffers (BatchNorm) move with the gradient only, once a
    step, or once a micro-batch.
    """

    method: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        preset: str | Settings = "robust",
        lr: float = 1.0,
        weight_decay: float = 0.0,
        hvp: HvpMode = "auto",
        microbatch: int | None = None,
        capture: bool = False,
        seed: int | None = None,
        check: bool = True,
        **options: Any,
    ) -> None:
        method = METHODS[self.method]
        own = ("preset", "lr", "weight_decay", "hvp", "microbatch", "capture", "seed", "check")
        self._settings = make_settings(method, preset, options, own)
        if self._settings.krylov_dim is None:
            if "krylov_dim" in options:
                raise ArgumentError(
                    "krylov_dim = None cannot be used here: pass the most Lanczos iterations, such as 5."
                )
            self._settings = replace(self._settings, krylov_dim=KRYLOV_DIM)
        require_mode(hvp)
        require_integer("microbatch", microbatch, 1)
        if not isinstance(capture, bool):
            raise ArgumentTypeError(f"capture = {capture!r:.60} cannot be used: pass True or False.")
        require_integer("seed", seed, 0)
        if isinstance(params, Tensor) or not isinstance(params, Iterable):
            raise ArgumentTypeError(f"params = {params!r:.60} is no collection: pass model.parameters(), or a list.")
        params = list(params)
        if not params:
            raise ArgumentError("params is empty: pass model.parameters() of a model that has some.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "frozen": False})
        if lr < _SMALL_RATE:
            warnings.warn(
                f"lr = {lr!r} is a factor on the length that steps have by themselves, not a step size: leave it at 1, "
                "unless a scheduler starts there.",
                stacklevel=3,
            )
        self._hvp: HvpMode = hvp  # as it was asked for
        self._microbatch = microbatch
        self._check = check
        self._meter = Meter()
        self._record: Record | None = None
        self._known: Leaves | None = None  # of the last step: what the vectors of the state belong to
        self._by_gradients = False  # whether steps have no closure
        self._at_average = True  # whether the parameters hold the average, or the point where gradients are taken
        self._oracle = self._new_oracle(self._leaves(), hvp, None)
        if seed is None:
            seed = int(torch.randint(2**62, (), dtype=torch.int64))
        kind = MinibatchIteration if method.on_samples(self._settings) else Iteration
        self._iterates: Iteration | MinibatchIteration = kind(method, self._settings, seed)
        self._capture = Capture(method, self._settings) if capture else None

    _OWN = (
        "_settings", "_hvp", "_microbatch", "_check", "_meter", "_record", "_known", "_iterates", "_capture",
        "_by_gradients", "_at_average",
    )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        mine = {name: self.__dict__[name] for name in self._OWN}
        return super().__getstate__() | mine | {"_mode": (self._oracle.hvp, self._oracle.by_backward)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        mode = state.pop("_mode", None)
        super().__setstate__(state)
        if mode is not None:  # torch calls this for its own part of a state, too
            self._oracle = self._new_oracle(self._leaves(), *mode)

    def _new_oracle(self, leaves: Leaves, hvp: str, by_backward: bool | None) -> AutogradOracle:
        exact = METHODS[self.method].exact
        oracle = AutogradOracle(leaves, hvp=cast(HvpMode, hvp), meter=self._meter, exact=exact)
        oracle.by_backward = by_backward
        return oracle

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}    {_DRIVEN[self.style]}\n)"

    @property
    def style(self) -> str:
        """What drives the steps: closures that return the "loss", that call "backward", or "gradients" alone."""
        if self._by_gradients:
            return "gradients"
        return {None: "", False: "loss", True: "backward"}[self._oracle.by_backward]

    @property
    def record(self) -> Record | None:
        """What happened in the last step."""
        return self._record

    @property
    def hvp(self) -> str:
        return self._oracle.hvp

    @property
    def capture_reason(self) -> str:
        """Why the last step was not replayed from a recording; empty where it was."""
        return "capture = False" if self._capture is None else self._capture.reason

    # ------------------------------------------------------------------ parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after its entries were checked."""
        self._check_group(param_group)
        super().add_param_group(param_group)

    def _check_group(self, param_group: Mapping[str, Any]) -> None:
        known = {"params", "lr", "weight_decay", "frozen"}
        for name, value in param_group.items():
            if name not in known | _OF_OTHERS:
                raise ArgumentError(f"group option {name!r} (= {value!r}) is not known: {nearest(name, known)}.")
        for name in ("weight_decay", "lr"):
            value = param_group.get(name, self.defaults[name])
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ArgumentError(f"{name} = {value!r} cannot be used: pass a finite number ≥ 0.")
        if not isinstance(param_group.get("frozen", False), bool):
            raise ArgumentError(f"frozen = {param_group['frozen']!r} cannot be used: pass True or False.")

    def _leaves(self) -> Leaves:
        """Gather the parameters that take part now: not frozen, and asking for a gradient."""
        chosen = [
            (p, group["weight_decay"])
            for group in self.param_groups
            if not group["frozen"]
            for p in group["params"]
            if p.requires_grad
        ]
        if not chosen:
            raise ArgumentError(
                "params has nothing to optimise: all are frozen or have requires_grad=False; free at least one."
            )
        leaves, decays = zip(*chosen, strict=True)
        first = leaves[0]
        if first.dtype not in (torch.float32, torch.float64):
            raise ArgumentTypeError(
                f"params hold {first.dtype}: keep the parameters in float32 or float64, and use torch.autocast in the "
                "closure for lower precision."
            )
        for p, decay in chosen:
            if p.dtype != first.dtype or p.device != first.device:
                raise ArgumentTypeError(
                    f"params mix {first.dtype} on {first.device} with {p.dtype} on {p.device}: put all that are "
                    "optimised on one device in one type."
                )
            if decay > torch.finfo(p.dtype).max:
                raise ArgumentError(f"weight_decay = {decay!r} cannot be used with {p.dtype}: pass a smaller one.")
            if p.layout != torch.strided:
                raise ArgumentTypeError(f"params hold a tensor of layout {p.layout}: pass dense parameters.")
        return Leaves(leaves, decays)

    @contextmanager
    def _without_grads(self) -> Iterator[None]:
        """Put ``.grad`` aside, and give it back."""
        everyone = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in everyone]
        try:
            for p in everyone:
                p.grad = None
            yield
        finally:
            for p, grad in zip(everyone, grads, strict=True):
                p.grad = grad

    # ------------------------------------------------------------------ a step

    @uninterrupted
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        hessian: Callable[[], Tensor] | None = None,
        objective: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """Make one iteration.

        Parameters
        ----------
        closure : callable or Batch, optional
            Returns the mean loss on the gradient sample. It may call ``backward()`` on it, too, as for
            `torch.optim.LBFGS`; Hessian products are then differences of gradients. Without it, which needs preset
            "robust", the gradients in ``.grad`` are taken: see `train` and `eval`. The first step decides which of the
            three it is.
        hessian : callable or Batch, optional
            Returns the mean loss on the Hessian sample; by default the gradient sample.
            Where steps are averaged it is called now and then only, when negative curvature is looked for.
        objective : callable or Batch, optional
            Returns the mean loss on the sample for the ratio ρ; by default the gradient sample, where the
            model that is judged comes from; on another sample ρ carries the noise of both. Preset "robust" always
            judges on the gradient sample and takes none.

        Returns
        -------
        Tensor or None
            The loss of `closure` where the gradient was taken, without weight decay: before the step, or, where steps
            are averaged, a little beside the average.
        """
        if METHODS[self.method].exact and (hessian is not None or objective is not None):
            raise ArgumentError(
                "ARC uses one exact objective, so hessian and objective cannot be given: pass the closure alone, or "
                "use SCR."
            )
        if objective is not None and isinstance(self._iterates, MinibatchIteration):
            raise ArgumentError(
                "objective cannot be used: steps are judged on the gradient sample. Leave it out, or construct the "
                'optimiser with preset="paper".'
            )
        if closure is None or self._stands_for_none(closure):
            if hessian is not None or objective is not None:
                raise ArgumentError("closure is missing beside hessian or objective: pass it, too.")
            return self._step_on_gradients()
        if self._by_gradients:
            raise ArgumentError(
                "closure cannot be used: the steps before had none. Construct another optimiser to change that."
            )
        leaves = self._leaves()
        given = (closure, None if hessian is closure else hessian, None if objective is closure else objective)
        samples = self._samples(given)
        first = self._iterates.state.iteration == 0
        held = any(leaf.grad is not None for leaf in leaves.tensors)
        with self._without_grads(), torch.enable_grad():
            captured = None
            if isinstance(self._iterates, MinibatchIteration):
                self._iterates.rates = self._rates()
            if self._capture is not None and not self._oracle.by_backward:
                mode, microbatch = self._oracle.hvp, self._microbatch
                captured = self._capture.oracle(given, leaves, mode, microbatch, first=first)
            if captured is not None:  # whose loss draws no random numbers
                captured.fill(given, self._meter)
                return self._iterate(captured)
            with own_randomness(leaves.device):
                loss = self._iterate(self._eager(leaves, samples), probe=first)
        if held and self._oracle.by_backward:
            warnings.warn(
                "gradients from before the step are left out: a closure that calls backward() is judged on its own "
                "batch. Call zero_grad() after other passes; to accumulate gradients, step without a closure.",
                stacklevel=3,
            )
        return loss

    def _rates(self) -> list[float]:
        """Return the factor of each parameter that takes part."""
        free = [(p, group["lr"]) for group in self.param_groups if not group["frozen"] for p in group["params"]]
        return [float(rate) for p, rate in free if p.requires_grad]

    # ------------------------------------------------------------------ steps without a closure

    def _stands_for_none(self, closure: Callable[[], Tensor | None]) -> bool:
        """Call a closure beside gradients, where it may be one that does nothing: Lightning makes such.

        What it runs beside, such as hooks that clip, has then been done to the gradients.
        """
        everyone = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.style not in ("", "gradients") or not everyone or isinstance(closure, Batch) or not callable(closure):
            return False
        if self._by_gradients:
            with interruptible():
                return closure() is None
        kept = [p.grad for p in everyone]
        copies = [grad.clone() for grad in kept]  # it may turn out to be a real one
        for p, grad in zip(everyone, copies, strict=True):
            p.grad = grad
        with own_randomness(everyone[0].device), still_buffers(), interruptible():
            nothing = closure() is None and all(p.grad is grad for p, grad in zip(everyone, copies, strict=True))
        if not nothing:
            for p, grad in zip(everyone, kept, strict=True):
                p.grad = grad
        return nothing

    @torch.no_grad()
    def _step_on_gradients(self) -> None:
        """Make an averaged step from the point where the gradients in ``.grad`` were taken."""
        iterates = self._iterates
        if self._is_empty_step():
            return
        if not isinstance(iterates, MinibatchIteration):
            raise ArgumentError(
                f"closure is missing: {self.method.upper()} with these settings needs values and Hessian products. "
                'Pass a function that returns the loss, or use SANC or SCR with preset="robust".'
            )
        if self._oracle.by_backward is not None:
            raise ArgumentError("closure is missing: the steps before had one. Pass it again.")
        leaves = self._leaves()
        if all(leaf.grad is None for leaf in leaves.tensors):
            raise ArgumentError(
                "closure is missing and no parameter has a gradient: call loss.backward() before step()."
            )
        if self._by_gradients and self._at_average:
            raise ArgumentError("the parameters are at the average since eval(): call train() before the next pass.")
        if self._known is None or not self._known.matches(leaves):
            iterates.forget()
        y = leaves.read()
        iterates.rates = self._rates()
        point, record = iterates.iterate(iterates.average(y), GivenGradient(leaves, y, self._meter))
        leaves.write(iterates.gradient_point(point))  # type: ignore[arg-type]
        self._by_gradients, self._at_average, self._known = True, False, leaves
        record.style = self.style
        self._record = record

    def _is_empty_step(self) -> bool:
        """Whether every rate and every gradient is zero: torch.distributed.checkpoint steps so, to create states."""
        if any(group["lr"] != 0.0 for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grads) and not any(bool(grad.any()) for grad in grads)

    def train(self) -> None:
        """Move the parameters to where gradients are taken; for loops without a closure, before a training epoch."""
        self._move(at_average=False)

    def eval(self) -> None:
        """Move the parameters to the average; for loops without a closure, before evaluating or saving.

        With closures the parameters are always at the average between steps, and neither is needed.
        """
        self._move(at_average=True)

    @uninterrupted
    @torch.no_grad()
    def _move(self, *, at_average: bool) -> None:
        iterates = self._iterates
        if not self._by_gradients or at_average is self._at_average:
            return
        assert isinstance(iterates, MinibatchIteration)
        assert self._known is not None
        here = self._known.read()
        self._known.write(iterates.average(here) if at_average else iterates.gradient_point(here))  # type: ignore[arg-type]
        self._at_average = at_average

    def _samples(self, given: tuple[Any, Any, Any]) -> list[Sample]:
        """Return what the oracle evaluates; the gradient's sample where another was not given."""
        samples: list[Sample] = []
        for role, (name, closure) in enumerate(zip(("closure", "hessian", "objective"), given, strict=True)):
            if closure is None and role > 0:
                samples.append(samples[0])
                continue
            if not callable(closure):
                raise ArgumentTypeError(
                    f"{name} = {closure!r:.60} cannot be called: pass a function of no arguments that returns the mean "
                    "loss."
                )
            seed = derive(self._iterates.state.seed, self._iterates.state.iteration, role)
            if isinstance(closure, Batch):
                samples.append(Sample(name, closure.parts(self._microbatch), len(closure), seed))
            elif self._microbatch is not None:
                raise ArgumentTypeError(
                    f"{name} is a plain function, which microbatch = {self._microbatch} cannot cut: pass "
                    "sanc.Batch(loss, *tensors)."
                )
            else:
                samples.append(Sample(name, [(1.0, closure)], 1, seed))
        return samples

    def _eager(self, leaves: Leaves, samples: list[Sample]) -> AutogradOracle:
        """Return the oracle of this optimiser, ready for a step on these samples."""
        if not leaves.matches(self._oracle.leaves) or leaves.decays != self._oracle.leaves.decays:
            self._oracle = self._new_oracle(leaves, self._oracle.hvp, self._oracle.by_backward)
        self._oracle.meter = self._meter
        self._oracle.bind(*samples)
        return self._oracle

    def _iterate(self, oracle: AutogradOracle, *, probe: bool = False) -> Tensor:
        """Make one iteration; where anything goes wrong nothing has changed."""
        x = point = oracle.start()
        iterates, known = self._iterates, self._known
        meter, state, driven = replace(self._meter), iterates.state, (self._oracle.by_backward, self._oracle.hvp)
        try:
            if probe:
                self._probe(oracle, x)
            if known is None or not known.matches(oracle.leaves):
                iterates.forget()
            self._known = oracle.leaves
            point, record = iterates.iterate(x, oracle)  # type: ignore[assignment]
            if getattr(iterates, "went_back", False) or not (
                math.isfinite(record.grad_norm) and math.isfinite(record.value)
            ):
                self._undo_training(oracle)
        except BaseException:
            self._undo_training(oracle)
            iterates.state, self._known, self._meter = state, known, meter
            self._oracle.by_backward, self._oracle.hvp = driven
            raise
        finally:
            oracle.load(point)
            loss = oracle.raw_loss
            oracle.unbind()
        record.style = self.style
        self._record = record
        assert loss is not None
        return loss

    @staticmethod
    def _undo_training(oracle: AutogradOracle) -> None:
        """Put back the buffers that the gradient pass moved, because its step is not one."""
        if oracle.training is not None:
            oracle.training.put_back()

    def _probe(self, oracle: AutogradOracle, x: Tensor) -> None:
        """Complain before the first step of what would only show later; nothing of it is counted.

        That is a closure that changes between two calls, such as one that draws a new batch each time, and a loss
        without second derivatives, where the first Krylov space comes after a few steps only.
        """
        oracle.meter, sample = Meter(), oracle.samples[0]
        try:
            if self._check:
                first, second = oracle.evaluate(x, sample, graph=True), oracle.evaluate(x, sample)
                if math.isfinite(first) and abs(first - second) > 1e-3 * max(abs(first), abs(second)) + 1e-6:
                    raise ArgumentError(
                        f"closure returned {first!r} and then {second!r} at the same parameters: fix the batch before "
                        "the step and return the loss on it, so that values can be compared; check=False turns this "
                        "test off."
                    )
            if isinstance(self._iterates, MinibatchIteration) and not self._iterates.state.noisy:
                operator = oracle.hessian(x)
                operator(torch.ones_like(x))
                operator.release()
        finally:
            oracle.meter = self._meter

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as plain numbers and tensors.

        The parameters themselves are the model's to save.
        """
        self.state.clear()
        if self._known is not None:
            for name, vector in self._iterates.vectors().items():
                for p, part in zip(self._known.tensors, self._known.split(vector), strict=True):
                    self.state[p][name] = part
            if isinstance(self._iterates, MinibatchIteration):
                for p, factors in zip(self._known.tensors, self._iterates.factors(), strict=False):
                    self.state[p]["factors"] = factors
        packed = super().state_dict()
        self.state.clear()  # the iteration has them
        engine = {
            "method": self.method,
            "settings": asdict(self._settings),
            "numbers": self._iterates.numbers(),
            "meter": asdict(self._meter),
            "hvp": self._oracle.hvp,
            "style": self.style,
            "at_average": self._at_average,
            "vectors": len(packed["state"]),  # parameters that have some
        }
        packed["param_groups"][0]["engine"] = engine  # torch.distributed.checkpoint keeps states and groups only
        return packed | {"engine": engine}

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; the next step is bit for bit the one the saved run would have made.

        Everything in it is checked first: after an error the optimiser goes on as if nothing had been loaded.
        """
        groups, engine = self._engine_of(state_dict)
        kept = {name: self.__dict__[name] for name in ("state", "param_groups", "_known")}
        try:
            super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
            vectors, factors = self._vectors()
            shapes = [] if self._known is None else [tuple(leaf.shape) for leaf in self._known.tensors]
            self._iterates.check("state_dict['engine']['numbers']", engine["numbers"], vectors, shapes, factors)
            self._warn_of_changes(engine)
        except BaseException as problem:
            self.__dict__.update(kept)
            if not isinstance(problem, Exception) or isinstance(problem, SancError | Warning):
                raise
            text = f"state_dict cannot be used ({problem}): pass what state_dict() returned."
            raise ArgumentError(text) from problem
        self.state.clear()
        if isinstance(self._iterates, MinibatchIteration):
            self._iterates.restore(engine["numbers"], vectors, factors)
        else:
            self._iterates.restore(engine["numbers"], vectors)
        if self._hvp == "auto":
            self._oracle.hvp = engine["hvp"]
        if self._capture is not None:
            self._capture.forget()
        self._meter = Meter(**engine["meter"])
        self._oracle.by_backward = {"loss": False, "backward": True}.get(engine["style"])
        self._by_gradients, self._at_average = engine["style"] == "gradients", engine["at_average"]
        self._record = None

    def _engine_of(self, state_dict: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the groups and our own part of a saved state, both checked."""
        found = require_mapping("state_dict", state_dict).get("param_groups", ())
        if not isinstance(found, (list, tuple)) or not all(isinstance(group, Mapping) for group in found):
            raise refuse("state_dict['param_groups']", found, "a list of groups")
        groups = [dict(group) for group in found]
        engine = state_dict.get("engine", groups[0].get("engine") if groups else None)
        for group in groups:
            group.pop("engine", None)
        if not isinstance(engine, dict):
            raise ArgumentError("state_dict has no entry 'engine': pass what state_dict() of this optimiser returned.")
        wanted = {"method", "settings", "numbers", "meter", "hvp", "style", "at_average", "vectors"}
        if not wanted <= engine.keys() or "state" not in state_dict:
            raise ArgumentError(
                f"state_dict['engine'] has {sorted(engine)}: pass what state_dict() returned, as a whole."
            )
        if not isinstance(engine["method"], str) or engine["method"] != self.method:
            raise ArgumentError(
                f"state_dict is of {engine['method']!r}, not {self.method!r}: load it into that method."
            )
        for name in ("settings", "numbers", "meter"):
            require_mapping(f"state_dict['engine'][{name!r}]", engine[name])
        if differ := set(engine["numbers"]) ^ set(self._iterates.numbers()):
            raise ArgumentError(
                f"state_dict['engine']['numbers'] differ from this optimiser's in {sorted(map(str, differ))}, so they "
                "are of another iteration or version: construct it with the same preset and the same minibatch as in "
                "the run that was saved."
            )
        require_fields("state_dict['engine']['meter']", engine["meter"], Meter)
        if set(engine["meter"]) != set(Meter.__slots__):
            raise refuse("state_dict['engine']['meter']", sorted(engine["meter"]), f"{sorted(Meter.__slots__)}")
        if engine["style"] not in list(_DRIVEN):
            raise refuse("state_dict['engine']['style']", engine["style"], f"one of {list(_DRIVEN)}")
        if not isinstance(engine["at_average"], bool):
            raise refuse("state_dict['engine']['at_average']", engine["at_average"], "True or False")
        require_mode(engine["hvp"])
        for group in groups:
            self._check_group(group)
            numbers = group.get("params")
            if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, int | str) for number in numbers):
                raise refuse("'params' in state_dict['param_groups']", numbers, "a list of numbers")
        sizes, own = [len(group["params"]) for group in groups], [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise ArgumentError(
                f"state_dict['param_groups'] are of {sizes} parameters and this optimiser's of {own}: construct it "
                "with the same."
            )
        state = require_mapping("state_dict['state']", state_dict["state"])
        require_count("state_dict['engine']['vectors']", engine["vectors"])
        for number, entry in state.items():
            if not require_mapping(f"state_dict['state'][{number!r}]", entry):
                raise refuse(f"state_dict['state'][{number!r}]", entry, "a mapping of names to vectors")
        if strange := set(state) - {number for group in groups for number in group["params"]}:
            raise refuse("state_dict['state']", sorted(map(str, strange)), "entries of the parameters alone")
        if engine["vectors"] != len(state):
            raise ArgumentError(
                f"state_dict['state'] has {len(state)} parameters instead of {engine['vectors']!r}: pass what "
                "state_dict() returned, as a whole."
            )
        return groups, engine

    def _vectors(self) -> tuple[dict[str, Tensor], list[Any]]:
        """Put the vectors in the state of the parameters together, and let `_known` be whom they belong to."""
        saved = [p for group in self.param_groups for p in group["params"] if self.state.get(p)]
        self._known = Leaves(saved, [0.0] * len(saved)) if saved else None
        entries = [dict(require_mapping(f"state of parameter {k}", self.state[p])) for k, p in enumerate(saved)]
        factors = [entry.pop("factors", {}) for entry in entries]
        for number, (p, entry) in enumerate(zip(saved, entries, strict=True)):
            if set(entry) != set(entries[0]):
                raise refuse(
                    f"state of parameter {number}", sorted(entry), f"vectors of the names {sorted(entries[0])}"
                )
            for name, part in entry.items():
                require_vector(f"{name!r} of parameter {number}", part, tuple(p.shape))
        if self._known is None:
            return {}, factors
        return {name: self._known.join([entry[name] for entry in entries]) for name in entries[0]}, factors

    def _warn_of_changes(self, engine: dict[str, Any]) -> None:
        """Say where the run will not go on as the saved one would have."""
        for name, value in engine["settings"].items():
            mine = asdict(self._settings).get(name)
            if mine != value:
                text = f"the state was saved with {name} = {value!r} and this optimiser has {mine!r}"
                warnings.warn(f"{text}: the run goes on, but not as the saved one would have.", stacklevel=3)
        if self._hvp != "auto" and engine["hvp"] not in ("auto", self._hvp):
            text = f"the state was saved with hvp = {engine['hvp']!r} and this optimiser has {self._hvp!r}"
            warnings.warn(f"{text}: the run goes on, but not to the last bit as the saved one.", stacklevel=3)


class SANC(CubicOptimizer):
    """Adaptive cubic regularisation that escapes along negative curvature when a step is rejected."""

    method = "sanc"


class SCR(CubicOptimizer):
    """Sub-sampled cubic regularisation (Kohler and Lucchi 2017): stays when a step is rejected."""

    method = "scr"


class ARC(CubicOptimizer):
    """Adaptive regularisation with cubics (Cartis, Gould and Toint 2011) on one exact objective."""

    method = "arc"


class CR(CubicOptimizer):
    """Cubic regularisation with a fixed σ (Nesterov and Polyak 2006); every step is taken."""

    method = "cr"


class CRM(CubicOptimizer):
    """Cubic regularisation with a fixed σ and momentum (Wang, Zhou, Liang and Lan 2018)."""

    method = "crm"


class NCD(CubicOptimizer):
    """Negative curvature descent (Liu et al. 2018): the curvature or the gradient step, whichever promises more."""

    method = "ncd"


for _class in (SANC, SCR, ARC, CR, CRM, NCD):
    _class.__doc__ = f"{_class.__doc__}\n\n    {(CubicOptimizer.__doc__ or '').split('share.', 1)[1].strip()}\n"
