"""What users declare of operations is compared with the results of the first call, and named where it is wrong."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import thunder
import thunder.torch as ltorch
from thunder.core.proxies import TensorProxy
from thunder.errors import DeclarationError
from thunder.extend import FusionExecutor, OperatorExecutor
from thunder.transforms.check_results import _Check

X = torch.linspace(-1, 1, 12).reshape(3, 4)
NUMBERS = itertools.count()

# what an operation may do wrong with what `right` gives, and the words of the error
WRONG = {
    "shape": (lambda y: y[:1].clone(), r'"cpu f32\[1, 4\]"'),
    "rank": (lambda y: y.sum(), r'"cpu f32\[\]"'),
    "transposed": (lambda y: y.t().contiguous(), r'"cpu f32\[4, 3\]"'),
    "one more dimension": (lambda y: y[None].clone(), r'"cpu f32\[1, 3, 4\]"'),
    "dtype": (lambda y: y.double(), r'"cpu f64\[3, 4\]"'),
    "device": (lambda y: y.to("meta"), r'"meta f32\[3, 4\]"'),
    "a number": (lambda y: 3.0, "returned a float"),
    "a list": (lambda y: [y], "returned a list"),
    "nothing": (lambda y: None, "returned a NoneType"),
    "sparse": (lambda y: y.to_sparse(), "layout"),
}


def opaque(function):
    return thunder.opaque(function, meta=lambda x: torch.empty_like(x), name="entering")


def of_executor(function):
    executor = OperatorExecutor(f"entering{next(NUMBERS)}")
    return executor.register_operator("entering", meta=lambda x: TensorProxy(like=x), fn=function)


def registered(function):
    """An operator of torch.library, and not of torch.library.custom_op, which looks at results itself."""
    name = f"entering{next(NUMBERS)}"
    library = torch.library.Library("thunder_entrances", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, function, "CPU")
    torch.library.register_fake(f"thunder_entrances::{name}", lambda x: torch.empty_like(x), lib=library)
    operation = getattr(torch.ops.thunder_entrances, name)
    LIBRARIES.append(library)
    return operation


LIBRARIES: list = []


def compiled_with(entrance, function, after=lambda y: y):
    operation = entrance(function)
    executors = [operation.executor] if entrance is of_executor else None

    def program(x):
        return after(operation(x))  # the line

    return thunder.jit(program, executors=executors)


def text_of(caught) -> str:
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


# PyTorch's dispatcher looks itself at what is no tensor
CASES = [(e, w) for e in (opaque, of_executor) for w in WRONG]
CASES += [(registered, w) for w in WRONG if w not in ("a number", "a list", "nothing")]


@pytest.mark.parametrize("entrance, wrong", CASES)
def test_a_wrong_declaration_is_named_where_it_enters(entrance, wrong):
    change, words = WRONG[wrong]
    compiled = compiled_with(entrance, lambda x: change(x * 2))
    with pytest.raises(DeclarationError, match=words) as caught:
        compiled(X)
    text = text_of(caught)
    assert "entering" in text and f"{__file__}:" in text and "# the line" in text and "meta rule" in text


@pytest.mark.parametrize("entrance", [opaque, of_executor, registered])
def test_hidden_aliases_and_writes_are_named(entrance):
    with pytest.raises(DeclarationError, match="shares memory with an argument"):
        compiled_with(entrance, lambda x: x.view(3, 4))(X)
    with pytest.raises(DeclarationError, match="wrote to an argument"):
        compiled_with(entrance, lambda x: x.mul_(1).clone())(X.clone())


def test_results_that_share_memory_are_named():
    pair = thunder.opaque(
        lambda x: (y := x * 2, y[0]), meta=lambda x: (torch.empty_like(x), torch.empty_like(x[0])), name="pair"
    )
    with pytest.raises(DeclarationError, match="pair returned a tensor that shares memory with another result"):
        thunder.jit(lambda x: pair(x)[0])(X)


def test_strides_of_a_fake_implementation():
    """They answer a program's questions."""
    operation = registered(lambda x: (x * 2).t().contiguous().t())

    def program(x):
        y = operation(x)
        return y * 3 if y.is_contiguous() else y

    with pytest.raises(DeclarationError, match=r"strides \[1, 3\] where its fake implementation says \[4, 1\]"):
        thunder.jit(program)(X)


def test_implementations_of_thunders_own_operations():
    executor = OperatorExecutor(f"entering{next(NUMBERS)}")
    half = executor.register_operator("half", like=ltorch.gelu, fn=lambda a, approximate="none": F.gelu(a).half())
    executor.register_implementation(ltorch.gelu, half)
    with pytest.raises(DeclarationError, match=r'half returned "cpu f16\[3, 4\]" where its meta rule says'):
        thunder.jit(lambda x: F.gelu(x), executors=[executor])(X)


