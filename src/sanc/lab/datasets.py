"""The data sets of the paper: where they come from, how to get them, and how to load them.

The files are kept in one folder under their usual names, compressed or not: the argument `data_dir`, else the
environment variable SANC_DATA, else a folder of the user's cache. What has been parsed is kept in binary form beside
them in ``parsed/``, or in the user's cache where the folder cannot be written, or in SANC_CACHE where that is set; it
is opened memory-mapped, compared with its checksum once in a process, and parsed again when a file has changed.

Features are as distributed but for three things: covtype is mapped per feature to [0, 1] and segment to [−1, 1] (a
feature with one value only becomes 0, as in LIBSVM's svm-scale), and pixels are divided by 255. Labels are 0 … c − 1
in the order of the labels in the files; of two classes, the one with the larger label is 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sanc import ArgumentError, errors
from sanc.lab import parsed
from sanc.lab.catalogue import CATALOGUE, DataSet, Layout, Part, RemoteFile
from sanc.lab.download import Progress, download, pooch_module, writable
from sanc.lab.readers import DataError, Source

__all__ = ["CATALOGUE", "DataError", "DataSet", "Layout", "Loaded", "RemoteFile", "available", "data_folder", "fetch",
           "load", "load_set"]  # fmt: skip

_SUFFIXES = ("", ".txt", ".bz2", ".xz", ".gz", ".txt.bz2", ".txt.xz", ".txt.gz")


@dataclass(frozen=True)
class Loaded:
    """A data set: features X, an array or CSR matrix that is mapped into memory and read-only, and labels y from 0.

    Images are rows of pixels (channel, height, width). `note` says what is special about this copy, such as "subset:
    35,298 of 11,000,000 rows"; it is often empty.
    """

    name: str
    X: Any
    y: npt.NDArray[np.int64]
    classes: int
    note: str = ""


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the data files: `data_dir`, else $SANC_DATA, else a folder of the user's cache."""
    chosen = data_dir or os.environ.get("SANC_DATA")
    return Path(chosen).expanduser() if chosen else Path(pooch_module().os_cache("sanc"))


def _cache_folder(folder: Path) -> Path:
    own = os.environ.get("SANC_CACHE")
    if own:
        return Path(own).expanduser()
    beside = folder / "parsed"
    if writable(beside if beside.is_dir() else folder):
        return beside
    return Path(pooch_module().os_cache("sanc")) / "parsed"


def _find(name: str) -> DataSet:
    if name not in CATALOGUE:
        hint = errors.nearest(str(name), CATALOGUE)
        raise ArgumentError(f"name = {name!r} is not a data set of the catalogue: {hint}.")
    return CATALOGUE[name]


def _places(dataset: DataSet, folder: Path, layout: Layout, names: str) -> Iterator[Path]:
    """Yield the paths at which a file of the layout may lie."""
    exact = layout.reader == "npy" or layout.members
    for inner in ("", dataset.name, *dataset.folders):
        for name in names.split("|"):
            for suffix in ("",) if exact else _SUFFIXES:
                yield folder / inner / f"{name}{suffix}"


def _locate(dataset: DataSet, folder: Path, part: Part, *, whole: bool = False) -> tuple[Layout, list[Source]] | None:
    """Return the first layout of which every file is there, and its sources."""
    for layout in dataset.layouts:
        if layout.part != part or (whole and layout.subset):
            continue
        found = [next((p for p in _places(dataset, folder, layout, n) if p.is_file()), None) for n in layout.files]
        paths = [path for path in found if path is not None]
        if len(paths) == len(found):
            pieces = [(paths[0], member) for member in layout.members] or [(path, "") for path in paths]
            digests = layout.digests or ("",) * len(pieces)
            return layout, [Source(*piece, digest) for piece, digest in zip(pieces, digests, strict=True)]
    return None


def load(name: str, data_dir: str | os.PathLike[str] | None = None, **options: Any) -> Loaded:
    """Load a data set of the catalogue; nothing is ever downloaded here.

    Parameters
    ----------
    name : str
        Key in `CATALOGUE`.
    data_dir : path, optional
        Folder of the files; by default $SANC_DATA, else a folder of the user's cache.
    **options
        See `load_set`.
    """
    return load_set(_find(name), data_dir, **options)


