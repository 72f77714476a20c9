"""Guards: how many there are, what they say, and which programs they tell apart."""

import copy
import enum
import re

import pytest
import torch

import thunder
from thunder.capture import tensors

X = torch.ones(3)


class Plain:
    """An object without fields."""


def lines(compiled) -> int:
    """The length of the prologue that ran last."""
    return len(str(thunder.last_prologue_traces(compiled)[-1]).splitlines())


def small_dicts(n):
    return {str(i): [i, {"a": i}] for i in range(n)}


# ------------------------------------------------------------------------------------------------ linear


def copies(x, d):
    return x + len(copy.deepcopy(d))


def as_keys(x, objects):
    return x + len({o: 1 for o in objects})


def numbered(x, objects):
    return x + len({id(o) for o in objects})


def compared(x, objects):
    return x + sum(a is b for a in objects for b in objects)


@pytest.mark.parametrize(
    "program, make",
    [(copies, small_dicts)] + [(f, lambda n: [Plain() for _ in range(n)]) for f in (as_keys, numbered, compared)],
    ids=lambda x: x.__name__,
)
def test_guards_that_objects_are_different_ones_are_linear(program, make):
    counts = []
    for n in (8, 16, 32):
        compiled = thunder.jit(program)
        inputs = make(n)
        for _ in range(2):
            assert torch.equal(compiled(X, inputs), program(X, inputs))
        assert len(compiled.programs) == 1
        counts.append(lines(compiled))
    assert counts[2] - counts[1] <= 2 * (counts[1] - counts[0]) + 2
    assert counts[2] < 32 * 8


@pytest.mark.parametrize("program", [as_keys, numbered, compared])
def test_objects_that_become_one_are_another_program(program):
    compiled = thunder.jit(program)
    objects = [Plain() for _ in range(5)]
    assert torch.equal(compiled(X, objects), program(X, objects))
    objects[3] = objects[1]
    assert torch.equal(compiled(X, objects), program(X, objects))
    (again,) = compiled.recompilations
    assert again.reason == "objects[1] and objects[3], which were two objects, became one object"


def test_dicts_that_become_one_are_copied_as_one():
    def program(x, d):
        d = copy.deepcopy(d)
        d[0].append(1)
        return x + len(d[1])

    compiled, shared = thunder.jit(program), [2]
    for inputs in ([[2], [2]], [shared, shared], [[2], [2]]):
        assert torch.equal(compiled(X, inputs), program(X, inputs))
    assert len(compiled.programs) == 2


def test_writes_look_only_at_tensors_in_the_same_memory(monkeypatch):
    looked, share = [], tensors._share
    monkeypatch.setattr(tensors, "_share", lambda *arguments: looked.append(arguments) or share(*arguments))

    def program(inputs):
        for t in inputs:
            t.add_(1)

    counts = []
    for n in (10, 20):
        looked.clear()
        inputs = [torch.ones(2) for _ in range(n)]
        thunder.jit(program)(inputs)
        assert all(t.eq(2).all() for t in inputs)
        counts.append(len(looked))
    assert counts[1] == 2 * counts[0]


# ------------------------------------------------------------------------------------------------ a miss


def test_a_miss_asks_each_program_once():
    queries = []
    compiled = thunder.jit(lambda x, mode: x + 1 if mode == "a" else x * len(mode))
    compiled(X, "a")
    (entry,) = compiled.programs
    run = entry.prologue_fn
    entry.prologue_fn = entry._questions = lambda *call: queries.append(call) or run(*call)
    compiled(X, "b")
    assert len(queries) == 1 and compiled.recompilations[-1].reason == "mode was 'a', is 'b'"


