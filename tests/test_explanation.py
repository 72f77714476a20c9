"""`thunder.explain`: what a call does on the host, or waits for."""

import random

import pytest
import torch

import thunder

LAYER = torch.nn.Linear(4, 4)


def several(x):
    y = LAYER(x).relu()
    if y.sum() >= 0:  # decided
        y = y + random.random()  # drawn
    print("mean", y.mean().detach())  # printed
    n = int(y.argmax())  # read
    return y[0] * n, torch.special.zeta(y + 2, 2.0), y[y > 0.1]  # opaque, and a size


def lines(findings):
    return [(x.kind, x.where[3].rpartition("# ")[2].strip()) for x in findings]


def test_what_a_program_does(capsys):
    explanation = thunder.explain(several, torch.ones(3, 4))
    assert lines(explanation.found) == [
        ("value", "decided"), ("decision", "decided"), ("host call", "drawn"), ("host call", "printed"),
        ("value", "read"), ("wait", "opaque, and a size"), ("opaque operation", "opaque, and a size"),
    ] or lines(explanation.found)[5:] == [
        ("opaque operation", "opaque, and a size"), ("wait", "opaque, and a size"),
    ]  # fmt: skip
    assert capsys.readouterr().out.count("mean") == 2, "the function is called twice"
    assert [x.bytes for x in explanation.of_kind("value")] == [1, 8]
    assert [x.bytes for x in explanation.of_kind("host call")] == [0, 4]
    assert all(0 < x.milliseconds < explanation.milliseconds for x in explanation.found)
    text = str(explanation)
    assert f"one call took {explanation.milliseconds:.3f} ms" in text and "in several: print" in text


@pytest.mark.parametrize("make", [lambda: torch.sin, lambda: thunder.jit(LAYER), lambda: LAYER])
def test_nothing_to_say(make):
    explanation = thunder.explain(make(), torch.ones(3, 4))
    assert not explanation.found and "all of it is a program" in str(explanation)


@pytest.mark.parametrize("fallback", ["eager", "error"])
def test_why_the_original_runs(fallback):
    calls = []

    def program(x):
        calls.append(x)
        products = (x * i for i in range(2))
        next(products)
        return products

    (findings,) = thunder.explain(thunder.jit(program, fallback=fallback), torch.ones(2)).found
    assert (
        findings.kind == "fallback" and "a generator leaves" in findings.what and findings.where[2].endswith("program")
    )
    assert len(calls) == 1


def test_a_compiled_function_stays_as_it_is():
    compiled = thunder.jit(several)
    thunder.explain(compiled, torch.ones(3, 4))
    assert thunder.compile_stats(compiled).calls == 0 and not thunder.list_transforms(compiled)
