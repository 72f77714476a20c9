"""Fusion executors: regions, their order, what is compiled once, fuel, and torch.compile as one."""

import os
import sys

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.core.trace import Trace
from thunder.errors import MissingImplementationError, OptionError
from thunder.executors.torchex import torch_ex
from thunder.extend import FUEL_LEVEL, FusionExecutor, OperatorExecutor, resolve_executors
from thunder.ops import LTORCH

X, Y = torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0, 2, 6).reshape(2, 3)
ELEMENTWISE = ("add", "mul", "sub", "sin", "cos", "exp", "neg", "relu")


class Joining(FusionExecutor):
    """Joins elementwise operations into one Python function."""

    def __init__(self, name="joined", operations=ELEMENTWISE):
        super().__init__(name)
        self.seen = []
        for operation in operations:
            self.register_supported(LTORCH[operation])

    def fuse(self, region, counter):
        self.seen.append(region)

        def make():
            lines = [line.replace(sym=torch_ex.implementation(line).symbol) for line in region.bound_symbols]
            return Trace(
                "region", region.inputs, lines, region.outputs, region.bound_symbols[0].context.names
            ).python_callable()

        function = self.once(region, make)
        return self.register_temporary_operation(
            f"{self.name}{counter}", function, inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols
        )


def names(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    return [
        line.sym.name
        for line in traces[-1].bound_symbols
        if line.sym.name not in ("python_del", "unpack_sequence", "clear_collection")
    ]


def body(compiled):
    return "\n".join(str(thunder.last_traces(compiled)[-1]).split("\n")[6:])


def test_a_region_is_one_line():
    compiled = thunder.jit(lambda a, b: (a * b).sin() + a, executors=[Joining()])
    assert torch.equal(compiled(X, Y), (X * Y).sin() + X)
    assert (
        body(compiled)
        == """\
def computation(a, b):
  # a: "cpu f32[2, 3]"
  # b: "cpu f32[2, 3]"
  [t2] = joined0(a, b)
    # t0 = ltorch.mul(a, b)  # t0: "cpu f32[2, 3]"
      # t0 = prims.mul(a, b)  # t0: "cpu f32[2, 3]"
    # t1 = ltorch.sin(t0)  # t1: "cpu f32[2, 3]"
      # t1 = prims.sin(t0)  # t1: "cpu f32[2, 3]"
    # t2 = ltorch.add(t1, a)  # t2: "cpu f32[2, 3]"
      # t2 = prims.add(t1, a)  # t2: "cpu f32[2, 3]"
  del a, b
  return t2"""
    )


def test_regions_are_convex_and_single_lines_are_left():
    def program(a, b):
        s = (a + b).sin()
        return s * (s @ s.T).sum(), s.cos().exp(), torch.sigmoid(a).neg()

    compiled = thunder.jit(program, executors=[Joining()])
    for got, want in zip(compiled(X, Y), program(X, Y)):
        assert torch.equal(got, want)
    assert names(compiled) == ["joined0", "permute", "matmul", "sum", "mul", "sigmoid", "neg"]


def test_identical_regions_compile_once():
    def program(x, y):
        for _ in range(3):
            x = torch.relu(x * y + 1) @ torch.eye(3)
        return x

    joining = Joining()
    compiled = thunder.jit(program, executors=[joining])
    assert torch.equal(compiled(X, Y), program(X, Y))
    assert [n for n in names(compiled) if n.startswith("joined")] == ["joined0", "joined1", "joined2"]
    assert joining.compilations == 1
    again = thunder.jit(lambda first, second: torch.relu(first * second + 1), executors=[joining])
    again(X, Y)
    assert joining.compilations == 1, "the region of another program, by other names"
    again(X.double(), Y.double())
    assert joining.compilations == 2, "another dtype is another region"
    thunder.jit(lambda a, b: torch.relu(a * b + 2), executors=[joining])(X, Y)
    thunder.jit(lambda a, b: torch.relu(a * b + 1.0), executors=[joining])(X, Y)
    assert joining.compilations == 4, "another constant is another region, and 1.0 is not 1"


def test_lists_of_tensors_are_opened_where_one_operation_reads_from_another():
    def program(xs, ys):
        return torch._foreach_add(torch._foreach_mul(xs, 2.0), ys), torch._foreach_sub(torch._foreach_neg(ys), 1)

    joining = Joining("lists", operations=("add", "mul"))
    compiled = thunder.jit(program, executors=[joining])
    xs, ys = [X, X + 1, X + 2], [Y, Y + 1, Y + 2]
    for got, want in zip(compiled(xs, ys), program(xs, ys)):
        assert all(map(torch.equal, got, want))
    assert names(compiled) == ["lists0", "lists1", "lists2", "_foreach_neg", "_foreach_sub"], (
        "what nobody fuses stays one call"
    )
    assert joining.compilations == 1
    whole = Joining("whole", operations=("_foreach_add", "_foreach_mul", "mul"))
    compiled = thunder.jit(program, executors=[whole])
    compiled(xs, ys)
    assert names(compiled) == ["whole0", "_foreach_neg", "_foreach_sub"], (
        "an executor that takes lists, and not what they are made of, gets them"
    )


def test_forward_and_backward_are_fused():
    def program(x, y):
        return (x * y).sin() * x

    joining = Joining()
    compiled = thunder.jit(program, executors=[joining])
    x, reference = X.clone().requires_grad_(), X.clone().requires_grad_()
    compiled(x, Y).sum().backward()
    program(reference, Y).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)
    assert names(compiled) == ["joined0"] and "joined0" in names(compiled, backward=True)


