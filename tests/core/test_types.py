"""dtypes, devices, proxies and pytrees: the values of the IR, by themselves and against torch's own."""

import collections
import dataclasses
import itertools
import pickle
import typing

import numpy as np
import pytest
import torch

import thunder
from thunder.core import dtypes, symbolic
from thunder.core.devices import Device, DeviceType, cpu, to_device
from thunder.core.proxies import (
    METHODS,
    AnyProxy,
    CollectionProxy,
    FloatProxy,
    IntegerProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    concrete,
    like,
    map_structure,
    number_value,
    numbers_in,
    proxies_in,
    type_string,
)  # fmt: skip
from thunder.core.pytree import tree_flatten, tree_flatten_with_dataclass, tree_iter, tree_map, tree_unflatten
from thunder.core.symbolic import Decisions
from thunder.ops.torch_types import to_torch_device, to_torch_dtype

IN_TORCH = [d for d in dtypes.all_dtypes if isinstance(getattr(torch, d.torch_name, None), torch.dtype)]


# ----------------------------------------------------------------------------------------------------------------
# dtypes


@pytest.mark.parametrize("d", IN_TORCH, ids=repr)
def test_dtypes_are_torchs(d):
    t = to_torch_dtype(d)
    assert (
        dtypes.to_dtype(t) is d
        and dtypes.to_dtype(str(t)) is d
        and dtypes.to_dtype(d.name) is d
        and dtypes.to_dtype(d) is d
    )
    assert d.bytes == t.itemsize
    assert (dtypes.is_float(d), dtypes.is_complex(d)) == (t.is_floating_point, t.is_complex)
    assert dtypes.is_inexact(d) == (t.is_floating_point or t.is_complex)
    assert dtypes.is_integer(d) == (not t.is_floating_point and not t.is_complex and t is not torch.bool)
    assert dtypes.is_boolean(d) == (t is torch.bool)
    assert d.signed == t.is_signed
    assert pickle.loads(pickle.dumps(d)) is d
    assert repr(d) == f"thunder.dtypes.{d.name}" and getattr(dtypes, d.name) is d
    assert to_torch_dtype(dtypes.real_of(d)) == t.to_real()
    if d in (dtypes.float16, dtypes.float32, dtypes.float64):
        assert to_torch_dtype(dtypes.complex_of(d)) == t.to_complex()


def test_other_names_of_dtypes():
    for name, want in (
        (bool, dtypes.bool8),
        (int, dtypes.int64),
        (float, dtypes.float32),
        (complex, dtypes.complex64),
        ("half", dtypes.float16),
        ("long", dtypes.int64),
    ):
        assert dtypes.to_dtype(name) is want
    for kind in ("bool", "int8", "uint16", "int64", "float16", "float32", "complex128"):
        assert dtypes.to_dtype(np.dtype(kind)) is dtypes.to_dtype(kind)
    assert dtypes.to_dtype(None) is None
    assert (
        thunder.bfloat16 is dtypes.bfloat16
        and dtypes.bfloat16.shortname == "bf16"
        and dtypes.bool8.shortname == "b8"
        and dtypes.uint8.shortname == "ui8"
    )
    for wrong in ("float31", 3, object()):
        with pytest.raises(ValueError, match="does not name a dtype; known: .*float32"):
            dtypes.to_dtype(wrong)


def test_promotion_is_torchs():
    for a, b in itertools.product(IN_TORCH, repeat=2):
        try:
            want = torch.promote_types(to_torch_dtype(a), to_torch_dtype(b))
        except RuntimeError:
            with pytest.raises(ValueError, match="[Pp]romot"):
                dtypes.promote(a, b)
        else:
            assert to_torch_dtype(dtypes.promote(a, b)) == want, (a, b)


# ----------------------------------------------------------------------------------------------------------------
# devices


def test_devices():
    assert Device("cpu") is cpu is Device(DeviceType.CPU) is Device("cpu:3") is Device(cpu), (
        "the index of a CPU is ignored"
    )
    assert Device("cuda") is Device("cuda:0") is Device("cuda", 0) is not Device("cuda:1")
    one = Device("cuda:1")
    assert (one.type, one.index, one.devicetype, str(one), one.device_str()) == (
        "cuda",
        1,
        DeviceType.CUDA,
        "cuda:1",
        "cuda:1",
    )
    assert repr(one) == 'thunder.devices.Device("cuda:1")' and pickle.loads(pickle.dumps(one)) is one
    assert (cpu.index, Device("meta").type) == (None, "meta")
    assert (
        to_device(torch.device("cuda:1")) is one is to_device(1)
        and to_device(torch.device("cpu", 0)) is cpu
        and to_device(None) is None
    )
    assert (
        to_torch_device(one) == torch.device("cuda:1")
        and to_torch_device("meta") == torch.device("meta")
        and to_torch_device(None) is None
    )
    for wrong in ("gpu", "cuda:x", ""):
        with pytest.raises(ValueError, match="is not a device; valid: cpu, cuda, meta"):
            Device(wrong)
    with pytest.raises(ValueError, match="names an index already"):
        Device("cuda:1", 2)


