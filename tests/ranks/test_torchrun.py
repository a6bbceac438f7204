"""The scripts of docs/distributed.md under torchrun: complete runs, and one with a worker that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch.distributed.fsdp", reason="torch is built without distributed")

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
SCRIPTS = dict(re.findall(r'^```python\n("""(train_\w+\.py).*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE))
SCRIPTS = {name: code for code, name in SCRIPTS.items()}
LIMIT = 240.0  # seconds


def start(name, folder, size=2, restarts=0):
    script = folder / name
    script.write_text(SCRIPTS[name])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    command += ["--max-restarts", str(restarts), str(script), str(folder / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as on the page
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process):
    try:
        out, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the run hung: {process.communicate()[0]}")
    return out


def workers(process):
    """Return the processes that torchrun started."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in listed.stdout.split()]


@pytest.fixture(scope="module", params=sorted(SCRIPTS))
def finished(request, tmp_path_factory):
    """Return the name of a script, and the model at the end of an uninterrupted run."""
    if "fsdp" in request.param and torch.__version__.startswith("2.6."):
        pytest.skip("fully_shard of torch 2.6 does not run on a CPU")
    folder = tmp_path_factory.mktemp("uninterrupted")
    process = start(request.param, folder)
    out = finish(process)
    assert process.returncode == 0, out
    assert re.search(r"after \d+ steps", out), out
    return request.param, torch.load(folder / "run" / "model.pt")


@pytest.mark.slow
def test_the_scripts_of_the_page_run(finished):
    name, model = finished
    assert set(model) == {"0.weight", "0.bias", "2.weight", "2.bias"}, name


@pytest.mark.slow
def test_a_run_restarted_after_a_killed_worker_equals_an_uninterrupted_one(finished, tmp_path):
    name, uninterrupted = finished
    process = start(name, tmp_path, restarts=2)
    end = time.monotonic() + LIMIT
    while not list(tmp_path.glob("run/step-????????")):
        assert process.poll() is None and time.monotonic() < end, finish(process)
        time.sleep(0.01)
    os.kill(workers(process)[-1], signal.SIGKILL)
    out = finish(process)
    assert process.returncode == 0, out
    assert "exitcode: -9" in out, out
    assert "fsdp" in name or "RanksError: rank 0 of 2 could not exchange" in out, (
        out
    )  # a collective of the model may fail first
    found = torch.load(tmp_path / "run" / "model.pt")
    assert all(torch.equal(found[key], uninterrupted[key]) for key in uninterrupted)


@pytest.mark.slow
def test_both_scripts_are_on_the_page():
    assert set(SCRIPTS) == {"train_ddp.py", "train_fsdp.py"}
