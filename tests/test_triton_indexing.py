"""Reads and additions at places that tensors name, in the Triton fuser under Triton's interpreter: what they give beside
eager, how many kernels they are, what is saved."""

import random
import sys

import pytest
import torch
import torch.nn.functional as F

import thunder
from thunder.executors.triton_fuser import TileRegion, TritonFuser

from .test_triton_fuser import DEVICE, Eager, fusions, others

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("triton_interpreter")]
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def accepts(function, *args) -> bool:
    try:
        function(*args)
    except RuntimeError:
        return False
    return True


def some(shape, dtype=torch.float32):
    numbers = torch.randn(shape, device=DEVICE) * 4
    return (
        numbers > 0 if dtype is torch.bool else numbers.abs().to(dtype) if dtype is torch.uint8 else numbers.to(dtype)
    )


def places(n, shape, dtype=torch.int64, negative=True):
    return torch.randint(-n if negative else 0, n, shape, device=DEVICE, dtype=dtype)


def check(program, *args, kernels=None, fuser=TritonFuser, exact=True, **options):
    """The program is fused, and gives what eager gives, laid out alike."""
    compiled = thunder.jit(program, executors=[fuser("indexing", always=True)], **options)
    got, want = compiled(*args), program(*args)
    for g, w in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        # of at most 64 additions to a number, in any order
        bound = 0 if exact else 64 * torch.finfo(w.dtype).eps * max(1.0, float(w.abs().max()))
        torch.testing.assert_close(g, w, rtol=0, atol=bound)
    assert others(compiled) == []
    assert kernels is None or [f.kernels for f in fusions(compiled)] == kernels
    return compiled


# ---------------------------------------------------------------------------------------------------------------- reads


def random_key(chance, shape):
    """A key of index tensors that broadcast together, slices and integers among them."""
    common = [chance.choice((1, 2, 3)) for _ in range(chance.choice((1, 1, 2)))]
    key = []
    for n in shape:
        kind = chance.choice("tts:i")
        if kind == "t":
            own = [m if chance.random() < 0.7 else 1 for m in common[chance.randrange(len(common)) :]]
            key.append(places(n, own or [1], chance.choice((torch.int64, torch.int32))))
        else:
            key.append({"s": slice(chance.randrange(n), None), ":": slice(None), "i": chance.randrange(-n, n)}[kind])
    if not any(isinstance(k, torch.Tensor) for k in key):
        key[chance.randrange(len(key))] = places(shape[0], common)
        return random_key(chance, shape)
    return tuple(key)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(40))
