"""Texts, NumPy's numbers and arrays from outside that change from call to call are inputs from the second value on."""

import collections
import datetime
import json
import types

import numpy as np
import pytest
import torch

import thunder

F32, F64, I64 = np.float32, np.float64, np.int64


def _seen(f, i: int, *args):
    """The results of a call, their types, and the gradient."""
    np.random.seed(i)
    x = torch.linspace(1, 2, 12).requires_grad_()
    results = f(x, *args)
    results = results if type(results) is tuple else (results,)
    for t in results:
        if isinstance(t, torch.Tensor) and t.requires_grad:
            t.sum().backward(retain_graph=True)
    return results, x.grad


def _are_same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.requires_grad == b.requires_grad and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_are_same, a, b))
    return str(a) == str(b)


def compared(program, calls, programs: int) -> None:
    """Calls beside eager's: the same results, types and gradients, and at most so many programs."""
    compiled = thunder.jit(program, fallback="error")
    for i, args in enumerate(calls):
        ours, want = _seen(compiled, i, *args), _seen(program, i, *args)
        assert _are_same(ours, want), (ours, want)
    assert thunder.cache_misses(compiled) <= programs


NUMBERS = {
    "product": lambda x, s: s * x + x * s - s,
    "rounding": lambda x, s: x.detach() * (s * F32(0.1) + np.sqrt(s)) / s,
    "number": lambda x, s: (x * s.item(), float(s), int(s)),
    "index": lambda x, s: (x[int(s)], x[: int(s)]),
    "branch": lambda x, s: x * s if s > 4 else x,
    "text": lambda x, s: (x * 2, f"{s} {s:.2f}", str(s)),
    "type": lambda x, s: (x, type(s).__name__, isinstance(s, np.floating), s),
    "tensor": lambda x, s: (torch.tensor(s), torch.tensor([s, s]), torch.full((2,), s)),
    "operations": lambda x, s: x.add(s).clamp(max=s) + torch.mul(x, s),
    "sizes": lambda x, s: torch.zeros((int(s) + 1, 2)).add_(s).view(2, -1),
    "list": lambda x, s: torch.tensor([s, s + 1]).cumsum(0),
}


@pytest.mark.parametrize("kind", [F32, F64, I64])
@pytest.mark.parametrize("name", NUMBERS)
def test_numpys_numbers(name, kind):
    compared(NUMBERS[name], [(kind(i + 2),) for i in range(8)], 3 if name == "branch" else 2)


def test_zero_nan_and_infinity():
    values = [F64(v) for v in (1.5, 0.0, -0.0, 2.5, np.nan, np.inf, 3.5)]
    compared(lambda x, s: (x.detach() * s, s), [(v,) for v in values], 7)


ARRAYS = {
    "tensors": lambda x, a: (
        torch.from_numpy(a) + 1,
        torch.as_tensor(a, dtype=torch.float64),
        torch.tensor(a) * x.sum(),
    ),
    "numpy": lambda x, a: (x * a.mean(), a.shape, a.dtype, len(a), a[0].tolist(), np.clip(a, 0, 1)),
    "index": lambda x, a: (x[a > 0], x[np.argsort(a)], x[torch.from_numpy(a) > 0]),
    "joined": lambda x, a: torch.from_numpy(np.concatenate([a, a])).float() * x.repeat(2)[: 2 * len(a)],
    "decision": lambda x, a: x * 2 if a.sum() > 0 else x,
    "itself": lambda x, a: (a, x),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name):
    draw = np.random.default_rng(0).standard_normal
    compared(ARRAYS[name], [(draw(12),) for _ in range(6)], 3 if name == "decision" else 2)


def test_sizes_of_arrays():
    def f(x, a, several):
        return torch.from_numpy(a).softmax(-1), a.shape[0] * x, torch.as_tensor(np.stack(several)).float()

    draw = np.random.default_rng(0).standard_normal
    compared(f, [(draw((3 + i, 2)), [draw(2), draw(2)]) for i in range(8)], 3)


def _filled(x, a, i):
    a.fill(i)
    np.copyto(a[1], x.detach().numpy()[:3])
    a[0] += 1
    return float(a.sum()), torch.from_numpy(a[:2]).mean(0)


def _ring(x, a, i):
    a[i % 4] = x.detach()[:3] + i
    return x * float(a.mean()), torch.as_tensor(a[np.random.randint(0, 4, 2)])


@pytest.mark.parametrize("program", [_filled, _ring])
def test_writes_to_arrays(program):
    """Once each, in order, also where a call is captured."""
    arrays = [np.zeros((4, 3), F32) for _ in range(2)]
    compiled = thunder.jit(program, fallback="error")
    for i in range(8):
        ours, want = (_seen(f, i, a, i + 2) for f, a in zip((compiled, program), arrays, strict=True))
        assert _are_same(ours, want), (ours, want)
        np.testing.assert_array_equal(*arrays)
    assert thunder.cache_misses(compiled) <= 2


def test_arrays_share_the_memory_of_tensors_that_leave():
    def f(x):
        y = x.detach() * 2
        return y, y.numpy(), x.detach().numpy()

    compiled = thunder.jit(f, fallback="error")
    for n in range(3, 6):
        x = torch.ones(n)
        y, a, b = compiled(x)
        a[0], x[1] = 7.0, 8.0
        assert y[0] == 7 and b[1] == 8 and y[1] == a[1] == 2 and b.shape == (n,)
    assert thunder.cache_misses(compiled) == 2


