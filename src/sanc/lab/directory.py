"""The directory of a run: its files, its lock, and resuming after an interruption.

It holds ``config.json`` and ``environment.json``, an append-only ``trace.jsonl``, a ``checkpoint.pt`` that is replaced
atomically and contains the size of the trace, and ``done.json`` once the run is finished. To resume, the trace is
truncated to the size in the checkpoint, and the same lines are written again. The checkpoint begins with the SHA-256 of
its content and contains that of the trace, so that a changed file raises an error.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

import sanc
from sanc import ArgumentError, SancError

EVALUATIONS = 200
"""Number of evaluations of the loss on all rows per run: as many as the points of a mean curve (`sanc.lab.curves`)."""

_COUNTERS = ("value", "gradient", "product")
"""Columns of the trace that count evaluations of single components."""

_STALE_SECONDS = 3600
"""Age in seconds from which a temporary file is removed. Writing one takes seconds, so its process has ended."""

_DIGEST_SIZE = hashlib.sha256().digest_size
"""Bytes of the digest at the beginning of a checkpoint."""


class BusyError(SancError):
    """Another process makes this run, or downloads this file."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file for this process. The operating system releases the lock when the process ends."""
    import fcntl  # imported here, since it is not available everywhere and loading data does not need it

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{path} is locked, because another process makes this run or downloads this file: wait until it ends."
            ) from None
        yield


@contextmanager
def reserved(folder: Path) -> Iterator[None]:
    """Lock a run directory for this process, and remove temporary files of killed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        for temporary in folder.glob(".*.*"):
            temporary.unlink()
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all. Stale temporary files of killed processes are removed."""
    for old in path.parent.glob(f".{path.name}.*"):
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                old.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON atomically."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def finished(folder: Path) -> bool:
    """Return whether a run is finished."""
    return (folder / "done.json").exists()


def environment(device: str) -> dict[str, Any]:
    """Return versions, platform, device, threads, time and commit of a run."""
    versions = {module.__name__: str(module.__version__) for module in (sanc, torch, np, scipy)}
    return (
        versions
        | {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
            "threads": torch.get_num_threads(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        | _commit()
    )


def _commit() -> dict[str, str]:
    """Return the commit of this source; empty if the source is not tracked by a git repository."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    try:
        # Fails if an enclosing repository does not track it.
        git(["git", "ls-files", "--error-unmatch", Path(__file__).name])
        return {"commit": git(["git", "rev-parse", "HEAD"]).stdout.strip()}
    except (OSError, subprocess.SubprocessError):
        return {}


def require_same_config(folder: Path, config: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
    """Raise an `ArgumentError` if the directory holds a run that differs in one of these keys, by default in any."""
    path = folder / "config.json"
    expected = json.loads(json.dumps(config))
    try:
        stored = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        if unknown := stored.keys() - expected.keys():
            raise ValueError(f"unknown keys {sorted(unknown)}")
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"{path} is damaged ({error}): remove {folder} to repeat its run.") from error
    for key in [key for key in keys or expected if key not in ("title", "subtitle")]:  # these follow from the others
        value = expected[key]
        if stored.get(key, value) != value:
            raise ArgumentError(
                f"{folder} holds a run with {key} = {stored[key]!r}, not {value!r}: choose another --out, or remove "
                "that directory."
            )


def _with_nulls(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by null."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in content.items()}


def _read_checkpoint(path: Path) -> Any:
    """Return the content of a checkpoint; None if there is none."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content[_DIGEST_SIZE:]).digest() != content[:_DIGEST_SIZE]:
        raise ArgumentError(
            f"{path} is damaged, or of another version: remove {path.parent} to repeat its run from the start."
        )
    return torch.load(io.BytesIO(content[_DIGEST_SIZE:]), weights_only=True, map_location="cpu")


class Journal:
    """The trace and the checkpoint of a run, in a directory that this process has locked.

    `saved` is the checkpoint to resume from, or None. Checkpoints are at least `every` seconds apart.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], every: float) -> None:
        require_same_config(folder, config)
        if not (folder / "config.json").exists():
            write_json(folder / "environment.json", environment(config["device"]))
            write_json(folder / "config.json", config)
        self._folder, self._every, self._last = folder, every, time.monotonic()
        self.unit, self.budget = config["unit"], config["budget"]
        self.saved = _read_checkpoint(folder / "checkpoint.pt")
        saved = self.saved or {}
        self.loss, self.spent, self.seconds = (saved.get(key, 0.0) for key in ("loss", "calls", "seconds"))
        trace, size = folder / "trace.jsonl", saved.get("length", 0)
        self._digest = hashlib.sha256((trace.read_bytes() if trace.exists() else b"")[:size])
        if self.saved is not None and self._digest.hexdigest() != saved["trace"]:
            raise ArgumentError(
                f"{trace} has changed since its checkpoint was written: remove {folder} to repeat its run."
            )
        self._file = open(trace, "ab")  # noqa: SIM115 - closed by finish()
        self._file.truncate(size)

    def start(self, loss: float) -> None:
        """Write the first line, with the loss at the start."""
        self.loss = loss
        self._write({"iteration": -1, "loss": loss, "seconds": 0.0, "paper_calls": 0} | dict.fromkeys(_COUNTERS, 0))

    def _write(self, line: Mapping[str, Any]) -> None:
        """Write a line of JSON, and add it to the digest."""
        content = (json.dumps(_with_nulls(line), ensure_ascii=False) + "\n").encode()
        self._digest.update(content)
        self._file.write(content)

    def step(self, line: dict[str, Any], loss: float | None, measure: Callable[[], float]) -> None:
        """Append the line of an iteration. If `loss` is None, it is measured at `EVALUATIONS` points of the budget."""
        calls = line["paper_calls"] if self.unit == "paper_calls" else sum(line[key] for key in _COUNTERS)
        mark = self.budget / EVALUATIONS
        if loss is None and (calls // mark > self.spent // mark or calls >= self.budget):
            loss = measure()
        self._write(line | {"loss": loss})
        self.loss = self.loss if loss is None else loss
        self.spent, self.seconds = calls, line["seconds"]

    @property
    def fraction(self) -> float:
        """The fraction of the budget that is spent."""
        return min(1.0, float(self.spent / self.budget))

    def save_if_due(self, state: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint if `every` seconds have passed. The trace is flushed to disk first."""
        if time.monotonic() - self._last < self._every:
            return
        progress = {"loss": self.loss, "calls": self.spent, "seconds": self.seconds, "length": self._flush()}
        buffer = io.BytesIO()
        torch.save(state() | progress | {"trace": self._digest.hexdigest()}, buffer)
        content = buffer.getvalue()
        write_atomically(self._folder / "checkpoint.pt", hashlib.sha256(content).digest() + content)
        self._last = time.monotonic()

    def _flush(self) -> int:
        """Write everything to the disk, and return the position."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self, status: str, loss: float, **results: float) -> None:
        """Close the trace and write ``done.json``."""
        self._flush()
        self._file.close()
        ended = {"status": status, "loss": loss, "seconds": self.seconds, "trace": self._digest.hexdigest()} | results
        write_json(self._folder / "done.json", _with_nulls(ended))
        (self._folder / "checkpoint.pt").unlink(missing_ok=True)
