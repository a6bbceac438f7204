"""The directory of a run: its files, who works on it, and what an interruption leaves behind.

It holds ``config.json`` and ``environment.json``, an append-only ``trace.jsonl``, a ``checkpoint.pt`` that is replaced
atomically and says how long the trace was when it was written, and ``done.json`` once the run is finished. After a kill
the trace is cut back to the checkpoint and the lines that follow are written again, the same as before. The checkpoint
begins with the SHA-256 of what follows and holds that of the trace: a file that has changed is an error, not a result.
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
from sanc import ArgumentError

EVALUATIONS = 200
"""How often over its budget a run evaluates the training loss on all rows."""

_CALLS = ("value", "gradient", "product")

_ABANDONED = 3600
"""Seconds after which a temporary file is nobody's any more."""


class BusyError(Exception):
    """Another process works on this run, or downloads this file."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file for this process; the system lets go of it when the process dies, however it dies."""
    import fcntl  # not everywhere, and data can be loaded without it

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(str(path)) from None
        yield


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold a run directory for this process."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        for left in folder.glob(".*.*"):  # by a process that was killed while it wrote
            left.unlink()
        yield


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole or not at all; nothing else is left, but for what a kill leaves until the next time."""
    for old in path.parent.glob(f".{path.name}.*"):
        with suppress(FileNotFoundError):
            if time.time() - old.stat().st_mtime > _ABANDONED:
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
    """Write JSON that a person can read, atomically."""
    write_atomically(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def finished(folder: Path) -> bool:
    """Whether a run is done."""
    return (folder / "done.json").exists()


def environment(device: str) -> dict[str, Any]:
    """Return what the run ran on."""
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
    """Return the commit of this source, or nothing where it does not lie in a repository of its own."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    try:
        git(["git", "ls-files", "--error-unmatch", Path(__file__).name])  # not that of a folder it is installed in
        return {"commit": git(["git", "rev-parse", "HEAD"]).stdout.strip()}
    except (OSError, subprocess.SubprocessError):
        return {}


def compare(folder: Path, config: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
    """Refuse a directory that holds a run of another configuration, as far as these keys tell, by default all."""
    path = folder / "config.json"
    wanted = json.loads(json.dumps(config))
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        if strange := known.keys() - wanted.keys():
            raise ValueError(f"{sorted(strange)} are not known")
    except (ValueError, TypeError) as problem:
        raise ArgumentError(f"{path} is damaged ({problem}): remove {folder} to make its run again.") from problem
    for key in [key for key in keys or wanted if key not in ("title", "subtitle")]:  # which are made of the others
        value = wanted[key]
        if known.get(key, value) != value:
            raise ArgumentError(
                f"{folder} holds a run with {key} = {known[key]!r}, not {value!r}: choose another --out, or remove "
                "that directory."
            )


def _finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """JSON knows no NaN and no infinity: they become null."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in content.items()}


def _unsealed(path: Path) -> Any:
    """Return what a checkpoint holds, or None where there is none."""
    if not path.exists():
        return None
    content = path.read_bytes()
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise ArgumentError(
            f"{path} is damaged, or of another version: remove {path.parent} to make its run again from the start."
        )
    return torch.load(io.BytesIO(content[32:]), weights_only=True, map_location="cpu")


class Journal:
    """The trace and the checkpoint of a run, in a directory that this process has claimed.

    `saved` is the checkpoint to go on from, if any. Checkpoints are `every` seconds apart.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], every: float) -> None:
        compare(folder, config)
        if not (folder / "config.json").exists():
            write_json(folder / "environment.json", environment(config["device"]))
            write_json(folder / "config.json", config)
        self._folder, self._every, self._last = folder, every, time.monotonic()
        self.unit, self.budget = config["unit"], config["budget"]
        self.saved = _unsealed(folder / "checkpoint.pt")
        saved = self.saved or {}
        self.loss, self.spent, self.seconds = (saved.get(key, 0.0) for key in ("loss", "calls", "seconds"))
        trace, length = folder / "trace.jsonl", saved.get("length", 0)
        self._digest = hashlib.sha256((trace.read_bytes() if trace.exists() else b"")[:length])
        if self.saved is not None and self._digest.hexdigest() != saved["trace"]:
            raise ArgumentError(
                f"{trace} is not what it was when its checkpoint was written: remove {folder} to make its run again."
            )
        self._file = open(trace, "ab")  # noqa: SIM115 - closed by finish()
        self._file.truncate(length)

    def start(self, loss: float) -> None:
        """Write the first line, the loss before anything was done."""
        self.loss = loss
        self._write({"iteration": -1, "loss": loss, "seconds": 0.0, "paper_calls": 0} | dict.fromkeys(_CALLS, 0))

    def _write(self, line: Mapping[str, Any]) -> None:
        content = (json.dumps(_finite(line), ensure_ascii=False) + "\n").encode()
        self._digest.update(content)
        self._file.write(content)

    def step(self, line: dict[str, Any], loss: float | None, measure: Callable[[], float]) -> None:
        """Append the line of an iteration; the loss at its end is measured where it is not given and it is time."""
        calls = line["paper_calls"] if self.unit == "paper_calls" else sum(line[key] for key in _CALLS)
        mark = self.budget / EVALUATIONS
        if loss is None and (calls // mark > self.spent // mark or calls >= self.budget):
            loss = measure()
        self._write(line | {"loss": loss})
        self.loss = self.loss if loss is None else loss
        self.spent, self.seconds = calls, line["seconds"]

    @property
    def share(self) -> float:
        """How much of the budget is spent."""
        return min(1.0, float(self.spent / self.budget))

    def offer(self, state: Callable[[], dict[str, Any]]) -> None:
        """Write a checkpoint if it is time; the trace is on disk before the checkpoint that counts on it."""
        if time.monotonic() - self._last < self._every:
            return
        progress = {"loss": self.loss, "calls": self.spent, "seconds": self.seconds, "length": self._flush()}
        buffer = io.BytesIO()
        torch.save(state() | progress | {"trace": self._digest.hexdigest()}, buffer)
        content = buffer.getvalue()
        write_atomically(self._folder / "checkpoint.pt", hashlib.sha256(content).digest() + content)
        self._last = time.monotonic()

    def _flush(self) -> int:
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self, status: str, loss: float, **more: float) -> None:
        """Close the trace and write ``done.json``."""
        self._flush()
        self._file.close()
        ended = {"status": status, "loss": loss, "seconds": self.seconds, "trace": self._digest.hexdigest()} | more
        write_json(self._folder / "done.json", _finite(ended))
        (self._folder / "checkpoint.pt").unlink(missing_ok=True)
