"""thunder.jit and the functions that ask a compiled function what it did: options, cache modes, queries, memory,
copies, threads, modes, neighbours."""

import contextlib
import copy
import dis
import functools
import gc
import inspect
import io
import pickle
import re
import runpy
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import thunder
import thunder.examine
import thunder.functional
from tests import fresh
from tests.kernels_in_use import EVERY_REGION
from thunder import compat
from thunder.errors import (
    CaptureError,
    FallbackWarning,
    OptionError,
    RecompileWarning,
    SharpEdgeError,
    SharpEdgeWarning,
)
from thunder.options import COMPILE_OPTIONS, RECOMPILE_WARNING_LIMIT, compile_option
from thunder.tests.litgpt_model import GPT
from thunder.tests.nanogpt_model import *  # noqa: F403  models for the trace checks


def scaled(x, n=2):
    """Multiplies."""
    return x * n


@thunder.jit
def decorated(x):
    return x + 1


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(x) * 2


ONES = torch.ones(2)
GLOBAL_MODULE = Twice()


# ----------------------------------------------------------------------------------------------------------------
# options


@pytest.mark.parametrize(
    "options, valid",
    [
        ({"cache": "constant"}, "'constant values', 'symbolic values', 'same input', 'no caching'"),
        ({"cache": 3}, "'constant values'"),
        ({"sharp_edges": "loud"}, "'allow', 'warn', 'error'"),
        ({"executors": ["nobody"]}, "torch"),
        ({"interpretation": "by hand"}, "python interpreter"),
        ({"langctx": "numpy"}, "'torch'"),
        ({"debug_options": {"check_traces": True}}, "thunder.DebugOptions"),
    ],
)
def test_bad_option_values_name_the_valid_ones(options, valid):
    with pytest.raises(OptionError, match=valid.replace("(", r"\(")):
        thunder.jit(scaled, **options)
    with pytest.raises(ValueError):  # OptionError is one
        thunder.jit(scaled, **options)


def test_option_spellings():
    for cache in ("symbolic values", "SYMBOLIC VALUES", thunder.CACHE_OPTIONS.SYMBOLIC_VALUES):
        assert thunder.cache_option(thunder.jit(scaled, cache=cache)) is thunder.CACHE_OPTIONS.SYMBOLIC_VALUES
    assert thunder.cache_option(thunder.jit(scaled)) is thunder.CACHE_OPTIONS.CONSTANT_VALUES
    for edges in ("warn", thunder.SHARP_EDGES_OPTIONS.WARN):
        assert (
            thunder.compile_data(thunder.jit(scaled, sharp_edges=edges)).sharp_edges is thunder.SHARP_EDGES_OPTIONS.WARN
        )
    for interpretation in (None, "python interpreter", "translate functions", "translate python"):
        assert torch.equal(thunder.jit(scaled, interpretation=interpretation)(ONES), 2 * ONES)
    assert torch.equal(thunder.jit(scaled, langctx=None)(ONES), 2 * ONES)


def test_old_spellings():
    with pytest.warns(UserWarning, match="old spelling of executors"):
        compiled = thunder.jit(scaled, executors_list=["torch"])
    assert [e.name for e in thunder.compile_data(compiled).executors_list] == ["torch", "python"]
    for old in ("early_transforms", "use_cudagraphs"):
        with pytest.raises(RuntimeError, match="is not an option anymore"):
            thunder.jit(scaled, **{old: True})


@pytest.mark.parametrize("wrong", [3, "f", [scaled]])
def test_what_is_not_callable(wrong):
    with pytest.raises(TypeError, match="compiles functions and modules"):
        thunder.jit(wrong)


def test_decorator_with_and_without_options():
    @thunder.jit
    def plain(x):
        return x + 1

    @thunder.jit(cache="no caching", max_entries=3)
    def with_options(x):
        return x + 2

    class Owner:
        k = 3

        @thunder.jit
        def method(self, x):
            return x * self.k

    assert torch.equal(plain(ONES), ONES + 1) and torch.equal(with_options(ONES), ONES + 2)
    assert thunder.cache_option(with_options) is thunder.CACHE_OPTIONS.NO_CACHING
    assert thunder.compile_data(with_options).compile_options == {"max_entries": 3}
    owner = Owner()
    assert torch.equal(owner.method(ONES), 3 * ONES)
    owner.k = 4
    assert torch.equal(owner.method(ONES), 4 * ONES)


def test_metadata_of_the_original():
    compiled = thunder.jit(scaled)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(compiled, name) == getattr(scaled, name)
    assert compiled.__wrapped__ is scaled
    assert inspect.signature(compiled) == inspect.signature(scaled)
    assert repr(compiled) == "<thunder.jit of scaled>"
    compiled(ONES, 2), compiled(ONES, 3)
    assert repr(compiled) == "<thunder.jit of scaled: calls 2, programs 2, compiled again because n was 2, is 3>"
    assert compiled._lc_cs is thunder.compile_stats(compiled) and compiled._lc_transforms == []


def test_arguments_are_bound_as_python_binds_them():
    compiled = thunder.jit(scaled)
    for args, kwargs in [
        ((ONES,), {}),
        ((ONES, 3), {}),
        ((ONES,), {"n": 4}),
        ((), {"x": ONES, "n": 5}),
        ((), {"n": 5, "x": ONES}),
    ]:
        assert torch.equal(compiled(*args, **kwargs), scaled(*args, **kwargs))
    for args, kwargs in [((), {}), ((ONES, 1, 2), {}), ((ONES,), {"m": 1}), ((ONES,), {"x": ONES})]:
        with pytest.raises(TypeError) as ours:
            compiled(*args, **kwargs)
        with pytest.raises(TypeError) as theirs:
            scaled(*args, **kwargs)
        assert str(ours.value) == str(theirs.value)
    assert torch.equal(compiled(ONES), 2 * ONES)


def test_sharp_edges():
    def program(x):
        print("side effect")
        return x + 1

    allowed = thunder.jit(program, sharp_edges="allow")
    with contextlib.redirect_stdout(io.StringIO()) as out, warnings.catch_warnings():
        warnings.simplefilter("error")
        allowed(ONES), allowed(ONES)
    assert out.getvalue() == "side effect\n" * 2 and thunder.last_sharp_edges(allowed) == []

    def checks_a_value(x):
        torch._assert((x > 0).all(), "positive")
        return x * 2

    with pytest.warns(SharpEdgeWarning, match="an assertion on a tensor's value") as caught:
        compiled = thunder.jit(checks_a_value)
        compiled(torch.ones(2, 3))
    assert caught[0].filename == __file__ and caught[0].lineno == checks_a_value.__code__.co_firstlineno + 1
    (edge,) = thunder.last_sharp_edges(compiled)
    assert edge.startswith("an assertion on a tensor") and "test_jit_api.py:" in edge
    refused = thunder.jit(program, sharp_edges="error")
    with pytest.raises(SharpEdgeError, match="print"):
        refused(ONES)


