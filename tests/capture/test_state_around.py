"""State around a program that others have set: methods of PyTorch's classes that the user has replaced, dispatch modes
inside, the dtype that autocast takes by default, settings of libraries."""

from __future__ import annotations

import contextvars
import csv
import decimal
from unittest import mock

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import thunder
from thunder import compat

X = torch.tensor([[1.0, -2.0], [3.0, 4.0]])

PATCHED = {
    "relu": (lambda x: x.relu() + 1, lambda s: s * 9),
    "sum": (lambda x: x.sum(0, keepdim=True), lambda s, dim, keepdim: s * 5 if keepdim else s),
    "shape": (lambda x: x * x.shape[0], property(lambda s: (11, 11))),
    "mine": (lambda x: x.mine(), lambda s: s * 3),
    "T": (lambda x: x.T, property(lambda s: s + 1)),
}


@pytest.mark.parametrize("name", PATCHED)
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_method_of_tensors_that_the_user_has_replaced(name, compiled_before):
    f, new = PATCHED[name]
    compiled = thunder.jit(f, fallback="error")
    if compiled_before and name != "mine":
        torch.testing.assert_close(compiled(X), f(X))
    for _ in range(2):
        with mock.patch.object(torch.Tensor, name, new, create=True):
            torch.testing.assert_close(compiled(X), f(X))
            torch.testing.assert_close(compiled(X), f(X))
        if name != "mine":
            torch.testing.assert_close(compiled(X), f(X))
    assert len(compiled.programs) <= 2


@pytest.mark.parametrize("name", ["__add__", "__matmul__"])
def test_an_operator_that_the_user_has_replaced(name):
    f = lambda x: (x + 1) @ x  # noqa: E731
    compiled = thunder.jit(f, fallback="eager")
    compiled(X)
    with mock.patch.object(torch.Tensor, name, lambda s, o: s * 100):
        with pytest.raises(thunder.errors.CaptureError, match=f"torch.Tensor.{name} is replaced"):
            thunder.jit(f, fallback="error")(X)
        with pytest.warns(thunder.errors.FallbackWarning):
            torch.testing.assert_close(compiled(X), f(X))
    torch.testing.assert_close(compiled(X), f(X))


def test_a_module_that_counts_what_is_assigned():
    log, original = [], torch.nn.Module.__setattr__

    def counting(self, name, value):
        if name == "last":
            log.append(name)
        original(self, name, value)

    class Assigns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x):
            self.last = torch.nn.ReLU()
            return self.inner(x)

    with mock.patch.object(torch.nn.Module, "__setattr__", counting):
        compiled, seen = thunder.jit(Assigns(), fallback="error"), []
        for n in (1, 1, 2, 2, 3):
            compiled(torch.ones(n, 2))
            seen.append(len(log))
    assert seen == [1, 2, 3, 4, 5]


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return result * 2 if operation is torch.ops.aten.sin.default else result


def test_a_dispatch_mode_inside():
    def f(x):
        with Doubles():
            y = torch.sin(x)
        return y + torch.sin(x)

    with pytest.raises(thunder.errors.CaptureError, match="enters a dispatch mode"):
        thunder.jit(f, fallback="error")(X)
    depth = compat.dispatch_modes()
    compiled = thunder.jit(f, fallback="eager")
    with pytest.warns(thunder.errors.FallbackWarning):
        torch.testing.assert_close(compiled(X), f(X))
    torch.testing.assert_close(compiled(X), f(X))
    assert compat.dispatch_modes() == depth


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_operations_that_are_counted_inside():
    def f(x):
        with FlopCounterMode(display=False) as counter:
            y = x @ x
        return y, counter.get_total_flops()

    assert thunder.jit(f, fallback="eager")(X)[1] == f(X)[1] > 0


def test_the_dtype_that_autocast_takes_by_default():
    def f(x):
        with torch.autocast("cpu"):
            y = x @ x
        with torch.autocast("cpu", torch.float16):
            return y, x @ x

    compiled, before = thunder.jit(f, fallback="error"), torch.get_autocast_dtype("cpu")
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            torch.set_autocast_dtype("cpu", dtype)
            assert [y.dtype for y in compiled(X)] == [y.dtype for y in f(X)] == [dtype, torch.float16]
            assert torch.get_autocast_dtype("cpu") is dtype
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert len(compiled.programs) == 2


