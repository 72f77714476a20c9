"""Executors: operators and implementations of the user's, who is asked when, and the registry."""

import re

import numpy as np
import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder import extend
from thunder.core.devices import DeviceType
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import OpTags
from thunder.errors import MissingImplementationError, OptionError
from thunder.extend import OperatorExecutor
from thunder.ops.registry import operation_of

A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])


@pytest.fixture
def registry():
    """The registry as it was, whatever a test does to it."""
    extend.get_all_executors()
    before = dict(extend._ALL), list(extend._DEFAULT), list(extend._ALWAYS)
    yield
    extend._ALL.clear()
    extend._ALL.update(before[0])
    extend._DEFAULT[:], extend._ALWAYS[:] = before[1:]


@pytest.fixture
def myex():
    return OperatorExecutor("myex", version="0.1")


def multimul_impl(a, b, c, d):
    return np.multiply(a, b), np.multiply(c, d)


def multimul_like(a, b, c, d):
    return a * b, c * d


def multimul_in(executor):
    return executor.register_operator("multimul", like=multimul_like, fn=multimul_impl)


def text(compiled) -> str:
    """The executed trace, without the header line that has a time in it."""
    header, _, rest = str(thunder.last_traces(compiled)[-1]).partition("\n")
    assert re.fullmatch(r"# Constructed by Delete Last Used \(took \d+ milliseconds\)", header)
    return rest


def names(compiled, i=-1):
    return [line.sym.name for line in thunder.last_traces(compiled)[i].bound_symbols if line.sym.name != "python_del"]


# ---------------------------------------------------------------------------------------------------------------- the
# notebook


F = torch.nn.functional
I, W = torch.tensor([0, 1, 1]), torch.randn(3, 4)
SEVERAL = {
    F.silu: (W,), F.relu: (W,), torch.relu: (W,), F.embedding: (I, W), F.batch_norm: (W, torch.zeros(4), torch.ones(4)),
        F.scaled_dot_product_attention: (W[None],) * 3,
    torch.einsum: ("ij,kj->ik", W, W), torch.trapz: (W,),
}  # fmt: skip


@pytest.mark.parametrize("function", SEVERAL, ids=lambda f: f.__name__)
def test_functions_whose_arguments_decide_what_they_record(myex, function):
    """A torch function stands for the operation of its name, or the usual one."""
    args, calls = SEVERAL[function], []
    op = myex.register_operator(
        "op",
        like=lambda *args, **kwargs: operation_of(function)(*args, **kwargs),
        fn=lambda *args, **kwargs: calls.append(args) or function(*args),
    )
    myex.register_implementation(function, op)
    thunder.jit(lambda *args: function(*args), executors=[myex])(*args)
    assert len(calls) == 1


def test_cell_9_a_registered_operator(myex):
    multimul = multimul_in(myex)

    def foo(a, b, c, d):
        return multimul(a, b, c, d)

    compiled = thunder.jit(foo, executors=[myex])
    for got, want in zip(compiled(A, B, A, B), multimul_impl(A, B, A, B)):
        assert torch.equal(got, want)
    assert (
        text(compiled)
        == """\
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(a, b, c, d):
  # a: "cpu f32[2, 2]"
  # b: "cpu f32[2, 2]"
  # c: "cpu f32[2, 2]"
  # d: "cpu f32[2, 2]"
  (t0, t1) = multimul(a, b, c, d)
    # t0 = ltorch.mul(a, b)  # t0: "cpu f32[2, 2]"
      # t0 = prims.mul(a, b)  # t0: "cpu f32[2, 2]"
    # t1 = ltorch.mul(c, d)  # t1: "cpu f32[2, 2]"
      # t1 = prims.mul(c, d)  # t1: "cpu f32[2, 2]"
  del a, b, c, d
  return (t0, t1)"""
    )


def mul_to_multimul_checker(a, b):
    return all(x.device.devicetype == DeviceType.CPU for x in (a, b) if isinstance(x, TensorProxy))