@contextlib.contextmanager
def declared(*args, **kwargs):
    option = compile_option(*args, **kwargs)
    try:
        yield option
    finally:
        del COMPILE_OPTIONS[option.name]


def test_compile_options_are_declared_and_say_who_used_them(capsys):
    described = "How regions are found.", "a test"
    with declared("fusion_kind", str, "dataflow", described[0], owner=described[1]) as kind:

        class Configured(thunder.extend.OperatorExecutor):
            def configured(self, options):
                chosen.append(options.get(kind))
                return self

        chosen = []
        for fusion_options in ({}, {"fusion_kind": "consecutive"}):
            compiled = thunder.jit(scaled, memory_budget=0.5, executors=[Configured("asks")], **fusion_options)
        assert chosen == ["dataflow", "consecutive"]
        thunder.last_compile_options(compiled)
        expected = (
            "Used compile options:\n\tfusion_kind. How regions are found.\nUnused compile options:\n\tmemory_budget\n"
        )
        assert capsys.readouterr().out == expected
        with pytest.raises(OptionError, match="fusion_kind=3 is not an option; valid: values of type str .How regions"):
            thunder.jit(scaled, fusion_kind=3)
        with pytest.raises(OptionError, match="a test has declared one of that name"):
            compile_option("fusion_kind", int, 3, "", owner="another")
        assert "fusion_kind: str = 'dataflow'  How regions are found. (of a test)" in listed_options(capsys)
    with pytest.raises(TypeError, match="unexpected keyword argument 'fusion_kind'"):
        thunder.jit(scaled, fusion_kind="dataflow")
    thunder.last_compile_options(thunder.jit(scaled))
    assert capsys.readouterr().out.splitlines() == ["No used options", "No unused options"]


def listed_options(capsys) -> str:
    sys.argv, saved_arguments = ["thunder", "options"], sys.argv
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("thunder", run_name="__main__", alter_sys=False)
    finally:
        sys.argv = saved_arguments
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_environment_is_read_in_one_file():
    """thunder/capture knows os.environ as something that programs read, and the launcher writes scripts that set it."""
    root = Path(thunder.__file__).parent
    reading = {str(p.relative_to(root)) for p in root.rglob("*.py") if re.search(r"os\.environ|getenv", p.read_text())}
    capture = {f"capture/{name}.py" for name in ("handlers", "native", "policy")}
    assert reading - capture - {"tests/measuring.py", "executors/triton_kernels/launcher.py"} == {"options.py"}


def test_every_option_is_listed(capsys):
    text = listed_options(capsys)
    for name in (*inspect.signature(thunder.jit).parameters, *COMPILE_OPTIONS, *thunder.DebugOptions._registered):
        assert name in ("fn", "compile_options") or f"  {name}: " in text, name
    assert "cache: 'constant values' | 'symbolic values'" in text and "THUNDER_CACHE_DIR: str" in text


@pytest.mark.parametrize(
    "options, hint",
    [
        ({"executor": ["torch"]}, "did you mean executors="),
        ({"memory_bugdet": 0.5}, "did you mean memory_budget="),
        ({"fullgraph": True}, "it is torch.compile's; a program is one graph here: leave it out"),
        ({"backend": "inductor"}, "it is torch.compile's; executors="),
        ({"zzz": 1}, "`python -m thunder options` lists those there are"),
    ],
)
def test_unknown_options_name_what_was_meant(options, hint):
    (name,) = options
    for compile in (
        lambda: thunder.jit(scaled, **options),
        lambda: thunder.jit(**options),
        lambda: thunder.functional.jit(scaled, **options),
    ):
        with pytest.raises(
            TypeError, match=re.escape(f"thunder.jit() got an unexpected keyword argument {name!r}: {hint}")
        ):
            compile()


@pytest.mark.parametrize("name", ["fusion_type", "nv_enable_matmul", "torch_compile_fullgraph"])
def test_options_of_2024_without_effect_say_so(name):
    with pytest.warns(UserWarning, match=re.escape(f"{name}=...) has no effect: ")) as caught:
        compiled = thunder.jit(scaled, **{name: True})
    assert caught[0].filename == __file__ and torch.equal(compiled(ONES), 2 * ONES)


@pytest.mark.parametrize(
    "options",
    [
        {"max_entries": 0},
        {"max_entries": True},
        {"max_entries": 1.0},
        {"memory_budget": "half"},
        {"disable_torch_autograd": 1},
        {"record_history": "yes"},
    ],
)
def test_options_of_a_wrong_type_or_value(options):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name}=.* is not an option; valid: "):
        thunder.jit(scaled, **options)


def test_transforms_are_applied_in_order():
    order = []

    class Noting:
        def __init__(self, name):
            self.name = name

        def transform_trace_post_optimization(self, trace, **kwargs):
            order.append((self.name, len(trace.bound_symbols)))
            return trace

    transforms = [Noting("first"), Noting("second")]
    compiled = thunder.jit(scaled, transforms=transforms)
    assert thunder.list_transforms(compiled) == transforms
    assert torch.equal(compiled(ONES), 2 * ONES)
    assert order == [("first", 2), ("second", 2)]
    assert [t.provenance.partition(" (")[0] for t in thunder.last_traces(compiled)][5:7] == [
        "# Constructed by Transform Noting"[2:]
    ] * 2


# ---------------------------------------------------------------------------------------------------------------- cache
# modes


def test_constant_values():
    compiled = thunder.jit(scaled)
    for n in (2, 3, 2, 3, 2.0, True):
        assert torch.equal(compiled(ONES, n), ONES * n)
    assert (thunder.cache_hits(compiled), thunder.cache_misses(compiled)) == (2, 4)
    assert thunder.last_recompile_reasons(compiled)[0] == "n was 2.0, is True"


