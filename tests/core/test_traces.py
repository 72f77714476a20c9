"""Symbols, lines and traces: recording, naming, decompositions, text, compiled text, and what `check` finds."""

import dis
import gc
import linecache
import re
import traceback

import pytest
import torch

import thunder
import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.check import check
from thunder.core.codegen import line_owners
from thunder.core.proxies import AnyProxy, CollectionProxy, IntegerProxy, TensorProxy
from thunder.core.symbol import (
    BoundSymbol,
    Context,
    Names,
    OpTags,
    Recorder,
    Symbol,
    adopt,
    current_recorder,
    detached,
    recording,
)
from thunder.core.symbolic import Decisions
from thunder.core.trace import Trace, TraceCtx, TraceInfo, from_trace, is_tracing, timed_pass, tracectx
from thunder.errors import MissingImplementationError, TraceCheckError
from thunder.extend import resolve_executors
from thunder.options import JitOptions
from thunder.pipeline import PASSES, lower
from thunder.tests.litgpt_model import GPT
from thunder.transforms.del_last_used import python_del

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def tensor(*shape, name="x", requires_grad=False, dtype="float32"):
    return TensorProxy(name, shape=shape, dtype=dtype, device="cpu", requires_grad=requires_grad)


def record(function, *args, **context):
    """The lines and the result of a function of proxies."""
    names = Names()
    names.taken |= {a.name for a in args if isinstance(a, TensorProxy)}
    with recording(Recorder(Context(names, **context))) as recorder:
        out = function(*args)
    return recorder.bound_symbols, out


def lowered(trace):
    return lower(trace, JitOptions(passes=PASSES), resolve_executors(["torch"]))


# ----------------------------------------------------------------------------------------------------------------
# symbols


def test_keywords_are_put_in_their_positions():
    x, y = tensor(2, 3), tensor(2, 3, name="y")
    for call in (
        lambda: ltorch.softmax(x, dim=1), lambda: ltorch.softmax(input=x, dim=1), lambda: ltorch.softmax(x, 1),
            lambda: ltorch.softmax(dim=1, a=x),
        lambda: ltorch.softmax(self=x, axis=1),
    ):  # fmt: skip
        (line,), _ = record(call)
        assert line.args[:2] == (x, 1) and "dim" not in line.kwargs
    (line,), _ = record(lambda: ltorch.add(x, other=y, alpha=2))
    assert line.args == (x, y) and line.kwargs == {"alpha": 2}
    for call, message in (
        (lambda: ltorch.softmax(dim=1), "missing 1 required positional argument: 'a'"),
        (lambda: ltorch.softmax(x, 1, dim=1), "multiple values for argument 'dim'"),
        (lambda: ltorch.softmax(x, 1, nonsense=1), "nonsense"),
    ):
        with pytest.raises(TypeError, match=message):
            record(call)


def test_names_are_made_and_claimed():
    names = Names()
    assert [names.make(), names.make(), names.make("i")] == ["t0", "t1", "i0"]
    assert [names.claim("x"), names.claim("x"), names.claim("x"), names.claim("t2"), names.make()] == [
        "x",
        "x_0",
        "x_1",
        "t2",
        "t3",
    ]
    lines, out = record(lambda x: ltorch.add(ltorch.sin(x), x), tensor(2))
    assert [line.output.name for line in lines] == ["t0", "t1"] and out is lines[1].output


def test_requires_grad_follows_the_inputs():
    x, w, i = tensor(2, 2), tensor(2, 2, name="w", requires_grad=True), tensor(2, 2, name="i", dtype="int64")
    assert [record(f)[1].requires_grad for f in (lambda: x + x, lambda: x * w, lambda: w > 0, lambda: i + 1)] == [
        False,
        True,
        False,
        False,
    ]
    assert not record(lambda: w + 1, grad_enabled=False)[1].requires_grad