def test_the_inverse_of_a_float():
    with pytest.raises(TypeError, match="is only implemented on integer and Boolean-type tensors"):
        thunder.jit(lambda x: ~x, fallback="error")(X)


class Row:
    price = decimal.Decimal("1.2345678")


SETTINGS = {
    "decimal": (
        lambda: decimal.Context(prec=4),
        decimal.Context,
        decimal.setcontext,
        lambda x: (x * float(Row.price / 3), str(Row.price * 3), decimal.getcontext().prec, [Row.price][0].sqrt()),
    ),
    "texts of arrays": (
        lambda: 3,
        lambda: 8,
        lambda digits: numpy.set_printoptions(precision=digits),
        lambda x: (x, f"{numpy.array([1.23456])}", str([numpy.float32(1.23456)]), "%s" % numpy.array(0.123456)),
    ),
    "dialects": (
        lambda: "|",
        lambda: ";",
        lambda mark: csv.register_dialect("marked", delimiter=mark),
        lambda x: (x, next(csv.reader(["a|b;c"], "marked")), csv.get_dialect("marked").delimiter),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_libraries_hold_in_each_call(name):
    """One program serves all settings: what depends on them runs on the host."""
    new, old, put, f = SETTINGS[name]
    compiled = thunder.jit(f, fallback="error")
    try:
        for make in (old, new, old, new):
            put(make())
            assert repr(compiled(X)) == repr(f(X))
    finally:
        put(old())
    assert thunder.cache_misses(compiled) == 1


def test_a_variable_of_the_context_is_set_while_a_function_runs():
    """As transformers does where it collects the results of layers."""
    variable: contextvars.ContextVar = contextvars.ContextVar("variable", default=None)

    def layer(x):
        if (value := variable.get()) is not None:
            value.append(x * 2)
        return x + 1

    def f(x):
        token = variable.set([])
        x = layer(layer(x))
        value = variable.get()
        variable.reset(token)
        return x, value

    compiled = thunder.jit(f, fallback="error")
    for _ in range(2):
        torch.testing.assert_close(compiled(X), f(X))
    assert variable.get() is None and len(compiled.programs) == 1


def _in_the_mode(x):
    with torch.inference_mode():
        y = torch.zeros(2, 3)
        y.add_(x)
        y[0] = 1.0
    return y, y.is_inference()


def _a_view_of_a_tensor_from_before(x):
    before = x * 2
    with torch.inference_mode():
        y = before[0]
    return y, y.is_inference(), before


def _out_of_the_mode_inside(x):
    with torch.inference_mode():
        with torch.inference_mode(False):
            y = torch.ones(3) * 2
        z = torch.ones(3) * 3
    return y, z, y.is_inference(), z.is_inference()


def _stored(x):
    held = {}
    with torch.inference_mode():
        held["y"] = x * 2
    return x.sin(), held


@pytest.mark.parametrize("program", [_in_the_mode, _a_view_of_a_tensor_from_before, _out_of_the_mode_inside, _stored])
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_made_in_inference_mode_is_an_inference_tensor_outside(program, grad):
    def shown(result):
        return [
            (x.tolist(), x.is_inference(), x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in torch.utils._pytree.tree_leaves(result)
        ]

    compiled = thunder.jit(program, fallback="error")
    for value in (1.0, 2.0):
        x = torch.full((2, 3), value, requires_grad=grad)
        assert shown(compiled(x)) == shown(program(x))
    assert len(compiled.programs) == 1


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_tensors_of_inference_mode_that_share_memory_still_do_outside():
    def program(x):
        with torch.inference_mode():
            y = x * 2
            return y, y[0]

    whole, row = thunder.jit(program, fallback="eager")(torch.ones(2, 3))
    assert whole.is_inference() and row.data_ptr() == whole.data_ptr()