def test_same_input_checks_nothing():
    model = Twice()
    compiled = thunder.jit(model, cache="same input")
    with torch.no_grad():
        for shape in ((2,), (3, 2), (1, 4, 2)):
            assert torch.equal(compiled(torch.ones(shape)), model(torch.ones(shape)))
    assert (thunder.cache_hits(compiled), thunder.cache_misses(compiled)) == (2, 1)
    stale = thunder.jit(lambda x, d, *, k=1: (x + d["y"][0]) * k, cache="same input")
    assert torch.equal(stale(ONES, {"y": [1 * ONES]}, k=2), 4 * ONES)  # also that two arguments are one tensor stays so
    assert torch.equal(stale(ONES, {"y": [5 * ONES]}, k=3), 12 * ONES)  # k is not looked at again
    with torch.inference_mode():
        assert torch.equal(stale(ONES, {"y": [ONES]}, k=2), 4 * ONES)
    text = str(thunder.last_prologue_traces(stale)[-1])
    assert "if " not in text and "return (" in text


def test_no_caching():
    compiled = thunder.jit(scaled, cache="no caching")
    for _ in range(3):
        assert torch.equal(compiled(ONES), 2 * ONES)
    assert (thunder.cache_hits(compiled), thunder.cache_misses(compiled)) == (0, 3)
    assert thunder.last_recompile_reasons(compiled) == ["no caching"]
    assert thunder.compile_stats(compiled).interpreter_cache == []


def test_counters_and_times():
    compiled = thunder.jit(scaled)
    stats = thunder.compile_stats(compiled)
    assert (stats.calls, stats.cache_hits, stats.cache_misses) == (0, 0, 0)
    compiled(ONES), compiled(ONES), compiled(torch.ones(3))
    assert (stats.calls, stats.cache_hits, stats.cache_misses) == (3, 1, 2)
    assert stats.last_compile_reasons == ["x.shape[0] was 2, is 3"] == thunder.last_recompile_reasons(compiled)
    assert stats.interpreted_instructions > 0 and stats.bound_symbols_created == 1
    times = [
        stats.last_cache_lookup_time, stats.last_trace_construction_time, stats.last_prologue_transformation_time,
        stats.last_prologue_execution_time,
        stats.last_computation_execution_time,
    ]  # fmt: skip
    assert all(type(t()) is int and t() > 0 for t in times)
    assert len(stats.interpreter_cache) == 2 and stats.last_traces[-1] is thunder.last_traces(compiled)[-1]
    assert callable(stats.last_computation) and callable(stats.last_prologue)


def test_the_last_traces_are_those_of_the_last_call():
    compiled = thunder.jit(scaled, cache="constant values")
    compiled(ONES, 2), compiled(ONES, 3)
    second = thunder.last_traces(compiled)[-1]
    compiled(ONES, 2)
    assert thunder.last_traces(compiled)[-1] is not second and ", 2)" in str(thunder.last_traces(compiled)[-1])
    assert [t.provenance.split(" (")[0] for t in thunder.last_traces(compiled)] == [
        "", "Constructed by Dead Code Elimination", "Constructed by Transform for execution", "Constructed by "
            "Constants", "Constructed by Delete Last Used",
    ]  # fmt: skip
    assert thunder.last_backward_traces(compiled) == [] and thunder.last_epilogue_traces(compiled) == []
    assert "def prologue(" in str(thunder.last_prologue_traces(compiled)[0])
    storing = thunder.jit(lambda d, x: d.update(y=x))
    storing({}, ONES)
    assert "def epilogue(" in str(thunder.last_epilogue_traces(storing)[-1])


QUERIES = [
    thunder.last_traces, thunder.last_backward_traces, thunder.last_prologue_traces, thunder.last_epilogue_traces,
    thunder.last_interpreted_instructions,
    thunder.last_interpreter_log, thunder.print_last_interpreter_log, thunder.last_sharp_edges,
    thunder.get_auto_registered_torch_op_names,
]  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__)
def test_queries_before_a_call_and_of_plain_functions(query):
    with pytest.raises(TypeError, match="not called yet"):
        query(thunder.jit(scaled))
    for plain in (scaled, torch.nn.Linear(1, 1), 3):
        with pytest.raises(TypeError, match="not a compiled function"):
            query(plain)


def test_queries_of_plain_functions_that_need_no_call():
    for query in (
        thunder.cache_hits,
        thunder.cache_misses,
        thunder.cache_option,
        thunder.list_transforms,
        thunder.last_compile_options,
        thunder.last_recompile_reasons,
    ):
        with pytest.raises(TypeError, match="not a compiled function"):
            query(scaled)
    assert thunder.compile_data(scaled) is None and thunder.compile_stats(scaled) is None


def test_compile_data():
    data = thunder.compile_data(thunder.jit(scaled, disable_torch_autograd=True, executors=["torch"]))
    assert (
        data.fn is scaled and not data.is_module and data.transforms == [] and data.debug_options.check_traces is False
    )
    assert [e.name for e in data.executors_list] == ["torch", "python"]
    model = Twice()
    assert thunder.compile_data(thunder.jit(model)).fn is model and thunder.compile_data(thunder.jit(model)).is_module


def test_interpreter_log(capsys):
    short = thunder.jit(scaled)
    short(ONES)
    instructions = thunder.last_interpreted_instructions(short)
    assert instructions and all(isinstance(i, dis.Instruction) for i in instructions)
    assert thunder.last_interpreted_instructions(short) == instructions  # not used up
    assert any(isinstance(e, dict) and e["kind"] == "InterpreterCall" for e in thunder.last_interpreter_log(short))
    full = thunder.jit(scaled, record_history=True)
    full(ONES)
    kinds = {e["kind"] for e in thunder.last_interpreter_log(full) if isinstance(e, dict)}
    assert {"Line", "InterpreterCall", "InterpreterReturn"} <= kinds
    assert thunder.compile_data(full).debug_options.record_interpreter_history
    lines = []
    thunder.print_last_interpreter_log(full, lines.append, use_colors=False)
    assert (
        lines[0] == "  call scaled"
        and any("BINARY_OP *" in t for t in lines)
        and any("return x * n" in t for t in lines)
    )
    flat = []
    thunder.print_last_interpreter_log(
        full, print_fn=flat.append, indent=False, use_colors=True, print_source_code=False, color_internals=True
    )
    assert not any("return x * n" in t for t in flat) and any(t.startswith("\033[") for t in flat)
    nothing = []
    thunder.print_last_interpreter_log(full, print_fn=nothing.append, max_depth=0)
    assert nothing == []
    thunder.print_last_interpreter_log(full)
    assert "call scaled" in capsys.readouterr().out