def test_a_result_that_is_an_argument_leaves_no_line():
    x = tensor(2)
    lines, out = record(lambda: ltorch.to(x, torch.float32))
    assert lines == [] and out is x


def test_a_symbol_outside_of_a_trace_is_its_function():
    assert torch.equal(ltorch.mul(X, 2), X * 2)
    assert not is_tracing() and current_recorder() is None
    with pytest.raises(MissingImplementationError, match="mine was called outside of a trace"):
        Symbol("mine", lambda a: a)(X)
    assert repr(ltorch.mul) == "<Symbol ltorch.mul>" and ltorch.mul.qualified_name == "ltorch.mul" and prims.mul.is_prim
    with pytest.raises(AttributeError, match="has no operation 'nonsense'"):
        ltorch.nonsense
    with pytest.raises(AttributeError, match="has no primitive 'nonsense'"):
        prims.nonsense


def test_a_symbol_typed_by_its_decomposition():
    twice = Symbol("twice", decomposition=lambda a: (a + a, a))
    (line,), (double, same) = record(twice, tensor(2))
    assert double.name == "t0" and same is line.args[0]
    assert [s.sym.name for s in line.subsymbols] == ["add"] and line.subsymbols[0].output is double
    fake = Symbol("fake", decomposition=lambda a: TensorProxy(like=a))
    (line,), _ = record(fake, tensor(2))
    assert fake.is_prim and fake.meta is not None and line.subsymbols == (), (
        "it makes proxies and computes nothing: a meta rule"
    )


COMPOSITES = {
    "softmax": lambda x: ltorch.softmax(x, -1),
    "gelu": lambda x: ltorch.gelu(x),
    "layer_norm": lambda x: ltorch.layer_norm(x, (3,)),
    "split": lambda x: ltorch.split(x, 2, 1),
    "var": lambda x: ltorch.var(x, 0),
    "linear": lambda x: ltorch.linear(x, x),
    "einsum": lambda x: ltorch.einsum("ij,kj->ik", x, x),
    "silu": lambda x: ltorch.silu(x),
    "reshape": lambda x: ltorch.reshape(x, (3, 2)),
    "where": lambda x: ltorch.where(x > 0, x, 0.0),
    "cross_entropy": lambda x: ltorch.cross_entropy(x, ltorch.softmax(x, 1)),
    "index": lambda x: x[:, 1:],
}


def every_line(lines):
    for line in lines:
        yield line
        yield from every_line(line.subsymbols)


