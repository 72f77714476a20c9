"""Files of programs whose text means something else: who did not sign them cannot load them, and who trusts them gets an
error or a result, and nothing is written or started."""

import subprocess
import sys
from pathlib import Path

import pytest

FORGING = Path(__file__).with_name("forging.py")
CRASHES = 5  # of 250 files that somebody trusts: some kernels of PyTorch's do not check the shapes that they are given


def forge(directory: Path, seed: int, count: int, crashes: int) -> None:
    """Runs `forging.py` in a process of its own, and goes on behind a file that crashes a kernel."""
    start = crashed = 0
    while start < count:
        command = [sys.executable, "-X", "faulthandler", str(FORGING), str(directory), *map(str, (seed, start, count))]
        done = subprocess.run(command, capture_output=True, text=True)
        numbers = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
        if done.returncode >= 0:
            break
        crashed, start = crashed + 1, numbers[-1] + 1
    forged = directory / "text"
    text = forged.read_text() if forged.exists() else ""
    assert done.returncode == 0 or start == count, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}\n{text}"
    assert crashed <= crashes, f"{crashed} of {count} files crash"
    assert numbers[-1] == count - 1


def test_forged_meanings(tmp_path):
    forge(tmp_path, seed=0, count=40, crashes=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_many_forged_meanings(seed, tmp_path):
    forge(tmp_path, seed, count=250, crashes=CRASHES)
