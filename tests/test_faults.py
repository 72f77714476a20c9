"""`thunder.debug` names the operation and the line that a NaN or an infinity comes from, and nothing in healthy models."""

from __future__ import annotations

import inspect
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder

# lines that make a number that is not finite of `y`, in the forward or in the gradient, with the operation's name
PLANTED = {
    "log of a negative": ("y = y + torch.log(-1.0 - y * y)", "log", "forward"),
    "log of zero": ("y = y + torch.log(F.relu(-y * y))", "log", "forward"),
    "overflow": ("y = y + torch.exp(y * y * 1e4 + 1e4)", "exp", "forward"),
    "zero by zero": ("y = y + (y - y) / (y - y)", "div", "forward"),
    "one by zero": ("y = y + 1.0 / (y - y)", "reciprocal", "forward"),
    "root of a negative": ("y = y + torch.sqrt(-1.0 - y * y)", "sqrt", "forward"),
    "power": ("y = y + (-1.0 - y * y) ** 0.5", "pow", "forward"),
    "masked rows": ("y = y + y.masked_fill(y == y, float('-inf')).softmax(-1)", "softmax", "forward"),
    "half overflow": ("y = y + (y * y * 1e6 + 1e6).half().float()", "to", "forward"),
    "gradient of a root": ("y = y + torch.sqrt(y * 0.0)", "sqrt", "backward"),
    "gradient of a norm": ("y = y + (y * 0.0).norm(dim=-1, keepdim=True).sqrt()", "sqrt", "backward"),
    "gradient of where": ("y = y + torch.where(y * y > -1.0, 0.0, torch.log(y * 0.0))", "log", "backward"),
}
HEALTHY = [
    "y = F.gelu(y) + y", "y = y.softmax(-1) * y", "y = self.norm(y)", "y = y + self.linear(y).tanh()",
    "y = self.attend(y)", "y = torch.where(y > 0, y.sqrt().nan_to_num(0.0).detach(), y)",
    "y = y + torch.ones(6, 6).tril().log().exp()[: y.shape[0], : y.shape[1]]", "y = y / y.norm(dim=-1, keepdim=True)",
    "y = y + torch.full((6, 6), float('-inf')).triu(1).softmax(-1)[: y.shape[0], : y.shape[1]]",
    "y = y - y.logsumexp(-1, keepdim=True)", "y = F.dropout(y, 0.1)", "y = y.clamp(min=float('-inf'), max=3.0)",
    "y = y.cumsum(0) * 0.5", "y = y.amax(-1, keepdim=True) + y",
]  # fmt: skip


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.qkv = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 18)

    def attend(self, y):
        q, k, v = self.qkv(y).chunk(3, -1)
        scores = q @ k.t() / 6**0.5
        hidden = torch.ones(len(y), len(y), dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def generated(seed: int, planted: str = "") -> tuple[nn.Module, int]:
    """A small model of random healthy lines, with a planted one among them, and that line's number."""
    generator = random.Random(seed)
    lines = generator.sample(HEALTHY, generator.randrange(2, 6))
    line_number = generator.randrange(len(lines) + 1)
    lines[line_number:line_number] = [planted] if planted else []
    body = "\n".join(f"    {line}" for line in ["y = self.linear(x)", *lines, "return (y * y).mean()"])
    space = {"torch": torch, "F": F}
    filename = f"<generated {seed} {planted}>"
    text = f"def forward(self, x):\n{body}\n"
    inspect.linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), space)
    torch.manual_seed(seed)
    return type("Generated", (Base,), {"forward": space["forward"]})(), line_number + 3


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(40))
def test_planted_faults_are_named(seed):
    name = list(PLANTED)[seed % len(PLANTED)]
    text, operation, part = PLANTED[name]
    model, line = generated(seed, text)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before = torch.get_rng_state()
    fault = thunder.debug(model, torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))).first
    assert fault is not None, name
    assert fault.where[1] == line and text in fault.where[3], str(fault)
    assert fault.part == part and operation == (fault.derivative_of or fault.operation), str(fault)
    assert text in str(fault) and fault.values
    assert torch.equal(before, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(50))
