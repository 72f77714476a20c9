"""The extension: how it comes to be there, and the check of many tensors in it."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from thunder import compat
from thunder.compat import batch_checks, modes
from thunder.runtime import disk_cache, extensions

COMPILER = extensions._compiler()


@pytest.fixture(scope="module")
def check_of(native_extension):
    return native_extension.check_of


def like(x, **changes):
    tensor = torch.empty_strided(tuple(x.shape), x.stride(), dtype=changes.get("dtype", x.dtype))
    return tensor.requires_grad_(changes.get("requires_grad", x.requires_grad))


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


@contextlib.contextmanager
def patched_method():
    torch.Tensor.relu = lambda x: x
    try:
        yield
    finally:
        del torch.Tensor.relu


@contextlib.contextmanager
def default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Around(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def mapped():
    with torch._functorch.eager_transforms.grad_increment_nesting():
        yield


@contextlib.contextmanager
def registration():
    modes.note_registration()
    yield


@contextlib.contextmanager
def stance():
    import torch._dynamo.eval_frame

    with torch.compiler.set_stance("force_eager"):
        yield


STATES = {
    "no_grad": torch.no_grad, "inference": torch.inference_mode, "default dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "another autocast": lambda: torch.autocast("cpu", torch.float16),
    "function mode": Around, "default device": lambda: torch.device("meta"), "forward mode": torch.autograd.forward_ad.dual_level,
    "grad of torch.func": mapped, "a method of Tensor": patched_method, "registration": registration, "stance": stance,
    "nothing": contextlib.nullcontext,
}  # fmt: skip


@pytest.mark.parametrize("outer", STATES)
def test_the_compiled_key_is_pythons_in_every_state(native_extension, outer, monkeypatch):
    compute = modes.modes_key.make()
    monkeypatch.setitem(vars(compat), "modes_key", compute)
    modes.compile_modes_key(native_extension.modes_key_of)
    compiled = compat.modes_key
    assert compiled is not compute
    for _ in range(2):
        with STATES[outer]():
            assert compiled() == compute() == compiled()
            for inner in STATES.keys() - {outer}:  # forward mode does not nest
                with STATES[inner]():
                    assert compiled() == compute() == compiled()
        assert compiled() == compute()


def test_the_key_is_computed_once_for_a_state(native_extension, monkeypatch):
    computed, compute = [], modes.modes_key.make()
    monkeypatch.setitem(vars(compat), "modes_key", lambda: computed.append(0) or compute())
    modes.compile_modes_key(native_extension.modes_key_of)
    for _ in range(5):
        with torch.no_grad():
            assert compat.modes_key() is compat.modes_key()
        assert compat.modes_key() is compat.modes_key()
    assert len(computed) == 2


def test_one_process_builds_and_others_read_what_it_left(tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    monkeypatch.setitem(vars(compat), "modes_key", compat.modes_key)  # put back behind the test
    begun = []
    monkeypatch.setattr(extensions.subprocess, "run", lambda command, **options: begun.append(command))
    monkeypatch.setattr(extensions, "_compiler", lambda: "/no/compiler")
    monkeypatch.setattr(extensions, "_known", [])
    for _ in range(2):
        assert extensions.loaded_extension() is None and extensions.is_awaited()
    assert len(begun) == 1 and begun[0][-1] == "/no/compiler", "one process is at it"
    monkeypatch.undo()
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    extensions.main("/no/compiler")
    assert disk_cache.load(extensions._key("/no/compiler"))[0] == {"failed": True}
    monkeypatch.setattr(extensions, "_compiler", lambda: "/no/compiler")
    monkeypatch.setattr(extensions, "_begin", lambda compiler: begun.append(compiler))
    monkeypatch.setattr(extensions, "_known", [])
    assert extensions.loaded_extension() is None and not extensions.is_awaited()
    assert len(begun) == 1 and batch_checks.compiled is None, "PyTorch's check stays"


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler, or this is no Linux")
def test_the_library_can_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(batch_checks, "compiled", None)
    monkeypatch.setitem(vars(compat), "modes_key", compat.modes_key)
    extensions.main(COMPILER)
    monkeypatch.setattr(extensions, "_known", [])
    assert extensions.loaded_extension() is not None
    x = torch.randn(3)
    assert batch_checks.compiled((x,), ((3,),), ((),))(x)
