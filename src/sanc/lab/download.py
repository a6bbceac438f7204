"""Get a published file: checked, and resumed where it was cut."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from sanc.lab.catalogue import RemoteFile
from sanc.lab.parsing import DataError

Progress: TypeAlias = Callable[[str, int, int], None]

_ATTEMPTS = 5
_PAUSE = 0.5
_TIMEOUT = (10.0, 60.0)


def pooch_module() -> Any:
    """Return the module pooch, or say how to get it."""
    try:
        return importlib.import_module("pooch")
    except ImportError as problem:
        raise ImportError(
            f"The data sets need the module {problem.name!r} for downloads and for the user's cache folder: run  "
            "pip install 'sanc[lab]'  or set SANC_DATA and SANC_CACHE to folders of your own.",
            name=problem.name,
        ) from problem


def writable(folder: Path) -> bool:
    """Whether files may be made in a folder; one without any write bit is left alone, even by root."""
    return folder.is_dir() and os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


class _AgainError(Exception):
    """The download did not come through; it may the next time."""


def download(file: RemoteFile, target: Path, progress: Progress | None) -> None:
    """Put a published file at `target`; a good one that is there is left as it is."""
    pooch = pooch_module()
    nearest_folder = next(path for path in target.parents if path.exists())
    if not writable(nearest_folder) and not target.is_file():
        raise DataError(
            f"{target.parent} cannot be written, so {target.name} cannot be downloaded there: pass another data_dir or "
            "set SANC_DATA to a folder that can be written.",
            target,
        )
    resuming = _Resuming(file, target, progress)
    with _quiet(pooch):
        for attempt in range(2):
            resumed = resuming.pending > 0
            try:
                pooch.retrieve(
                    file.url, known_hash=file.digest, fname=target.name, path=target.parent, downloader=resuming
                )
                return
            except DataError:
                raise
            except ValueError as problem:  # the checksum; pooch has removed the file
                if attempt == 0 and resumed:  # two halves of different files
                    continue
                raise DataError(
                    f"{target.name}: what {file.url} sent is not the published file: its checksum is not "
                    f"{file.digest}. It was removed; fetch it again, or put a good copy at {target}.",
                    target,
                ) from problem
            except OSError as problem:
                raise DataError(f"{target} cannot be written ({problem}): check the disk.", target) from problem


@contextmanager
def _quiet(pooch: Any) -> Iterator[None]:
    logger: logging.Logger = pooch.get_logger()
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Resuming:
    """A downloader for pooch that keeps what has come in NAME.part and goes on from there."""

    def __init__(self, file: RemoteFile, target: Path, progress: Progress | None) -> None:
        self.file, self.target, self.progress = file, target, progress
        self.part = target.with_name(f"{target.name}.part")
        self.tag = target.with_name(f"{target.name}.part.tag")

    @property
    def pending(self) -> int:
        """Bytes of an earlier download that can be gone on with."""
        if not self.part.is_file() or not (self.file.digest or self._tag()):
            return 0
        return self.part.stat().st_size

    def _tag(self) -> str:
        try:
            return self.tag.read_text(encoding="latin-1").strip()
        except OSError:
            return ""

    def __call__(self, url: str, output_file: str, pooch: Any = None) -> None:
        requests = importlib.import_module("requests")
        best, failures = self.pending, 0
        with self._lock():
            while True:
                try:
                    self._get(requests, url)
                    break
                except (_AgainError, requests.exceptions.RequestException) as problem:
                    self._drop_if_empty()
                    if self.pending > best:
                        best, failures = self.pending, 0
                    failures += 1
                    if failures >= _ATTEMPTS or isinstance(problem, requests.exceptions.InvalidURL):
                        raise DataError(
                            f"{self.target.name}: {url} cannot be downloaded ({_reason(problem)}). Check the "
                            f"connection and fetch again, or get the file by other means and put it at {self.target}.",
                            self.target,
                        ) from problem
                    time.sleep(_PAUSE * 2 ** (failures - 1))
            self.tag.unlink(missing_ok=True)
            os.replace(self.part, output_file)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep a second process from writing into the same partial file, where the system can."""
        try:
            fcntl = importlib.import_module("fcntl")
        except ImportError:
            yield
            return
        lock = self.target.with_name(f".{self.target.name}.lock")
        with lock.open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as problem:
                raise DataError(
                    f"{self.target.name} is being downloaded by another process: wait for it.", self.target
                ) from problem
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)

    def _drop_if_empty(self) -> None:
        if self.part.is_file() and self.part.stat().st_size == 0:
            self._drop()

    def _drop(self) -> None:
        self.part.unlink(missing_ok=True)
        self.tag.unlink(missing_ok=True)

    def _get(self, requests: Any, url: str) -> None:
        have = self.pending
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if self._tag():
                headers["If-Range"] = self._tag()
        with requests.get(url, stream=True, headers=headers, timeout=_TIMEOUT) as answer:
            status: int = answer.status_code
            if status in (408, 429) or status >= 500:
                raise _AgainError(f"the server answers {status} {answer.reason}")
            if status == 416 or (status == 206 and not _begins(answer.headers.get("Content-Range", ""), have)):
                self._drop()
                raise _AgainError(f"the server cannot go on at byte {have}")
            if status not in (200, 206) or "text/html" in answer.headers.get("Content-Type", ""):
                self._drop()
                what = "a web page instead of the file" if status in (200, 206) else f"{status} {answer.reason}"
                raise DataError(
                    f"{self.target.name}: {url} answers {what}. It may have moved: get the file by other means and "
                    f"put it at {self.target}.",
                    self.target,
                )
            if status == 200:
                have = 0
                tag = answer.headers.get("ETag", "")
                tag = tag if tag and not tag.startswith("W/") else answer.headers.get("Last-Modified", "")
                self.tag.write_text(tag, encoding="latin-1")
            length = answer.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else 0
            with self.part.open("ab" if have else "wb") as output:
                for block in answer.iter_content(1 << 18):
                    output.write(block)
                    have += len(block)
                    if self.progress is not None:
                        self.progress(self.target.name, have, total)
            if total and have != total:
                raise _AgainError(f"the connection ended after {have} of {total} bytes")


def _begins(content_range: str, at: int) -> bool:
    return content_range.strip().startswith(f"bytes {at}-")


def _reason(problem: BaseException) -> str:
    text = str(problem)
    return f"{type(problem).__name__}: {text[:200]}" if text and not isinstance(problem, _AgainError) else text
