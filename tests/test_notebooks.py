"""The notebooks run from the first cell to the last, each in a fresh process; what they claim, they assert."""

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(notebook):
    return [
        "".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"
    ]


def run(notebook, folder):
    """Runs the cells in order. Each is a file of its own, for tracebacks, and for Triton, which reads the source of
    kernels."""
    namespace = {"__name__": "__main__"}
    for i, source in enumerate(cells(notebook)):
        path = folder / f"cell_{i:02}.py"
        path.write_text(source)
        exec(compile(source, str(path), "exec"), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(notebook, tmp_path):
    if any("import triton" in source for source in cells(notebook)) and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not there: it exists for Linux only, and is in the extra `triton`")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = fresh.run(__file__, notebook, tmp_path, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_compares_with_eager_throughout(notebook):
    """A notebook without assertions could not fail: most cells have one."""
    checking = [
        any(isinstance(n, ast.Assert) or getattr(n, "attr", "") == "assert_close" for n in ast.walk(ast.parse(source)))
        for source in cells(notebook)
    ]
    assert sum(checking) > len(checking) / 2


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["extending_thunder", "zero_to_thunder"]


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
