"""Random programs with branches and loops on data, in-place writes to arguments and temporaries, and random numbers.

A program is a tree of statements. It is called with several inputs beside eager, and what differs is made smaller by
leaving statements out.
"""

from __future__ import annotations

import contextlib
import random
import re
import types
from typing import NamedTuple

import torch

import thunder
from tests.paths.compared import assert_same, leaves, outcome, own
from thunder.errors import CaptureError

CALLS, STATEMENTS = 6, 9


class Node(NamedTuple):
    """A statement: one line, and what stands under it."""

    line: str
    body: tuple[Node, ...] = ()


class Program(NamedTuple):
    seed: int
    body: tuple[Node, ...]

    def source(self) -> str:
        return "def program(a, b, m, i, state):\n" + text(self.body, 1) + "    return a, b, t, s, k\n"


def text(body, depth: int) -> str:
    lines = "".join(
        "    " * depth + n.line + "\n" + (text(n.body, depth + 1) if n.line[-1] == ":" else "") for n in body
    )
    return lines or "    " * depth + "pass\n"


# Each word of an expression may be any of these; words in capitals are chosen in turn. Where it is deep enough, those
# without such words are taken.
GRAMMAR = {
    "VECTOR": [
        "a", "b", "t", "t", "m[0]", "m[:, 1]", "m.diagonal()", "torch.arange(4.0)", "DRAWN",
        "(VECTOR + VECTOR)", "(VECTOR - VECTOR)", "(VECTOR * VECTOR)", "VECTOR.sin()", "VECTOR.tanh()", "VECTOR.abs()",
        "(-VECTOR)", "(VECTOR * NUMBER)", "(VECTOR + SCALAR)", "torch.where(VECTOR > SMALL, VECTOR, VECTOR)",
        "VECTOR.clamp(-2, SMALL + 2)", "(VECTOR / (1 + VECTOR.abs()))", "(m @ VECTOR / 4)", "VECTOR.flip(0)",
        "VECTOR.roll(INTEGER % 3)", "VECTOR[i]", "VECTOR.cumsum(0)", "(VECTOR if CONDITION else VECTOR)",
    ],
    "DRAWN": ["torch.rand(4)", "torch.randn(4)", "torch.bernoulli(torch.full((4,), 0.5))",
              "torch.dropout(t, 0.5, True)", "torch.randint(3, (4,)).float()"],
    "SCALAR": ["s", "a[1]", "VECTOR.sum()", "VECTOR.max()", "VECTOR.mean()", "VECTOR[2]", "VECTOR.norm()",
               "(VECTOR @ VECTOR)"],
    "SMALL": ["0", "0.5", "-0.5", "1"],
    "NUMBER": ["2", "0.5", "k", "state.count", "SCALAR.item()", "int(SCALAR)", "float(SCALAR)", "min(k, SCALAR.item())",
               "max(SCALAR.item(), 0.25)", "round(SCALAR.item(), 1)", "abs(SCALAR.item())"],
    "INTEGER": ["k", "state.count", "i.sum().item()", "int(i[0])", "int(i.max())", "i.tolist()[1]", "len(state.log)",
                "int(SCALAR)", "int((VECTOR > SMALL).sum())", "VECTOR.argmax().item()", "t[t > SMALL].numel()"],
    "CONDITION": [
        "k", "state.flag", "i[0] == i[1]", "2 in i.tolist()", "1 in i", "torch.rand(()) < 0.5", "SCALAR > SMALL",
        "SCALAR < SMALL", "(VECTOR > SMALL).any()", "(VECTOR > SMALL).all()", "SCALAR.item() < NUMBER",
        "torch.equal(VECTOR, VECTOR)", "torch.allclose(VECTOR, t, atol=0.5)", "INTEGER % 2 == 0", "INTEGER > INTEGER",
        "-1 < SCALAR < 1", "bool(SCALAR > 0)", "torch.randint(4, ()).item() > 1", "any(v > 1 for v in VECTOR)",
        "torch.isnan(t).any()", "(CONDITION and CONDITION)", "(CONDITION or not (CONDITION))",
    ],
    "PLACE": ["0", "1", "3", "1:3", ":2", "i", "INTEGER % 4"],
    "SIMPLE": [
        "t = VECTOR", "t = VECTOR", "s = SCALAR", "k = INTEGER % 5", "k = NUMBER", "a.add_(VECTOR)", "b.mul_(VECTOR)",
        "t.sub_(VECTOR)", "a.mul_(NUMBER)", "t.add_(NUMBER)", "t = t.clone()", "a[PLACE] = SCALAR + 0", "t[PLACE] = SMALL",
        "m[1][PLACE] = SCALAR + 0", "t[t > SMALL] = SMALL", "m[PLACE] = VECTOR + 0", "m[:, 2].mul_(SCALAR + 0)", "t[1:].add_(SCALAR + 0)",
        "a.copy_(VECTOR + 0)", "t.normal_()", "a.uniform_()", "state.count += INTEGER", "state.count += 1",
        "state.log.append(INTEGER)", "state.flag = CONDITION", "state.kept = VECTOR", "a, b = b, a", "m.t_()",
        "t = sorted([t, VECTOR], key=lambda v: v.sum().item())[0]", "k = max(i.tolist())", "k = sum(i.tolist()[:2])",
        "t = torch.stack([v * 2 if v > 0 else -v for v in t])", "b.clamp_(min=SMALL)", "t = t.detach()",
        "t = torch.cat([t[t > 0], t[t <= 0]])", "s = torch.tensor(NUMBER)",
    ],
    "LOOP": ["for j in range(INTEGER % 4):", "for j, v in enumerate(VECTOR):", "for j in i.tolist()[:2]:",
             "for n in range(4):"],
}  # fmt: skip
WORD = re.compile("|".join(GRAMMAR))