def test_cell_13_an_execution_transform(myex):
    multimul = multimul_in(myex)

    def mul_to_multimul(a, b):
        result, _ = multimul(a, b, 0, 0)
        return result

    myex.register_implementation(ltorch.mul, checker=mul_to_multimul_checker, execution_transform=mul_to_multimul)
    compiled = thunder.jit(lambda a, b: a * b, executors=[myex])
    assert torch.equal(compiled(A, B), A * B)
    assert (
        text(compiled)
        == """\
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(a, b):
  # a: "cpu f32[2, 2]"
  # b: "cpu f32[2, 2]"
  (t0, _) = multimul(a, b, 0, 0)
    # t0 = ltorch.mul(a, b)  # t0: "cpu f32[2, 2]"
      # t0 = prims.mul(a, b)  # t0: "cpu f32[2, 2]"
  del a, b
  return t0"""
    )


def test_cell_18_torch_operations_in_an_execution_transform(myex):
    multimul = multimul_in(myex)

    def mul_to_contiguous_multimul(a, b):
        a = a.contiguous()
        b = b.contiguous()
        result, _ = multimul(a, b, 0, 0)
        return result

    myex.register_implementation(
        ltorch.mul, checker=mul_to_multimul_checker, execution_transform=mul_to_contiguous_multimul
    )
    compiled = thunder.jit(lambda a, b: a * b, executors=[myex])
    assert torch.equal(compiled(A, B), A * B)
    printed = text(compiled)
    assert (
        printed
        == """\
from torch import Tensor
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(a, b):
  # a: "cpu f32[2, 2]"
  # b: "cpu f32[2, 2]"
  t1 = Tensor.contiguous(a, memory_format=_torch_memory_format_0)  # t1: "cpu f32[2, 2]"
    # t1 = ltorch.contiguous(a, memory_format=_torch_memory_format_0)  # t1: "cpu f32[2, 2]"
      # t1 = prims.stride_order(a, (1, 0))  # t1: "cpu f32[2, 2]"
  del a
  t2 = Tensor.contiguous(b, memory_format=_torch_memory_format_0)  # t2: "cpu f32[2, 2]"
    # t2 = ltorch.contiguous(b, memory_format=_torch_memory_format_0)  # t2: "cpu f32[2, 2]"
      # t2 = prims.stride_order(b, (1, 0))  # t2: "cpu f32[2, 2]"
  del b
  (t0, _) = multimul(t1, t2, 0, 0)
    # t0 = ltorch.mul(t1, t2)  # t0: "cpu f32[2, 2]"
      # t0 = prims.mul(t1, t2)  # t0: "cpu f32[2, 2]"
  del t1, t2
  return t0"""
    )


# ----------------------------------------------------------------------------------------------------------------
# register_operator


def test_like_is_the_decomposition_when_the_executor_is_not_asked(myex):
    """Without the executor in the list nobody takes the operator: its decomposition runs."""
    multimul = multimul_in(myex)
    compiled = thunder.jit(lambda a, b: multimul(a, b, b, 2))
    got = compiled(A, B)
    assert torch.equal(got[0], A * B) and torch.equal(got[1], B * 2)
    assert names(compiled, 0) == ["multimul"] and names(compiled) == ["mul", "mul"]


def test_meta_makes_a_primitive(myex):
    def meta(x, k):
        return TensorProxy(like=x, shape=(*x.shape, k))

    widen = myex.register_operator(
        "widen", meta=meta, fn=lambda x, k: x[..., None].repeat(*[1] * x.dim(), k), tags=[OpTags.RANDOM_OP]
    )
    assert widen.is_prim and OpTags.RANDOM_OP in widen.tags and myex.opmap["widen"] is widen
    compiled = thunder.jit(lambda x: widen(x, k=3) + 1, executors=[myex])
    assert compiled(A).shape == (2, 2, 3) and torch.equal(compiled(A)[..., 0], A + 1)
    assert '  t0 = widen(x, 3)  # t0: "cpu f32[2, 2, 3]"\n  del x\n' in text(compiled)
    with pytest.raises(MissingImplementationError, match="no executor takes widen: asked (.*, )?torch, python"):
        thunder.jit(lambda x: widen(x, 3))(A)
    assert torch.equal(widen(A, 1), A[..., None]), "outside of a trace a symbol is its function"