def test_keys_of_index_tensors(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    shape = [chance.choice((1, 2, 5, 8)) for _ in range(chance.choice((1, 2, 3, 4)))]
    x = some(shape, TYPES[seed % len(TYPES)])
    x = x.permute(chance.sample(range(len(shape)), len(shape)))
    key = random_key(chance, x.shape)
    tensors = [k for k in key if isinstance(k, torch.Tensor)]

    def program(x, *tensors):
        remaining = iter(tensors)
        return x[tuple(next(remaining) if isinstance(k, torch.Tensor) else k for k in key)]

    check(program, x, *tensors, fuser=Eager)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_other_reads(dtype):
    x, i = some((5, 6), dtype), places(5, (7,), negative=False)
    check(lambda x, i: x.index_select(0, i), x, i, fuser=Eager)
    check(lambda x, i: x.t().index_select(1, i), x, i, fuser=Eager)
    check(lambda x, i: x.gather(0, i[:6].expand(3, 6)), x, i, fuser=Eager)
    check(lambda x, i: x.take(i.reshape(7, 1) - 3), x, i, fuser=Eager)
    check(lambda x, i: x.take_along_dim(4 - i[:, None], 0), x, i, fuser=Eager)
    if accepts(torch.Tensor.take_along_dim, x, i[:, None] - 2, 0):  # torch 2.9 takes no negative places there
        check(lambda x, i: x.take_along_dim(i[:, None] - 2, 0), x, i, fuser=Eager)
    if dtype.is_floating_point:
        check(lambda x, i: F.embedding(i.reshape(7, 1), x), x, i, fuser=Eager)


def test_a_read_is_part_of_what_reads_it():
    x, i, j = some((9, 16)), places(9, (33,)), places(9, (33,))
    check(lambda x, i, j: torch.cat((x[i], x[j]), -1), x, i, j, kernels=[1])
    check(lambda x, i, j: torch.cat((x[i], (x[j] - x[i]).relu(), x[:1].expand(33, 16)), -1), x, i, j, kernels=[1])
    check(lambda x, i, j: torch.stack((x[i], x[j])).sum(-1), x, i, j, kernels=[1], exact=False)
    check(lambda x, i, j: (x[i] * x[j]).softmax(-1), x, i, j, kernels=[1], exact=False)
    check(lambda x, i, j: (x[i] > x[j]) & (i > j)[:, None], x, i, j, kernels=[1])
    check(lambda x, i, j: x[i][j.clamp(0)] + 1, x, i, j)


def test_what_is_gathered_often_and_computed_of_much_is_stored_first(monkeypatch):
    a, b, c, i = some((9, 16)), some((9, 16)), some((9, 16)), places(9, (333,))
    check(lambda a, b, c, i: (a * b - c)[i], a, b, c, i, exact=False)
    check(lambda a, b, c, i: (a * 2 - 1)[i], a, b, c, i)
    check(lambda a, b, c, i: (a * b - c)[i[:9]], a, b, c, i, exact=False)
    check(lambda a, b, c, i: torch.cat(((a * b - c)[i[:9]], (a * b - c)[i[9:27]])), a, b, c, i, exact=False)


def test_one_read_is_left_to_pytorch():
    """As are copies that move no less together, and what has no elements."""
    x, i = some((9, 16)), places(9, (33,))
    for program in (lambda x, i: x[i], lambda x, i: x.t()[:, i], lambda x, i: torch.cat((x, x[:1]))):
        compiled = thunder.jit(program, executors=[TritonFuser("indexing")])
        assert torch.equal(compiled(x, i), program(x, i)) and not fusions(compiled)
    empty, program = i[:0], lambda x, i: torch.cat((x[i], x[i] * 2), -1)
    compiled = thunder.jit(program, executors=[TritonFuser("indexing")])
    assert torch.equal(compiled(x, empty), program(x, empty))


@pytest.mark.skipif(DEVICE == "cuda", reason="ends the process's use of the device, as PyTorch's kernels do")
def test_an_index_out_of_range_is_an_error():
    x, programs = some((4, 8)), {
        lambda x, i: x[i] * 2 + 1: (4, -5),
        lambda x, i: x.index_select(0, i) * 2 + 1: (4, -1),
        lambda x, i: x.relu().index_add(0, i, x[: i.shape[0]]): (4, -1),
        lambda x, i: F.embedding(i, x) * 2 + 1: (2**32, -1),
    }  # fmt: skip
    for program, wrong in programs.items():
        compiled = thunder.jit(program, executors=[TritonFuser("indexing")])
        compiled(x, torch.tensor([3, 0]))
        for n in wrong:
            with pytest.raises(Exception, match="index out of range"):
                compiled(x, torch.tensor([1, n]))


# ------------------------------------------------------------------------------------------------------------ additions


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32], ids=str)
def test_additions(dtype):
    rows, columns, count = 11, 6, 301
    a, source = some((rows, columns), dtype), some((count, columns), dtype)
    i, j = places(rows, (count,), negative=False), places(columns, (count,), torch.int32, negative=False).long()
    checks = [
        (lambda a, s, i, j: a.index_add(0, i, s + s), [2]),
        (lambda a, s, i, j: torch.zeros_like(a).index_add(0, i, s + s), [2]),
        (lambda a, s, i, j: a.t().index_add(1, i, s.t() + 1), [2]),
        (lambda a, s, i, j: a.index_add(-1, j[:4], s[:rows, :4] * 2, alpha=3), [2]),
        (lambda a, s, i, j: a.scatter_add(0, i[:, None].expand(count, columns), s + 1), [2]),
        (lambda a, s, i, j: a.scatter_add(1, j[: rows * 2].reshape(rows, 2), s[:, :4] + 1), [2]),
        (lambda a, s, i, j: (a + 1).index_add(0, i, s).index_add(0, i, s * 2), [4]),
        (lambda a, s, i, j: (a.index_add(0, i, s) * 2, s + 1), [3]),
        (lambda a, s, i, j: a[:, 0].index_add(0, i, torch.ones_like(i, dtype=a.dtype)) + 1, [3]),
        (lambda a, s, i, j: a.scatter_add(1, j.clamp(max=1)[:rows, None].expand(rows, columns), s[:rows] + 1), [2]),
    ]
    for program, kernels in checks:
        check(program, a, source, i, j, kernels=kernels, exact=not dtype.is_floating_point)


