"""Passes and helpers over random programs: regions, the rewriting driver, dce, cse, del_last_used, and budgets by
counting."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thunder
import thunder.torch as ltorch
from tests.counting import calls_during
from tests.kernels_in_use import EVERY_REGION
from thunder.core.check import check
from thunder.core.paths import decided_first
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.regions import MOST, SMALL, convex_regions, schedule
from thunder.core.rewrite import rewrite
from thunder.core.symbol import OpTags, Symbol
from thunder.extend import resolve_executors
from thunder.options import JitOptions
from thunder.pipeline import PASSES, lower
from thunder.tests.litgpt_model import GPT
from thunder.transforms.cse import cse, share
from thunder.transforms.dce import dce
from thunder.transforms.del_last_used import del_last_used

INPUTS = (torch.linspace(-1, 1, 4), torch.linspace(0, 2, 4))
OPERATIONS = [ltorch.sin, ltorch.cos, ltorch.add, ltorch.mul, ltorch.maximum]
EFFECT = Symbol("note", lambda a: None, tags=(OpTags.DONT_DCE,), fn=lambda a: None, is_prim=True)
SPLIT = "split"

# a random program: for each line what it does and which of the values before it reads; which values are returned
LINES = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 3, 4, SPLIT, "note"]), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=25,
)
RETURNED = st.lists(st.integers(0, 40), min_size=1, max_size=4)
PROGRAMS = st.tuples(LINES, RETURNED)
SETTINGS = settings(deadline=None, max_examples=120)


def program_of(description):
    lines, returned = description

    def program(a, b):
        values = [a, b]
        for what, i, j in lines:
            x, y = values[i % len(values)], values[j % len(values)]
            if what == "note":
                EFFECT(x)
            elif what == SPLIT:
                values += ltorch.split(x, 2)
                values[-2:] = [ltorch.cat([values[-1], values[-2]])]
            else:
                values.append(OPERATIONS[what](x) if what < 2 else OPERATIONS[what](x, y))
        return [values[i % len(values)] for i in returned]

    return program


def trace_of(description):
    return thunder.trace(use_dce=False)(program_of(description), *INPUTS)


def run(trace):
    return trace.python_callable()(*INPUTS)


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# ----------------------------------------------------------------------------------------------------------------
# regions


def paths(lines):
    """For each line the indices of all lines it depends on, directly or not, effects in their order included."""
    producer, before = {}, []
    for i, line in enumerate(lines):
        earlier = {producer[v] for v in line.inputs if v in producer}
        for j in list(earlier):
            earlier |= before[j]
        before.append(earlier)
        producer.update(dict.fromkeys(line.outputs, i))
    return before


@SETTINGS
@given(PROGRAMS, st.sets(st.sampled_from(["sin", "cos", "add", "mul", "maximum", "cat", "split"])))
def test_regions_are_convex_and_can_run(description, taken):
    trace = trace_of(description)
    lines = trace.bound_symbols
    groups = convex_regions(lines, lambda line: line.sym.name in taken)
    assert sorted(i for g in groups for i in g) == list(range(len(lines))), "every line once"
    before = paths(lines)
    for group in groups:
        inside = set(group)
        for i in group:
            for middle in before[i] - inside:
                assert not (before[middle] & inside), "a path leads out of the group and back in"
        assert len(group) == 1 or all(lines[i].sym.name in taken for i in group)
        assert sorted(group) == list(group)
    effects = [i for g in groups for i in g if OpTags.DONT_DCE in lines[i].sym.tags]
    assert effects == sorted(effects), "effects keep their order"
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    for e in effects:
        assert all((group_of[i] < group_of[e]) == (i < e) for i in range(len(lines)) if i != e), (
            "nothing moves across an effect"
        )
    regions = schedule(lines, groups, trace.output_proxies)
    known = set(trace.args)
    for region in regions:
        assert set(region.inputs) <= known
        known |= set(region.outputs)
        produced = {o for line in region.bound_symbols for o in line.outputs}
        later = {v for other in regions if other is not region for v in other.inputs} | set(trace.output_proxies)
        assert set(region.outputs) == produced & later, "exactly what is read outside"
    assert equal(run(trace.replace(bound_symbols=[line for r in regions for line in r.bound_symbols])), run(trace))


def test_a_chain_is_one_region_and_a_detour_splits_it():
    trace = thunder.trace()(lambda a, b: ltorch.mul(ltorch.sin(a), ltorch.cos(ltorch.sin(b))), *INPUTS)
    assert [len(g) for g in convex_regions(trace.bound_symbols, lambda line: True)] == [4]
    detour = thunder.trace()(lambda a, b: (lambda s: ltorch.mul(s, ltorch.matmul(s, s)))(ltorch.sin(a)), *INPUTS)
    groups = convex_regions(detour.bound_symbols, lambda line: line.sym.name != "matmul")
    assert groups == [[0], [1], [2]], "sin and mul in one group would need the product before and after"


def test_groups_that_read_the_same_join_where_no_path_leads_between_them():
    def groups_of(program):
        return convex_regions(thunder.trace()(program, *INPUTS).bound_symbols, lambda line: line.sym.name != "matmul")

    apart = groups_of(lambda a, b: (ltorch.matmul(ltorch.sin(a), b), ltorch.mul(a, ltorch.matmul(b, b))))
    assert apart == [[2], [0, 3], [1]], "sin waits for the product that mul reads, and the product of sin for both"
    path = groups_of(lambda a, b: ltorch.mul(a, ltorch.matmul(ltorch.sin(a), b)))
    assert path == [[0], [1], [2]], "mul waits for what reads sin"
    producer = groups_of(
        lambda a, b: (lambda s: (ltorch.matmul(s, b), ltorch.mul(s, ltorch.matmul(b, b))))(ltorch.sin(a))
    )
    assert producer == [[2], [0, 3], [1]], "mul reads what sin makes, and so does a product that mul does not wait for"


@pytest.mark.parametrize("size, device, joined", [(10, "meta", True), (10, "cpu", False), (SMALL + 1, "meta", False)])
def test_small_groups_over_one_space_join_where_they_are_launched(size, device, joined):
    x, y, z = (torch.empty(n, device=device) for n in (size, size, 3))
    lines = thunder.trace()(
        lambda x, y, z: (ltorch.sin(ltorch.cos(x)), ltorch.sin(ltorch.cos(y)), ltorch.sin(ltorch.cos(z))), x, y, z
    ).bound_symbols
    assert convex_regions(lines, lambda line: True) == ([[0, 1, 2, 3], [4, 5]] if joined else [[0, 1], [2, 3], [4, 5]])


def test_joined_groups_are_of_bounded_length():
    def program(a, b):
        for _ in range(2 * MOST):
            a = ltorch.sin(a)
        return a, [ltorch.mul(a, n) for n in range(2 * MOST)]

    groups = convex_regions(thunder.trace()(program, *INPUTS).bound_symbols, lambda line: True)
    assert max(map(len, groups)) == MOST and len(groups) <= 6


@pytest.mark.parametrize("steps, joined", [(1, True), (20, False)])
def test_what_is_far_apart_does_not_join(steps, joined):
    """Two groups that read the same values, with lines that run apart between them: as one they would keep the results
    of the second from the start."""

    def program(a, b):
        shared, x = ltorch.cos(a), b
        first = ltorch.mul(shared, ltorch.sin(b))
        for _ in range(steps):
            x = ltorch.neg(x)
        return first, x, ltorch.add(shared, ltorch.sin(b)), ltorch.tan(a)

    lines = thunder.trace()(program, *INPUTS).bound_symbols
    home = {
        lines[i].sym.name: n
        for n, group in enumerate(convex_regions(lines, lambda line: line.sym.name != "neg"))
        for i in group
    }
    assert (home["mul"] == home["add"]) == (home["mul"] == home["tan"]) == joined


# ----------------------------------------------------------------------------------------------------------------
# rewriting


@SETTINGS
@given(PROGRAMS)
def test_rewriting_to_the_same_changes_nothing(description):
    trace = trace_of(description)
    rewritten = rewrite(trace, lambda line, out: out.write(line))
    assert rewritten.bound_symbols == trace.bound_symbols and all(
        a is b for a, b in zip(rewritten.bound_symbols, trace.bound_symbols)
    )


@SETTINGS
@given(PROGRAMS)
def test_rewriting_an_operation_another_way(description):
    """cos(x) by sin(x + pi/2), maximum(x, y) by where: under the old names, so that nothing else changes."""
    trace = trace_of(description)

    def rule(line, out):
        if line.sym.name == "maximum":
            out.trace(lambda x, y: ltorch.where(x > y, x, y), line)
        else:
            out.write(line)

    rewritten = check(rewrite(trace, rule))
    assert not any(line.sym.name == "maximum" for line in rewritten.bound_symbols)
    assert [p.name for p in rewritten.output_proxies] == [p.name for p in trace.output_proxies] and equal(
        run(rewritten), run(trace)
    )


@SETTINGS
@given(PROGRAMS)
def test_rewriting_lines_away(description):
    """Every sin(x) is read as x: chains of dropped values end at what is there."""
    trace = trace_of(description)
    rewritten = rewrite(
        trace, lambda line, out: out.alias({line.output: line.args[0]}) if line.sym.name == "sin" else out.write(line)
    )
    check(rewritten)
    lines, returned = description
    identity = Symbol("same", decomposition=lambda a: a)
    OPERATIONS[0] = identity
    try:
        want = run(trace_of(description))
    finally:
        OPERATIONS[0] = ltorch.sin
    assert equal(run(rewritten), want)


def test_rewritten_lines_may_return_arguments_and_numbers():
    trace = thunder.trace()(lambda a, b: ltorch.mul(ltorch.add(a, b), ltorch.add(b, b)), *INPUTS)
    rewritten = check(
        rewrite(
            trace, lambda line, out: out.trace(lambda x, y, **k: y, line) if line.sym.name == "add" else out.write(line)
        )
    )
    assert [line.sym.name for line in rewritten.bound_symbols] == ["mul"] and torch.equal(
        run(rewritten), INPUTS[1] ** 2
    )


# ---------------------------------------------------------------------------------------------------------------- dce,
# cse


@SETTINGS
@given(PROGRAMS)
def test_dce_keeps_what_is_needed(description):
    trace = trace_of(description)
    cleaned = check(dce(trace))
    assert equal(run(cleaned), run(trace))
    notes = [line for line in trace.bound_symbols if line.sym is EFFECT]
    assert [line for line in cleaned.bound_symbols if line.sym is EFFECT] == notes
    read = {v for line in cleaned.bound_symbols for v in line.inputs} | set(cleaned.output_proxies)
    assert all(line.sym is EFFECT or set(line.outputs) & read for line in cleaned.bound_symbols), (
        "nothing useless stays"
    )
    assert dce(cleaned).bound_symbols == cleaned.bound_symbols


@SETTINGS
@given(PROGRAMS)
def test_cse_computes_equal_expressions_once(description):
    trace = trace_of(description)
    deduplicated = check(cse(trace))
    assert equal(run(deduplicated), run(trace))
    keys = [line.rhs for line in deduplicated.bound_symbols if line.sym is not EFFECT]
    assert len(keys) == len(set(keys)) and cse(deduplicated).bound_symbols == deduplicated.bound_symbols
    assert sum(line.sym is EFFECT for line in deduplicated.bound_symbols) == sum(
        line.sym is EFFECT for line in trace.bound_symbols
    )


def test_cse_tells_numbers_apart_and_leaves_random_numbers_alone():
    trace = thunder.trace()(
        lambda a, b: (
            a * 1,
            a * 1.0,
            a * 1,
            a * 0j,
            a * -0j,
            ltorch.rand_like(a),
            ltorch.rand_like(a),
            ltorch.split(a, 2),
            ltorch.split(a, 2),
        ),
        *INPUTS,
    )
    deduplicated = cse(trace)
    assert [line.sym.name for line in deduplicated.bound_symbols] == ["mul"] * 4 + ["rand_like"] * 2 + ["split"]
    assert deduplicated.output[0] is deduplicated.output[2] and deduplicated.output[7][1] is deduplicated.output[8][1]


@SETTINGS
@given(PROGRAMS)
def test_what_leaves_a_program_has_memory_of_its_own(description):
    """Shared is what is used inside."""
    trace = trace_of(description)
    deduplicated = check(share(trace))
    assert equal(run(deduplicated), run(trace))
    assert deduplicated.output == trace.output or [o.name for o in deduplicated.output_proxies] == [
        o.name for o in trace.output_proxies
    ]


def test_data_dependent_sizes_are_not_shared():
    """Whatever has such a size, or makes one, names its own."""

    def program(x):
        a, b = x[x > 0], x[x > 0]
        return (a * 2).sum() + (b * 3).sum() + (a * b).sum(), torch.nonzero(x).shape[0] + torch.nonzero(x).shape[0]

    compiled = thunder.jit(program, executors=[EVERY_REGION])
    for n in (5, 9):
        x = torch.linspace(-1, 2, n).requires_grad_()
        (a, i), (b, j) = compiled(x), program(x)
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(torch.autograd.grad(a, x), torch.autograd.grad(b, x))
        assert i == j
    deduplicated = next(t for t in thunder.last_traces(compiled) if "Common Subexpression Elimination" in t.provenance)
    named = [o.name for b in deduplicated.bound_symbols for o in b.outputs]
    assert [n for n in named if n in ("a", "b")] == ["a", "b"] and len(named) == len(set(named))


def test_casts_of_one_value_are_shared_by_its_layers():
    """Gradients are added up in the precision in which eager adds them up."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    class Together(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return sum(layer(x).float() for layer in self.layers)

    module = Together()
    compiled = thunder.jit(module, executors=[EVERY_REGION])
    x = torch.randn(4, 8).requires_grad_()
    actual, want = compiled(x), module(x)
    torch.testing.assert_close(actual, want, rtol=1e-2, atol=1e-2)
    trace = next(t for t in thunder.last_traces(compiled) if "Common Subexpression Elimination" in t.provenance)
    casts = [b for b in trace.bound_symbols if b.sym.name == "to" and b.args and b.args[0].name == "x"]
    assert len(casts) == 1
    a, b = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (actual, want))
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------------------------------------------------- del


