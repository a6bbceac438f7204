"""Make one run of a panel, or resume it after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse
import torch

import sanc
from sanc import ArgumentError
from sanc.lab import datasets, models, user_files
from sanc.lab.directory import Journal, finished, reserved
from sanc.lab.experiments import USER_FIGURE, Panel, RunSpec, Variant, setting_names

Tick: TypeAlias = Callable[[float, float, str, float], None]
"""Called with the spent fraction of the budget, the last measured loss, and the branch and σ of the last iteration."""

_SUM_NAMES = {"logistic": "logistic regression", "svm": "nonconvex SVM", "softmax": "softmax regression"}
"""Finite sums, with their names in subtitles."""


def configuration(spec: RunSpec, n: int, dim: int, note: str) -> dict[str, Any]:
    """Return the full configuration of a run."""
    panel, variant = spec.panel, spec.variant
    sanc.errors.one_of("unit", panel.unit, ("paper_calls", "calls"))
    sigma0 = panel.options.get("sigma0", Variant("sanc", spec.preset).composed().options()["sigma0"])
    hidden = sigma0 is None or "sigma0" in panel.varied
    kind = _SUM_NAMES.get(panel.problem, f"{panel.problem.upper()}, {panel.activation}")
    config = {key: getattr(panel, key) for key in ("figure", "problem", "data", "strength", "unit", "held_out")}
    config |= {key: getattr(panel, key) for key in ("penalty", "standardise", "label")}
    config |= {key: getattr(spec, key) for key in ("method", "seed", "device")}
    return config | {
        "panel": panel.name,
        "title": Path(panel.data).name,
        "subtitle": f"{kind}{'' if hidden else f', σ0 = {sigma0:g}'} (n = {n:,}, d = {dim:,})",
        "activation": panel.activation if panel.network else None,
        "widths": panel.widths if panel.problem == "mlp" else None,
        "data_note": note,
        "options": dict(variant.options),
        "preset": variant.preset,
        "batch_size": panel.batch_size(n, variant.preset),
        "budget": panel.budget(n),
        "n": n,
        "dim": dim,
    }


def load_data(
    name: str,
    data_dir: Path | None,
    dtype: str = "float64",
    *,
    standardise: bool = False,
    label: str | None = None,
) -> datasets.Loaded:
    """Load a data set of the catalogue, one of scikit-learn, or a file of the user, perhaps with scaled columns."""
    if user_files.is_file(name):
        return user_files.load(name, dtype, standardise=standardise, label=label)
    if standardise or label is not None:
        option = "--standardise" if standardise else f"--label {label!r}"
        raise ArgumentError(f"{option} cannot be used with the data set {name!r}: it is for a data file.")
    return datasets.load(name, data_dir, dtype=dtype)


def load_panel(panel: Panel, data_dir: Path | None) -> datasets.Loaded:
    """Load the data of a panel, in the precision and form that it asks for."""
    dtype = "float32" if panel.network else "float64"
    return load_data(panel.data, data_dir, dtype, standardise=panel.standardise, label=panel.label)


def objective(panel: Panel) -> str:
    """Return the objective of a panel as a formula with the name of its penalty, strength and intercept."""
    if panel.network:
        return f"mean cross entropy of the network + {panel.strength:g}/2·‖W‖², biases without penalty"
    losses = {
        "logistic": "mean of log(1 + exp(−t·xᵀw))",
        "svm": "mean of 1 − tanh(t·xᵀw)",
        "softmax": "mean cross entropy of softmax(Wx)",
    }
    l2, nonconvex = f"{panel.strength:g}/2·‖w‖²", f"{panel.strength:g}·Σ w²/(1+w²)"
    penalties = {"svm": f"{panel.strength:g}·‖w‖²", "softmax": l2}
    penalty = penalties.get(panel.problem, l2 if panel.penalty == "l2" else nonconvex)
    labels = "" if panel.problem == "softmax" else ", with labels t = ±1"
    return f"{losses[panel.problem]} + {penalty}{labels}, without an intercept"


def check_panel(panel: Panel, loaded: datasets.Loaded, preset: str) -> tuple[int, int]:
    """Check that a panel fits its data, and return the numbers of rows and variables.

    An unsuitable batch, penalty, activation, problem or option raises an `ArgumentError`.
    """
    rows, features = loaded.X.shape
    n = rows - int(panel.held_out * rows)
    for name, count in (("--batch", panel.batch_size(n, preset)), ("--budget", panel.calls)):
        sanc.errors.require_integer(name, count, 1, optional=True)
    if panel.batch is not None and panel.batch > n:
        raise ArgumentError(f"--batch {panel.batch} does not fit the {n} rows of {panel.data}: pass at most {n}.")
    for method in panel.methods:
        variant = RunSpec(panel, method, 0, preset).variant
        if variant.method in sanc.METHODS:
            variant.composed()
    if panel.figure == USER_FIGURE:
        kinds = [RunSpec(panel, method, 0, preset).variant.method for method in panel.methods]
        family = [kind for kind in kinds if kind in sanc.METHODS]
        used = {name for method in family for name in setting_names(method, preset)}
        for name in panel.options.keys() - used:
            raise ArgumentError(
                f"option {name!r} has no effect on {', '.join(panel.methods)} with preset {preset!r}: leave it out, or "
                "choose another preset."
            )
    if not panel.network:
        if panel.problem in ("logistic", "svm") and loaded.classes != 2:
            raise ArgumentError(
                f"--problem {panel.problem} needs two classes, {panel.data} has {loaded.classes}: use softmax or mlp."
            )
        return n, problem_of(panel, loaded).dim
    sanc.errors.require_not_negative("--strength", panel.strength)
    return n, sum(p.numel() for p in _model(panel, features, loaded.classes).parameters())


def image_shape(features: int) -> tuple[int, int]:
    """Return channels and side of a square image: three channels if a third of the features is a square number."""
    colour = math.isqrt(features // 3)
    return (3, colour) if 3 * colour**2 == features else (1, math.isqrt(features))


def _model(panel: Panel, features: int, classes: int) -> torch.nn.Sequential:
    """Return the network of a panel for data of this shape."""
    if panel.problem == "mlp":
        return models.mlp(features, classes, panel.activation, panel.widths)
    channels, side = image_shape(features)
    if side < 4 or channels * side * side != features:
        raise ArgumentError(f"--problem cnn needs square images and {panel.data} has {features} features: use mlp.")
    return models.cnn(channels, side, classes, panel.activation)


def problem_of(panel: Panel, loaded: datasets.Loaded) -> sanc.problems.FiniteSum:
    """Return the finite sum of a panel."""
    sanc.errors.one_of("problem", panel.problem, _SUM_NAMES)
    if panel.problem == "logistic":
        return sanc.problems.Logistic(loaded.X, loaded.y, penalty=panel.penalty, strength=panel.strength)
    if panel.problem == "svm":
        return sanc.problems.NonconvexSVM(loaded.X, 2 * np.asarray(loaded.y) - 1, strength=panel.strength)
    return sanc.problems.Softmax(loaded.X, loaded.y, loaded.classes, strength=panel.strength)


def execute(
    spec: RunSpec, out: Path, data_dir: Path | None = None, tick: Tick | None = None, checkpoint_every: float = 5.0
) -> Path:
    """Make or resume a run, and return its directory.

    `tick` is called after every iteration. `checkpoint_every` is in seconds. A directory that another process has
    locked raises a `BusyError`; one with a run of another configuration raises an `ArgumentError`.
    """
    folder = out / "runs" / spec.path
    with reserved(folder):
        if finished(folder):
            return folder
        loaded = load_panel(spec.panel, data_dir)
        run = _network if spec.panel.network else _finite_sum
        run(spec, loaded, folder, tick or (lambda *_: None), checkpoint_every)
    return folder


def _line(record: sanc.Record) -> dict[str, Any]:
    """Return a record as a line of the trace."""
    flat = asdict(record) | {"branch": str(record.branch)}
    calls = flat.pop("calls")
    for name in ("value", "trial_value", "hvp", "style"):
        flat.pop(name, None)
    return flat | {key: calls[key] for key in ("value", "gradient", "product", "paper_calls")}


def _finite_sum(spec: RunSpec, loaded: datasets.Loaded, folder: Path, tick: Tick, every: float) -> None:
    """Minimise a finite sum with `sanc.minimize`."""
    problem = problem_of(spec.panel, loaded)
    config = configuration(spec, problem.n, problem.dim, loaded.note)
    journal = Journal(folder, config, every)
    start = np.ones(problem.dim, problem.dtype)
    if journal.saved is None:
        journal.start(problem.value(start))
    variant = spec.variant
    sanc.errors.one_of("method", variant.method, sanc.METHODS)
    uses_ratio_test = isinstance(variant.composed().acceptance, sanc.RatioTest) and not spec.on_samples

    def watch(intermediate_result: Any) -> bool:
        record, loss = intermediate_result.record, None
        if uses_ratio_test:  # on all rows, so that fun is the loss; without a trial it is unchanged
            loss = journal.loss if math.isnan(intermediate_result.fun) else float(intermediate_result.fun)
        journal.step(_line(record), loss, lambda: problem.value(intermediate_result.x))
        tick(journal.fraction, journal.loss, str(record.branch), record.sigma)
        state = intermediate_result.state
        if journal.spent >= journal.budget:
            return True
        journal.save_if_due(lambda: {"state": _converted(state, np.ndarray, torch.from_numpy)})
        return False

    batch, saved = config["batch_size"], journal.saved
    result = sanc.minimize(
        problem, start, method=variant.method, seed=spec.seed,
        batch_size=batch, objective_batch_size=None if uses_ratio_test or spec.on_samples else batch,
        max_iter=10**9, callback=watch, certify=False,
        resume=None if saved is None else _converted(saved["state"], torch.Tensor, torch.Tensor.numpy),
        **variant.arguments,
    )  # fmt: skip
    status = "call limit" if journal.spent >= journal.budget else result.status.name.lower().replace("_", " ")
    journal.finish(status, result.fun, training_accuracy=accuracy_of(spec.panel, loaded, np.asarray(result.x)))


def accuracy_of(panel: Panel, loaded: datasets.Loaded, w: Any) -> float:
    """Return the fraction of all rows that the final point classifies correctly."""
    if panel.problem == "softmax":
        scores = loaded.X @ w.reshape(loaded.classes, -1).T
        return float(np.mean(np.argmax(scores, axis=1) == loaded.y))
    return float(np.mean((loaded.X @ w > 0) == np.asarray(loaded.y)))


def _converted(content: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Convert every object of one type in nested containers.

    Checkpoints hold tensors, which torch loads without executing code; the state of `sanc.minimize` holds arrays.
    """
    if isinstance(content, Mapping):
        return {key: _converted(value, kind, convert) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(_converted(value, kind, convert) for value in content)
    return convert(content) if isinstance(content, kind) else content


def _network(spec: RunSpec, loaded: datasets.Loaded, folder: Path, tick: Tick, every: float) -> None:
    """Train a network with the optimisers."""
    panel = spec.panel
    rows = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else np.array(loaded.X)
    x, y = (torch.from_numpy(part).to(spec.device) for part in (rows, np.array(loaded.y)))
    model = _model(panel, x.shape[1], loaded.classes)
    if panel.problem == "cnn":
        x = x.view(len(x), -1, *[image_shape(x.shape[1])[1]] * 2)
    if held := int(panel.held_out * len(x)):
        order = torch.from_numpy(np.random.default_rng((spec.seed, 0)).permutation(len(x)))
        (test_x, x), (test_y, y) = ((part[order[:held]], part[order[held:]]) for part in (x, y))
    models.initialise(model, spec.seed)
    model.to(spec.device)
    config = configuration(spec, len(x), sum(p.numel() for p in model.parameters()), loaded.note)
    journal = Journal(folder, config, every)
    optimiser = _optimiser(spec, model)
    batch, first_order = config["batch_size"], not hasattr(optimiser, "record")
    sizes = (batch, 1, 1) if first_order else (batch,) * 3
    samples = sanc.ThreeSamples(torch.utils.data.TensorDataset(x, y), sizes, seed=spec.seed)
    parts = {"model": model, "optimizer": optimiser, "samples": samples}
    measure = partial(models.training_loss, model, x, y, panel.strength)

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(a), b)

    def step() -> dict[str, Any]:
        g, b, f = samples.draw()
        if first_order:
            optimiser.zero_grad()
            torch.autograd.backward(loss_of(*g))
            optimiser.step()
            calls = samples.draws * batch
            return {"iteration": samples.draws - 1, "branch": str(sanc.Branch.GRADIENT), "value": 0, "gradient": calls,
                    "product": 0, "paper_calls": calls}  # fmt: skip
        objective = {} if spec.on_samples else {"objective": sanc.Batch(loss_of, *f)}
        optimiser.step(sanc.Batch(loss_of, *g), hessian=sanc.Batch(loss_of, *b), **objective)
        return _line(optimiser.record)

    if journal.saved is None:
        journal.start(measure())
    else:
        for name, part in parts.items():
            part.load_state_dict(journal.saved[name])
    status = "call limit"
    while journal.spent < journal.budget:
        clock = time.perf_counter()
        line = step()
        journal.step(line | {"seconds": journal.seconds + time.perf_counter() - clock}, None, measure)
        tick(journal.fraction, journal.loss, line["branch"], line.get("sigma", math.nan))
        if not math.isfinite(journal.loss):
            status = "not finite"
            break
        journal.save_if_due(lambda: {name: part.state_dict() for name, part in parts.items()})
    results = {"accuracy": models.accuracy(model, test_x, test_y)} if held else {}
    journal.finish(status, journal.loss, **results)


def _optimiser(spec: RunSpec, model: torch.nn.Module) -> Any:
    """Return the optimiser of a run."""
    variant, groups = spec.variant, models.groups(model, spec.panel.strength)
    if variant.method in ("sgd", "adam"):
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[variant.method]
        return kind(groups, **variant.options)
    family = getattr(sanc, variant.method.upper())
    return family(groups, seed=spec.seed, hvp="double-backward", **variant.arguments)