def test_like_given_a_meta_function_is_one(myex):
    fill = myex.register_operator("fill", like=lambda x: TensorProxy(like=x), fn=torch.zeros_like)
    compiled = thunder.jit(lambda x: fill(x), executors=[myex])
    assert torch.equal(compiled(A), torch.zeros_like(A))
    assert fill.is_prim and thunder.last_traces(compiled)[-1].bound_symbols[0].subsymbols == ()


def test_nested_outputs_with_numbers(myex):
    def meta(x):
        return (TensorProxy(like=x), (TensorProxy(like=x), 7)), "label", [TensorProxy(like=x, shape=())]

    op = myex.register_operator("nested", meta=meta, fn=lambda x: ((x + 1, (x + 2, 7)), "label", [x.sum()]))
    compiled = thunder.jit(lambda x: op(x), executors=[myex])
    (a, (b, n)), label, [c] = compiled(A)
    assert torch.equal(a, A + 1) and torch.equal(b, A + 2) and (n, label) == (7, "label") and torch.equal(c, A.sum())
    assert "((t0, (t1, _)), _, [t2]) = nested(x)" in text(compiled)
    part = thunder.jit(lambda x: op(x)[0][1][1] * x, executors=[myex])
    assert torch.equal(part(A), 7 * A)


def test_module_is_where_the_function_is_printed_from(myex):
    op = myex.register_operator("gammaln", like=lambda x: ltorch.lgamma(x), module=torch.special)
    assert op.fn is torch.special.gammaln
    compiled = thunder.jit(lambda x: op(x), executors=[myex])
    assert torch.equal(compiled(A), torch.lgamma(A))
    assert "t0 = torch.special.gammaln(x)" in text(compiled)


def outside(x):
    return torch.from_numpy(np.asarray(x) * 2)


def test_replaces_diverts_calls(myex):
    def also(x):
        return x * 2

    op = myex.register_operator("doubled", like=lambda x: x * 2, fn=outside, replaces=(outside, also))
    compiled = thunder.jit(lambda x: outside(x) + also(x), executors=[myex])
    assert torch.equal(compiled(A), 4 * A)
    assert [line.sym for line in thunder.last_traces(compiled)[0].bound_symbols][:2] == [op, op]
    first, second = OperatorExecutor("first"), OperatorExecutor("second")
    mine = first.register_operator("mine", like=lambda x: x * 3, fn=lambda x: x * 3, replaces=also)
    second.register_operator("yours", like=lambda x: x * 5, fn=lambda x: x * 5, replaces=also)
    compiled = thunder.jit(lambda x: also(x), executors=[first, second])
    assert torch.equal(compiled(A), 3 * A) and thunder.last_traces(compiled)[0].bound_symbols[0].sym is mine
    untouched = thunder.jit(lambda x: also(x))
    assert torch.equal(untouched(A), 2 * A) and names(untouched, 0) == ["mul"]


def test_torch_functions_can_be_replaced(myex):
    myex.register_operator(
        "my_softmax",
        like=lambda x, dim: ltorch.softmax(x, dim),
        fn=lambda x, dim: torch.full_like(x, 9.0),
        replaces=torch.nn.functional.softmax,
    )
    compiled = thunder.jit(lambda x: torch.nn.functional.softmax(x, dim=-1), executors=[myex])
    assert torch.equal(compiled(A), torch.full_like(A, 9.0))


def test_a_printer_of_its_own(myex):
    op = myex.register_operator(
        "shout",
        like=lambda x: x + 1,
        fn=lambda x: x + 1,
        python_printer=lambda line, printer: ["# loud", f"{line.output.name} = {line.args[0].name} + 1"],
    )
    compiled = thunder.jit(lambda x: op(x), executors=[myex])
    assert torch.equal(compiled(A), A + 1) and "  # loud\n  t0 = x + 1\n" in text(compiled)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"fn": abs}, "exactly one of like= and meta="),
        ({"fn": abs, "like": abs, "meta": abs}, "exactly one of like= and meta="),
        ({"like": lambda x: x}, "give fn="),
    ],
)
def test_register_operator_errors(myex, arguments, message):
    with pytest.raises(ValueError, match=message):
        myex.register_operator("op", **arguments)


