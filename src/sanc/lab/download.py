"""Get a published file with pooch: checked, tried again, and resumed where it was cut."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from sanc.lab.catalogue import RemoteFile
from sanc.lab.directory import BusyError, locked
from sanc.lab.readers import DataError

RETRIES = 4
"""How often pooch tries again, after growing pauses."""


def download(file: RemoteFile, target: Path) -> None:
    """Put a published file at `target`; a good one that is there is left as it is."""
    import pooch  # files that lie in a folder can be loaded without it
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    goodboy = pooch.create(
        target.parent, "", registry={target.name: file.digest}, urls={target.name: file.url}, retry_if_failed=RETRIES
    )
    remedy = f"Fetch it again, or get it by other means and put it at {target}."
    try:
        goodboy.fetch(target.name, downloader=lambda url, output, _: _resume(file, target, output))
    except DataError:
        raise
    except BusyError:
        raise DataError(f"{target.name} is being downloaded by another process: wait for it.") from None
    except requests.RequestException as problem:
        raise DataError(f"{target.name}: {file.url} cannot be downloaded ({problem}). {remedy}") from problem
    except ValueError as problem:  # the checksum; pooch has removed the file
        what = f"what {file.url} sent is not the published file, whose checksum is {file.digest}"
        raise DataError(f"{target.name}: {what}. {remedy}") from problem
    except OSError as problem:
        what = f"{target} cannot be written ({problem})"
        raise DataError(f"{what}: check the disk, or set SANC_DATA to a folder that can.") from problem


def _resume(file: RemoteFile, target: Path, output: str) -> None:
    """Download into NAME.part, going on with what is there, and move it to where pooch wants it."""
    import requests

    part = target.with_name(f"{target.name}.part")
    with locked(part):
        have = part.stat().st_size
        if not file.digest and target.suffix not in (".bz2", ".gz", ".xz"):
            have = 0  # nothing would tell two halves of different files
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with requests.get(file.url, stream=True, headers=headers, timeout=(10, 60)) as answer:
                if answer.status_code == 416:  # there is no such byte: the next try starts anew
                    part.write_bytes(b"")
                answer.raise_for_status()
                if "text/html" in answer.headers.get("Content-Type", ""):
                    what = f"{file.url} answers a web page instead of the file; it may have moved"
                    raise DataError(f"{target.name}: {what}. Get it by other means and put it at {target}.")
                going_on = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
                with part.open("ab" if going_on else "wb") as kept:
                    for block in answer.iter_content(1 << 18):
                        kept.write(block)
                        if file.size is not None and kept.tell() > file.size:
                            kept.truncate(0)
                            what = f"{file.url} sends more than the {file.size:,} bytes of the published file"
                            raise DataError(f"{target.name}: {what}. Get it by other means and put it at {target}.")
            shutil.move(part, output)
        finally:
            if part.is_file() and part.stat().st_size == 0:
                part.unlink()
