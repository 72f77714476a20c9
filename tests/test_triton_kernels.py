"""Triton kernels launched inside compiled programs, under Triton's interpreter."""

import os
import sys

import pytest
import torch

import thunder
from thunder.capture.library.triton_kernels import written_parameters

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
triton = pytest.importorskip("triton", reason="kernels need Triton")
import triton.language as tl  # noqa: E402

_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def scale_in_place(x_ptr, n, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pointers = x_ptr + offsets
    mask = offsets < n
    value = tl.load(pointers, mask=mask)
    tl.store(pointers, value * factor, mask=mask)


@triton.jit
def write_row(pointer, offsets, value, mask):
    tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def split_kernel(x_ptr, low_ptr, high_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(axis=0)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x_ptr + row * stride + offsets, mask=mask)
    low = tl.minimum(value, 0.0)
    write_row(low_ptr, row * n + offsets, low, mask)
    write_row(high_ptr, value=value - low, offsets=row * n + offsets, mask=mask)


@triton.jit
def total_kernel(x_ptr, total_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr + offsets * 0, tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)


@triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})
@triton.jit
def heuristic_double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def tuned_double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK) + tl.program_id(0) * BLOCK
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


if _before is None:
    del os.environ["TRITON_INTERPRET"]
else:
    os.environ["TRITON_INTERPRET"] = _before

X, Y = torch.arange(10.0), torch.linspace(0, 1, 10)


def add(x, y):
    out = torch.empty_like(x)
    n = out.numel()
    add_kernel[(triton.cdiv(n, 4),)](x, y, out, n, BLOCK=4)
    return out


def lines(compiled, i=-1):
    return [str(line) for line in thunder.last_traces(compiled)[i].bound_symbols if line.sym.name != "python_del"]


def test_a_launch_is_one_line():
    compiled = thunder.jit(lambda x, y: add(x * 2, y) + 1)
    for x in (X, X + 1):
        assert torch.equal(compiled(x, Y), x * 2 + Y + 1)
    assert thunder.cache_misses(compiled) == 1
    assert lines(compiled)[2] == "(_, t2) = add_kernel(t0, y, out, 10, BLOCK=4, grid=(3,))"
    assert torch.equal(compiled(X[:7], Y[:7]), X[:7] * 2 + Y[:7] + 1) and thunder.cache_misses(compiled) == 2


def test_grids_of_functions_of_the_constants():
    def program(x, y):
        out = torch.empty_like(x)
        n = x.shape[0]
        add_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, out, n, BLOCK=8)
        return out

    for cache in ("constant values", "symbolic values"):
        compiled = thunder.jit(program, cache=cache)
        for n in (10, 9):
            assert torch.equal(compiled(X[:n], Y[:n]), X[:n] + Y[:n])
        assert "grid=(2,)" in "".join(lines(compiled))


def test_what_a_kernel_writes_is_a_new_version():
    def program(x):
        y = x + 1
        before = y * 1
        scale_in_place[(3,)](y, 10, 3.0, BLOCK=4)
        middle = y * 1
        scale_in_place[(3,)](y, y.numel(), factor=2.0, BLOCK=4)
        return before, middle, y

    compiled = thunder.jit(program)
    for _ in range(2):
        for got, want in zip(compiled(X), (X + 1, (X + 1) * 3, (X + 1) * 6)):
            assert torch.equal(got, want)


def test_inputs_and_views_are_written_to():
    def program(x, y):
        scale_in_place[(3,)](x, 10, 3.0, BLOCK=4)
        scale_in_place[(1,)](y[2:5], 3, 2.0, BLOCK=4)
        return x.sum(), y * 1

    compiled = thunder.jit(program)
    x, y, a, b = X.clone(), Y.clone(), X.clone(), Y.clone()
    for _ in range(2):
        for got, want in zip(compiled(x, y), program(a, b)):
            assert torch.equal(got, want)
        assert torch.equal(x, a) and torch.equal(y, b)
    printed = "".join(lines(compiled))
    assert "copy_(x" not in printed, "the kernel writes to the input itself"


def test_helpers_strides_and_several_results():
    def program(x):
        low, high = torch.empty(x.shape), x.new_empty(x.shape)
        split_kernel[(x.shape[0],)](x, low, high, x.stride(0), x.shape[1], BLOCK=4)
        return low, high

    compiled = thunder.jit(program)
    whole = torch.linspace(-1, 1, 24).reshape(6, 4)
    for x in (whole[:3, :3], whole[::2, :3]):
        low, high = compiled(x)
        assert torch.equal(low, x.clamp(max=0)) and torch.equal(high, x.clamp(min=0))


def test_content_that_a_kernel_adds_to_is_kept():
    def program(x):
        total = torch.zeros(1) + 5
        again = total + 0
        total_kernel[(3,)](x, total, 10, BLOCK=4)
        fresh = torch.zeros(1)
        total_kernel[(3,)](x, fresh, 10, BLOCK=4)
        return total, again, fresh

    compiled = thunder.jit(program)
    for _ in range(2):
        for got, want in zip(compiled(X), (torch.tensor([50.0]), torch.tensor([5.0]), torch.tensor([45.0]))):
            assert torch.equal(got, want)


