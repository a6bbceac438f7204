"""Download a published file with pooch: verify its checksum, retry, and resume an interrupted download."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from sanc.lab.catalogue import RemoteFile
from sanc.lab.directory import BusyError, locked
from sanc.lab.readers import DataError

RETRIES = 4
"""Number of retries by pooch, after pauses of 1, 2, 3 and 4 seconds."""


def download(file: RemoteFile, target: Path) -> None:
    """Download a published file to `target`, unless a file with its checksum is there."""
    import pooch  # imported here, since loading from a given folder does not need it
    import requests

    pooch.get_logger().setLevel(logging.WARNING)
    downloader = pooch.create(
        target.parent, "", registry={target.name: file.digest}, urls={target.name: file.url}, retry_if_failed=RETRIES
    )
    remedy = f"Download it again, or get it by other means and put it at {target}."
    try:
        downloader.fetch(target.name, downloader=lambda url, output, _: _resume(file, target, output))
    except DataError:
        raise
    except BusyError:
        raise DataError(f"{target.name} is being downloaded by another process: wait for it.") from None
    except requests.RequestException as error:
        raise DataError(f"{target.name}: {file.url} cannot be downloaded ({error}). {remedy}") from error
    except ValueError as error:  # another checksum; pooch has removed the file
        reason = f"the content of {file.url} is not the published file, whose checksum is {file.digest}"
        raise DataError(f"{target.name}: {reason}. {remedy}") from error
    except OSError as error:
        reason = f"{target} cannot be written ({error})"
        raise DataError(f"{reason}: check the disk, or set SANC_DATA to a folder that is writable.") from error


def _resume(file: RemoteFile, target: Path, output: str) -> None:
    """Download into NAME.part, resuming what it contains, and move it to `output`."""
    import requests

    part = target.with_name(f"{target.name}.part")
    with locked(part):
        size = part.stat().st_size
        if not file.digest and target.suffix not in (".bz2", ".gz", ".xz"):
            size = 0  # without a checksum, halves of different files could be joined unnoticed
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={size}-"} if size else {})
        try:
            with requests.get(file.url, stream=True, headers=headers, timeout=(10, 60)) as response:
                if response.status_code == 416:  # the range is not available: the next attempt starts from zero
                    part.write_bytes(b"")
                response.raise_for_status()
                if "text/html" in response.headers.get("Content-Type", ""):
                    reason = f"{file.url} returns a web page instead of the file; it may have moved"
                    raise DataError(f"{target.name}: {reason}. Get it by other means and put it at {target}.")
                resumed = response.headers.get("Content-Range", "").startswith(f"bytes {size}-")
                with part.open("ab" if resumed else "wb") as output_file:
                    for block in response.iter_content(1 << 18):
                        output_file.write(block)
                        if file.size is not None and output_file.tell() > file.size:
                            output_file.truncate(0)
                            reason = f"{file.url} sends more than the {file.size:,} bytes of the published file"
                            raise DataError(f"{target.name}: {reason}. Get it by other means and put it at {target}.")
            shutil.move(part, output)
        finally:
            if part.is_file() and part.stat().st_size == 0:
                part.unlink()
