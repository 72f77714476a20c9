"""Programs of tests in forked processes end and print as in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests import fresh

PROGRAM = """
import atexit, os, sys
atexit.register(print, "at exit")
print(sys.argv, os.getcwd(), os.environ.get("MINE"), "HOME" in os.environ, __name__, sys.path[0])
if sys.argv[1] == "raises":
    raise ValueError("mine")
sys.exit({"ends": None, "code": 3, "words": "so it ends"}[sys.argv[1]])
"""


@pytest.mark.parametrize("how", ["ends", "code", "words", "raises"])
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_program_is_what_python_runs(kind, how, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    started = {"-c": ["-c", PROGRAM], "-m": ["-m", "program"], "file": [str(tmp_path / "program.py")]}[kind]
    options = {"cwd": tmp_path, "env": {"MINE": "1", "PYTHONPATH": str(tmp_path)}}
    want = subprocess.run([sys.executable, *started, how, "--more"], capture_output=True, text=True, **options)
    done = fresh.run(*started, how, "--more", **options)
    assert (done.returncode, done.stdout) == (want.returncode, want.stdout)
    assert done.stderr.splitlines()[-1:] == want.stderr.splitlines()[-1:]


def test_a_program_that_does_not_end_is_an_error():
    program = fresh.Program("-c", "import time; print('waits', flush=True); time.sleep(600)", env=os.environ)
    with pytest.raises(AssertionError, match="more than 1.5 seconds"):
        program.result(timeout=1.5)
    assert not program.process.is_alive()
