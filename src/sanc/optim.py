"""The family as `torch.optim.Optimizer`: SANC, SCR, ARC, CR, CRM and NCD."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from sanc.amortised import KRYLOV_DIM, AmortisedEngine
from sanc.capture import Capture, as_batches
from sanc.data import Batch
from sanc.engine import Engine
from sanc.errors import ArgumentError, ArgumentTypeError, nearest, require_integer
from sanc.oracles.autograd import AutogradOracle
from sanc.oracles.base import Meter
from sanc.oracles.captured import CapturedOracle, StepPrograms, SurveyPrograms
from sanc.oracles.layout import Layout, Sample
from sanc.oracles.products import HvpMode, require_mode
from sanc.oracles.replay import HostDrawsError, derive, host_is_usual, own_randomness
from sanc.record import Record
from sanc.settings import METHODS, PRESETS, make_settings

__all__ = ["ARC", "CR", "CRM", "NCD", "SANC", "SCR"]

_Step = TypeVar("_Step", bound=Callable[..., Any])


def _hooked_while_watched(step: _Step) -> _Step:
    """Wrap a step as torch does, in hooks and in a label for its profiler, but only while there is somebody to see it.

    Beside a step of a small network the wrapping is felt.
    """
    hooked = Optimizer.profile_hook_step(step)

    @wraps(step)
    def chosen(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        watched = type(self).step is chosen and (  # or a step of a subclass has all that around it
            torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _GLOBAL_PRE_HOOKS
            or _GLOBAL_POST_HOOKS
        )
        return (hooked if watched else step)(self, *args, **kwargs)

    chosen.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it once more
    return cast(_Step, chosen)


# Where another torch keeps them elsewhere, somebody may be watching.
_GLOBAL_PRE_HOOKS, _GLOBAL_POST_HOOKS = (
    getattr(optimizer, f"_global_optimizer_{when}_hooks", True) for when in ("pre", "post")
)


class CubicOptimizer(Optimizer):
    """What the optimisers of the family share.

    Parameters
    ----------
    params : iterable
        Parameters, or dicts that define groups. A group may set ``weight_decay`` (a penalty of
        ``weight_decay/2 · ‖w‖²``, exact in value, gradient and Hessian products) and ``frozen`` (its parameters are
        left alone).
    preset : {"robust", "paper", "authors"}
        The set of rules and numbers to start from. "robust" has no constants to tune, and in SANC and SCR one Krylov
        space serves many steps; with ``refresh=0`` every step builds its own, which pays where the closure is exact.
    weight_decay : float
        Default weight decay of the groups.
    hvp : {"auto", "double-backward", "forward-over-reverse", "linearised", "finite-difference"}
        How Hessian products are made. "auto" measures the exact ones on the model and the batch of the first step,
        where that can pay (and memory is not short, as lanczos="regenerate" says), and uses the fastest from then on;
        a run is then repeated bit for bit where the choice falls the same way, and to rounding where it does not:
        another machine, another load. Name a mode to fix it.
    microbatch : int, optional
        Most rows of a `Batch` that are in memory at a time.
    capture : bool
        Record the steps as CUDA graphs and replay them, for samples given as `Batch`. The loss function must be the
        same in every step, draw no random numbers and decide nothing on the host; where a step cannot be recorded it
        is made as without, and a warning says why (as does `capture_reason`).
    seed : int, optional
        Seed of the optimiser and of the closures' randomness; by default it is drawn from torch's generator.
    check : bool
        Evaluate the loss twice at the first step and complain if it differs.
    **options
        Any field of `sanc.Settings`: sigma0, eta1, eta2, gamma, krylov_dim, L1, L2, lanczos …

    Attributes
    ----------
    record : Record or None
        What happened in the last step.
    hvp : str
        How Hessian products are made; "auto" until that has chosen.

    Notes
    -----
    Closures return the mean loss and never call ``backward``; ``.grad`` is neither read nor written. While a step
    runs, the global random states of torch, NumPy and Python are replaced by seeds of the optimiser's own, so that
    dropout makes the same draw at x and at x + s, and are put back afterwards. Module buffers (BatchNorm) move with the
    gradient only, once a step, or once a micro-batch.
    """

    method: ClassVar[str]

    def __init__(
        self,
        params: Iterable[Any],
        *,
        preset: str = "robust",
        weight_decay: float = 0.0,
        hvp: HvpMode = "auto",
        microbatch: int | None = None,
        capture: bool = False,
        seed: int | None = None,
        check: bool = True,
        **options: Any,
    ) -> None:
        method = METHODS[self.method]
        own = ("preset", "weight_decay", "hvp", "microbatch", "capture", "seed", "check")
        if isinstance(preset, str) and preset in PRESETS and PRESETS[preset].krylov_dim is None:
            options.setdefault("krylov_dim", KRYLOV_DIM)
        if "lr" in options:
            raise ArgumentError(
                f"option 'lr' (= {options['lr']!r}) has no effect here: these methods have no step size."
            )
        self._settings = make_settings(method, preset, options, own)
        if self._settings.krylov_dim is None:
            raise ArgumentError("krylov_dim = None cannot be used here: pass the most Lanczos iterations, such as 5.")
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
        super().__init__(params, {"weight_decay": weight_decay, "frozen": False})
        self._hvp: HvpMode = hvp  # as it was asked for …
        self._mode: HvpMode = hvp  # … and as it is
        if hvp == "auto" and self._settings.lanczos == "regenerate":
            self._mode = "double-backward"  # where memory is short nothing is measured
        self._microbatch = microbatch
        self._check = check
        if seed is None:
            seed = int(torch.randint(2**62, (), dtype=torch.int64))
        self._known: Layout | None = None
        self._layout()  # complains of parameters that cannot be used
        kind = AmortisedEngine if method.amortises(self._settings) else Engine
        self._engine: Engine | AmortisedEngine = kind(method, self._settings, seed)
        self._capture = Capture(self._engine, hvp) if capture else None
        self._meter = Meter()
        self._differentiates, self._inference = False, True
        self._draws_host: bool | None = None  # not known yet
        self._record: Record | None = None

    @property
    def record(self) -> Record | None:
        """What happened in the last step."""
        self._settle()
        record = self._record
        if record is not None and isinstance(record.step_norm, Tensor):
            self._record = record = replace(record, step_norm=float(record.step_norm))
        return record

    @property
    def capture_reason(self) -> str:
        """Why the last step was not replayed from a recording; empty where it was."""
        return "capture = False" if self._capture is None else self._capture.reason

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        own = (
            "_settings",
            "_hvp",
            "_mode",
            "_microbatch",
            "_check",
            "_engine",
            "_capture",
            "_known",
            "_meter",
            "_differentiates",
            "_inference",
            "_draws_host",
            "_record",
        )
        return super().__getstate__() | {name: self.__dict__[name] for name in own}

    @property
    def hvp(self) -> str:
        return self._mode if self._capture is None else self._capture.hvp_mode or self._mode

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, after its entries were checked."""
        known = {"params", "weight_decay", "frozen"}
        for name, value in param_group.items():
            if name not in known:
                raise ArgumentError(f"group option {name!r} (= {value!r}) is not known: {nearest(name, known)}.")
        decay = param_group.get("weight_decay", self.defaults["weight_decay"])
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < math.inf:
            raise ArgumentError(f"weight_decay = {decay!r} cannot be used: pass a finite number ≥ 0.")
        if not isinstance(param_group.get("frozen", False), bool):
            raise ArgumentError(f"frozen = {param_group['frozen']!r} cannot be used: pass True or False.")
        super().add_param_group(param_group)

    def _layout(self) -> Layout:
        """Gather the parameters that take part now: not frozen, and asking for a gradient."""
        leaves: list[Tensor] = []
        decays: list[float] = []
        for group in self.param_groups:
            if group["frozen"]:
                continue
            for p in group["params"]:
                if p.requires_grad:
                    leaves.append(p)
                    decays.append(group["weight_decay"])
        if not leaves:
            raise ArgumentError(
                "params has nothing to optimise: all are frozen or have requires_grad=False; free at least one."
            )
        known = self._known
        if known is not None and known.is_of(leaves, decays):
            return known
        first = leaves[0]
        if first.dtype not in (torch.float32, torch.float64):
            raise ArgumentTypeError(
                f"params hold {first.dtype}: keep the parameters in float32 or float64, and use torch.autocast in the "
                "closure for lower precision."
            )
        for p in leaves:
            if p.dtype != first.dtype or p.device != first.device:
                raise ArgumentTypeError(
                    f"params mix {first.dtype} on {first.device} with {p.dtype} on {p.device}: put all that are "
                    "optimised on one device in one type."
                )
            if p.layout != torch.strided:
                raise ArgumentTypeError(f"params hold a tensor of layout {p.layout}: pass dense parameters.")
        return Layout(leaves, decays)

    @_hooked_while_watched
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor],
        *,
        hessian: Callable[[], Tensor] | None = None,
        objective: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Make one iteration.

        Parameters
        ----------
        closure : callable or Batch
            Returns the mean loss on the gradient sample.
        hessian : callable or Batch, optional
            Returns the mean loss on the Hessian sample; by default the gradient sample.
            Where one Krylov space serves many steps it is called only when a new one is built, and in the first step.
        objective : callable or Batch, optional
            Returns the mean loss on the sample for the ratio ρ; by default the gradient sample, where the
            model that is judged comes from; on another sample ρ carries the noise of both. Preset "robust" always
            judges on the gradient sample and takes none.

        Returns
        -------
        Tensor
            The loss of `closure` before the step, without weight decay.
        """
        if METHODS[self.method].exact and (hessian is not None or objective is not None):
            raise ArgumentError(
                "ARC uses one exact objective, so hessian and objective cannot be given: pass the closure alone, or "
                "use SCR."
            )
        if objective is not None and isinstance(self._engine, AmortisedEngine):
            raise ArgumentError(
                "objective cannot be used: steps are judged on the gradient sample. Leave it out, or construct the "
                'optimiser with preset="paper".'
            )
        layout = self._layout()
        if self._capture is not None:
            loss = self._replay(as_batches(closure, hessian, objective), layout)
            if loss is not None:
                return loss
            self._settle()
        gradient = self._sample("closure", closure, 0)
        samples = [gradient]
        for role, (name, given) in enumerate((("hessian", hessian), ("objective", objective)), start=1):
            samples.append(gradient if given is None or given is closure else self._sample(name, given, role))
        everyone = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in everyone]
        for p in everyone:
            p.grad = None
        try:
            try:
                return self._step(layout, samples, host=self._draws_host is not False or not host_is_usual())
            except HostDrawsError:  # no closure did so before
                self._draws_host = True
                return self._step(layout, samples, host=True)
        finally:
            for p, grad in zip(everyone, grads, strict=True):
                p.grad = grad

    def _step(self, layout: Layout, samples: list[Sample], *, host: bool) -> Tensor:
        """Make one iteration with these samples; `host` says whether NumPy and Python are seeded meanwhile, too."""
        first = self._engine.state.iteration == 0
        oracle = AutogradOracle(layout, *samples, hvp=self._mode, meter=self._meter, exact=METHODS[self.method].exact)
        oracle.inspect = first
        oracle.expected = self._settings.krylov_dim or oracle.expected
        oracle.differentiates = self._differentiates
        # Somebody's hooks may keep what they see.
        oracle.inference = self._inference and not any(leaf._backward_hooks for leaf in layout.leaves)
        oracle.lends = True
        oracle.seeds_host = host
        with own_randomness(oracle.device, host=host), torch.enable_grad():
            loss = self._iterate(oracle, samples[0] if first else None)
        self._differentiates, self._mode = oracle.differentiates, oracle.hvp
        self._inference = self._inference and not oracle.needs_grad_mode
        self._draws_host = bool(self._draws_host) or oracle.draws_host
        return loss

    def _iterate(self, oracle: AutogradOracle, probed: Sample | None = None) -> Tensor:
        """Make one iteration with an oracle; where anything goes wrong nothing has changed."""
        x = point = oracle.start()
        meter, record, state, layout = self._meter.copy(), self._record, self._engine.state, self._known
        try:
            if probed is not None:
                self._probe(oracle, x, probed)
            self._gather(oracle.layout)
            point, made = self._engine.iterate(x, oracle)
            oracle.look_for_draws()
            went_back = isinstance(self._engine, AmortisedEngine) and self._engine.went_back
            if went_back or not (math.isfinite(made.grad_norm) and math.isfinite(made.value)):
                oracle.undo_training()
            self._record = made
        except BaseException:
            oracle.undo_training()
            self._meter, self._record, self._engine.state, self._known = meter, record, state, layout
            raise
        finally:
            oracle.load(point)
            oracle.close()
        assert oracle.raw_loss is not None
        return oracle.raw_loss

    def _replay(self, given: tuple[Any, Any, Any], layout: Layout) -> Tensor | None:
        """Make one iteration by recordings; None where it is to be made eagerly."""
        assert self._capture is not None
        for name, sample in zip(("closure", "hessian", "objective"), given, strict=True):
            if not isinstance(sample, Batch) and (sample is not None or name == "closure"):
                self._sample(name, sample, 0)  # complains of what cannot be used
        self._gather(layout)
        grads = [p.grad for p in layout.leaves]
        try:
            for p in layout.leaves:
                p.grad = None
            return self._replay_bare(given, layout)
        finally:
            for p, grad in zip(layout.leaves, grads, strict=True):
                p.grad = grad

    def _replay_bare(self, given: tuple[Any, Any, Any], layout: Layout) -> Tensor | None:
        assert self._capture is not None
        programs = self._capture.programs(given, layout, self._microbatch)
        if programs is None:
            return None
        if isinstance(programs, SurveyPrograms):
            with torch.enable_grad():
                return self._iterate(CapturedOracle(programs, given, self._meter))
        assert isinstance(programs, StepPrograms)
        assert self._capture.deferred is not None
        programs.inputs.fill(given)
        if self._capture.deferred.iterate(programs, programs.tally(self._meter)):
            return programs.raw.clone()
        self._capture.reason = "the gradient of the step before vanished"
        return None

    def _sample(self, name: str, given: Any, role: int) -> Sample:
        if not callable(given):
            raise ArgumentTypeError(
                f"{name} = {given!r:.60} cannot be called: pass a function of no arguments that returns the mean loss."
            )
        seed = derive(self._engine.state.seed, self._engine.state.iteration, role)
        if isinstance(given, Batch):
            return Sample(name, given.parts(self._microbatch), len(given), seed)
        if self._microbatch is not None:
            raise ArgumentTypeError(
                f"{name} is a plain function, which microbatch = {self._microbatch} cannot cut: pass sanc.Batch(loss, "
                "*tensors)."
            )
        return Sample(name, [(1.0, given)], 1, seed)

    def _probe(self, oracle: AutogradOracle, x: Tensor, sample: Sample) -> None:
        """Complain before the first step of what would only show later; nothing of it is counted.

        That is a closure that changes between two calls, such as one that draws a new batch each time, and a loss
        without second derivatives, where the first Krylov space comes after a few steps only.
        """
        counts = self._meter_counts()
        if self._check:
            first, second = oracle.evaluate(x, sample, graph=True), oracle.evaluate(x, sample)
            if math.isfinite(first) and abs(first - second) > 1e-3 * max(abs(first), abs(second)) + 1e-6:
                self._meter = oracle.meter = Meter(**counts)
                raise ArgumentError(
                    f"closure returned {first!r} and then {second!r} at the same parameters: fix the batch before the "
                    "step and return the loss on it, so that values can be compared; check=False turns this test off."
                )
        if isinstance(self._engine, AmortisedEngine):
            operator = oracle.hessian(x)
            operator(torch.ones_like(x))
            operator.release()
        self._meter = oracle.meter = Meter(**counts)

    def _settle(self) -> None:
        """Hear from the device what became of the last step, if that is still open."""
        if self._capture is not None:
            self._record = self._capture.settle() or self._record

    def _meter_counts(self) -> dict[str, int]:
        return asdict(self._meter)

    def _gather(self, layout: Layout) -> None:
        """Let the engine drop its vectors if they belong to other parameters than these."""
        if self._known is None or not self._known.matches(layout):
            if self._capture is not None:
                self._capture.forget()
            self._engine.forget()
        self._known = layout

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as plain numbers and tensors.

        The parameters themselves are the model's to save.
        """
        self.state.clear()
        self._settle()
        if self._known is not None:
            for name, vector in self._engine.vectors().items():
                if self._capture is not None:
                    vector = vector.clone()  # recordings change theirs in place
                for p, part in zip(self._known.leaves, self._known.split(vector), strict=True):
                    self.state[p][name] = part
        packed = super().state_dict()
        self.state.clear()  # the engine has them
        return packed | {
            "engine": {
                "method": self.method,
                "settings": asdict(self._settings),
                "numbers": self._engine.numbers(),
                "meter": self._meter_counts(),
                "hvp": self._mode,
                "vanished": self._capture is not None and self._capture.vanished,
            }
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state; the next step is bit for bit the one the saved run would have made."""
        engine = state_dict.get("engine")
        if not isinstance(engine, dict):
            raise ArgumentError("state_dict has no entry 'engine': pass what state_dict() of this optimiser returned.")
        wanted = {"method", "settings", "numbers", "meter"}
        if not wanted <= engine.keys() or set(engine["meter"]) != set(Meter.__slots__):
            raise ArgumentError(f"state_dict['engine'] has {sorted(engine)}: pass what state_dict() returned.")
        if engine["method"] != self.method:
            raise ArgumentError(
                f"state_dict is of {engine['method']!r}, not {self.method!r}: load it into that method."
            )
        if set(engine["numbers"]) != set(self._engine.numbers()):
            raise ArgumentError(
                "state_dict is of another iteration than this optimiser's: construct it with the same preset and with "
                "refresh = 0, or not 0, as in the run that was saved."
            )
        mine = asdict(self._settings)
        for name, value in engine["settings"].items():
            if mine.get(name) != value:
                text = f"the state was saved with {name} = {value!r} and this optimiser has {mine.get(name)!r}"
                warnings.warn(f"{text}: the run goes on, but not as the saved one would have.", stacklevel=2)
        if self._capture is not None:
            self._capture.forget()
        self._load_mode(engine.get("hvp", self._hvp))
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        saved = [p for group in self.param_groups for p in group["params"] if self.state.get(p)]
        self._known = Layout(saved, [0.0] * len(saved)) if saved else None
        vectors = {}
        if self._known is not None:
            names = set.intersection(*(set(self.state[p]) for p in saved))
            vectors = {name: self._known.join([self.state[p][name] for p in saved]) for name in names}
        self.state.clear()
        self._engine.restore(engine["numbers"], vectors)
        if self._capture is not None:
            self._capture.vanished = bool(engine.get("vanished", False))
        self._meter = Meter(**engine["meter"])
        self._record = None

    def _load_mode(self, saved: HvpMode) -> None:
        """Make products as the saved run did, unless this optimiser was told another way."""
        require_mode(saved)
        if self._hvp == "auto":
            self._mode = saved
        elif saved not in ("auto", self._hvp):
            text = f"the state was saved with hvp = {saved!r} and this optimiser has {self._hvp!r}"
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