def test_a_launch_that_nobody_reads_is_dropped():
    def program(x):
        out = torch.empty_like(x)
        add_kernel[(3,)](x, x, out, 10, BLOCK=4)
        return x + 1

    compiled = thunder.jit(program)
    assert torch.equal(compiled(X), X + 1) and len(lines(compiled)) == 1


@pytest.mark.parametrize("kernel", [heuristic_double, tuned_double], ids=["heuristics", "autotune"])
def test_around_kernels(kernel, monkeypatch):
    def program(x):
        out = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out

    compiled = thunder.jit(program)
    assert torch.equal(compiled(X), X * 2)
    assert f"grid={'(1,)' if kernel is heuristic_double else '((2,),)'}" in "".join(lines(compiled))


class AddTimesTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return add(x, y) * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return add(g, g), add(g, g) * x


class Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return add(x, y)

    @staticmethod
    def backward(ctx, g):
        return g, add(g, torch.zeros_like(g))


@pytest.mark.parametrize("function", [AddTimesTwo, Add])
def test_inside_a_function_with_a_backward(function):
    def program(x, y):
        return (function.apply(x.sin(), y) * y).sum()

    compiled = thunder.jit(program)
    x, y, a, b = (t.clone().requires_grad_() for t in (X, Y, X, Y))
    got, want = compiled(x, y), program(a, b)
    assert torch.equal(got, want)
    got.backward()
    want.backward()
    assert torch.equal(x.grad, a.grad) and torch.equal(y.grad, b.grad)
    assert "add_kernel" in str(thunder.last_backward_traces(compiled)[-1])
    with torch.no_grad():
        assert torch.equal(compiled(x, y), program(x, y))


def test_gradients_pass_through_what_a_kernel_overwrites():
    def program(x):
        y = x * 2
        scale_in_place[(3,)](y, 10, 3.0, BLOCK=4)
        return y

    x, a = X.clone().requires_grad_(), X.clone().requires_grad_()
    got, want = thunder.jit(program)(x), program(a)
    assert torch.equal(got, want)
    got.sum().backward()
    want.sum().backward()
    assert torch.equal(x.grad, a.grad)


def test_another_kernel_of_the_same_name_is_another_program(monkeypatch):
    space = {"kernel": add_kernel}

    def program(x, y):
        out = torch.zeros_like(x)
        space["kernel"][(3,)](x, y, out, 10, BLOCK=4)
        return out

    compiled = thunder.jit(program)
    assert torch.equal(compiled(X, Y), X + Y)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    space["kernel"] = triton.jit(add_kernel.fn)
    assert torch.equal(compiled(X, Y), X + Y) and thunder.cache_misses(compiled) == 2


def test_which_parameters_are_written():
    def pointers(kernel):
        return {name for name in written_parameters(kernel) if name.endswith("_ptr")}

    assert pointers(add_kernel.fn) == {"out_ptr"} and pointers(scale_in_place.fn) == {"x_ptr"}
    assert pointers(split_kernel.fn) == {"low_ptr", "high_ptr"} and pointers(total_kernel.fn) == {"total_ptr"}
    space = {"tl": tl}
    exec("def hidden(x_ptr): tl.store(x_ptr, 1)", space)
    assert written_parameters(space["hidden"]) is None, "without a source any may be written"

    def unknown(x_ptr, y_ptr):
        outside_helper(x_ptr, tl.load(y_ptr))  # noqa: F821

    def in_a_loop(a_ptr, b_ptr, c_ptr, n):
        pointer = a_ptr
        for _ in range(n):
            tl.store(pointer, tl.load(b_ptr).to(tl.float32))
            pointer += 1
            swapped, _other = c_ptr, pointer
            pointer = swapped

    def through_a_descriptor(a_ptr, b_ptr, n):
        descriptor = tl.make_tensor_descriptor(a_ptr, shape=[n], strides=[1], block_shape=[4])
        descriptor.store([0], tl.load(b_ptr))

    def assembly(a_ptr, b_ptr):
        tl.inline_asm_elementwise("", "", [a_ptr], dtype=tl.int32, is_pure=False, pack=1)

    assert written_parameters(unknown) is None
    assert pointers(in_a_loop) == {"a_ptr", "c_ptr"}
    assert pointers(through_a_descriptor) == {"a_ptr"}
    assert written_parameters(assembly) == {"a_ptr"}


def test_one_kernel_with_several_grids():
    """The same kernel, in programs and within one: each launch has the grid that it was given."""
    for size in (3, 400, 70):
        x, y = torch.randn(size, requires_grad=True), torch.randn(size, requires_grad=True)
        got = thunder.jit(lambda x, y: Add.apply(x.sin(), y) * y)(x, y)
        assert torch.equal(got, (x.sin() + y) * y)
    x, y = torch.randn(500), torch.randn(500)
    got = thunder.jit(lambda x, y: (add(x[:2], y[:2]), add(x, y)))(x, y)
    assert torch.equal(got[0], x[:2] + y[:2]) and torch.equal(got[1], x + y)
