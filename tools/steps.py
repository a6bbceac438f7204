"""Compare the steps of this version with those of another revision, bit for bit.

    python tools/steps.py REVISION [--only WORD]

makes the same runs with the sources of both: the zoo, also with bounds, the starts on saddles, every method with every
preset, finite sums with and without samples, fits of one curve and of many rows, and the optimisers on a small network.
For each run it compares all iterates, of fits the solutions, and the numbers of values, gradients and Hessian
products. Runs that differ are listed; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("sanc", "scr", "arc", "cr", "crm", "ncd", "sgd")
SMALL = ("ROSENBROCK", "BEALE", "HELICAL-VALLEY", "WOOD", "POWELL-SINGULAR", "BIGGS-EXP6")

Run = Callable[[], tuple[str, list[int]]]


def composed(method: str, preset: str) -> dict[str, Any]:
    """Return the options that choose a preset; the authors' preset is an object, without the σ of CR and CRM."""
    if preset != "authors":
        return {"preset": preset}
    try:
        from sanc.lab.authors import AUTHORS
    except ImportError:
        return {"preset": preset}
    return {"preset": AUTHORS} | ({"sigma0": 5.0} if method.lower() in ("cr", "crm") else {})


def minimised(fun: Any, x0: Any, **options: Any) -> tuple[str, list[int]]:
    """Return a digest of all iterates of a run of `minimize`, and its counts."""
    import sanc

    digest = hashlib.sha256()
    options |= composed(options.get("method", "sanc"), options.pop("preset", "robust"))
    res = sanc.minimize(
        fun, x0, callback=lambda intermediate_result: digest.update(bits(intermediate_result.x)), **options
    )
    digest.update(bits(res.x))
    return digest.hexdigest()[:16], [int(res.status), res.nit, res.nfev, res.njev, res.nhev]


def bits(x: Any) -> bytes:
    """Return the bytes of an array or tensor."""
    return bytes(x.tobytes() if hasattr(x, "tobytes") else x.detach().numpy().tobytes())


def trained(kind: str, preset: str, steps: int) -> tuple[str, list[int]]:
    """Return the same of an optimiser on a small network."""
    import torch

    import sanc

    torch.manual_seed(0)
    x, y = torch.randn(200, 6, dtype=torch.float64), torch.randint(0, 3, (200,))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    opt = getattr(sanc, kind)(model.parameters(), seed=1, **composed(kind, preset))
    digest = hashlib.sha256()
    for step in range(steps):
        rows = slice(None) if kind == "ARC" else slice(40 * (step % 5), 40 * (step % 5) + 40)
        opt.step(lambda rows=rows: torch.nn.functional.cross_entropy(model(x[rows]), y[rows]))
        for p in model.parameters():
            digest.update(bits(p))
    calls = opt.record.calls
    return digest.hexdigest()[:16], [calls.value, calls.gradient, calls.product]


def fitted(curve: Any, true: Any, y: Any) -> tuple[str, list[int]]:
    """Return the digest of a fit by least squares from parameters 1.5 times the true ones, and its counts."""
    import torch

    import sanc

    start = 1.5 * torch.tensor(true, dtype=torch.float64)
    res = sanc.least_squares(lambda p: curve(*p.unbind()) - y, start)
    return hashlib.sha256(bits(res.x)).hexdigest()[:16], [int(res.status), res.nfev, res.njev]


def fitted_rows(curve: Any, true: Any, data: Any, t: Any) -> tuple[str, list[int]]:
    """Return the digest of fits of all rows together, and their counts."""
    import torch

    import sanc

    start = (1.3 * torch.tensor(true, dtype=torch.float64)).expand(len(data), -1)
    p, _, res = sanc.curve_fit(lambda x, *q: curve(*q) + 0.0 * x, t, data, start, full_output=True)
    return hashlib.sha256(bits(p)).hexdigest()[:16], [int(res.nfev.sum()), int(res.njev.sum()), int(res.nit.sum())]


