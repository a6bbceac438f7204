"""Load data files of the user: LIBSVM text, CSV tables and NumPy archives.

Features are not scaled. Labels may be numbers or text; sorted, they become 0 … c − 1.

* LIBSVM (.svm, .libsvm, .svmlight, .txt, also with .bz2 or .gz): lines ``label index:value …`` with indices from 0 or
  1. X is a CSR matrix.
* CSV: one row per line, with numeric features. If the first line is a header, the label is the column named label,
  target, class or y; otherwise it is the last column.
* NPZ: arrays ``X`` of shape (n, d) and ``y`` of shape (n,).
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sanc.lab.datasets import Loaded
from sanc.lab.readers import DataError

SUFFIXES = (".svm", ".libsvm", ".svmlight", ".txt", ".csv", ".npz")
"""Suffixes of data files; those of LIBSVM may be followed by .bz2 or .gz."""

LABELS = ("label", "target", "class", "y")
"""Names of the label column in a header."""


def is_file(name: str) -> bool:
    """Return whether a name is that of a data file, and not of a data set of the catalogue."""
    return _kind(name) in SUFFIXES


def _kind(name: str) -> str:
    path = Path(name.lower())
    inner = Path(path.stem).suffix
    return inner if path.suffix in (".bz2", ".gz") and inner not in (".csv", ".npz") else path.suffix


def load(name: str, dtype: str = "float64") -> Loaded:
    """Load a file. A missing file, or one of another format than its suffix, raises a `DataError`."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(f"{path} does not exist: pass the path of a {', '.join(SUFFIXES)} file.")
    read = {".csv": _csv, ".npz": _npz}.get(_kind(name), _libsvm)
    X, labels = read(path)
    if X.shape[0] < 2 or X.shape[1] == 0:
        reason = f"{path} has {X.shape[0]} rows of {X.shape[1]} features"
        raise DataError(f"{reason}: pass at least two rows, and separate the cells of a CSV by commas.")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise DataError(f"{path} holds labels that are not finite: remove those rows.")
    values = X.data if hasattr(X, "tocsr") else X
    if not np.isfinite(values).all():
        raise DataError(f"{path} holds values that are not finite: remove or impute them.")
    classes, y = np.unique(labels, return_inverse=True)
    if len(classes) < 2 or len(classes) > max(2, len(y) // 2):
        raise DataError(
            f"{path} has {len(classes)} different labels in {len(y)} rows, such as {classes[0]}: the label must be a "
            f"class. In a CSV it is the last column, or one named {', '.join(LABELS)}."
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]  # a changed file counts as other data
    return Loaded(path.name, X.astype(dtype), y.astype(np.int64), len(classes), f"sha256 {digest}")


def _libsvm(path: Path) -> tuple[Any, Any]:
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(str(path))
    except (ValueError, OSError, EOFError, OverflowError) as problem:
        raise DataError(f"{path} is not a LIBSVM file ({problem}): write `label index:value …` lines.") from None
    return X, y


def _csv(path: Path) -> tuple[Any, Any]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            numbered = enumerate(csv.reader(file), 1)
            rows = [(number, row) for number, row in numbered if any(cell.strip() for cell in row)]
    except (UnicodeDecodeError, csv.Error) as problem:
        raise DataError(f"{path} is not a table in UTF-8 ({problem}): save it as CSV in that encoding.") from None
    if not rows:
        raise DataError(f"{path} is empty: write one row per line.")
    head = [cell.strip().lower() for cell in rows[0][1]]
    named = [head.index(name) for name in LABELS if name in head]
    place = named[0] if named else len(head) - 1
    if any(row[place].strip().lower() == head[place] for _, row in rows[1:] if len(row) == len(head)):
        named = []  # the first line is data: its label occurs in other rows
    if named or not any(_is_number(cell) for k, cell in enumerate(head) if k != place):  # a header
        rows = rows[1:]
    features, labels = [], []
    for number, row in rows:
        if len(row) != len(head):
            raise DataError(
                f"{path}, line {number}: {len(row)} cells instead of {len(head)}. Separate the cells by commas."
            )
        labels.append(row[place].strip())
        if not labels[-1]:
            raise DataError(f"{path}, line {number}: the label is empty. Write one, or remove the row.")
        try:
            features.append([float(cell) for k, cell in enumerate(row) if k != place])
        except ValueError as problem:
            raise DataError(f"{path}, line {number}: {problem}. Encode features as numbers.") from None
    classes = np.array(labels, float if all(map(_is_number, labels)) else str)
    return np.array(features).reshape(len(features), len(head) - 1), classes


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _npz(path: Path) -> tuple[Any, Any]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            X, y = archive["X"], archive["y"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as problem:
        raise DataError(
            f"{path} is not an archive with arrays X and y ({problem}): write it with np.savez(path, X=X, y=y)."
        ) from None
    if X.ndim != 2 or y.shape != X.shape[:1] or X.dtype.kind not in "fiub":
        raise DataError(
            f"{path}: X of shape {X.shape} and type {X.dtype}, and y of shape {y.shape}, are not rows of real numbers "
            "and their labels: store X of shape (n, d) and y of shape (n,)."
        )
    return X, y
