"""Regions that do not depend on each other run as one launch: updates of parameters, casts, any maps."""

import random

import pytest
import torch

import thunder
from thunder.core import regions
from thunder.executors.triton_fuser import TritonFuser
from thunder.extend import launches, memory_order
from thunder.extend.memory_order import Needs
from thunder.kernels import tiled
from thunder.kernels.schedule import TooComplex
from thunder.transforms.del_last_used import python_del

from .test_triton_fuser import DEVICE, check_close, fusions, others
from .test_triton_numbers import trained

# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def with_fuser(f, **options):
    fuser = TritonFuser("launches")
    return thunder.jit(f, executors=[fuser, "torch"], **options), fuser


def count(compiled):
    return sum(f.kernels for f in fusions(compiled))


def tensors(shapes, dtypes, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(s, dtype=torch.float64, device=DEVICE).to(d) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.fixture
def no_small_regions(monkeypatch):
    """On a GPU, operations over equally many elements, and few, are one region without sharing a launch."""
    monkeypatch.setattr(regions, "SMALL", 0)


def test_lists_of_maps_are_one_launch(no_small_regions):
    def f(xs, ys):
        return [(x * y + 1).sin() for x, y in zip(xs, ys, strict=True)]

    shapes = [(3, 5), (7,), (2, 1, 9), (3, 5), (1,), (1030,), ()]
    xs, ys = (tensors(shapes, [torch.float32] * len(shapes), seed) for seed in (0, 1))
    compiled, fuser = with_fuser(f)
    for got, x, y in zip(compiled(xs, ys), xs, ys, strict=True):
        check_close(got, (x * y + 1).sin(), (x.double() * y.double() + 1).sin())
    assert count(compiled) == 1 and others(compiled) == [] and fuser.compilations == 1
    (fused,) = fusions(compiled)
    assert fused.source.count("tl.sin") == 6, "equal sizes share a text; the last tile of many has one that is masked"


def random_maps(seed):
    """Independent and dependent maps over random shapes and types, with views, products and shared inputs."""
    choose = random.Random(seed)
    shapes = [tuple(choose.choice((2, 3, 7, 16, 33)) for _ in range(choose.randint(0, 3))) for _ in range(6)]
    dtypes = [choose.choice(DTYPES) for _ in shapes]
    steps = [(choose.randrange(4), choose.randrange(20), choose.randrange(20)) for _ in range(14)]

    def run(*values):
        values = list(values)
        for kind, i, j in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append((x * 0.5 + 1).sin())
            elif kind == 1:
                values.append(x.to(DTYPES[j % 4]))
            elif kind == 2 and x.shape == y.shape:
                values.append(x * y - 2)
            elif x.dim() == 2:
                values.append(x.t() @ x if j % 3 == 0 else x.t() + 1)
            else:
                values.append(x.abs().sqrt() * 2)
        return values[len(shapes) :]

    return run, tensors(shapes, dtypes, seed)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(40))
def test_random_lists_of_shapes_and_types_equal_eager(seed):
    run, maps = random_maps(seed)
    compiled, _ = with_fuser(run)
    exact = run(*(x.double() for x in maps))
    for got, expected, e in zip(compiled(*maps), run(*maps), exact, strict=True):
        # a conversion in between rounds, in double as well
        precision = max(torch.finfo(x.dtype).eps for x in (*maps, expected))
        check_close(got, expected, e, max(precision, torch.finfo(torch.bfloat16).eps))


def test_what_reads_another_is_not_launched_with_it():
    def f(x, y, w):
        a = (x * 2 + 1).sin()
        b = (y * 3 - 1).cos()
        product = a @ w
        c = (product * b).exp() + 1
        return c, b

    x, y, w = torch.randn(4, 3), torch.randn(4, 5), torch.randn(3, 5)
    compiled, _ = with_fuser(f)
    for got, expected in zip(compiled(*(t.to(DEVICE) for t in (x, y, w))), f(x, y, w), strict=True):
        torch.testing.assert_close(got.cpu(), expected)


def test_no_region_moves_across_a_write():
    def f(x, y, w):
        a = x * 2 + 1
        x.mul_(3)
        b = x * 2 - y
        y.add_(1)
        return a, b, (y * w + 1).sin()

    inputs = [torch.randn(5, 3, device=DEVICE) for _ in range(2)] + [torch.randn(3, device=DEVICE)]
    expected = f(*(t.clone() for t in inputs))
    compiled, _ = with_fuser(f)
    for got, e in zip(compiled(*inputs), expected, strict=True):
        torch.testing.assert_close(got, e)


