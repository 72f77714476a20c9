"""cache="symbolic values": numbers and tensor sizes that stay symbolic. Each program is compared with itself in eager,
call by call."""

import collections
import contextlib
import functools
import io
import itertools
import math
import operator
import types
import warnings
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.tests.litgpt_model import GPT

SIZES = (2, 3, 5, 9)
TENSORS = [(torch.linspace(-1, 1, 6 * n).reshape(n, 6),) for n in SIZES]


def assert_same(got, want):
    """Equal in type, structure and value; tensors in strides as well."""
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        assert got.shape == want.shape and got.dtype == want.dtype and got.stride() == want.stride()
        assert torch.equal(got, want)
    elif isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert_same(a, b)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for k in want:
            assert_same(got[k], want[k])
    else:
        assert got == want


def compilations(program, calls) -> int:
    compiled = thunder.jit(program, cache="symbolic values")
    for args in calls:
        assert_same(compiled(*args), program(*args))
    assert thunder.cache_hits(compiled) + thunder.cache_misses(compiled) == len(calls)
    return thunder.cache_misses(compiled)


ONE_PROGRAM_FOR_ALL_SIZES = {
    "reshape to a computed size": lambda x: x.reshape(x.shape[0] * 2, 3),
    "reshape with -1": lambda x: x.reshape(-1, 3),
    "view": lambda x: x.view(x.shape[0], 2, 3).transpose(0, 1).reshape(2, -1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "permute, contiguous, view": lambda x: x.permute(1, 0).contiguous().view(-1),
    "cat": lambda x: torch.cat([x, x, x[:1]], 0),
    "stack": lambda x: torch.stack([x, x], 0),
    "slice from": lambda x: x[1:],
    "slice to half": lambda x: x[: x.shape[0] // 2],
    "slice with step": lambda x: x[::2],
    "slice both": lambda x: x[1:, -2:],
    "slice to a difference": lambda x: x[: x.shape[0] - 1],
    "last row": lambda x: x[-1],
    "narrow": lambda x: x.narrow(0, 1, x.shape[0] - 1),
    "expand new dimension": lambda x: x[None].expand(3, x.shape[0], 6),
    "expand one row": lambda x: x[:1].expand(x.shape[0], 6) + x,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1]),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "roll and flip": lambda x: x.roll(1, 0).flip(0),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "split": lambda x: x.split(2, 1),
    "chunk": lambda x: x.chunk(2, 1),
    "unbind of a constant dimension": lambda x: x.unbind(1),
    "movedim": lambda x: x.movedim(0, 1),
    "arange": lambda x: torch.arange(x.shape[0]),
    "arange with step": lambda x: torch.arange(0, x.shape[0], 2),
    "arange divided by the size": lambda x: torch.arange(x.size(0), dtype=torch.float32) / x.size(0),
    "creation": lambda x: torch.zeros(x.shape) + torch.ones(x.size(0), 1) + torch.full((x.size(0), 6), 2.5),
    "new_zeros": lambda x: x.new_zeros(x.shape[0] + 1),
    "causal mask": lambda x: torch.tril(torch.ones(x.shape[0], x.shape[0], dtype=torch.bool)),
    "additive mask": lambda x: torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1),
    "eye": lambda x: torch.eye(x.shape[0]) @ x,
    "linspace": lambda x: torch.linspace(0, 1, x.shape[0]),
    "matmul": lambda x: x @ x.T,
    "batched matmul": lambda x: torch.matmul(x.unsqueeze(0), x.T.unsqueeze(0)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "linear": lambda x: F.linear(x, torch.ones(4, 6)),
    "softmax": lambda x: torch.softmax(x @ x.T, -1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, -1, 6)] * 3, is_causal=True),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "reductions": lambda x: (x.sum(0), x.mean(1), x.var(0), x.amax()),
    "mean by numel": lambda x: x.sum() / x.numel(),
    "scaled by len": lambda x: x * len(x),
    "scaled by a power of a size": lambda x: x * x.shape[-1] ** -0.5,
    "cumsum and sort": lambda x: (x.cumsum(0), x.sort(0)[0]),
    "topk": lambda x: x.topk(2, 0).values,
    "gather": lambda x: torch.gather(x, 1, torch.zeros(x.shape[0], 1, dtype=torch.long)),
    "advanced index": lambda x: x[torch.arange(x.shape[0]), 0],
    "masked_fill": lambda x: x.masked_fill(torch.arange(x.shape[0])[:, None] > 1, 0.0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "embedding": lambda x: F.embedding(torch.arange(x.shape[0]), torch.ones(10, 3)),
    "convolution": lambda x: F.conv1d(x.T[None], torch.ones(2, 6, 2)),
    "pooling": lambda x: F.avg_pool1d(x.T[None], 2),
    "interpolate": lambda x: F.interpolate(x.T[None], scale_factor=2),
    "sizes returned": lambda x: (x + 1, x.shape[0], x.shape[0] * 2 + 1, x.size(0) // 2, x.numel()),
    "shape returned": lambda x: (x + 1, x.shape, x.shape[1:]),
    "sliced shape": lambda x: x.new_ones(x.shape[:1]),
    "shape and more": lambda x: x.new_ones((*x.shape, 2)),
    "numel of the shape": lambda x: x.reshape(x.shape.numel()),
    "unpacked shape": lambda x: (lambda n, d: x.reshape(d, n))(*x.shape),
    "sizes compared with themselves": lambda x: x if x.shape[0] == x.size(0) else x - 1,
}


@pytest.mark.parametrize("name", ONE_PROGRAM_FOR_ALL_SIZES)
def test_one_compilation_serves_all_sizes(name):
    assert compilations(ONE_PROGRAM_FOR_ALL_SIZES[name], TENSORS) == 1


@pytest.mark.parametrize("name", ONE_PROGRAM_FOR_ALL_SIZES)
def test_the_same_programs_with_constant_values(name):
    """The constant mode compiles once a size: what is symbolic above is what makes the difference."""
    program = ONE_PROGRAM_FOR_ALL_SIZES[name]
    compiled = thunder.jit(program)
    for args in TENSORS[:2]:
        assert_same(compiled(*args), program(*args))
    assert thunder.cache_misses(compiled) == 2


@pytest.mark.parametrize(
    "program, calls, expected",
    [
        (lambda x: x.unbind(0), TENSORS, 4),  # as many outputs as the size: each size is a program
        (lambda x: sum(x[i] for i in range(x.shape[0])), TENSORS, 4),
        (lambda x: f"{x.shape[0]}", TENSORS, 1),  # a text is made by each call
        (lambda x: {f"{x.shape[0]}": x}, TENSORS, 4),  # and decides where it is a key
        (lambda x: list(range(20))[x.shape[0]], TENSORS, 4),
        (lambda x: {2: "two"}.get(x.shape[0]), TENSORS, 4),
        (lambda x: x + 1 if x.shape[0] > 4 else x - 1, TENSORS, 2),
        (lambda x: x + 1 if x.shape[0] % 2 else x - 1, TENSORS, 2),
        (lambda x: x[: min(x.shape[0], 4)], TENSORS, 1),
        (lambda x, y: x + y, [(torch.ones(n, 4), torch.ones(n, 4)) for n in SIZES], 1),
        (lambda x, y: x + y, [(torch.ones(3, 4), torch.ones(3, 4)), (torch.ones(5, 4), torch.ones(1, 4)),
            (torch.ones(6, 4), torch.ones(1, 4))], 2),
        (lambda x: x[1:-1], TENSORS, 2),  # an empty slice is a program of its own
        (lambda x: x.squeeze(0), [(torch.ones(n, 4),) for n in (1, 2, 3)], 2),
        (lambda x: x.sum(0), [(torch.ones(n, 4),) for n in (0, 1, 2, 3)], 3),
    ],
)  # fmt: skip
def test_what_a_size_decides_is_guarded(program, calls, expected):
    assert compilations(program, calls) == expected


@pytest.mark.parametrize(
    "program, calls, expected",
    [
        (lambda x, i: x * i, [(torch.ones(3), i) for i in (2, 3, 7, -4)], 1),
        (lambda x, i: x * i, [(torch.ones(3), i) for i in (2, 0, 7, 1, 0)], 3),  # 0 and 1 are programs of their own
        (lambda x, i: x * i, [(torch.ones(3), i) for i in (2, 2.0, True)], 3),
        (lambda x, f: x * f, [(torch.ones(3), f) for f in (2.0, 3.0, 7.5, 0.0, 1.0, -0.0, math.inf)], 1),
        (lambda x, f: x * (f * 2 + 1) / 3, [(torch.ones(3), f) for f in (2.0, 3.0, 7.5)], 1),
        (lambda x, f: x * f if f > 2.5 else x + f, [(torch.ones(3), f) for f in (2.0, 3.0, 7.5, 1.0)], 2),
        (lambda i, f: (i * 2, f / 2, i + f, i // 2, i % 3, -i, abs(i - 20)), [(5, 2.5), (7, 3.5), (9, 0.5)], 1),
        (lambda x, n: torch.zeros(n) + x, [(torch.ones(1), n) for n in SIZES[1:]], 1),
        (lambda x, l: x * l[0] + l[1], [(torch.ones(2), [3, 4.0]), (torch.ones(3), [5, 6.0])], 1),
        (lambda x, d: x * d["scale"], [(torch.ones(2), {"scale": s}) for s in (2.5, 3.5)], 1),
        (lambda f: round(f), [(2.6,), (2.7,), (2.6,)], 1),
        (lambda f: (int(f), round(f, 1)), [(2.6,), (2.7,)], 1),
        (lambda x, f: x * math.sqrt(f), [(torch.ones(2), 4.0), (torch.ones(2), 9.0)], 1),
        (lambda x, i: x * math.cos(i / 9) * 0.9**i + float(i), [(torch.ones(2), i) for i in (2, 3, 7)], 1),
        (lambda x, i: torch.tensor([i, 2.0 * i]) * x, [(torch.ones(2), i) for i in (2, 3, 7)], 1),
        (lambda x, f: x * math.erf(f) if math.isfinite(f) else x, [(torch.ones(2), 4.0), (torch.ones(2), 9.0)], 1),
        (lambda x, b: x if b else -x, [(torch.ones(2), True), (torch.ones(2), False), (torch.ones(2), True)], 2),
        (lambda x, *, n=3: x * n, [(torch.ones(2),), (torch.ones(3),)], 1),
    ],
)  # fmt: skip
def test_numbers_as_arguments(program, calls, expected):
    assert compilations(program, calls) == expected


def test_nan_and_large_numbers():
    compiled = thunder.jit(lambda x, f: x * f, cache="symbolic values")
    assert torch.equal(compiled(torch.ones(2), 2.0), torch.full((2,), 2.0))
    assert compiled(torch.ones(2), math.nan).isnan().all()
    integers = thunder.jit(lambda n: n * n, cache="symbolic values")
    assert integers(3) == 9 and integers(10**12) == 10**24
    assert thunder.cache_misses(integers) == 1


def test_reasons_say_which_relation_broke():
    compiled = thunder.jit(lambda x: x + 1 if x.shape[0] > 4 else x - 1, cache="symbolic values")
    compiled(torch.ones(9, 2))
    compiled(torch.ones(3, 2))
    (reason,) = thunder.last_recompile_reasons(compiled)
    assert reason.startswith("x.shape[0] > 4 was True, with x.shape[0] was 9, is 3 (test_symbolic.py:")
    assert reason.endswith('cache="symbolic values"))')  # the line
    equal = thunder.jit(lambda x, y: x + y, cache="symbolic values")
    equal(torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        equal(torch.ones(3), torch.ones(4))
    (reason,) = thunder.last_recompile_reasons(equal)
    assert "x.shape[0]" in reason and "y.shape[0]" in reason and "is 4" in reason


def test_other_metadata_is_still_checked():
    compiled = thunder.jit(lambda x: x + 1, cache="symbolic values")
    for x in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, 4), torch.ones(4, 5)):
        assert_same(compiled(x), x + 1)
    assert thunder.cache_misses(compiled) == 3
    assert thunder.last_recompile_reasons(compiled)[0] == "x had 2 dimensions, has 3"


def test_strides_do_not_matter():
    compiled = thunder.jit(lambda x: (x @ x.T).reshape(-1), cache="symbolic values")
    for x in (torch.randn(4, 6), torch.randn(6, 4).T, torch.randn(8, 12)[::2, ::2]):
        assert torch.equal(compiled(x), (x @ x.T).reshape(-1))
    assert thunder.cache_misses(compiled) == 1


@pytest.mark.slow
def test_a_llama_at_all_lengths():
    torch.manual_seed(0)
    model = GPT.from_name("llama2-like").eval()
    compiled = thunder.jit(model, cache="symbolic values")
    tokens = torch.randint(0, model.config.vocab_size, (1, 101))
    with torch.no_grad():
        for n in range(2, 102):
            assert torch.equal(compiled(tokens[:, :n]), model(tokens[:, :n]))
    assert thunder.cache_misses(compiled) <= 2


def test_a_llama_at_other_batch_sizes():
    model = GPT.from_name("llama2-like").eval()
    compiled = thunder.jit(model, cache="symbolic values")
    with torch.no_grad():
        for shape in [(2, 4), (3, 7), (4, 9), (1, 5), (1, 9), (4, 1), (3, 1)]:
            tokens = torch.randint(0, model.config.vocab_size, shape)
            assert torch.equal(compiled(tokens), model(tokens))
    assert thunder.cache_misses(compiled) == 3  # many by many; one sequence; sequences of length one


def test_checks_hold_for_symbolic_traces():
    """The passes' traces keep the rules of every trace with symbolic sizes as well."""
    options = thunder.DebugOptions(check_traces=True)
    for program in ONE_PROGRAM_FOR_ALL_SIZES.values():
        compiled = thunder.jit(program, cache="symbolic values", debug_options=options)
        assert_same(compiled(*TENSORS[2]), program(*TENSORS[2]))


def test_symbolic_sizes_are_printed_as_expressions():
    compiled = thunder.jit(lambda x: x.reshape(x.shape[0] * 2, 3), cache="symbolic values")
    compiled(TENSORS[2][0])
    text = str(thunder.last_traces(compiled)[-1])
    assert (
        "def computation(x, i0, i1):" in text
        and '# x: "cpu f32[i0, i1]"' in text
        and '# i0: "int 5"' in text
        and "cpu f32[2*i0, 3]" in text
    )
    prologue = str(thunder.last_prologue_traces(compiled)[-1])
    assert "x.shape[0]" in prologue


def test_opaque_operations_are_typed_by_examples():
    compiled = thunder.jit(lambda x: torch._euclidean_dist(x, x), cache="symbolic values")
    for (x,) in TENSORS:
        assert torch.equal(compiled(x), torch._euclidean_dist(x, x))
    assert thunder.cache_misses(compiled) == 1


def test_no_warning_on_few_compilations():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compilations(lambda x: x * 2, TENSORS) == 1


@pytest.mark.parametrize("cache", [None, "symbolic values"])
def test_floats_have_remainders(cache):
    space = types.SimpleNamespace()

    def program(x, n):
        return x * (n // 1), x * (n % 1), x * (space.n // 1), x * (space.n % 1), x * (2 * space.n // 2)

    compiled = thunder.jit(program, cache=cache)
    for n in (2.25, 3.5, 4.75, 7.125):
        space.n = n
        for got, want in zip(compiled(torch.ones(2), n), program(torch.ones(2), n), strict=True):
            assert torch.equal(got, want)


WHAT_PYTHON_DOES_WITH_SIZES = {
    "formatted": lambda s: (f"{s}", str(s), repr(s[2:]), f"{s[2]:03d}", "%d %s" % (s[2], s)),
    "as keys": lambda s: ({s: 1}[s], {(4, 5): "a", (6, 7): "b"}.get(tuple(s[2:]), "none"), len({s[2], 6})),
    "compared": lambda s: (
        s == torch.Size([1, 2, 4, 5]),
        s[2:] == (6, 7),
        6 in s,
        s.count(7),
        s[2] < s[3],
        4 <= s[2] < 8,
    ),
    "compared with other numbers": lambda s: (
        s[2] == 4 + 0j,
        s[2] == Fraction(6),
        s[2] < Decimal("6.5"),
        s[2] == np.int64(9),
    ),
    "with other numbers": lambda s: (
        s[2] * 1j,
        2j - s[2],
        s[2] / Fraction(1, 3),
        Decimal(2) ** s[2],
        s[2] + np.float64(0.5),
    ),
    "sequences": lambda s: (
        s * 2,
        2 * s,
        s + (1,),
        [0] * s[2],
        "a" * s[2],
        sorted(s),
        list(reversed(s)),
        list(range(s[2])),
    ),
    "reduced": lambda s: (max(s), min(s), sum(s), math.prod(s), s.numel(), functools.reduce(operator.mul, s)),
    "by functions": lambda s: (
        math.sqrt(s[2]),
        math.isqrt(s[2]),
        math.gcd(*s[2:]),
        hex(s[2]),
        chr(s[2] + 60),
        s[2].bit_length(),
    ),
    "by operators": lambda s: (
        s[2] & 3,
        s[2] | 8,
        s[2] ^ 1,
        s[2] << 2,
        s[2] >> 1,
        ~s[2],
        -s[2],
        divmod(s[2], 3),
        pow(s[2], 2, 5),
    ),
    "powers": lambda s: (2 ** s[2], 2 ** -s[2], s[2] ** -1, (s[2] - 5) ** 0.5, s[2] ** (5 - s[2]), 0.5 ** (s[2] - 6)),
    "rounded": lambda s: (
        round(s[2]),
        round(s[2], -1),
        round(s[2] / 3),
        round(s[2] / 3, 1),
        math.ceil(s[2] / 4),
        s[2] / 4 // 1,
    ),
    "types": lambda s: (
        isinstance(s[2], int),
        type(s[2]) is int,
        type(s) is torch.Size,
        isinstance(s, tuple),
        bool(s[2]),
    ),
    "copied": lambda s: (
        tuple(s),
        list(s),
        torch.Size(list(s[2:])),
        collections.deque(s, maxlen=2),
        collections.Counter(s),
    ),
}


@pytest.mark.parametrize("name", WHAT_PYTHON_DOES_WITH_SIZES)
def test_what_python_does_with_sizes(name):
    function = WHAT_PYTHON_DOES_WITH_SIZES[name]

    def program(x):
        return function(x.shape)

    compiled = thunder.jit(program, cache="symbolic values")
    for n in (4, 6, 9, 6, 4):
        x = torch.ones(1, 2, n, n + 1)
        assert_same(compiled(x), program(x))


# ------------------------------------------------------------------------------------------------ Python's data model

OPERATORS = "+ - * / // % ** & | ^ << >> == != < <= > >=".split()
OTHERS = ["2", "3", "-2", "0", "True", "2.5", "-0.5", "2j", "'ab'", "[1]", "(1,)", "Fraction(1, 3)", "n"]
UNARY = [
    "-{}",
    "+{}",
    "~{}",
    "not {}",
    "[{}]",
    "({},)",
    "f'{{{}}}'",
    "f'{{{}:>8}}'",
    "{} and 5",
    "{} or 5",
    "7 if {} else 8",
]
FUNCTIONS = (
    "abs bin chr complex divmod float format hash hex int isinstance len list max min next oct ord pow range "
    "repr round set sorted str sum tuple type"
).split()
# native code, given a proxy
KEEPS = ("operator.itemgetter", "operator.attrgetter", "operator.methodcaller", "math.ldexp")
CALLS = ["{f}({n})", "{f}({n}, 2)", "{f}(2, {n})", "{f}({n}, {n})", "{f}([{n}])", "{f}({n}, 3, 5)", "{f}({n}, int)"]


def expressions(kind):
    """Source of expressions of n: operators both ways round, built-in functions, those of `math` and `operator`,
    methods and attributes."""
    for symbol, other in itertools.product(OPERATORS, OTHERS):
        yield f"n {symbol} {other}"
        yield f"{other} {symbol} n"
    for form in UNARY:
        yield form.format("n")
    modules = [f"math.{f}" for f in dir(math)] + [f"operator.{f}" for f in dir(operator)]
    for f in (*FUNCTIONS, *(f for f in modules if "._" not in f and f not in KEEPS and callable(eval(f)))):
        for call in CALLS:
            yield call.format(f=f, n="n")
    for name in dir(kind):
        if name not in ("__class__", "__doc__", "__getstate__", "__reduce__", "__reduce_ex__", "__dir__", "__sizeof__"):
            value = getattr(kind(3), name)
            yield from (f"n.{name}()", f"n.{name}(2)", f"n.{name}(2.5)") if callable(value) else (f"n.{name}",)


def outcome(f, *args):
    try:
        return f(*args)
    except Exception as error:  # noqa: BLE001 - the two are compared
        return type(error)


def described(value):
    return type(value), repr(value)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind, values", [(int, (4, 3, 0, 1, -3, 7)), (float, (4.0, 2.5, 0.0, -1.5, 1e6))])
@pytest.mark.parametrize("part", range(6))
@pytest.mark.filterwarnings("ignore:.*was compiled:thunder.errors.RecompileWarning")
def test_numbers_are_pythons(kind, values, part):
    wrong = []
    for source in list(expressions(kind))[part::6]:
        f = eval(f"lambda x, n: (x, {source})", {"math": math, "operator": operator, "Fraction": Fraction})
        compiled = thunder.jit(f, cache="symbolic values")
        for n in values:
            theirs, ours = outcome(f, 1.0, n), outcome(compiled, 1.0, n)
            if described(theirs) != described(ours):
                wrong.append((source, n, theirs, ours))
    assert not wrong, "\n".join(map(str, wrong))


def test_operators_of_ints_stay_symbolic():
    def program(x, n):
        quotient, rest = divmod(n * 3, 4)
        return x + (n | 8), n & 6, 5 ^ n, n << 2, 1 << n, n >> 1, ~n, round(n), quotient, rest, 2**n

    assert compilations(program, [(torch.ones(2), n) for n in (4, 3, 9, 12)]) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_a_schedule_is_two_programs(grad):
    """A float or an int argument is a constant once, also where a step prints it and computes schedules of it."""

    def step(x, temperature, i):
        print(f"step {i}: {temperature:.2f}, {math.exp(-i / 10):.3f}")
        warmup = 0.5 * (1 + math.cos(math.pi * i / 100))
        return (x / temperature).softmax(-1) * warmup, torch.tensor(temperature), {"at": f"{i:03d}"}

    compiled = thunder.jit(step, fallback="error")
    for i in range(2, 12):
        x = torch.linspace(-1, 1, 6).requires_grad_(grad)
        texts, seen = [], []
        for f in (step, compiled):
            x.grad, out = None, io.StringIO()
            with contextlib.redirect_stdout(out):
                result, value, where = f(x, 3.0 / i, i)
            if grad:
                result.square().sum().backward()
            seen.append((result, value, x.grad))
            texts.append((out.getvalue(), where))
        torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)
        assert texts[1] == texts[0]
    assert thunder.cache_misses(compiled) == 2


def test_a_handled_error_of_a_number():
    def f(x, i):
        try:
            return x * (1 / (i - 5)) * math.log(i - 3)
        except (ZeroDivisionError, ValueError) as error:
            return x, str(error)

    compiled = thunder.jit(f, fallback="error")
    for i in (7, 8, 9, 5, 3, 2, 10):
        assert str(compiled(torch.ones(2), i)) == str(f(torch.ones(2), i))


def test_constant_values_are_constants():
    compiled = thunder.jit(lambda x, t: x * t, cache="constant values")
    for t in (0.5, 0.25, 0.75):
        compiled(torch.ones(2), t)
    assert thunder.cache_misses(compiled) == 3