@SETTINGS
@given(PROGRAMS)
def test_everything_is_freed_after_its_last_use(description):
    trace = trace_of(description)
    with_del = check(del_last_used(trace))
    assert equal(run(with_del), run(trace))
    alive = {a: None for a in with_del.args}
    deleted = []
    for i, line in enumerate(with_del.bound_symbols):
        if line.sym.name == "python_del":
            deleted += line.args
            later = {v for other in with_del.bound_symbols[i + 1 :] for v in other.inputs} | set(
                with_del.output_proxies
            )
            assert not later & set(line.args), "nothing is read after its del"
            before = with_del.bound_symbols[i - 1] if i else None
            assert before is None or set(line.args) <= {*before.inputs, *before.outputs} | set(with_del.args), (
                "right after the last use"
            )
        alive.update(dict.fromkeys(line.outputs))
    assert len(deleted) == len(set(deleted))
    assert set(alive) - set(deleted) == set(with_del.output_proxies) & set(alive), "everything but the result is freed"
    assert [line for line in with_del.bound_symbols if line.sym.name != "python_del"] == list(trace.bound_symbols)


def test_intermediates_really_go_before_the_end():
    alive = []

    def observe(a):
        gc.collect()
        alive.append([r() is not None for r in references])
        return a + 0

    references = []

    def remember(a):
        sines = a.sin()
        references.append(weakref.ref(sines))
        return sines

    ex = thunder.extend.OperatorExecutor("observing")
    keep = ex.register_operator("remember", meta=lambda a: TensorProxy(like=a), fn=remember)
    look = ex.register_operator("look", meta=lambda a: TensorProxy(like=a), fn=observe)
    compiled = thunder.jit(lambda a: look(look(keep(a) * 2) + 1), executors=[ex])
    compiled(INPUTS[0])
    assert alive == [[False], [False]]


