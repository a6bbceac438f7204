"""Commands in processes of their own, which tests kill and resume, and the traces that they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest


def lines(folder):
    """Return the lines of the trace in the folder of a run."""
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def without_times(folder):
    """Return the lines of the trace without times, which must be equal byte for byte."""
    kept = []
    for line in lines(folder):
        line.pop("seconds")
        kept.append(json.dumps(line))
    return kept


@contextmanager
def command(*arguments):
    """Start a process in a new process group, which is killed at the end.

    The process receives SIGINT even if these tests ignore it, as in the background of a shell. An ignored signal would
    be inherited, whereas a handler becomes the default.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    """Kill the process group of a command and return its output."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate(timeout=60)[0]


def sanc_command(*arguments):
    """Start the command `sanc`; see `command`."""
    return command(sys.executable, "-m", "sanc", *arguments)


def wait_for(process, condition, seconds=240):
    """Wait until a condition holds, or fail with the output of the command. Importing torch can take minutes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the command ended with {process.poll()}, or hung: {kill(process)}")
        time.sleep(0.05)