def test_one_input_of_two_parts_is_not_written_over():
    """Programs of one launch run in any order."""

    def f(x, s, y):
        s.copy_(s * 0.9 + x)
        return (s.reshape(6, 2) * y).sin(), (x * 2 + 1).exp()

    compiled, _ = with_fuser(f)
    x, y, s = torch.randn(12, device=DEVICE), torch.randn(6, 2, device=DEVICE), torch.randn(12, device=DEVICE)
    for _ in range(3):
        own = s.clone()
        expected = f(x, own, y)
        for got, e in zip(compiled(x, s, y), expected, strict=True):
            torch.testing.assert_close(got, e)
        torch.testing.assert_close(s, own)


def test_arguments_are_bounded(monkeypatch, no_small_regions):
    def f(xs, ws):
        return [(torch.sin(x @ w) + 1) * 2 for x, w in zip(xs, ws, strict=True)]

    xs, ws = ([torch.randn(8, 8, device=DEVICE) for _ in range(6)] for _ in range(2))
    assert count_of(f, xs, ws) == 1
    monkeypatch.setattr(launches, "ARGUMENTS", 4)
    assert count_of(f, xs, ws) == 3


def needed(f, *args) -> tuple[int, int]:
    """The launches of a program, and the bytes that the model of memory says it needs at most."""
    compiled, launched = with_fuser(f)[0], count_of(f, *args)
    compiled(*args)
    trace = thunder.last_traces(compiled)[-1]
    units = [b for b in trace.bound_symbols if b.sym is not python_del]
    return launched, max(Needs(units, trace.output_proxies, set(trace.args)).occupied(units))


def test_what_comes_early_or_waits_does_not_raise_the_peak(monkeypatch, no_small_regions):
    """All casts in one launch would raise the peak of a program of wide products; where another place has the peak,
    they share one."""

    def casts(x, ws, wide):
        for w in ws:
            x = (x @ w.float()).cumsum(0)
        return x @ wide

    monkeypatch.setattr(memory_order, "LITTLE", 0)
    ws = [torch.randn(32, 32, device=DEVICE).bfloat16() for _ in range(6)]
    x = torch.randn(4, 32, device=DEVICE)
    narrow, wide = (torch.randn(32, n, device=DEVICE) for n in (1, 8 * 32 * 32))
    alone, shared = needed(casts, x, ws, narrow), needed(casts, x, ws, wide)
    monkeypatch.setattr(launches, "ARGUMENTS", 0)
    assert needed(casts, x, ws, narrow)[1] == alone[1]
    assert (alone[0], shared[0]) == (0, 1), "a lone cast is PyTorch's"


def test_neighbours_change_places_for_memory():
    """The gradient of a weight frees the layer's input before that of the input takes as much."""

    def f(x, w):
        return x.cumsum(1) @ w

    x, w = torch.randn(64, 512, device=DEVICE, requires_grad=True), torch.randn(512, 8, device=DEVICE)
    w.requires_grad_()
    compiled, _ = with_fuser(f)
    g, e = (torch.autograd.grad(run(x, w).sum(), (x, w)) for run in (compiled, f))
    torch.testing.assert_close(g, e)
    of = [
        b.output.shape
        for b in thunder.last_backward_traces(compiled)[-1].bound_symbols
        if "product" in b.sym.name or b.sym.name == "mm"
    ]
    assert of == [(512, 8), (64, 512)]


def test_regions_that_are_too_large_are_launched_apart(monkeypatch):
    def f(xs):
        return [(x * 2 + 1).sin() for x in xs]

    xs, scheduled = [torch.randn(n, device=DEVICE) for n in (3, 4, 5)], tiled.scheduled

    def only_small(program, *args):
        if len(program.stores) > 1:
            raise TooComplex("two results")
        return scheduled(program, *args)

    assert count_of(f, xs) == 1
    monkeypatch.setattr(tiled, "scheduled", only_small)
    assert count_of(f, xs) == 3


def count_of(f, *args):
    compiled, _ = with_fuser(f)
    for got, expected in zip(compiled(*args), f(*args), strict=True):
        torch.testing.assert_close(got, expected)
    return count(compiled)


@pytest.mark.parametrize(
    "kind, options",
    [("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {}), ("RMSprop", {})],
    ids=lambda x: x if isinstance(x, str) else ",".join(x),
)
def test_an_optimizer_is_one_launch(kind, options):
    _, compiled = trained(kind, {"foreach": True, **options}, torch.float32, True, steps=3)
    # the loss, the backward of tanh, and all parameters, of which none is copied
    regions = fusions(compiled)
    assert regions[-1].kernels == 1 and len(regions[-1].region.parts) >= 4
    assert len(regions[-1].over) == len(regions[-1].region.outputs)