# ----------------------------------------------------------------------------------------------------------------
# budgets, by counting


@pytest.fixture(scope="module")
def measured():
    """{blocks: (instructions, lines made, guards, prologue lines, interpreted frames, lines executed)} of a Llama-style
    model."""
    results = {}
    for blocks in (2, 4, 8):
        model = GPT.from_name("llama2-like", n_layer=blocks, block_size=16).eval()
        compiled = thunder.jit(model)
        with torch.no_grad():
            compiled(torch.zeros(1, 8, dtype=torch.long))
        stats = thunder.compile_stats(compiled)
        captured = stats.last_entry.captured
        results[blocks] = (
            stats.interpreted_instructions, stats.bound_symbols_created, captured.guard_count,
            len(stats.last_prologue_traces[-1].bound_symbols),
            captured.frames.total(), len(stats.last_traces[-1].bound_symbols),
        )  # fmt: skip
    return results


BUDGETS = {
    "interpreted instructions": 700,
    "lines made": 50,
    "guards": 90,
    "prologue lines": 75,
    "interpreted frames": 30,
    "lines executed": 95,
}


@pytest.mark.parametrize("index, what", list(enumerate(BUDGETS)), ids=list(BUDGETS))
def test_budgets_of_a_llama_block(measured, index, what):
    two, four, eight = (measured[n][index] for n in (2, 4, 8))
    block = (four - two) / 2
    assert 0 < block <= BUDGETS[what]
    assert eight - four == 4 * block, "each further block costs the same"