def load_set(
    dataset: DataSet,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    dtype: npt.DTypeLike = "float64",
    part: Part = "train",
    progress: Progress | None = None,
) -> Loaded:
    """Load a set that need not be in the catalogue. It is parsed once for each type; later loads map what is on disk.

    Parameters
    ----------
    dataset : DataSet
        What is known of it.
    data_dir : path, optional
        As in `load`.
    dtype : {"float64", "float32"}
        Type of X.
    part : {"train", "test"}
        mnist and cifar10 have a test part.
    progress : callable, optional
        Called with the name, the rows read so far and their total (0 where not known) while the files are parsed.

    Raises
    ------
    DataError
        Where a file is missing, damaged or not what it should be.
    """
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ArgumentError(f'dtype = {dtype!r} cannot be used: pass "float64" or "float32".')
    parts = sorted({layout.part for layout in dataset.layouts}, reverse=True)
    if part not in parts:
        raise ArgumentError(f"part = {part!r} does not exist in {dataset.name}: choose from {', '.join(parts)}.")
    folder = data_folder(data_dir)
    found = _locate(dataset, folder, part)
    if found is None:
        wanted = [file for file in dataset.files if part in file.parts]
        files = "; ".join(f"{folder / file.path} from {file.url}" for file in wanted)
        raise DataError(
            f"{dataset.name} is not in {folder}: run `sanc datasets get {dataset.name}`, or download by hand "
            f"{files}, or set SANC_DATA to the folder that holds it.",
            folder,
        )
    layout, sources = found
    X, y = parsed.load(dataset, layout, sources, _cache_folder(folder), kind, progress)
    return Loaded(dataset.name, X, y, dataset.classes, _subset(len(y), dataset) if layout.subset else layout.note)


def _subset(rows: int, dataset: DataSet) -> str:
    return f"subset: {rows:,} of {dataset.rows:,} rows"


def available(data_dir: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """List the catalogue and what of it is in the data folder.

    Each set is a dictionary: name, rows, features, classes, size (bytes of the download, None where not known),
    present, where (the path, or the URL where it is not present) and note.
    """
    folder = data_folder(data_dir)
    table = []
    for dataset in CATALOGUE.values():
        found = _locate(dataset, folder, "train")
        sizes = [file.size for file in dataset.files]
        note, where = dataset.note, dataset.files[0].url if dataset.files else ""
        if found is not None:
            layout, sources = found
            paths = list(dict.fromkeys(source.path for source in sources))
            where = str(paths[0] if len(paths) == 1 else paths[0].parent)
            note = _subset(sum(map(_npy_rows, paths[0::2])), dataset) if layout.subset else layout.note or note
        table.append(
            {key: getattr(dataset, key) for key in ("name", "rows", "features", "classes")}
            | {"size": None if None in sizes else sum(size or 0 for size in sizes), "present": found is not None}
            | {"where": where, "note": note}
        )
    return table


def _npy_rows(path: Path) -> int:
    try:
        return len(np.lib.format.open_memmap(path, mode="r"))
    except (OSError, ValueError, EOFError, TypeError):
        return 0


def fetch(
    names: Iterable[str], data_dir: str | os.PathLike[str] | None = None, *, progress: Progress | None = None
) -> None:
    """Download data sets into the data folder.

    A set that is there already, in any form that `load` accepts, is left as it is; a subset does not count. A download
    that was cut goes on where it stopped, in this call (after growing pauses) or in the next one. `progress` is called
    with the name of the file, the bytes that are there and their total. What cannot be had, or is not the published
    file, is a `DataError` that says where to put it by hand.
    """
    sets = [_find(name) for name in ([names] if isinstance(names, str) else names)]
    folder = data_folder(data_dir)
    parts: tuple[Part, ...] = ("train", "test")
    for dataset in sets:
        there = {part for part in parts if _locate(dataset, folder, part, whole=True)}
        for file in dataset.files:
            target = folder / file.path
            if target.is_file() or not there.issuperset(file.parts):
                download(file, target, progress)
