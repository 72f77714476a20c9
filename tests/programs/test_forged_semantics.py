"""Files of programs whose text means something else: who did not sign them cannot load them, and who trusts them gets an
error or a result, and nothing is written or started."""

import subprocess
import sys
from pathlib import Path

import pytest

FORGING = Path(__file__).with_name("forging.py")


def forge(directory: Path, seed: int, count: int) -> None:
    """Runs `forging.py` in a process of its own."""
    command = [sys.executable, "-X", "faulthandler", str(FORGING), str(directory), *map(str, (seed, 0, count))]
    done = subprocess.run(command, capture_output=True, text=True)
    numbers = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    forged = directory / "text"
    text = forged.read_text() if forged.exists() else ""
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}\n{text}"
    assert numbers[-1] == count - 1


def test_forged_meanings(tmp_path):
    forge(tmp_path, seed=0, count=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_many_forged_meanings(seed, tmp_path):
    forge(tmp_path, seed, count=250)