def test_additions_that_a_concatenation_joins():
    x, source, i = some((9, 16)), some((33, 16)), places(9, (33,), negative=False)
    program = lambda x, s, i: torch.cat((x, torch.zeros_like(x).index_add(0, i, s.relu())), -1)  # noqa: E731
    check(program, x, source, i, exact=False)

    def read_twice(x, s, i):
        sums = torch.zeros_like(x).index_add(0, i, s.relu())
        return torch.cat((x, sums), -1), sums * 2

    check(read_twice, x, source, i, exact=False)


def test_what_is_added_to_is_not_copied_where_the_program_writes_it():
    def step(x, source, i):
        x.index_add_(0, i, source.relu())
        return source * 2

    x, source, i = some((9, 16)), some((33, 16)), places(9, (33,), negative=False)
    compiled, own = thunder.jit(step, executors=[TritonFuser("indexing")]), x.clone()
    for _ in range(2):
        assert torch.equal(compiled(own, source, i), step(x, source, i))
        torch.testing.assert_close(own, x)
    (region,) = fusions(compiled)
    assert len(region.over) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_additions_of_16_bits_are_added_up_in_more(dtype):
    x, source, i = some((9, 16), dtype), some((33, 16), dtype), places(9, (33,), negative=False)
    program = lambda x, s, i: x.index_add(0, i, s.relu()) * 2  # noqa: E731
    compiled = thunder.jit(program, executors=[TritonFuser("indexing", always=True)])
    got, want = compiled(x, source, i), program(x, source, i)
    bound = 33 * torch.finfo(dtype).eps  # PyTorch rounds each sum
    torch.testing.assert_close(got, want, rtol=bound, atol=bound * float(source.float().abs().max()))
    exact = program(x.double(), source.double(), i)
    deviation, of_eager = ((t.double() - exact).abs().max() for t in (got, want))
    assert deviation <= of_eager and len(fusions(compiled)) == 1


