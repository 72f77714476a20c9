"""Copies of many tensors by one kernel, under Triton's interpreter or on a GPU."""

import sys

import pytest
import torch

from thunder.executors import copies
from thunder.executors.copies import PAIRS, copies_together

from .test_triton_fuser import DEVICE

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

SIZES = [(3, 5), (1,), (0,), (4097,), (2, 2048), (4096,), (7, 11, 2)]


def tensors(dtype, shapes):
    generator = torch.Generator().manual_seed(1)
    bits = [torch.randint(0, 256, (*s, dtype.itemsize), dtype=torch.uint8, generator=generator) for s in shapes]
    return [b.view(dtype).view(s).to(DEVICE) if dtype != torch.bool else b[..., 0].to(DEVICE) > 100 for b, s in
            zip(bits, shapes, strict=True)]  # fmt: skip


def same_bits(a, b):
    return torch.equal(*(x.contiguous().flatten().view(torch.uint8) if x.dtype != torch.bool else x for x in (a, b)))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool],
    ids=str,
)
def test_bits_of_each_type(dtype):
    sources = tensors(dtype, SIZES)
    targets = [torch.zeros_like(x) for x in sources]
    copies_together(sources)(targets, sources)
    assert all(map(same_bits, targets, sources))


def test_launches_take_sixteen_tensors_of_one_type(monkeypatch):
    launched = []
    count = copies._copied._function
    monkeypatch.setattr(copies._copied, "_function", lambda steps, targets, sources: (
        launched.append(len(targets)), count(steps, targets, sources))[1])  # fmt: skip
    sources = [*tensors(torch.float32, SIZES * 5), *tensors(torch.float16, [(2, 3)]), *tensors(torch.int32, [(9,)] * 3)]
    sources += [
        torch.randn(4, 6, device=DEVICE).t(),
        torch.randn(4, 6, device=DEVICE)[:, ::2],
        torch.randn(1, device=DEVICE) + 1j,
    ]
    targets = [torch.empty_like(x) for x in sources]
    copies_together(sources)(targets, sources)
    assert all(map(same_bits, targets, sources))
    assert sorted(launched) == [3, 4, PAIRS, PAIRS]  # 36 dense ones of float32


def test_other_tensors_than_those_it_was_written_for():
    """Of the same types, shapes and strides, at addresses that no vector load takes."""
    flat = torch.arange(64.0, device=DEVICE)
    sources, others = [flat[:9], flat[16:25]], [flat[1:10], flat[19:28]]
    copy = copies_together(sources)
    for some in (sources, others):
        targets = [torch.zeros(9, device=DEVICE) for _ in some]
        copy(targets, some)
        assert all(map(torch.equal, targets, some))
