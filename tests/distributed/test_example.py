"""examples/train_fsdp.py under torchrun: it ends when a process is killed, and goes on from its checkpoint on another
number of processes to the same loss."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import fresh

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fsdp.py"
SIZES = ["--steps", "20", "--layers", "1", "--width", "32", "--time", "16", "--batch", "4", "--every", "5"]


def under_torchrun(processes: int, *options: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        str(EXAMPLE),
        *SIZES,
        *options,
    ]
    return subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start(processes: int, *options: str) -> list[fresh.Program]:
    """As torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size, environment = str(processes), os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [
        fresh.Program(EXAMPLE, *SIZES, *options, env=environment | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in map(str, range(processes))
    ]


def last_loss(programs: list[fresh.Program]) -> float:
    ended = [program.result(timeout=120) for program in programs]
    assert not any(done.returncode for done in ended), "\n".join(done.stderr[-3000:] for done in ended)
    out = ended[0].stdout
    assert re.search(r"rank 0: [\d.]+ MiB of parameters, [\d.]+ of optimizer state, peak \d+ MiB", out)
    return float(re.search(r"last loss ([\d.]+)", out)[1])


def workers(process: subprocess.Popen) -> list[int]:
    children = subprocess.run(
        ["pgrep", "-f", "-P", str(process.pid), EXAMPLE.name], capture_output=True, text=True, check=False
    )
    return [int(n) for n in children.stdout.split()]


@pytest.mark.slow
def test_ends_when_a_process_is_killed(tmp_path):
    folder = tmp_path / "state"
    process = under_torchrun(2, "--checkpoint", str(folder), "--steps", "6000")  # the later option counts
    until = time.monotonic() + 90
    while not (folder / ".metadata").exists():
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(workers(process)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode
    assert re.search(r"(?s)Root Cause.*rank\s*: 1 .*SIGKILL", err), err[-3000:]  # torchrun ends the others at once


def test_goes_on_where_the_checkpoint_ends(tmp_path):
    """Half of the steps on two processes, the rest on one: the learning rate is that of all steps."""
    whole, folder = start(1), str(tmp_path / "state")
    last_loss(start(2, "--checkpoint", folder, "--stop", "12"))
    expected = last_loss(whole)
    assert abs(last_loss(start(1, "--checkpoint", folder, "--strategy", "zero3")) - expected) < 1e-4 * expected
