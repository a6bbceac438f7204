"""The family as `torch.optim.Optimizer`: SANC, SCR, ARC, CR, CRM and NCD."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Never

from torch import Tensor, nn
from torch.optim import Optimizer

from sanc.autograd.leaves import Leaves
from sanc.autograd.precision import full_precision
from sanc.autograd.products import HVP_MODES, HvpMode
from sanc.core.interrupts import uninterrupted
from sanc.core.method import Method
from sanc.core.record import Record
from sanc.core.run import Iterates
from sanc.core.saved import require_mapping
from sanc.errors import ArgumentError, ArgumentTypeError, SancError, one_of, require_integer, shown
from sanc.minibatch.iteration import KRYLOV_DIM
from sanc.optim.checkpoints import (
    checked_engine,
    checked_groups,
    checked_state,
    checked_vectors,
    engine_of,
    restore,
    warn_of_changes,
    write_states,
)
from sanc.optim.driving import STYLES, Driver
from sanc.optim.groups import called, check_group, gather
from sanc.presets import compose, with_options
from sanc.ranks.find import find_mode
from sanc.ranks.group import DEFAULT

__all__ = ["ARC", "CR", "CRM", "NCD", "SANC", "SCR"]

_SMALL_RATE = 0.5
"""Below this `lr` was probably meant as a step size."""


class CubicOptimizer(Optimizer):
    """What the optimisers of the family share.

    Parameters
    ----------
    params : iterable
        Parameters, or dicts that define groups. A group may set ``weight_decay`` (a penalty of
        ``weight_decay/2 · ‖w‖²``, exact in value, gradient and Hessian products) and ``frozen`` (its parameters are
        left alone).
    preset : {"robust", "paper"} or Method
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
    process_group : ProcessGroup, "default" or None
        The ranks that train together, each with batches of its own: values, gradients and Hessian products are averaged
        over them, and all take the same step. By default the group that torch.distributed was initialised with, if it
        was; None: each rank trains for itself.
    compare_every : int
        Steps after which parameters and decisions are compared over the ranks, where a difference is an error; 0:
        never.
    **options
        Pieces (`model`, `acceptance`, `escape`, `sigma`, `minibatch`, `metric`) and their settings by name: sigma0,
        eta1, eta2, gamma, krylov_dim, lanczos, scale … See `sanc.Method`.

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
    draw at x and at x + s, and are put back afterwards; these states belong to the process, so steps in several threads
    take turns. Module buffers (BatchNorm) move with the gradient only, once a step, or once a micro-batch.
    """

    method: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Any],
        *by_position: Never,
        preset: str | Method = "robust",
        lr: float = 1.0,
        weight_decay: float = 0.0,
        hvp: HvpMode = "auto",
        microbatch: int | None = None,
        capture: bool = False,
        seed: int | None = None,
        check: bool = True,
        process_group: Any = DEFAULT,
        compare_every: int = 100,
        **options: Any,
    ) -> None:
        if by_position:
            raise ArgumentTypeError(
                f"{shown(by_position[0])} was given by position after params: pass settings by name. If it is a "
                "learning rate leave it out: the length of steps is found, and lr = 1.0 is a factor on it."
            )
        own = ("preset", "lr", "weight_decay", "hvp", "microbatch", "capture", "seed", "check", "process_group",
               "compare_every")  # fmt: skip
        method = compose(self.method, preset, options, own)
        if getattr(method.model, "krylov_dim", KRYLOV_DIM) is None:
            if "krylov_dim" in options:
                raise ArgumentError(
                    "krylov_dim = None cannot be used here: pass the largest number of Lanczos iterations, such as 5."
                )
            method = with_options(method, {"krylov_dim": KRYLOV_DIM})
        one_of("hvp", hvp, HVP_MODES)
        require_integer("microbatch", microbatch, 1)
        for name, value in (("capture", capture), ("check", check)):
            if not isinstance(value, bool):
                raise ArgumentTypeError(f"{name} = {shown(value)} cannot be used: pass True or False.")
        require_integer("seed", seed, 0)
        require_integer("compare_every", compare_every, 0)
        if isinstance(params, (Tensor, Mapping, nn.Module)) or not isinstance(params, Iterable):
            raise ArgumentTypeError(
                f"params = {shown(params)} is no collection of parameters: pass model.parameters(), or a list."
            )
        params = list(params)
        if not params:
            raise ArgumentError("params is empty: pass model.parameters() of a model that has some.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "frozen": False})
        mode = find_mode(process_group, compare_every, self._everyone(), capture=capture)
        if lr < _SMALL_RATE:
            warnings.warn(
                f"lr = {lr!r} is a factor on the length that steps have by themselves, not a step size: leave it at 1, "
                "unless a scheduler starts there.",
                stacklevel=3,
            )
        leaves, seed = gather(self.param_groups, mode.leaves), mode.seed(None if seed is None else int(seed))
        how = {"hvp": hvp, "microbatch": microbatch, "capture": capture, "check": check, "seed": seed}
        mode.begin(self.param_groups, {"method": self.method, "settings": method} | how)
        self._driver = Driver(method, leaves, mode=mode, **how)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_driver": self._driver}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}    {STYLES[self.style]}\n)"

    @property
    def style(self) -> str:
        """What drives the steps: closures that return the "loss", that call "backward", or "gradients" alone."""
        return self._driver.oracle.style

    @property
    def record(self) -> Record | None:
        """What happened in the last step."""
        return self._driver.record

    @property
    def hvp(self) -> str:
        return self._driver.oracle.hvp

    @property
    def capture_reason(self) -> str:
        """Why the last step was not replayed from a recording; empty where it was."""
        capture = self._driver.capture
        return "capture = False" if capture is None else capture.reason

    @property
    def _iterates(self) -> Iterates:
        return self._driver.iterates

    # ------------------------------------------------------------------ parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after its entries were checked."""
        check_group(param_group, self.defaults)
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError) as problem:
            kind = ArgumentTypeError if isinstance(problem, TypeError) else ArgumentError
            remedy = "pass model.parameters(), or a list of leaf tensors, each of them once"
            raise kind(f"params cannot be used ({problem}): {remedy}.") from problem

    def _everyone(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

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
            The loss of `closure` where the gradient was taken, without weight decay, the mean over the ranks: before
            the step, or, where steps are averaged, a little beside the average.
        """
        if self._driver.method.exact and (hessian is not None or objective is not None):
            raise ArgumentError(
                "ARC uses one exact objective, so hessian and objective cannot be given: pass the closure alone, or "
                "use SCR."
            )
        if objective is not None and self._iterates.averages:
            raise ArgumentError(
                "objective cannot be used: steps are judged on the gradient sample. Leave it out, or construct the "
                'optimiser with preset="paper".'
            )
        driver, everyone, loss = self._driver, self._everyone(), None
        with full_precision(everyone[0].device):
            if closure is None or driver.stands_for_none(closure, everyone):
                if hessian is not None or objective is not None:
                    raise ArgumentError("closure is missing beside hessian or objective: pass it, too.")
                if self._is_empty_step():
                    return None
                driver.step_on_gradients(self._leaves())
            else:
                given = (closure, None if hessian is closure else hessian, None if objective is closure else objective)
                loss = driver.step(given, self._leaves(), everyone)
            driver.mode.stepped(self.param_groups, driver.iterates)
        self._warn_of_unreached()
        return loss

    def _leaves(self) -> Leaves:
        return gather(self.param_groups, self._driver.mode.leaves)

    def _warn_of_unreached(self) -> None:
        """Name the parameters that the loss of the first step did not reach."""
        missed, self._driver.unreached = self._driver.unreached, []
        if not missed:
            return
        names = ", ".join(f"params[{called(self.param_groups, p)}] of shape {tuple(p.shape)}" for p in missed[:8])
        more = f" and {len(missed) - 8} more" if len(missed) > 8 else ""
        warnings.warn(
            f"the loss of the first step does not reach {names}{more}: check that the model uses them; if they are to "
            "stay as they are, leave them out of params or set their requires_grad to False.",
            stacklevel=5,
        )

    def _is_empty_step(self) -> bool:
        """Whether every rate and every gradient is zero: torch.distributed.checkpoint steps so, to create states."""
        if any(group["lr"] != 0.0 for group in self.param_groups):
            return False
        grads = [p.grad for p in self._everyone() if p.grad is not None]
        held = self._leaves().held
        return bool(grads) and not any(bool(held(grad).any()) for grad in grads)

    def train(self) -> None:
        """Move the parameters to where gradients are taken; for loops without a closure, before a training epoch."""
        self._driver.move(at_average=False)

    def eval(self) -> None:
        """Move the parameters to the average; for loops without a closure, before evaluating or saving.

        With closures the parameters are always at the average between steps, and neither is needed.
        """
        self._driver.move(at_average=True)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as plain numbers and tensors.

        The parameters themselves are the model's to save.
        """
        self.state.clear()
        write_states(self._driver, self.state)
        packed = super().state_dict()
        self.state.clear()  # the iteration has them
        engine = engine_of(self._driver, vectors=sum(map(bool, packed["state"].values())))
        packed["param_groups"][0]["engine"] = engine  # torch.distributed.checkpoint keeps states and groups only
        return packed | {"engine": engine}

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; the next step is bit for bit the one the saved run would have made.

        Everything in it is checked first: after an error the optimiser goes on as if nothing had been loaded.
        """
        found = require_mapping("state_dict", state_dict).get("param_groups", ())
        inner = found[0].get("engine") if isinstance(found, list) and found and isinstance(found[0], dict) else None
        engine = checked_engine(self._driver, state_dict.get("engine", inner))
        groups = checked_groups(found, self.param_groups, self.defaults)
        state = checked_state(state_dict.get("state"), groups, engine)
        kept = {name: self.__dict__[name] for name in ("state", "param_groups")}
        try:
            super().load_state_dict({"state": state, "param_groups": groups})
            loaded = checked_vectors(self._driver, engine, self._everyone(), self.state)
            warn_of_changes(self._driver, engine)
        except BaseException as problem:
            self.__dict__.update(kept)
            if not isinstance(problem, Exception) or isinstance(problem, SancError | Warning):
                raise
            text = f"state_dict cannot be used ({problem}): pass what state_dict() returned."
            raise ArgumentError(text) from problem
        restore(self._driver, engine, *loaded)
        self.state.clear()  # the iteration has them


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
