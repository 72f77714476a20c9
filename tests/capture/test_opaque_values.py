"""Sparse tensors, nested tensors, and tensors of subclasses with rules of their own: opaque values, or an error that
says so."""

import warnings

import numpy
import pytest
import torch

import thunder
from thunder.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch says so once
with warnings.catch_warnings():  # PyTorch says once that these are new
    warnings.simplefilter("ignore")
    ROWS = torch.eye(3).to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])


class Tagged(torch.Tensor):
    """A subclass with PyTorch's rules: results are of it, too."""


class Doubling(torch.Tensor):
    """A subclass with rules of its own in Python."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.add:
            return torch.Tensor.mul(*args)
        return super().__torch_function__(function, types, args, kwargs or {})


class Pair(torch.Tensor):
    """A wrapper around two tensors, as libraries of quantization and distribution have them."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.a, self.b = a, b

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def run(name):
            part = torch.utils._pytree.tree_map(
                lambda x: getattr(x, name) if isinstance(x, Pair) else x, (args, kwargs or {})
            )
            return function(*part[0], **part[1])

        if function is torch.ops.aten.sum.default:
            return run("a") + run("b")
        return Pair(run("a"), run("b"))


def dense(x):
    return (
        [x.a, x.b]
        if isinstance(x, Pair)
        else list(x.unbind())
        if x.is_nested
        else x.to_dense()
        if x.layout is not torch.strided
        else x
    )


def same(got, want):
    if isinstance(want, torch.Tensor):
        assert (type(got), got.layout, got.dtype) == (type(want), want.layout, want.dtype)
        torch.testing.assert_close(dense(got), dense(want), rtol=0, atol=0)
    elif isinstance(want, (tuple, list)):
        for a, b in zip(got, want, strict=True):
            same(a, b)
    else:
        assert got == want


