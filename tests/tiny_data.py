"""A data set of four rows, and files of it with every compression."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

from sanc.lab.catalogue import DataSet, FileLayout, RemoteFile

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".bz2": bz2.compress,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
}

TEXT = b"-1 1:0.5 3:2\n+1\n-1 2:-1e-3\n1 1:1 2:2 3:3\n"
LABELS = [0, 1, 0, 1]
TINY = DataSet("tiny", 4, 3, (RemoteFile("http://127.0.0.1:9/tiny", "tiny"),), (FileLayout("libsvm", ("tiny",)),))


def put(folder: Path, name: str, content: bytes) -> Path:
    """Write a file, compressed according to its suffix."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(COMPRESS[path.suffix if path.suffix in COMPRESS else ""](content))
    return path


def names(folder: Path) -> list[str]:
    """Return the names of the files in a folder; none if it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []
