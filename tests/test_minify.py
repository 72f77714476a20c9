"""`thunder.minify` shrinks planted faults to programs of at most fifteen lines, which fail by the fault alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
import thunder.torch as ltorch
from thunder.command_line import minify_script
from thunder.core.rewrite import rewrite
from thunder.dynamo import graph_calls
from thunder.errors import OptionError
from thunder.extend import OperatorExecutor
from thunder.inspect.minify import NoFault


class Model(nn.Module):
    """About thirty operations, each of which a fault can be planted in."""

    def __init__(self):
        super().__init__()
        self.embedding, self.query, self.value = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.first, self.last = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, tokens, scale):
        x = self.embedding(tokens)
        q, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.query, self.value))
        weights = (q @ q.transpose(-1, -2) / 8**0.5).softmax(-1)
        x = x + (weights @ v).transpose(1, 2).flatten(2)
        hidden = F.gelu(self.first(self.norm(x)))
        hidden = torch.where(hidden > scale, hidden.tanh(), hidden.exp() - hidden.sigmoid())
        gated = torch.cat([hidden[..., :8] * hidden[..., 8:16].cos(), (hidden[..., 16:] - 1).abs().clamp(max=0.9)], -1)
        logits = self.last(F.pad(gated, (0, 8)))
        return logits.log_softmax(-1).mean(1), gated.cumsum(1).amax(-1)


def arguments():
    return torch.arange(10).reshape(2, 5), torch.tensor(0.2)


def by_executor(operation, fn):
    """A wrong implementation of an operation."""
    executor = OperatorExecutor("planted")
    symbol = executor.register_operator(f"planted_{operation.name}", like=operation, fn=fn)
    executor.register_implementation(operation, symbol)
    return {"executors": [executor]}


def by_derivative(operation, fn, backward):
    """A wrong derivative: backward(gradient, result, *arguments)."""

    def grad_transform(*args, **kwargs):
        result = operation(*args, **kwargs)
        gradient = thunder.core.transforms.get_grad(result)
        thunder.core.transforms.put_grad(args[0], backward(gradient, result, *args))
        return result

    executor = OperatorExecutor("planted")
    executor.register_implementation(operation, grad_transform=grad_transform)
    return {"executors": [executor]}


def by_pass(operation, change, after="Dead Code Elimination"):
    """A pass that writes `change(out, operation)` in the place of an operation."""

    def run(trace, lowering):
        return rewrite(trace, lambda b, out: change(out, b) if b.sym is operation else out.write(b))

    planted = thunder.Pass("Planted", run, needs="operations", meaning="a fault")
    return {"passes": thunder.passes().after(after, planted)}


def swapped(out, operation):
    out.write(operation.replace(args=(*operation.args[:2][::-1], *operation.args[2:])))


def dropped(out, operation):
    out.alias({operation.output: operation.args[0]})


def other(function):
    return lambda out, operation: out.trace(function, operation)


def fails(*args, **kwargs):
    raise ZeroDivisionError("a planted failure")


def raising(out, operation):
    raise LookupError(f"a planted failure at {operation.output.name}")


FAULTS = {
    "gelu is off": lambda: by_executor(ltorch.gelu, lambda a, **_: F.gelu(a) + 1e-2),
    "a failing kernel": lambda: by_executor(ltorch.embedding, fails),
    "swapped arguments": lambda: by_pass(ltorch.sub, swapped),
    "a wrong slope of tanh": lambda: by_derivative(ltorch.tanh, torch.tanh, lambda g, y, a: g * (1.0 - y)),
    "a failing pass": lambda: by_pass(ltorch.cat, raising),
    "softmax over another dim": lambda: by_executor(ltorch.softmax, lambda a, dim, dtype=None: a.softmax(-2)),
    "cat in another order": lambda: by_executor(ltorch.cat, lambda tensors, dim=0: torch.cat(tensors[::-1], dim)),
    "a bias is forgotten": lambda: by_executor(ltorch.linear, lambda a, w, b=None: F.linear(a, w)),
    "a sum in place of a mean": lambda: by_executor(ltorch.mean, lambda a, dim=None, **k: a.sum(dim, **k)),
    "amax of absolute values": lambda: by_executor(ltorch.amax, lambda a, dim, keepdim=False: a.abs().amax(dim) + 0.5),
    "cumsum shifted": lambda: by_executor(ltorch.cumsum, lambda a, dim, **_: a.cumsum(dim).roll(1, dim)),
    "a NaN": lambda: by_executor(ltorch.exp, lambda a: a.exp().fill_(float("nan"))),
    "a wrong slope of exp": lambda: by_derivative(ltorch.exp, torch.exp, lambda g, y, a: g * a),
    "a wrong slope of sigmoid": lambda: by_derivative(ltorch.sigmoid, torch.sigmoid, lambda g, y, a: g * y),
    "a wrong slope of cos": lambda: by_derivative(ltorch.cos, torch.cos, lambda g, y, a: g * ltorch.sin(a)),
    "where inverted": lambda: by_pass(
        ltorch.where, lambda out, b: out.write(b.replace(args=(b.args[0], b.args[2], b.args[1])))
    ),
    "abs is dropped": lambda: by_pass(ltorch.abs, dropped),
    "a product becomes a sum": lambda: by_pass(ltorch.mul, other(lambda a, b: a + b)),
    "a log is forgotten": lambda: by_pass(ltorch.log_softmax, other(lambda a, *_, **__: ltorch.softmax(a, -1))),
    "clamp at another bound": lambda: by_pass(ltorch.clamp, other(lambda a, *_, **__: ltorch.clamp(a, max=0.1))),
}
DEFAULT = list(FAULTS)[:5]


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_planted_faults_are_shrunk(name):
    torch.manual_seed(0)
    options = FAULTS[name]()
    minified = thunder.minify(thunder.jit(Model(), **options), *arguments())
    assert minified.lines <= 15 and minified.operations <= 2, minified.program
    assert minified.fault == ("crash" if "failing" in name else "wrong")
    space = {"planted": options.get("executors", [None])[0], "passes": options.get("passes")}
    with pytest.raises((AssertionError, ZeroDivisionError, LookupError)):
        exec(minified.program, dict(space))
    healthy = minified.program.replace("executors=[planted]", "").replace("passes=passes", "")
    exec(healthy, dict(space))  # the fault is all that is wrong with it


def test_a_healthy_function_has_no_fault():
    with pytest.raises(NoFault, match="what eager PyTorch does"):
        thunder.minify(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True))
    with pytest.raises(OptionError, match="valid: 'crash', 'wrong', 'slow'"):
        thunder.minify(torch.sin, torch.ones(3), fault="other")


def test_a_slow_operation_is_named():
    def sleepy(a):
        for _ in range(300):
            a = a + 0.0
        return a.cos()

    compiled = thunder.jit(lambda x: (x.sin() @ x).cos() + x.exp(), **by_executor(ltorch.cos, sleepy))
    minified = thunder.minify(compiled, torch.ones(8, 8), fault="slow")
    assert minified.operations == 1 and "torch.cos(" in minified.program and "takes" in minified.what


SCRIPT = """
import sys
import torch
import thunder
import thunder.torch as ltorch
from thunder.extend import OperatorExecutor