def test_regions_of_users_fusion_executors():
    class Joining(FusionExecutor):
        def __init__(self):
            super().__init__(f"joining{next(NUMBERS)}")
            for operation in (ltorch.mul, ltorch.sin):
                self.register_supported(operation)

        def fuse(self, region, counter):
            return self.register_temporary_operation(
                f"joined{counter}", lambda x: [torch.sin(x * 2).double()], inputs=region.inputs,
                outputs=region.outputs, bsyms=region.bound_symbols
            )  # fmt: skip

    with pytest.raises(DeclarationError, match=r'joined0 returned "cpu f64\[3, 4\]"'):
        thunder.jit(lambda x: (x * 2).sin(), executors=[Joining()])(X)


def test_backwards_are_compared_when_they_first_run():
    executor = OperatorExecutor(f"entering{next(NUMBERS)}")
    halved = executor.register_operator("halved", meta=lambda x: TensorProxy(like=x), fn=lambda x: x[:1] / 2)
    sine = executor.register_operator("sine", meta=lambda x: TensorProxy(like=x), fn=torch.sin)

    @sine.vjp
    def _(x):
        cotangent = yield sine(x)
        return (halved(cotangent),)

    result = thunder.jit(lambda x: sine(x), executors=[executor])(X.clone().requires_grad_())
    with pytest.raises(DeclarationError, match=r'halved returned "cpu f32\[1, 4\]"'):
        result.sum().backward()


def test_a_wrong_vmap_rule():
    name = f"entering{next(NUMBERS)}"
    operation = torch.library.custom_op(f"thunder_entrances::{name}", lambda x: x * 2, mutates_args=(),
                                        schema="(Tensor x) -> Tensor")  # fmt: skip
    operation.register_fake(lambda x: torch.empty_like(x))
    operation.register_vmap(lambda info, in_dims, x: ((x * 2).double(), 0))
    with pytest.raises(DeclarationError, match=r'"cpu f64\[3, 4\]"'):
        thunder.jit(lambda x: torch.vmap(operation)(x))(X)


