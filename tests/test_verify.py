"""`thunder.verify` names the wrong operation, executor, trace line and user line; a right program gives no culprit."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
import thunder.torch as ltorch
from benchmarks.model_zoo import MODELS
from thunder.core.transforms import get_grad, put_grad
from thunder.errors import OptionError
from thunder.extend import FusionExecutor, OperatorExecutor
from thunder.inspect.verification.judge import judge
from thunder.inspect.verify import Comparison, Report

HERE = __file__


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = self.norm(self.first(x))
        hidden = F.gelu(hidden)  # the wrong one
        hidden = F.dropout(hidden, 0.2, self.training)
        return F.softmax(self.last(hidden), -1)


GELU_LINE = next(
    i for i, line in enumerate(inspect.getsource(inspect.getmodule(Model)).split("\n"), 1) if "# the wrong one" in line
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def x():
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def gelu_executor(name: str, fn, **options) -> OperatorExecutor:
    executor = OperatorExecutor(name)
    symbol = executor.register_operator(f"{name}_gelu", like=ltorch.gelu, fn=fn)
    executor.register_implementation(ltorch.gelu, symbol, **options)
    return executor


def assert_named(first: Comparison | None, operation: str, executor: str, part: str) -> None:
    assert first is not None, "no culprit was found"
    assert (first.operation, first.executor, first.part) == (operation, executor, part), str(first)
    assert first.location[:2] == (HERE, GELU_LINE) and "F.gelu(hidden)" in first.location[3]
    assert first.compiled > first.allowed and first.agrees is False
    assert f"{HERE}:{GELU_LINE}" in str(first) and executor in str(first) and operation in str(first)


# ---------------------------------------------------------------------------------------------------------------- wrong
# programs


def test_a_wrong_result_is_named(model, x):
    executor = gelu_executor("off", lambda a, **_: F.gelu(a) + 1e-2)
    compiled = thunder.jit(model, executors=[executor])
    report = thunder.verify(compiled, x)
    assert_named(report.first, "off_gelu", "off", "forward")
    assert report.first.trace_line.startswith("hidden_0 = off_gelu(hidden")
    compiled(x)
    assert (
        thunder.last_traces(compiled)[-1].python(memory=True).split("\n")[report.first.number - 1].strip()
        == report.first.trace_line
    )
    wrong = {(c.part, c.operation) for c in report.comparisons if c.agrees is False}
    assert wrong == {("forward", "off_gelu")}, "what follows a wrong line is not accused"


def test_a_wrong_derivative_alone_is_named(model, x):
    executor = OperatorExecutor("slope")

    def differentiate(a, *, approximate="none"):
        y = ltorch.gelu(a, approximate=approximate)
        put_grad(a, get_grad(y) * 1.01)
        return y

    executor.register_implementation(ltorch.gelu, grad_transform=differentiate)
    report = thunder.verify(thunder.jit(model, executors=[executor]), x)
    first = report.first
    assert (
        first is not None and first.part == "derivative" and first.operation == "gelu" and first.executor == "slope"
    ), str(report)
    assert first.location[:2] == (HERE, GELU_LINE) and first.value.startswith("gradient of ")


def test_a_wrong_backward_of_an_own_operation_is_named(model, x):
    executor = OperatorExecutor("own")
    forward = executor.register_operator(
        "own_forward", meta=lambda a: thunder.TensorProxy(like=a), fn=lambda a: F.gelu(a)
    )
    backward = executor.register_operator(
        "own_backward",
        meta=lambda g, a: thunder.TensorProxy(like=a),
        fn=lambda g, a: 0.99 * torch.ops.aten.gelu_backward(g, a),
    )

    def differentiate(a, *, approximate="none"):
        y = forward(a)
        put_grad(a, backward(get_grad(y), a))
        return y

    executor.register_implementation(
        ltorch.gelu, execution_transform=lambda a, *, approximate="none": forward(a), grad_transform=differentiate
    )
    assert_named(thunder.verify(thunder.jit(model, executors=[executor]), x).first, "gelu", "own", "derivative")


def test_what_is_wrong_for_one_shape_is_named_for_that_shape_alone(model, x):
    executor = gelu_executor("shaped", lambda a, **_: F.gelu(a) + (1e-2 if a.shape[0] == 3 else 0.0))
    compiled = thunder.jit(model, executors=[executor])
    assert thunder.verify(compiled, x).first is None
    assert_named(thunder.verify(compiled, x[:3]).first, "shaped_gelu", "shaped", "forward")


@pytest.mark.parametrize("element", [0.0, 3e-5], ids=["all elements", "one element"])
def test_small_errors_are_found(model, x, element):
    def fn(a, **_):
        y = F.gelu(a)
        if not element:
            return y * (1 + 1e-5)
        y[0, 0] += element
        return y

    assert_named(
        thunder.verify(thunder.jit(model, executors=[gelu_executor("small", fn)]), x).first,
        "small_gelu",
        "small",
        "forward",
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, **_: F.gelu(a).double(),
        lambda a, **_: F.gelu(a)[:1],
        lambda a, **_: F.gelu(a).index_fill(0, torch.tensor([0]), float("nan")),
    ],
)
def test_other_types_shapes_and_nan_are_found(fn):
    def program(x):
        return F.gelu(x)

    first = thunder.verify(thunder.jit(program, executors=[gelu_executor("odd", fn)]), torch.randn(4, 4)).first
    assert first is not None and first.executor == "odd" and first.note


class Joining(FusionExecutor):
    """Runs elementwise regions by PyTorch, with the result of one operation off."""

    def __init__(self, wrong: str | None):
        super().__init__("joining")
        self.wrong = wrong
        for operation in (ltorch.mul, ltorch.add, ltorch.sin, ltorch.cos, ltorch.neg):
            self.register_supported(operation)

    def fuse(self, region, counter):
        def run(*inputs):
            values = dict(zip([p.name for p in region.inputs], inputs, strict=True))
            for line in region.bound_symbols:
                computed = line.sym.fn(*(values[a.name] if hasattr(a, "name") else a for a in line.args))
                values[line.output.name] = computed * 1.001 if line.sym.name == self.wrong else computed
            return [values[o.name] for o in region.outputs]

        return self.register_temporary_operation(
            f"joined{counter}", run, inputs=region.inputs, outputs=region.outputs, bsyms=region.bound_symbols
        )


def test_a_wrong_region_is_named_with_its_lines():
    def program(x):
        y = x * 2
        return (y.sin() + x) @ x

    x = torch.randn(4, 4, requires_grad=True)
    assert thunder.verify(thunder.jit(program, executors=[Joining(None)]), x).first is None
    first = thunder.verify(thunder.jit(program, executors=[Joining("sin")]), x).first
    assert (
        first is not None
        and first.operation == "joined0 (mul, sin, add)"
        and first.executor == "joining"
        and first.part == "forward"
    )
    first = thunder.verify(thunder.jit(program, executors=[Joining("cos")]), x).first
    assert first is not None and first.part == "backward" and "cos" in first.operation and first.executor == "joining"


def test_a_wrong_transform_shows_in_the_whole_program():
    class Doubling(thunder.Transform):
        def transform_trace_post_optimization(self, computation_trace, **kwargs):
            lines = list(computation_trace.bound_symbols)
            i = next((i for i, line in enumerate(lines) if line.sym.name == "mul"), None)
            if i is not None:
                lines[i] = lines[i].replace(args=(lines[i].args[0], 3.0), subsymbols=())
            return computation_trace.replace(bound_symbols=lines)

    first = thunder.verify(thunder.jit(lambda x: (x * 2).sin(), transforms=[Doubling()]), torch.randn(4)).first
    assert first is not None and first.part == "program"


# ---------------------------------------------------------------------------------------------------------------- right
# programs


def cast(value, dtype):
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["litgpt_model llama2-like"])
def test_models_have_no_culprit(name, dtype):
    module, args, kwargs = MODELS[name]()
    module.train().to(dtype)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # whose bfloat16 kernels some processors do not know
    try:
        report = thunder.verify(
            thunder.jit(module), *(cast(a, dtype) for a in args), **{k: cast(v, dtype) for k, v in kwargs.items()}
        )
    finally:
        torch._C._set_mkldnn_enabled(before)
    assert report.first is None, str(report.first)
    assert {"forward", "backward", "derivative"} <= {c.part for c in report.comparisons}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_cross_entropy_executor_has_no_culprit(dtype):
    def program(logits, target):
        return F.cross_entropy(logits * 2, target)

    logits = torch.randn(16, 32).to(dtype).requires_grad_()
    report = thunder.verify(thunder.jit(program, executors=["cross_entropy"]), logits, torch.randint(0, 32, (16,)))
    assert report.first is None, str(report.first)
    assert any(c.executor == "cross_entropy" for c in report.comparisons if c.part == "derivative")


def test_autocast_has_no_culprit(model, x):
    assert thunder.verify(thunder.jit(model, transforms=[thunder.autocast(torch.bfloat16)]), x).first is None
    with torch.autocast("cpu", torch.bfloat16):
        assert thunder.verify(model, x).first is None


def test_steps_let_effects_evolve():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)), torch.randn(8, 4)
    compiled = thunder.jit(model)
    state = torch.get_rng_state()
    report = thunder.verify(compiled, x, steps=3)
    assert report.first is None, str(report.first)
    assert {c.step for c in report.comparisons} == {0, 1, 2}
    assert model[1].num_batches_tracked == 2, "a step is called after it was compared; the last one is compared only"
    assert not torch.equal(torch.get_rng_state(), state)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    thunder.verify(compiled, x)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and torch.equal(
        torch.get_rng_state(), state
    ), "comparing alone changes nothing"
    assert all(p.grad is None for p in model.parameters())


def test_writes_ties_integers_and_views_are_no_culprits():
    def program(x, cache):
        cache[1:3] = x[:2]
        largest = x.argmax(-1)
        chosen = torch.where(x > x.flip(0), x, -x)
        parts = chosen.t().split(2)
        return parts[0] * 2, largest, (x - x) > 0, cache.sum()

    x = torch.randn(4, 4)
    report = thunder.verify(thunder.jit(program), x, torch.zeros(4, 4))
    assert report.first is None, str(report.first)


def test_programs_without_gradients_and_with_several_results():
    with torch.no_grad():
        report = thunder.verify(Model().eval(), torch.randn(2, 8))
    assert report.first is None and {c.part for c in report.comparisons} == {"original", "forward", "program"}


# ---------------------------------------------------------------------------------------------------------------- the
# report and the rule


def test_the_report_is_a_table(model, x):
    report = thunder.verify(model, x)
    lines = str(report).split("\n")
    assert (
        lines[0].split()[:5] == ["step", "part", "value", "operation", "executor"]
        and len(lines) == len(report.comparisons) + 3
    )
    assert lines[-1] == "All operations agree with eager PyTorch." and f"{HERE}:{GELU_LINE}" in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.comparisons = ()
    assert isinstance(report, Report)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_is_a_number_of_calls(steps):
    with pytest.raises(OptionError, match="steps"):
        thunder.verify(lambda x: x, torch.ones(1), steps=steps)


def test_the_rule():
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    eager = exact.float()
    assert judge(eager.clone(), eager, exact, exact).agrees
    assert judge(torch.nextafter(eager, torch.full_like(eager, 9.0)), eager, exact, exact).agrees, (
        "the neighbour of a rounded number"
    )
    assert not judge(eager * (1 + 1e-6), eager, exact, exact).agrees
    assert judge(eager * (1 + 1e-6), eager, exact, exact * (1 + 1e-6)).agrees, "as sensitive as that to its inputs"
    flags = torch.tensor([True, False, True])
    assert judge(flags, flags, flags, flags).agrees and not judge(~flags, flags, flags, flags).agrees
    assert judge(~flags, flags, flags, ~flags).agrees, "all of them near a tie"
    infinite = torch.tensor([1.0, float("inf")])
    assert judge(infinite, infinite, infinite.double(), infinite.double()).agrees
    assert not judge(torch.ones(2), infinite, infinite.double(), infinite.double()).agrees


@pytest.mark.parametrize("kernel, agrees", [(lambda x: (x * x).sin(), True), (lambda x: (x * x).sin() * 1.01, False)])
def test_an_executors_own_operation_is_compared_with_what_it_replaces(kernel, agrees):
    from thunder.core.transforms import get_grad, put_grad
    from thunder.extend import OperatorExecutor

    def user(x):
        return (x * x).sin()

    def grad_transform(x):
        out = own(x)
        put_grad(x, get_grad(out) * torch.cos(x * x) * x * 2)
        return out

    executor = OperatorExecutor("of_this_test")
    own = executor.register_operator("own", meta=lambda x: thunder.TensorProxy(like=x), fn=kernel, replaces=user)
    executor.register_implementation(own, own, grad_transform=grad_transform)
    compiled = thunder.jit(lambda x: user(x).sum(), executors=[executor])
    for x in (torch.randn(5), torch.randn(5, requires_grad=True)):
        first = thunder.verify(compiled, x).first
        assert (first is None) is agrees
        assert agrees or (first.operation, first.executor) == ("own", "of_this_test")


def test_the_original_runs_beside_the_program():
    """What is wrong in every trace: a native function whose answer capture took for a constant."""
    state = {"calls": 0}

    class Counting(dict):
        pass

    def program(x, table):
        y = x * 2
        y = y + table["shift"]  # as captured
        return y.sum()

    compiled = thunder.jit(program)
    x, table = torch.ones(3), Counting(shift=1.0)
    assert thunder.verify(compiled, x, table).first is None and state == {"calls": 0}
    entry, _ = compiled.entry_for((x, table), {})
    trace = entry.captured.computation
    wrong = [b.replace(args=(b.args[0], 2.0)) if b.sym is ltorch.add else b for b in trace.bound_symbols]
    entry.captured.computation_traces[-1] = trace.replace(bound_symbols=wrong)
    first = thunder.verify(compiled, x, table).first
    assert first.part == "original" and first.operation == "add" and "# as captured" in first.location[3]


def test_the_original_leaves_no_effects():
    log = []

    def program(x, parameter):
        log.append(1)
        parameter.grad = None
        x.add_(1)
        (x * parameter).sum().backward()
        return parameter.grad * 2

    parameter, x = torch.ones(3, requires_grad=True), torch.ones(3)
    report = thunder.verify(program, x, parameter)
    assert report.first is None and not log and torch.equal(x, torch.ones(3)) and parameter.grad is None
    assert "it is not run a second time" in "".join(c.note for c in report.comparisons)
