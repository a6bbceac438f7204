"""One run: its directory, its trace, its checkpoint, and how it goes on after an interruption.

A run directory holds ``config.json`` and ``environment.json``, an append-only ``trace.jsonl``, a ``checkpoint.pt`` that
is replaced atomically and says how long the trace was when it was written, and ``done.json`` once the run is finished.
After a kill the trace is cut back to the checkpoint and the lines that follow are written again, the same as before.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import scipy
import scipy.sparse
import torch

import sanc
from sanc import ArgumentError, Record
from sanc.lab import bundled, datasets, models
from sanc.lab.experiments import Panel, RunSpec

EVALUATIONS = 200
"""How often over its budget a run evaluates the training loss on all rows."""

Tick = Callable[[float, float, Record | None], None]
"""Told the share of the budget spent, the last known loss and the last record."""


class BusyError(Exception):
    """Another process works on this run."""


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process; the system lets go of it when the process dies, however it dies."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(str(folder)) from None
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON that a person can read, atomically."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def environment(device: str) -> dict[str, Any]:
    """Return what the run ran on."""
    commit = ""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        commit = found.stdout.strip() if found.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        pass
    return {
        "sanc": sanc.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "commit": commit,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity: they become null."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in content.items()}


class Trace:
    """The append-only trace of a run, and when to evaluate the loss."""

    def __init__(self, folder: Path, budget: int, length: int) -> None:
        self._path = folder / "trace.jsonl"
        self._file: BinaryIO = open(self._path, "ab")  # noqa: SIM115 - closed by close()
        if self._file.tell() < length:
            raise ArgumentError(f"{self._path} is shorter than its checkpoint says: remove {folder}.")
        self._file.truncate(length)
        self.budget = budget

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write((json.dumps(_finite(line), ensure_ascii=False) + "\n").encode())

    def record(self, record: Record, loss: float | None) -> None:
        """Append a record with the loss at its end, if it was evaluated."""
        flat = record.as_dict()
        calls = flat.pop("calls")
        for name in ("value", "trial_value", "hvp"):
            flat.pop(name)
        self.write(flat | {k: calls[k] for k in ("value", "gradient", "product", "paper_calls")} | {"loss": loss})

    def due(self, before: int, after: int) -> bool:
        """Whether the loss is to be evaluated in an iteration that went from `before` to `after` paper_calls."""
        step = self.budget / EVALUATIONS
        return math.floor(after / step) > math.floor(before / step) or after >= self.budget

    def flush(self) -> int:
        """Put everything on disk and return the length of the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Keeper:
    """Writes checkpoints: often enough to lose little, seldom enough to cost little."""

    def __init__(self, folder: Path, trace: Trace, every: float) -> None:
        self._path = folder / "checkpoint.pt"
        self._trace = trace
        self._every = every
        self._last = time.monotonic()

    @staticmethod
    def read(folder: Path) -> dict[str, Any] | None:
        """Return the last checkpoint, if there is one."""
        path = folder / "checkpoint.pt"
        if not path.exists():
            return None
        saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return saved

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        """Save if it is time."""
        if time.monotonic() - self._last >= self._every:
            self.save(state())

    def save(self, state: dict[str, Any]) -> None:
        """Save now; the trace is on disk before the checkpoint that counts on it."""
        import io

        buffer = io.BytesIO()
        torch.save(state | {"length": self._trace.flush()}, buffer)
        write_atomically(self._path, buffer.getvalue())
        self._last = time.monotonic()


def configuration(spec: RunSpec, n: int, dim: int, note: str) -> dict[str, Any]:
    """Return the full configuration of a run."""
    panel = spec.panel
    kinds = {"logistic": "logistic regression", "svm": "nonconvex SVM", "softmax": "softmax regression"}
    kind = kinds.get(panel.problem, f"{panel.problem.upper()}, {panel.activation}")
    sigma0 = panel.options.get("sigma0", 1.0)
    return {
        "figure": panel.figure,
        "panel": panel.name,
        "title": panel.data,
        "subtitle": f"{kind}, σ0 = {sigma0:g} (n = {n:,}, d = {dim:,})",
        "problem": panel.problem,
        "activation": panel.activation if panel.network else None,
        "data": panel.data,
        "data_note": note,
        "strength": panel.strength,
        "method": spec.method,
        "seed": spec.seed,
        "preset": spec.preset,
        "options": spec.settings(),
        "batch_size": panel.batch_size(n, spec.preset),
        "budget": panel.budget(n),
        "device": spec.device,
        "n": n,
        "dim": dim,
    }