planted = OperatorExecutor("planted")
symbol = planted.register_operator("planted_relu", like=ltorch.relu, fn=lambda a, *_: a.relu() + 1)
planted.register_implementation(ltorch.relu, symbol)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
for executors in (None, [planted]) if "planted" in sys.argv else (None,):
    thunder.jit(model, executors=executors)(torch.ones(2, 4))
    print("went on")
"""


@pytest.mark.parametrize("planted", [True, False])
def test_a_script_is_run_up_to_its_fault(planted, tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    code = minify_script(str(tmp_path / "script.py"), ["planted"] if planted else [], None)
    printed = capsys.readouterr()
    assert printed.out.count("went on") == 1 and code == (not planted)
    assert ("relu(" in printed.out) == planted and ("shows a fault" in printed.err) != planted
    assert torch.equal(thunder.jit(torch.neg)(torch.ones(1)), -torch.ones(1))  # calls are the usual ones again


def test_graphs_of_dynamo_are_shrunk():
    (call,) = graph_calls(lambda x: (x.sin() @ x).cos(), torch.ones(4, 4))
    options = by_executor(ltorch.cos, lambda a: a.cos() + 1)
    minified = thunder.minify(thunder.jit(call.graph._model, **options), *call.args)
    assert minified.operations == 1 and "torch.cos(" in minified.program
