"""Functions of the user's behind functools.lru_cache: asked at each call, as eager asks them, and never left holding
what belongs to a program."""

import functools
import types
import warnings
import weakref

import pytest
import torch
from torch import nn

import thunder


class Settings:
    scale = 3.0

    def __init__(self):
        self.offset = torch.ones(3)


@pytest.fixture
def cached():
    """Fresh caches: a table by size, one of two things, an object, and a setting that may change."""
    values = {"setting": "a"}

    @functools.lru_cache(maxsize=None)
    def table(n, scale=1.0):
        return torch.arange(n) * scale

    @functools.cache
    def pair(n):
        return torch.ones(n), n * 2, [torch.zeros(n)]

    return types.SimpleNamespace(
        table=table,
        pair=pair,
        settings=functools.cache(Settings),
        setting=functools.lru_cache(lambda: values["setting"]),
        values=values,
    )


@pytest.mark.parametrize("known", [True, False], ids=["known", "asked first by the program"])
def test_what_is_kept_is_what_comes_out(cached, known):
    def program(x):
        return (
            x + cached.table(3, scale=2.0),
            cached.table(3),
            cached.pair(2),
            cached.pair(2)[1],
            x * cached.settings().scale + cached.settings().offset,
        )

    if known:
        program(torch.ones(3))
    compiled = thunder.jit(program)
    for _ in range(3):
        x = torch.randn(3)
        actual, expected = compiled(x), program(x)
        torch.testing.assert_close(actual, expected)
        assert actual[1] is expected[1] and actual[2][0] is expected[2][0] and actual[2][2][0] is expected[2][2][0]
    assert thunder.cache_misses(compiled) == 1
    assert cached.table.cache_info().misses == 2 and cached.pair.cache_info().misses == 1


def test_caches_that_change(cached):
    def program(x):
        return x + cached.table(3), x - ord(cached.setting()), x * cached.settings().scale

    compiled = thunder.jit(program)
    changes = [
        lambda: None,
        lambda: cached.table(3).add_(10),
        lambda: (cached.table.cache_clear(), cached.table(3).mul_(2)),
        lambda: (cached.values.update(setting="b"), None),  # still known
        cached.setting.cache_clear,
        lambda: setattr(cached.settings(), "scale", 4.0),
        cached.settings.cache_clear,
    ]
    for change in changes:
        change()
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), program(x))


def test_a_cache_never_holds_a_proxy(cached):
    for wrap in (lambda f: f, torch.no_grad()):
        thunder.jit(wrap(lambda x: x + cached.table(4)))(torch.ones(4))
    assert type(cached.table(4)) is torch.Tensor
    with torch.device("meta"):
        assert thunder.jit(lambda: cached.table(5))().device.type == "meta"


def test_a_method_with_a_cache():
    class Encoding(nn.Module):
        @functools.lru_cache(maxsize=None)  # noqa: B019 - as models have it
        def table(self, shape, dtype):
            return torch.ones(shape, dtype=dtype).cumsum(0)

        def forward(self, x):
            return x * 2, self.table(x.shape, x.dtype)

    module, x = Encoding(), torch.randn(3, 2)
    torch.testing.assert_close(thunder.jit(module)(x), module(x))
    torch.testing.assert_close(thunder.jit(module)(x), module(x))


def test_errors_and_functions_of_the_programs_own(cached):
    @functools.cache
    def refuses(n):
        raise ValueError("no")

    def program(x):
        @functools.lru_cache
        def inner(n):
            return x * n

        try:
            return refuses(1)
        except ValueError:
            return inner(2) + inner(2)

    assert thunder.jit(program)(torch.ones(2)).tolist() == [4, 4]
    with pytest.raises(ValueError, match="^no$"):
        thunder.jit(lambda x: refuses(1))(torch.ones(2))
    with pytest.raises(TypeError, match="unhashable"):
        thunder.jit(lambda x: cached.table([1]))(torch.ones(2))


def test_a_tensor_that_native_code_gives_comes_out_as_it_is():
    key, tensor = Settings(), torch.arange(3.0)
    table, by_name = weakref.WeakKeyDictionary({key: tensor}), weakref.WeakValueDictionary({"a": tensor})
    compiled = thunder.jit(lambda x: (x + table[key], table.get(key), {"a": [by_name["a"]]}))
    _, a, b = compiled(torch.ones(3))
    assert a is tensor and b["a"][0] is tensor


class Key:
    def __init__(self, n, *others):
        self.n, self.others = n, others

    def __hash__(self):
        return hash((self.n, self.others))

    def __eq__(self, other):
        return (self.n, self.others) == (other.n, other.others)