def finished(folder: Path) -> bool:
    """Whether a run is done."""
    return (folder / "done.json").exists()


def execute(
    spec: RunSpec, out: Path, data_dir: Path | None = None, tick: Tick | None = None, checkpoint_every: float = 5.0
) -> Path:
    """Make a run, or what is left of it.

    Parameters
    ----------
    spec : RunSpec
        What to run.
    out : Path
        The output directory.
    data_dir : Path, optional
        Folder of the data files.
    tick : callable, optional
        Told of progress after every iteration.
    checkpoint_every : float
        Seconds between checkpoints.

    Returns
    -------
    Path
        The directory of the run.

    Raises
    ------
    BusyError
        Where another process has it.
    ArgumentError
        Where the directory holds a run of another configuration.
    """
    folder = out / "runs" / spec.path
    with claim(folder):
        if finished(folder):
            return folder
        loaded = load_data(spec.panel.data, data_dir, "float32" if spec.panel.network else "float64")
        run = _network if spec.panel.network else _finite_sum
        run(spec, loaded, folder, tick or (lambda *_: None), checkpoint_every)
    return folder


def load_data(name: str, data_dir: Path | None, dtype: str = "float64") -> datasets.Loaded:
    """Load a data set of the catalogue, or one that scikit-learn ships."""
    if name in bundled.NAMES:
        return bundled.load(name, dtype)
    return datasets.load(name, data_dir, dtype=dtype)


