"""Load data files of the user: LIBSVM text, CSV tables and NumPy archives.

Features are not scaled. Labels may be numbers or text; sorted, they become 0 … c − 1.

* LIBSVM (.svm, .libsvm, .svmlight, .txt, also with .bz2 or .gz): lines ``label index:value …`` with indices from 0 or
  1. X is a CSR matrix.
* CSV: one row per line, with numeric features. If the first line is a header, the label is the column named label,
  target, class or y, in this order; otherwise it is the last column. The names may be numbers, such as those that
  pandas gives to columns without names. `Loaded.label` is the column that was chosen.
* NPZ: arrays ``X`` of shape (n, d) and ``y`` of shape (n,).
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import ZipFile

import numpy as np

from sanc.errors import shown
from sanc.lab.datasets import Loaded
from sanc.lab.readers import OPENERS, DataError

SUFFIXES = (".svm", ".libsvm", ".svmlight", ".txt", ".csv", ".npz")
"""Suffixes of data files; .bz2 or .gz may follow the suffixes of LIBSVM."""

LABELS = ("label", "target", "class", "y")
"""Names of the label column in a header."""

_UNEQUAL_SCALES = 1e3
"""Ratio of the largest entries of two columns above which a hint proposes to scale them."""

_OTHER_SEPARATORS = (";", "\t", "|")
"""Separators of tables that are not separated by commas."""

Lines: TypeAlias = list[tuple[int, list[str]]]


def is_file(name: str) -> bool:
    """Return whether a name belongs to a data file, and not to a data set of the catalogue."""
    return _kind(name) in SUFFIXES


def _kind(name: str) -> str:
    """Return the suffix that determines the form of a file, without that of its compression."""
    path = Path(name.lower())
    inner = Path(path.stem).suffix
    return inner if path.suffix in (".bz2", ".gz") and inner not in (".csv", ".npz") else path.suffix


def load(name: str, dtype: str = "float64", *, standardise: bool = False, label: str | None = None) -> Loaded:
    """Load a file. A missing file, or one of another format than its suffix, raises a `DataError`.

    With `standardise` every column gets mean 0 and deviation 1; those of a sparse matrix are only divided by their
    largest absolute value, so that it stays sparse. `label` names the label column of a CSV.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {reason}: pass the path of a {', '.join(SUFFIXES)} file.")
    if label is not None and _kind(name) != ".csv":
        raise DataError(f"label = {label!r} cannot be used with {path.name}: it names a column of a CSV file.")
    column = ""
    if _kind(name) == ".csv":
        X, labels, column = _csv(path, label)
    else:
        X, labels = _npz(path) if _kind(name) == ".npz" else _libsvm(path)
    if X.shape[0] < 2 or X.shape[1] == 0:
        reason = f"{path} has {X.shape[0]} rows of {X.shape[1]} features"
        raise DataError(f"{reason}: pass at least two rows, and separate the cells of a CSV by commas.")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise DataError(f"{path} holds labels that are not finite: remove those rows.")
    values = X.data if hasattr(X, "tocsr") else X
    if not np.isfinite(values).all():
        place = ""
        if not hasattr(X, "tocsr"):
            row, k = np.argwhere(~np.isfinite(X))[0]
            place = f", such as {X[row, k]} in row {row + 1} of the data, feature {k + 1}"
        raise DataError(f"{path} holds values that are not finite{place}: remove or impute them.")
    classes, y = np.unique(labels, return_inverse=True)
    if len(classes) < 2 or len(classes) > max(2, len(y) // 2):
        remedy = "write the class of each row into that column"
        if label is None:
            remedy = f"in a CSV it is the last column, or one named {', '.join(LABELS)}, or the one that --label names"
        raise DataError(
            f"{path} has {len(classes)} different labels in {len(y)} rows, such as {classes[0]}: the label must be a "
            f"class; {remedy}."
        )
    with np.errstate(over="ignore"):
        cast = X.astype(dtype)
    if not np.isfinite(cast.data if hasattr(cast, "tocsr") else cast).all():
        raise DataError(f"{path} holds values up to {np.abs(values).max():g}, which overflow in {dtype}: scale them.")
    if standardise:
        cast = _standardised(cast)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]  # a changed file counts as other data
    return Loaded(path.name, cast, y.astype(np.int64), len(classes), f"sha256 {digest}", column)


def _standardised(X: Any) -> Any:
    """Return the matrix with columns of mean 0 and deviation 1; those of a sparse one with entries up to 1.

    Columns are first divided by their largest absolute values, in float64: squares of 1e25 overflow in float32, and
    reciprocals of subnormal numbers in both types.
    """
    dtype = X.dtype
    X = X.astype(np.float64, copy=True)
    if hasattr(X, "tocsr"):
        X = X.tocsc()
        largest = np.asarray(abs(X).max(axis=0).todense()).reshape(-1)
        X.data /= np.repeat(np.where(largest > 0, largest, 1.0), np.diff(X.indptr))
        return X.tocsr().astype(dtype)
    largest = abs(X).max(axis=0)
    X /= np.where(largest > 0, largest, 1.0)
    X -= X.mean(axis=0)
    deviation = X.std(axis=0)
    return (X / np.where(deviation > 0, deviation, 1.0)).astype(dtype)