def test_healthy_models_have_no_fault(seed):
    model, _ = generated(1000 + seed)
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
    model(x).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    report = thunder.debug(thunder.jit(model), x)
    assert report.first is None and "are finite" in str(report) and report.values > 10, str(report)


def test_a_parameter_that_is_not_finite_is_named_by_its_path():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        model[1][1].weight[1, 2] = float("nan")
    fault = thunder.debug(model, torch.ones(3, 4)).first
    assert (fault.part, fault.name, fault.index, fault.kind, fault.module) == (
        "argument",
        "1.1.weight",
        (1, 2),
        "nan",
        "1.1",
    )
    with torch.no_grad():
        model[1][1].weight[1, 2] = float("inf")
    assert thunder.debug(model, torch.ones(3, 4)).first.name == "1.1.weight"


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_operation_and_the_users_line():
    def loss(x):
        y = x * 0.0
        return torch.sqrt(y).sum()  # the line

    for names in (False, True):  # with a second result without cotangent
        run = thunder.jit((lambda x: (loss(x), x.sin())) if names else loss)
        x = torch.ones(3, requires_grad=True)
        result = run(x)
        with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError) as caught:
            (result[0] if names else result).backward()
        text = str(caught.value)
        assert "the backward of sqrt returned nan values." in text, text
        assert f"{__file__}:" in text and "# the line" in text and "ThunderFunction" not in text
    healthy = thunder.jit(lambda x: x.exp().sum())
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.detect_anomaly():
        healthy(x).backward()
    assert torch.equal(x.grad, torch.ones(3).exp())


def test_topics_of_the_environment(monkeypatch, capsys):
    def program(x):
        y = torch.log(x)  # the line
        return (y * 2).sum()

    monkeypatch.setenv("THUNDER_DEBUG", "nan, inf")
    compiled = thunder.jit(program)
    x = torch.ones(3, requires_grad=True)
    compiled(x).backward()
    with pytest.warns(UserWarning, match=r"(?s)THUNDER_DEBUG: log makes 3 NaN numbers.*# the line"):
        compiled(-x)
    with pytest.warns(UserWarning, match=r"(?s)THUNDER_DEBUG: log makes 1 infinite numbers"):
        compiled(torch.tensor([1.0, 0.0, 1.0]))
    monkeypatch.setenv("THUNDER_DEBUG", "shapes,slow")
    thunder.jit(program)(torch.ones(3))
    printed = capsys.readouterr().err
    assert 'log: y: "float32[3]" from 0 to 0' in printed and "log took " in printed and f"{__file__}:" in printed
    monkeypatch.setenv("THUNDER_DEBUG", "nans")
    with pytest.raises(thunder.errors.OptionError, match="THUNDER_DEBUG='nans' is no topic; did you mean 'nan'"):
        thunder.jit(program)(torch.ones(3))


def test_the_off_switch(monkeypatch):
    monkeypatch.setenv("THUNDER_DISABLE", "1")
    compiled, model = thunder.jit(lambda x: x * 2), thunder.jit(nn.Linear(2, 2))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and thunder.cache_misses(compiled) == 0
    model(torch.ones(2)).sum().backward()
    assert thunder.cache_misses(model) == 0 and model.weight.grad is not None

    class Doubling(thunder.Transform):
        def transform_trace_post_optimization(self, computation_trace, **kwargs):
            return computation_trace

    with pytest.raises(thunder.errors.OptionError, match="THUNDER_DISABLE is set, .*Doubling"):
        thunder.jit(lambda x: x * 2, transforms=[Doubling()])(torch.ones(2))
    monkeypatch.delenv("THUNDER_DISABLE")
    compiled(torch.ones(2))
    assert thunder.cache_misses(compiled) == 1