def random_tensor(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PARTS = [random_tensor(2, 3), random_tensor(4, 3)]
PROGRAMS = {
    "to_sparse": (lambda x: x.to_sparse(), random_tensor(3, 3)),
    "to_dense": (lambda x: x.to_dense() + 1, random_tensor(3, 3).to_sparse()),
    "sparse_times_dense": (
        lambda x, y: torch.sparse.mm(x, y) * 2,
        random_tensor(3, 3).to_sparse(),
        random_tensor(3, 2),
    ),
    "compressed_rows": (lambda x, y: (x @ y).relu(), ROWS, random_tensor(3, 2)),
    "dense_times_sparse": (lambda x, y: y.matmul(x), random_tensor(3, 3).to_sparse(), random_tensor(2, 3)),
    "operators": (lambda x: (2 * x + x, -x if x.is_sparse else x), random_tensor(3, 3).to_sparse()),
    "metadata": (
        lambda x: (x.is_sparse, x.layout, x.shape, x.dtype, x.dim(), x.size(0), x.sparse_dim()),
        random_tensor(3, 3).to_sparse(),
    ),
    "parts": (lambda x: (x.coalesce().values().sum(), x.coalesce().indices()), random_tensor(3, 3).to_sparse()),
    "constructor": (
        lambda i, v: torch.sparse_coo_tensor(i, v, (3, 3)).to_dense(),
        torch.tensor([[0, 1], [1, 2]]),
        random_tensor(2),
    ),
    "branch_on_layout": (
        lambda x: x.to_dense() if x.layout is torch.sparse_coo else x * 3,
        random_tensor(3, 3).to_sparse(),
    ),
    "nested": (lambda x: (x * 2, x.is_nested), NESTED),
    "padded": (lambda x: x.to_padded_tensor(0.0).sum(0), NESTED),
    "nested_inside": (lambda a, b: torch.nested.nested_tensor([a, b]).to_padded_tensor(0.0), *PARTS),
    "jagged": (lambda x: x * 2 + 1, torch.nested.nested_tensor(PARTS, layout=torch.jagged)),
    "subclass": (lambda x: torch.sin(x) * 2, random_tensor(3).as_subclass(Tagged)),
    "own_rules": (lambda x: torch.add(x, 3.0), random_tensor(3).as_subclass(Doubling)),
    "out": (lambda x, y, o: (torch.mm(x, y, out=o), o + 1), ROWS, random_tensor(3, 3), torch.zeros(3, 3)),
    "wrapper": (
        lambda x, y: ((x * 2 + 1).sum() * y, x.exp()),
        Pair(random_tensor(2), random_tensor(3)[:2]),
        random_tensor(4),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_eagers(name):
    program, *args = PROGRAMS[name]
    compiled = thunder.jit(program)
    want = program(*args)
    same(compiled(*args), want)
    same(compiled(*args), want)
    assert thunder.cache_misses(compiled) == 1


def test_gradients_of_dense_operands():
    sparse, y = random_tensor(3, 3).to_sparse(), random_tensor(3, 2).requires_grad_()
    program = lambda s, y: (torch.sparse.mm(s, y) ** 2).sum()
    (want,) = torch.autograd.grad(program(sparse, y), y)
    (got,) = torch.autograd.grad(thunder.jit(program)(sparse, y), y)
    assert torch.equal(got, want)


def test_another_kind_is_another_entry():
    compiled = thunder.jit(lambda x: x.to_dense() * 2)
    for x in (
        torch.eye(3).to_sparse(),
        ROWS,
        random_tensor(3, 3),
        random_tensor(3, 3).to_sparse(),
        torch.eye(3).to_sparse(),
    ):
        same(compiled(x), x.to_dense() * 2)
    assert thunder.cache_misses(compiled) == 4


def test_a_number_that_is_read():
    compiled = thunder.jit(lambda x: x.sum().item())
    assert [compiled((n * torch.eye(3)).to_sparse()) for n in (1, 2, 5)] == [3.0, 6.0, 15.0]
    assert thunder.cache_misses(compiled) == 1


def test_a_shape_that_depends_on_data_is_an_error_when_it_differs():
    compiled = thunder.jit(lambda x: x.to_sparse().values())
    with pytest.raises(RuntimeError, match="the shape depends on data"):
        compiled(random_tensor(3, 3))


@pytest.mark.parametrize(
    "program, args, words",
    [
        (lambda x: x.mul_(2), (torch.eye(3).to_sparse(),), "mul_ writes to a sparse"),
        (
            lambda x: x.coalesce().values().mul_(2),
            (torch.eye(3).to_sparse().coalesce(),),
            "shares memory with a sparse",
        ),
        (
            lambda i, v: (s := torch.sparse_coo_tensor(i, v, (3, 3)), v.add_(1), s.to_dense())[-1],
            (torch.tensor([[0, 1], [1, 2]]), torch.ones(2)),
            "shares memory with a sparse",
        ),
        (lambda x: x.to_dense() * 2, (torch.eye(3).to_sparse().requires_grad_(),), "requires grad"),
        (lambda x: x.to_sparse(), (torch.eye(3).requires_grad_(),), "requires grad"),
        (lambda x: x.a, (Pair(random_tensor(2), random_tensor(2)),), "'a' of a Pair is read"),
        (lambda x: numpy.sin(x), (torch.ones(2),), "numpy"),
    ],
)
def test_refused(program, args, words):
    with pytest.raises(CaptureError, match=words):
        thunder.jit(program)(*args)


def test_numpy_arrays_as_indices():
    x, rows = random_tensor(3, 2), numpy.array([2, 0])
    compiled = thunder.jit(lambda x: (x[rows], x[rows, 1], x[numpy.int64(1)]))
    same(compiled(x), (x[rows], x[rows, 1], x[1]))


def test_operators_in_place_are_refused():
    def f(x, y):
        x = x * 2
        x += y
        return x.to_dense()

    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CaptureError, match=r"\+= with a tensor that is sparse"):
        thunder.jit(f, fallback="error")(sparse, sparse)
    n = thunder.jit(lambda n, x: (n := n * x).to_dense())(2, sparse)
    assert torch.equal(n, 2 * torch.eye(3))


WRITES = {  # to a tensor from outside: where, and by which call
    "out=": (lambda x, y, o: torch.sparse.sampled_addmm(x, y, y, out=o), lambda: [ROWS, random_tensor(3, 3), ROWS * 2]),
    "out= of one's own": (lambda x: torch.mul(x, 3, out=x), lambda: [torch.eye(3).to_sparse()]),
    "inplace=True": (
        lambda x: torch.nn.functional.elu(x, inplace=True),
        lambda: [-random_tensor(3).as_subclass(Tagged)],
    ),
    "a list": (lambda x: torch._foreach_mul_([x], 2), lambda: [torch.eye(3).to_sparse()]),
    "out= beside one": (
        lambda x, o: torch.add(x, 1, out=o),
        lambda: [random_tensor(3).as_subclass(Tagged), torch.zeros(3)],
    ),
    "several out=": (
        lambda x, *o: torch.sort(x, out=o),
        lambda: [random_tensor(3).as_subclass(Tagged), torch.zeros(3), torch.zeros(3, dtype=torch.long)],
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_refused_before_they_happen(name):
    """Capture runs such operations on the tensors of the call itself."""
    program, make = WRITES[name]
    ours, expected = make(), make()
    with pytest.warns(thunder.errors.FallbackWarning, match="writes"):
        thunder.jit(program, fallback="eager")(*ours)
    program(*expected)
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(*(torch.Tensor.to_dense(t).as_subclass(torch.Tensor) for t in (x, y)))