def test_a_program_for_several_sizes_is_compared_for_two():
    frozen = thunder.opaque(lambda x: x[: x.shape[0] // 2].clone(), name="frozen", meta=lambda x: x[: x.shape[0] - 3])
    compiled = thunder.jit(lambda x: frozen(x) * 2, dynamic=True)
    assert torch.equal(compiled(torch.ones(6)), torch.full((3,), 2.0))
    with pytest.raises(DeclarationError, match=r"frozen returned .*\[5\].* which is \[7\] in this call"):
        compiled(torch.ones(10))


def test_a_size_that_is_rounded_is_compared_for_more():
    half = thunder.opaque(lambda x: x[::2].clone(), name="half", meta=lambda x: x[: x.shape[0] // 2])
    compiled = thunder.jit(lambda x: half(x) * 2, dynamic=True)
    for n in (4, 6, 8, 6, 4, 10):
        assert torch.equal(compiled(torch.ones(n)), torch.full((n // 2,), 2.0))
    with pytest.raises(DeclarationError, match=r"half returned .*\[4\].* which is \[3\] in this call"):
        compiled(torch.ones(7))
    assert thunder.cache_misses(compiled) == 1


@pytest.mark.parametrize(
    "function, words",
    [(lambda x: [x.mul_(2).sin()], "wrote to an argument"), (lambda x: [x], "shares memory with an argument")],
)
def test_regions_that_write_or_return_their_inputs(function, words):
    class Writing(FusionExecutor):
        def __init__(self):
            super().__init__(f"writing{next(NUMBERS)}")
            for operation in (ltorch.mul, ltorch.sin):
                self.register_supported(operation)

        def fuse(self, region, counter):
            more = {"inputs": region.inputs, "outputs": region.outputs, "bsyms": region.bound_symbols}
            return self.register_temporary_operation(f"joined{counter}", function, **more)

    with pytest.raises(DeclarationError, match=f"joined0 .*{words}"):
        thunder.jit(lambda x: (x * 2).sin(), executors=[Writing()])(X.clone())


def test_right_declarations_cost_nothing_after_the_first_call(monkeypatch):
    calls = []
    run = _Check.__call__
    monkeypatch.setattr(_Check, "__call__", lambda self, *a, **k: (calls.append(self), run(self, *a, **k))[1])
    half = thunder.opaque(lambda x: x[: x.shape[0] // 2].clone(), meta=lambda x: torch.empty(x.shape[0] // 2))
    program = lambda x: half(x).sum() / half(x).shape[0]  # noqa: E731
    x = torch.arange(10.0)
    compiled = thunder.jit(program)
    for _ in range(3):
        assert torch.equal(compiled(x), program(x))
    assert len(calls) == 2, "two operations, in one call"
    checked = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    for _ in range(2):
        assert torch.equal(checked(x), program(x))
    calls.clear()
    thunder.jit(lambda x: x.sin() * 2)(x)
    assert not calls, "thunder's own operations are not compared"


def test_an_error_in_the_first_call_names_its_line_and_the_next_call_is_compared():
    answers = iter([FloatingPointError("not today"), X * 2, X.double()])

    def function(x):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    compiled = compiled_with(opaque, function)
    with pytest.raises(FloatingPointError) as caught:
        compiled(X)
    assert "# the line" in text_of(caught)
    assert torch.equal(compiled(X), X * 2)
    assert compiled(X).dtype is torch.float64, "the declaration was compared, and is believed now"


# ------------------------------------------------------------------------------------------------------- all at once


def right_opaque():
    def backward(args, result, cotangent):
        scale = args[1] if len(args) > 1 else 2.0
        return (cotangent * args[0].cos() * scale, *[None for _ in args[1:]])

    return thunder.opaque(
        lambda x, scale=2.0: torch.sin(x.detach()) * scale,
        meta=lambda x, scale=2.0: torch.empty_like(x), backward=backward, name="scaled"
    )  # fmt: skip


def test_opcheck_passes_what_is_right():
    report = thunder.opcheck(right_opaque(), [(X,), (X, 3.0), (X[:2],), (X.double(),)])
    assert not report.problems and {c.passes for c in report.checked} >= {True}
    assert {c.test for c in report.checked if c.passes} >= {"declaration", "symbolic sizes", "derivative"}
    assert "declaration" in str(report) and "passes" in str(report)
    executor = OperatorExecutor(f"entering{next(NUMBERS)}")
    half = executor.register_operator("half", like=lambda x: ltorch.mul(x, 0.5), fn=lambda x: x * 0.5)
    assert {c.test for c in thunder.opcheck(half, [(X,)]).checked if c.passes} >= {"declaration", "derivative", "vmap"}


@pytest.mark.parametrize("test", ["declaration", "symbolic sizes", "derivative", "vmap", "values"])
def test_opcheck_names_what_is_wrong(test):
    if test == "declaration":
        op, samples = thunder.opaque(lambda x: x[:1].clone(), meta=lambda x: torch.empty_like(x), name="wrong"), [(X,)]
    elif test == "symbolic sizes":  # right for the sizes of the first sample
        op = thunder.opaque(lambda x: x[1:].clone(), meta=lambda x: x[: max(x.shape[0] // 2 + 1, 1)], name="wrong")
        samples = [(X,), (torch.ones(8, 4),)]
    elif test == "derivative":
        op = thunder.opaque(
            lambda x: x.detach().sin(),
            meta=lambda x: torch.empty_like(x),
            backward=lambda args, result, g: g,
            name="wrong",
        )
        samples = [(X,)]
    elif test == "vmap":
        name = f"entering{next(NUMBERS)}"
        op = torch.library.custom_op(
            f"thunder_entrances::{name}", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_fake(lambda x: torch.empty_like(x))
        op.register_vmap(lambda info, in_dims, x: (x * 3, 0))
        samples = [(X,)]
    else:  # an implementation that computes something else than the operation
        executor = OperatorExecutor(f"entering{next(NUMBERS)}")
        quick = executor.register_operator("wrong", like=ltorch.gelu, fn=lambda a, approximate="none": a.sigmoid() * a)
        executor.register_implementation(ltorch.gelu, quick)
        with pytest.raises(DeclarationError, match="(?s)gelu is not what was declared of it.*declaration of sample 0"):
            thunder.opcheck(F.gelu, [(X,)], executors=[executor])
        return
    with pytest.raises(DeclarationError, match=f"(?s)is not what was declared of it:.*{test} of sample"):
        thunder.opcheck(op, samples)
    assert thunder.opcheck(op, samples, raises=False).problems


def test_verify_reports_a_wrong_declaration():
    compiled = compiled_with(opaque, lambda x: (x * 2)[:1].clone(), lambda y: y.sum() / y.shape[0])
    first = thunder.verify(compiled, X).first
    assert first is not None and first.operation in ("sum", "div") and first.part == "original"
    assert "# the line" not in str(first) and "y.sum() / y.shape[0]" in str(first), (
        "the first that parts from the original"
    )