# ----------------------------------------------------------------------------------------------------------------
# tensor proxies


def tensor(*shape, dtype=dtypes.float32, name="x", requires_grad=False):
    return TensorProxy(name, shape=shape, dtype=dtype, device="cpu", requires_grad=requires_grad)


def test_tensor_proxies():
    x = tensor(2, 3, requires_grad=True)
    assert (x.shape, x.ndim, x.dtype, x.device, x.requires_grad, x.numel_value, x.size(), x.size(1), len(x)) == (
        (2, 3),
        2,
        dtypes.float32,
        cpu,
        True,
        6,
        (2, 3),
        3,
        2,
    )
    assert x.true_dtype is x.dtype
    y = TensorProxy("y", like=x, shape=[4], dtype=torch.int64)
    assert (y.shape, y.dtype, y.device, y.requires_grad) == ((4,), dtypes.int64, cpu, False), (
        "integers carry no gradient"
    )
    z = x.replace(name="z", device="cuda:1")
    assert (z.name, z.shape, z.device.name, z.requires_grad, x.name) == ("z", (2, 3), "cuda:1", True, "x")
    assert TensorProxy(like=x).requires_grad and not TensorProxy(like=x, requires_grad=False).requires_grad
    fresh = like(x, (5,), dtypes.bool8)
    assert (fresh.name, fresh.shape, fresh.dtype, fresh.requires_grad) == ("", (5,), dtypes.bool8, False)
    assert repr(x) == '<TensorProxy x: "cpu f32[2, 3]">' and repr(fresh) == '<TensorProxy unnamed: "cpu b8[5]">'
    assert isinstance(x, Proxy) and isinstance(x, thunder.TensorProxy) and hash(x) == object.__hash__(x)
    for missing in ({}, {"shape": (1,)}, {"shape": (1,), "dtype": dtypes.int8}):
        with pytest.raises(ValueError, match="needs like=, or all of shape=, device= and dtype="):
            TensorProxy("x", **missing)
    with pytest.raises(AttributeError):
        x.undefined = 1  # slots
    with pytest.raises(TypeError, match="0-d tensor"):
        len(tensor())
    with pytest.raises(TypeError, match="0-d tensor"):
        iter(tensor())


def test_type_strings():
    assert type_string(tensor()) == "cpu f32[]"
    assert type_string(TensorProxy(shape=(2, 128), dtype="bfloat16", device="cuda")) == "cuda:0 bf16[2, 128]"
    assert [type_string(v) for v in (8, 2.0, True, None, "text", (1,))] == [
        "int 8",
        "float 2.0",
        "bool True",
        "Any",
        "str",
        "tuple",
    ]
    assert [
        type_string(p) for p in (number("i0", 8), number("f0", 2.5), CollectionProxy([], "C0"), AnyProxy("a", 3))
    ] == ["int 8", "float 2.5", "Collection", "Any"]
    n = number("n", 4)
    assert type_string(TensorProxy(shape=(n * 2, 3), dtype="float32", device="cpu")) == "cpu f32[2*n, 3]"


def test_methods_come_from_the_operations():
    x = tensor(2, 3)
    trace = thunder.trace()(
        lambda x: (
            x.sin().mT,
            x + 1,
            2 - x,
            x @ x.T,
            -x,
            x[0],
            x == x,
            x.sum(dim=-1, keepdim=True),
            x.T,
            [row for row in x],
        ),
        x,
    )
    shapes = [o.shape if isinstance(o, TensorProxy) else [r.shape for r in o] for o in trace.output]
    assert shapes == [(3, 2), (2, 3), (2, 3), (2, 2), (2, 3), (3,), (2, 3), (2, 1), (3, 2), [(3,), (3,)]]
    assert trace.output[6].dtype is dtypes.bool8
    with pytest.raises(AttributeError, match="nonsense"):
        x.nonsense
    assert (
        "sin" in METHODS
        and "mT" in METHODS.properties
        and METHODS.fallback is not None
        and METHODS.torch_function is not None
    )
    with pytest.raises(RuntimeError, match="truth of a tensor"):
        thunder.trace()(lambda x: bool(x), x)


# ----------------------------------------------------------------------------------------------------------------
# numbers


class Told(Decisions):
    """What numbers were asked."""

    @property
    def guards(self):
        return [(str(a), relation, str(b), outcome) for (a, relation, b), outcome in self.relations.items()]

    def integer(self, name, value):
        self.values[name] = value
        return IntegerProxy(name, self)


def number(name, value):
    return (IntegerProxy if type(value) is int else FloatProxy)(name, Decisions({name: value}))