def test_the_first_executor_that_executes_or_fuses_takes_a_line():
    operators = OperatorExecutor("operators")
    sine = operators.register_operator("sine", meta=lambda x: TensorProxy(like=x), fn=torch.sin)
    operators.register_implementation(ltorch.sin, sine)
    first, second = Joining("first", ("mul", "cos")), Joining("second")

    def program(x):
        return (x * x).cos().sin().exp().neg()

    for executors, want in (
        ([operators, first, second], ["first0", "sine", "second0"]),
            ([first, operators, second], ["first0", "sine", "second0"]),
        ([second, operators, first], ["second0"]), ([operators, second], ["second0", "sine", "second1"]),
            (["torch", first], ["mul", "cos", "sin", "exp", "neg"]),
    ):  # fmt: skip
        compiled = thunder.jit(program, executors=executors)
        assert torch.equal(compiled(X), program(X)) and names(compiled) == want


def test_composites_are_fused_whole_where_their_parts_are():
    joining = Joining(operations=("mul", "add"))
    mine = OperatorExecutor("mine")
    axpy = mine.register_operator("axpy", like=lambda a, x, y: a * x + y, fn=lambda a, x, y: a * x + y)
    lines = thunder.trace()(lambda x, y: (axpy(2, x, y), torch.sigmoid(x), x.sum()), X, Y).bound_symbols
    assert [joining.can_fuse(line) for line in lines] == [True, False, False]
    assert [joining.can_execute(line) for line in lines] == [False] * 3 and [
        joining.can_execute_or_fuse(line) for line in lines
    ] == [True, False, False]


def test_random_effects_and_symbolic_numbers_are_left():
    joining = Joining()
    joining.register_supported(ltorch.rand_like)
    compiled = thunder.jit(lambda x: (x * x).sin() + torch.rand_like(x), executors=[joining])
    torch.manual_seed(0)
    got = compiled(X)
    torch.manual_seed(0)
    assert torch.equal(got, (X * X).sin() + torch.rand_like(X)) and "rand_like" in names(compiled)
    symbolic = thunder.jit(lambda x, n: (x * n).sin().cos(), executors=[joining], cache="symbolic values")
    for n in (3, 4):
        assert torch.equal(symbolic(X, n), (X * n).sin().cos())
    assert thunder.cache_misses(symbolic) == 1 and names(symbolic)[0] == "mul"


def test_checkers_transforms_and_derivatives_of_supported_operations():
    joining = Joining(operations=("mul", "neg"))
    joining.register_supported(ltorch.add, lambda a, b, *, alpha=1: isinstance(b, TensorProxy))
    joining.register_supported(ltorch.square, execution_transform=lambda x: x * x)
    compiled = thunder.jit(lambda x: ((x * x) + 1, x + x * x, torch.square(x).neg()), executors=[joining])
    for got, want in zip(compiled(X), (X * X + 1, X + X * X, -X.square())):
        assert torch.equal(got, want)
    fused = [line for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion]
    assert [[sub.sym.name for sub in line.subsymbols] for line in fused] == [
        ["mul", "add", "mul", "neg"]  # x * x once
    ] and names(compiled) == ["joined0", "add"]

    from thunder.core.transforms import get_grad, put_grads

    def tenfold(x):
        result = ltorch.mul(x, x)
        put_grads((x,), (ltorch.mul(get_grad(result), 10),))
        return result

    joining.register_supported(ltorch.square, grad_transform=tenfold)
    x = X.clone().requires_grad_()
    thunder.jit(lambda x: torch.square(x).neg(), executors=[joining])(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, -10.0))


