"""The check of many tensors in C++: what it notices, and how it comes to be there."""

import itertools

import pytest
import torch
from torch import nn

from thunder.compat import batch_checks
from thunder.runtime import disk_cache, extensions

COMPILER = extensions._compiler()


@pytest.fixture(scope="module")
def check_of(tmp_path_factory):
    """Of a library that an earlier run has left on this machine; `test_the_library_can_be_built` builds one."""
    found = disk_cache.load(extensions._key(COMPILER)) if COMPILER else None
    if found is None or found[0].get("failed"):
        pytest.skip("no large program has had the check built on this machine")
    return extensions.loaded(found[1]).check_of


def like(x, **changes):
    made = torch.empty_strided(tuple(x.shape), x.stride(), dtype=changes.get("dtype", x.dtype))
    return made.requires_grad_(changes.get("requires_grad", x.requires_grad))


def others(x):
    """Tensors that differ from x in one thing each."""
    yield like(x, dtype=torch.float64)
    yield like(x, requires_grad=not x.requires_grad)
    yield torch.empty(x.shape[1:] or (1,), requires_grad=x.requires_grad)
    yield torch.empty(tuple(n + 1 for n in x.shape) or (1,), requires_grad=x.requires_grad)
    yield torch.empty(x.shape, device="meta", requires_grad=x.requires_grad)
    yield nn.Parameter(like(x).detach(), x.requires_grad)
    yield torch.complex(like(x).detach(), like(x).detach()).conj().requires_grad_(x.requires_grad)
    yield x.detach().to_sparse().requires_grad_(x.requires_grad)
    with torch.inference_mode():
        yield torch.empty(x.shape)
    yield None
    yield 1.0


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("strides", [False, True])
def test_it_says_what_pytorchs_check_says(check_of, strides, requires_grad, monkeypatch):
    xs = [torch.randn(s).requires_grad_(requires_grad) for s in ((), (3,), (2, 3), (1, 4, 1))]
    sizes = [x.shape for x in xs]
    monkeypatch.setattr(batch_checks, "compiled", None)
    theirs = batch_checks.native_batch_check(xs, sizes, strides)
    monkeypatch.setattr(batch_checks, "compiled", check_of)
    ours = batch_checks.native_batch_check(xs, sizes, strides)
    assert ours is not theirs and type(ours).__name__ == "builtin_function_or_method"
    assert ours(*xs) and ours(*map(like, xs))
    for i, x in enumerate(xs):
        for y in itertools.chain(others(x), xs[:i]):
            now = [*xs[:i], y, *xs[i + 1 :]]
            assert ours(*now) is False and theirs(*now) is False, (i, y)
    moved = [x if x.dim() < 2 else like(x.mT.contiguous().mT) for x in xs]
    assert ours(*moved) is theirs(*moved) is not strides
    assert not ours(*xs[:-1]) and not ours(*xs, xs[0])


def test_any_size_and_any_number_of_tensors(check_of):
    xs = tuple(torch.randn(2, 3) for _ in range(300))
    check = check_of(xs, ((None, 3),) * 300, ((),) * 300)
    assert check(*xs) and check(*(torch.randn(5, 3) for _ in xs)) and not check(*(torch.randn(5, 2) for _ in xs))
    assert not check(*xs[:-1], xs[0]), "one of them comes twice"
    assert check_of((torch.randn(2).to_sparse(),), ((2,),), ((),)) is None


def test_a_mode_around_the_call_is_noticed(check_of):
    x = torch.randn(3)
    check = check_of((x,), ((3,),), ((),))
    noticed = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        noticed.append(check(x))
    assert noticed == [False] and check(x)


def test_one_process_builds_and_others_read_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    begun = []
    monkeypatch.setattr(extensions.subprocess, "run", lambda command, **options: begun.append(command))
    monkeypatch.setattr(extensions, "_compiler", lambda: "/no/compiler")
    for _ in range(2):
        extensions.prepare_tensor_check.__wrapped__()
    assert len(begun) == 1 and begun[0][-1] == "/no/compiler", "one process is at it"
    monkeypatch.undo()
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    extensions.main("/no/compiler")
    assert disk_cache.load(extensions._key("/no/compiler"))[0] == {"failed": True}
    monkeypatch.setattr(extensions, "_compiler", lambda: "/no/compiler")
    monkeypatch.setattr(extensions, "_begin", lambda compiler: begun.append(compiler))
    extensions.prepare_tensor_check.__wrapped__()
    assert len(begun) == 1 and batch_checks.compiled is None, "PyTorch's check stays"


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler, or this is no Linux")
def test_the_library_can_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    extensions.main(COMPILER)
    extensions.prepare_tensor_check.__wrapped__()
    x = torch.randn(3)
    assert batch_checks.compiled((x,), ((3,),), ((),))(x)
