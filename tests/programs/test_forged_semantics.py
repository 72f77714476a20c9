"""Files of programs whose text means something else: who did not sign them cannot load them, and who trusts them gets an
error or a result, and nothing is written, started or crashed."""

import subprocess
import sys
from pathlib import Path

import pytest

FORGING = Path(__file__).with_name("forging.py")


def forge(directory: Path, seed: int, count: int) -> None:
    """Runs `forging.py` in a process of its own: a kernel that crashes ends that one."""
    command = [sys.executable, "-X", "faulthandler", str(FORGING), str(directory), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True)
    forged = directory / "text"
    text = forged.read_text() if forged.exists() else ""
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout[-300:]}\n{done.stderr[-3000:]}\n{text}"
    ran, refused = (int(word) for word in done.stdout.rsplit("done: ", 1)[1].split() if word.isdigit())
    assert ran + refused == count and ran and refused


def test_forged_meanings(tmp_path):
    forge(tmp_path, 0, 40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_many_forged_meanings(seed, tmp_path):
    forge(tmp_path, seed, 250)
