"""Readers of the published formats: decompressed first, then read in pieces by scikit-learn and NumPy.

Every reader yields rows of X, dense or CSR, with the labels as they stand in the file. Whatever is wrong with a file
becomes a `DataError` that names it, the line where it has lines, and the remedy.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sanc import ArgumentError
from sanc.lab.catalogue import DataSet

__all__ = ["READERS", "DataError", "Source", "unpack"]

Array: TypeAlias = npt.NDArray[Any]
Chunk: TypeAlias = tuple[Any, Array]

BLOCK = 32 << 20
"""Bytes of LIBSVM text that are parsed at a time."""

_OPENERS: dict[str, Callable[[Any], Any]] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError)


class DataError(ArgumentError):
    """A data file is missing, damaged or not what its name says; the message names it and the remedy.

    Attributes
    ----------
    path : Path or None
        The file.
    line : int or None
        The line of a text file, counted from 1.
    """

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.path, self.line = path, line


@dataclass(frozen=True)
class Source:
    """A file to read, compressed or not, or a member of an archive.

    Attributes
    ----------
    path : Path
        The file.
    member : str
        Name inside the tar archive `path`; empty for a file of its own.
    digest : str
        SHA-256 of the content after decompression (of text: with line ends LF and without blank lines), or empty.
    """

    path: Path
    member: str = ""
    digest: str = ""

    def error(self, what: str, line: int | None = None) -> DataError:
        """Return the error that says what is wrong, where, and what to do."""
        place = f"{self.path} ({self.member})" if self.member else str(self.path)
        place += f", line {line}" if line else ""
        remedy = "The file may be damaged or be another one: remove it and fetch it again."
        return DataError(f"{place}: {what}. {remedy}", self.path, line)


def unpack(source: Source, target: Path, *, text: bool) -> Path:
    """Return the content as a plain file, at `target` where it had to be decompressed or compared with a checksum."""
    if source.path.suffix not in _OPENERS and not source.digest:
        plain = source.path
    else:
        found = hashlib.sha256()
        try:
            with ExitStack() as stack, target.open("wb") as output:
                stream = _open(source, stack)
                for piece in stream if text else iter(lambda: stream.read(1 << 20), b""):
                    output.write(piece)
                    if not text:
                        found.update(piece)
                    elif piece.strip():
                        found.update(piece.rstrip(b"\r\n") + b"\n")
        except _BROKEN as problem:
            if isinstance(problem, OSError) and problem.errno is not None:
                raise
            cut = "ends too early" if isinstance(problem, EOFError) else "is corrupt or of another kind"
            raise source.error(f"the compressed stream {cut} ({problem})") from problem
        if source.digest and found.hexdigest() != source.digest:
            found_digest = f"its SHA-256 is {found.hexdigest()} instead of {source.digest}"
            raise source.error(f"the content differs from the published file: {found_digest}")
        plain = target
    if plain.stat().st_size == 0:
        raise source.error("the file is empty")
    if text and not source.digest:  # nothing else could tell whether the last number is whole
        with plain.open("rb") as file:
            file.seek(-1, io.SEEK_END)
            if file.read(1) != b"\n":
                raise source.error("the last line has no line end, so it may be cut")
    return plain


def _open(source: Source, stack: ExitStack) -> Any:
    raw = stack.enter_context(source.path.open("rb"))
    if source.member:
        archive = stack.enter_context(tarfile.open(fileobj=raw))  # noqa: SIM115
        found = next((info for info in archive if info.name == source.member), None)
        stream = archive.extractfile(found) if found is not None else None
        if stream is None:
            raise source.error("the archive has no such member")
        return stack.enter_context(stream)
    opener = _OPENERS.get(source.path.suffix)
    return stack.enter_context(opener(raw)) if opener else raw


def _parse(file: Any, dataset: DataSet, dtype: np.dtype[Any], begin: int = 0, length: int = -1) -> Chunk:
    """Let scikit-learn read a range of bytes, and check what it does not."""
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(
        file, n_features=dataset.features, dtype=dtype, zero_based=False, offset=begin, length=length
    )
    if not np.isfinite(X.data).all():
        raise ValueError("a value is not finite")
    for label in np.unique(y):
        if label not in dataset.labels:
            raise ValueError(f"the label {label:g} is not one of {', '.join(map(str, dataset.labels))}")
    return X, y


def _libsvm(
    sources: Sequence[Source], plain: Sequence[Path], dataset: DataSet, dtype: np.dtype[Any]
) -> Iterator[Chunk]:
    """Read ``label index:value index:value …`` with rising indices from 1, a range of bytes after the other."""
    for source, path in zip(sources, plain, strict=True):
        size, begin = path.stat().st_size, 0
        with path.open("rb") as file:
            while begin < size:
                file.seek(begin + BLOCK)
                file.readline()
                while (line := file.readline()) and not line.split(b"#")[0].strip():
                    pass  # a range must end with a row: scikit-learn does not stop at blank lines
                end, offset = file.tell(), max(begin - 1, 0)
                try:
                    yield _parse(str(path), dataset, dtype, offset, end - 1 - offset)
                except ValueError as problem:
                    raise _located(source, file, begin, problem, dataset, dtype) from problem
                begin = end


def _located(source: Source, file: Any, begin: int, problem: ValueError, *rest: Any) -> DataError:
    """Find the first faulty line of the range that begins at a byte."""
    file.seek(0)
    place = 0
    for number, line in enumerate(file, 1):
        place += len(line)
        if place > begin:
            try:
                _parse(io.BytesIO(line), *rest)
            except ValueError as fault:
                return source.error(str(fault).rstrip("."), number)
    return source.error(str(problem).rstrip("."))


def _statlog(
    sources: Sequence[Source], plain: Sequence[Path], dataset: DataSet, dtype: np.dtype[Any]
) -> Iterator[Chunk]:
    """Read the features and then the label in each line."""
    for source, path in zip(sources, plain, strict=True):
        try:
            table = np.loadtxt(path, ndmin=2)
        except ValueError as problem:
            raise source.error(f"not a table of numbers ({problem})") from problem
        if table.shape[1] != dataset.features + 1:
            raise source.error(f"{table.shape[1]} columns instead of {dataset.features} features and a label")
        yield table[:, :-1].astype(dtype), table[:, -1]


def _records(source: Source, path: Path, magic: int | None, axes: int, width: int) -> tuple[list[int], Array]:
    """Return the sizes in the header of an idx file, if it has one, and the bytes behind it as rows."""
    content = np.fromfile(path, dtype=np.uint8)
    sizes: list[int] = []
    if magic is not None:
        numbers = content[: 4 * (axes + 1)].tobytes()
        if len(numbers) < 4 * (axes + 1) or int.from_bytes(numbers[:4], "big") != magic:
            raise source.error(f"an idx file of this kind begins with the magic number {magic}, not {numbers[:4]!r}")
        sizes = np.frombuffer(numbers, dtype=">u4")[1:].tolist()
        content = content[4 * (axes + 1) :]
    if len(content) % width or (sizes and len(content) != sizes[0] * width):
        wanted = f"{sizes[0]} records" if sizes else "a whole number of records"
        raise source.error(f"{len(content)} bytes are not {wanted} of {width} bytes")
    return sizes, content.reshape(-1, width)


def _pixels(pixels: Array, dtype: np.dtype[Any]) -> Array:
    return np.divide(pixels, 255, dtype=dtype)


def _idx(sources: Sequence[Source], plain: Sequence[Path], dataset: DataSet, dtype: np.dtype[Any]) -> Iterator[Chunk]:
    """Read MNIST's pair of files."""
    sizes, pixels = _records(sources[0], plain[0], 2051, 3, dataset.features)
    if sizes[1] * sizes[2] != dataset.features:
        raise sources[0].error(f"the images have {sizes[1]} × {sizes[2]} pixels instead of {dataset.features}")
    _, labels = _records(sources[1], plain[1], 2049, 1, 1)
    if len(labels) != len(pixels):
        raise sources[1].error(f"{len(labels)} labels for {len(pixels)} images")
    yield _pixels(pixels, dtype), labels[:, 0]