@pytest.mark.parametrize("name", COMPOSITES)
def test_decomposed_lines_compute_the_same_names(name):
    """Running the decomposition in the place of the line gives the values of the line, level by level."""
    trace = thunder.trace()(COMPOSITES[name], X)
    want = lowered(trace)[-1].python_callable()(X)
    opened = 0
    while True:
        lines, aliases = [], {}
        for line in trace.bound_symbols:
            line = line.swap(aliases)
            parts = line.subsymbols
            if parts:
                opened += 1
                produced = {o for p in parts for o in p.outputs} | set(line.aliases)
                assert set(line.outputs) <= produced, "the same outputs, under the same names"
                lines += [p.swap(aliases) for p in parts]
                aliases |= {old: aliases.get(new, new) for old, new in line.aliases.items()}
            else:
                lines.append(line)
        if len(lines) == len(trace.bound_symbols) and all(a is b for a, b in zip(lines, trace.bound_symbols)):
            break
        from thunder.core.proxies import Proxy, map_structure

        output = map_structure(lambda v: aliases.get(v, v) if isinstance(v, Proxy) else v, trace.output)
        trace = check(trace.replace(bound_symbols=lines, output=output))
        got = lowered(trace)[-1].python_callable()(X)
        for a, b in zip(
            got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert opened and all(line.sym.is_prim for line in trace.bound_symbols)


def test_lines_are_copied_and_never_changed():
    (line, _), _ = record(lambda x: ltorch.add(ltorch.mul(x, 2.0), 1), tensor(2))
    x, y = line.args[0], tensor(2, name="y")
    other = line.swap({x: y})
    assert (
        other.args == (y, 2.0)
        and line.args == (x, 2.0)
        and other.output is line.output
        and other.has_input(y)
        and not line.has_input(y)
    )
    assert line.swap({y: x}) is line, "nothing to swap"
    assert line.from_bsym(args=(x, 3.0)).args == (x, 3.0) and line.subsymbols is line.replace().subsymbols
    assert (line.flat_proxy_args, line.flat_proxy_outs) == ((x,), (line.output,)) and line.tags == ltorch.mul.tags
    assert repr(line) == 't0 = ltorch.mul(x, 2.0)  # t0: "cpu f32[2]"' and line.python(print_depth=1) == [repr(line)]
    bound = ltorch.mul.bind(x, 2.0, output=line.output)
    assert bound.rhs == line.rhs != line.from_bsym(args=(x, 2)).rhs != line.from_bsym(args=(x, True)).rhs


def test_adopt():
    inner, out = record(lambda x: (ltorch.sin(x), x, ltorch.cos(x)), x := tensor(2))
    wanted = (tensor(2, name="a"), tensor(2, name="b"), tensor(2, name="c"))
    lines, aliases = adopt(inner, out, wanted)
    assert [line.output for line in lines] == [wanted[0], wanted[2]] and aliases == {wanted[1]: x}
    with pytest.raises(ValueError):
        adopt(inner, out, wanted[:2])


def test_detached_lines_are_not_part_of_the_program():
    with recording(Recorder()) as recorder:
        with detached() as inner:
            ltorch.sin(tensor(2))
        assert len(inner.bound_symbols) == 1 and recorder.bound_symbols == []
        assert inner.context is recorder.context


# ---------------------------------------------------------------------------------------------------------------- text


def traced(function, *args):
    compiled = thunder.jit(function)
    with torch.no_grad():
        compiled(*args)
    return thunder.last_traces(compiled)


def without_time(text):
    return re.sub(r"\(took \d+ milliseconds\)", "(took 0 milliseconds)", text)


def test_golden_text_of_a_small_program():
    def program(x, y):
        scaled = x * 2
        joined = torch.cat([scaled, y], 1)
        first, rest = torch.split(joined, [1, 5], 1)
        return {"sum": first.sum(), "rest": [rest, 3]}

    assert (
        without_time(str(traced(program, X, X)[-1]))
        == """\
# Constructed by Delete Last Used (took 0 milliseconds)
import torch
from thunder.executors.torchex import no_autocast

@torch.no_grad()
@no_autocast
def computation(x, y):
  # x: "cpu f32[2, 3]"
  # y: "cpu f32[2, 3]"
  scaled = torch.mul(x, float32_2)  # scaled: "cpu f32[2, 3]"
    # scaled = ltorch.mul(x, 2)  # scaled: "cpu f32[2, 3]"
      # scaled = prims.mul(x, 2)  # scaled: "cpu f32[2, 3]"
  del x
  joined = torch.cat([scaled, y], 1)  # joined: "cpu f32[2, 6]"
    # joined = ltorch.cat([scaled, y], 1)  # joined: "cpu f32[2, 6]"
      # joined = prims.cat([scaled, y], 1)  # joined: "cpu f32[2, 6]"
  del scaled, y
  (first, rest) = torch.split(joined, [1, 5], 1)
    # (first, rest) = ltorch.split(joined, [1, 5], 1)
      # first = prims.slice_prim(joined, (0, 0), (2, 1), (1, 1))  # first: "cpu f32[2, 1]"
      # rest = prims.slice_prim(joined, (0, 1), (2, 6), (1, 1))  # rest: "cpu f32[2, 5]"
  del joined
  t4 = torch.sum(first)  # t4: "cpu f32[]"
    # t4 = ltorch.sum(first)  # t4: "cpu f32[]"
      # t4 = prims.sum(first, (0, 1))  # t4: "cpu f32[]"
  del first
  return {'sum': t4, 'rest': [rest, 3]}"""
    )


def test_the_acquired_trace_has_no_header_and_shows_ltorch():
    text = str(traced(lambda x: x.sin(), X)[0])
    assert text.startswith(
        "import thunder.torch as ltorch\nimport torch\nfrom thunder.executors.torchex import "
        "no_autocast\n\n@torch.no_grad()\n"
    )
    assert (
        '  t0 = ltorch.sin(x)  # t0: "cpu f32[2, 3]"\n    # t0 = prims.sin(x)  # t0: "cpu f32[2, 3]"\n  return t0'
        in text
    )


def test_print_depth():
    trace = traced(lambda x: torch.softmax(x, 1), X)[-1]

    def depths(text):
        return [len(line) - len(line.lstrip()) for line in text.splitlines() if line.startswith("  ") and "=" in line]

    assert str(trace) == repr(trace) == trace.python(print_depth=-1, memory=True)
    assert trace.python() == trace.python(print_depth=1) and depths(trace.python()) == [2]
    assert set(depths(trace.python(print_depth=2))) == {2, 4}
    assert set(depths(trace.python(print_depth=3))) == {2, 4, 6}
    assert set(depths(str(trace))) > {2, 4, 6}
    assert "@torch.no_grad()" not in trace.python(include_decorators=False) and "no_autocast" not in trace.python(
        include_decorators=False
    )


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        hidden, gate = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([hidden, gate.sigmoid()], -1).contiguous(memory_format=torch.contiguous_format))


