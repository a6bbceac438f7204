"""Data of `benchmarks.suite`: sets that are read, and sets that are generated.

A set is read from NAME.npz in a folder, as `export` writes it, or from `sanc.lab` and scikit-learn; both give the same
arrays. NumPy generates the other sets from fixed seeds. Each set has training rows and held-out rows.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse

import sanc

Arrays = dict[str, np.ndarray[Any, Any]]
"""Rows x and targets y, the held-out rows held_x and held_y, and optionally a note."""


def _lab(name: str, folder: Path | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str]:
    """Return a set of `sanc.lab` as dense float32, its labels as bytes, and a note."""
    from sanc.lab import datasets

    loaded = datasets.load(name, folder, dtype="float32")
    rows = loaded.X.toarray() if scipy.sparse.issparse(loaded.X) else loaded.X
    return rows, loaded.y.astype(np.uint8), loaded.note


def _pixels(name: str, folder: Path | None, rows: int, held: int) -> Arrays:
    x, y, _ = _lab(name, folder)
    return _split(np.rint(x * 255).astype(np.uint8), y, rows, held)


def _split(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], rows: int, held: int) -> Arrays:
    """Shuffle with a fixed seed, and split into training and held-out rows."""
    order = np.random.default_rng(0).permutation(len(x))
    first, second = order[:rows], order[rows : rows + held]
    return {"x": x[first], "y": y[first], "held_x": x[second], "held_y": y[second]}


def _covtype(folder: Path | None) -> Arrays:
    """Restore integers: `sanc.lab` maps each feature to [0, 1]; here its smallest difference becomes 1."""
    x, y, _ = _lab("covtype", folder)
    columns = []
    for column in x.T:
        values = np.unique(column)
        steps = np.rint(1.0 / np.diff(values).min()) if len(values) > 1 else 1.0
        columns.append(np.rint(column * steps).astype(np.int16))
    return _split(np.stack(columns, 1), y, 120_000, 20_000)


def _higgs(folder: Path | None) -> Arrays:
    try:
        x, y, note = _lab("higgs", folder)
        return _split(np.array(x[:35_000]), y[:35_000], 30_000, 5_000) | {"note": np.array(note)}
    except (sanc.SancError, OSError):
        rng = np.random.default_rng(5)
        x = rng.normal(size=(35_000, 28)).astype(np.float32)
        form = rng.normal(size=(28, 28)) / 28
        y = (np.einsum("ni,ij,nj->n", x, form, x) + 0.5 * rng.normal(size=len(x)) > 0).astype(np.uint8)
        return _split(x, y, 30_000, 5_000) | {"note": np.array("generated, since there is no HIGGS file")}


def _segment(folder: Path | None) -> Arrays:
    x, y, _ = _lab("segment", folder)
    return _split(x, y, 2_000, 310)


def _sklearn(name: str, rows: int, held: int) -> Arrays:
    import sklearn.datasets

    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    return _split(x.astype(np.float32), y.astype(np.float32 if name == "diabetes" else np.uint8), rows, held)


MODULES = (
    "argparse", "ast", "calendar", "cmd", "codecs", "collections", "configparser", "csv", "difflib", "doctest",
    "email.message", "enum", "fractions", "ftplib", "functools", "gettext", "heapq", "http.client", "inspect",
    "ipaddress", "json.decoder", "logging", "mailbox", "optparse", "os", "pdb", "pickle", "pickletools", "platform",
    "plistlib", "random", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "turtle", "typing", "unittest.case", "urllib.request", "uuid", "zipfile",
)  # fmt: skip
CONTEXT, SYMBOLS = 64, 96
LONG_CONTEXT = 256


def _text(length: int = 1_000_000) -> Arrays:
    """Windows of the standard library's source: newline is 0, the printable ASCII characters are 1 to 95."""
    pieces, size = [], 0
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py") or size > length:
            continue
        codes = np.frombuffer(Path(spec.origin).read_bytes(), np.uint8)
        codes = codes[(codes == 10) | ((codes >= 32) & (codes < 127))]
        pieces.append(np.where(codes == 10, 0, codes - 31).astype(np.uint8))
        size += len(codes)
    text = np.concatenate(pieces)[: length + 1]
    rows = (len(text) - 1) // CONTEXT
    x, y = (text[i : i + rows * CONTEXT].reshape(rows, CONTEXT) for i in (0, 1))
    return _split(x, y, rows - rows // 10, min(2_000, rows // 10))


def code(_: Path | None, length: int = 20_000_000) -> Arrays:
    """Windows of bytes of the source files of the standard library and of torch on this machine."""
    import sysconfig

    import torch

    pieces, size = [], 0
    for folder in (sysconfig.get_paths()["stdlib"], torch.__path__[0]):
        for path in sorted(Path(folder).rglob("*.py")):
            if "site-packages" in path.parts[len(Path(folder).parts) :] or size > length:
                continue
            pieces.append(np.frombuffer(path.read_bytes(), np.uint8))
            size += len(pieces[-1])
    text = np.concatenate(pieces)[: length + 1]
    rows = (len(text) - 1) // LONG_CONTEXT
    x, y = (text[i : i + rows * LONG_CONTEXT].reshape(rows, LONG_CONTEXT) for i in (0, 1))
    note = f"{len(text):,} bytes of Python's and torch's sources on this machine"
    return _split(x, y, rows - rows // 20, rows // 20) | {"note": np.array(note)}


SOURCES: dict[str, Callable[[Path | None], Arrays]] = {
    "cifar10": lambda folder: _pixels("cifar10", folder, 10_000, 2_000),
    "mnist": lambda folder: _pixels("mnist", folder, 20_000, 4_000),
    "covtype": _covtype,
    "higgs": _higgs,
    "segment": _segment,
    "digits": lambda folder: _sklearn("digits", 1_500, 297),
    "diabetes": lambda folder: _sklearn("diabetes", 380, 62),
    "text": lambda folder: _text(),
}
"""Sets that are read, by name."""


@cache
def raw(name: str, folder: Path | None) -> Arrays:
    """Return a set without preprocessing."""
    file = None if folder is None else folder / f"{name}.npz"
    if file is not None and file.exists():
        with np.load(file) as content:
            return dict(content)
    return SOURCES[name](folder)


def export(folder: Path, source: Path | None = None) -> None:
    """Write every set of `SOURCES` as NAME.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        path = folder / f"{name}.npz"
        try:
            np.savez_compressed(path, **raw(name, source))  # type: ignore[arg-type]
        except (sanc.SancError, OSError, ImportError) as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def images(name: str, flat: bool = False) -> Callable[[Path | None], Arrays]:
    def make(folder: Path | None) -> Arrays:
        arrays = dict(raw(name, folder))
        shape = (784,) if flat else (1, 28, 28) if name == "mnist" else (3, 32, 32)
        for key in ("x", "held_x"):
            arrays[key] = np.divide(arrays[key], 255, dtype=np.float32).reshape(-1, *shape)
        return arrays

    return make


def standard(name: str) -> Callable[[Path | None], Arrays]:
    """Return the features with mean 0 and variance 1 on the training rows."""

    def make(folder: Path | None) -> Arrays:
        arrays = dict(raw(name, folder))
        mean, spread = arrays["x"].mean(0, np.float64), arrays["x"].std(0, dtype=np.float64)
        spread[spread == 0] = 1.0
        return arrays | {key: ((arrays[key] - mean) / spread).astype(np.float32) for key in ("x", "held_x")}

    return make


def bad_scale(folder: Path | None) -> Arrays:
    arrays = standard("higgs")(folder)
    factors = np.random.default_rng(3).permutation(np.logspace(-3, 3, arrays["x"].shape[1])).astype(np.float32)
    return arrays | {key: arrays[key] * factors for key in ("x", "held_x")}


def noisy(folder: Path | None) -> Arrays:
    """Replace 40 % of the training labels by random ones."""
    arrays = images("mnist")(folder)
    rng = np.random.default_rng(4)
    labels = arrays["y"].copy()
    wrong = rng.random(len(labels)) < 0.4
    labels[wrong] = rng.integers(0, 10, int(wrong.sum()))
    return arrays | {"y": labels}


def digits(folder: Path | None) -> Arrays:
    arrays = raw("digits", folder)
    return arrays | {key: arrays[key] / np.float32(16) for key in ("x", "held_x")}


def ratings(_: Path | None) -> Arrays:
    """Ratings of 1,000 users for 500 items: rank 8, biases and noise."""
    rng = np.random.default_rng(1)
    users, items = rng.normal(size=(1000, 8)), rng.normal(size=(500, 8))
    pairs = np.stack([rng.integers(0, 1000, 110_000), rng.integers(0, 500, 110_000)], 1)
    biases = 0.5 * rng.normal(size=1000)[pairs[:, 0]] + 0.5 * rng.normal(size=500)[pairs[:, 1]] + 3.0
    values = (
        (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) / math.sqrt(8) + biases + 0.3 * rng.normal(size=len(pairs))
    )
    return _split(pairs, values.astype(np.float32), 100_000, 10_000)


def points(_: Path | None) -> Arrays:
    """Points of the unit square, enough for 1200 batches of 256 without repetition."""
    rng = np.random.default_rng(2)
    x, held = (rng.random((rows, 2), np.float32) for rows in (1200 * 256, 4096))
    return {"x": x, "y": x[:, 0], "held_x": held, "held_y": held[:, 0]}


def linear_map(_: Path | None) -> Arrays:
    """Rows of y = A x + noise; the singular values of A decrease from 4 to 0.04."""
    rng = np.random.default_rng(6)
    left, _r = np.linalg.qr(rng.normal(size=(32, 16)))
    right, _r = np.linalg.qr(rng.normal(size=(16, 16)))
    x = rng.normal(size=(12_000, 32))
    y = 4.0 * x @ (left * np.logspace(0, -2, 16)) @ right + 0.05 * rng.normal(size=(12_000, 16))
    return _split(x.astype(np.float32), y.astype(np.float32), 10_000, 2_000)


def sets(_: Path | None) -> Arrays:
    """Generate sets of 32 points on a circle, a square, a segment, two clusters or a spiral, rotated and noisy."""
    rng = np.random.default_rng(7)
    n, t = 10_000, rng.random((10_000, 32))
    y, ones = rng.integers(0, 5, n), np.ones((10_000, 32))
    side = np.floor(4 * t)
    along = 2 * (4 * t - side) - 1
    square = np.stack([np.where(side % 2 == 0, along, side - 2), np.where(side % 2 == 0, side - 1, along)], -1)
    clusters = 0.3 * rng.normal(size=(n, 32, 2)) + np.sign(t - 0.5)[..., None] * np.array([0.8, 0.0])
    circle = np.stack([np.cos(2 * np.pi * t), np.sin(2 * np.pi * t)], -1)
    spiral = np.stack([t * np.cos(4 * np.pi * t), t * np.sin(4 * np.pi * t)], -1)
    shapes = np.stack([circle, square, np.stack([2 * t - 1, 0 * ones], -1), clusters, spiral])
    x = shapes[y, np.arange(n)] * rng.uniform(0.5, 1.5, (n, 1, 2))
    angle = rng.uniform(0, 2 * np.pi, n)
    rotation = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(n, 2, 2)
    x = x @ rotation + 0.15 * rng.normal(size=x.shape) + 0.3 * rng.normal(size=(n, 1, 2))
    return _split(x.astype(np.float32), y.astype(np.uint8), 8_000, 2_000)
