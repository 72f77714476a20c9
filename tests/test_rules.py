"""`thunder.rule`: a pattern, its replacement, and the condition under which operations are replaced."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
import thunder.torch as ltorch
from thunder.errors import DeclarationError, OptionError
from thunder.extend import OperatorExecutor

SQUARE = torch.empty(2, 2)


def attention(q, k, v, scale: float):
    return torch.softmax(q @ k.transpose(-2, -1) * scale, -1) @ v


def fused(q, k, v, scale):
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def names(compiled, backward=False):
    traces = thunder.last_backward_traces(compiled) if backward else thunder.last_traces(compiled)
    return [b.sym.name for b in traces[-1].bound_symbols]


def captured(compiled):
    """The names of the operations in front of the derivatives, behind the rules."""
    traces = thunder.last_traces(compiled)
    last = max(i for i, t in enumerate(traces) if t.made_by[0].startswith(("as captured", "Dead", "Rule")))
    return [b.sym.name for b in traces[last].bound_symbols]


def hits(compiled):
    return {n: len(h.locations) for n, h in thunder.last_traces(compiled)[-1].info.rules.items()}


class Block(nn.Module):
    """A block of a GPT, as nanoGPT writes it."""

    def __init__(self, width=16, heads=2, tokens=8):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.reduce = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.attend(self.before(x)).split(c, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(weights, dim=-1) @ v
        x = x + self.project(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.reduce(F.gelu(self.expand(self.between(x))))


def masked_attention(q, k, v, mask, scale: float):
    return torch.softmax((q @ k.mT * scale).masked_fill(mask, -math.inf), -1) @ v


def fused_masked(q, k, v, mask, scale):
    return F.scaled_dot_product_attention(q, k, v, ~mask, scale=scale)


def equal_to_eager(model, compiled, *inputs, **tolerances):
    """Results and gradients equal those of a copy of the model that runs eagerly."""
    eager = copy.deepcopy(model)
    sides = []
    for run, module in ((compiled, model), (eager, eager)):
        arguments = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        result = run(*arguments)
        result.float().sin().sum().backward()
        of_inputs = [x.grad for x in arguments if x.requires_grad]
        sides.append([result.detach(), *of_inputs, *(p.grad for p in module.parameters())])
    for a, b in zip(*sides, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


def test_attention_by_hand_of_a_gpt_block():
    rule = thunder.rule(
        masked_attention, fused_masked, examples=[*[torch.empty(2, 3, 4, 5)] * 3, torch.ones(4, 4).bool(), 0.5]
    )
    torch.manual_seed(0)
    model = Block()
    compiled = thunder.jit(model, rules=[rule], executors=["torch"])
    equal_to_eager(model, compiled, torch.randn(2, 6, 16))
    assert hits(compiled) == {"masked_attention": 1}
    assert "softmax" not in names(compiled) and "flash_attention" in names(compiled)
    assert "flash_attention_backward" in names(compiled, backward=True)
    assert "Rule masked_attention" in [t.made_by[0] for t in thunder.last_traces(compiled)]


WAYS = {
    "as written": lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1) @ v,
    "the other order": lambda q, k, v: torch.softmax(0.5 * (q @ k.mT), 3) @ v,
    "by name": lambda q, k, v: torch.softmax(input=(q @ k.transpose(dim0=-1, dim1=2)).mul(0.5), dim=-1).matmul(v),
    "permuted": lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.5, dim=-1), v),
    "views between": lambda q, k, v: (
        torch.softmax((q @ k.mT.contiguous()).view(2, 3, 1, 20, 5).reshape(2, 3, 20, 5) * 0.5, -1).contiguous() @ v
    ),
    "a function of sizes": lambda q, k, v: torch.softmax(q @ k.mT * (4 * q.shape[-1] ** -1.5), -1) @ v,
}


@pytest.mark.parametrize("way", WAYS)
def test_one_pattern_matches_each_way_to_write_it(way):
    compiled = thunder.jit(WAYS[way], rules=[thunder.rule(attention, fused)])
    q, k, v = torch.randn(2, 3, 20, 4), torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 7)
    torch.testing.assert_close(compiled(q, k, v), WAYS[way](q, k, v))
    assert captured(compiled)[-1] == "scaled_dot_product_attention" and "softmax" not in captured(compiled)


OTHERS = {
    "another scale twice": lambda q, k, v: torch.softmax(q @ k.mT * 0.5 * 0.5, 0) @ v,
    "another dimension": lambda q, k, v: torch.softmax(q @ k.mT * 0.5, -2) @ v,
    "another transposition": lambda q, k, v: torch.softmax(q @ k.transpose(0, 1) * 0.5, -1) @ v,
    "views that change it": lambda q, k, v: torch.softmax((q @ k.mT * 0.5).reshape(4, 16), -1).view(4, 4, 4) @ v,
    "read elsewhere": lambda q, k, v: (lambda w: (w @ v, w))(torch.softmax(q @ k.mT * 0.5, -1)),
    "a tensor as the scale": lambda q, k, v: torch.softmax(q @ k.mT * v, -1) @ v,
    "a sum": lambda q, k, v: torch.softmax(q @ k.mT + 0.5, -1) @ v,
}


@pytest.mark.parametrize("way", OTHERS)
def test_other_programs_are_left_alone(way):
    compiled = thunder.jit(OTHERS[way], rules=[thunder.rule(attention, fused)])
    q, k, v = (torch.randn(4, 4, 4) for _ in range(3))
    torch.testing.assert_close(compiled(q, k, v), OTHERS[way](q, k, v))
    assert hits(compiled) == {"attention": 0} and "softmax" in captured(compiled)


def test_sizes_that_stay_symbolic():
    program = WAYS["as written"]
    compiled = thunder.jit(program, rules=[thunder.rule(attention, fused)], dynamic=True)
    for tokens in (5, 9):
        q, k, v = (torch.randn(2, 3, tokens, 4) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v), program(q, k, v))
    assert hits(compiled) == {"attention": 1} and len(compiled.programs) == 1


def test_a_cast_is_an_operation_of_half_precision_only():
    """One pattern, whose cast does nothing in float32."""

    def normalized(x, eps: float):
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    rule = thunder.rule(normalized, lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps))
    compiled = thunder.jit(lambda x: normalized(x, 1e-6) * 2, rules=[rule])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 8, dtype=dtype)
        torch.testing.assert_close(compiled(x), normalized(x, 1e-6) * 2)
        assert hits(compiled) == {"normalized": 1} and "rms_norm" in captured(compiled)


def test_several_results():
    def pattern(x, w, v):
        return F.linear(x, w), F.linear(x, v)

    def together(x, w, v):
        return F.linear(x, torch.cat((w, v))).split((w.shape[0], v.shape[0]), -1)

    rule = thunder.rule(pattern, together, examples=[torch.empty(2, 3), torch.empty(4, 3), torch.empty(5, 3)])

    def program(x, w, v):
        a = F.linear(x, w).sin()
        return a.sum() + F.linear(x, v).cos().sum()

    inputs = [torch.randn(s, requires_grad=True) for s in ((2, 3), (4, 3), (5, 3))]
    compiled = thunder.jit(program, rules=[rule])
    torch.testing.assert_close(compiled(*inputs), program(*inputs))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(program(*inputs), inputs)
    )
    assert captured(compiled).count("linear") == 1


def test_a_result_that_the_pattern_returns_may_be_read_elsewhere():
    def pattern(x, y):
        total = x + y
        return total.sin(), total

    rule = thunder.rule(pattern, lambda x, y: ((x + y).cos(), x + y))  # another function, to see it
    compiled = thunder.jit(lambda x, y: (lambda t: t.sin() * t)(x + y), rules=[rule])
    x, y = torch.randn(3), torch.randn(3)
    torch.testing.assert_close(compiled(x, y), (x + y).cos() * (x + y))


def test_effects_between_are_a_border():
    def program(x, y):
        a = x * 2
        x.add_(1)
        return a + y

    rule = thunder.rule(lambda x, y: x * 2 + y, lambda x, y: x * 2 - y, name="sums")
    compiled = thunder.jit(program, rules=[rule])
    x, y = torch.ones(2), torch.ones(2)
    torch.testing.assert_close(compiled(x.clone(), y), program(x.clone(), y) - 2 * y * (hits(compiled)["sums"]))


def test_conditions():
    seen = []

    def when(q, k, v, scale, *, match):
        seen.append((q.shape[-1], scale, [b.sym.name for b in match.operations]))
        return q.shape[-1] > 4

    compiled = thunder.jit(WAYS["as written"], rules=[thunder.rule(attention, fused, when)])
    for width, count in ((4, 0), (8, 1)):
        q = torch.randn(1, 1, 3, width)
        torch.testing.assert_close(compiled(q, q, q), WAYS["as written"](q, q, q))
        assert hits(compiled) == {"attention": count}
    assert seen[0] == (4, 0.5, ["transpose", "matmul", "mul", "softmax", "matmul"])


def test_an_operation_as_the_pattern():
    rule = thunder.rule(ltorch.softmax, lambda x, dim: ltorch.log_softmax(x, dim).exp(), name="by logarithms")
    compiled = thunder.jit(lambda x: torch.softmax(x, 0) + x.softmax(1), rules=[rule])
    x = torch.randn(3, 3, requires_grad=True)
    torch.testing.assert_close(compiled(x), torch.softmax(x, 0) + x.softmax(1))
    assert hits(compiled) == {"by logarithms": 2} and "softmax" not in captured(compiled)


def test_an_executor_carries_rules():
    executor = OperatorExecutor("of rules")
    silu_mul = executor.register_operator(
        "silu_mul", like=lambda x, y: ltorch.silu(x) * y, fn=lambda x, y: F.silu(x) * y
    )
    executor.register_implementation(silu_mul, silu_mul)
    executor.register_rule(thunder.rule(lambda x, y: F.silu(x) * y, silu_mul, name="gated"))
    program = lambda x, y: (x * F.silu(y)).sum()
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    compiled = thunder.jit(program, executors=[executor])
    torch.testing.assert_close(torch.autograd.grad(compiled(x, y), (x, y)), torch.autograd.grad(program(x, y), (x, y)))
    assert "silu_mul" in captured(compiled)
    plain = thunder.jit(program)
    plain(x, y)
    assert "silu_mul" not in captured(plain)
    with pytest.raises(OptionError, match="rules= has a function, which is not a rule"):
        executor.register_rule(lambda x: x)


def test_rules_behind_the_derivatives():
    """The product of a backward, which no captured program has."""
    rule = thunder.rule(lambda g, y: g * (1 - y * y), lambda g, y: g - g * (y * y), at="joint", name="slope of tanh")
    slope = thunder.rule(ltorch.cos, lambda x: ltorch.sin(x + math.pi / 2), at="cut", name="cos")
    x = torch.randn(4, requires_grad=True)
    compiled = thunder.jit(lambda x: x.sin().sum(), rules=[slope, rule])
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x)[0], x.cos())
    assert "cos" not in names(compiled, backward=True)
    assert thunder.last_backward_traces(compiled)[-1].info.rules["cos"].locations
    assert "cos replaced operations once" in str(thunder.explain(compiled, x))


def test_rules_in_front_of_a_backward_inside():
    w = torch.linspace(0, 1, 4).requires_grad_()

    def step(x):
        w.grad = None
        (torch.sin(w) * x).sum().backward()
        return w.grad

    rule = thunder.rule(ltorch.sin, lambda x: ltorch.cos(x - math.pi / 2), name="sin")
    compiled, x = thunder.jit(step, rules=[rule]), torch.arange(4.0)
    torch.testing.assert_close(compiled(x), x * w.detach().cos())
    # that of the program, and that of the cosine's derivative
    assert "sin" not in names(compiled) and hits(compiled)["sin"] >= 1


def test_explain_and_report_say_how_often_rules_replaced_operations():
    rules = [thunder.rule(attention, fused), thunder.rule(lambda x, y: (x @ y).sin(), lambda x, y: x @ y, name="never")]
    compiled = thunder.jit(WAYS["as written"], rules=rules)
    q = torch.randn(1, 1, 3, 4)
    text = str(thunder.explain(compiled, q, q, q))
    assert re.search(r"rule: attention replaced operations once\n  at .*test_rules.py", text)
    assert "rule: never replaced nothing: its last operation is not in the program" in text
    compiled(q, q, q)
    assert "attention replaced operations once" in thunder.report(compiled).html


NEAR = {
    "an operation": (lambda q: torch.softmax(q @ q.mT + 0.5, -1) @ q, "mul was expected where add is"),
    "a literal": (lambda q: torch.softmax(q @ q.mT * 0.5, -2) @ q, "3 was expected where 2 is an argument"),
    "a use": (lambda q: (lambda w: w @ q + w.sum())(torch.softmax(q @ q.mT * 0.5, -1)), "is read elsewhere, too"),
    "an argument": (lambda q: torch.softmax(q * 0.5, -1) @ q, "matmul was expected where q is an argument"),
}


@pytest.mark.parametrize("case", NEAR)
def test_explain_says_why_a_rule_replaced_nothing(case):
    program, words = NEAR[case]
    compiled = thunder.jit(program, rules=[thunder.rule(attention, fused)])
    (only,) = thunder.explain(compiled, torch.randn(1, 1, 4, 4)).of_kind("rule")
    assert words in only.what


def test_no_gradient_flows_through_what_ran_without():
    def program(q, k, v):
        with torch.no_grad():
            weights = torch.softmax(q @ k.mT * 0.5, -1)
        return weights @ v

    def detached(q, k, v):
        return torch.softmax((q @ k.mT).detach() * 0.5, -1) @ v

    for one in (program, detached):
        compiled = thunder.jit(one, rules=[thunder.rule(attention, fused)])
        inputs = [torch.randn(1, 1, 4, 4, requires_grad=True) for _ in range(3)]
        compiled(*inputs).sum().backward()
        assert [x.grad is not None for x in inputs] == [False, False, True] and hits(compiled) == {"attention": 0}


def test_a_replacement_that_is_an_argument_is_a_copy_where_the_program_returns_it():
    rule = thunder.rule(lambda x: x * 1.0, lambda x: x, name="product with one")

    def program(x):
        y = x * 1.0
        return y, (y * 1.0).sin()

    compiled, x = thunder.jit(program, rules=[rule]), torch.ones(3)
    y, z = compiled(x)
    assert hits(compiled) == {"product with one": 2} and captured(compiled) == ["clone", "sin"]
    y += 1
    assert torch.equal(x, torch.ones(3)) and torch.equal(z, torch.ones(3).sin())


def test_a_value_that_is_written_in_place():
    def program(x, y):
        z = x * 1.0
        z.add_(y)
        return z * 2

    rule = thunder.rule(lambda x: x * 1.0, lambda x: x, name="product with one")
    compiled, x = thunder.jit(program, rules=[rule]), torch.ones(3)
    assert torch.equal(compiled(x, x), torch.full((3,), 4.0)) and torch.equal(x, torch.ones(3))


def test_chains_of_one_rule():
    """Each match reads the result of another one."""
    rule = thunder.rule(lambda x, y: (x + y).sin(), lambda x, y: (y + x).cos(), name="cosines")
    compiled = thunder.jit(lambda x: (((x + x).sin() + x).sin() + x).sin(), rules=[rule])
    x = torch.randn(3)
    torch.testing.assert_close(compiled(x), (((x + x).cos() + x).cos() + x).cos())
    assert hits(compiled) == {"cosines": 3}


# ---------------------------------------------------------------------------------------------------------- wrong rules

WRONG = {
    "fewer results": (lambda x, y: (x + y, x - y), lambda x, y: x + y, "returns 1 values, and its pattern 2"),
    "another shape": (lambda x, y: x + y, lambda x, y: (x + y).sum(), "its replacement gives .* and its pattern"),
    "another dtype": (lambda x, y: x + y, lambda x, y: (x + y).double(), "its replacement gives .* and its pattern"),
    "no tensor": (lambda x, y: x + y, lambda x, y: 2.0, "its replacement gives 2.0"),
    "an unused parameter": (
        lambda x, y: x.sin(),
        lambda x, y: x,
        "cannot tell the parameter y, since nothing reads it",
    ),
    "an unused number": (lambda x, y: x + y.shape[0], lambda x, y: x, "the parameter y"),
    "an argument": (lambda x, y: x, lambda x, y: y, "returns a value that none of its operations computes"),
    "a tensor of PyTorch's": (
        lambda x, y: x + y + torch.ones(2),
        lambda x, y: x,
        "make tensors by thunder.torch's functions",
    ),
    "an error": (lambda x, y: x.no_such_method(y), lambda x, y: x, "its pattern cannot be traced: .*no_such_method"),
    "no function": (lambda x, y: x + y, 3, "its replacement is a int, and no function"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules_are_refused_where_they_are_made(case):
    pattern, replacement, words = WRONG[case]
    with pytest.raises(OptionError, match=f"the rule mine: .*{words}"):
        thunder.rule(pattern, replacement, name="mine")


def test_numbers_that_no_operation_has_are_refused():
    def doubled(x, n: float):
        return x * (2 * n)

    with pytest.raises(OptionError, match="the rule doubled: a match cannot tell the parameter n"):
        thunder.rule(doubled, lambda x, n: x)
    with pytest.raises(OptionError, match=r"the rule doubled: at='later' is not an option; valid: 'captured'"):
        thunder.rule(doubled, lambda x, n: x, at="later")
    with pytest.raises(OptionError, match="its pattern has 2 parameters, and there are 1 examples"):
        thunder.rule(doubled, lambda x, n: x, examples=[torch.ones(2)])


def test_a_replacement_of_another_type_in_a_program_is_named():
    """For the examples it has the right one."""
    rule = thunder.rule(lambda x, y: x + y, lambda x, y: (x + y)[..., :2], name="mine", examples=[SQUARE, SQUARE])
    compiled = thunder.jit(lambda x, y: (x + y).sin(), rules=[rule], fallback="error")
    with pytest.raises(DeclarationError, match="the rule mine: its replacement gives"):
        compiled(torch.ones(2, 3), torch.ones(2, 3))


def test_a_replacement_that_loses_gradients_is_named():
    rule = thunder.rule(lambda x, y: x + y, lambda x, y: (x + y).detach(), name="mine")
    compiled = thunder.jit(lambda x, y: (x + y).sin(), rules=[rule], fallback="error")
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(DeclarationError, match="the rule mine: .* requires grad, and its"):
        compiled(x, x)


def test_errors_of_conditions_and_replacements_name_the_rule():
    def when(x, y):
        return {}["no such key"]

    rule = thunder.rule(lambda x, y: x + y, lambda x, y: y + x, when, name="mine")
    compiled = thunder.jit(lambda x, y: (x + y).sin(), rules=[rule], fallback="error")
    with pytest.raises(KeyError) as raised:
        compiled(torch.ones(2), torch.ones(2))
    assert "in the rule mine" in raised.value.__notes__


def test_rules_of_thunder_jit_are_checked():
    one = thunder.rule(lambda x, y: x + y, lambda x, y: y + x, name="mine")
    for rules, words in ((one, r"rules= is a list of rules"), ([lambda x: x], "which is not a rule"), (3, "is a list")):
        with pytest.raises(OptionError, match=words):
            thunder.jit(lambda x: x, rules=rules)
    with pytest.raises(OptionError, match=r"numerics='eager' and rules=\[mine\]"):
        thunder.jit(lambda x: x, rules=[one], numerics="eager")
    exact = thunder.rule(lambda x, y: x + y, lambda x, y: y + x, name="mine", exact=True)
    compiled = thunder.jit(lambda x, y: x + y, rules=[exact], numerics="eager")
    compiled(torch.ones(2), torch.ones(2))
    assert hits(compiled) == {"mine": 1}


def test_a_function_of_pytorch_is_a_pattern():
    rule = thunder.rule(torch.tanh, lambda x: torch.sin(x), name="sines")
    compiled = thunder.jit(lambda x: torch.tanh(x) + x.tanh(), rules=[rule])
    x = torch.linspace(-1, 1, 5)
    assert torch.equal(compiled(x), 2 * torch.sin(x))
