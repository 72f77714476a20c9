"""Passes and transforms of users: what they break is found behind them, and their errors name them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import thunder
import thunder.torch as ltorch
from tests.kernels_in_use import EVERY_REGION
from thunder.core.rewrite import rewrite
from thunder.core.symbol import OpTags
from thunder.errors import OptionError, TraceCheckError
from thunder.extend import FusionExecutor, OperatorExecutor

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def program(x):
    y = x.exp() + 1
    return y.sum(0) * 2, y


def without_the_first(trace, lowering):
    return trace.replace(bound_symbols=trace.bound_symbols[1:])


def reversed_(trace, lowering):
    return trace.replace(bound_symbols=trace.bound_symbols[::-1])


def other_shape(trace, lowering):
    def rule(operation, out):
        if operation.sym is ltorch.exp:
            out.trace(lambda x: ltorch.sum(x), operation)
        else:
            out.write(operation)

    return rewrite(trace, rule)


def other_dtype(trace, lowering):
    def rule(operation, out):
        if operation.sym is ltorch.exp:
            out.trace(lambda x: ltorch.to(ltorch.exp(x), torch.float64), operation)
        else:
            out.write(operation)

    return rewrite(trace, rule)


def relabelled(trace, lowering):
    """An operation of another type under the name of a value, with consistent types."""
    first = trace.bound_symbols[0]
    value = first.output.replace(shape=(3, 5))
    value.name = first.output.name
    return trace.replace(bound_symbols=[first.replace(output=value), *trace.bound_symbols[1:]])


def defined_twice(trace, lowering):
    return trace.replace(bound_symbols=[trace.bound_symbols[0], *trace.bound_symbols])


def forgot_to_write(trace, lowering):
    return rewrite(trace, lambda b, out: out.write(b) if b.sym is not ltorch.exp else None)


def one_result(trace, lowering):
    return trace.replace(output=trace.output[0])


def swapped_results(trace, lowering):
    return trace.replace(output=trace.output[::-1])


def foreign_argument(trace, lowering):
    return trace.replace(args=())


def raises(trace, lowering):
    return {}["no such key"]


def nothing(trace, lowering):
    return [None]


BROKEN = [
    without_the_first, reversed_, other_shape, other_dtype, relabelled, defined_twice, forgot_to_write, one_result,
    swapped_results, foreign_argument, raises, nothing,
]  # fmt: skip


@pytest.mark.parametrize("where", ["Dead Code Elimination", "Partition"])
@pytest.mark.parametrize("run", BROKEN)
def test_a_pass_that_breaks_a_program_is_named(run, where):
    broken = thunder.Pass("Broken of mine", run)
    compiled = thunder.jit(program, passes=lambda p: p.after(where, broken), fallback="error")
    with pytest.raises((TraceCheckError, OptionError, KeyError)) as caught:
        compiled(X)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "the pass Broken of mine" in text, text
    assert isinstance(caught.value, KeyError) == (run is raises)


@pytest.mark.parametrize("run", [without_the_first, other_shape, one_result, raises, lambda trace, lowering: None])
@pytest.mark.parametrize("hook", ["transform_traces_pre_prologue", "transform_trace_post_optimization"])
def test_a_transform_that_breaks_a_program_is_named(run, hook):
    class Breaking(thunder.Transform):
        pass

    def before(self, prologue, computation, epilogue, **kwargs):
        return prologue, run(computation, None), epilogue

    def behind(self, computation, **kwargs):
        return run(computation, None)

    if run is one_result and hook.endswith("prologue") or run is other_shape and hook.endswith("optimization"):
        return  # a transform may change what a function returns; behind dispatch there is no exp of thunder's
    setattr(Breaking, hook, before if hook.endswith("prologue") else behind)
    with pytest.raises((TraceCheckError, OptionError, KeyError, AttributeError)) as caught:
        thunder.jit(program, transforms=[Breaking()])(X)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert f"Breaking.{hook}" in text, text


def test_effects_stay_in_order():
    log = []
    notes = OperatorExecutor("notes")
    note = notes.register_operator(
        "note", meta=lambda x, what: None, fn=lambda x, what: log.append(what), tags=[OpTags.DONT_DCE]
    )

    def noting(x):
        note(x, "first")
        y = x * 2
        note(x, "second")
        return y

    def swapped(trace, lowering):
        a, b, c = trace.bound_symbols
        return trace.replace(bound_symbols=[c, b, a])

    compiled = thunder.jit(noting, executors=[notes])
    compiled(X)
    assert log == ["first", "second"]
    moved = thunder.Pass("Moved", swapped)
    compiled = thunder.jit(noting, executors=[notes], passes=lambda p: p.after("Dead Code Elimination", moved))
    with pytest.raises(TraceCheckError, match="the pass Moved .* both have effects"):
        compiled(X)


def test_right_passes_pass():
    """Also those that write other operations, in programs with derivatives."""

    def slower(trace, lowering):
        def rule(operation, out):
            if operation.sym is ltorch.exp:
                out.trace(lambda x: 1 / ltorch.exp(-x), operation)
            else:
                out.write(operation)

        return rewrite(trace, rule)

    def same(trace, lowering):
        return trace.replace(bound_symbols=[b.replace() for b in trace.bound_symbols])

    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Dropout(0.0), nn.Linear(4, 2)), X
    passes = thunder.passes()
    for p in passes:
        passes = passes.after(p.name, thunder.Pass(f"Same after {p.name}", same))
    passes = passes.before("Same after Dead Code Elimination", thunder.Pass("Slower", slower))
    compiled = thunder.jit(lambda x: model(x).exp().sum(), passes=passes)
    for kwargs in ({}, {"dynamic": True}):
        compiled = thunder.jit(lambda x: model(x).exp().sum(), passes=passes, **kwargs)
        compiled(x).backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(x).exp().sum().backward()
        for a, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad)
        model.zero_grad()
    assert "Slower" in str([t.provenance for t in thunder.last_traces(compiled)])


@pytest.mark.parametrize("name", ["Without Cotangents", "Transforms", "Saved Collections"])
def test_necessary_passes_are_refused_in_words(name):
    with pytest.raises(OptionError, match=f"passes= has no '{name}', without which programs are wrong: .*"):
        thunder.jit(program, passes=thunder.passes().without(name))
    own = thunder.Pass(name, thunder.passes()[name].run, needs=thunder.passes()[name].needs)
    thunder.jit(program, passes=thunder.passes().replacing(name, own))


def losses(x, w):
    y = x @ w
    return y.exp().sum(), (x * w[0]).sin().sum(), torch.stack([x, y]).sum()


@pytest.mark.parametrize("name", [p.name for p in thunder.passes()])
def test_a_list_without_a_pass_is_refused_or_right(name):
    try:
        passes = thunder.passes().without(name)
        thunder.jit(losses, passes=passes)
    except OptionError:
        return
    for executors, used in itertools.product((["torch"], [EVERY_REGION]), ((0,), (1, 2))):
        leaves = [[X.clone().requires_grad_(), torch.eye(4).requires_grad_()] for _ in range(2)]
        for run, inputs in zip((losses, thunder.jit(losses, passes=passes, executors=executors)), leaves, strict=True):
            results = run(*inputs)
            sum(results[i] for i in used).backward()
        for eager, ours in zip(*leaves, strict=True):
            torch.testing.assert_close(ours.grad, eager.grad)


def test_executors_of_transforms():
    calls = []
    brought = OperatorExecutor("brought_along")
    symbol = brought.register_operator("my_exp", like=ltorch.exp, fn=lambda x: (calls.append(1), x.exp())[1])
    brought.register_implementation(ltorch.exp, symbol)

    class Bringing(thunder.Transform):
        executors = (brought,)  # the executor itself, which is not registered

    for _ in range(2):
        assert torch.equal(thunder.jit(lambda x: x.exp(), transforms=[Bringing()])(X), X.exp())
    assert len(calls) == 2

    class Unknown(thunder.Transform):
        executors = ("nowhere",)

    class NoList(thunder.Transform):
        executors = "brought_along"

    for transform, words in ((Unknown(), "executors of the transform Unknown: no executor is called 'nowhere'"),
                             (NoList(), "executors of the transform NoList: executors= is a list")):  # fmt: skip
        with pytest.raises(OptionError, match=words):
            thunder.jit(lambda x: x, transforms=[transform])

    class Exact(Bringing):
        exact = True

    with pytest.raises(OptionError, match="brought_along"):
        thunder.jit(lambda x: x, transforms=[Exact()], numerics="eager")


class WrongRegions(FusionExecutor):
    """A fusion executor whose function gives another value than its region."""

    def fuse(self, region, counter):
        first = region.outputs[0]
        other = first.replace(shape=(*first.shape, 1))
        other.name = first.name
        return self.register_temporary_operation(
            f"wrong{counter}", lambda *inputs: inputs[0], inputs=region.inputs, outputs=(other,),
            bsyms=region.bound_symbols,
        )  # fmt: skip


def test_a_fusion_executor_that_breaks_a_program_is_named():
    executor = WrongRegions("wrong regions")
    executor.register_supported(ltorch.exp)
    executor.register_supported(ltorch.add)
    compiled = thunder.jit(lambda x: (x.exp() + 1).exp(), executors=[executor], fallback="error")
    with pytest.raises(TraceCheckError, match="the fusion executor wrong regions made a program that cannot run"):
        compiled(X)
