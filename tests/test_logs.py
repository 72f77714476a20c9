"""`THUNDER_LOGS`, and what traces and counters print."""

import logging
import sys

import pytest
import torch

import thunder
from tests import fresh
from thunder.cache.logs import configure
from thunder.errors import FallbackWarning, OptionError

PROGRAM = """
import torch, thunder
f = thunder.jit(lambda x, n: x * n)
f(torch.ones(2), 2)
f(torch.ones(2, 3), 2)
"""


def run(topics):
    environment = {"THUNDER_LOGS": topics, "PYTHONPATH": ":".join(filter(None, sys.path))}
    return fresh.run("-c", PROGRAM, env=environment)


def test_the_environment_says_what_is_logged():
    text = run("recompiles, passes").stderr
    assert text.count("thunder.recompiles: ") == 1 and "x had 1 dimensions, has 2" in text
    assert text.count("thunder.passes: <thunder.jit of <lambda>>, forward\n") == 2
    assert "Transform for execution" in text and "thunder.guards" not in text
    guards = run("guards").stderr
    assert guards.count("questions before each call") == 2 and guards.count("def prologue(fn, args, kwargs):") == 2
    assert not run("").stderr


def test_fallbacks_and_code_are_topics(caplog):
    def refused(x):
        return x * x.untyped_storage().nbytes()

    for topic in ("fallbacks", "output_code"):
        caplog.set_level(logging.INFO, f"thunder.{topic}")
    with pytest.warns(FallbackWarning):
        thunder.jit(refused, fallback="eager")(torch.ones(1))
    with pytest.warns(FallbackWarning):
        thunder.jit(lambda x: refused(x).sin(), fallback="eager")(torch.ones(1))
    texts = sorted(f"{record.name}: {record.getMessage()}" for record in caplog.records)
    assert ["untyped_storage" in text for text in texts] == [True, True, False]
    assert texts[0].startswith("thunder.fallbacks: ") and "refused() is an eager call" in texts[0]
    assert "thunder.output_code: " in texts[2] and "torch.sin" in texts[2]


def test_another_topic_is_refused():
    failed = run("recompile")
    assert failed.returncode and "valid: recompiles, guards, passes" in failed.stderr
    with pytest.raises(OptionError, match="separated by commas"):
        configure("guards,all")


def test_programs_set_loggers_up_as_any_other(caplog):
    caplog.set_level(logging.INFO, "thunder.recompiles")
    compiled = thunder.jit(torch.neg)
    for shape in ((2,), (2, 2)):
        compiled(torch.ones(shape))
    (record,) = caplog.records
    assert record.name == "thunder.recompiles" and str(compiled.recompilations[0]) in record.getMessage()


def test_traces_print_as_a_table_of_contents():
    model = torch.nn.Linear(2, 2)
    compiled = thunder.jit(model)
    compiled(torch.ones(1, 2))
    traces = thunder.last_traces(compiled)
    lines = str(traces).split("\n")
    assert len(lines) == len(traces) and lines[0].split()[:3] == ["0", "as", "captured"]
    assert "Delete Last Used" in lines[-1] and f"{len(traces[-1].bound_symbols)} bound symbols" in lines[-1]
    assert repr(traces) == str(traces) and isinstance(traces, list)
    assert "Partition" in str(thunder.last_backward_traces(compiled))


def test_a_trace_prints_as_deep_as_it_is_asked():
    compiled = thunder.jit(lambda x: torch.nn.functional.softmax(x, -1))
    compiled(torch.ones(2, 2))
    trace = thunder.last_traces(compiled)[0]
    sizes = [len(trace.python(depth=depth).split("\n")) for depth in (1, 2, 3)]
    assert sizes[0] < sizes[1] < sizes[2]
    assert trace.python() == trace.python(depth=1) == trace.python(print_depth=1)
    assert trace.python(print_depth=-1, memory=True) == str(trace)


def test_counters_print_as_a_table():
    compiled = thunder.jit(torch.neg)
    for shape in ((2,), (2, 2), (2, 2)):
        compiled(torch.ones(shape))
    rows = dict(line.rsplit("  ", 1) for line in str(thunder.compile_stats(compiled)).split("\n"))
    columns = {name.strip(): value.strip() for name, value in rows.items()}
    assert (columns["calls"], columns["cache hits"], columns["cache misses"], columns["programs"]) == (
        "3",
        "1",
        "2",
        "2",
    )
    assert columns["compiled again, the last time because"] == compiled.recompilations[0].reason
    assert float(columns["last construction, ms"]) > 0