# ----------------------------------------------------------------------------------------------------------------
# register_implementation


def test_op_is_called_with_the_same_arguments(myex):
    op = myex.register_operator(
        "my_add",
        meta=lambda a, b, alpha=1: TensorProxy(like=a),
        fn=lambda a, b, alpha=1: torch.add(a, b, alpha=alpha) * 10,
    )
    myex.register_implementation(ltorch.add, op)
    compiled = thunder.jit(lambda a, b: torch.add(a, b, alpha=2), executors=[myex])
    assert torch.equal(compiled(A, B), (A + 2 * B) * 10)
    assert "my_add(a, b, alpha=2)" in text(compiled) and "    # t0 = ltorch.add(a, b, alpha=2)" in text(compiled)


def test_registration_by_id_and_of_prims(myex):
    op = myex.register_operator("my_mul", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b: a * b * 10)
    myex.register_implementation("ltorch.mul", op)
    assert torch.equal(thunder.jit(lambda a, b: a * b, executors=[myex])(A, B), A * B * 10)


def test_the_checker_decides_line_by_line(myex):
    op = myex.register_operator("my_mul", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b: a * b)
    seen = []

    def checker(a, b):
        seen.append((a, b))
        return isinstance(b, TensorProxy)

    myex.register_implementation(ltorch.mul, op, checker=checker)
    compiled = thunder.jit(lambda a, b: (a * b) * 3, executors=[myex])
    assert torch.equal(compiled(A, B), A * B * 3)
    assert names(compiled) == ["my_mul", "mul"]
    assert isinstance(seen[0][0], TensorProxy) and seen[1][1] == 3


def test_registering_again_replaces(myex):
    ten = myex.register_operator("ten", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b: a * 10)
    twenty = myex.register_operator("twenty", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b: a * 20)
    myex.register_implementation(ltorch.mul, ten, checker=lambda a, b: False)
    assert torch.equal(thunder.jit(lambda a, b: a * b, executors=[myex])(A, B), A * B)
    myex.register_implementation(ltorch.mul, twenty)
    assert torch.equal(thunder.jit(lambda a, b: a * b, executors=[myex])(A, B), A * 20)


def test_the_order_of_executors_is_their_precedence():
    first, second = OperatorExecutor("first"), OperatorExecutor("second")
    for executor, factor in ((first, 10), (second, 20)):
        op = executor.register_operator(
            f"by_{factor}", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b, factor=factor: a * factor
        )
        executor.register_implementation(ltorch.mul, op)
    for order, factor in (
        ([first, second], 10),
        ([second, first], 20),
        (["torch", first], None),
        ([first, "torch"], 10),
    ):
        want = A * B if factor is None else A * factor
        assert torch.equal(thunder.jit(lambda a, b: a * b, executors=order)(A, B), want)


def test_an_implementation_of_a_composite_comes_before_its_parts():
    outer, inner = OperatorExecutor("outer"), OperatorExecutor("inner")
    whole = outer.register_operator(
        "whole", meta=lambda a, *rest, **options: TensorProxy(like=a), fn=lambda a, *rest, **options: a * 0 + 1
    )
    part = inner.register_operator("part", meta=lambda a, b: TensorProxy(like=a), fn=lambda a, b: a * 0 + 2)
    outer.register_implementation(ltorch.softmax, whole)
    inner.register_implementation(ltorch.mul, part)
    assert torch.equal(thunder.jit(lambda a: torch.softmax(a, 0), executors=[inner, outer])(A), torch.ones(2, 2))


def test_a_transform_may_use_the_operation_it_implements(myex):
    myex.register_implementation(ltorch.mul, execution_transform=lambda a, b: ltorch.mul(ltorch.mul(a, b), 2))
    compiled = thunder.jit(lambda a, b: a * b, executors=[myex])
    assert torch.equal(compiled(A, B), A * B * 2) and names(compiled) == ["mul", "mul"]


