"""Derivatives, rules, passes, transforms and executors that are wrong: each is an error that names what is wrong.

Each program here was written before the checks were read. A case is a function that compiles and runs a program, and
words of which the error, or its notes, has one: the name of the wrong part, or of the operation that it belongs to.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.symbol import OpTags
from thunder.core.transforms import get_grad, put_grad, put_grads
from thunder.errors import FallbackWarning
from thunder.extend import FusionExecutor, OperatorExecutor

X = torch.linspace(-1, 1, 6).reshape(2, 3)
CASES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {}
NUMBERS = itertools.count()


def case(name: str, *words: str):
    def add(run):
        CASES[name] = run, words
        return run

    return add


def leaf() -> torch.Tensor:
    return X.clone().requires_grad_()


def trained(program, **options):
    x = leaf()
    thunder.jit(program, **options)(x).sum().backward()
    return x.grad


# ---------------------------------------------------------------------------------------- torch.autograd.Function


def function(backward, forward=lambda ctx, x: x * 2):
    class Wrong(torch.autograd.Function):
        pass

    Wrong.forward, Wrong.backward = staticmethod(forward), staticmethod(backward)
    return lambda: trained(lambda x: Wrong.apply(x))


def raising(*_, **__):
    raise ValueError("raised by the user's code")


BACKWARDS = {
    "nothing at all": lambda ctx, g: (),
    "two gradients": lambda ctx, g: (g, g),
    "a row": lambda ctx, g: g[0],
    "more columns": lambda ctx, g: torch.cat([g, g], 1),
    "a number": lambda ctx, g: 2.0,
    "a text": lambda ctx, g: "gradient",
    "a dict": lambda ctx, g: {"x": g},
    "a complex tensor": lambda ctx, g: g.to(torch.complex64),
    "a meta tensor": lambda ctx, g: g.to("meta"),
    "an error": raising,
    "a list in a tuple": lambda ctx, g: ([g],),
    "a tensor that was not saved": lambda ctx, g: g * ctx.saved_tensors[0],
    "an attribute that is not there": lambda ctx, g: g * ctx.scale,
}
for what, backward in BACKWARDS.items():
    case(f"function: {what}", "Wrong", "raised by the user's code", "tuple index", "scale")(function(backward))
case("function: saves a list", "save_for_backward")(
    function(lambda ctx, g: g, lambda ctx, x: (ctx.save_for_backward([x]), x * 2)[1])
)
case("function: no backward", "backward", "Wrong")(
    lambda: trained(
        lambda x: type("Wrong", (torch.autograd.Function,), {"forward": staticmethod(lambda c, x: x * 2)}).apply(x)
    )
)

# ------------------------------------------------------------------------------------------------- thunder.opaque


def opaque(backward, meta=lambda x, y: torch.empty_like(x)):
    operation = thunder.opaque(lambda x, y: x * y, meta=meta, backward=backward, name="wrong")
    return lambda: trained(lambda x: operation(x, x.detach()))


OPAQUES = {
    "one of two": lambda args, y, g: (g,),
    "three of two": lambda args, y, g: (g, g, g),
    "a row": lambda args, y, g: (g[0], None),
    "transposed": lambda args, y, g: (g.t(), None),
    "a number": lambda args, y, g: (1.0, None),
    "a list": lambda args, y, g: ([g], None),
    "a complex tensor": lambda args, y, g: (g * 1j, None),
    "a meta tensor": lambda args, y, g: (g.to("meta"), None),
    "too few parameters": lambda args: args,
    "an error": raising,
}
for what, backward in OPAQUES.items():
    case(f"opaque: {what}", "wrong")(opaque(backward))
case("opaque: no backward", "wrong")(opaque(None))
case("opaque: meta of another shape", "wrong")(opaque(lambda a, y, g: (g, None), lambda x, y: torch.empty(7)))
case("opaque: meta of another dtype", "wrong")(opaque(lambda a, y, g: (g, None), lambda x, y: x.double()))
case("opaque: meta raises", "wrong", "raised by the user's code")(opaque(lambda a, y, g: (g, None), raising))

# ------------------------------------------------------------------------------------------------ grad transforms


def differentiated(grad_transform, **more):
    executor = OperatorExecutor(f"bad{next(NUMBERS)}")
    operation = executor.register_operator("wrong", like=lambda x, y: x * y, fn=lambda x, y: x * y)
    executor.register_implementation(operation, operation, grad_transform=grad_transform(operation), **more)
    return trained(lambda x: operation(x, x.detach() * 2), executors=[executor])


def rule(gradients, result=lambda operation, x, y: operation(x, y)):
    def transform_of(operation):
        def transform(x, y):
            z = result(operation, x, y)
            gradients(x, y, z)
            return z

        return transform

    return transform_of


GRADS = {
    "a row": rule(lambda x, y, z: put_grad(x, get_grad(z)[0][:2])),
    "a number": rule(lambda x, y, z: put_grad(x, 1.0)),
    "complex": rule(lambda x, y, z: put_grad(x, get_grad(z) * 1j)),
    "of a value that is no argument": rule(lambda x, y, z: put_grad(ltorch.sin(x), get_grad(z))),
    "one of two": rule(lambda x, y, z: put_grads((x, y), (get_grad(z),))),
    "three of two": rule(lambda x, y, z: put_grads((x, y), (get_grad(z),) * 3)),
    "of an argument that is not there": rule(lambda x, y, z: put_grad(None, get_grad(z))),
    "raises": rule(lambda x, y, z: raising()),
    "returns two": rule(lambda x, y, z: None, lambda op, x, y: (op(x, y), op(x, y))),
    "returns nothing": rule(lambda x, y, z: None, lambda op, x, y: None),
    "returns another shape": rule(lambda x, y, z: put_grad(x, y), lambda op, x, y: op(x, y)[0]),
    "returns another dtype": rule(lambda x, y, z: put_grad(x, y), lambda op, x, y: op(x, y).to(torch.float64)),
    "takes one argument": lambda operation: lambda x: operation(x, x),
    "is no function": lambda operation: 3,
    "gives no gradient": rule(lambda x, y, z: None),
    "cotangent of no result": rule(lambda x, y, z: put_grad(x, get_grad(ltorch.sin(x)))),
}
for what, transform in GRADS.items():
    case(f"grad transform: {what}", "wrong", "grad_transform")(lambda transform=transform: differentiated(transform))


def test_gradients_that_read_no_cotangent_count():
    gradient = differentiated(rule(lambda x, y, z: put_grad(x, ltorch.cos(y))))
    torch.testing.assert_close(gradient, (2 * X).cos())
    assert differentiated(rule(lambda x, y, z: put_grads((x, y), (None, None)))) is None


@case("register_grad: a name that is none", "ltorch.tanhh")
def _():
    thunder.core.transforms.register_grad("ltorch.tanhh", lambda x: x)


@case("register_grad: of a function that is no operation", "raising")
def _():
    thunder.core.transforms.register_grad(raising, lambda x: x)


@case("register_grad: no function", "register_grad")
def _():
    thunder.core.transforms.register_grad("ltorch.tanh", 3)


@case("vjp: cotangents of another structure", "cotangents", "structure")
def _():
    thunder.core.transforms.vjp(lambda x: (x, x))((X,), X)


# ------------------------------------------------------------------------------------------------------ executors


def executed(register):
    executor = OperatorExecutor(f"bad{next(NUMBERS)}")
    register(executor)
    thunder.jit(lambda x: torch.tanh(x), executors=[executor])(X)


def own(executor, fn=torch.tanh, like=lambda x: ltorch.tanh(x)):
    return executor.register_operator("wrong", like=like, fn=fn)


def implemented(**options):
    return lambda e: e.register_implementation("ltorch.tanh", **options)


EXECUTORS = {
    "a name that is none": lambda e: e.register_implementation("ltorch.tanhh", own(e)),
    "an operation of another shape": lambda e: e.register_implementation("ltorch.tanh", own(e, like=lambda x: x[0])),
    "a function of another shape": lambda e: e.register_implementation("ltorch.tanh", own(e, lambda x: x[0].clone())),
    "a function of another dtype": lambda e: e.register_implementation("ltorch.tanh", own(e, lambda x: x.double())),
    "a function of two arguments": lambda e: e.register_implementation("ltorch.tanh", own(e, lambda x, y: x)),
    "a function that raises": lambda e: e.register_implementation("ltorch.tanh", own(e, raising)),
    "a checker that raises": lambda e: e.register_implementation("ltorch.tanh", own(e), checker=raising),
    "a checker of two arguments": lambda e: e.register_implementation("ltorch.tanh", own(e), checker=lambda x, y: True),
    "a checker that is no function": lambda e: e.register_implementation("ltorch.tanh", own(e), checker=True),
    "an execution transform of another shape": implemented(execution_transform=lambda x: ltorch.sum(x)),
    "an execution transform of another dtype": implemented(execution_transform=lambda x: x.to(torch.int64)),
    "an execution transform without result": implemented(execution_transform=lambda x: None),
    "an execution transform that raises": implemented(execution_transform=raising),
    "an execution transform of two arguments": implemented(execution_transform=lambda x, y: x),
    "an operation that is none": lambda e: e.register_implementation("ltorch.tanh", torch.tanh),
    "nothing": lambda e: e.register_implementation("ltorch.tanh"),
    "a number in the place of an operation": lambda e: e.register_implementation(5, execution_transform=ltorch.sin),
    "a checker that returns nothing": lambda e: e.register_implementation(
        "ltorch.tanh", own(e), checker=lambda x: None
    ),
    "a checker that computes": lambda e: e.register_implementation(
        "ltorch.tanh", own(e), checker=lambda x: x.sum() > 0
    ),
}
for what, register in EXECUTORS.items():
    words = (
        "wrong",
        "ltorch.tanh",
        "register_implementation",
        "checker",
        "execution_transform",
        "is no operation",
        "lambda x: torch.tanh(x)",
    )
    case(f"executor: {what}", *words)(lambda register=register: executed(register))

OPERATORS_OF_USERS = {
    "name with a space": ("my wrong one", lambda x: thunder.TensorProxy(like=x), None),
    "name that is a keyword": ("lambda", lambda x: thunder.TensorProxy(like=x), None),
    "replaces a text": ("wrong", lambda x: thunder.TensorProxy(like=x), "torch.tanh"),
    "meta returns the argument": ("wrong", lambda x: x, torch.tanh),
}
for what, (name, meta, replaces) in OPERATORS_OF_USERS.items():
    case(f"operator: {what}", name)(
        lambda name=name, meta=meta, replaces=replaces: executed(
            lambda e: e.register_operator(name, meta=meta, fn=lambda x: torch.tanh(x), replaces=replaces)
        )
    )


def test_errors_of_a_meta_are_in_the_warning():
    executor = OperatorExecutor(f"bad{next(NUMBERS)}")
    wrong = executor.register_operator("wrong", meta=lambda x: x.no_such_thing, fn=torch.tanh)
    with pytest.warns(FallbackWarning, match="raised by the meta of wrong"):
        assert torch.equal(thunder.jit(wrong, executors=[executor], fallback="eager")(X), X.tanh())


def test_one_function_may_be_two_opaque_operations():
    """Each has the backward that it was made with."""

    def twice(x):
        return x.detach() * 2

    def derivative(scale):
        operation = thunder.opaque(twice, meta=torch.empty_like, backward=lambda args, result, g: g * scale)
        return trained(lambda x: operation(x))

    assert torch.equal(derivative(2.0), torch.full_like(X, 2)) and torch.equal(derivative(3.0), torch.full_like(X, 3))


# ---------------------------------------------------------------------------------------------------------- rules


def ruled(pattern, replacement, when=None):
    thunder.jit(lambda x: torch.exp(torch.tanh(x)), rules=[thunder.rule(pattern, replacement, when, name="wrong")])(X)


def pattern(x):
    return torch.exp(torch.tanh(x))


RULES = {
    "pattern is no function": (3, pattern),
    "replacement is no function": (pattern, "exp"),
    "condition is no function": (pattern, pattern, 1),
    "pattern without operations": (lambda x: x, lambda x: x),
    "pattern of numbers": (lambda x: 3, lambda x: x),
    "pattern raises": (raising, pattern),
    "replacement raises": (pattern, raising),
    "replacement of another shape": (pattern, lambda x: torch.exp(x).sum(0)),
    "replacement of another rank": (pattern, lambda x: torch.exp(x)[None]),
    "replacement of another dtype": (pattern, lambda x: torch.exp(x).to(torch.float64)),
    "replacement on another device": (pattern, lambda x: torch.exp(x).to("meta")),
    "replacement returns two": (pattern, lambda x: (x, x)),
    "replacement returns nothing": (pattern, lambda x: None),
    "replacement returns a number": (pattern, lambda x: 3.0),
    "replacement has another parameter": (pattern, lambda x, y: torch.exp(y)),
    "replacement has no parameter": (pattern, lambda: torch.ones(2, 3)),
    "replacement writes to its argument": (pattern, lambda x: x.tanh_().exp()),
    "condition raises": (pattern, pattern, raising),
    "condition has two parameters": (pattern, pattern, lambda x, y: True),
    "condition returns nothing": (pattern, pattern, lambda x: None),
    "parameters in another order": (lambda x, y: x.exp() - y.tanh(), lambda y, x: x.exp() - y.tanh()),
    "condition decides by values": (pattern, lambda x: torch.tanh(torch.exp(x)), lambda x: (x > 0).all()),
}
for what, parts in RULES.items():
    case(f"rule: {what}", "wrong", "thunder.rule")(lambda parts=parts: ruled(*parts))


case("rule: the replacement cannot be traced", "its replacement cannot be traced")(lambda: ruled(pattern, raising))


@case("rule: that is none", "rules")
def _():
    thunder.jit(lambda x: x, rules=[pattern])(X)


# --------------------------------------------------------------------------------------------------------- passes


def passed(run, after="Dead Code Elimination", program=None):
    def program_of_two(x, y):
        t = torch.tanh(x)
        return torch.exp(t), t.sum(0), y

    wrong_pass = thunder.Pass("Wrong One", run)
    thunder.jit(program or program_of_two, passes=lambda passes: passes.after(after, wrong_pass))(X, X.clone())


def without(trace, name):
    return trace.replace(bound_symbols=[b for b in trace.bound_symbols if b.sym.name != name])


def changed(trace, name, change):
    return trace.replace(bound_symbols=[change(b) if b.sym.name == name else b for b in trace.bound_symbols])


def with_other_output(trace, **changes):
    def change(b):
        return b.replace(output=b.output.replace(**changes))

    return changed(trace, "exp", change)


def printing(x, y):
    x.mul_(2)
    y.add_(1)
    return x + y


PASSES = {
    "returns nothing": lambda t, _: None,
    "returns text": lambda t, _: str(t),
    "returns operations": lambda t, _: list(t.bound_symbols),
    "raises": raising,
    "takes one argument": lambda t: t,
    "leaves an operation out": lambda t, _: without(t, "tanh"),
    "leaves all operations out": lambda t, _: t.replace(bound_symbols=()),
    "turns the order round": lambda t, _: t.replace(bound_symbols=t.bound_symbols[::-1]),
    "computes a value twice": lambda t, _: t.replace(bound_symbols=(*t.bound_symbols, *t.bound_symbols)),
    "returns one result less": lambda t, _: t.replace(output=t.output[:1]),
    "returns one result more": lambda t, _: t.replace(output=(*t.output, t.output[0])),
    "returns an intermediate value of another shape": lambda t, _: t.replace(output=(t.output[1], *t.output[1:])),
    "changes a shape": lambda t, _: with_other_output(t, shape=(3, 2)),
    "changes a dtype": lambda t, _: with_other_output(t, dtype=thunder.float64),
    "changes a device": lambda t, _: with_other_output(t, device="meta"),
    "sums over another dimension": lambda t, _: changed(t, "sum", lambda b: b.replace(args=(b.args[0], 1))),
    "gives an operation one argument more": lambda t, _: changed(t, "exp", lambda b: b.replace(args=b.args * 2)),
    "gives an operation no argument": lambda t, _: changed(t, "exp", lambda b: b.replace(args=())),
    "leaves an argument out": lambda t, _: t.replace(args=t.args[1:]),
    "exchanges arguments": lambda t, _: t.replace(args=t.args[::-1]),
    "exchanges results": lambda t, _: t.replace(output=(t.output[2], t.output[1], t.output[0])),
    "writes to the trace": lambda t, _: setattr(t, "output", None),
    "replaces a field that is none": lambda t, _: t.replace(body=()),
    "invents a value": lambda t, _: changed(t, "exp", lambda b: b.replace(args=(b.output.replace(name="new"),))),
}
for what, run in PASSES.items():
    case(f"pass: {what}", "Wrong One")(lambda run=run: passed(run))


def telling(x, y):
    print("told")
    return x + y


case("pass: leaves a call of the host out", "Wrong One")(
    lambda: passed(lambda t, _: without(t, "host_call"), program=telling)
)
case("pass: its condition raises", "Wrong One")(lambda: thunder.jit(torch.tanh, passes=wrong_condition(raising))(X))
case("pass: its condition returns nothing", "Wrong One")(
    lambda: thunder.jit(torch.tanh, passes=wrong_condition(lambda t, lowering: None))(X)
)


def wrong_condition(when):
    one = thunder.Pass("Wrong One", lambda t, _: t, when=when)
    return lambda passes: passes.after("Dead Code Elimination", one)


case("pass: leaves a write out", "Wrong One")(
    lambda: passed(
        lambda t, _: t.replace(bound_symbols=[b for b in t.bound_symbols if OpTags.DONT_DCE not in b.sym.tags]),
        program=printing,
    )
)
case("pass: before a fact holds", "Wrong One")(
    lambda: thunder.jit(
        lambda x: x, passes=lambda p: p.before("Rules", thunder.Pass("Wrong One", lambda t, _: t, needs="executors"))
    )
)
case("pass: that needs a fact that is none", "Wrong One")(
    lambda: thunder.jit(
        lambda x: x, passes=lambda p: p.after("Rules", thunder.Pass("Wrong One", lambda t, _: t, needs="operatoins"))
    )
)
case("pass: two of one name", "Wrong One")(
    lambda: thunder.jit(
        lambda x: x, passes=lambda p: p.after("Rules", *[thunder.Pass("Wrong One", lambda t, _: t)] * 2)
    )
)
case("pass: that is no function", "Wrong One")(lambda: thunder.Pass("Wrong One", 3))
for necessary in ("Without Cotangents", "Saved Collections", "Transforms", "Partition", "Transform for execution"):
    case(f"passes: without {necessary}", necessary, "cut", "executors", "joint")(
        lambda name=necessary: thunder.jit(lambda x: x, passes=lambda p: p.without(name))
    )
case("passes: behind a name that is none", "Rulez")(
    lambda: thunder.jit(lambda x: x, passes=lambda p: p.after("Rulez", thunder.Pass("Mine", lambda t, _: t)))
)
case("passes: a text", "passes=")(lambda: thunder.jit(lambda x: x, passes="Rules"))
case("passes: functions", "passes=")(lambda: thunder.jit(lambda x: x, passes=[lambda t, _: t]))

# ----------------------------------------------------------------------------------------------------- transforms


def transformed(method, run, module=False):
    kind = type("WrongOne", (thunder.Transform,), {method: run})
    thunder.jit(torch.nn.Linear(3, 3) if module else torch.tanh, transforms=[kind()])(X)


TRANSFORMS = {
    "returns nothing": lambda self, trace, **_: None,
    "raises": raising,
    "leaves an operation out": lambda self, trace, **_: trace.replace(bound_symbols=trace.bound_symbols[1:]),
    "returns something else": lambda self, trace, **_: trace.replace(output=trace.args[0].replace(name="t9")),
}
for what, run in TRANSFORMS.items():
    case(f"transform: {what}", "WrongOne")(lambda run=run: transformed("transform_trace_post_optimization", run))
case("transform before the prologue: returns nothing", "WrongOne")(
    lambda: transformed("transform_traces_pre_prologue", lambda self, *traces, **_: None)
)
case("transform before the prologue: other order", "WrongOne")(
    lambda: transformed("transform_traces_pre_prologue", lambda self, p, c, e, **_: (c, p, e))
)
case("transform: a hook that is none", "WrongOne", "transform_trace_post_optimization")(
    lambda: transformed("transform_trace_post_optimisation", lambda self, trace, **_: trace)
)
case("transform before the prologue: raises", "WrongOne")(lambda: transformed("transform_traces_pre_prologue", raising))
case("transform of a module: raises", "WrongOne")(lambda: transformed("transform_module", raising, module=True))
case("transform: that is none", "transforms")(lambda: thunder.jit(torch.tanh, transforms=[3]))
case("transform: whose executors are none", "WrongOne")(lambda: transformed("executors", [3]))


# -------------------------------------------------------------------------------------------- operators of PyTorch's
LIBRARIES = []


def of_library(backward=None, setup=None, fake=lambda x, y: torch.empty_like(x), vmap=None, run=lambda x, y: x * y):
    def compiled():
        name = f"thunder_bad::wrong{next(NUMBERS)}"
        operator = torch.library.custom_op(name, run, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor")
        operator.register_fake(fake)
        if backward is not None:
            operator.register_autograd(backward, setup_context=setup or (lambda ctx, inputs, output: None))
        if vmap is not None:
            operator.register_vmap(vmap)
            return thunder.jit(torch.func.vmap(lambda x: operator(x, x)))(X)
        return trained(lambda x: operator(x, x.detach()))

    return compiled


OPERATORS = {
    "one gradient of two": dict(backward=lambda ctx, g: (g,)),
    "three gradients of two": dict(backward=lambda ctx, g: (g, g, g)),
    "a row": dict(backward=lambda ctx, g: (g[0, :2], None)),
    "a number": dict(backward=lambda ctx, g: (2.0, None)),
    "complex": dict(backward=lambda ctx, g: (g * 1j, None)),
    "backward raises": dict(backward=raising),
    "setup raises": dict(backward=lambda ctx, g: (g, None), setup=raising),
    "setup of one parameter": dict(backward=lambda ctx, g: (g, None), setup=lambda ctx: None),
    "fake of another shape": dict(fake=lambda x, y: x.new_empty(5)),
    "fake of another dtype": dict(fake=lambda x, y: torch.empty_like(x, dtype=torch.float64)),
    "fake on another device": dict(fake=lambda x, y: torch.empty_like(x, device="meta")),
    "fake raises": dict(fake=raising),
    "fake of one parameter": dict(fake=lambda x: x),
    "no derivative": dict(),
    "vmap raises": dict(vmap=raising),
    "vmap returns a tensor": dict(vmap=lambda info, dims, x, y: x * y),
    "vmap of another dimension": dict(vmap=lambda info, dims, x, y: (x * y, 5)),
    "vmap of another size": dict(vmap=lambda info, dims, x, y: ((x * y)[:1], 0)),
}
# some are eager's words
WORDS = "raised by the user's code", "expected Variable", "Expected isFloatingType", "keyword argument 'inputs'", "vmap"
for what, arguments in OPERATORS.items():
    case(f"operator: {what}", "wrong", *WORDS)(of_library(**arguments))

# -------------------------------------------------------------------------------------------- halves of derivatives


def halves(forward, backward):
    def run():
        executor = OperatorExecutor(f"bad{next(NUMBERS)}")
        operation = executor.register_operator("wrong", like=lambda x, y: x * y, fn=lambda x, y: x * y)
        thunder.core.transforms.register_augmented_forward(operation)(lambda x, y: forward(operation, x, y))
        if backward is not None:
            thunder.core.transforms.register_backward(operation)(backward)
        return trained(lambda x: operation(x, x.detach() * 2), executors=[executor])

    return run


def dual(operation, x, y):
    return thunder.core.transforms.VJPDual(operation(x, y), (x, y))


HALVES = {
    "no backward": (dual, None),
    "no pair": (lambda op, x, y: op(x, y), lambda x, y, g: (g, g)),
    "a triple": (lambda op, x, y: (op(x, y), x, y), lambda x, y, g: (g, g)),
    "another shape": (lambda op, x, y: (op(x, y)[0], (x, y)), lambda x, y, g: (g, g)),
    "one gradient": (dual, lambda x, y, g: (g,)),
    "three gradients": (dual, lambda x, y, g: (g, g, g)),
    "a row": (dual, lambda x, y, g: (g[0, :2], g)),
    "a number": (dual, lambda x, y, g: (1, g)),
    "one residual less": (lambda op, x, y: (op(x, y), (x,)), lambda x, y, g: (g * x, g * y)),
    "raises": (dual, raising),
}
for what, parts in HALVES.items():
    case(f"halves: {what}", "wrong")(halves(*parts))

# ------------------------------------------------------------------------------------------------------ fusions


def fused(fuse):
    kind = type("WrongFuser", (FusionExecutor,), {"can_fuse": lambda self, operation: True, "fuse": fuse})
    executor = kind(f"wrong{next(NUMBERS)}")
    thunder.jit(lambda x: (torch.tanh(x) * 2).sum(0), executors=[executor])(X)


FUSIONS = {
    "raises": raising,
    "the trace": lambda self, region, number: region,
}
for what, fuse in FUSIONS.items():
    case(f"fusion: {what}", "wrong", "WrongFuser")(lambda fuse=fuse: fused(fuse))
case("fusion: can_fuse raises", "wrong", "WrongFuser")(
    lambda: thunder.jit(
        lambda x: torch.tanh(x),
        executors=[
            type("WrongFuser", (FusionExecutor,), {"can_fuse": raising, "fuse": raising})(f"wrong{next(NUMBERS)}")
        ],
    )(X)
)

# -------------------------------------------------------------------------------------------------- rules, once more


def ruled_at(at, pattern, replacement):
    x = leaf()
    rules = [thunder.rule(pattern, replacement, name="wrong", at=at)]
    thunder.jit(lambda x: torch.exp(torch.tanh(x)) * 2, rules=rules)(x).sum().backward()


for at in ("captured", "joint", "cut"):
    case(f"rule at {at}: another shape", "wrong")(lambda at=at: ruled_at(at, torch.tanh, lambda x: torch.tanh(x)[0]))
    case(f"rule at {at}: another shape in the program", "wrong")(
        lambda at=at: ruled_at(at, torch.tanh, lambda x: torch.tanh(x) if x.shape[-1] == 2 else torch.tanh(x)[:1])
    )
    case(f"rule at {at}: raises in the program", "wrong")(
        lambda at=at: ruled_at(at, torch.tanh, lambda x: torch.tanh(x) if x.shape[-1] == 2 else raising())
    )
case("rule: a stage that is none", "wrong")(lambda: ruled_at("after", torch.tanh, torch.tanh))
case("rule: a result without derivative", "wrong")(
    lambda: ruled_at("captured", torch.tanh, lambda x: torch.tanh(x).detach())
)
case("rule: examples that do not fit", "wrong")(lambda: thunder.rule(pattern, pattern, name="wrong", examples=[]))
case("rule: a pattern with a parameter that nothing reads", "wrong")(
    lambda: thunder.rule(lambda x, y: torch.exp(x), lambda x, y: torch.exp(x), name="wrong")
)

# ------------------------------------------------------------------------------------------- modules and options


def overridden(change):
    module = thunder.jit(
        torch.nn.Linear(3, 3), transforms=[type("WrongOne", (thunder.Transform,), {"transform_module": change})()]
    )
    module(X)


MODULES = {
    "a parameter of another shape": lambda self, m: m._overrides_parameters.update(
        weight=torch.nn.Parameter(torch.ones(2, 2))
    ),
}
for what, change in MODULES.items():
    case(f"module: {what}", "weight", "WrongOne")(lambda change=change: overridden(change))
OPTIONS = {
    "cache": dict(cache="sometimes"),
    "numerics": dict(numerics="exactly"),
    "rng": dict(rng="mine"),
    "fallback": dict(fallback="perhaps"),
    "sharp_edges": dict(sharp_edges="dull"),
    "tiers": dict(tiers=-1),
    "dynamic": dict(dynamic="yes"),
    "executors": dict(executors=["no_such_executor"]),
    "transforms": dict(transforms=3),
    "rules": dict(rules=3),
    "graphs": dict(graphs="no"),
    "memory_budget": dict(memory_budget=7),
}
for what, options in OPTIONS.items():
    case(f"option: {what}", what, "no_such_executor")(lambda options=options: thunder.jit(torch.tanh, **options)(X))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(name):
    run, words = CASES[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011, B017  whatever eager PyTorch raises for the same
        run()
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    lines = {entry.name for entry in traceback.extract_tb(caught.value.__traceback__)}
    assert any(word in text for word in words), text
    assert type(caught.value) is not AssertionError and lines, text