def test_index_put_adds():
    x, source, i = some((9, 16)), some((33, 16)), places(9, (33,))
    program = lambda x, s, i: x.index_put((i,), s.relu(), accumulate=True) * 2  # noqa: E731
    compiled = thunder.jit(program, executors=[TritonFuser("indexing")])
    torch.testing.assert_close(compiled(x, source, i), program(x, source, i))
    assert "index_put" not in others(compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("key", ["first", "second, of two dimensions"])
def test_gradients_of_index_tensors(dtype, key):
    """They are added up without a sort, in float32, and alone too; under deterministic algorithms as PyTorch does."""
    x, i = some((9, 16)).to(dtype), places(9, (33,))
    program = lambda x, i: x[i]  # noqa: E731
    if key != "first":
        x, i, program = some((3, 9, 5)).to(dtype), places(9, (4, 8)), lambda x, i: x[:, i]
    compiled = thunder.jit(program, executors=[TritonFuser("indexing")])

    def gradient(run, x):
        x = x.detach().requires_grad_()
        y = run(x, i)
        g = torch.arange(y.numel(), device=DEVICE).cos().view(y.shape).to(dtype)
        return torch.autograd.grad(y, x, g.to(y.dtype))[0]

    exact = gradient(program, x.double())
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            got, want = gradient(compiled, x), gradient(program, x)
        finally:
            torch.use_deterministic_algorithms(False)
        rounding = torch.finfo(dtype).eps * exact.abs().max()
        assert (got.double() - exact).abs().max() <= max((want.double() - exact).abs().max(), rounding)
    assert others(compiled, backward=True) == []


def test_deterministic_algorithms_are_pytorchs(monkeypatch):
    """The setting is asked when the program runs."""
    x, source, i = some((9, 16)), some((33, 16)), places(9, (33,), negative=False)
    program = lambda x, s, i: (torch.zeros_like(x).index_add(0, i, s.relu()) * 2, s * 2)  # noqa: E731
    by_operations, calls = TileRegion.by_operations, []
    monkeypatch.setattr(TileRegion, "by_operations", lambda *a: calls.append(a) or by_operations(*a))
    compiled = check(program, x, source, i, exact=False)
    for enabled in (True, False, True):
        torch.use_deterministic_algorithms(enabled)
        try:
            assert all(map(torch.allclose, compiled(x, source, i), program(x, source, i)))
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(calls) == 2 and thunder.cache_misses(compiled) == 1


def test_symbolic_sizes():
    def program(x, s, i):
        both = torch.cat((x[i], s.relu()), -1)
        return both * 2, torch.zeros_like(x).index_add(0, i, s.relu()), x.index_select(0, i).sum(-1)

    compiled = thunder.jit(program, executors=[TritonFuser("indexing")], dynamic=True)
    for rows, count in ((9, 33), (5, 100), (70, 7), (33, 300)):
        args = some((rows, 16)), some((count, 16)), places(rows, (count,), negative=False)
        torch.testing.assert_close(compiled(*args), program(*args))
        args[2][0] = -1
        got, want = (torch.cat((x[i], s), -1) for x, s, i in (args, args))
        assert torch.equal(got, want)
    assert thunder.cache_misses(compiled) == 1 and not {"index_add", "index_select"} & set(others(compiled))


# ------------------------------------------------------------------------------------------------------------- training


class MessagePassing(torch.nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2 * width, width) for _ in range(2 * layers))

    def forward(self, nodes, sources, targets):
        for message, update in zip(self.layers[::2], self.layers[1::2], strict=True):
            sent = F.relu(message(torch.cat((nodes[sources], nodes[targets]), -1)))
            received = torch.zeros_like(nodes).index_add(0, targets, sent)
            nodes = F.relu(update(torch.cat((nodes, received), -1)))
        return nodes


def test_layers_that_pass_messages_save_no_edges_of_both_ends():
    """The backward reads the nodes again, by the same indices. The products are all that is no kernel of ours, and what
    PyTorch adds up in order."""
    nodes, edges, width = 64, 512, 16
    module = MessagePassing(width, 2).to(DEVICE)
    args = some((nodes, width)), *(places(nodes, (edges,), negative=False) for _ in range(2))
    compiled = thunder.jit(module, executors=[TritonFuser("indexing")])
    sides = [torch.autograd.grad(run(*args).square().sum(), module.parameters()) for run in (compiled, module)]
    torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-3)
    assert set(others(compiled)) <= {"linear"}
    assert set(others(compiled, backward=True)) <= {"mm", "t", "narrow", "index_backward"}
    saved = [v for v in thunder.examine.saved_for_backward(compiled) if v.operation is not None]
    assert max(v.nbytes for v in saved) == edges * width * 4, "what is sent, for the derivative of relu"


TAKEN_FROM = {
    "topk": lambda x: x.topk(2, -1)[0], "topk of columns": lambda x: x.topk(3, 0)[0], "max": lambda x: x.max(1)[0],
    "with its dimension": lambda x: x.max(1, keepdim=True)[0], "median": lambda x: x.median(0)[0],
    "kthvalue": lambda x: x.kthvalue(2)[0], "sort": lambda x: x.sort(-1)[0],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TAKEN_FROM)
