"""What a compiled program holds, and for how long: reference counts alone free what eager frees by them. The garbage
collector is off."""

import gc
import weakref

import pytest
import torch

import thunder


@pytest.fixture(autouse=True)
def without_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


VIEWS = {
    "view": lambda y: y.view(-1),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "transpose": lambda y: y.transpose(0, 1),
    "mT": lambda y: y.mT,
    "select": lambda y: y[0],
    "slice": lambda y: y[1:],
    "narrow": lambda y: y.narrow(0, 0, 1),
    "split": lambda y: y.split(1)[1],
    "unbind": lambda y: y.unbind()[0],
    "expand": lambda y: y[None].expand(3, 2, 2),
    "diagonal": lambda y: y.diagonal(),
    "unfold": lambda y: y.unfold(0, 1, 1),
    "as_strided": lambda y: y.as_strided((2,), (1,)),
    "contiguous": lambda y: y.contiguous(),
    "view of a view": lambda y: y.t().unsqueeze(0).squeeze(0),
    "a view of complex numbers": lambda y: torch.view_as_real(torch.complex(y, y)),
}


def outlives(run):
    """How many of a call's arguments and results are alive when nobody has them."""
    args = torch.randn(2, 2), torch.randn(2, 2, requires_grad=True)
    try:
        results = run(*args)
    except Exception:  # noqa: BLE001 - a test that expects it looks itself
        results = ()
    held = [weakref.ref(x) for x in (*args, *results) if isinstance(x, torch.Tensor)]
    del results, args
    return sum(r() is not None for r in held)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("both", [False, True])
def test_results_whose_backward_never_runs_are_freed(view, both):
    def f(x, w):
        y = x * w
        shown = VIEWS[view](y)
        return y, (shown * shown.sin()).sum(), *([shown] if both else [])

    assert outlives(f) == 0
    compiled = thunder.jit(f)
    assert [outlives(compiled) for _ in range(3)] == [0, 0, 0]


@thunder.opaque(
    meta=lambda y: (y.view(-1), y * 2), backward=lambda args, result, cotangent: cotangent[0].view(2, 2) + cotangent[1]
)
def shown_and_doubled(y):
    return y.view(-1), y * 2


@pytest.mark.parametrize(
    "f",
    [
        lambda x, w: (y := x * w, *[v.sin().sum() for v in shown_and_doubled(y)]),
        lambda x, w: (y := x * w, torch._euclidean_dist(y, y.t()).sum()),
        lambda x, w: (
            y := x * w,
            torch.utils.checkpoint.checkpoint(lambda a: a.view(-1).sin(), y, use_reentrant=False),
        ),
        lambda x, w: torch.linalg.qr(x * w),
        lambda x, w: torch.nn.functional.batch_norm(x * w, None, None, training=True).split(1),
    ],
    ids=["opaque", "a piece of PyTorch's graph", "checkpoint", "several results", "views of one result"],
)
def test_other_results_are_freed(f):
    assert outlives(f) == 0
    compiled = thunder.jit(f)
    assert [outlives(compiled) for _ in range(3)] == [0, 0, 0]


# ------------------------------------------------------------------------------------------------ calls that raise


def raises(x, w):
    y = x * w
    raise ValueError(y.shape)


def raises_in_a_function(x, w):
    return raises(x, w) + 1


def raises_again(x, w):
    try:
        return raises(x, w)
    except ValueError as error:
        raise KeyError(x.shape) from error


def raises_the_same(x, w):
    try:
        raises(x, w)
    except ValueError:
        raise
    finally:
        y = x + 1
    return y


def raises_in_a_generator(x, w):
    def values():
        yield x
        raises(x, w)

    return list(values())


def raises_into_a_generator(x, w):
    def values():
        try:
            yield x
        finally:
            y = x * w  # noqa: F841 - it is made while the exception goes through

    g = values()
    next(g)
    g.throw(ValueError("into"))


def raises_in_a_context(x, w):
    with torch.no_grad():
        raises(x, w)


def raises_in_native_code(x, w):
    return sorted([x * w, x], key=lambda y: raises(y, w))


def catches(x, w):
    try:
        return raises(x, w)
    except ValueError:
        return x * w, x + w


def catches_an_operations(x, w):
    try:
        return x.view(3, 5) * w
    except RuntimeError:
        return x * w, x + w


def catches_what_it_threw(x, w):
    def values():
        try:
            yield x
        except ValueError:
            yield x * w

    g = values()
    return next(g) + w, g.throw(ValueError("into"))


def leaves_a_generator(x, w):
    def values():
        try:
            yield x
        finally:
            y = x * w  # noqa: F841 - it is made when the generator is closed

    g = values()
    next(g)
    raises(x, w)


def refused(x, w):
    return 1 / 0 if x.sum() > 0 else x * w


def refused_in_a_function(x, w):
    y = x * w
    return [refused(a, w) for a in (x, y)]


FAILS = [
    raises, raises_in_a_function, raises_again, raises_the_same, raises_in_a_generator, raises_into_a_generator,
    raises_in_a_context, raises_in_native_code, catches, catches_an_operations, catches_what_it_threw,
    leaves_a_generator, refused, refused_in_a_function,
    lambda x, w: x.view(3, 5) * w,
    lambda x, w: torch.cat([x, w.view(-1)]),
    lambda x, w: x[5] * w,
    lambda x, w: x.nonsense * w,
    lambda x, w: int(x.shape) * w,
    lambda x, w: torch.linalg.cholesky(x * w - 100),
    lambda x, w: torch.nn.functional.cross_entropy(x * w, torch.tensor([7, 7])),
]  # fmt: skip


@pytest.mark.parametrize("f", FAILS, ids=lambda f: f.__name__)
def test_arguments_of_calls_that_raise_are_freed(f):
    if not f.__name__.startswith("refused"):
        assert outlives(f) == 0
    compiled = thunder.jit(f)
    assert [outlives(compiled) for _ in range(3)] == [0, 0, 0]


def test_arguments_are_freed_where_the_prologue_or_a_check_raises():
    w = torch.randn(2, 2, requires_grad=True)
    compiled = thunder.jit(lambda x: torch.linalg.inv(x) * w)
    compiled(torch.eye(2))
    x = torch.zeros(2, 2)
    alive = weakref.ref(x)
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(x)
    del x
    assert alive() is None