def test_arithmetic_of_numbers_asks_nothing():
    told = Told()
    n, m = told.integer("n", 6), told.integer("m", 4)
    f = FloatProxy("f", told)
    told.values["f"] = 0.5
    results = [n + 1, 2 * n, n - m, n // 4, n % 4, n * m, -n, abs(m - n), n / 4, n**2, n + f, f * f, 1 - f, f // 0.2]
    results += [n & m, n | 1, 1 ^ n, n << m, n >> 1, ~n, round(n), *divmod(n, m)]
    values = [7, 12, 2, 1, 2, 24, -6, 2, 1.5, 36, 6.5, 0.25, 0.5, 2.0, 4, 7, 7, 96, 3, -7, 6, 1, 2]
    assert [number_value(r) for r in results] == values
    assert [type(r) for r in results] == [FloatProxy if type(v) is float else IntegerProxy for v in values]
    assert all(r.expression.evaluate({"n": 6, "m": 4, "f": 0.5}) == v for r, v in zip(results, values))
    assert told.guards == []
    assert number_value(n) == 6 and number_value(3) == 3 and type(n - n) is int and n - n == 0 and type(n * 0) is int
    assert not isinstance(n, Proxy) and not hasattr(n, "__dict__")


def test_deciding_by_a_number_is_a_guard():
    told = Told()
    n = told.integer("n", 6)
    assert n > 4 and not n == 7 and n != m_of(told) and n * 2 >= 12
    assert told.guards == [
        ("n", ">", "4", True),
        ("n", "==", "7", False),
        ("n", "!=", "m", True),
        ("2*n", ">=", "12", True),
    ]
    told.relations.clear()
    assert type(2**n) is IntegerProxy and told.guards == [("n", ">=", "0", True)], "for others it is a float"
    told.relations.clear()
    assert bool(n) and told.guards == [("n", "!=", "0", True)]
    for use in (
        int,
        float,
        complex,
        hash,
        str,
        lambda n: f"{n:03d}",
        lambda n: [0] * 7 and list(range(7))[n],
        concrete,
        lambda n: {6: 1}[n],
    ):
        told.relations.clear()
        use(n)
        assert told.guards[0] == ("n", "==", "6", True), use
    assert n == n and n + 1 > n, "what holds for every value needs no guard"
    told.relations.clear()
    assert type(2**n) is IntegerProxy and type(n**-1) is FloatProxy and told.guards == [("n", ">=", "0", True)]
    assert round(n) is n and divmod(n, 4) == (1, 2)
    told.relations.clear()
    assert (n < n + 1) and (n - n == 0) and told.guards == []
    assert (n == "six") is False and (n == None) is False  # noqa: E711
    with pytest.raises(TypeError):
        n + "six"


def m_of(told):
    return told.integer("m", 4)


def test_numbers_of_a_structure():
    n, m = number("n", 2), number("m", 3)
    x = tensor(n, 5)
    assert (
        numbers_in([x, {"k": (m, slice(n, None))}, 3], []) == [n, m, n]
        and len(proxies_in([x, {"k": (m,)}, slice(x, 1)], [])) == 2
    )


def test_map_structure():
    x, y = tensor(1), tensor(2)
    value = [x, (1, {"k": y}), slice(x, None)]
    assert map_structure(lambda v: v, value[1]) is value[1], "the same object where nothing changed"
    mapped = map_structure(lambda v: y if v is x else v, value)
    assert mapped[0] is y and mapped[1] is value[1] and mapped[2].start is y and value[0] is x
    Point = collections.namedtuple("Point", "a b")
    assert map_structure(lambda v: v + 1, Point(1, 2)) == Point(2, 3)
    assert map_structure(lambda v: v, torch.Size([1])) == torch.Size([1])
    assert proxies_in(Point(x, [y]), []) == [x, y]


# ----------------------------------------------------------------------------------------------------------------
# pytrees


@dataclasses.dataclass
class Pair:
    left: typing.Any
    right: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: typing.Any


def test_pytrees():
    Point = collections.namedtuple("Point", "a b")
    tree = {"z": [1, (2, None)], "a": Point(3, collections.OrderedDict(q=4))}
    leaves, spec = tree_flatten(tree)
    assert sorted(leaves, key=str) == [1, 2, 3, 4, None] and tree_unflatten(leaves, spec) == tree
    assert tree_map(lambda v: v if v is None else v * 2, tree) == {
        "z": [2, (4, None)],
        "a": Point(6, collections.OrderedDict(q=8)),
    }
    assert tree_map(lambda a, b: (a, b), [1, 2], [3, 4]) == [(1, 3), (2, 4)]
    assert list(tree_iter([1, {"k": 2}])) == [1, 2]
    pair = Pair(1, [2])
    assert tree_flatten(pair)[0] == [pair], "dataclasses are leaves"


def test_pytrees_with_dataclasses():
    tree = [Pair(1, {"k": Frozen([2, Pair(3)])}), Frozen(4)]
    leaves, spec = tree_flatten_with_dataclass(tree)
    assert leaves == [1, 2, 3, None, 4]
    assert tree_unflatten(leaves, spec) == tree
    assert tree_unflatten([x and x * 10 for x in leaves], spec)[0].right["k"].value[0] == 20
    again, same = tree_flatten_with_dataclass([Pair(5, {"k": Frozen([6, Pair(7)])}), Frozen(8)])
    assert same == spec and again == [5, 6, 7, None, 8]


def test_symbolic_is_torch_free():
    assert symbolic.symbol("n") + symbolic.constant(0) == symbolic.symbol("n")
    assert NumberProxy.__mro__[1] is object
