"""Kernels are compiled for the strides that a program will have, before it runs, and in the background where nobody
waits for them."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests.test_compiled_kernels import Everywhere, compiled, directory, driver  # noqa: F401  fixtures
from thunder.executors.triton_kernels import binary
from thunder.runtime import background

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

LAST = torch.channels_last


def heads(x):
    """As attention lies in memory: batch, position, head."""
    q, k, v = (t.view(2, 8, 4, 4).transpose(1, 2) for t in (x @ x.transpose(1, 2) @ x).repeat(1, 1, 3).chunk(3, -1))
    y = torch.exp(q) + torch.sin(k) * v
    return torch.tanh(y.transpose(1, 2).reshape(2, 8, 16) @ x.transpose(1, 2)) * 2 + 1


def image(x, w, b):
    y = torch.exp(F.conv2d(x, w, b)) + 1
    z = torch.sin(F.max_pool2d(y, 2) @ torch.ones(y.shape[-1] // 2, 3)) * 2
    return torch.cos(F.interpolate(z, y.shape[-2:])) * y.mean() + 1


def columns(x):
    return torch.exp(x) * x.sum(0) + 1


PROGRAMS = {
    "heads": (heads, lambda: (torch.rand(2, 8, 16),)),
    "rows": (columns, lambda: (torch.rand(6, 8),)),
    "transposed": (columns, lambda: (torch.rand(8, 6).t(),)),
    "sliced": (columns, lambda: (torch.rand(6, 16)[:, ::2],)),
    "channels last": (image, lambda: (torch.rand(2, 3, 8, 8).to(memory_format=LAST), torch.rand(4, 3, 3, 3), torch.rand(4))),
    "channels last weight": (image, lambda: (torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3).to(memory_format=LAST), None)),
    "pixels": (image, lambda: (torch.rand(2, 3, 8, 8).to(memory_format=LAST), torch.rand(4, 3, 1, 1).to(memory_format=LAST), torch.rand(4))),
    "channels first": (image, lambda: (torch.rand(2, 3, 8, 8), torch.rand(4, 3, 3, 3), torch.rand(4))),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_is_compiled_when_a_program_runs(driver, compiled, name, grad):  # noqa: F811
    function, make = PROGRAMS[name]
    args = [x.requires_grad_(grad) if x is not None else None for x in make()]
    compiling = thunder.jit(function, executors=[Everywhere(f"expects {name} {grad}")])
    compiling.entry_for(tuple(args), {})
    binary.wait_for_kernels()
    before = len(compiled)
    assert before
    result = compiling(*args)
    if grad:
        result.backward(torch.ones(result.shape))
    assert [request.name for request in compiled[before:]] == []
    assert len(driver) >= before  # each kernel was launched


@pytest.fixture
def held(monkeypatch):
    """Nothing is compiled before it is set."""
    event = threading.Event()

    def compile(request):
        assert event.wait(60)
        return {"name": request.name, "shared": 0, "scratch": 2}, b"code of " + request.text.encode()

    monkeypatch.setattr(binary, "_compile", compile)
    yield event
    event.set()


def test_a_program_does_not_wait_for_kernels(driver, held):  # noqa: F811
    x = torch.rand(6, 8)
    jitted = thunder.jit(columns, executors=[Everywhere("tiers")], tiers=5)
    entry, _ = jitted.entry_for((x,), {})
    for _ in range(3):
        assert torch.equal(jitted(x), columns(x))
    assert not driver and str(entry.tiers).startswith("first tier")
    held.set()
    assert background.idle(60)
    jitted(x)
    assert not driver
    jitted(x)
    assert driver


def test_unexpected_strides_wait(driver, held):  # noqa: F811
    """What rounds otherwise takes over at a call that is known beforehand, and not when it is ready."""
    x = torch.rand(8, 8)
    held.set()
    jitted = thunder.jit(columns, executors=[Everywhere("unexpected")], tiers=2)
    entry, _ = jitted.entry_for((x,), {})
    jitted(x), jitted(x)
    (region,) = (b.sym.fn for b in entry.forward.bound_symbols if b.sym.is_fusion)
    before = len(driver)
    region(x.t())
    assert len(driver) > before