def compare(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a directory that holds a run of another configuration."""
    path = folder / "config.json"
    if not path.exists():
        return
    plain = json.loads(json.dumps(config))
    try:
        known = json.loads(path.read_text())
    except json.JSONDecodeError as problem:
        raise ArgumentError(f"{path} is no JSON ({problem}): remove {folder}.") from None
    for key, value in plain.items():
        if known.get(key) != value:
            raise ArgumentError(
                f"{folder} holds a run with {key} = {known.get(key)!r}, not {value!r}: choose another --out, or "
                "remove that directory."
            )


def describe(panel: Panel, loaded: datasets.Loaded, preset: str) -> tuple[int, int]:
    """Check that a panel can be run on its data, and return rows and variables.

    Raises
    ------
    ArgumentError
        For a batch, penalty, activation, problem or option that cannot be used.
    """
    n, features = loaded.X.shape
    for name, count in (("--batch", panel.batch), ("--budget", panel.calls)):
        sanc.errors.require_integer(name, count, 1)
    if panel.batch is not None and panel.batch > n:
        raise ArgumentError(f"--batch {panel.batch} does not fit the {n} rows of {panel.data}: pass at most {n}.")
    for method in panel.methods:
        replace(sanc.PRESETS[preset], **RunSpec(panel, method, 0, preset).settings())
    if not panel.network:
        if panel.problem in ("logistic", "svm") and loaded.classes != 2:
            raise ArgumentError(
                f"--problem {panel.problem} needs two classes, {panel.data} has {loaded.classes}: use softmax or mlp."
            )
        return n, _problem(panel, loaded).dim
    strength = panel.strength
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength < math.inf:
        raise ArgumentError(f"--strength {strength!r} cannot be used: pass a finite number ≥ 0.")
    model = _model(panel, features, loaded.classes)
    return n, sum(p.numel() for p in model.parameters())


def _model(panel: Panel, features: int, classes: int) -> torch.nn.Sequential:
    if panel.problem == "mlp":
        return models.mlp(features, classes, panel.activation)
    channels, side = image_shape(features)
    if side < 4 or channels * side * side != features:
        raise ArgumentError(f"--problem cnn needs square images and {panel.data} has {features} features: use mlp.")
    return models.cnn(channels, side, classes, panel.activation)


def image_shape(features: int) -> tuple[int, int]:
    """Channels and side of a square image of so many numbers: colour where a third of them is a square."""
    for channels in (1, 3):
        side = math.isqrt(features // channels)
        if channels * side * side == features:
            return channels, side
    return 1, math.isqrt(features)


def _open(spec: RunSpec, folder: Path, config: dict[str, Any], every: float) -> tuple[Trace, Keeper, Any]:
    """Prepare the directory; return trace, keeper and the checkpoint to go on from."""
    path = folder / "config.json"
    if path.exists():
        compare(folder, config)
    else:
        write_json(folder / "environment.json", environment(spec.device))
        write_json(path, config)
    saved = Keeper.read(folder)
    trace = Trace(folder, config["budget"], 0 if saved is None else saved["length"])
    return trace, Keeper(folder, trace, every), saved


def _finish(folder: Path, trace: Trace, status: str, loss: float, seconds: float) -> None:
    trace.flush()
    trace.close()
    write_json(folder / "done.json", _finite({"status": status, "loss": loss, "seconds": seconds}))
    (folder / "checkpoint.pt").unlink(missing_ok=True)


def _problem(panel: Panel, loaded: datasets.Loaded) -> sanc.problems.FiniteSum:
    if panel.problem == "logistic":
        return sanc.problems.Logistic(loaded.X, loaded.y, penalty="nonconvex", strength=panel.strength)
    if panel.problem == "svm":
        return sanc.problems.NonconvexSVM(loaded.X, 2 * np.asarray(loaded.y) - 1, strength=panel.strength)
    if panel.problem == "softmax":
        return sanc.problems.Softmax(loaded.X, loaded.y, loaded.classes, strength=panel.strength)
    raise ArgumentError(f"problem = {panel.problem!r} is not known: choose from logistic, svm, softmax, mlp, cnn.")


def _finite_sum(spec: RunSpec, loaded: datasets.Loaded, folder: Path, tick: Tick, every: float) -> None:
    """Run a finite sum, through `sanc.minimize`."""
    problem = _problem(spec.panel, loaded)
    config = configuration(spec, problem.n, problem.dim, loaded.note)
    trace, keeper, saved = _open(spec, folder, config, every)
    start = np.ones(problem.dim, problem.dtype)
    batch, budget = config["batch_size"], config["budget"]
    if saved is None:
        loss, calls = problem.value(start), 0
        zero = {"paper_calls": 0, "value": 0, "gradient": 0, "product": 0, "seconds": 0.0}
        trace.write({"iteration": -1, "loss": loss} | zero)
    else:
        loss, calls = saved["loss"], saved["calls"]
    judged = sanc.METHODS[spec.method].acceptance == "ratio" and not spec.amortised  # on all rows
    seconds = 0.0 if saved is None else saved["state"]["engine"]["seconds"]

    def watch(intermediate_result: Any) -> None:
        nonlocal loss, calls, seconds
        record: Record = intermediate_result.record
        now, seconds = record.calls.paper_calls, record.seconds
        if judged and not math.isnan(intermediate_result.fun):  # ρ is measured on all rows, so the loss is known
            known: float | None = float(intermediate_result.fun)
        elif judged:  # it stayed without a trial
            known = loss
        elif trace.due(calls, now):
            known = problem.value(intermediate_result.x)
        else:
            known = None
        trace.record(record, known)
        loss, calls = loss if known is None else known, now
        tick(min(1.0, now / budget), loss, record)
        state = intermediate_result.state
        keeper.offer(
            lambda: {
                "state": _converted(state, np.ndarray, lambda array: torch.from_numpy(array.copy())),
                "loss": loss,
                "calls": calls,
            }
        )

    result = sanc.minimize(
        problem,
        start,
        method=spec.method,
        preset=spec.preset,
        batch_size=batch,
        objective_batch_size=None if judged or spec.amortised else batch,
        seed=spec.seed,
        max_calls=budget,
        max_iter=10**9,
        callback=watch,
        certify=False,
        resume=None if saved is None else _converted(saved["state"], torch.Tensor, torch.Tensor.numpy),
        **spec.settings(),
    )
    _finish(folder, trace, result.status.name.lower().replace("_", " "), result.fun, seconds)


def _converted(content: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Change everything of one kind in nested mappings: files hold tensors, which load without trust, runs arrays."""
    if isinstance(content, dict):
        return {key: _converted(value, kind, change) for key, value in content.items()}
    return change(content) if isinstance(content, kind) else content


def _network(spec: RunSpec, loaded: datasets.Loaded, folder: Path, tick: Tick, every: float) -> None:
    """Run a network, through the optimisers."""
    panel = spec.panel
    device = torch.device(spec.device)
    rows = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else loaded.X
    x = torch.from_numpy(np.array(rows, np.float32)).to(device)
    y = torch.from_numpy(np.array(loaded.y, np.int64)).to(device)
    model = _model(panel, x.shape[1], loaded.classes)
    if panel.problem == "cnn":
        channels, side = image_shape(x.shape[1])
        x = x.view(len(x), channels, side, side)
    models.initialise(model, spec.seed)
    model.to(device)
    config = configuration(spec, len(x), sum(p.numel() for p in model.parameters()), loaded.note)
    trace, keeper, saved = _open(spec, folder, config, every)
    batch, budget = config["batch_size"], config["budget"]
    samples = sanc.ThreeSamples(torch.utils.data.TensorDataset(x, y), batch, seed=spec.seed)
    optimizer = _optimizer(spec, model)

    def loss_of(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(a), b)

    def parts() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "samples": samples.state_dict()}

    seconds = 0.0
    if saved is None:
        loss, calls = models.training_loss(model, x, y, panel.strength), 0
        zero = {"paper_calls": 0, "value": 0, "gradient": 0, "product": 0, "seconds": 0.0}
        trace.write({"iteration": -1, "loss": loss} | zero)
    else:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        samples.load_state_dict(saved["samples"])
        loss, calls, seconds = saved["loss"], saved["calls"], saved["seconds"]
    status = "call limit"
    while calls < budget:
        record = _step(optimizer, samples, loss_of, batch, calls, seconds, amortised=spec.amortised)
        now, seconds = record.calls.paper_calls, record.seconds
        known = models.training_loss(model, x, y, panel.strength) if trace.due(calls, now) else None
        trace.record(record, known)
        loss, calls = loss if known is None else known, now
        tick(min(1.0, now / budget), loss, record)
        if not math.isfinite(loss):
            status = "not finite"
            break
        progress = {"loss": loss, "calls": calls, "seconds": seconds}
        keeper.offer(lambda progress=progress: parts() | progress)  # type: ignore[misc]
    _finish(folder, trace, status, loss, seconds)


