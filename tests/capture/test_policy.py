"""The policy: what its table says of functions, and that native code which no row knows runs in each call."""

import _bisect
import _sqlite3
import array
import binascii
import collections
import ctypes
import datetime
import functools
import hashlib
import itertools
import math
import os
import queue
import random
import sqlite3
import ssl
import sys
import time
import tracemalloc
import zlib

import numpy
import pytest
import torch
from torch.testing._internal.common_methods_invocations import wrapper_set_seed

import thunder
from thunder.capture import policy
from thunder.capture.policy import CODE, DEFINED, OBJECTS, RECEIVERS, Ask, Fold, Host, Interpret, Record

X = torch.zeros(2)


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("row", CODE, ids=lambda row: row.key)
def test_each_row_of_code_decides(row):
    """No row stands in the shadow of another."""
    name = row.name.replace("*", "x") or "a_function_that_no_row_names"
    assert policy._by_name(row.module, name, False) is row


def test_no_two_rows_are_about_the_same():
    for rows in (CODE, OBJECTS, RECEIVERS):
        keys = [(row.module, row.name, id(row.of)) for row in rows]
        assert len(keys) == len(set(keys)), [k for k, n in collections.Counter(keys).items() if n > 1]


def test_each_row_of_an_object_decides():
    for row in OBJECTS:
        assert policy.native_row(row.of) is row


def test_rows_of_receivers_hold_for_subclasses():
    kinds = [
        row.of for row in RECEIVERS if row.of.__flags__ & (1 << 10) and issubclass(row.of, (list, dict, Exception))
    ]
    assert kinds
    for kind in kinds:
        assert policy.is_watched(type("Own", (kind,), {})())


@pytest.mark.parametrize(
    "function, kind",
    [
        (torch.add, Record), (torch.Tensor.add_, Record), (binascii.crc32, Fold), (_bisect.bisect_left, Fold),
        (zlib.crc32, Fold), (os.getpid, Ask), (time.time, Host), (random.random, Host), (os.path.exists, Host),
        (ssl.RAND_bytes, Host), (datetime.datetime.now, Host), (numpy.random.rand, Host), (numpy.linspace, Fold),
        (functools.wraps, Fold), (torch.nn.functional.softmax, Record), (torch.nn.Module.add_module, Interpret),
        (test_no_two_rows_are_about_the_same, Interpret), (wrapper_set_seed, Interpret), (sqlite3.connect, Host),
        (_sqlite3.Row, Host), (ctypes.c_int, Host), (ValueError, Fold), (str.upper, Fold), ([].append, Fold),
    ],
    ids=lambda x: getattr(x, "__qualname__", type(x).__name__),
)  # fmt: skip
def test_answers(function, kind):
    assert type(policy.policy(function)) is kind


def test_the_object_decides_about_its_methods():
    pending, deque = queue.SimpleQueue(), collections.deque()
    assert policy.policy(pending.get, pending) == Host("outside")
    assert type(policy.policy(deque.popleft, deque)) is Fold


def test_definitions_come_first():
    assert isinstance(policy.policy(print), Interpret) and policy.policy(print).by is DEFINED[id(print)]


def test_methods_that_super_passes_over_are_those_of_the_base():
    class Own(dict):
        def __getitem__(self, key):
            return super().__getitem__(key)

        def get_native(self, key):
            return super().__getitem__

    assert policy.code_of(Own().get_native(1)) == ("builtins", "dict.__getitem__")


def test_the_command_says_the_row():
    assert policy.describe("ssl.RAND_bytes").splitlines() == [
        "ssl.RAND_bytes (_ssl.RAND_bytes): Host, with an effect that is not undone",
        "  native code that no row knows (row any module.*)",
    ]
    assert "(row binascii.*)" in policy.describe("binascii.crc32")
    assert "thunder's definition in thunder.capture.handlers" in policy.describe("builtins.print")


# ---------------------------------------------------------------- what changes from call to call changes the program


class Counter(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int)]


def counted(o):
    o.n = o.n + 1
    return o.n


LIBC = ctypes.CDLL(None)
BITS = collections.deque(range(40))
TAKE = BITS.popleft


def ready(kind):
    instance = kind()
    for n in range(40):
        instance.put(n)
    return instance