def test_the_text_for_readers(capsys):
    """One line an operation, with types, the user's line and module, and gradients called after their values; it runs
    like the text with all `del` lines."""
    compiled, x = thunder.jit(Block()), torch.randn(3, 4, requires_grad=True)
    compiled(x).sum().backward()
    forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
    text, line = forward.python(), Block.forward.__code__.co_firstlineno + 1
    assert f"  # 2 x cpu f32[3, 4] | test_traces.py:{line}\n" in text and f"| test_traces.py:{line}, norm" in text
    assert " del " not in text and 'def augmented_forward_fn(\n    x: "cpu f32[3, 4]", ' in text
    assert max(len(row) for row in text.split("\n") if row.startswith("    ")) <= 120
    assert "memory_format=torch.contiguous_format" in thunder.last_traces(compiled)[0].python()
    text = backward.python()
    assert "(d_x, d_t_norm_weight, d_t_norm_bias, " in text.split("return ")[1]
    assert "C0, _ = saved_for_backward\n" in text and "clear_collection" not in text
    for trace in (forward, backward):
        operations = [b for b in trace.bound_symbols if b.outputs]
        assert len(trace.python().split("\n")) <= len(operations) + 14
        assert " del " in trace.python(memory=True) and trace.python(memory=True, depth=-1) == str(trace)
    space = forward.python_ctx()
    exec(forward.python(), space)
    (got,), _ = space[forward.name](x, *compiled.parameters())
    assert torch.equal(got, compiled(x))
    forward.print_readable()
    assert capsys.readouterr().out == forward.python() + "\n"
    forward.print_readable(colored=True)
    assert "\033[34mreturn\033[0m" in capsys.readouterr().out
    html = forward._repr_html_()
    assert html.startswith("<pre") and "&quot;cpu f32[3, 4]&quot;" in html


