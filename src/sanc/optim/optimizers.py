"""The family as `torch.optim.Optimizer`: SANC, SCR, ARC, CR, CRM and NCD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Never, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from sanc.autograd.leaves import Leaves
from sanc.autograd.precision import full_precision
from sanc.autograd.products import OPTIMIZER_HVP_MODES, OptimizerHvpMode
from sanc.core.interrupts import uninterrupted
from sanc.core.method import Method
from sanc.core.record import Record
from sanc.core.saved import require_mapping
from sanc.errors import ArgumentError, ArgumentTypeError, SancError, one_of, require_bool, require_integer, shown, warn
from sanc.minibatch.training import TrainingIteration
from sanc.optim.checkpoints import (
    checked_groups,
    checked_run_state,
    checked_state,
    checked_vectors,
    restore,
    run_state_of,
    uncast_states,
    warn_of_changes,
    write_states,
)
from sanc.optim.driving import STYLES, Driver
from sanc.optim.groups import check_group, label_of, leaves_to_optimise, require_full_precision
from sanc.optim.lr_warnings import LrWatch, first_warning
from sanc.options import OptimizerOptions
from sanc.presets import PRESETS, changes_from, compose, with_krylov_limit, with_options
from sanc.ranks.find import find_mode
from sanc.ranks.group import DEFAULT

__all__ = ["ARC", "CR", "CRM", "NCD", "SANC", "SCR"]

_MINIMIZE_ONLY = {
    "epsilon_s": "the stopping test of sanc.minimize uses it",
    "sampling": "sanc.minimize draws samples with it, and those of an optimiser are the closures",
}
"""Settings of a `Method` that only `minimize` uses, each with its use."""


class CubicOptimizer(Optimizer):
    """Base class of the optimisers of the family.

    Parameters
    ----------
    params : iterable
        Parameters, or dicts that define groups. Parameters of bfloat16 and float16 have float32 master values in the
        optimiser; SANC and SCR train them with averaged steps only. A group may set ``weight_decay`` (a penalty of
        ``weight_decay/2 · ‖w‖²``, exact in value, gradient and Hessian products) and ``frozen`` (its parameters do
        not change).
    preset : {"robust", "paper"} or Method
        The method whose pieces the optimiser is composed from. "robust" has no constants to tune. With it, SANC and SCR
        make second-order steps while batches agree, and then averaged steps in a learnt metric. In the averaged phase
        the parameters hold the average between steps. With ``minibatch=None`` all steps are second-order steps, each on
        its batch alone.
    lr : float
        A factor on the step size of averaged steps, in every group, which schedulers may change. Second-order steps
        ignore it. It is not the step size itself, which the method determines.
    weight_decay : float
        Default weight decay of the groups.
    hvp : {"auto", "double-backward", "forward-over-reverse", "finite-difference", "gauss-newton"}
        How Hessian products are computed. "auto" differentiates the gradient once more. If an operator of the loss has
        no second derivative, it warns and uses differences of gradients from then on. "gauss-newton" uses the
        generalised Gauss–Newton matrix JᵀHJ instead of the Hessian, with the Jacobian J of the network's output and the
        Hessian H of the loss as a function of it. It needs batches with ``outputs`` (`sanc.Batch`). For a loss that is
        convex in the output, the model has no negative curvature then, and steps do not follow any.
    microbatch : int, optional
        Largest number of rows of a `Batch` that are in memory at a time.
    capture : bool, optional
        Replay recorded CUDA graphs. By default those of the work of the optimiser in averaged steps, for parameters of
        up to two million entries; the loss may be any. True: for parameters
        of any size, and with samples given as `Batch` also gradients, values and Krylov spaces. The loss function must
        then be the same in every step, draw no random numbers and decide nothing on the host. A step that cannot be
        recorded runs without a graph, and a warning gives the reason, which `capture_reason` holds too. False: record
        nothing.
    seed : int, optional
        Seed of the optimiser and of the random numbers in closures; by default it is drawn from torch's generator.
    check : bool
        Evaluate the loss twice before the first step, and raise an error if the values differ.
    process_group : ProcessGroup, "default" or None
        The ranks that train together, each on different batches. Values, gradients and Hessian products are averaged
        over them, and all make the same step. By default the group that torch.distributed was initialised with, if
        there is one. None: each rank trains independently.
    compare_every : int
        Number of steps after which all parameters and decisions are compared between the ranks; a difference is an
        error. Every step compares digests of them. 0: steps compare only which parameters are trainable.
    **options
        Pieces (`model`, `acceptance`, `escape`, `sigma`, `minibatch`, `metric`, `step_size`, `average`) and their
        settings by name: sigma0, eta1, eta2, gamma, krylov_dim, lanczos, scale … See `sanc.Method`.

    Attributes
    ----------
    method : str
        Name of the member of the family.
    record : Record or None
        Record of the last step.
    hvp : str
        How Hessian products are computed.

    Notes
    -----
    Closures return the mean loss, and may call ``backward``; see `step`. A step with a closure seeds the global random
    generators of torch, NumPy and Python that the closure draws from. So dropout draws the same mask at x and at x + s.
    After the step the generators have their earlier states. They belong to the process, so steps in several threads run
    one after the other. A thread that draws from the same generator as the closure during a step should have its own
    generator; otherwise it may get numbers twice, and change the closure's draws. Module buffers (BatchNorm) are
    updated with the gradient only, once a step, or once a micro-batch.
    """

    method: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Any],
        *by_position: Never,
        preset: str | Method = "robust",
        lr: float = 1.0,
        weight_decay: float = 0.0,
        hvp: OptimizerHvpMode = "auto",
        microbatch: int | None = None,
        capture: bool | None = None,
        seed: int | None = None,
        check: bool = True,
        process_group: Any = DEFAULT,
        compare_every: int = 100,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if by_position:
            raise ArgumentTypeError(
                f"{shown(by_position[0])} was given by position after params: pass settings by name. If it is a "
                "learning rate, leave it out: the method determines the step size, and lr = 1.0 is a factor on it."
            )
        method = self._compose(preset, options)
        one_of("hvp", hvp, OPTIMIZER_HVP_MODES)
        require_integer("microbatch", microbatch, 1, optional=True)
        require_bool("check", check)
        if capture is not None:
            require_bool("capture", capture)
        require_integer("seed", seed, 0, optional=True)
        require_integer("compare_every", compare_every, 0, optional=True)
        super().__init__(_checked_params(params), {"lr": lr, "weight_decay": weight_decay, "frozen": False})
        self.defaults["momentum"] = 0.0  # OneCycleLR and CyclicLR require it, and set it in groups, without effect
        mode = find_mode(process_group, compare_every, self._parameters(), capture=bool(capture))
        largest_lr = max(group["lr"] for group in self.param_groups)
        if lr_warning := first_warning(largest_lr):
            warn(lr_warning)
        leaves = leaves_to_optimise(self.param_groups, mode.leaves)
        method = self._without_products(method, leaves, options)
        driver_options = {"hvp": hvp, "microbatch": microbatch, "capture": capture, "check": check, "seed": seed}
        defaults = CubicOptimizer.__init__.__kwdefaults__ or {}
        shown_options = driver_options | {"compare_every": compare_every}
        self._changed_arguments = {name: given for name, given in shown_options.items() if given != defaults[name]}
        driver_options["seed"] = mode.seed(None if seed is None else int(seed))
        mode.begin(self.param_groups, {"method": self.method, "settings": method} | driver_options)
        self._driver = Driver(method, leaves, mode=mode, **driver_options)  # type: ignore[arg-type]
        self._lr_watch = LrWatch(ended=bool(lr_warning) or not self._driver.iteration.has_averaged_phase)

    def _compose(self, preset: str | Method, options: Mapping[str, Any]) -> Method:
        """Return the method of a preset with these options; raise an error for options of `minimize`."""
        for name in sorted(options.keys() & _MINIMIZE_ONLY.keys()):
            message = f"{name} = {shown(options.get(name))} has no effect in an optimiser"
            raise ArgumentError(f"{message}: leave it out, since {_MINIMIZE_ONLY[name]}.")
        arguments = CubicOptimizer.__init__.__kwdefaults__ or {}
        return with_krylov_limit(compose(self.method, preset, options, arguments), options)

    def __getstate__(self) -> dict[str, Any]:
        self._driver.warn_of_train_mode("the optimiser was pickled or copied")
        names = ("_driver", "_lr_watch", "_changed_arguments")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}    {self._preset_and_changes()}\n    {STYLES[self.style]}\n)"

    def _preset_and_changes(self) -> str:
        """Return the preset that the method is nearest to, and the settings and arguments that were changed."""
        method = self._driver.method
        bases = {name: with_krylov_limit(compose(self.method, name, {}), {}) for name in PRESETS}
        changes = {name: changes_from(base, method) for name, base in bases.items()}
        preset = min(changes, key=lambda name: len(changes[name]))
        changed = changes[preset] + [f"{name}={shown(value)}" for name, value in self._changed_arguments.items()]
        return f"preset: {preset}" + (f" with {', '.join(changed)}" if changed else "")

    @property
    def style(self) -> str:
        """The style of the steps: closures that return the "loss", that call "backward", or only "gradients"."""
        return self._driver.oracle.style

    @property
    def record(self) -> Record | None:
        """Record of the last step."""
        return self._driver.record

    @property
    def hvp(self) -> str:
        """How Hessian products are computed: the argument, or "finite-difference" after "auto" fell back to it."""
        return self._driver.oracle.hvp

    @property
    def capture_reason(self) -> str:
        """Why the last step was not replayed from a CUDA graph; empty if it was.

        With closures this is about all of the step, without them about the work of the optimiser.
        """
        driver = self._driver
        if driver.without_closures:
            return driver.vector_work.reason
        return "capture = True was not passed" if driver.capture is None else driver.capture.reason

    @property
    def _iteration(self) -> TrainingIteration:
        return self._driver.iteration

    @property
    def steps_made(self) -> int:
        """The number of steps so far, also those before a resume."""
        return int(self._iteration.state.iteration)

    def compare_ranks(self) -> None:
        """Compare parameters, options and decisions between the ranks; all of them raise `RanksError` if they differ.

        All ranks must call this method. It compares nothing if ``compare_every`` is 0.
        """
        self._driver.compare_ranks(self.param_groups)

    # Parameters.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the entries of a group and add it."""
        check_group(param_group, self.defaults)
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError) as error:
            kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
            remedy = "pass model.parameters(), or a list of leaf tensors, each of them once"
            raise kind(f"params cannot be used ({error}): {remedy}.") from error

    def _parameters(self) -> list[Tensor]:
        """Return the parameters of all groups, also the frozen ones."""
        return [p for group in self.param_groups for p in group["params"]]

    # A step.

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
            Returns the mean loss on the gradient sample. It may also call ``backward()`` on it, as for
            `torch.optim.LBFGS`; Hessian products are then differences of gradients. Without a closure the step uses the
            gradients in ``.grad``, which needs preset "robust": see `train` and `eval`. The first step fixes which of
            these three styles the optimiser uses.
        hessian : callable or Batch, optional
            Returns the mean loss on the Hessian sample; by default the gradient sample. In the averaged phase it is
            called only for the occasional tests for negative curvature.
        objective : callable or Batch, optional
            Returns the mean loss on the sample for the ratio ρ; by default the gradient sample, from which the model is
            built. On another sample the noise of both samples enters ρ. Preset "robust" always computes ρ on the
            gradient sample and accepts no objective.

        Returns
        -------
        Tensor or None
            The loss of `closure` without weight decay, averaged over the ranks. It is that of the point at which the
            gradient was taken: the parameters before the step, or, in the averaged phase, a point near the average.
        """
        if self._driver.method.exact and (hessian is not None or objective is not None):
            raise ArgumentError(
                "ARC uses one exact objective, so hessian and objective cannot be given: pass the closure alone, or "
                "use SCR."
            )
        if objective is not None and self._iteration.has_averaged_phase:
            raise ArgumentError(
                "objective cannot be used: the ratio test is on the gradient sample. Leave it out, or construct the "
                'optimiser with preset="paper".'
            )
        driver, parameters, loss = self._driver, self._parameters(), None
        step = driver.mode.step(self.param_groups, driver.iteration, closure is not None)
        with full_precision(parameters[0].device), step:
            if closure is None or driver.run_empty_closure(closure, parameters):
                if hessian is not None or objective is not None:
                    raise ArgumentError("closure is missing beside hessian or objective: pass it too.")
                if self._is_empty_step():
                    return None
                driver.step_on_gradients(self._leaves())
            else:
                others = [None if other is closure else other for other in (hessian, objective)]
                loss = driver.step((closure, others[0], others[1]), self._leaves(), parameters)
            driver.mode.finish_step(self.param_groups, driver.iteration)
        self._warn_of_unreached()
        self._lr_watch, lr_warning = self._lr_watch.after(self.param_groups)
        if lr_warning:
            warn(lr_warning)
        return loss

    def _leaves(self) -> Leaves:
        """Return the trainable parameters of the next step."""
        leaves = leaves_to_optimise(self.param_groups, self._driver.leaves, self._driver.last_leaves)
        minibatch = self._driver.method.minibatch
        if leaves.is_low_precision and (minibatch is None or minibatch.curvature):
            reason = "and was not when the optimiser was constructed: convert the model before that"
            require_full_precision(self.param_groups, leaves, reason)
        return leaves

    def _without_products(self, method: Method, leaves: Leaves, options: Mapping[str, Any]) -> Method:
        """Return the method for these leaves: with parameters of low precision it uses no Hessian products.

        Rounding the parameters changes them by more than a second-order step, and the loss by more than its decrease.
        """
        if not leaves.is_low_precision:
            return method
        if not method.on_samples or options.get("curvature"):
            remedy = "leave out curvature = True" if method.on_samples else "use sanc.SANC as it is"
            reason = f"which is not precise enough for second-order steps: {remedy}"
            require_full_precision(self.param_groups, leaves, reason)
        return with_options(method, {"curvature": False})

    def _warn_of_unreached(self) -> None:
        """Warn of parameters that the loss of the first step does not depend on."""
        unreached, self._driver.unreached = self._driver.unreached, []
        if not unreached:
            return
        names = ", ".join(f"params[{label_of(self.param_groups, p)}] of shape {tuple(p.shape)}" for p in unreached[:8])
        unnamed = f" and {len(unreached) - 8} more" if len(unreached) > 8 else ""
        warn(
            f"the loss of the first step does not reach {names}{unnamed}: check that the model uses them; if they "
            "should not change, leave them out of params or set their requires_grad to False."
        )

    def _is_empty_step(self) -> bool:
        """Return whether every `lr` and gradient is zero.

        torch.distributed.checkpoint makes such steps to create states.
        """
        if any(group["lr"] != 0.0 for group in self.param_groups):
            return False
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        local_tensor = self._leaves().local_tensor
        return bool(grads) and not any(bool(local_tensor(grad).any()) for grad in grads)

    def train(self) -> None:
        """Move the parameters to the point of gradients; for loops without closures, before a training epoch."""
        self._driver.move(at_average=False)

    def eval(self) -> None:
        """Move the parameters to the average; for loops without closures, before evaluation or saving.

        With closures the parameters are at the average after every step, and neither `train` nor `eval` is needed.
        """
        self._driver.move(at_average=True)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain numbers and tensors.

        It does not include the parameters: save them with the model, in loops without a closure after `eval`. One rank
        alone may call this method, so ranks that hold whole parameters are not compared: `sanc.save_checkpoint`, which
        all ranks call, compares them and writes nothing if they differ.
        """
        self._driver.warn_of_train_mode("state_dict() was called")
        self._driver.before_saving(self.param_groups)
        self.state.clear()
        write_states(self._driver, self.state)
        packed = super().state_dict()
        self.state.clear()  # the iteration holds the vectors
        run_state = run_state_of(self._driver, vectors=sum(map(bool, packed["state"].values())))
        packed["param_groups"][0]["run_state"] = run_state  # torch.distributed.checkpoint saves only states and groups
        return packed | {"run_state": run_state}

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state; the next step equals the next step of the saved run bit for bit.

        All entries are checked first: after an error the optimiser is as before the call.
        """
        saved_groups = require_mapping("state_dict", state_dict).get("param_groups", ())
        has_group = isinstance(saved_groups, list) and saved_groups and isinstance(saved_groups[0], dict)
        run_state_of_group = saved_groups[0].get("run_state") if has_group else None
        run_state = checked_run_state(self._driver, state_dict.get("run_state", run_state_of_group), state_dict)
        groups = checked_groups(saved_groups, self.param_groups, self.defaults)
        state = checked_state(state_dict.get("state"), groups, run_state)
        saved_attributes = {name: self.__dict__[name] for name in ("state", "param_groups")}
        try:
            super().load_state_dict({"state": state, "param_groups": groups})
            uncast_states(self.state, state, groups, self.param_groups)
            loaded = checked_vectors(self._driver, run_state, self._parameters(), self.state)
            warn_of_changes(self._driver, run_state)
        except BaseException as error:
            self.__dict__.update(saved_attributes)
            if not isinstance(error, Exception) or isinstance(error, SancError | Warning):
                raise
            text = f"state_dict cannot be used ({error}): pass what state_dict() returned."
            raise ArgumentError(text) from error
        restore(self._driver, run_state, *loaded)
        self.state.clear()  # the iteration holds the vectors


def _checked_params(params: Any) -> list[Any]:
    """Return the parameters or groups as a list; raise an error if there are none."""
    if isinstance(params, (Tensor, Mapping, nn.Module)) or not isinstance(params, Iterable):
        raise ArgumentTypeError(
            f"params = {shown(params)} is no collection of parameters: pass model.parameters(), or a list."
        )
    listed = list(params)
    if not listed:
        raise ArgumentError(
            "params is empty: pass model.parameters() of a model that has some. If it is a generator that was used "
            "before, call model.parameters() again, or pass a list."
        )
    return listed


class SANC(CubicOptimizer):
    """Adaptive cubic regularisation with escape along negative curvature (Park, Jung and Pardalos 2019)."""

    method = "sanc"


class SCR(CubicOptimizer):
    """Sub-sampled cubic regularisation (Kohler and Lucchi 2017): stays when a step is rejected."""

    method = "scr"


class ARC(CubicOptimizer):
    """Adaptive regularisation with cubics (Cartis, Gould and Toint 2011) on one exact objective."""

    method = "arc"


class CR(CubicOptimizer):
    """Cubic regularisation with a fixed σ (Nesterov and Polyak 2006); every step is accepted."""

    method = "cr"


class CRM(CubicOptimizer):
    """Cubic regularisation with a fixed σ and momentum (Wang, Zhou, Liang and Lan 2018)."""

    method = "crm"


class NCD(CubicOptimizer):
    """Negative curvature descent (Liu et al. 2018): curvature or gradient step, by the larger predicted decrease."""

    method = "ncd"


_, _, _shared = (CubicOptimizer.__doc__ or "").partition("\n")
for _class in (SANC, SCR, ARC, CR, CRM, NCD):
    _class.__doc__ = f"{_class.__doc__}\n\n    {_shared.strip()}\n"