def runs() -> Iterator[tuple[str, Run]]:
    """Yield the runs by name."""
    import numpy as np
    import scipy.optimize
    import torch

    import sanc
    import zoo

    for problem in zoo.PROBLEMS:
        x0 = torch.from_numpy(problem.x0)
        options = {"tol": problem.gtol, "max_iter": 300}
        yield f"zoo/{problem.name}", lambda f=problem.fun, x0=x0, o=options: minimised(f, x0, **o)
        if problem.name in SMALL:
            for method in METHODS:
                for preset in ("robust", "paper", "authors"):
                    o = {"method": method, "preset": preset, "max_iter": 40}
                    yield (
                        f"family/{problem.name}/{method}/{preset}",
                        lambda f=problem.fun, x0=x0, o=o: minimised(f, x0, **o),
                    )
    for start in (*zoo.SADDLES, *zoo.HIDDEN):
        for preset in ("robust", "paper"):
            o = {"preset": preset, "max_iter": 200}
            x0 = torch.from_numpy(start.x0)
            yield f"saddles/{start.name}/{preset}", lambda f=start.fun, x0=x0, o=o: minimised(f, x0, **o)
    draw = np.random.default_rng(0)
    X, w0 = draw.standard_normal((300, 12)), np.zeros(12)
    y = np.where(X @ draw.standard_normal(12) + draw.standard_normal(300) > 0, 1.0, -1.0)
    sums = {
        "logistic": sanc.problems.Logistic(X, (y + 1) / 2, strength=1e-3),
        "svm": sanc.problems.NonconvexSVM(X, y, strength=1e-2),
    }
    for name, problem in sums.items():
        for method in METHODS:
            for preset in ("robust", "paper", "authors"):
                for batch in (None, 32):
                    o = {"method": method, "preset": preset, "max_iter": 40, "batch_size": batch}
                    if batch is None or method != "arc":
                        yield f"sums/{name}/{method}/{preset}/{batch}", lambda p=problem, o=o: minimised(p, w0, **o)
    for problem in zoo.PROBLEMS:
        if problem.n <= 10:
            x0 = torch.from_numpy(problem.x0)
            box = scipy.optimize.Bounds(problem.x0 - 0.3 * (1.0 + abs(problem.x0)), problem.x0 + 0.4)
            o = {"tol": problem.gtol, "max_iter": 300, "bounds": box}
            yield f"bounds/{problem.name}", lambda f=problem.fun, x0=x0, o=o: minimised(f, x0, **o)
    t = torch.linspace(0.1, 10.0, 60, dtype=torch.float64)
    models = {
        "decay": (lambda a, b, c: a * torch.exp(-b * t) + c, (3.0, 0.7, 0.5)),
        "peak": (lambda a, m, w: a * torch.exp(-(((t - m) / w) ** 2)), (2.0, 5.0, 1.0)),
        "michaelis": (lambda v, k: v * t / (k + t), (3.0, 1.5)),
    }
    for name, (curve, true) in models.items():
        noise = torch.randn(40, len(t), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        data = curve(*true) + 0.05 * noise
        yield f"fits/{name}", lambda curve=curve, true=true, data=data: fitted(curve, true, data[0])
        yield f"rows/{name}", lambda curve=curve, true=true, data=data: fitted_rows(curve, true, data, t)
    for kind in ("SANC", "SCR", "ARC", "CR", "CRM", "NCD"):
        for preset in ("robust", "paper", "authors"):
            yield f"optimisers/{kind}/{preset}", lambda kind=kind, preset=preset: trained(kind, preset, 60)


def write(target: Path, only: str) -> None:
    """Make the runs with the version that is imported, and write what they did."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, run in runs():
        if only in name:
            try:
                found[name] = run()
            except Exception as error:
                found[name] = [f"{type(error).__name__}: {error}", []]
    target.write_text(json.dumps(found))


def made_with(source: Path, target: Path, only: str) -> subprocess.Popen[bytes]:
    """Start the runs with the sources in a folder."""
    path = os.pathsep.join(map(str, (source / "src", ROOT / "tests")))
    command = [sys.executable, __file__, "--write", str(target), "--only", only]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def main() -> int:
    """Compare, and list what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="what to compare the working tree with")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--write", type=Path, help="only make the runs, and write them to this file")
    chosen = parser.parse_args()
    if chosen.write:
        write(chosen.write, chosen.only)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--detach", str(other), chosen.revision], cwd=ROOT, check=True)
        try:
            files = Path(folder) / "old.json", Path(folder) / "new.json"
            started = [made_with(*pair, chosen.only) for pair in zip((other, ROOT), files, strict=True)]
            failed = [process.wait() for process in started]
            if any(failed):
                return 2
            old, new = (json.loads(file.read_text()) for file in files)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)
    differ = [name for name in old if old[name] != new.get(name)]
    for name in differ:
        print(f"{name}: {old[name]} is now {new.get(name)}")
    print(f"{len(old) - len(differ)} of {len(old)} runs take the same steps bit for bit, {len(differ)} differ.")
    return int(bool(differ))


if __name__ == "__main__":
    raise SystemExit(main())
