"""Values of host calls where programs use them: in operations, as keys, in exceptions, as seeds."""

import collections
import dataclasses
import functools
import inspect
import math
import random
import types
import warnings

import numpy as np
import pytest
import torch

import thunder
from thunder.errors import CaptureError, FallbackWarning

K32 = np.float32


def _median(x):
    return np.percentile(x.detach().numpy(), 50)


def _in_place(x):
    y = x.detach().clone()
    y.mul_(_median(x) + 1).add_(K32(x.sum().item()))
    return y


def _of_gradients(x):
    w = torch.ones(3, requires_grad=True)
    (w * x.detach()).sum().backward()
    w.grad.mul_(np.clip(_median(x), 0, 0.5))
    w.grad /= K32(x.sum().item()) + 1
    return w.grad


def _augmented(x):
    y = x * 1
    y += _median(x)
    y *= K32(3)
    return y


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "program",
    [
        _in_place, _of_gradients, _augmented, lambda x: x * _median(x), lambda x: torch.add(x, _median(x)),
        lambda x: torch.clamp(x, max=_median(x)), lambda x: torch.where(x > _median(x), x, _median(x)),
        lambda x: x[np.where(x.detach().numpy() > 1)[0]], lambda x: x[np.random.RandomState(0).permutation(len(x)), None],
        lambda x: _median(x) * x.detach(), lambda x: x ** np.int64(x.sum().item()),
        lambda x: (torch.full((2,), _median(x)), torch.tensor(_median(x)), torch.tensor(K32(x.sum().item()))),
    ],
)  # fmt: skip
def test_numpys_numbers_in_operations(program, grad):
    """They are numbers of Python's for PyTorch, also where it overwrites a tensor."""
    compiled = thunder.jit(program, fallback="error")
    for i in range(3):
        seen = []
        for f in (program, compiled):
            x = (torch.arange(3.0) + i).requires_grad_(grad)
            result = f(x)
            if isinstance(result, torch.Tensor) and result.requires_grad and result.is_floating_point():
                result.sum().backward()
            seen.append((result, x.grad))
        torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


def test_a_tensor_is_not_overwritten_on_the_host():
    def f(x):
        y = x.clone().to(torch.complex64)
        y.mul_(np.complex128(1j) * _median(x))
        return y

    with pytest.raises(CaptureError, match="overwrites a tensor with the result of a host call"):
        thunder.jit(f, fallback="error")(torch.ones(3))


def test_an_exception_with_a_text_of_data():
    class Bad(ValueError):
        def __init__(self, step, loss):
            super().__init__(f"step {step}: loss is {loss}")
            self.step = step

    def f(x, i):
        loss = x.sum().item()
        if not math.isfinite(loss):
            raise Bad(i, loss)
        return x / i

    compiled = thunder.jit(f, fallback="error")
    for i, value in enumerate((1.0, math.nan, 2.0, math.inf, 3.0), 1):
        x = torch.tensor([value])
        if math.isfinite(value):
            assert torch.equal(compiled(x, i), f(x, i))
            continue
        with pytest.raises(Bad, match=f"step {i}: loss is {value}") as raised:
            compiled(x, i)
        assert raised.value.step == i


def test_a_generator_with_a_seed_of_data():
    def f(x):
        r = random.Random(int(x.sum()))
        return x * r.random(), r.choice("abc")

    compiled = thunder.jit(f, fallback="error")
    for i in range(4):
        assert str(compiled(torch.full((2,), float(i)))) == str(f(torch.full((2,), float(i))))


def test_a_text_of_data_is_a_key():
    def f(x):
        return {f"class {int(x.argmax())}": x, **{f"{i}": i for i in range(int(x.max()))}}

    compiled = thunder.jit(f, fallback="error")
    for values in ([0.0, 2.0], [1.0, 0.0], [0.0, 2.0]):
        x = torch.tensor(values)
        assert str(compiled(x)) == str(f(x))


def _read_from_its_class(module, x):
    module.calls += 1
    return module.layer(x)


def _absent(module, x):
    module.steps = getattr(module, "steps", 0) + 1
    return module.layer(x)


def _of_the_class(module, x):
    type(module).calls += 1
    return module.layer(x)


@pytest.mark.parametrize("block", [_read_from_its_class, _absent, _of_the_class])
def test_counters_in_checkpoints_that_the_first_call_makes(block):
    """Eager PyTorch counts in the backward once more."""

    class Module(torch.nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(block, self, x, use_reentrant=False)

    module = Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        compiled = thunder.jit(module, fallback="eager")
        for _ in range(3):
            compiled(torch.ones(2, 3)).sum().backward()
    assert max(module.calls, getattr(module, "steps", 0)) == 6


def test_numpys_functions_of_an_argument():
    compiled = thunder.jit(lambda x, i: x * float(np.interp(i, [0, 8], [0.0, 1.0])), fallback="error")
    for i in range(2, 7):
        assert torch.equal(compiled(torch.ones(2), i), torch.full((2,), i / 8))
    assert thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,)])
def test_numpys_classes_that_are_pythons_too(shape):
    """They ask a tensor for its number, whatever its dimensions, or for its text, and take it for an array last."""

    def f(x):
        return [kind(x * 2) for kind in (np.float64, np.str_, np.complex128, np.int32)]

    compiled = thunder.jit(f)
    for i in range(3):
        x = torch.full(shape, i + 0.5)
        assert repr(compiled(x)) == repr(f(x))
    assert thunder.cache_misses(compiled) == 1