def _cifar(sources: Sequence[Source], plain: Sequence[Path], dataset: DataSet, dtype: np.dtype[Any]) -> Iterator[Chunk]:
    """Read records of a label byte and the pixels."""
    for source, path in zip(sources, plain, strict=True):
        _, records = _records(source, path, None, 0, dataset.features + 1)
        yield _pixels(records[:, 1:], dtype), records[:, 0]


def _npy(sources: Sequence[Source], plain: Sequence[Path], dataset: DataSet, dtype: np.dtype[Any]) -> Iterator[Chunk]:
    """Read pairs of .npy files, a matrix and its labels."""
    arrays = []
    for index, (source, path) in enumerate(zip(sources, plain, strict=True)):
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, EOFError) as problem:
            raise source.error(f"not a readable .npy file ({problem})") from problem
        if array.ndim != 2 - index % 2 or not np.issubdtype(array.dtype, np.number):
            raise source.error(f"an array of numbers with {2 - index % 2} axes is expected")
        arrays.append(array)
    for source, X, y in zip(sources[1::2], arrays[0::2], arrays[1::2], strict=True):
        if len(X) != len(y):
            raise source.error(f"{len(y)} labels for {len(X)} rows")
        yield X.astype(dtype), y


READERS: dict[str, Callable[..., Iterator[Chunk]]] = {
    "libsvm": _libsvm, "statlog": _statlog, "idx": _idx, "cifar": _cifar, "npy": _npy,
}  # fmt: skip
"""By format: takes the sources, their plain files, the set and the type; yields chunks."""