def test_literals_are_runnable():
    """Numbers without a literal, dtypes, devices, slices, strings and objects in arguments."""
    trace = traced(
        lambda x: (
            x.clamp(-float("inf"), float("nan")),
            torch.zeros(2, dtype=torch.int32),
            x[..., 1:],
            x.new_full((1,), 1e30),
            x.to(torch.float64, memory_format=torch.preserve_format),
        ),
        X,
    )[-1]
    text = str(trace)
    assert (
        'float("-inf")' in text
        and 'float("nan")' in text
        and 'torch.device("cpu")' in text
        and "torch.int32" in text
        and "1e+30" in text
    )
    got = trace.python_callable()(X)
    assert (
        got[0].isnan().all()
        and got[1].dtype == torch.int32
        and torch.equal(got[2], X[..., 1:])
        and got[4].dtype == torch.float64
    )


def test_texts_run_as_they_are_printed():
    model = GPT.from_name("llama2-like", n_layer=1, block_size=16).eval()
    compiled = thunder.jit(model)
    tokens = torch.randint(0, 320, (1, 5))
    with torch.no_grad():
        want = compiled(tokens)
    entry = thunder.compile_stats(compiled).interpreter_cache[0]
    inputs = entry.prologue_fn(model, (tokens,), {})
    for trace in thunder.last_traces(compiled):
        assert torch.equal(trace.python_callable()(*inputs), want), trace.provenance
        space = dict(trace.python_ctx())
        exec(str(trace), space)
        assert torch.equal(space["computation"](*inputs), want)


def test_save_trace(tmp_path):
    trace = traced(lambda x: x.sin(), X)[-1]
    path = tmp_path / "trace.py"
    trace.save_trace(path)
    space = {}
    exec(path.read_text(), space)
    assert path.read_text() == str(trace) + "\n" and torch.equal(space["computation"](X), X.sin())


def test_python_callable_and_its_decorators():
    w = X.clone().requires_grad_()
    trace = traced(lambda x: x.sin(), w)[-1]
    assert trace.python_callable() is trace.python_callable()
    assert trace.python_callable()(w).requires_grad, "without the decorators grad mode is the caller's"
    assert not trace.python_callable(include_decorators=True)(w).requires_grad
    assert trace.python_ctx() == {}


def test_objects_without_a_literal_are_passed_in():
    trace = traced(lambda x: x.contiguous(memory_format=torch.contiguous_format), X)[-1]
    assert trace.python_ctx() == {"_torch_memory_format_0": torch.contiguous_format}
    assert "memory_format=_torch_memory_format_0" in str(trace)


def test_generated_code_is_visible_in_tracebacks_and_leaves_with_its_function():
    trace = traced(lambda x: x.view(6), X)[-1]
    function = trace.python_callable()
    filename = function.__code__.co_filename
    try:
        function(X.T)
    except RuntimeError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        assert frame.filename == filename and frame.line.startswith("t0 = Tensor.view(x")
        assert line_owners(trace)[frame.lineno].sym.name == "view"
        del frame
    else:
        raise AssertionError("a view of a transposed tensor is an error")
    assert filename in linecache.cache
    del function, trace
    gc.collect()
    assert filename not in linecache.cache


def test_an_error_of_an_operation_names_the_users_line():
    compiled = thunder.jit(lambda x, i: x[i])
    compiled(X, torch.tensor([0, 1]))
    with pytest.raises(IndexError) as raised:
        compiled(X, torch.tensor([0, 7, 1]))
    (note,) = raised.value.__notes__
    assert (
        note.startswith(f"in the user's program: {__file__}:") and "compiled = thunder.jit(lambda x, i: x[i])" in note
    )


def test_prologue_and_epilogue_text():
    def program(x, n, box):
        box["seen"] = x
        return x * n

    compiled = thunder.jit(program)
    compiled(X, 3, {})
    prologue, epilogue = (
        str(thunder.last_prologue_traces(compiled)[-1]),
        str(thunder.last_epilogue_traces(compiled)[-1]),
    )
    assert prologue.startswith("import torch\n\ndef prologue(fn, args, kwargs):\n  if len(args) != 3: return was_is(")
    assert "  n = args[1]\n" in prologue and "check_tensor_metadata(x)" in prologue and "return (x,)" in prologue
    assert (
        epilogue.startswith("import torch\n\ndef epilogue(fn, args, kwargs, values):\n")
        and "o0 = args[2]\n  o0['seen'] = x" in epilogue
    )