def _with_default(d, x, i):
    key = f"k{i % 3}"
    return d.setdefault(key, x), d.get((key, 1), 7)


def _counted(d, x, i):
    key = f"k{i % 3}"
    d[key] = d.get(key, 0) + 1
    if (key, 0) in d:
        del d[(key, 0)]
    return x * d.pop("k2", 1)


def _in_sets(d, x, i):
    key = f"k{i % 3}"
    keys = set(k for k in (key, "k0"))  # noqa: C401 - native code iterates over the generator
    keys.update([key, "k2"])
    keys.discard(key)
    return (
        x * len(keys),
        sorted(frozenset(["k0"]).union((key,))),
        {"k0"}.isdisjoint([key]),
        sorted(set(map(str, [key, "k1"]))),
    )


@dataclasses.dataclass(frozen=True)
class _Name:
    name: str


def _in_keys(d, x, i):
    d[_Name(f"k{i % 3}")] = i
    return x * d.get(_Name("k0"), 9), hash(f"k{i % 3}") == hash("k0")


def _of_exceptions(d, x, i):
    """The texts of exceptions that hold values of data."""
    total = x.sum().item()
    errors = KeyError(f"k{i}"), ValueError(total, i), RuntimeError(total), KeyError(i, total), LookupError()
    return [text for e in errors for text in (str(e), repr(e), f"{e}, {e!r}")]


@pytest.mark.parametrize("program", [_with_default, _counted, _in_sets, _in_keys, _of_exceptions])
@pytest.mark.parametrize("make", [dict, collections.Counter, lambda: collections.defaultdict(list)])
def test_texts_as_keys(program, make):
    """A text that the program makes is a key by its value, wherever native code hashes it."""
    tables = [make() | {("k1", 0): 3} for _ in range(2)]
    compiled = thunder.jit(program, fallback="error")
    for i in range(8):
        x = torch.full((2,), i + 1.0)
        ours, want = (f(table, x, i) for f, table in zip((compiled, program), tables, strict=True))
        assert str(ours) == str(want) and str(tables[0]) == str(tables[1])


class Numbered(Exception):
    def __init__(self, n):
        super().__init__(f"error {n}")


def test_an_exception_of_the_users_with_a_text_of_a_number_that_changes():
    def f(x, n):
        try:
            raise Numbered(n)
        except Numbered as error:
            return x + n, error.args, str(error)

    compiled = thunder.jit(f)
    for n in (2, 3, 4, 5):
        x, args, text = compiled(torch.ones(1), n)
        assert (x.item(), args, text) == (1 + n, (f"error {n}",), f"error {n}")
    assert len(compiled.programs) == 2


OBJECTS = {  # what keeps a tensor, by libraries and C types
    "namespace": lambda t: types.SimpleNamespace(a=t),
    "deque": lambda t: collections.deque([t]),
    "slice": lambda t: slice(t, None),
    "partial": lambda t: functools.partial(math.sqrt, t).args,
    "exception": lambda t: [ValueError(t)],
    "counter": lambda t: collections.Counter({"a": t}),
    "chain map": lambda t: collections.ChainMap({"a": t}),
    "dict of the user's": lambda t: collections.UserDict({"a": t}),
    "signature": lambda t: inspect.signature(lambda v=1, w=t: v),
    "bound arguments": lambda t: inspect.signature(lambda v, w=1: v).bind(t),
    "a deque of exceptions": lambda t: collections.deque([ValueError(t)]),
}
TEXTS = {"str": str, "repr": repr, "format": "{}".format, "percent": lambda x: "%s" % (x,)}


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")  # C types: the original runs
def test_texts_of_objects_that_keep_tensors(kind):
    make = OBJECTS[kind]
    for name, text in TEXTS.items():
        compiled = thunder.jit(lambda t, text=text: text(make(t * 2)), fallback="eager")
        for k in (1, 2):
            x = torch.full((2,), float(k))
            assert compiled(x) == text(make(x * 2)), name


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_prints_of_objects_that_keep_tensors(kind, capsys):
    make = OBJECTS[kind]
    compiled = thunder.jit(lambda t: print(make(t * 2)), fallback="eager")
    for k in (1, 2):
        x = torch.full((2,), float(k))
        compiled(x)
        ours = capsys.readouterr().out
        print(make(x * 2))
        assert ours == capsys.readouterr().out


METHODS_NOT_CALLED = {
    "leaves": lambda x: {"sum": (x * 2).sum, "array": [x.detach().numpy().max]},
    "equal": lambda x: (x.sum == x.sum, x.sum == x.add, len({x.sum, x.sum})),
    "kind": lambda x: (type(x.sum), type(x.norm), isinstance(x.sum, types.BuiltinMethodType)),
    "tensor": lambda x: x.mul.__self__ + 1,
    "words": lambda x: (x.sum.__name__, x.sum.__doc__, x.sum.__module__, str(x.sum)[:20], f"{x.sum}"[:20]),
}


@pytest.mark.parametrize("f", METHODS_NOT_CALLED.values(), ids=METHODS_NOT_CALLED)
def test_a_method_of_a_tensor_that_is_not_called(f):
    """A bound method is an object as any other: it leaves the program, is compared, and has words and a class."""
    compiled = thunder.jit(f, fallback="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for i in range(2):
            ours, expected = (g(torch.full((2,), i + 1.0)) for g in (compiled, f))
            if isinstance(expected, dict):
                ours, expected = ((r["sum"](), r["array"][0]()) for r in (ours, expected))
            assert repr(ours) == repr(expected)
