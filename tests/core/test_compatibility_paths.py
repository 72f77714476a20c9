"""Paths and names that users of Lightning Thunder import."""

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core.trace_interpreter import TraceSubstitutionProcessor, interpret_trace
from thunder.core.transform_common import Transform, cse, dce
from thunder.core.utils import check, consumers, producers, producers_and_consumers, sequencify

X = torch.linspace(-1, 1, 4)


def names(trace):
    return [line.sym.name for line in trace.bound_symbols]


def test_transforms_and_passes():
    assert Transform is thunder.Transform
    trace = thunder.trace(use_dce=False)(lambda x: (ltorch.cos(x), ltorch.sin(x) + ltorch.sin(x))[1], X)
    assert names(dce(trace)) == ["sin", "sin", "add"] and names(cse(trace)) == ["cos", "sin", "add"]
    import thunder.core.transform_common as module

    with pytest.raises(AttributeError, match="has no attribute 'EarlyTransform'"):
        module.EarlyTransform
    from thunder.core.transforms import add_transform, get_grad, grad, put_grads, register_grad, value_and_grad

    assert add_transform is thunder.add_transform and all(
        map(callable, (get_grad, put_grads, grad, value_and_grad, register_grad))
    )


class CosForSin(TraceSubstitutionProcessor):
    def __init__(self, trace):
        super().__init__(trace)
        self.seen = []

    def process_bsym(self, bsym):
        self.seen.append(bsym.sym.name)
        if bsym.sym.name == "sin":
            self.set_result(self.add_bsyms_from_function(lambda x: ltorch.mul(ltorch.cos(x), 2), *bsym.args))
        elif bsym.sym.name == "neg":
            self.add_to_swap_map(bsym.output, self.read(bsym.args[0]))
        elif bsym.sym.name == "softmax":
            self.add_unprocessed_bsyms(bsym.subsymbols)
        else:
            self.add_processed_bsyms([bsym])


def test_a_substitution_processor():
    trace = thunder.trace()(lambda x: ltorch.exp(-ltorch.sin(x)) + 1, X)
    rewritten, output = CosForSin(trace)()
    assert names(trace) == ["sin", "neg", "exp", "add"] and names(rewritten) == ["cos", "mul", "exp", "add"]
    assert output is rewritten.output and rewritten.bound_symbols[1].output.name == trace.bound_symbols[0].output.name
    assert torch.equal(thunder.core.check.check(rewritten).python_callable()(X), (X.cos() * 2).exp() + 1)
    opened = CosForSin(thunder.trace()(lambda x: ltorch.softmax(x, 0), X))
    result, _ = opened()
    assert opened.seen[0] == "softmax" and opened.seen[1:] == names(result)
    torch.testing.assert_close(result.python_callable()(X), X.softmax(0))
    with pytest.raises(NotImplementedError, match="TraceSubstitutionProcessor does not define process_bsym"):
        TraceSubstitutionProcessor(trace)()


def test_interpret_trace():
    inner = thunder.trace()(lambda x, y: {"sum": x + y, "rest": (x * 2, 3)}, X, X)
    outer = thunder.trace()(lambda a: interpret_trace(inner, a, ltorch.sin(a)), X)
    actual = outer.python_callable()(X)
    assert torch.equal(actual["sum"], X + X.sin()) and torch.equal(actual["rest"][0], X * 2) and actual["rest"][1] == 3


def test_helpers():
    trace = thunder.trace()(lambda x: (lambda s: s * s + x)(ltorch.sin(x)), X)
    sin, mul, add = trace.bound_symbols
    (x,) = trace.args
    producer_of, read = producers_and_consumers(trace)
    assert producer_of == producers(trace.bound_symbols) == {sin.output: sin, mul.output: mul, add.output: add}
    assert read == consumers(trace) == {x: [sin, add], sin.output: [mul], mul.output: [add]}
    assert sequencify(3) == (3,) and sequencify([3]) == [3] and sequencify((1, 2)) == (1, 2)
    check(True, lambda: 1 / 0)
    with pytest.raises(ValueError, match="as said"):
        check(False, lambda: "as said", ValueError)
    with pytest.raises(RuntimeError, match="as said"):
        check(0, lambda: "as said")
