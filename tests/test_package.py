"""The distribution: a wheel that works without the repository, its version, and its types in a user's program."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch

import thunder
from tests import operation_names
from tests.stubs import MODULES, NAMESPACES, ROOT, operations, stub
from thunder.core.symbol import Symbol
from thunder.kernels import lower
from thunder.ops import LTORCH, PRIMS

PROGRAM = """
import torch
import thunder
from thunder.core.transforms import get_grad, put_grads, value_and_grad
from thunder.distributed import FSDPType, fsdp
from thunder.extend import FusionExecutor, OperatorExecutor, compile_option, register_executor
from thunder.recipes import FP8, FSDP, Training

reveal_type(thunder.last_traces(torch.abs))
reveal_type(thunder.float32)
reveal_type(FSDPType.ZERO3)


@thunder.jit
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@thunder.jit(executors=["inductor"], cache="symbolic values", memory_budget=0.5)
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Mine(thunder.Transform):
    def transform_trace_post_optimization(self, computation_trace: thunder.Trace, **kwargs) -> thunder.Trace:
        for operation in computation_trace.bound_symbols:
            print(operation.sym.name)
        return computation_trace


model = torch.nn.Linear(4, 4)
compiled = thunder.jit(model, transforms=[Mine(), thunder.autocast(torch.bfloat16)], fallback="error")
compiled(torch.ones(2, 4)).sum().backward()
print(compiled.programs[0].forward, thunder.cache_misses(compiled), compiled.state_dict())
thunder.compile(model, recipe=Training(memory_budget=0.5), plugins=["reduce-overhead", FP8(), FSDP()])
print(thunder.verify(double, torch.ones(2)), thunder.explain(half, torch.ones(2)).milliseconds)
value, gradients = value_and_grad(double)(torch.ones(2))
executor = register_executor(OperatorExecutor("mine", version="1"))
executor = OperatorExecutor("other")
symbol = executor.register_operator("multiply", like=lambda a, b: a * b, fn=torch.mul)
"""


def test_the_stubs_are_those_of_the_modules():
    for path, text in map(stub, MODULES):
        assert path.read_text() == text, (
            f"run python tests/stubs.py: {path.name} of {path.parent.name} is not up to date"
        )


@pytest.mark.parametrize("module", NAMESPACES)
def test_the_stubs_of_operations_are_current(module):
    path, text = operations(module)
    original = path.read_text()
    if original.partition("\n")[0] == text.partition("\n")[0]:
        assert original == text, "run python tests/stubs.py"
    else:  # another PyTorch, which may lack some functions
        assert set(text.splitlines()[1:]) <= set(original.splitlines())


def test_sources_name_operations_that_exist():
    assert operation_names.main() == 0
    text = "from thunder.ops import ltorch, prims as p\nltorch.add(1, p.addd(2))\nltorch.ad.id\nother.ad"
    assert operation_names.wrong_names(text) == ["2: p.addd", "3: ltorch.ad"]
    text = "ROWS = {'prims.add': 1, 'prims.addd': 2, f'ltorch.{n}': 3}\nb.sym.id == 'ltorch.ad'"
    assert operation_names.wrong_names(text) == ["1: 'prims.addd'", "2: 'ltorch.ad'"]


def test_rows_of_the_fuser_are_of_operations_that_exist():
    """Some are written as loops over names, which the linter does not follow."""
    registered = [*LTORCH.values(), *PRIMS.values()]
    symbols = {s.id for s in (*registered, *gc.get_objects()) if isinstance(s, Symbol)} | operation_names.declared()
    assert {i for i in lower.ROWS if i.startswith(("ltorch.", "prims."))} - symbols == set()


def test_one_version():
    assert thunder.__version__ == "0.2.0"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"] == ["version"]
    for page, words in (
        ("CITATION.cff", f"version: {thunder.__version__}\n"),
        ("CHANGELOG.md", f"({thunder.__version__})"),
        ("README.md", f"the version is {thunder.__version__},"),
    ):
        assert words in (ROOT / page).read_text(), page


def test_a_wheel_in_an_empty_environment(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "thunder", tmp_path / "thunder", ignore=shutil.ignore_patterns("__pycache__"))
    quiet = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    done = subprocess.run(build, cwd=tmp_path, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "made").iterdir()
    assert wheel.name == f"thunder_compiler-{thunder.__version__}-py3-none-any.whl"

    environment = tmp_path / "environment"
    venv.create(environment)
    (python,) = environment.glob("bin/python") if os.name == "posix" else environment.glob("Scripts/python.exe")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], env=quiet, check=True)
    (packages,) = environment.glob("**/site-packages")
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    code = """
import pathlib, runpy, sys, torch, thunder
compiled = thunder.compile(torch.nn.Linear(2, 2), recipe="inference")
assert compiled(torch.ones(1, 2)).shape == (1, 2)
print(thunder.__file__)
try:
    thunder.jit(lambda x: x * x.untyped_storage().nbytes(), fallback="error")(torch.ones(2))
except thunder.errors.CaptureError as error:
    page, _, section = error.__notes__[0].removeprefix("See ").partition("#")
assert section == "captureerror" and "### CaptureError" in pathlib.Path(page).read_text(), page
sys.argv = ["thunder", "doctor"]
runpy.run_module("thunder", run_name="__main__")
"""
    done = subprocess.run([python, "-c", code], cwd=tmp_path / "made", env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(packages) in done.stdout and "a small training step: equals eager" in done.stdout
    here = {p.relative_to(ROOT / "thunder") for p in (ROOT / "thunder").rglob("*") if "__pycache__" not in p.parts}
    there = {p.relative_to(packages / "thunder") for p in (packages / "thunder").rglob("*") if p.parts}
    assert {p for p in here - there if (ROOT / "thunder" / p).is_file()} == set()


def test_the_public_api_in_a_users_type_checker(tmp_path):
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    (tmp_path / "wrong.py").write_text("import thunder\nthunder.nothing\nthunder.verify()\n")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([*command, "program.py", "wrong.py"], cwd=tmp_path, capture_output=True, text=True)
    everything = json.loads(done.stdout)["generalDiagnostics"]
    diagnostics = [x for x in everything if Path(x["file"]).name == "program.py"]
    said = [f"{x['range']['start']['line']}: {x['message']}" for x in diagnostics if x["severity"] != "information"]
    assert said == []
    types = [re.search(r'is "(.*)"', x["message"])[1] for x in diagnostics if x["severity"] == "information"]
    assert types == ["Traces", "dtype", "Literal[FSDPType.ZERO3]"]
    assert len(everything) - len(diagnostics) == 2, "it sees the types"


def test_the_workflow_runs_what_there_is():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", text)) == {"lint", "suite"} <= targets
    assert {m for m in ("lint:", "versions:", "docs:", "wheels:") if f"\n  {m}\n" not in text} == set()
    for path in re.findall(r"tests/\w+\.py", text):
        assert (ROOT / path).exists(), path
