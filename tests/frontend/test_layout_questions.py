"""What a program asks about a tensor's memory beyond its strides: the answer is eager's, for inputs and for what the program computes, and stays so."""

import pytest
import torch

import thunder
from thunder.errors import CaptureError

COMPLEX = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2.0]])


@pytest.mark.parametrize("x", [COMPLEX, COMPLEX.conj(), COMPLEX.mT, COMPLEX.real], ids=["plain", "conjugated", "transposed", "real"])
def test_bits(x):
    def program(x):
        c = x.conj()
        return x.is_conj(), torch.is_conj(c), c.is_neg(), torch.is_neg(c.imag if c.is_complex() else c), (c * 2).is_conj()

    assert thunder.jit(program)(x) == program(x)


def test_the_answer_is_a_guard():
    compiled = thunder.jit(lambda x: (x * 2, x.is_conj()))
    assert not compiled(COMPLEX)[1]
    assert compiled(COMPLEX.conj())[1]
    assert not compiled(COMPLEX)[1]
    assert thunder.cache_misses(compiled) == 2
    compiled = thunder.jit(lambda x: x[0].is_shared())
    assert not compiled(torch.ones(2))
    assert compiled(torch.ones(2).share_memory_())


@pytest.mark.parametrize("x", [COMPLEX, COMPLEX.conj()], ids=["plain", "conjugated"])
def test_resolved(x):
    def program(x):
        return x.resolve_conj(), x.conj().resolve_conj(), x.conj().imag.resolve_neg(), x.real.resolve_conj()

    for got, want in zip(thunder.jit(program)(x), program(x), strict=True):
        assert torch.equal(got, want)
        assert (got.is_conj(), got.is_neg(), got.stride()) == (want.is_conj(), want.is_neg(), want.stride())
        assert (got.data_ptr() == x.data_ptr()) == (want.data_ptr() == x.data_ptr())


def test_whether_two_tensors_are_one_view():
    assert thunder.jit(lambda x: x.is_set_to(x))(torch.ones(2))
    with pytest.raises(CaptureError, match="one view of one memory"):
        thunder.jit(lambda x, y: x.is_set_to(y))(torch.ones(2), torch.ones(2))


def test_methods_called_through_the_class():
    x = torch.ones(2, 3)
    assert thunder.jit(lambda x: (torch.Tensor.is_contiguous(x), torch.Tensor.is_contiguous(x.T)))(x) == (True, False)


def test_addresses_of_inputs():
    compiled = thunder.jit(lambda x, y: x + (x.data_ptr() == y.data_ptr()))
    x, y = torch.ones(2), torch.ones(2)
    for a, b in ((x, y), (x, x), (x, y)):
        assert torch.equal(compiled(a, b), a + float(a is b))
    with pytest.raises(CaptureError, match="the address of what the program computes"):
        thunder.jit(lambda x: (x * 2).data_ptr())(x)