def _optimizer(spec: RunSpec, model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = models.groups(model, spec.panel.strength)
    if spec.method == "sgd":
        return torch.optim.SGD(groups, lr=spec.settings()["lr"])
    kind: type[sanc.SANC] = getattr(sanc, spec.method.upper())
    return kind(groups, preset=spec.preset, seed=spec.seed, hvp="double-backward", **spec.settings())


def _step(
    optimizer: torch.optim.Optimizer,
    samples: sanc.ThreeSamples,
    loss_of: Callable[..., torch.Tensor],
    batch: int,
    calls: int,
    seconds: float,
    *,
    amortised: bool = False,
) -> Record:
    """One iteration of any of the methods, as a record."""
    clock = time.perf_counter()
    g, b, f = samples.draw()
    if isinstance(optimizer, torch.optim.SGD):
        optimizer.zero_grad()
        loss_of(*g).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        total = calls + batch
        return Record(
            iteration=calls // batch,
            branch=sanc.Branch.GRADIENT,
            rho=math.nan,
            sigma=math.nan,
            grad_norm=math.nan,
            ritz_value=math.nan,
            step_norm=math.nan,
            model_decrease=math.nan,
            value=math.nan,
            trial_value=math.nan,
            krylov_dim=0,
            trials=0,
            calls=sanc.Calls(0, total, 0, total),
            seconds=seconds + time.perf_counter() - clock,
        )
    assert isinstance(optimizer, sanc.SANC | sanc.SCR | sanc.CR | sanc.CRM | sanc.NCD)
    objective = None if amortised else sanc.Batch(loss_of, *f)
    optimizer.step(sanc.Batch(loss_of, *g), hessian=sanc.Batch(loss_of, *b), objective=objective)
    assert optimizer.record is not None
    return optimizer.record