def label_note(loaded: Loaded) -> str:
    """Return which column of a CSV file is the label, and how to choose another; nothing for other files."""
    if not loaded.label:
        return ""
    remedy = "To choose another column, pass its name in the header with --label."
    return f"Label: {loaded.label}, {loaded.classes} classes. {remedy}"


def scale_hint(X: Any) -> str:
    """Return a hint if the scales of columns differ so much that a penalty treats them unequally; else nothing."""
    dense = abs(X).max(axis=0)
    largest = np.asarray(dense.todense() if hasattr(dense, "todense") else dense).reshape(-1)
    used = largest[largest > 0]
    if len(used) < 2 or used.max() <= _UNEQUAL_SCALES * used.min():
        return ""
    return (
        f"Hint: some columns have entries up to {used.min():g} and others up to {used.max():g}, and the penalty is the "
        "same for all: --standardise scales them."
    )


def _libsvm(path: Path) -> tuple[Any, Any]:
    """Return the features and labels of a LIBSVM file."""
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(str(path))
    except (ValueError, OSError, EOFError, OverflowError) as error:
        place = f"{path}{_faulty_line(path) if isinstance(error, ValueError) else ''}"
        raise DataError(f"{place} is not a LIBSVM file ({error}): write `label index:value …` lines.") from None
    return X, y


def _faulty_line(path: Path) -> str:
    """Return which line of a LIBSVM file cannot be read by itself; empty if each of them can."""
    from sklearn.datasets import load_svmlight_file

    with OPENERS.get(path.suffix, open)(path, "rb") as file, suppress(OSError, EOFError):
        for number, line in enumerate(file, 1):
            if not line.split(b"#")[0].strip():
                continue
            try:
                load_svmlight_file(io.BytesIO(line))
            except ValueError:
                return f", line {number},"
    return ""