class Writer:
    """Variables: vectors a, b (arguments) and t of 4 elements, a matrix m (4, 4), integers i (an argument of 4
    elements), a tensor s without dimensions, a Python number k, and an object that is written to."""

    def __init__(self, seed: int):
        self.r, self.loops = random.Random(seed), 0

    def expand(self, template: str, depth: int = 3) -> str:
        def choose(match):
            options = GRAMMAR[match.group()]
            plain = [o for o in options if not WORD.search(o)]
            return self.expand(self.r.choice(plain if depth <= 0 and plain else options), depth - 1)

        return WORD.sub(choose, template)

    def node(self, template: str, body: tuple[Node, ...] = ()) -> Node:
        return Node(self.expand(template, 2), body)

    def block(self, size: int) -> tuple[Node, ...]:
        return tuple(self.statement() for _ in range(self.r.randint(1, size)))

    def statement(self) -> Node:
        kind = self.r.random()
        if kind < 0.6:
            return self.node("SIMPLE")
        if kind < 0.8:
            branches = [self.node("if CONDITION:", self.block(3))]
            if self.r.random() < 0.4:
                branches.append(Node("else:", self.block(2)))
            return Node("if True:", tuple(branches))
        if kind < 0.9 and self.loops < 2:
            self.loops += 1
            leave = self.node("if CONDITION:", (Node(self.r.choice(["break", "continue"])),))
            return self.node("LOOP", (*self.block(2), leave, *self.block(1)))
        return self.rare(self.block(2))

    def rare(self, block: tuple[Node, ...]) -> Node:
        kind = self.r.randrange(6)
        if kind == 0:
            return self.node("if CONDITION:", (self.node("return VECTOR, INTEGER"),))
        if kind == 1:
            trial = Node("try:", (*block, self.node("assert CONDITION, k")))
            caught = Node("except AssertionError as e:", (Node("state.log.append(str(e))"),))
            return Node("if True:", (trial, caught))
        if kind == 2:
            inner = (self.node("if CONDITION:", (Node("return x * 2"),)), Node("return x + n"))
            return Node("if True:", (self.node("def inner(x, n=INTEGER):", inner), Node("t = inner(t)")))
        heads = ("with torch.no_grad():", "with torch.enable_grad():", "with torch.autocast('cpu', torch.bfloat16):")
        return Node(heads[kind - 3], block)


def generate(seed: int) -> Program:
    writer = Writer(seed)
    body = [writer.statement() for _ in range(writer.r.randint(3, STATEMENTS))]
    return Program(seed, (Node("t, s, k = a * 1, b.sum(), 1"), *body))


# ------------------------------------------------------------------------------------------------------------- running


def inputs(seed: int) -> list[tuple]:
    g = torch.Generator().manual_seed(seed)
    which = int(torch.randint(10, (), generator=g))
    grads = [n == which for n in range(3)]
    return [
        (*(torch.randn(*shape, generator=g).mul_(0.5 + call % 3).requires_grad_(grad)
           for shape, grad in zip([(4,), (4,), (4, 4)], grads)), torch.randint(4, (4,), generator=g))
        for call in range(CALLS)
    ]  # fmt: skip


def new_state() -> types.SimpleNamespace:
    return types.SimpleNamespace(count=1, flag=False, log=[], kept=None)