def test_what_a_transform_writes_goes_to_the_other_executors(myex):
    other = OperatorExecutor("other")
    op = other.register_operator(
        "other_add", meta=lambda a, b, *, alpha=1: TensorProxy(like=a), fn=lambda a, b, *, alpha=1: a + b
    )
    other.register_implementation(ltorch.add, op)
    myex.register_implementation(ltorch.mul, execution_transform=lambda a, b: a + b)
    compiled = thunder.jit(lambda a, b: a * b, executors=[myex, other])
    assert torch.equal(compiled(A, B), A + B) and names(compiled) == ["other_add"]


def test_a_transform_may_return_an_argument_or_a_number_of_values(myex):
    myex.register_implementation(ltorch.mul, execution_transform=lambda a, b: a)
    compiled = thunder.jit(lambda a, b: a * b + 1, executors=[myex])
    assert torch.equal(compiled(A, B), A + 1) and names(compiled) == ["add"]
    returned = thunder.jit(lambda a, b: (a * b, b), executors=[myex])
    got = returned(A, B)
    assert torch.equal(got[0], A) and torch.equal(got[1], B)
    several = OperatorExecutor("several")
    several.register_implementation(ltorch.unbind, execution_transform=lambda a, dim=0: (a[0], a[1]))
    got = thunder.jit(lambda a: a.unbind(0), executors=[several])(A)
    assert torch.equal(got[0], A[0]) and torch.equal(got[1], A[1])
    wrong = OperatorExecutor("wrong")
    wrong.register_implementation(ltorch.unbind, execution_transform=lambda a, dim=0: (a[0],))
    with pytest.raises(
        MissingImplementationError,
        match="execution transform of wrong for ltorch.unbind returned another number of values",
    ):
        thunder.jit(lambda a: a.unbind(0), executors=[wrong])(A)


def test_register_implementation_needs_exactly_one_way(myex):
    for arguments in ({}, {"op": multimul_in(myex), "execution_transform": lambda a, b: a}):
        with pytest.raises(ValueError, match="exactly one of op and execution_transform"):
            myex.register_implementation(ltorch.mul, **arguments)


def test_queries_of_an_executor(myex):
    multimul = multimul_in(myex)

    def transform(a, b):
        return multimul(a, b, 0, 0)[0]

    myex.register_implementation(
        ltorch.mul, checker=lambda a, b: isinstance(b, TensorProxy), execution_transform=transform
    )
    assert (myex.name, myex.version, repr(myex)) == ("myex", "0.1", "myex")
    assert (
        myex == OperatorExecutor("myex")
        and hash(myex) == hash(OperatorExecutor("myex"))
        and myex != OperatorExecutor("other")
    )
    assert "ltorch.mul" in myex.implmap and myex.opmap == {"multimul": multimul}
    mul, scaled, called = thunder.trace()(lambda a, b: multimul(a * b * 2, a, b, b), A, B).bound_symbols
    assert [myex.can_execute(line) for line in (mul, scaled, called)] == [True, False, True]
    assert [myex.can_execute_or_fuse(line) for line in (mul, scaled, called)] == [True, False, True]
    assert myex.get_execution_transform(mul) is transform and myex.get_execution_transform(scaled) is None


# ---------------------------------------------------------------------------------------------------------------- the
# registry


def test_registry(registry, myex):
    assert extend.register_executor(myex) is myex
    assert (
        extend.get_executor("myex") is myex
        and myex in extend.get_all_executors()
        and extend.get_executor("nobody") is None
    )
    assert myex not in extend.get_default_executors()
    extend.add_default_executor(myex)
    other = extend.register_executor(OperatorExecutor("other"))
    extend.add_default_executor(other)
    assert extend.get_default_executors()[:2] == (other, myex)
    assert thunder.compile_data(thunder.jit(lambda x: x)).executors_list[:2] == (other, myex)
    again = extend.register_executor(OperatorExecutor("myex"))
    assert extend.get_executor("myex") is again and extend.get_default_executors()[1] is again, (
        "a registration of the same name replaces"
    )
    extend.remove_default_executor("other")
    assert other not in extend.get_default_executors()
    extend.set_default_executors([other])
    assert extend.get_default_executors() == (other,)
    extend.deregister_executor("other")
    assert extend.get_executor("other") is None and extend.get_default_executors() == ()
    extend.deregister_executor(again)
    assert again not in extend.get_all_executors()
    extend.deregister_executor("nobody")