def test_fuel_bounds_fusions_and_implementations():
    def program(x, y):
        return (x * 2).sin() @ torch.eye(3), (y + 1).cos() @ torch.eye(3)

    joining = Joining()
    for fuel, want in ((0, 0), (1, 1), (2, 2), (FUEL_LEVEL.UNLIMITED, 2)):
        joining.set_fuel(fuel)
        compiled = thunder.jit(program, executors=[joining])
        for got, wanted in zip(compiled(X, Y), program(X, Y)):
            assert torch.equal(got, wanted)
        # two chains that share nothing, which are regions of their own
        assert sum(line.sym.is_fusion for line in thunder.last_traces(compiled)[-1].bound_symbols) == want
    joining.set_fuel(3)
    assert joining.get_fuel(2) and not joining.get_fuel(2) and joining.get_fuel() and not joining.get_fuel()
    wrong = OperatorExecutor("wrong")
    zero = wrong.register_operator("zero", meta=lambda x: TensorProxy(like=x), fn=torch.zeros_like)
    wrong.register_implementation(ltorch.sin, zero)
    wrong.set_fuel(1)
    got = thunder.jit(lambda x: (x.sin(), x.sin() + 1), executors=[wrong])(X)
    assert torch.equal(got[0], torch.zeros_like(X)) and torch.equal(got[1], X.sin() + 1)
    for bad in (-1, 1.5, None):
        with pytest.raises(OptionError, match="fuel is a number of fusions"):
            wrong.set_fuel(bad)


def test_a_value_called_like_a_region():
    def program(x):
        joined0 = x.sum()
        return (x * x).sin() + joined0

    compiled = thunder.jit(program, executors=[Joining()])
    assert torch.equal(compiled(X), program(X))
    assert [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion] == [
        "joined1"
    ]


def test_fuse_may_decline_and_must_be_there():
    class Declining(Joining):
        def fuse(self, region, counter):
            return None

    compiled = thunder.jit(lambda x: x.sin().cos(), executors=[Declining()])
    assert torch.equal(compiled(X), X.sin().cos()) and names(compiled) == ["sin", "cos"]
    bare = FusionExecutor("bare")
    bare.register_supported(ltorch.sin)
    bare.register_supported(ltorch.cos)
    with pytest.raises(MissingImplementationError, match=r"the fusion executor bare has no fuse\(region, counter\)"):
        thunder.jit(lambda x: x.sin().cos(), executors=[bare])(X)


def test_a_pass_of_its_own():
    class Whole(FusionExecutor):
        def fusion_pass(self, trace):
            self.seen = [line.sym.name for line in trace.bound_symbols]
            return trace

    whole = Whole("whole")
    whole.register_supported(ltorch.sin)
    compiled = thunder.jit(lambda x: x.sin() + 1, executors=[whole])
    assert torch.equal(compiled(X), X.sin() + 1) and whole.seen == ["sin", "add"] and names(compiled) == ["sin", "add"]


def test_views_are_made_outside_of_the_region():
    """What shares memory with what is seen from the lines: results of a region are no views of its inputs or of each
    other."""

    def program(x, y):
        flat = x.view(-1)
        sines = (x * y).sin()
        turned = sines.t()[0]
        x.add_(1)
        sines.mul_(2)
        return flat, sines, turned, flat.neg(), (turned + 1).exp()

    joining = Joining(operations=(*ELEMENTWISE, "view", "permute", "getitem"))
    compiled = thunder.jit(program, executors=[joining])
    mine, theirs = X.clone(), X.clone()
    for _ in range(2):
        got, want = compiled(mine, Y), program(theirs, Y)
        for a, b in zip(got, want):
            assert torch.equal(a, b)
        assert torch.equal(mine, theirs)
        assert got[0].data_ptr() == mine.data_ptr() and got[2].data_ptr() == got[1].data_ptr()
    for region in joining.seen:
        producers = {o: line for line in region.bound_symbols for o in line.outputs}
        assert not any(producers[o].sym.name in ("view", "permute", "getitem") for o in region.outputs)


def test_only_views_are_no_region():
    joining = Joining(operations=("view", "permute", "getitem"))
    compiled = thunder.jit(lambda x: x.view(3, 2).t()[1], executors=[joining])
    assert torch.equal(compiled(X), X.view(3, 2).t()[1]) and joining.seen == []


# ----------------------------------------------------------------------------------------------------------------
# torch.compile