# ----------------------------------------------------------------------------------------------------------------
# traces


def test_replace_and_builders():
    trace = thunder.trace()(lambda a: ltorch.cos(ltorch.sin(a)), X)
    assert (
        isinstance(trace, TraceCtx)
        and trace.replace(provenance="mine").get_provenance() == "mine"
        and trace.get_provenance() == ""
    )
    assert trace.siginfo() == [("a", trace.args[0])] and trace.has_name("t0") and not trace.has_name("t7")
    assert trace.make_name() == "t2" and trace.make_name("b") == "b" and trace.make_name(prefix="q") == "q0"
    builder = from_trace(trace)
    assert isinstance(builder, TraceCtx) and not isinstance(trace.bound_symbols[0], TraceCtx)
    assert builder.bound_symbols == [] and builder.args == list(trace.args)
    with tracectx(builder) as recorder:
        out = ltorch.exp(builder.args[0])
    assert recorder.bound_symbols == builder.bound_symbols and len(builder.bound_symbols) == 1 and not is_tracing()
    builder.output = out
    builder.set_provenance("mine")
    built = check(builder.trace())
    assert (built.provenance, len(trace.bound_symbols)) == ("mine", 2) and torch.equal(
        lowered(built)[-1].python_callable()(X), X.exp()
    )
    timed = timed_pass("My pass", trace, lambda t: builder)
    assert re.fullmatch(r"Constructed by My pass \(took \d+ milliseconds\)", timed.provenance) and timed.output is out


def test_from_trace_copies_everything_but_the_lines():
    trace = thunder.trace()(lambda a: ltorch.sin(a), X).replace(
        tags={"tag"}, info=TraceInfo(parameters={"a": "weight"})
    )
    copied = from_trace(trace).trace()
    assert (
        copied.bound_symbols == ()
        and copied.output is trace.output
        and copied.tags == {"tag"}
        and copied.info.parameters == {"a": "weight"}
        and copied.names is trace.names
    )


# ---------------------------------------------------------------------------------------------------------------- check


def whole():
    return thunder.trace()(lambda a, b: (ltorch.mul(ltorch.sin(a), b), a), X, X)


def broken(how):
    trace = whole()
    sin, mul = trace.bound_symbols
    a, b = trace.args
    t0, t1 = sin.output, mul.output
    lines = {
        "out of order": [mul, sin],
        "a line is missing": [mul],
        "defined twice": [sin, sin, mul],
        "an argument is overwritten": [sin.replace(output=b), mul],
        "one name for two values": [sin, mul.replace(args=(TensorProxy("t0", like=t0), b))],
        "read after del": [sin, BoundSymbol(python_del, (b,), {}, None), mul],
        "deleted twice": [sin, mul, BoundSymbol(python_del, (t0,), {}, None), BoundSymbol(python_del, (t0,), {}, None)],
        "returned after del": [sin, mul, BoundSymbol(python_del, (t1,), {}, None)],
        "wrong shape": [sin.replace(output=TensorProxy("t0", like=t0, shape=(3, 3))), mul],
        "wrong dtype": [sin, mul.replace(output=TensorProxy("t1", like=t1, dtype="float64"))],
        "wrong device": [sin, mul.replace(output=TensorProxy("t1", like=t1, device="meta"))],
        "wrong number of outputs": [sin, mul.replace(output=(t1, TensorProxy("t2", like=t1)))],
        "not a tensor": [sin, mul.replace(output=AnyProxy("t1"))],
    }[how]
    output = trace.output
    if how in ("wrong dtype", "wrong device"):
        output = (lines[-1].output, a)
    if how == "not a tensor":
        output = (lines[-1].output, a)
    return trace.replace(bound_symbols=lines, output=output)