def test_a_partial_object_behind_a_cache():
    """A partial object has the module of `functools`; what runs is the user's function in it."""
    scaled_range = functools.cache(functools.partial(lambda scale, key: torch.arange(key.n) * scale, 2))
    plain = functools.lru_cache(functools.partial(lambda scale, n: torch.arange(n) * scale, 2))

    def fn(x):
        return x + scaled_range(Key(3, (1, 2))) + plain(x.shape[0])

    compiled = thunder.jit(fn, fallback="error")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(3)), fn(torch.ones(3)))
    assert thunder.cache_misses(compiled) == 1


@functools.lru_cache(256)
def _layout(shape: tuple, heads: int) -> tuple:
    """Numbers about a shape, in containers that are used again."""
    if shape[-1] % heads:
        raise ValueError("does not divide")
    return [*shape[:-1], heads, shape[-1] // heads], {1: shape[0]}


def test_keys_of_sizes_that_vary_are_no_constants():
    """The third batch size runs the program of the second one."""

    def split(x):
        sizes, repeated = _layout(x.shape, 2)
        return x.reshape(sizes) * repeated[1]

    compiled = thunder.jit(split, fallback="error")
    for batch in (2, 3, 4, 7):
        x = torch.randn(batch, 5, 6)
        torch.testing.assert_close(compiled(x), split(x), rtol=0, atol=0)
    assert thunder.cache_misses(compiled) == 2


def test_one_result_of_a_cache_is_read_twice():
    """Results with other keys are other numbers, and one container is one value wherever it comes from."""

    def halves(x):
        first, _ = _layout(tuple(x.shape), 2)
        y = x.reshape(first).flatten(1)
        second, _ = _layout(tuple(y.shape), 3)
        again, _ = _layout(tuple(x.shape), 2)
        return y.reshape(second).sum(-1), x.reshape(again), first is again

    compiled = thunder.jit(halves, fallback="error")
    for batch in (2, 2, 3, 4):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                x = torch.randn(batch, 6)
                for actual, want in zip(compiled(x), halves(x), strict=True):
                    torch.testing.assert_close(actual, want, rtol=0, atol=0)
    assert all(type(n) is int for n in _layout((2, 6), 2)[0])


_scales = {"scale": 2.0}


@functools.lru_cache(256)
def _scaled(size: int) -> float:
    return size * _scales["scale"]


def test_a_cache_of_more_than_its_arguments_is_asked():
    """A result that the cache has stays as it is when what the function read has changed."""

    def f(x):
        return x * _scaled(x.shape[0])

    compiled = thunder.jit(f, fallback="error")
    try:
        for batch in (2, 3):
            _scaled(batch)
        _scales["scale"] = 5.0
        for batch in (2, 3, 4, 3):
            x = torch.ones(batch)
            torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
    finally:
        _scales["scale"] = 2.0
        _scaled.cache_clear()


WRITTEN = 0


@functools.lru_cache
def writes(n):
    global WRITTEN
    WRITTEN += n
    return n


def test_a_cached_function_with_effects_has_them_once():
    """With a number that changes, which is symbolic, and of a function that the program makes."""

    def of_outside(x):
        writes(x.shape[0])
        return x * WRITTEN

    def of_program(x):
        total = 0

        @functools.lru_cache
        def inner(n):
            nonlocal total
            total += n

        inner(x.shape[0])
        return x * total

    for f in (of_outside, of_program):
        seen = []
        for call in (f, thunder.jit(f, fallback="eager")):
            global WRITTEN
            WRITTEN = 0
            writes.cache_clear()
            with warnings.catch_warnings(action="ignore"):
                seen.append([call(torch.ones(n))[0].item() for n in (2, 3, 4)])
        assert seen[0] == seen[1]


class FrozenDict(dict):
    """A dict that is a key, with a hash of its own that it keeps in a slot."""

    __slots__ = ("_hash",)

    def __new__(cls, *args):
        self = dict.__new__(cls, *args)
        object.__setattr__(self, "_hash", -1)
        return self

    def __hash__(self):
        if self._hash == -1:
            object.__setattr__(self, "_hash", hash(frozenset(self.items())))
        return self._hash


def test_keys_that_are_dicts_of_objects_from_outside():
    """Each call asks the cache with an equal dict, of what is then at the places of its values."""
    calls = []

    @functools.cache
    def scale(options, name):
        calls.append(name)
        return options["backend"].factor * options["n"]

    def program(x, backend):
        return x * scale(FrozenDict({"backend": backend, "n": 2}), "a")

    class Backend:
        def __init__(self, factor):
            self.factor = factor

    backends = [Backend(2.0), Backend(3.0)]
    compiled = thunder.jit(program, fallback="error")
    for backend in (*backends, *backends):
        assert torch.equal(compiled(torch.ones(3), backend), torch.ones(3) * 2 * backend.factor)
    assert calls == ["a", "a"]
