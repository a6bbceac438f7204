"""The data sets of the paper: where they come from, how to get them, and how to load them.

The files are kept in one folder under their usual names, compressed or not: the argument `data_dir`, else the
environment variable SANC_DATA, else a folder of the user's cache. What has been parsed is kept in binary form beside
them in ``parsed/``, or in the user's cache where the folder cannot be written, or in SANC_CACHE where that is set.

Features are as distributed but for three things: covtype is mapped per feature to [0, 1] and segment to [−1, 1] (a
feature with one value only becomes 0, as in LIBSVM's svm-scale), and pixels are divided by 255. Labels are 0 … c − 1
in the order of the labels in the files; of two classes, the one with the larger label is 1.
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
from sanc.lab.catalogue import CATALOGUE, DataSet, Layout
from sanc.lab.download import download
from sanc.lab.readers import DataError, Source

__all__ = ["BUNDLED", "CATALOGUE", "DataError", "Loaded", "available", "data_folder", "fetch", "load", "load_set"]

BUNDLED = ("breast_cancer", "digits", "iris", "wine")
"""Small sets that come with scikit-learn, for trying things out where nothing is downloaded."""

Folder: TypeAlias = str | os.PathLike[str] | None

_SUFFIXES = ("", ".txt", ".bz2", ".xz", ".gz", ".txt.bz2", ".txt.xz", ".txt.gz")


@dataclass(frozen=True)
class Loaded:
    """A data set: features X, an array that is mapped into memory or a CSR matrix, and labels y from 0.

    Images are rows of pixels (channel, height, width). `note` says what is special about this copy, such as "subset:
    35,298 of 11,000,000 rows"; it is often empty.
    """

    name: str
    X: Any
    y: npt.NDArray[np.int64]
    classes: int
    note: str = ""


def _user_cache() -> Path:
    import pooch  # files that lie in a folder can be loaded without it

    return Path(pooch.os_cache("sanc"))


def data_folder(data_dir: Folder = None) -> Path:
    """Return the folder of the data files: `data_dir`, else $SANC_DATA, else a folder of the user's cache."""
    chosen = data_dir or os.environ.get("SANC_DATA")
    return Path(chosen).expanduser() if chosen else _user_cache()


def _cache_folder(folder: Path) -> Path:
    """Return the folder of what was parsed; one without any write bit is left alone, even by root."""
    if own := os.environ.get("SANC_CACHE"):
        return Path(own).expanduser()
    beside = folder / "parsed"
    place = beside if beside.is_dir() else folder
    return beside if os.access(place, os.W_OK) and place.stat().st_mode & 0o222 else _user_cache() / "parsed"


def _locate(dataset: DataSet, folder: Path) -> tuple[Layout, list[Source]] | None:
    """Return the first layout of which every file is there, and its sources."""
    for layout in dataset.layouts:
        suffixes = ("",) if layout.reader == "npy" or layout.members else _SUFFIXES
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
    """Load a set of the catalogue, or one of `BUNDLED`, by its name; nothing is ever downloaded here.

    Those of scikit-learn have features of mean 0 and variance 1; the digits are scaled to [0, 1]. See `load_set`.
    """
    if name not in BUNDLED:
        return load_set(CATALOGUE[one_of("name", name, CATALOGUE)], data_dir, dtype)
    import sklearn.datasets

    X, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    X = X / 16.0 if name == "digits" else (X - X.mean(0)) / X.std(0)
    return Loaded(name, X.astype(dtype), y.astype(np.int64), int(y.max()) + 1)


def load_set(dataset: DataSet, data_dir: Folder = None, dtype: str = "float64") -> Loaded:
    """Load a set that need not be in the catalogue, with X of type "float64" or "float32".

    `data_dir` is the folder of the files, by default $SANC_DATA, else a folder of the user's cache. A set is parsed
    once for each type; later loads map what is on disk. A file that is missing, damaged or not what it should be is a
    `DataError`.
    """
    kind, folder = np.dtype(one_of("dtype", dtype, ("float32", "float64"))), data_folder(data_dir)
    found = _locate(dataset, folder)
    if found is None:
        files = "; ".join(f"{folder / file.path} from {file.url}" for file in dataset.files)
        raise DataError(
            f"{dataset.name} is not in {folder}: run `sanc datasets get {dataset.name}`, or download by hand "
            f"{files}, or set SANC_DATA to the folder that holds it."
        )
    layout, sources = found
    X, y = parsed.load(dataset, layout, sources, _cache_folder(folder), kind)
    return Loaded(dataset.name, X, y, dataset.classes, _note(dataset, layout, len(y)))


def _note(dataset: DataSet, layout: Layout, rows: int) -> str:
    if layout.subset:
        return f"subset: {rows:,} of {dataset.rows:,} rows"
    return "scaled by its publishers" if layout.scaled else ""


def available(data_dir: Folder = None) -> list[dict[str, Any]]:
    """List the catalogue and what of it is in the data folder.

    Each set is a dictionary: name, rows, features, classes, size (bytes of the download, None where not known),
    present, where (the path, or the URL where it is not present) and note.
    """
    table = []
    for dataset in CATALOGUE.values():
        found = _locate(dataset, data_folder(data_dir))
        sizes = [file.size for file in dataset.files if file.size]
        where, note = dataset.files[0].url, dataset.note
        if found is not None:
            layout, sources = found
            paths = list(dict.fromkeys(source.path for source in sources))
            where = str(paths[0] if len(paths) == 1 else paths[0].parent)
            note = "a subset" if layout.subset else _note(dataset, layout, 0) or note
        row = {key: getattr(dataset, key) for key in ("name", "rows", "features", "classes")}
        size = sum(sizes) if len(sizes) == len(dataset.files) else None
        table.append(row | {"size": size, "present": found is not None, "where": where, "note": note})
    return table


def fetch(names: Iterable[str], data_dir: Folder = None) -> None:
    """Download data sets into the data folder.

    A set that is there already, in any form that `load` accepts, is left as it is; a subset does not count. A download
    that was cut goes on where it stopped, in this call (after growing pauses) or in the next one. What cannot be had,
    or is not the published file, is a `DataError` that says where to put it by hand.
    """
    folder = data_folder(data_dir)
    for dataset in [CATALOGUE[one_of("name", name, CATALOGUE)] for name in names]:
        found = _locate(dataset, folder)
        for file in dataset.files:
            if found is None or found[0].subset or (folder / file.path).is_file():
                download(file, folder / file.path)
