"""Shared fixtures: one thread, seeded generators, a sum and its counter; what a run says of skips and its machine.

Functions import torch and the package: the process that distributes tests to others needs neither, and starts sooner.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest


def pytest_collection(session: pytest.Session) -> None:
    """Use one thread: the models of the tests are too small to share. Tests of draws do not wait for idle threads."""
    if session.config.getoption("dist", "no") != "no":  # other processes run the tests
        return
    import scipy.linalg  # noqa: F401 (loads its BLAS)
    import torch
    from threadpoolctl import threadpool_limits  # scikit-learn needs it, too

    torch.set_num_threads(1)
    threadpool_limits(1, user_api="blas")

    from sanc.autograd import randomness

    # A worker has a thread that receives messages and draws nothing. After draws, the package would watch it for up to
    # ten times the time of the evaluation.
    idle = sys._current_frames().keys() - {threading.get_ident()}
    randomness._has_other_threads = lambda: len(sys._current_frames().keys() - idle) > 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules and tests, which live until the end."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", metavar="FILE", help="write what tests/faults found to a page")
    parser.addoption("--record-system", metavar="FILE", help="add this machine and the outcome to a file of systems")


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    """Report why tests were skipped, in one line per reason, and note the machine where that is asked for."""
    stats = terminalreporter.stats
    skipped = stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")
    target = config.getoption("--record-system")
    if target:
        counts = {name: len(stats.get(name, [])) for name in ("passed", "skipped", "failed", "error")}
        note_system(Path(target), counts)

    target = config.getoption("--faults-table")
    if target:
        reports = [report for name in ("passed", "failed") for report in stats.get(name, [])]
        rows = [value for report in reports for name, value in report.user_properties if name == "faults"]
        cut = exitstatus == pytest.ExitCode.INTERRUPTED
        Path(target).write_text(faults_page(rows, len(reports), cut=cut), encoding="utf-8")


def faults_page(rows: list[list], tests: int, *, cut: bool) -> str:
    """Return the page on faults: a line for each kind of fault, with its cases and what went wrong."""
    kinds: dict[str, list[int]] = {}
    for what, cases, failures in rows:
        counts = kinds.setdefault(what, [0, 0])
        counts[0], counts[1] = counts[0] + cases, counts[1] + failures
    import torch

    lines = [f"| {what} | {cases:,} | {failures:,} |" for what, (cases, failures) in sorted(kinds.items())]
    total = [sum(column) for column in zip(*kinds.values(), strict=True)] or [0, 0]
    return "\n".join([
        "# Faults",
        "",
        f"{'None' if not total[1] else f'{total[1]:,}'} of {total[0]:,} injected faults caused a failure. The files in "
        "`tests/faults` define what counts as one.",
        *(["", f"**Interrupted after {tests} tests: what is missing here was not tried.**"] if cut else []),
        "",
        "| fault | cases | failures |",
        "|---|---:|---:|",
        *lines,
        f"| all | {total[0]:,} | {total[1]:,} |",
        "",
        "## How it was measured",
        "",
        "`python -m pytest -m slow tests/faults --faults-table docs/results/faults.md` writes this page; it is seeded. "
        f"Linux, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}. "
        "[The overview](README.md#runs-and-commits) names the commit of these runs.",
        "",
    ])  # fmt: skip


def note_system(path: Path, counts: dict[str, int]) -> None:
    """Put a row for this machine and these versions in the place of an older one; tests/test_docs.py reads it."""
    import scipy
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    row = {
        "system": platform.system(),
        "machine": platform.machine(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    known = json.loads(path.read_text()) if path.exists() else []
    rows = [other for other in known if {name: other[name] for name in row} != row]
    path.write_text(json.dumps([*rows, row | counts], indent=1) + "\n")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20190609)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch. Without a GPU `torch.manual_seed` formats the stack for each kind of device, which takes longer."""
    import torch

    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture
def wide_problem():
    """Sparse rows of zeros and ones like those of a9a: columns from rare to frequent, and noisy labels."""
    import scipy.sparse

    from sanc.problems import Logistic

    def make(rng, strength, n=3000, d=60):
        X = (rng.random((n, d)) < np.geomspace(0.005, 0.8, d)).astype(float)
        y = (X @ rng.standard_normal(d) + rng.standard_normal(n) > 0).astype(int)
        return Logistic(scipy.sparse.csr_matrix(X), y, penalty="nonconvex", strength=strength)

    return make


@pytest.fixture
def readings(monkeypatch):
    """Count of products X @ w and Xᵀ @ r of logistic regression."""
    from sanc.problems import Logistic

    seen = Counter()
    for name in ("_times", "_transposed_times"):
        plain = getattr(Logistic, name)

        def call(self, block, v, name=name, plain=plain):
            seen[name] += 1
            return plain(self, block, v)

        monkeypatch.setattr(Logistic, name, call)
    return seen
