"""Load and download the data sets of the paper.

The files are in one folder under their usual names, compressed or not. The folder is the argument `data_dir`, or else
the environment variable SANC_DATA, or else a folder of the user's cache. The parsed data are stored in binary form in
its subfolder ``parsed/``, or in the user's cache if that cannot be written. SANC_CACHE overrides both.

The features are those of the files, with three exceptions. Each feature of covtype is mapped to [0, 1], and each of
segment to [−1, 1]; a constant feature becomes 0, as in LIBSVM's svm-scale. Pixels are divided by 255. The labels are
0 … c − 1 in the order of the labels in the files; of two classes, the one with the larger label is 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sanc.errors import one_of
from sanc.lab import parsed
from sanc.lab.catalogue import CATALOGUE, DataSet, FileLayout
from sanc.lab.download import download
from sanc.lab.readers import DataError, Source

__all__ = ["BUNDLED", "CATALOGUE", "DataError", "Loaded", "available", "data_folder", "fetch", "load", "load_set"]

BUNDLED = ("breast_cancer", "digits", "iris", "wine")
"""Small data sets that scikit-learn provides, so that they need no download."""

Folder: TypeAlias = str | os.PathLike[str] | None

_FILE_ENDINGS = ("", ".txt", ".bz2", ".xz", ".gz", ".txt.bz2", ".txt.xz", ".txt.gz")
"""What may follow the name of a data set in the name of its file."""


@dataclass(frozen=True)
class Loaded:
    """A data set that was loaded.

    Attributes
    ----------
    name : str
        The name of the data set.
    X : memmap, ndarray or CSR matrix
        The features. Images are rows of pixels in the order (channel, height, width).
    y : ndarray
        The labels, from 0.
    classes : int
        The number of classes.
    note : str
        How this copy differs from the published set, such as "subset: 35,298 of 11,000,000 rows"; it may be empty.
    label : str
        The label column of a CSV file, in words.
    """

    name: str
    X: Any
    y: npt.NDArray[np.int64]
    classes: int
    note: str = ""
    label: str = ""


def _user_cache() -> Path:
    """Return the folder of the user for downloaded files."""
    import pooch  # imported here, since loading from a given folder does not need it

    return Path(pooch.os_cache("sanc"))


def data_folder(data_dir: Folder = None) -> Path:
    """Return the folder of the data files: `data_dir`, or else $SANC_DATA, or else a folder of the user's cache."""
    chosen = data_dir or os.environ.get("SANC_DATA")
    return Path(chosen).expanduser() if chosen else _user_cache()


def _cache_folder(folder: Path) -> Path:
    """Return the folder of the parsed data. A data folder without any write bit is not written, even by root."""
    if chosen := os.environ.get("SANC_CACHE"):
        return Path(chosen).expanduser()
    inside = folder / "parsed"
    existing = inside if inside.is_dir() else folder
    return inside if os.access(existing, os.W_OK) and existing.stat().st_mode & 0o222 else _user_cache() / "parsed"


def _locate(dataset: DataSet, folder: Path) -> tuple[FileLayout, list[Source]] | None:
    """Return the first layout whose files all exist, with its sources; None if there is none."""
    for layout in dataset.layouts:
        suffixes = ("",) if layout.reader == "npy" or layout.members else _FILE_ENDINGS
        paths = []
        for names in layout.files:
            places = product(("", dataset.name, *dataset.folders), names.split("|"), suffixes)
            candidates = (folder / inner / f"{name}{suffix}" for inner, name, suffix in places)
            paths += [path for path in candidates if path.is_file()][:1]
        if len(paths) == len(layout.files):
            members = [Source(paths[0], member) for member in layout.members]
            return layout, members or [Source(path) for path in paths]
    return None


def load(name: str, data_dir: Folder = None, dtype: str = "float64") -> Loaded:
    """Load a data set of the catalogue, or one of `BUNDLED`, by name, without downloading.

    The data sets of scikit-learn have features of mean 0 and variance 1; the digits are scaled to [0, 1]. See
    `load_set`.
    """
    if name not in BUNDLED:
        return load_set(CATALOGUE[one_of("name", name, CATALOGUE)], data_dir, dtype)
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    X = X / 16.0 if name == "digits" else (X - X.mean(0)) / X.std(0)
    return Loaded(name, X.astype(dtype), y.astype(np.int64), int(y.max()) + 1)


def load_set(dataset: DataSet, data_dir: Folder = None, dtype: str = "float64") -> Loaded:
    """Load a data set that need not be in the catalogue, with X of type "float64" or "float32".

    `data_dir` is the folder of the files, by default $SANC_DATA or else a folder of the user's cache. A set is parsed
    once for each type; later loads map the parsed form into memory. A file that is missing, damaged or of another
    format raises a `DataError`.
    """
    kind, folder = np.dtype(one_of("dtype", dtype, ("float32", "float64"))), data_folder(data_dir)
    located = _locate(dataset, folder)
    if located is None:
        files = "; ".join(f"{folder / file.path} from {file.url}" for file in dataset.files)
        raise DataError(
            f"{dataset.name} is not in {folder}: run `sanc datasets get {dataset.name}`, or download "
            f"{files} yourself, or set SANC_DATA to the folder that holds it."
        )
    layout, sources = located
    X, y = parsed.load(dataset, layout, sources, _cache_folder(folder), kind)
    return Loaded(dataset.name, X, y, dataset.classes, _note(dataset, layout, len(y)))


def _note(dataset: DataSet, layout: FileLayout, rows: int) -> str:
    """Return what differs from the published data set, for the report."""
    if layout.subset:
        return f"subset: {rows:,} of {dataset.rows:,} rows"
    return "scaled by its publishers" if layout.scaled else ""


def available(data_dir: Folder = None) -> list[dict[str, Any]]:
    """List the data sets of the catalogue, and whether they are in the data folder.

    Each set is a dictionary: name, rows, features, classes, size (bytes of the download, None if unknown), present,
    where (the path, or the URL if the set is not present) and note.
    """
    table = []
    for dataset in CATALOGUE.values():
        located = _locate(dataset, data_folder(data_dir))
        sizes = [file.size for file in dataset.files if file.size]
        where, note = dataset.files[0].url, dataset.note
        if located is not None:
            layout, sources = located
            paths = list(dict.fromkeys(source.path for source in sources))
            where = str(paths[0] if len(paths) == 1 else paths[0].parent)
            note = "a subset" if layout.subset else _note(dataset, layout, 0) or note
        row = {key: getattr(dataset, key) for key in ("name", "rows", "features", "classes")}
        size = sum(sizes) if len(sizes) == len(dataset.files) else None
        table.append(row | {"size": size, "present": located is not None, "where": where, "note": note})
    return table


def fetch(names: Iterable[str], data_dir: Folder = None) -> None:
    """Download data sets into the data folder.

    A set that is already present in any form that `load` accepts is not downloaded, unless it is a subset. An
    interrupted download is resumed, in this call after growing pauses, or in the next one. A failed download, or one
    with another checksum, raises a `DataError` that names the path for a manual download.
    """
    folder = data_folder(data_dir)
    for dataset in [CATALOGUE[one_of("name", name, CATALOGUE)] for name in names]:
        located = _locate(dataset, folder)
        for file in dataset.files:
            if located is None or located[0].subset or (folder / file.path).is_file():
                download(file, folder / file.path)