def test_recompile_warning_comes_once_and_says_why():
    compiled = thunder.jit(scaled, cache="constant values")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(RECOMPILE_WARNING_LIMIT + 4):
            compiled(ONES, n)
    (warning,) = caught
    assert warning.category is RecompileWarning and warning.filename == __file__
    text = str(warning.message)
    assert text.startswith(
        f"<thunder.jit of scaled> was compiled {RECOMPILE_WARNING_LIMIT + 1} times. The last time because: n was 7, "
        "is 8"
    )
    assert "pass others as tensors" in text
    module = thunder.jit(Twice(), dynamic=False)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for n in range(RECOMPILE_WARNING_LIMIT + 4):
            module(torch.ones(n + 1, 2))
    (warning,) = caught
    assert warning.filename == __file__


# ---------------------------------------------------------------------------------------------------------------- debug
# options


def test_debug_options(capsys):
    with pytest.raises(TypeError, match="unknown debug option 'nonsense'; known: check_traces"):
        thunder.DebugOptions(nonsense=True)
    with pytest.raises(TypeError, match="check_traces must be int, not str"):
        thunder.DebugOptions(check_traces="all")
    assert repr(thunder.DebugOptions()) == "DebugOptions()" == repr(thunder.DebugOptions(check_traces=False))
    assert repr(thunder.DebugOptions(check_traces=True)) == "DebugOptions(check_traces=True)"
    with pytest.raises(AttributeError):
        thunder.DebugOptions().nonsense
    thunder.DebugOptions.register_option("loudness_in_test", int, 3, "how loud")
    try:
        assert (
            thunder.DebugOptions().loudness_in_test == 3
            and thunder.DebugOptions(loudness_in_test=4).loudness_in_test == 4
        )
        thunder.DebugOptions.list_options(docstr=True)
        listed = capsys.readouterr().out
        assert "loudness_in_test: int = 3  how loud" in listed and "check_traces: int = False" in listed
        assert "loudness_in_test: how loud" in thunder.DebugOptions.__doc__
    finally:
        del thunder.DebugOptions._registered["loudness_in_test"]


@pytest.mark.parametrize("name", ["llama2-like", "llama3-like", "gpt-neox-like", "falcon-7b-like"])
def test_traces_of_models_keep_the_rules(name):
    model = GPT.from_name(name, block_size=64).eval()
    compiled = thunder.jit(model, debug_options=thunder.DebugOptions(check_traces=True))
    tokens = torch.randint(0, model.config.vocab_size, (2, 7))
    with torch.no_grad():
        assert torch.equal(compiled(tokens), model(tokens))


def test_show_interpreter_progress(capsys):
    thunder.jit(scaled, debug_options=thunder.DebugOptions(show_interpreter_progress=True))(ONES)
    err = capsys.readouterr().err
    assert "Begin interpretation" in err and "Finished interpretation" in err


# ---------------------------------------------------------------------------------------------------------------- tools


def test_examine(capsys):
    thunder.examine.examine(lambda x: x.sin() + x.shape[0], ONES)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "Found 2 distinct operations, of which 2 (100%) are supported"
    assert out[-1] == "The program was compiled and run: 2 operations captured, see thunder.last_traces"
    thunder.examine.examine(lambda x: torch._euclidean_dist(x, x).abs(), torch.ones(2, 2))
    out = capsys.readouterr().out
    assert "of which 1 (50%) are supported" in out and "_euclidean_dist, called 1 times" in out
    thunder.examine.examine(lambda x: x if x.sum() > 0 else -x, ONES)
    assert "Found 2 distinct operations, of which 2 (100%) are supported" in capsys.readouterr().out
    thunder.examine.examine(lambda x: x.untyped_storage(), ONES)
    assert "It cannot be compiled: cannot capture this program: " in capsys.readouterr().out
    thunder.examine.examine(lambda x: x @ torch.ones(3, 3), ONES)
    out = capsys.readouterr().out
    assert out.startswith("The program fails in PyTorch itself, before thunder is asked: RuntimeError: ")
    with torch.no_grad():
        thunder.examine.examine(Twice(), ONES)
    assert "linear" not in capsys.readouterr().out.partition("opaque")[2]


def test_python_m_thunder():
    run = fresh.run("-m", "thunder")
    assert f"thunder {thunder.__version__}, Python 3." in run.stdout and f"torch {torch.__version__}" in run.stdout
    assert "devices: cpu" in run.stdout and "executor torch" in run.stdout and "executor python" in run.stdout


def test_thunder_trace():
    import thunder.torch as ltorch

    def program(a, b):
        unused = ltorch.sin(a)  # noqa: F841
        return ltorch.mul(a, b) + 1

    trace = thunder.trace()(program, torch.ones(2, 3), torch.ones(3))
    assert [line.sym.name for line in trace.bound_symbols] == ["mul", "add"] and [a.name for a in trace.args] == [
        "a",
        "b",
    ]
    assert torch.equal(trace.python_callable()(torch.full((2, 3), 2.0), torch.full((3,), 4.0)), torch.full((2, 3), 9.0))
    assert [line.sym.name for line in thunder.trace(use_dce=False)(program, ONES, ONES).bound_symbols] == [
        "sin",
        "mul",
        "add",
    ]
    again = thunder.trace()(lambda t: t * 2, trace.bound_symbols[0].outputs[0])
    assert again.args[0].shape == (2, 3)


def test_a_traced_function_takes_the_arguments_of_the_function():
    def program(a, parts, *, scale, n=2):
        return (a * parts["b"][0] + scale) * n

    tree = {"b": [ONES * 3, "unused"]}
    run = thunder.trace()(program, ONES, tree, scale=ONES, n=3).python_callable()
    other = {"b": [ONES * 5, "unused"]}
    assert torch.equal(run(ONES * 2, other, scale=-ONES, n=3), program(ONES * 2, other, scale=-ONES, n=3))
    with pytest.raises(ValueError, match="an argument of program was 3 when it was traced, is 4: trace again"):
        run(ONES, tree, scale=ONES, n=4)
    with pytest.raises(TypeError, match="the trace of program takes arguments of the structure"):
        run(ONES, ONES, ONES)


def test_functional_jit():
    assert torch.equal(thunder.functional.jit(scaled, cache="symbolic values")(ONES), 2 * ONES)
    with pytest.raises(TypeError, match="thunder.jit compiles modules"):
        thunder.functional.jit(torch.nn.Linear(1, 1))