@pytest.mark.slow
def test_torch_compile_takes_regions():
    def program(x, w):
        y = torch.nn.functional.gelu(x @ w) * 2
        return torch.nn.functional.dropout(y.softmax(-1) + x.sum(), 0.5)

    ex = thunder.get_executor("torchcompile")
    if ex.unavailable() is not None:
        pytest.skip(ex.unavailable())
    torch.manual_seed(0)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    compiled = thunder.jit(program, executors=["torchcompile"])
    torch.manual_seed(1)
    got = compiled(x, w)
    torch.manual_seed(1)
    want = program(x, w)
    torch.testing.assert_close(got, want)
    assert torch.equal(got == 0, want == 0), "the mask of dropout is PyTorch's"
    assert names(compiled) == ["TorchCompile0", "dropout"]
    fused = thunder.last_traces(compiled)[-1].bound_symbols[0]
    assert [line.sym.name for line in fused.subsymbols] == ["matmul", "gelu", "mul", "softmax", "sum", "add"]


def test_without_a_compiler_it_takes_nothing_and_says_why(monkeypatch):
    from thunder import extend
    from thunder.executors import inductor

    monkeypatch.setenv("CXX", os.path.join(os.path.dirname(sys.executable), "no-such-compiler"))
    monkeypatch.setattr(inductor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extend, "_warned", set())
    with pytest.warns(
        UserWarning,
        match="the executor torchcompile has no effect here: Inductor needs a C\\+\\+ compiler on the CPU, and none "
        "is found",
    ) as caught:
        compiled = thunder.jit(lambda x: x.sin().cos(), executors=["torchcompile"])
        thunder.jit(lambda x: x, executors=["torchcompile"])
    assert len(caught) == 1 and caught[0].filename == __file__
    assert torch.equal(compiled(X), X.sin().cos()) and names(compiled) == ["sin", "cos_"]
    assert resolve_executors(None)[-1].name == "python"


def test_fused_lines_under_checks_and_derivatives_of_functions():
    from thunder.core.transforms import grad

    def program(x, y):
        return ((x * y).sin() + x).sum()

    checked = thunder.jit(program, executors=[Joining()], debug_options=thunder.DebugOptions(check_traces=True))
    x = X.clone().requires_grad_()
    checked(x, Y).backward()
    torch.testing.assert_close(x.grad, (X * Y).cos() * Y + 1)
    (gx, gy) = grad(thunder.jit(program, executors=[Joining()]))(X, Y)
    torch.testing.assert_close(gx, x.grad)
    torch.testing.assert_close(gy, (X * Y).cos() * X)


def test_what_a_fusion_executor_takes_is_computed_again_where_that_saves_bytes():
    """Five elementwise values are saved without the executor; with it only what they are made of, and the last, which
    is the result."""

    def program(x, w):
        return ((x @ w).sin().exp().cos() * 2).exp()

    x, w = torch.randn(32, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    sizes = {}
    for name, executors in (("torch", None), ("fused", [Joining()])):
        compiled = thunder.jit(program, executors=executors)
        gradients = torch.autograd.grad(compiled(x, w).sum(), (x, w))
        sizes[name] = thunder.examine.saved_for_backward(compiled).nbytes, gradients
    assert all(torch.equal(a, b) for a, b in zip(sizes["torch"][1], sizes["fused"][1]))
    assert sizes["fused"][0] == 32 * 8 * 4 < sizes["torch"][0]
    assert any("joined" in n for n in names(compiled, backward=True)) and "bw_" in str(
        thunder.last_backward_traces(compiled)[-1]
    )


def test_a_copy_of_a_cheap_value_reads_a_copy():
    """The last region computes `a` and `b` again, which are stored for products: `a` first, though it reads `b`
    first."""

    class Copying(Joining):
        def is_cheap(self, line):
            return True

    def program(x, y, w):
        a = x * y + 1
        b = a + a @ w
        return (b * (b @ w)) * a

    def last_region(*inputs):
        compiled = thunder.jit(program, executors=[executor := Copying()])
        assert torch.equal(compiled(*inputs), program(*inputs))
        return [line.sym.name for line in executor.seen[-1].bound_symbols]

    assert last_region(*map(torch.randn, ((4, 1), (1, 4), (4, 1)))) == ["mul", "add", "add", "mul", "mul"]
    square = torch.randn(4, 4)
    assert last_region(square, 2, square) == ["mul", "mul"], "to read what is stored takes no more than its operands"


@pytest.mark.parametrize("first", ["own", "joined"])
def test_what_an_earlier_executor_has_taken_joins_no_region(first):
    own, joining, calls = OperatorExecutor("own"), Joining(), []
    sine = own.register_operator("own_sin", like=lambda a: ltorch.sin(a), fn=lambda a: calls.append(a) or a.sin())
    own.register_implementation(ltorch.sin, sine)
    executors = [own, joining] if first == "own" else [joining, own]
    compiled = thunder.jit(lambda a, b: (a * b).sin() + a, executors=executors)
    assert torch.equal(compiled(X, Y), (X * Y).sin() + X)
    assert (len(calls), "own_sin" in names(compiled)) == ((1, True) if first == "own" else (0, False))
