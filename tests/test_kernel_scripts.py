"""`thunder.last_kernels(fn)[name].script()`: one fused region beside PyTorch's operations, in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import thunder
from thunder.core.regions import NoScript
from thunder.executors.cpp_fuser import CppFuser

ALWAYS = CppFuser("always", always=True)


def run_script(text: str, directory: Path) -> dict[str, float]:
    """The differences that a script prints, by result."""
    path = directory / "region.py"
    path.write_text(text)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(Path(thunder.__file__).parents[1])}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"PyTorch's operations [\d.]+ us\nkernels [\d.]+ us\n", done.stdout), done.stdout
    return {name: float(d) for name, d in re.findall(r"(\w+): largest difference (\S+),", done.stdout)}


def kernel_of(fn, *args, executor=ALWAYS, **options):
    compiled = thunder.jit(fn, executors=[executor], tiers=0, **options)
    for each in args:
        compiled(*each)
    ((_, kernel),) = thunder.last_kernels(compiled).items()
    return kernel


def test_a_script_runs_the_kernel_beside_the_operations(tmp_path):
    kernel = kernel_of(lambda x, y: torch.softmax(x * 2, -1) + y, (torch.randn(64, 32).t(), torch.randn(64)))
    text = kernel.script()
    assert "tensor((32, 64), (1, 32), torch.float32),  # x" in text
    assert "tensor((64,), (1,), torch.float32),  # y" in text
    assert "torch.softmax(" in text and 'extern "C" void region' in text
    ((_, difference),) = run_script(text, tmp_path).items()
    assert difference < 1e-6


def test_a_wrong_kernel_differs(tmp_path):
    text = kernel_of(lambda x: (x * 3).exp(), (torch.randn(64, 32),)).script()
    wrong = text.replace("(float)0x1.8000000000000p+1", "(float)0x1.0p+1")
    assert wrong != text
    assert min(run_script(wrong, tmp_path).values()) > 0.1


def test_integers_are_valid_indices(tmp_path):
    indices = torch.randint(9, (7,))
    text = kernel_of(lambda x, i: x[i] * 2 + 1, (torch.randn(9, 3), indices)).script()
    assert "tensor((7,), (1,), torch.int64, below=9),  # i" in text
    assert max(run_script(text, tmp_path).values()) == 0.0


def test_symbolic_sizes_are_those_of_the_program(tmp_path):
    calls = [(torch.randn(10, 64),), (torch.randn(100, 64),)]
    text = kernel_of(lambda x: torch.softmax(x * 2, -1) + x, *calls, dynamic=True).script()
    assert "tensor((10, 64), (64, 1), torch.float32)" in text and "kernel(*inputs, 10, 64)" in text
    assert max(run_script(text, tmp_path).values()) < 1e-6


def test_of_a_backward(tmp_path):
    compiled = thunder.jit(lambda x: (x.tanh() * x.exp()).sum(), executors=[ALWAYS], tiers=0)
    compiled(torch.randn(64, 32, requires_grad=True)).backward()
    kernels = thunder.last_kernels(compiled)
    assert [*kernels] == ["Kernels0", "backward Kernels0"]
    assert max(run_script(kernels["backward Kernels0"].script(), tmp_path).values()) < 1e-5


def test_of_a_triton_kernel(tmp_path):
    program = """
import torch, thunder
compiled = thunder.jit(lambda x: torch.softmax(x * 2, -1) + x, executors=["triton_fuser"], tiers=0)
compiled(torch.randn(16, 32))
((_, kernel),) = thunder.last_kernels(compiled).items()
print(kernel.script())
"""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(thunder.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "@triton.jit" in done.stdout
    assert max(run_script(done.stdout, tmp_path).values()) < 1e-6


def test_a_region_of_inductor_has_none():
    kernel = kernel_of(lambda x: torch.softmax(x * 2, -1) + x, (torch.randn(64, 32),), executor="inductor")
    with pytest.raises(NoScript, match="TORCH_LOGS=output_code"):
        kernel.script()