REASONS = {
    "a_value": (lambda x, o: x * o.n, [{"n": 1.5}, {"n": 2.5}], "o.n was 1.5, is 2.5"),
    "a_function": (lambda x, o: o.f(x), [{"f": torch.sin}, {"f": torch.cos}], "was function sin, is function cos"),
    "a_class": (lambda x, o: x * len(o.kind.__name__), [{"kind": Plain}, {"kind": dict}], "was Plain, is dict"),
    "keys": (lambda x, o: x * sum(o.d.values()), [{"d": {"a": 1}}, {"d": {"b": 1}}], "were ('a',), are ('b',)"),
    "code": (lambda x, o: o.f(x), [{"f": lambda x: x}, {"f": lambda x: x + 1}], "was that of line"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_names_the_value_before_and_now(name):
    program, fields, words = REASONS[name]
    compiled = thunder.jit(program)
    for field_values in fields:
        o = Plain()
        vars(o).update(field_values)
        compiled(X, o)
    assert words in compiled.recompilations[-1].reason


# ------------------------------------------------------------------------------------------------ the text


class Config:
    def __init__(self):
        self.width, self.names = 768, ("a", "b")


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.act = Config(), torch.nn.functional.relu

    def forward(self, x, config):
        x = x * len(config.names) * config.width if self.config.width == 768 else x
        return self.act(x) if self.training else x


def test_guards_are_read_as_comparisons_with_values():
    compiled = thunder.jit(Scaled())
    compiled(X, Config())
    text = str(thunder.last_prologue_traces(compiled)[-1])
    for line in (
        "# if model.training is not True: return rows0()", "# if config.names != ('a', 'b'): return rows4.of(t_1)",
        "# if model.act is not relu: return rows0()", "# if type(model) is not Scaled: return rows3()",
        "# if model.forward is not MISSING: return rows2()",
        "# if not (type(x) is Tensor and x.shape == (3,) and x.dtype == torch.float32 and x.device == device(type='cpu') and "
        "x.requires_grad == False): return expected3()",
    ):  # fmt: skip
        assert f"  {line}\n" in text
    assert " != 768: return was_is('model.config.width', '768', " in text
    assert "  if type(config) is not Config: return" in text


def guards_of(text: str) -> list[str]:
    """The conditions of a prologue that is printed to be read."""
    return [line.strip().removeprefix("if ").partition(": return ")[0] for line in text.split("\n") if " if " in line]


def test_each_guard_is_read_as_an_expression_with_its_value():
    """No guard shows a table of what a function checks in one pass, and each is Python."""
    kind = enum.Enum("Kind", "A B")
    table = {f"key_{i}": i for i in range(20)}

    class Local:
        sizes, scale, function, known = [1, 2], 2.5, torch.nn.functional.silu, {3}

    def program(x, config, d, **keywords):
        y = x * len(d) if config.width == 768 and keywords["kind"] is kind.A and 3 in Local.known else x
        scales = [Local.scale, *Local.sizes, *(table[k] for k in table), d[Config](2.0), torch.get_default_dtype()]
        return Local.function(y) + sum(s for s in scales if type(s) in (int, float)) + len(keywords["name"])

    compiled = thunder.jit(program)
    compiled(X.clone().requires_grad_(), Config(), {Config: lambda v: v}, kind=kind.A, name=("a", 1.5))
    text = thunder.last_prologue_traces(compiled)[-1].python()
    guards = guards_of(text)
    for guard in guards:
        compile(guard, "guard", "eval")
        assert not re.search(r"\b(C|K|W|tables|keys|expected|rows|objects|types|layouts|order)\d+\b", guard), guard
    for guard in ("config.width != 768", "kind is not Kind.A", "Local.scale != 2.5", "function is not silu"):
        assert any(guard in line for line in guards), text
    assert any("content(table) != content({'key_0': 0, 'key_1': 1, " in line for line in guards), text


def test_what_is_printed_is_what_runs():
    """Without comments, the text is that of the prologue, which the names in it lead to."""
    compiled = thunder.jit(lambda x, d, f: f(x) * d["k"])
    compiled(X, {"k": 2.5}, torch.nn.functional.silu)
    trace = thunder.last_prologue_traces(compiled)[-1]
    code = compile(str(trace), "prologue", "exec")
    space = dict(trace.info.objects)
    exec(code, space)
    run, again = compiled.programs[0].prologue_fn, space["prologue"]
    for call in ((X, {"k": 2.5}, torch.nn.functional.silu), (X, {"k": 3.5}, torch.sin), (X[:2], {}, None), (X,)):
        assert str(run(compiled.fn, call, {})) == str(again(compiled.fn, call, {}))


KINDS = [torch.Tensor, torch]


def test_names_in_the_text_are_those_of_the_objects():
    """Generated code knows `torch` and `Tensor` as other objects than these."""
    compiled = thunder.jit(lambda x, kinds: x * 2 if kinds[0] is torch.Tensor and KINDS[0] is kinds[0] else x)
    for _ in range(2):
        assert torch.equal(compiled(X, [torch.Tensor]), X * 2)
    assert len(compiled.programs) == 1


class Many(torch.nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full((2,), float(i))) for i in range(20))
        self.scale = torch.nn.Parameter(torch.ones(2))
        if tied:
            self.weights[7] = self.scale

    def forward(self, x):
        for i, w in enumerate(self.weights):
            x = x + w * (i + 1)
        return x * self.scale


@pytest.mark.parametrize("tied", [False, True])
def test_tensors_that_are_read_together_are_checked_each(tied):
    """Parameters that follow each other have one variable in the prologue; each has its own reason."""
    module, x = Many(tied), torch.ones(2)
    compiled = thunder.jit(module)
    assert torch.equal(compiled(x), module(x))
    assert "tensors0 = read0[" in str(thunder.last_prologue_traces(compiled)[-1])

    def replaced(tensor):
        module.weights[13] = torch.nn.Parameter(tensor, tensor.is_floating_point())

    changes = [
        lambda: replaced(torch.full((1,), 3.0)), lambda: replaced(torch.full((2,), 3.0, dtype=torch.float64)),
        lambda: module.weights[4].requires_grad_(False), lambda: module.weights.append(torch.nn.Parameter(x + 3)),
        lambda: setattr(module.weights[3], "data", torch.full((1,), 9.0)),
    ]  # fmt: skip
    for change in changes:
        change()
        ours, theirs = compiled(x), module(x)
        assert torch.equal(ours, theirs) and ours.requires_grad is theirs.requires_grad
    assert thunder.cache_misses(compiled) == 1 + len(changes)
    assert any("weights.13" in r.reason or "weights[13]" in r.reason for r in compiled.recompilations)
    with torch.no_grad():
        module.weights[5].fill_(100.0)
    assert torch.equal(compiled(x), module(x)) and thunder.cache_misses(compiled) == 1 + len(changes)


class HashesItself(torch.nn.Module):
    def forward(self, x):
        return x + 1 if hash(self) and self in {self: 1} else x


def test_the_compiled_module_is_hashed_by_the_program():
    compiled = thunder.jit(HashesItself(), fallback="error")
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert thunder.cache_misses(compiled) == 1