def _csv(path: Path, label: str | None = None) -> tuple[Any, Any, str]:
    """Return the features, the labels, and the label column in words."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a table in UTF-8 ({error}): save it as CSV in that encoding.") from None
    rows = [(number, row) for number, row in lines if any(row)]
    if not rows:
        raise DataError(f"{path} is empty: write one row per line.")
    width = len(rows[0][1])
    if width == 1 and any(separator in rows[0][1][0] for separator in _OTHER_SEPARATORS):
        raise DataError(f"{path}, line {rows[0][0]}: {shown(rows[0][1][0])} is one cell. Separate the cells by commas.")
    for number, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path}, line {number}: {len(row)} cells instead of {width}. Separate the cells by commas."
            )
    place, named = _label_column(path, rows, label)
    column, names = f"column {place + 1} of {width}", [""] * width
    if named or _is_header(path, rows):
        _check_row_numbers(path, rows)
        column += f", {rows[0][1][place]!r}"
        names, rows = rows[0][1], rows[1:]
    else:
        column += " without a header"
    features, labels = [], []
    for number, row in rows:
        labels.append(row[place])
        if not labels[-1]:
            raise DataError(f"{path}, line {number}: the label is empty. Write one, or remove the row.")
        features.append([_feature(path, number, k, names[k], cell, named) for k, cell in enumerate(row) if k != place])
    classes = np.array(labels, float if all(map(_is_number, labels)) else str)
    return np.array(features).reshape(len(features), width - 1), classes, column


def _feature(path: Path, number: int, column: int, name: str, cell: str, is_label_known: bool) -> float:
    """Return the number in a cell."""
    where = f"column {column + 1}" + (f", {name!r}," if name else "")
    if not cell:
        raise DataError(f"{path}, line {number}: the cell in {where} is empty. Impute it, or remove the row.")
    if not _is_number(cell):
        label = ""
        if not is_label_known:
            label = (
                f" If this is the label, pass --label {name}."
                if name
                else (" If this is the label, write a header, and pass its name with --label.")
            )
        raise DataError(
            f"{path}, line {number}: {cell!r} in {where} is not a number. Encode features as numbers, without "
            f"separators of thousands, and categories as one column of 0 and 1 each.{label}"
        )
    return float(cell)


def _label_column(path: Path, rows: Lines, label: str | None = None) -> tuple[int, bool]:
    """Return the place of the label column, and whether the first line is a header that names it."""
    if label is not None:
        if label not in rows[0][1]:
            columns = ", ".join(rows[0][1][:12])
            raise DataError(f"label = {label!r} is no column of {path}: its first line has {columns}.")
        if rows[0][1].count(label) > 1:
            raise DataError(f"label = {label!r} names {rows[0][1].count(label)} columns of {path}: rename all but one.")
        place = rows[0][1].index(label)
        if any(row[place] == label for _, row in rows[1:]):
            raise DataError(
                f"label = {label!r} is a cell of the first line of {path} and of other rows: write a header above the "
                "rows, and pass the name of a column."
            )
        return place, True
    head = [cell.lower() for cell in rows[0][1]]
    for name in LABELS:
        if name in head:
            place = head.index(name)
            if any(row[place].lower() == name for _, row in rows[1:]):
                break  # the first line is data: its label occurs in other rows
            if head.count(name) > 1:
                raise DataError(f"{path} has {head.count(name)} columns named {name}: rename all but the label.")
            return place, True
    return len(head) - 1, False


def _is_header(path: Path, rows: Lines) -> bool:
    """Return whether the first line holds names of columns and not data, where no name is one of `LABELS`.

    Names differ from each other. A line with numbers is a header if its last cell is text over labels that are numbers,
    or the reverse, or if it has text over features. It also is one if it is 0, 1, 2, …, as pandas names columns, over
    labels that do not include its last cell. If both readings are plausible, as they are for consecutive integers over
    integers, an error asks for a header that names the label.
    """
    head = rows[0][1]
    *names, last = head
    if not any(map(_is_number, names)) or (head[0] == "" and _is_counted(head)):
        return True
    if not last or len(set(head)) < len(head):
        return False
    labels = Counter(row[-1] for _, row in rows[1:])
    numbers = [float(cell) for cell in head if _is_number(cell)]
    increases = all(a < b for a, b in pairwise(numbers))  # such as years
    if last in labels:  # a row, unless its integers are over decimal numbers, or number the columns
        columns = zip(*(row[:-1] for _, row in rows[1:]), strict=True)
        decimal = any(not any(map(_is_integer, column)) for column in columns)
        plausible = increases and all(map(_is_integer, head)) and (decimal or _numbers_columns(rows))
    else:
        is_text = not _is_number(last)
        if labels and all(_is_number(label) is is_text for label in labels):
            return True
        if (is_text and len(numbers) < sum(map(bool, names))) or (_is_counted(names) and len(labels) > 1):
            return True
        counts = labels.values()  # if the line is a row, its class has no other
        plausible = max(counts, default=0) > 1 and (increases or (is_text and min(counts) > 1))
    if plausible:
        raise DataError(
            f"{path}, line {rows[0][0]}: the line from {head[0]!r} to {last!r} may hold the names of columns or data. "
            "Write a header that calls the label column label."
        )
    return False


def _numbers_columns(rows: Lines) -> bool:
    """Return whether the integers of the first line are consecutive, and no other line has the same."""
    head = rows[0][1]
    return all(int(b) - int(a) == 1 for a, b in pairwise(head)) and all(row != head for _, row in rows[1:])


def _is_counted(names: Sequence[str]) -> bool:
    """Return whether the names are 0, 1, 2, …, perhaps after the empty name of a column of row numbers."""
    names = names[1:] if names[0] == "" else names
    return list(names) == [str(k) for k in range(len(names))]


def _check_row_numbers(path: Path, rows: Lines) -> None:
    """Raise an error if the first column has no name and holds the numbers of the rows."""
    if (
        rows[0][1][0] == ""
        and len(rows) > 1
        and [row[0] for _, row in rows[1:]] == list(map(str, range(len(rows) - 1)))
    ):
        raise DataError(
            f"{path}: the first column has no name and holds row numbers, which are no feature. Leave it out, with "
            "pandas by to_csv(path, index=False), or name it."
        )


def _is_number(cell: str) -> bool:
    """Return whether a cell is a number; `float` also accepts underscores between digits, as in source code."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def _is_integer(cell: str) -> bool:
    return cell.lstrip("+-").isdecimal()


def _npz(path: Path) -> tuple[Any, Any]:
    """Return the features and labels of an archive of NumPy."""
    try:
        with ZipFile(path) as members:
            for name in ("X", "y"):
                _check_size(members, name)
        with np.load(path, allow_pickle=False) as archive:
            X, y = archive["X"], archive["y"]
    except Exception as error:  # NumPy parses headers as Python, which can raise any exception
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{path} is not an archive with arrays X and y ({reason}): write it with np.savez(path, X=X, y=y)."
        ) from None
    if X.ndim != 2 or y.shape != X.shape[:1] or X.dtype.kind not in "fiub" or y.dtype.kind not in "fiubUS":
        raise DataError(
            f"{path}: X of shape {X.shape} and type {X.dtype}, and y of shape {y.shape} and type {y.dtype}, are not "
            "rows of real numbers and their labels: store X of shape (n, d) and y of shape (n,)."
        )
    return X, y


def _check_size(members: ZipFile, name: str) -> None:
    """Raise a `ValueError` if an array declares another size than its file has, before NumPy allocates that size."""
    info = members.getinfo(f"{name}.npy")
    with members.open(info) as file:
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(file)
        if version not in read:
            raise ValueError(f"{name} has fields")  # version 3 is for their names
        shape, _, dtype = read[version](file)
        declared, there = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
    if declared != there and not dtype.hasobject:
        raise ValueError(f"{name} declares {declared:,} bytes and has {there:,}")
