"""Get a published file with pooch: checked, tried again, and resumed where it was cut."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from sanc.lab.catalogue import RemoteFile
from sanc.lab.readers import DataError

Progress: TypeAlias = Callable[[str, int, int], None]

RETRIES = 4
"""How often pooch tries again, after growing pauses."""


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


def download(file: RemoteFile, target: Path, progress: Progress | None = None) -> None:
    """Put a published file at `target`; a good one that is there is left as it is."""
    pooch = pooch_module()
    pooch.get_logger().setLevel(logging.WARNING)
    exceptions = importlib.import_module("requests.exceptions")
    if not target.is_file() and not writable(next(path for path in target.parents if path.exists())):
        raise DataError(
            f"{target.parent} cannot be written, so {target.name} cannot be downloaded there: pass another data_dir or "
            "set SANC_DATA to a folder that can be written.",
            target,
        )
    goodboy = pooch.create(
        target.parent, "", registry={target.name: file.digest}, urls={target.name: file.url}, retry_if_failed=RETRIES
    )
    remedy = f"Fetch it again, or get it by other means and put it at {target}."
    try:
        goodboy.fetch(target.name, downloader=lambda url, output, _: _resume(file, target, output, progress))
    except DataError:
        raise
    except exceptions.RequestException as problem:
        raise DataError(f"{target.name}: {file.url} cannot be downloaded ({problem}). {remedy}", target) from problem
    except ValueError as problem:  # the checksum; pooch has removed the file
        what = f"what {file.url} sent is not the published file, whose checksum is {file.digest}"
        raise DataError(f"{target.name}: {what}. {remedy}", target) from problem
    except OSError as problem:
        raise DataError(f"{target} cannot be written ({problem}): check the disk.", target) from problem
    finally:
        part = target.with_name(f"{target.name}.part")
        if part.is_file() and part.stat().st_size == 0:
            part.unlink()


def _resume(file: RemoteFile, target: Path, output: str, progress: Progress | None) -> None:
    """Download into NAME.part, going on with what is there, and move it to where pooch wants it."""
    fcntl, requests = importlib.import_module("fcntl"), importlib.import_module("requests")
    part = target.with_name(f"{target.name}.part")

    def refuse(what: str) -> DataError:
        part.unlink(missing_ok=True)
        return DataError(
            f"{target.name}: {file.url} {what}. Get the file by other means and put it at {target}.", target
        )

    with part.open("ab") as kept:
        try:
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{target.name} is being downloaded by another process: wait for it.", target) from None
        if not file.digest and target.suffix not in (".bz2", ".gz", ".xz"):
            kept.seek(0, 0)
            kept.truncate()  # nothing would tell two halves of different files
        have = kept.tell()
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(file.url, stream=True, headers=headers, timeout=(10, 60)) as answer:
            going_on = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if answer.status_code == 416 or (answer.status_code == 206 and not going_on):
                part.unlink()  # the next try starts anew
                raise requests.exceptions.ConnectionError(f"the server cannot go on at byte {have}")
            if 400 <= answer.status_code < 500 and answer.status_code not in (408, 429):
                raise refuse(f"answers {answer.status_code} {answer.reason}; it may have moved")
            answer.raise_for_status()
            if "text/html" in answer.headers.get("Content-Type", ""):
                raise refuse("answers a web page instead of the file; it may have moved")
            if answer.status_code != 206:
                have = 0
                kept.truncate(0)
            total = have + int(answer.headers.get("Content-Length", 0))
            for block in answer.iter_content(1 << 18):
                have += kept.write(block)
                if file.size is not None and have > file.size:
                    raise refuse(f"sends more than the {file.size:,} bytes of the published file")
                if progress is not None:
                    progress(target.name, have, total)
    shutil.move(part, output)