# what a program calls, and the owner, which is another one for eager and for thunder
STATEFUL = {
    "deque.popleft": (lambda: collections.deque(range(40)), lambda o: o.popleft),
    "deque.rotate": (lambda: collections.deque(range(40)), lambda o: lambda: (o.rotate(1), o[0])[1]),
    "list.pop": (lambda: [*range(40)], lambda o: o.pop),
    "set.pop": (lambda: set(range(40)), lambda o: o.pop),
    "dict.popitem": (lambda: {n: n for n in range(40)}, lambda o: lambda: o.popitem()[0]),
    "dict.setdefault": (lambda: {}, lambda o: lambda: o.setdefault(len(o), len(o))),
    "array.pop": (lambda: array.array("i", range(40)), lambda o: o.pop),
    "SimpleQueue.get": (lambda: ready(queue.SimpleQueue), lambda o: o.get),
    "Random.random": (lambda: random.Random(3), lambda o: o.random),
    "Random.randrange": (lambda: random.Random(3), lambda o: lambda: o.randrange(9)),
    "numpy's normal": (lambda: numpy.random.default_rng(3), lambda o: o.normal),
    "hash.update": (hashlib.sha256, lambda o: lambda: (o.update(b"a"), o.digest()[0])[1]),
    "compressobj": (zlib.compressobj, lambda o: lambda: len(o.compress(b"abc") + o.flush(zlib.Z_SYNC_FLUSH))),
    "field of a struct": (lambda: Counter(4), lambda o: lambda: counted(o)),
    "item of a ctypes array": (lambda: (ctypes.c_int * 2)(1, 2), lambda o: lambda: (o.__setitem__(0, o[0] * 3), o[0])[1]),
    "sqlite": (
        lambda: sqlite3.connect(":memory:").executescript("create table t (n)").connection,
        lambda o: lambda: (o.execute("insert into t values (1)"), o.execute("select count(*) from t").fetchone()[0])[1],
    ),
}  # fmt: skip
REACHED = {
    "local": lambda make: lambda x: x + make(),
    "closure": lambda make: (lambda method: lambda x: x + method())(make),
    "partial": lambda make: functools.partial(lambda method, x: x + method(), make),
    "attribute": lambda make: (
        type("Holder", (), {"method": staticmethod(make), "call": lambda s, x: x + s.method()})().call
    ),
}


@pytest.mark.parametrize("way", REACHED)
@pytest.mark.parametrize("name", STATEFUL)
def test_methods_obey_their_object(name, way):
    make, method = STATEFUL[name]
    eager, compiled = REACHED[way](method(make())), thunder.jit(REACHED[way](method(make())))
    assert [compiled(X).tolist() for _ in range(4)] == [eager(X).tolist() for _ in range(4)]
    assert len(compiled.programs) > 0


def test_methods_in_globals_obey_their_object():
    compiled = thunder.jit(lambda x: x + TAKE())
    assert [compiled(X)[0].item() for _ in range(4)] == [0, 1, 2, 3] and BITS[0] == 4


def reset_srand():
    LIBC.srand(5)


@pytest.mark.parametrize(
    "draw",
    [lambda: LIBC.rand() % 1000, functools.partial(LIBC.rand), LIBC.rand],
    ids=["attribute", "partial", "function"],
)
def test_functions_of_ctypes_run_in_each_call(draw):
    def program(x):
        return x.double() + draw()

    seen = []
    for run in (program, thunder.jit(program)):
        reset_srand()
        seen.append([run(X).tolist() for _ in range(4)])
    assert seen[0] == seen[1] and len({tuple(v) for v in seen[0]}) > 1


@pytest.mark.parametrize(
    "look",
    [
        lambda: ssl.RAND_bytes(4)[0] * 256 + ssl.RAND_bytes(1)[0],
        lambda: tracemalloc.get_traced_memory()[0],
        lambda: sys.getallocatedblocks(),
        lambda: os.times()[4],
        lambda: datetime.datetime.now().microsecond,
    ],
    ids=["ssl", "tracemalloc", "sys", "os", "datetime"],
)
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")  # what measures memory is an eager call
def test_what_no_row_knows_is_not_frozen(look):
    tracemalloc.start()
    try:
        compiled, looks = thunder.jit(lambda x: x.double() + look(), fallback="eager"), []
        values = set()
        for n in range(6):
            looks.append([bytearray(5000 * (n + 1)) for _ in range(40)])
            values.add(compiled(X)[0].item())
            time.sleep(0.02)
        assert len(values) > 1 and len(compiled.programs) == 1
    finally:
        tracemalloc.stop()


def test_pure_functions_of_constants_are_folded():
    def program(x):
        return (
            x * math.comb(5, 2)
            + zlib.crc32(b"a") % 7
            + int(numpy.arange(4).sum())
            + len(list(itertools.chain([1], [2])))
        )

    compiled = thunder.jit(program)
    assert torch.equal(compiled(X), program(X))
    assert "host_call" not in str(thunder.last_traces(compiled)[0])


@pytest.mark.parametrize("seed", [0, 1])
def test_python_helpers_of_pytorch_are_read(seed):
    """It sets the seed, calls the operation, and sets the generator back."""
    compiled = thunder.jit(lambda n: wrapper_set_seed(torch.randn, n))
    compiled(5)
    seen = []
    for run in (wrapper_set_seed, lambda f, n: compiled(n)):
        torch.manual_seed(seed)
        seen.append((run(torch.randn, 5), torch.rand(1)))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])
    assert len(compiled.programs) == 1


def test_objects_in_c_that_nobody_can_change_are_constants():
    """Code, descriptors, and the structures of optree."""
    optree = pytest.importorskip("optree")
    structure, attribute = optree.tree_structure({"a": 1, "b": [2, 3]}), type(ready).__dict__["__code__"]
    code = ready.__code__

    def program(x):
        rebuilt = optree.tree_unflatten(structure, [x, x + 1, x + 2])["b"][0]
        return rebuilt + (ready.__code__ is code) + (attribute.__get__(ready) == code)

    compiled = thunder.jit(program, fallback="error")
    assert torch.equal(compiled(X), program(X)) and len(compiled.programs) == 1