def test_gradients_at_few_places_of_rows_are_in_kernels(name, dtype):
    """A kernel compares each place of a row with them; PyTorch writes the many places of a sort."""
    rows = [[(i * 7 + j * 5) % 54 for j in range(9)] for i in range(6)]
    x = (torch.tensor(rows, device=DEVICE) / 64).to(dtype).requires_grad_()  # all different
    compiled = thunder.jit(lambda x: TAKEN_FROM[name](-x) * 2, executors=[TritonFuser("places")])
    sides = [torch.autograd.grad((f(x) * 3).sum(), x)[0] for f in (compiled, lambda x: TAKEN_FROM[name](-x) * 2)]
    assert torch.equal(*sides)
    assert ("placed" in others(compiled, backward=True)) is (name == "sort")


@pytest.mark.parametrize(("places", "fused"), [(1, True), (2, False)])
def test_long_rows_are_compared_with_one_place(places, fused):
    def program(x):
        return torch.sin(x).topk(places, -1)[0] * 2

    x = torch.randn(2, 5000, device=DEVICE, requires_grad=True)
    compiled = thunder.jit(program, executors=[TritonFuser("rows")])
    torch.testing.assert_close(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, program)))
    assert ("placed" in others(compiled, backward=True)) is not fused


# ------------------------------------------------------------------------------------------------------ random programs

STEPS = """
    nodes:{n}.index_add(0,i,{e}) nodes:torch.zeros_like(x).scatter_add(0,i[:,None].expand_as(s),{e}) nodes:{n}*{n}+0.5
    nodes:torch.where({n}>0,{n},{n}) nodes:{n}-{n}.sum(0,keepdim=True)/10 nodes:{n}-{n}.sum(1,keepdim=True)/10
    edges:{n}[i] edges:{n}[j] edges:{n}.index_select(0,i) edges:{e}*{e}+0.5 edges:torch.where({e}>0,{e},{e})
    edges:{e}-{e}.sum(0,keepdim=True)/10 edges:{e}-{e}.sum(1,keepdim=True)/10
""".split()
RESULTS = "torch.cat(({n},{n}),-1) torch.cat(({e},{e}),-1) torch.cat(({e},{e},{e})) {n} {e}".split()


def random_program(chance):
    """A program of nodes x and y, edges s, and indices i, and j of any sign, as text."""
    known, lines = {"nodes": ["x", "y"], "edges": ["s"]}, []

    def filled(text):
        while "{" in text:
            for mark, kind in (("{n}", "nodes"), ("{e}", "edges")):
                text = text.replace(mark, chance.choice(known[kind]), 1)
        return text

    for number in range(chance.randint(3, 9)):
        kind, text = chance.choice(STEPS).split(":", 1)
        lines.append(f"v{number} = {filled(text)}")
        known[kind].append(f"v{number}")
    results = [filled(text) for text in chance.sample(RESULTS, chance.randint(1, 4))]
    return "\n    ".join(["def program(x, y, s, i, j):", *lines, f"return {', '.join(results)},"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(48))
def test_random_programs(seed):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    rows, count, columns = chance.choice((1, 5, 33)), chance.choice((1, 7, 130)), chance.choice((1, 4, 17))
    text, namespace = random_program(chance), {"torch": torch}
    exec(text, namespace)
    floats = [some((n, columns), torch.float64).div(4).requires_grad_(seed % 2 == 0) for n in (rows, rows, count)]
    indices = places(rows, (count,), negative=False), places(rows, (count,))
    compiled = thunder.jit(
        namespace["program"], executors=[TritonFuser("indexing")], dynamic=True if seed % 3 == 0 else None
    )
    sides = []
    for run in (compiled, namespace["program"]):
        results, gradients = run(*floats, *indices), [torch.zeros_like(x) for x in floats]
        if any(r.requires_grad for r in results):
            computed_gradients = torch.autograd.grad(sum(r.sin().sum() for r in results), floats, allow_unused=True)
            gradients = [z if g is None else g for z, g in zip(gradients, computed_gradients, strict=True)]
        sides.append((*results, *gradients))
    torch.testing.assert_close(*sides, rtol=1e-8, atol=1e-8, msg=lambda message: f"{message}\n{text}")
