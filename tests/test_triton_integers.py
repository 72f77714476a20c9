"""Operations on integers and bits in the fuser's kernels are PyTorch's, for all types and at their ends."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder

from .test_triton_fuser import DEVICE, fusions, others

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

TYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
BY_NUMBER = {
    "//": lambda x, n: x // n, "%": lambda x, n: x % n, "div": lambda x, n: torch.div(x, n, rounding_mode="floor"),
}  # fmt: skip
PLAIN = {
    "~": lambda x, y: ~x, "maximum": torch.maximum, "minimum": torch.minimum, "clamp": lambda x, y: x.clamp(1, 100),
    "&": lambda x, y: x & y, "|": lambda x, y: x | y, "^": lambda x, y: x ^ y,
}  # fmt: skip


def numbers(dtype, seed):
    """All numbers of one byte; of more, some with the ends of the type."""
    ends = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(ends.min, ends.max, (251,), dtype=dtype, generator=generator)
    small = torch.arange(-20 if ends.min else 0, 20).to(dtype)
    return torch.cat((some, small, torch.tensor([ends.min, ends.max, 0], dtype=dtype))).to(DEVICE)


def check(function, *arguments):
    compiled = thunder.jit(lambda *xs: function(*(x ^ 1 for x in xs)), executors=["triton_fuser"])
    actual, wanted = compiled(*arguments), function(*(x ^ 1 for x in arguments))
    assert actual.dtype is wanted.dtype and torch.equal(actual, wanted)
    assert len(fusions(compiled)) == 1 and not others(compiled)


@given(st.sampled_from([*BY_NUMBER]), st.sampled_from(TYPES), st.integers(1, 127), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_by_a_number(name, dtype, number, seed):
    check(lambda x: BY_NUMBER[name](x, number), numbers(dtype, seed))


@given(st.sampled_from(TYPES), st.booleans(), st.data())
@settings(max_examples=25, deadline=None)
def test_shifts_by_all_bits_of_a_type(dtype, left, data):
    bits = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    check(lambda x: x << bits if left else x >> bits, numbers(dtype, bits))


@given(st.sampled_from([*PLAIN]), st.sampled_from(TYPES), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_of_two_tensors(name, dtype, seed):
    check(PLAIN[name], numbers(dtype, seed), numbers(dtype, seed + 1))


@pytest.mark.parametrize(
    "function",
    [lambda x: x // -3, lambda x: x % -3, lambda x: 7 // (x.abs() + 1), lambda x: x << 40],
    ids=["of a number below 0", "rest of one", "by a tensor", "all bits"],
)
def test_what_pytorch_runs(function):
    """Kernels divide by numbers above 0."""
    x = numbers(torch.int32, 0)
    compiled = thunder.jit(lambda x: function(x ^ 1), executors=["triton_fuser"])
    assert torch.equal(compiled(x), function(x ^ 1)) and others(compiled)


def test_places_of_rows_are_read_by_the_kernel_that_computes_them():
    """As programs of experts do, whose rows stand once for each expert."""

    def rows(x, perm):
        return torch.mm(x[perm // 2], x.t())

    compiled = thunder.jit(rows, executors=["triton_fuser"])
    x, perm = torch.randn(9, 16, device=DEVICE), torch.randperm(18, device=DEVICE)
    torch.testing.assert_close(compiled(x, perm), rows(x, perm))
    assert set(others(compiled)) <= {"mm", "t"}