def test_always_executors(registry, myex):
    assert [e.name for e in extend.get_always_executors()] == ["torch", "python"]
    extend.add_always_executor(myex)
    assert extend.get_always_executors()[0] is myex
    extend.remove_always_executor(myex)
    extend.set_always_executors([*extend.get_always_executors(), myex])
    assert [e.name for e in extend.resolve_executors([])] == ["torch", "python", "myex"]


def test_resolve(registry, myex):
    extend.register_executor(myex)
    assert [e.name for e in extend.resolve_executors(["myex"])] == ["myex", "torch", "python"]
    assert [e.name for e in extend.resolve_executors(("torch", myex))] == ["torch", "myex", "python"]
    assert [e.name for e in extend.resolve_executors((myex,) + thunder.get_default_executors())][0] == "myex"
    assert extend.resolve_executors(None) == extend.resolve_executors(extend.get_default_executors())
    for wrong in ("nobody", 3, None):
        with pytest.raises(OptionError, match="no executor is called .*; registered: .*myex.*python.*torch"):
            extend.resolve_executors([wrong])
    assert extend.add_executor_lists([myex], extend.resolve_executors(["myex"])) == extend.resolve_executors(["myex"])


def test_names_in_jit(registry, myex):
    multimul_in(myex)
    extend.register_executor(myex)
    compiled = thunder.jit(lambda a: a + 1, executors=["myex", "torch"])
    assert [e.name for e in thunder.compile_data(compiled).executors_list] == ["myex", "torch", "python"]
    assert torch.equal(compiled(A), A + 1)
    with pytest.raises(ValueError, match="no executor is called 'nonesuch'; registered:"):
        thunder.jit(lambda a: a, executors=["nonesuch"])


def test_single_op_executor(registry):
    def wiggle(x, amount):
        return torch.from_numpy(np.asarray(x) + amount)

    executor = extend.single_op_executor(
        "wiggler", "wiggle", wiggle, lambda x, amount: TensorProxy(like=x), version="2"
    )
    assert extend.get_executor("wiggler") is executor and executor.version == "2"
    compiled = thunder.jit(lambda x: wiggle(x, 3), executors=["wiggler"])
    assert torch.equal(compiled(A), A + 3) and names(compiled) == ["wiggle"]
    rewriting = extend.single_op_executor(
        "rewriter", "wiggle", wiggle, lambda x, amount: TensorProxy(like=x), replaces=wiggle,
        checker=lambda x, amount: amount == 3,
        execution_transform=lambda x, amount: x * amount,
    )  # fmt: skip
    assert torch.equal(thunder.jit(lambda x: wiggle(x, 3), executors=[rewriting])(A), A * 3)
    assert torch.equal(thunder.jit(lambda x: wiggle(x, 4), executors=[rewriting])(A), A + 4)


def test_lists_are_copies(registry):
    assert all(
        type(get()) is tuple
        for get in (extend.get_all_executors, extend.get_default_executors, extend.get_always_executors)
    )


# ----------------------------------------------------------------------------------------------------------------
# states, names, printing


class Counting:
    instances = 0

    def __init__(self):
        type(self).instances += 1
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls


def test_a_state_for_each_call():
    executor = extend.StatefulExecutor("counting")
    count = executor.register_stateful_operator("count", Counting, meta=lambda x: TensorProxy(like=x))
    Counting.instances = 0

    def program(x):
        count(x)
        for _ in range(2):
            x = count(x)
        return x

    compiled = thunder.jit(program, executors=[executor])
    assert torch.equal(compiled(A), A + 2) and torch.equal(compiled(A), A + 4), "each call counts for itself"
    assert Counting.instances == 3 and [n for n in names(compiled)] == ["count_0", "count_1", "count_2"]
    assert "x_0 = count_1(x)" in text(compiled)
    compiled(A.double())
    assert Counting.instances == 6 and torch.equal(compiled(A), A + 6), "another program has other states"
    assert torch.equal(count(A), A + 1), "outside of a program a state lasts for the call"
    executor.register_implementation(count, grad_transform=scaled_gradient(count))
    x = A.clone().requires_grad_()
    thunder.jit(lambda x: count(x), executors=[executor])(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(A, 5.0))
    with pytest.raises(
        TypeError, match=r"register_stateful_operator\('wrong'\): state_class= is a function, not a int"
    ):
        executor.register_stateful_operator("wrong", 3, meta=abs)


def scaled_gradient(operation):
    from thunder.core.transforms import get_grad, put_grads

    def rule(x):
        result = operation(x)
        put_grads((x,), (get_grad(result) * 5,))
        return result

    return rule


def test_temporary_executors_take_no_names():
    first, second = extend.TemporaryExecutor(), extend.TemporaryExecutor()
    operations = [e.register_operator("op", like=lambda x: x * 2, fn=lambda x: x * 2) for e in (first, first, second)]
    assert first != second and [op.name for op in operations] == ["op_0", "op_1", "op_0"]
    compiled = thunder.jit(lambda x: [op(x) for op in operations], executors=[first, second])
    assert all(torch.equal(got, A * 2) for got in compiled(A))
    assert names(compiled) == ["op_0", "op_1", "op_0"] and "t2 = op_0_1(x)" in text(compiled)


def test_a_derivative_alone(myex):
    """The operation is executed by whoever executes it, and differentiated as said."""
    myex.register_implementation(ltorch.sin, grad_transform=scaled_gradient(ltorch.sin))
    x = A.clone().requires_grad_()
    compiled = thunder.jit(lambda x: x.sin(), executors=[myex])
    result = compiled(x)
    result.sum().backward()
    assert torch.equal(result, A.sin()) and torch.equal(x.grad, torch.full_like(A, 5.0)) and names(compiled) == ["sin"]
    line = thunder.trace()(lambda x: x.sin(), A).bound_symbols[0]
    assert myex.get_grad_transform(ltorch.sin) is myex.get_grad_transform(line) is not None and not myex.can_execute(
        line
    )


def test_single_op_executor_with_a_derivative(registry):
    def wiggle(x):
        return torch.from_numpy(np.asarray(x.detach()) + 1)

    def rule(x):
        return scaled_gradient(extend.get_executor("wiggler").opmap["wiggle"])(x)

    executor = extend.single_op_executor(
        "wiggler", "wiggle", wiggle, lambda x: TensorProxy(like=x), grad_transform=rule
    )
    assert executor.lookasides == {wiggle: executor.opmap["wiggle"]}
    x = A.clone().requires_grad_()
    compiled = thunder.jit(lambda x: wiggle(x), executors=["wiggler"])
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(A, 5.0)) and names(compiled) == ["wiggle"]


def test_lines_may_be_changed_as_they_are_recorded(myex):
    seen = []

    def note(line):
        seen.append((line.sym.name, line.args[1]))

    op = myex.register_operator("plus", like=lambda x, n: x + n, fn=lambda x, n: x + n, bind_postprocess=note)
    other = myex.register_operator(
        "minus",
        like=lambda x, n: x - n,
        fn=lambda x, n: x - n,
        bind_postprocess=lambda line: line.replace(args=(line.args[0], 7)),
    )
    compiled = thunder.jit(lambda x: op(other(x, 1), 2), executors=[myex])
    assert torch.equal(compiled(A), A - 7 + 2) and seen == [("plus", 2)]


def test_an_executor_is_told_before_a_program_is_captured():
    seen = []

    class Starts(extend.Executor):
        def expect_program(self):
            seen.append("told")

    def f(x):
        seen.append("captured")  # capture writes to a copy, the first call to the list
        return x * 2

    compiled = thunder.jit(f, executors=[Starts("starts")])
    for n in (2, 2, 3):
        compiled(torch.ones(n))
    assert seen == ["told", "captured", "captured", "told", "captured"]
