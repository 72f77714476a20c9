"""The list of passes: what it shows, how it is edited, and that every pass has its header."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import thunder
from tests import fresh
from thunder.core.proxies import TensorProxy
from thunder.core.rewrite import rewrite
from thunder.errors import OptionError
from thunder.extend.passes import PassList
from thunder.transforms.dce import dce


def program(x, w):
    return torch.sin(F.linear(x, w) * 1.0).sum()


def inputs():
    return torch.linspace(-1, 1, 6).reshape(2, 3), torch.linspace(0, 1, 12).reshape(4, 3).requires_grad_()


def headers(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    return [t.provenance.removeprefix("Constructed by ").partition(" (took")[0] for t in traces]


def drop_neutral(trace, lowering):
    """drop products with 1"""

    def rule(operation, out):
        if operation.sym is thunder.torch.mul and type(operation.args[1]) is float and operation.args[1] == 1.0:
            out.alias({operation.output: operation.args[0]})
        else:
            out.write(operation)

    return rewrite(trace, rule)


NEUTRAL = thunder.Pass("Drop Neutral", drop_neutral, needs="operations")


def test_every_pass_that_changes_a_program_has_a_header():
    compiled = thunder.jit(program)
    compiled(*inputs()).backward()
    assert headers(compiled) == [
        "", "Dead Code Elimination", "Grad transform pass", "Partition", "Transform for execution", "Constants", "Delete Last Used",
    ]  # fmt: skip
    assert headers(compiled, backward=True) == [
        "Partition", "Transform for execution", "Constants", "Delete Last Used",
    ]  # fmt: skip
    names = {p.name for p in thunder.passes()}
    assert set(headers(compiled)) - {""} <= names


def test_a_pass_is_inserted_in_front_of_the_derivatives():
    want, got = inputs(), inputs()
    compiled = thunder.jit(program, passes=thunder.passes().after("Dead Code Elimination", NEUTRAL))
    program(*want).backward()
    compiled(*got).backward()
    assert torch.equal(got[1].grad, want[1].grad)
    assert headers(compiled)[:3] == ["", "Dead Code Elimination", "Drop Neutral"]
    assert "mul" not in [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]
    again = thunder.jit(program, passes=lambda passes: [*passes[:1], NEUTRAL, *passes[1:]])
    again(*got)
    assert headers(again) == headers(compiled)


def test_passes_are_removed_replaced_and_reordered():
    default = thunder.passes()
    compiled = thunder.jit(program, passes=lambda passes: passes.without("Delete Last Used"))
    compiled(*inputs()).backward()
    assert "del " not in str(thunder.last_traces(compiled)[-1])
    mine = thunder.Pass("Mine", lambda trace, _: dce(trace), needs="operations", meaning="another one")
    replaced = default.replacing("Dead Code Elimination", mine)
    assert replaced[0] is mine and len(replaced) == len(default) and "another one" in str(replaced)
    moved = default.without("Share Gradients").before("Rules", default["Share Gradients"])
    assert [p.name for p in moved[2:4]] == ["Share Gradients", "Rules"]
    assert type(moved[1:3]) is PassList and set(moved) == set(default)
    for passes in (replaced, moved):
        got, want = inputs(), inputs()
        thunder.jit(program, passes=passes)(*got).backward()
        program(*want).backward()
        assert torch.equal(got[1].grad, want[1].grad)


def test_a_pass_sees_what_the_program_is_lowered_for_and_may_take_several_steps():
    seen = []

    def twice(trace, lowering):
        seen.append((lowering.differentiates, [e.name for e in lowering.executors]))
        return [thunder.core.trace.timed_pass(f"Step {i}", trace, dce) for i in (1, 2)]

    passes = thunder.passes().before("Transform for execution", thunder.Pass("Twice", twice))
    compiled = thunder.jit(program, passes=passes, executors=["torch"])
    compiled(*inputs())
    assert {differentiates for differentiates, _ in seen} == {True} and len(seen) == 2
    assert all(executors[0] == "torch" for _, executors in seen)
    for backward in (False, True):
        listed = headers(compiled, backward)
        assert listed[listed.index("Partition") :][:3] == ["Partition", "Step 1", "Step 2"]


def test_what_changes_nothing_has_no_trace():
    compiled = thunder.jit(program, passes=lambda p: p.after("Partition", thunder.Pass("Same", lambda t, _: t)))
    compiled(*inputs())
    assert "Same" not in headers(compiled)


def test_a_pass_that_returns_no_trace_is_an_error():
    broken = thunder.Pass("Broken", lambda trace, _: None)
    compiled = thunder.jit(program, passes=thunder.passes().after("Dead Code Elimination", broken), fallback="error")
    with pytest.raises(OptionError, match="the pass Broken returned NoneType: return a trace"):
        compiled(*inputs())


WRONG = {
    "unknown": (lambda p: p.without("Save Plann"), "no pass is called 'Save Plann': did you mean 'Save Plan'?"),
    "nothing like it": (lambda p: p["zzzz"], "`python -m thunder passes` lists those there are"),
    "unmet": (
        lambda p: p.without("Grad transform pass"),
        "Common Subexpression Elimination needs 'joint', which Grad transform pass gives: put that one before it",
    ),
    "later": (
        lambda p: p.without("Partition").after("Delete Last Used", p["Partition"]),
        "Saved Collections needs 'cut', which Partition gives: put that one before it",
    ),
    "ended": (
        lambda p: p.after("Delete Last Used", NEUTRAL),
        "Drop Neutral needs 'operations', which Transform for execution ends: put it before that one",
    ),
    "misspelled fact": (
        lambda p: p.after("Partition", thunder.Pass("Mine", drop_neutral, needs="joints")),
        "Mine needs 'joints', which no pass gives: did you mean 'joint'?",
    ),
    "nothing runs": (lambda p: [], "a program that runs needs 'executors', which Transform for operator"),
    "twice": (lambda p: [*p, p[0]], "has two passes that are called 'Dead Code Elimination'"),
    "a function": (lambda p: [*p, dce], "is not a pass: thunder.Pass(name, run) makes one"),
    "no list": (lambda p: None, "passes= returns None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_lists_are_errors_in_words(case):
    edit, words = WRONG[case]
    with pytest.raises(OptionError) as raised:
        thunder.jit(program, passes=edit)
    assert words in str(raised.value)


def test_lists_are_pickled_and_copied():
    compiled = thunder.jit(program, passes=thunder.passes().without("Join Parts"))
    for copied in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        copied(*inputs())
        assert list(copied.options.passes) == list(thunder.passes().without("Join Parts"))


def test_the_command_prints_the_table():
    done = fresh.run("-m", "thunder", "passes")
    rows = done.stdout.splitlines()
    assert rows[0].split() == ["pass", "needs", "gives", "ends", "meaning"]
    assert [row.partition("  ")[0] for row in rows[1:]] == [p.name for p in thunder.passes()]
    assert all(p.meaning for p in thunder.passes())


# ------------------------------------------------------------------------------------------- a training step inside


def step_of(module, **options):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        return loss

    return thunder.jit(step, **options) if options else step


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x.square().sum()


def test_checkpoints_of_a_step_are_recomputed_by_the_pass():
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    ours, eagers = Checkpointed(), Checkpointed()
    compiled, eager = step_of(ours, passes=thunder.passes()), step_of(eagers)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)
    assert "Recompute in Backward" in headers(compiled)
    before, after = (
        thunder.last_traces(compiled)[headers(compiled).index("Recompute in Backward") + i] for i in (-1, 0)
    )

    def again(trace):
        return [
            o.name
            for b in trace.bound_symbols
            if b.context is not None and b.context.backward
            for o in b.outputs
            if isinstance(o, TensorProxy) and o.name.startswith("bw_")
        ]

    assert not again(before) and len(again(after)) >= 3


def test_passes_that_prepare_for_derivatives_run_in_front_of_a_backward_inside():
    inside = thunder.Pass("Drop Neutral", drop_neutral, needs="operations", inside=True)
    w = torch.linspace(0, 1, 4).requires_grad_()

    def step(x):
        w.grad = None
        product = w * 1.0
        (product * x).sum().backward()
        return w.grad, product.detach().sin()

    compiled = thunder.jit(step, passes=thunder.passes().before("Rules", inside))
    for got, want in zip(compiled(torch.arange(4.0)), (torch.arange(4.0), w.detach().sin()), strict=True):
        assert torch.equal(got, want)
    names = [b.sym.name for b in thunder.last_traces(compiled)[-1].bound_symbols]
    assert names.count("mul") == 1, "the gradient of the product with x, whose value nobody reads"