WHAT = {
    "out of order": "t0 is used before it is defined", "a line is missing": "t0 is used before it is defined",
    "defined twice": "t0 is defined twice",
    "an argument is overwritten": "b is defined twice", "one name for two values": "t0 is used .* stands for two "
        "values", "read after del": "b is used .* deleted",
    "deleted twice": "t0 is used .* deleted", "returned after del": "t1 is returned but not defined",
    "wrong shape": r"f32\[3, 3\].* is what the trace says",
    "wrong dtype": "f64.* is what the trace says", "wrong device": "meta.* is what the trace says", "wrong number of "
        "outputs": "it has 2 values, the meta rule of ltorch.mul gives 1",
    "not a tensor": "is what the trace says",
}  # fmt: skip


@pytest.mark.parametrize("how", WHAT)
def test_check_finds(how):
    assert check(whole()).bound_symbols
    with pytest.raises(TraceCheckError, match=WHAT[how]):
        check(broken(how))


def test_check_says_where():
    with pytest.raises(TraceCheckError) as raised:
        check(broken("wrong shape").replace(provenance="Constructed by My pass"))
    assert "in computation (Constructed by My pass)\n  t0 = ltorch.sin(a)" in str(raised.value)


def test_a_transform_that_breaks_the_trace_is_found():
    class Breaking:
        def transform_trace_post_optimization(self, trace, **kwargs):
            return trace.replace(bound_symbols=trace.bound_symbols[1:])

    compiled = thunder.jit(
        lambda x: x.sin().cos(), transforms=[Breaking()], debug_options=thunder.DebugOptions(check_traces=True)
    )
    with pytest.raises(TraceCheckError, match="Transform Breaking"):
        compiled(X)


def test_other_proxies_print():
    saved = CollectionProxy([tensor(2)], "C0")
    number = IntegerProxy("i0", Decisions({"i0": 3}))
    trace = Trace("backward_fn", [saved, number], [], (saved, number * 2 + 1), Names())
    assert trace.python(include_decorators=False).splitlines()[2:] == [
        'def backward_fn(C0: "Collection", i0: "int 3"):', "  return (C0, (2*i0 + 1))",
    ]  # fmt: skip
    assert trace.python(include_decorators=False, memory=True).splitlines()[2:] == [
        "def backward_fn(C0, i0):", '  # C0: "Collection"', '  # i0: "int 3"', "  return (C0, (2*i0 + 1))",
    ]  # fmt: skip
    assert OpTags.AUTO_REGISTERED is OpTags.OPAQUE


def test_python_remembers_where_functions_of_a_program_are():
    """A lookup in `torch`, which has a `__getattr__`, costs as much as a small operation's share in each call."""

    def f(x):
        return torch.exp(x * 2) if torch.isnan(x).any() else x + 1

    compiled = thunder.jit(f)
    for _ in range(100):
        compiled(X)
    program = compiled.programs[-1].forward.python_callable()
    lookups = {i.opname for i in dis.get_instructions(program, adaptive=True) if i.opname.startswith("LOAD_ATTR")}
    assert lookups == {"LOAD_ATTR_MODULE"}
    assert program.__globals__["torch"].isnan is torch.isnan
    decorated = compiled.programs[-1].forward.python_callable(include_decorators=True)
    assert torch.equal(decorated(X), X + 1)


def test_values_have_the_names_of_the_users_variables():
    """A variable that is assigned again has a number; variables of PyTorch's own code name nothing twice."""

    def program(x, layers):
        h = torch.sin(x)
        h = h + x
        x = layers(h) * h
        return torch.cos(x)

    layers = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU())
    compiled = thunder.jit(program)
    compiled(X, layers)
    trace = thunder.last_traces(compiled)[0]
    names = [o.name for b in trace.bound_symbols for o in b.outputs]
    assert [n for n in names if not re.fullmatch(r"t\d+|input", n)] == ["h", "h_0", "x_0"]
