"""Kernels read and write inside of their buffers alone, and nothing that was not written: programs that move elements
(rolls, patches, strided slices), whose reductions are read at other indices than they are computed at, on GPUs of
several kinds."""

from __future__ import annotations

import dataclasses
import random
import sys

import numpy
import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.executors import triton_fuser as fuser_module
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import launcher
from thunder.kernels.machine import planned_gpu

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is asked for addresses, on the CPU", allow_module_level=True)
pytestmark = [
    # numpy says so where the interpreter computes what is not used
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("triton_interpreter"),
]  # fmt: skip


@pytest.fixture
def outside(monkeypatch):
    """The accesses outside of a kernel's tensors. New memory holds NaN."""
    from triton.runtime import interpreter

    ranges: list[tuple[int, int]] = []
    results: list[tuple[str, int]] = []

    def check(what, pointers, mask):
        places = numpy.asarray(pointers.data).astype(numpy.int64).ravel()
        places = places[numpy.broadcast_to(numpy.asarray(mask.data).astype(bool).ravel(), places.shape)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for low, high in ranges:
            places = places[~((places >= low) & (places + size <= high))]
        if places.size:
            results.append((what, places.size))

    builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, grid.__call__

    def masked_load(self, pointers, mask, *args, **kwargs):
        check("load", pointers, mask)
        return load(self, pointers, mask, *args, **kwargs)

    def masked_store(self, pointers, value, mask, *args, **kwargs):
        check("store", pointers, mask)
        return store(self, pointers, value, mask, *args, **kwargs)

    def launch(self, *args, **kwargs):
        tensors = [t for t in args if isinstance(t, torch.Tensor) and t.numel()]
        last = [sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 for t in tensors]
        ranges[:] = [
            (t.data_ptr(), t.data_ptr() + n * t.element_size()) for t, n in zip(tensors, last, strict=True)
        ]  # fmt: skip
        return run(self, *args, **kwargs)

    allocator = launcher._allocator

    def filled(device):
        allocate = allocator(device)

        def filling(size, stride, dtype):
            memory = allocate(size, stride, dtype)
            return memory.fill_(float("nan") if dtype.is_floating_point else 77)

        return filling

    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
    monkeypatch.setattr(grid, "__call__", launch)
    monkeypatch.setattr(launcher, "_allocator", filled)
    return results


def windows(x, weight, bias):
    y = torch.roll(F.layer_norm(x, (24,), weight, bias), (3, -2), (1, 2))
    y = y.view(2, 2, 4, 2, 4, 24).transpose(2, 3).contiguous().view(8, 16, 24)
    y = (y * y.sigmoid()).view(2, 2, 2, 4, 4, 24).transpose(2, 3).contiguous().view(2, 8, 8, 24)
    return x + torch.roll(y, (-3, 2), (1, 2))


def patches(x, weight, bias):
    y = x * x.sigmoid()
    parts = [y[:, i::2, j::2] for j in range(2) for i in range(2)]
    return F.layer_norm(torch.cat(parts, -1), (96,), weight.repeat(4), bias.repeat(4))


def strided(x, weight, bias):
    even, odd = x[..., ::2], x[..., 1::2]
    rotated = torch.stack([even * weight[::2] - odd * bias[::2], even * bias[1::2] + odd * weight[1::2]], -1)
    return torch.softmax(rotated.flatten(3), -1) + x[:, :, 1:2]


def around(x, weight, bias):
    y = torch.cat([x[:, 5:], x[:, :5]], 1)
    return F.layer_norm(torch.cat([y[..., 20:], y[..., :20]], -1) * weight, (24,)) + bias


def machines(count):
    numbers, gpu = random.Random(0), planned_gpu()
    for _ in range(count):
        yield dataclasses.replace(
            gpu, byte={"L2": 10 ** numbers.uniform(-12, -10), "memory": 10 ** numbers.uniform(-12, -10)},
            multiprocessors=numbers.choice([2, 7, 132]), instruction=10 ** numbers.uniform(-14, -11),
            launch=10 ** numbers.uniform(-7, -5.5),
        )  # fmt: skip


@pytest.mark.sweep(7)
@pytest.mark.parametrize("program", [windows, patches, strided, around])
def test_kernels_stay_inside_of_memory_that_is_written(program, outside, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 24, requires_grad=True)
    weight, bias = (torch.randn(24, requires_grad=True) for _ in range(2))
    expected = program(x, weight, bias)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, weight, bias), cotangent)
    for i, machine in enumerate(machines(2)):
        monkeypatch.setattr(fuser_module, "planned_gpu", lambda machine=machine: machine)
        compiled = thunder.jit(program, executors=[TritonFuser(f"inside{i}")], graphs=False)
        result = compiled(x, weight, bias)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        gradients = torch.autograd.grad(result, (x, weight, bias), cotangent)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert not outside


def rotary(x, weight, bias):
    """Rotary embeddings of a part of queries and keys, which one linear layer has computed with values. The gradient of
    its result is a concatenation of concatenations."""
    angles = torch.outer(torch.arange(21.0), weight)
    angles = torch.cat([angles, angles], -1)

    def rotated(y):
        turned, rest = y[..., :4], y[..., 4:]
        other = torch.cat([-turned[..., 2:], turned[..., :2]], -1)
        return torch.cat([turned * angles.cos() + other * angles.sin(), rest], -1)

    query, key, value = (x + bias).view(2, 21, 4, 48).transpose(1, 2).chunk(3, -1)
    return rotated(query), rotated(key), value.contiguous()


def test_values_that_are_stored_are_inside_of_memory_beyond_their_piece(outside, monkeypatch):
    """A value that is inside of a buffer in one piece of a concatenation alone is not computed at other indices."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((2, 21, 192), (2,), (192,)))
    expected = rotary(x, weight, bias)
    cotangents = [*map(torch.randn_like, expected)]
    wanted = torch.autograd.grad(expected, (x, weight, bias), cotangents)
    for i, machine in enumerate(machines(2)):
        monkeypatch.setattr(fuser_module, "planned_gpu", lambda machine=machine: machine)
        result = thunder.jit(rotary, executors=[TritonFuser(f"pieces{i}")], graphs=False)(x, weight, bias)
        gradients = torch.autograd.grad(result, (x, weight, bias), cotangents)
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert not outside


def test_a_roll_is_one_read_and_so_are_patches():
    x = torch.randn(2, 8, 8, 24)
    for program in (lambda x: torch.roll(x * 2, (3, -2), (1, 2)), lambda x: patches(x, x[0, 0, 0], x[0, 0, 1])):
        compiled = thunder.jit(program, executors=[TritonFuser("moved")])
        torch.testing.assert_close(compiled(x), program(x), rtol=1e-5, atol=1e-5)
        (text,) = thunder.last_kernels(compiled).values()
        assert "concat" not in text.partition("launch 0")[0]


def test_pieces_that_differ_in_the_sign_of_a_zero_are_two():
    x = torch.ones(4, 8)

    def program(x):
        return torch.cat([x[:, :4] * 0.0, x[:, 4:] * -0.0], 1) + x[:, :1] * -0.0

    result = thunder.jit(program, executors=[TritonFuser("signs")])(x)
    assert torch.equal(result.signbit(), program(x).signbit())