def run(program: Program) -> tuple[str, str]:
    """What a program shows: ("same" | "refused" | "wrong", words)."""
    space: dict = {"torch": torch}
    exec(compile(program.source(), f"<program {program.seed}>", "exec"), space)
    function = space["program"]
    compiled = thunder.jit(function, fallback="error", numerics="eager", max_paths=64)
    states = [new_state() for _ in range(2)]
    for call, args in enumerate(inputs(program.seed)):
        outcomes = []
        for f, state in zip((function, compiled), states):
            torch.manual_seed(call)
            random.seed(call)
            with contextlib.suppress(NotImplementedError):
                outcomes.append(outcome(f, (*map(own, args), state)))
        want, got = outcomes
        if type(got[0]) is tuple and type(got[0][0]) is type and issubclass(got[0][0], CaptureError):
            return "refused", got[0][1]
        if type(want[0]) is tuple and type(want[0][0]) is type:  # eager raises: so must we; what it wrote is its own
            want, got = (want[0][0], ()), (got[0][0] if type(got[0]) is tuple else got[0], ())
            states = [new_state() for _ in range(2)]
        elif want[1] is RuntimeError:  # eager has no gradient: it has written to what the derivative reads
            want, got = (want[0], (), *want[2:]), (got[0], (), *got[2:])
        try:
            assert_same(got[1], want[1], rtol=1e-5)  # gradients are sums, whose order is ours
            assert_same((got[0], *got[2:]), (want[0], *want[2:]))
        except AssertionError as error:
            if not _is_rounding(function, program.seed, call, want, got):
                return "wrong", f"call {call}: {error}"
    return "same", f"{len(compiled.programs)} paths"


def _is_rounding(function, seed: int, call: int, want, got) -> bool:
    """Whether both outcomes are as far from that of the same calls in float64 as rounding is: a product of a view that
    was overwritten reads another layout than eager's, which its kernel sums in another order."""
    state, in_float64 = new_state(), None
    for n, args in enumerate(inputs(seed)[: call + 1]):
        torch.manual_seed(n)
        random.seed(n)
        with _InFloat64():
            in_float64 = outcome(function, (*(_as(a, torch.float64) for a in args), state))
    largest = max(
        (float(t.detach().abs().max()) for t in leaves(in_float64) if t.is_floating_point() and t.numel()), default=1
    )
    bound = 8 * torch.finfo(torch.float32).eps * max(1.0, largest)
    try:
        assert_same(got, want, bound)
        assert_same(_as(in_float64, torch.float32), want, bound)
    except AssertionError:
        return False
    return True


class _InFloat64(torch.overrides.TorchFunctionMode):
    """What programs make is float64, of the random numbers that they draw for float32."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.uniform_, torch.Tensor.normal_):
            drawn = torch.empty(args[0].shape, dtype=torch.float32)
            return args[0].copy_(func(drawn, *args[1:], **kwargs))
        if func in (torch.rand, torch.randn):
            return func(*args, **kwargs, dtype=torch.float32).double()
        if func in (torch.bernoulli, torch.dropout):
            return func(args[0].to(torch.float32), *args[1:], **kwargs).double()
        return func(*args, **kwargs) if func is not torch.Tensor.float else args[0].double()


def _as(x, dtype: torch.dtype):
    """A copy with the floats of its tensors in another dtype."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone().to(dtype if x.is_floating_point() else x.dtype).requires_grad_(x.requires_grad)
    if isinstance(x, dict):
        return {k: _as(v, dtype) for k, v in x.items()}
    return type(x)(_as(v, dtype) for v in x) if type(x) in (list, tuple) else x


def smaller(program: Program, limit: int = 300) -> Program:
    """A program that is wrong too, with as few statements as can be found."""
    tried = 0
    shrunk = True
    while shrunk and tried < limit:
        shrunk = False
        for body in without_one(program.body):
            tried += 1
            candidate = program._replace(body=body)
            try:
                still_fails = run(candidate)[0]
            except Exception:  # noqa: BLE001 - no program
                continue
            if still_fails == "wrong":
                program, shrunk = candidate, True
                break
    return program


def without_one(body: tuple[Node, ...]):
    """The bodies with one statement less, or with one in place of what it holds."""
    for n, node in enumerate(body):
        yield (*body[:n], *body[n + 1 :])
        if node.body:
            yield (*body[:n], *node.body, *body[n + 1 :])
            for inner in without_one(node.body):
                yield (*body[:n], node._replace(body=inner), *body[n + 1 :])
