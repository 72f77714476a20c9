"""What a program asks about a tensor's memory beyond its strides: the answer is eager's, for inputs and for what the
program computes, and stays so."""

import copy

import pytest
import torch

import thunder
from thunder.errors import CaptureError

COMPLEX = torch.tensor([[1 + 2j, 3 - 1j], [0.5j, 2.0]])


@pytest.mark.parametrize(
    "x", [COMPLEX, COMPLEX.conj(), COMPLEX.mT, COMPLEX.real], ids=["plain", "conjugated", "transposed", "real"]
)
def test_bits(x):
    def program(x):
        c = x.conj()
        return (
            x.is_conj(),
            torch.is_conj(c),
            c.is_neg(),
            torch.is_neg(c.imag if c.is_complex() else c),
            (c * 2).is_conj(),
        )

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


def test_inference_tensors():
    def program(x):
        return x.is_inference(), torch.is_inference(x[0]), (x + 1).is_inference()

    with torch.inference_mode():
        leaf = torch.ones(2)
    compiled = thunder.jit(program)
    for x in (torch.ones(2), leaf, torch.ones(2)):
        assert compiled(x) == program(x)
    with torch.inference_mode():
        assert compiled(leaf) == program(leaf) and compiled(torch.ones(2)) == program(torch.ones(2))


REFUSED = {
    "storage": lambda x: x.untyped_storage().nbytes(), "typed storage": lambda x: x.storage().size(),
    "storage type": lambda x: x.storage_type(), "dlpack": lambda x: torch.from_dlpack(x),
    "state": lambda x: x.__getstate__(), "text": lambda x: x.__str__(),
    "format": lambda x: x.__format__(""), "copy": lambda x: copy.copy(x),
    "object": lambda x: x._cdata, "memory around": lambda x: torch.slice_inverse(x[0], x),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_memory_itself_is_refused(name):
    REFUSED[name](torch.ones(2, 3))
    with pytest.raises(CaptureError) as raised:
        thunder.jit(REFUSED[name])(torch.ones(2, 3))
    assert "please report" not in str(raised.value) and raised.value.remedy


TEXTS = {
    "str": lambda x: str(x), "repr": lambda x: repr(x + 1), "format": lambda x: format(x.sum(), ".2f"),
    "f-string": lambda x: f"{x.sum():.2f}", "method": lambda x: "{}".format(x),
    "percent": lambda x: "%s" % x, "percent of several": lambda x: "%d %s" % (1, x),
}  # fmt: skip


@pytest.mark.parametrize("program", TEXTS.values(), ids=TEXTS)
def test_the_text_of_a_tensor(program):
    compiled = thunder.jit(program, sharp_edges="error")
    for x in (torch.ones(2), torch.zeros(2)):
        assert compiled(x) == program(x)
    assert thunder.cache_misses(compiled) == 1
    others = thunder.jit(
        lambda x: (str(x.shape), repr(x.ndim), format(2.5, ".2f"), "%d %s" % (x.ndim, x.dtype), "{}".format(x.device)),
        sharp_edges="error",
    )
    assert others(torch.ones(2)) == ("torch.Size([2])", "1", "2.50", "1 torch.float32", "cpu")


def test_copies_of_tensors():
    def program(x):
        y, z = copy.deepcopy([x, x])
        y += 1
        return y, z, x, x.module_load(x + 3), x.__idiv__(2.0), x.name

    x, y = torch.ones(2, 3).t(), torch.ones(2, 3).t()
    got, want = thunder.jit(program)(x), program(y)
    assert got[0] is got[1] and want[0] is want[1] and got[-1] is want[-1] is None
    for a, b in zip((*got[:-1], x), (*want[:-1], y), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    leaf = torch.ones(2, requires_grad=True)
    copied = thunder.jit(copy.deepcopy)(leaf)
    assert (
        copied.requires_grad and copied.is_leaf and copied.data_ptr() != leaf.data_ptr() and torch.equal(copied, leaf)
    )
    with pytest.raises(RuntimeError, match="graph leaves"):
        thunder.jit(copy.deepcopy)(leaf * 2)


@pytest.mark.filterwarnings("ignore:non-inplace resize")
def test_resized():
    x = torch.arange(6.0).reshape(2, 3)
    for program in (lambda x: x.resize(3, 2) * 2, lambda x: x.t().resize_as(x), lambda x: x.resize(4)):
        try:
            want = program(x)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                thunder.jit(program)(x)
            continue
        assert torch.equal(thunder.jit(program)(x), want)


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
    with pytest.raises(CaptureError, match="the same view of one memory"):
        thunder.jit(lambda x, y: x.is_set_to(y))(torch.ones(2), torch.ones(2))


def test_methods_called_through_the_class():
    x = torch.ones(2, 3)
    assert thunder.jit(lambda x: (torch.Tensor.is_contiguous(x), torch.Tensor.is_contiguous(x.T)))(x) == (True, False)


def test_addresses_of_inputs():
    compiled = thunder.jit(lambda x, y: x + (x.data_ptr() == y.data_ptr()))
    x, y = torch.ones(2), torch.ones(2)
    for a, b in ((x, y), (x, x), (x, y)):
        assert torch.equal(compiled(a, b), a + float(a is b))
    with pytest.raises(CaptureError, match="the address of a computed tensor"):
        thunder.jit(lambda x: (x * 2).data_ptr())(x)


@pytest.mark.parametrize(
    ("size", "inputs"),
    [
        (lambda x, w: (x.t() @ x, w), lambda n: torch.randn(n, 4)),
        (lambda x, w: ((x * n_of(x)).sum(0).expand(3, 4).t(), w), lambda n: torch.randn(n, 4)),
        (lambda x, w: (w.index_add(0, x[:, 0].long() % 3, x), w), lambda n: torch.rand(n, 4) * 9),
    ],
    ids=["matmul", "expanded", "index_add"],
)
def test_strides_that_are_the_same_for_all_sizes_decide_nothing(size, inputs):
    """The layout of a value does not make sizes constants that it does not depend on."""

    def program(x, w):
        y, _ = size(x, w)
        return y * 2 if y.is_contiguous() else y.contiguous() * 3, y.stride()

    compiled, w = thunder.jit(program, fallback="error"), torch.randn(3, 4)
    for n in (3, 5, 6, 7, 9):
        x = inputs(n)
        torch.testing.assert_close(compiled(x, w), program(x, w))
    assert thunder.cache_misses(compiled) == 2


def n_of(x):
    return x.shape[0]


def test_strides_that_depend_on_sizes_are_those_of_the_call():
    compiled = thunder.jit(lambda x: ((x * 2).t(), (x * 2).t().stride()), fallback="error")
    for n in (3, 5, 6, 7):
        assert compiled(torch.ones(4, n))[1] == (1, n)
    compiled = thunder.jit(lambda x: (x.t() @ x).stride(), fallback="error")
    for x in (torch.ones(4, 4), torch.ones(6, 4), torch.ones(4, 6).t(), torch.ones(1, 4), torch.ones(0, 4)):
        assert compiled(x) == (x.t() @ x).stride()