def test_every_public_name_is_there():
    for name in thunder.__all__:
        assert getattr(thunder, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        thunder.nonsense


PATHS = (
    "thunder.distributed.checkpoint.save", "thunder.distributed.planning.Plan",
    "thunder.transforms.float8.Float8Transform", "thunder.transforms.cudagraph.CUDAGraphTransform",
    "thunder.executors.torchex.no_autocast", "thunder.core.transforms.grad", "thunder.core.transforms.put_grads",
    "thunder.core.transform_common.dce", "thunder.core.prims.sin",
    "thunder.core.devices.Device", "thunder.extend.FusionExecutor", "thunder.options.JitOptions",
    "thunder.transforms.autodiff.forward_and_backward_from_trace",
)  # fmt: skip


FIRST_OF_A_PROCESS = """
import os, sys
import torch, thunder
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        eval(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


def test_paths_need_no_import_of_their_own():
    """Each in a process that has imported nothing else of thunder, so that it does not go by what another path
    imported."""
    run = subprocess.run([sys.executable, "-c", FIRST_OF_A_PROCESS, *PATHS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    "module",
    [thunder.core, thunder.distributed, thunder.executors, thunder.extend, thunder.transforms, thunder.core.transforms],
)
def test_names_that_modules_do_not_have(module):
    assert not hasattr(module, "nonsense") and not hasattr(module, "_nonsense")
    assert all(hasattr(module, name) for name in dir(module))


# ----------------------------------------------------------------------------------------------------------------
# memory


def freed(reference) -> bool:
    gc.collect()
    return reference() is None


def test_entries_keep_no_input_tensor_alive():
    compiled = thunder.jit(lambda x, d, *rest, k: (x, x.shape, [x[0] + d["a"][0]], rest[0] * k))
    inputs = [torch.ones(3) for _ in range(4)]
    x, y, z, k = inputs
    compiled(x, {"a": [y]}, z, k=k)
    compiled(x, {"a": [y]}, z, k=k)
    references = [weakref.ref(t) for t in inputs]
    del inputs, x, y, z, k
    assert all(freed(r) for r in references)


def test_entries_keep_no_input_alive_when_gradients_flow():
    compiled = thunder.jit(lambda x, w: (x @ w).sin().sum())
    x, w = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
    compiled(x, w).backward()
    references = [weakref.ref(t) for t in (x, w)]
    del x, w
    assert all(freed(r) for r in references)


def test_a_model_is_freed_with_its_thunder_module():
    model = torch.nn.Sequential(Twice(), torch.nn.ReLU())
    compiled = thunder.jit(model)
    with torch.no_grad():
        compiled(ONES)
    references = [weakref.ref(model), weakref.ref(model[0].fc.weight)]
    del model, compiled
    assert all(freed(r) for r in references)


def test_modules_of_arguments_and_globals_are_not_kept_alive():
    global GLOBAL_MODULE
    compiled = thunder.jit(lambda m, x: GLOBAL_MODULE(m(x)))
    first, outer = Twice(), GLOBAL_MODULE
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(first, ONES), outer(first(ONES)))
        assert thunder.cache_misses(compiled) == 1
        second = Twice()
        assert torch.equal(compiled(second, ONES), outer(second(ONES)))
        references = [weakref.ref(first), weakref.ref(first.fc.weight)]
        del first
        assert all(freed(r) for r in references)
        references = [weakref.ref(outer), weakref.ref(outer.fc.weight)]
        GLOBAL_MODULE = Twice()
        del outer
        assert all(freed(r) for r in references)
        assert torch.equal(compiled(second, ONES), GLOBAL_MODULE(second(ONES)))
    assert len(thunder.compile_stats(compiled).interpreter_cache) == 1, (
        "entries of modules that are gone went with them"
    )
    assert "is another object than before" in thunder.last_recompile_reasons(compiled)[0]


def test_changes_of_a_module_that_is_an_argument_are_seen():
    compiled = thunder.jit(lambda m, x: (m(x), m))
    model = Twice()
    with torch.no_grad():
        for change in (
            lambda: None,
            lambda: setattr(model.fc, "weight", torch.nn.Parameter(torch.zeros(2, 2))),
            lambda: setattr(model.fc, "bias", None),
            lambda: setattr(model, "fc", torch.nn.Linear(2, 3)),
            lambda: model.fc.register_forward_hook(lambda m, i, o: o * 2),
            lambda: model.double(),
        ):
            change()
            x = ONES.to(next(model.parameters()).dtype)
            result, same = compiled(model, x)
            assert same is model and torch.equal(result, model(x))


def test_closures_of_argument_functions_are_not_kept_alive():
    compiled = thunder.jit(lambda f, x: f(x))

    def make(value):
        inner = torch.full((2,), value)
        return (lambda x: x + inner), weakref.ref(inner)

    function, reference = make(3.0)
    assert torch.equal(compiled(function, ONES), 4 * ONES) and torch.equal(compiled(function, ONES), 4 * ONES)
    assert thunder.cache_hits(compiled) == 1
    del function
    assert freed(reference)
    function, _ = make(5.0)
    assert torch.equal(compiled(function, ONES), 6 * ONES)


def test_what_a_method_or_partial_is_bound_to_is_checked():
    class Plain:
        def __init__(self):
            self.k, self.fc = 2, torch.nn.Linear(2, 2)

        def method(self, x):
            return self.fc(x) * self.k

        __call__ = method

    model, plain = Twice(), Plain()
    programs = [
        model.forward,
        plain,
        plain.method,
        functools.partial(lambda m, p, x, k=1: m(p.fc(x)) * p.k, model, plain, k=2),
        functools.partial(model.forward),
    ]
    with torch.no_grad():
        for program in programs:
            compiled = thunder.jit(program)
            through = thunder.jit(lambda f, x: f(x))
            for change in (
                lambda: None,
                lambda: setattr(plain, "k", plain.k + 1),
                lambda: setattr(plain.fc, "bias", None),
                lambda: setattr(model.fc, "weight", torch.nn.Parameter(torch.full((2, 2), float(plain.k)))),
                lambda: setattr(model, "fc", torch.nn.Linear(2, 2)),
            ):
                change()
                assert torch.equal(compiled(ONES), program(ONES))
                assert torch.equal(through(program, ONES), program(ONES))


# ----------------------------------------------------------------------------------------------------------------
# copies


def test_copies_keep_options_and_drop_entries():
    compiled = thunder.jit(scaled, cache="symbolic values", executors=["torch"])
    compiled(ONES)
    for copied in (copy.deepcopy(compiled), copy.copy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert thunder.cache_misses(copied) == 0 and copied.fn is scaled
        assert thunder.cache_option(copied) is thunder.CACHE_OPTIONS.SYMBOLIC_VALUES
        assert thunder.compile_data(copied).executors_list == thunder.compile_data(compiled).executors_list
        assert torch.equal(copied(ONES, 3), 3 * ONES)
    assert pickle.loads(pickle.dumps(decorated)) is decorated, "a decorated function is found under its name"


def test_saved_with_an_executor_that_is_not_registered():
    executor = thunder.extend.OperatorExecutor("unheard_of")
    data = pickle.dumps(thunder.jit(scaled, executors=[executor]))
    with pytest.raises(OptionError, match="unheard_of.*not registered here; registered: .*torch"):
        pickle.loads(data)
    thunder.extend.register_executor(executor)
    try:
        assert torch.equal(pickle.loads(data)(ONES), 2 * ONES)
    finally:
        thunder.extend.deregister_executor(executor)


# ----------------------------------------------------------------------------------------------------------------
# threads, recursion


def test_threads():
    compiled = thunder.jit(lambda x: (x * 2).sum(), dynamic=False)
    wrong = []

    def work(i):
        for k in range(60):
            n = (i + k) % 6 + 1
            if compiled(torch.ones(n)).item() != 2 * n:
                wrong.append((i, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []
    assert thunder.cache_misses(compiled) == 6, "one compile lock: each shape was compiled once"
    assert thunder.cache_hits(compiled) == 8 * 60 - 6 == thunder.compile_stats(compiled).calls - 6


def test_jit_inside_jit_is_inlined():
    inner = thunder.jit(lambda x: x.sin())
    outer = thunder.jit(lambda x: inner(x) + thunder.jit(lambda y: y.cos())(x))
    assert torch.equal(outer(ONES), ONES.sin() + ONES.cos())
    assert [line.sym.name for line in thunder.last_traces(outer)[0].bound_symbols] == ["sin", "cos", "add"]
    assert thunder.compile_stats(inner).calls == 0
    module = thunder.jit(Twice())
    with torch.no_grad():
        assert torch.equal(thunder.jit(lambda x: module(x))(ONES), module._model(ONES))


def test_recursion_through_the_same_compiled_function():
    @thunder.jit
    def power(x, n):
        return torch.ones_like(x) if n == 0 else x * power(x, n - 1)

    assert torch.equal(power(2 * ONES, 5), 32 * ONES)
    assert thunder.compile_stats(power).calls == 1


def test_usable_after_every_failure():
    compiled = thunder.jit(lambda x, y: x @ y if y is not None else x.untyped_storage())
    good = torch.ones(2, 2)
    for bad in (torch.ones(3, 3), None, "text"):
        with pytest.raises((RuntimeError, TypeError)):
            compiled(good, bad)
        assert torch.equal(compiled(good, good), good @ good)
    with pytest.raises(CaptureError, match="untyped_storage"):
        compiled(good, None)


# ---------------------------------------------------------------------------------------------------------------- modes
# outside


def test_gradients_and_no_grad():
    model = Twice()
    compiled = thunder.jit(model)
    with torch.no_grad():
        assert not compiled(ONES).requires_grad
    result = compiled(ONES)
    assert result.requires_grad and type(result.grad_fn).__name__ == "ThunderFunctionBackward"
    result.sum().backward()
    got, model.fc.weight.grad = model.fc.weight.grad, None
    model(ONES).sum().backward()
    assert torch.equal(got, model.fc.weight.grad)
    assert thunder.cache_misses(compiled) == 2
    assert thunder.last_recompile_reasons(compiled) == ["grad mode was False, is True"]
    without = thunder.jit(model, disable_torch_autograd=True)
    assert not without(ONES).requires_grad and torch.equal(without(ONES), model(ONES))
    assert torch.is_grad_enabled()


def test_inference_mode():
    compiled = thunder.jit(Twice())
    with torch.inference_mode():
        assert compiled(ONES).is_inference()
    with torch.no_grad():
        assert not compiled(ONES).is_inference()
    with torch.inference_mode():
        assert compiled(ONES).is_inference()
    assert thunder.cache_misses(compiled) == 2
    assert thunder.last_recompile_reasons(compiled) == ["inference mode was True, is False"]


def test_autocast_outside():
    model = torch.nn.Linear(4, 4)

    def program(x):
        return model(x).softmax(-1) @ x.T, (x + 1).sum(), model(x) + x

    compiled = thunder.jit(program)
    x = torch.randn(3, 4)
    with torch.no_grad():
        for dtype in (None, torch.bfloat16, torch.float16, torch.bfloat16, None):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                for got, want in zip(compiled(x), program(x)):
                    assert got.dtype == want.dtype and torch.equal(got, want)
    assert (thunder.cache_misses(compiled), thunder.cache_hits(compiled)) == (3, 2)
    assert "autocast was" in thunder.last_recompile_reasons(compiled)[0]


def test_default_dtype_outside():
    compiled = thunder.jit(lambda n: torch.ones(3) * n)
    assert compiled(2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(2).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert compiled(2).dtype == torch.float32
    assert (thunder.cache_misses(compiled), thunder.cache_hits(compiled)) == (2, 1)
    assert thunder.last_recompile_reasons(compiled) == ["default dtype was torch.float32, is torch.float64"]


def no_default_device():
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # torch 2.9's get_default_device fails on None


def test_default_device_outside_and_inside():
    def program(x):
        with torch.device("meta"):
            inside = torch.ones(3)
            with torch.device("cpu"):
                innermost = torch.rand(2)
        return (
            torch.ones(3),
            torch.arange(x.shape[0]),
            torch.randn(2),
            torch.tensor([1.0]),
            torch.zeros_like(x),
            inside,
            innermost,
        )

    compiled = thunder.jit(program)
    x = torch.ones(2)

    def devices(run):
        return [t.device.type for t in run(x)]

    assert devices(compiled) == devices(program)
    with torch.device("meta"):
        assert devices(compiled) == devices(program) == ["meta"] * 4 + ["cpu", "meta", "cpu"]
    torch.set_default_device("meta")
    try:
        assert devices(compiled) == devices(program)
    finally:
        no_default_device()
    assert devices(compiled) == devices(program)
    assert thunder.cache_misses(compiled) == 2


def test_a_program_that_leaves_a_default_device_behind_is_refused():
    def leaves(x):
        torch.set_default_device("meta")
        return x

    with pytest.raises(CaptureError, match="sets a default device"):
        try:
            thunder.jit(leaves)(ONES)
        finally:
            no_default_device()


LEAVES = {
    "grad": lambda: torch.set_grad_enabled(False),
    "grad, as a context": lambda: torch.no_grad().__enter__(),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "dtype of autocast": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "cache of autocast": lambda: torch.set_autocast_cache_enabled(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warn": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "warnings": lambda: torch.set_warn_always(True),
    "precision of one backend": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "an older name": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "reduced precision": lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "attention": lambda: torch.backends.cuda.enable_math_sdp(False),
}


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize("raises", [False, True])
def test_a_program_leaves_settings_as_eager_does(name, raises):
    def program(x):
        before = x * 2
        LEAVES[name]()
        if raises:
            raise ValueError("after it")
        return before, x * 3, torch.tensor(1.5)

    compiled, collected = thunder.jit(program), []
    for run in (program, compiled, compiled):
        with compat.modes_restored():
            try:
                results = [(t.dtype, t.requires_grad) for t in run(torch.ones(2, requires_grad=True))]
            except ValueError:
                results = []
            collected.append((results, compat.settings()))
    assert collected[0] == collected[1] == collected[2] and collected[0][1] != compat.settings()


@pytest.mark.parametrize("name", ["deterministic", "precision", "precision of one backend", "reduced precision"])
def test_a_setting_that_is_in_force_already_is_left_as_eager_leaves_it(name):
    def program(x):
        LEAVES[name]()
        return x * 2

    compiled, before = thunder.jit(program), compat.settings()
    with compat.modes_restored():
        LEAVES[name]()
        compiled(torch.ones(2))
        set_by_program = compat.settings()
        compat.set_settings(before)
        compiled(torch.ones(2))
        assert compat.settings() == set_by_program != before
    assert compat.settings() == before


def _precision_inside(x):
    torch.set_float32_matmul_precision("medium")
    result = x @ x
    torch.set_float32_matmul_precision("highest")
    return result


def _kernels_of_another_library(x):
    with torch.backends.mkldnn.flags(enabled=False):
        return torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3])


def _small_numbers(x):
    torch.set_flush_denormal(True)
    y = x * 1e-40 * 0.5
    torch.set_flush_denormal(False)
    return y


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")  # says PyTorch's own context manager
@pytest.mark.parametrize("program", [_precision_inside, _kernels_of_another_library, _small_numbers])
def test_what_runs_under_a_setting_of_the_programs_own_is_refused(program):
    x = torch.randn(8, 8)
    with compat.modes_restored():
        with pytest.raises(CaptureError, match=(message := r"runs behind a change of PyTorch's settings \(")):
            thunder.jit(program)(x)
        with pytest.warns(FallbackWarning, match=message):
            assert torch.equal(thunder.jit(program, fallback="eager")(x), program(x))


def test_settings_of_gpus_mean_nothing_elsewhere():
    def program(x):
        with torch.backends.cudnn.flags(enabled=False):
            y = x @ x
        return y + torch.backends.cudnn.enabled

    x = torch.randn(8, 8)
    assert torch.equal(thunder.jit(program, fallback="error")(x), program(x))
    assert torch.backends.cudnn.enabled


def test_newer_names_of_precision_may_be_in_force():
    x = torch.randn(8, 8)
    with compat.modes_restored():
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch.get_float32_matmul_precision() raises from now on
        assert torch.equal(thunder.jit(lambda x: x @ x)(x), x @ x)


class Noting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_torch_function_modes_outside_see_the_operations():
    compiled = thunder.jit(lambda x: x.sin() + 1)
    with Noting() as eager:
        compiled.fn(ONES)
    for _ in range(2):
        with Noting() as ours:
            assert torch.equal(compiled(ONES), ONES.sin() + 1)
        assert ours.seen[-2:] == eager.seen == ["sin", "add"] or ours.seen[:2] == ["sin", "add"]
    compiled(ONES)
    assert "torch-function modes" in thunder.last_recompile_reasons(compiled)[0]


# ----------------------------------------------------------------------------------------------------------------
# neighbours


def test_under_torch_func_the_original_runs_with_one_warning():
    compiled = thunder.jit(lambda x: x.sin().sum())
    with pytest.warns(UserWarning, match="was called under a torch.func transform: the original function runs"):
        assert torch.allclose(torch.func.vmap(compiled)(torch.ones(3, 2)), 2 * torch.ones(3).sin())
    assert torch.allclose(torch.func.grad(compiled)(ONES), ONES.cos())  # no second warning: warnings are errors here
    assert thunder.cache_misses(compiled) == 0
    assert torch.equal(compiled(ONES), ONES.sin().sum())


@pytest.mark.parametrize("called", [False, True])
def test_exporters_export_the_original_without_a_warning(called):
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU()).eval(), torch.ones(2, 3)
    compiled = thunder.jit(model)
    if called:
        compiled(x)
    exported = torch.export.export(compiled, (x,))
    assert torch.equal(exported.module()(x), model(x)) and "0.weight" in exported.state_dict


def test_an_export_without_the_transforms_warns():
    compiled = thunder.jit(torch.nn.Linear(3, 2), transforms=[thunder.Transform()])
    with pytest.warns(UserWarning, match="was called under torch.compile or torch.export: the original function runs"):
        torch.export.export(compiled, (torch.ones(2, 3),))


def test_what_a_finished_torch_func_transform_left_behind():
    """Its wrapper stands for the tensor in it, as it does for eager's operations."""
    left = []
    torch.func.grad(lambda x: (left.append(x * 2), x.sum())[1])(ONES)
    w = torch.ones(2, requires_grad=True)
    compiled = thunder.jit(lambda x, w: (x * w).sin())
    for _ in range(2):
        out = compiled(left[0], w)
        assert [edge[0] is None for edge in out.grad_fn.next_functions] == [True, False]
        torch.testing.assert_close(torch.autograd.grad(out.sum(), w), torch.autograd.grad((left[0] * w).sin().sum(), w))


def test_a_warm_call_makes_as_many_frames_with_many_parameters():
    """What is done for each parameter is done in C."""

    def frames(layers):
        compiled, count = thunder.jit(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))), 0
        compiled(ONES)

        def seen(frame, event, arg):
            nonlocal count
            count += event == "call" and "torch/nn/functional" not in frame.f_code.co_filename

        sys.setprofile(seen)
        try:
            compiled(ONES)
        finally:
            sys.setprofile(None)
        return count

    assert frames(2) == frames(20)