TEXTS = {
    "unused": lambda x, s: x * 2,
    "result": lambda x, s: (x, {"id": s, "all": [s, f"<{s}>", s + "!"]}),
    "printed": lambda x, s: print(f"{s}: {x.sum():.2f}", s),
    "object": lambda x, s: (x, [s] * 2, (s, 1), type(s), isinstance(s, str)),
}
# which decide: a program for each
DECIDING = {
    "compared": lambda x, s: x * 2 if s == "n3" else x,
    "key": lambda x, s: {s: x}.get("n2", x * 3),
    "method": lambda x, s: (x, s.upper(), s.split("n"), s.startswith("n2"), s[0], len(s), "2" in s, list(s)),
    "einsum": lambda x, s: torch.einsum(f"{s[0]},{s[0]}->{s[0]}", x, x),
    "attribute": lambda x, s: getattr(types.SimpleNamespace(**{s: x * 3, "m": x}), s),
    "code": lambda x, s: (x, json.loads(f'"{s}"'), hash(s) == hash("n2"), s.encode(), ord(s[1])),
    "set": lambda x, s: (x, s in {"n1", "n2"}, sorted({s, "n1"}), collections.Counter([s, "n1"])["n1"]),
}


@pytest.mark.parametrize("name", [*TEXTS, *DECIDING])
def test_texts(name, capsys):
    body = TEXTS.get(name) or DECIDING[name]
    compared(body, [(f"n{i}",) for i in (1, 2, 3, 4, 2, 1)], 2 if name in TEXTS else 4)
    assert len(capsys.readouterr().out.splitlines()) == (12 if name == "printed" else 0)


# What is asked of a text is a number or a truth: a program for each answer that decides, in the order of the texts.
ANSWERS = {
    "length": (lambda x, s: x + len(s), ["a", "bb", "ccc", "dddd", "eeeee"], 2),
    "length of bytes": (lambda x, s: x + len(s), [b"a", b"bb", b"ccc", b"dddd"], 2),
    "another text of one length": (lambda x, s: x + len(s), ["aa", "ab", "ac", "ad"], 2),
    "compared": (lambda x, s: x * 2 if s == "train" or "eval" == s else x, ["train", "a", "b", "eval", "c", "eval"], 3),
    "in order": (lambda x, s: x * 2 if "k" < s else x, ["a", "m", "b", "n", "z", "c"], 3),
    "searched": (lambda x, s: x * s.count("a") if "a" in s else x, ["a", "aa", "xax", "aaaa", "b", "c"], 4),
    "start": (lambda x, s: x * 2 if s.startswith(("l", "k")) or s.isdigit() else x, ["a", "b", "5", "c", "6"], 5),
    "place": (lambda x, s: x[s.find("a") :], ["---a", "--a", "----a", "-----a"], 3),
    "of another kind": (lambda x, s: (x, s == 3, s != b"a", 3 == s), ["a", "b"], 2),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_asked_of_a_text(name):
    body, texts, programs = ANSWERS[name]
    compared(body, [(s,) for s in texts], programs)


def test_an_error_of_a_text():
    """What a method raises is raised, also where the program handles it."""

    def f(x, s):
        try:
            return x * s.index("a")
        except ValueError as error:
            return x, str(error)

    compared(f, [("aa",), ("ba",), ("b",), ("bba",), ("c",)], 5)


def test_a_scale_of_numpys_and_a_text_in_a_dict():
    calls = [({"scale": F32(i + 0.5), "name": f"step{i}"}, i) for i in range(1, 7)]
    compared(lambda x, d, i: (x[i] * d["scale"] + len(d["name"]), d["name"]), calls, 2)


def test_a_text_that_decides_does_not_hold_numbers():
    """Numbers beside it stay symbolic, also where the program cannot be captured with the text."""

    def f(x, how, n):
        return x.view(torch.float32 if how == "a" else getattr(torch, how)) * n

    calls = [("a", 2.0), ("float32", 3.0), *(("float32", float(n)) for n in range(4, 9))]
    compared(lambda x, how, n: f(x.detach(), how, n), calls, 3)


def test_other_values():
    """Dates, paths and the like are inputs as well."""
    day = datetime.date(2026, 1, 1)
    calls = [(day + datetime.timedelta(i),) for i in range(5)]
    compared(lambda x, d: (x, d.isoformat(), f"{d}", d, d > day), calls, 2)


def _of_views(x, a, i):
    b = a[i % 4]
    b += 1
    column = a.T[1]
    return x * torch.from_numpy(a.copy()).sum(), float(column.sum()), np.sqrt(a).max()


def _filled_by_random(x, a, i):
    a[:2] = np.random.random(3)
    a.sort(axis=0)
    return x * float(np.sqrt(i)) + np.random.random(), float(a.sum())


@pytest.mark.parametrize("program", [_of_views, _filled_by_random])
def test_host_code_of_calls_that_are_captured_twice(program):
    """It runs once for the user, whatever each capture of the program takes for host code."""
    test_writes_to_arrays(program)


def test_sizes_of_host_results():
    def f(x, a):
        return x[np.random.permutation(len(a))] + torch.from_numpy(a * 2), torch.as_tensor((a - a.mean()) / a.std())

    draw = np.random.default_rng(0).standard_normal
    compared(f, [(draw(3 + i),) for i in range(9)], 3)


def test_arrays_of_all_kinds():
    def frozen(i):
        array = np.array([i, 1.5])
        array.setflags(write=False)
        return array

    compared(lambda x, a: (x * torch.as_tensor(a), float(a)), [(np.array(i + 0.5),) for i in range(4)], 2)
    compared(lambda x, a: (list(a), a.shape), [(np.array([f"n{i}", "b"]),) for i in range(4)], 2)
    compared(lambda x, a: torch.tensor(a) * x.sum(), [(frozen(i),) for i in range(4)], 2)
    compared(
        lambda x, a, b: (torch.from_numpy(a) + torch.from_numpy(b), a is b),
        [(a, a) for a in map(np.arange, (3, 4, 5))],
        3,
    )