def test_passes_are_linear_in_the_number_of_lines():
    """Python calls made by all passes together and by printing, for chains of 50, 100, 200 lines."""
    executors = resolve_executors(["torch"])

    def chain(length):
        def program(a, b):
            for i in range(length // 5):
                a = ltorch.softmax(ltorch.linear(a, b), -1) * (i + 2) + ltorch.split(a, 2, -1)[0].sum()
            return a

        return thunder.trace()(program, torch.ones(4, 4), torch.ones(4, 4))

    traces = {n: chain(n) for n in (50, 100, 200)}
    lower(chain(20), JitOptions(passes=PASSES), executors)  # whatever is made once is made
    counts = {
        n: calls_during(lambda t=t: str(lower(t, JitOptions(passes=PASSES), executors)[-1])) for n, t in traces.items()
    }
    step = (counts[100] - counts[50]) / 50
    assert abs((counts[200] - counts[100]) / 100 - step) < 0.02 * step
    assert step < 450, "calls a line, decomposition and text included"
    executed = {
        n: calls_during(lambda t=t: lower(t, JitOptions(passes=PASSES), executors))
        for n, t in ((n, chain(n)) for n in (50, 100))
    }
    assert (executed[100] - executed[50]) / 50 < 80


def test_no_proxy_is_compared_by_value():
    """A comparison of proxies outside of a trace is a mistake that says so, not an endless loop."""
    x = TensorProxy("x", shape=(2,), dtype="float32", device="cpu")
    y = x.replace(name="y")
    assert isinstance(x, Proxy)
    with pytest.raises(thunder.errors.MissingImplementationError, match="given a value of a trace"):
        x == y


def test_a_decision_and_what_it_depends_on_come_first():
    def program(x, mask):
        y = x.exp()
        if mask.to(torch.bool).all():
            return (y * 2).sum()
        return y

    compiled, x, mask = thunder.jit(program), torch.ones(4), torch.ones(4)
    assert torch.equal(compiled(x, mask), program(x, mask))
    lines = compiled.programs[0].captured.computation_traces[0].bound_symbols
    names = [line.sym.name for line in decided_first(lines)]
    decision = names.index("check_decision")
    assert [line.sym.name for line in lines].index("exp") < names.index("exp") and decision < names.index("exp")
    assert sorted(names) == sorted(line.sym.name for line in lines)


def test_a_decision_stays_behind_effects_and_what_it_depends_on():
    def program(x):
        y = x.exp()
        z = torch.rand(4) + x
        if y.sum() > 0:
            return z * y
        return z

    compiled, x = thunder.jit(program), torch.ones(4)
    compiled(x)
    lines = compiled.programs[0].captured.computation_traces[0].bound_symbols
    moved = [line.sym.name for line in decided_first(lines)]
    assert moved.index("exp") < moved.index("check_decision")
    effects = [line.sym.name for line in lines if OpTags.DONT_DCE in line.sym.tags]
    assert [name for name in moved if name in effects] == effects and len(effects) >= 2