def test_under_fake_tensors_the_original_runs_with_one_warning():
    from torch._subclasses import FakeTensorMode

    compiled = thunder.jit(lambda x: x.sin().sum(0))
    mode = FakeTensorMode()
    with pytest.warns(UserWarning, match="under a FakeTensorMode"):
        assert compiled(mode.from_tensor(torch.ones(3, 4))).shape == (4,)
    with mode:
        assert compiled(torch.ones(3, 5)).shape == (5,)
    assert thunder.cache_misses(compiled) == 0


def test_nested_fake_tensors():
    from torch._subclasses import FakeTensorMode

    compiled = thunder.jit(lambda d: d["x"][0].sin())
    with pytest.warns(UserWarning, match="under a FakeTensorMode"):
        assert compiled({"x": [FakeTensorMode().from_tensor(torch.ones(3, 4))]}).shape == (3, 4)


def test_under_torch_compile_the_original_is_traced():
    compiled = thunder.jit(lambda x: x.sin().sum())
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(compiled, backend="eager")(ONES), ONES.sin().sum())
    assert thunder.cache_misses(compiled) == 0
    torch._dynamo.reset()


def test_a_compiled_function_in_forward_mode():
    """Kernels of executors know no tangents."""
    from torch.autograd import forward_ad

    def f(x, y):
        return x.sin() * y + x

    compiled, x, y = thunder.jit(f, executors=[EVERY_REGION]), torch.randn(3), torch.randn(3)
    for _ in range(2):
        compiled(x, y)
    with pytest.warns(UserWarning, match="under a torch.func transform"):
        values_and_tangents = torch.func.jvp(compiled, (x, y), (y, x))
    torch.testing.assert_close(values_and_tangents, torch.func.jvp(f, (x, y), (y, x)))
    compiled = thunder.jit(f, executors=[EVERY_REGION])
    compiled(x, y)
    for requires_grad in (False, True):
        with forward_ad.dual_level(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            dual = forward_ad.make_dual(x.clone().requires_grad_(requires_grad), y)
            torch.testing.assert_close(
                forward_ad.unpack_dual(compiled(dual, y)).tangent, forward_ad.unpack_dual(f(dual, y)).tangent
            )
            assert [
                str(w.message) for w in said if "under forward-mode differentiation" in str(w.message)
            ] or requires_grad
    assert thunder.cache_misses(compiled) == 1


def test_under_torch_jit_trace_the_original_is_traced():
    compiled = thunder.jit(lambda x: x.sin() + 1, executors=[EVERY_REGION])
    compiled(ONES)
    traced = torch.jit.trace(compiled, ONES)  # as the older exporter of ONNX does
    assert torch.equal(traced(2 * ONES), (2 * ONES).sin() + 1)


def test_under_make_fx_the_original_is_traced():
    from torch.fx.experimental.proxy_tensor import make_fx

    compiled = thunder.jit(lambda x: x.sin().sum())
    compiled(ONES)
    with pytest.warns(UserWarning, match="under make_fx"):
        graph = make_fx(compiled)(ONES)
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["sin", "sum_1"]
    assert thunder.cache_misses(compiled) == 1


# ----------------------------------------------------------------------------------------------------------------
# garbage collection


def test_garbage_is_not_looked_for_while_compiling():
    class Asks(thunder.Transform):
        def transform_traces_pre_prologue(self, prologue_trace, computation_trace, epilogue_trace, **kwargs):
            results.append(gc.isenabled())
            if refuse:
                raise ValueError("refused")
            return prologue_trace, computation_trace, epilogue_trace

    results, refuse = [], False
    thunder.jit(scaled, transforms=[Asks()])(ONES)
    assert results == [False] and gc.isenabled()
    refuse = True
    with pytest.raises(ValueError, match="refused"):
        thunder.jit(scaled, transforms=[Asks()])(ONES)
    assert gc.isenabled()
    gc.disable()
    try:
        refuse = False
        thunder.jit(scaled, transforms=[Asks()])(ONES)
        assert not gc.isenabled(), "as the user left it"
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------------ calls that fail


class Log(list):
    def note(self, x):
        self.append(tuple(x.shape))


def test_a_program_that_raises_has_its_effects_once():
    seen = Log()

    def f(x):
        seen.note(x)
        raise ValueError("mine")

    compiled = thunder.jit(f)
    for times in (1, 2):
        with pytest.raises(ValueError, match="^mine$") as raised:
            compiled(torch.ones(2))
        assert seen == [(2,)] * times and raised.value.__context__ is None
    with pytest.raises(ValueError, match="^mine\n") as raised:  # with a note
        thunder.verify(compiled, torch.ones(2))
    assert "nothing has run" in raised.value.__notes__[0]
    assert len(seen) == 2, "nothing runs where a program is only asked for"


def test_where_thunder_fails_the_original_runs_once_and_its_result_counts(monkeypatch):
    seen = Log()

    def f(x):
        seen.note(x)
        return x + 1

    monkeypatch.setattr("thunder.capture.EpilogueWriter", None)
    compiled = thunder.jit(f, fallback="eager")
    with pytest.warns(UserWarning, match="thunder fails on it.*TypeError(.|\n)*The original function ran"):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert torch.equal(compiled(torch.zeros(2)), torch.ones(2)), "it warns once"
    assert seen == [(2,), (2,)]


def test_where_thunder_fails_it_is_an_error_on_request(monkeypatch):
    monkeypatch.setattr("thunder.capture.EpilogueWriter", None)
    compiled = thunder.jit(lambda x: x + 1, fallback="error")
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"its result is dropped \(fallback='error'\)(.|\n)*TypeError"):
            compiled(torch.ones(2))


@pytest.mark.parametrize(
    "mistake, near",
    [
        (lambda: thunder.jit(torch.sin, numerics="eagr"), "did you mean 'eager'?"),
        (lambda: thunder.jit(torch.sin, executors=["inductr"]), "did you mean 'inductor'?"),
        (lambda: thunder.compile(torch.sin, recipe="trainig"), "did you mean 'training'?"),
        (lambda: thunder.jit(torch.sin, executor=[]), "did you mean executors=?"),
    ],
)
def test_a_misspelt_option_names_the_near_one(mistake, near):
    with pytest.raises((TypeError, ValueError), match=re.escape(near)):
        mistake()


def test_a_misspelt_name_of_the_package_names_the_near_one():
    said = fresh.run("-c", "import thunder; thunder.last_trace").stderr
    assert said.rstrip().endswith("has no attribute 'last_trace'. Did you mean: 'last_traces'?")
