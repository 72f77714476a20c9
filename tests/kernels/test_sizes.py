"""Sizes that stay symbolic in the fusers that write Triton, under its interpreter: kernels take them as arguments, are
right for all of them, and are compiled once."""

import itertools
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from benchmarks.random_regions import SMALL, judge, random_region
from tests.kernels.test_triton import compiled_lines, requests
from tests.test_dynamic_sizes import Net, gradients
from tests.test_triton_fuser import DEVICE, check_gradients, fusions, within_bound
from thunder.executors.cpp_fuser import CppFuser
from thunder.executors.triton_fuser import TritonFuser
from thunder.kernels import ir, sizes, triton_cuda
from thunder.kernels.index import Index, Variable, join, split, strides_of
from thunder.kernels.sizes import Atom, Extent, at_least, floor, quotient, value_of

# numpy says so where the interpreter computes what is not used, or not a number
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


# ----------------------------------------------------------------------------------------------------------- the algebra

ATOMS = (Atom("n0", 2, 5), Atom("n1", 1, 3), Atom("n2", 0, 4))
VALUES = [dict(zip(("n0", "n1", "n2"), v)) for v in itertools.product((2, 3, 8), (1, 2, 7), (0, 1, 5))]


def extents(seed, count):
    """Random sums of products of atoms."""
    generator = random.Random(seed)
    for _ in range(count):
        n = generator.choice((0, 1, -1, 4))
        for _ in range(generator.randint(1, 3)):
            product = generator.choice((1, 1, 2, 3, -1, 8))
            for atom in generator.choices(ATOMS, k=generator.randint(1, 2)):
                product = product * Extent.of(atom)
            n = n + product
        yield n


def test_what_is_certain_of_extents_holds_for_all_numbers():
    known = 0
    for a, b in itertools.product(extents(0, 40), extents(1, 40)):
        pairs = [(value_of(a, v), value_of(b, v)) for v in VALUES]
        assert [value_of(a * b - a + 3, v) for v in VALUES] == [x * y - x + 3 for x, y in pairs]
        assert not at_least(a, b) or all(x >= y for x, y in pairs)
        if not at_least(b, 1):
            continue
        whole, below = quotient(a, b), floor(a, b)
        assert whole is None or [value_of(whole, v) * y == x for v, (x, y) in zip(VALUES, pairs)]
        assert below is None or [value_of(below, v) for v in VALUES] == [x // y for x, y in pairs]
        known += at_least(a, b) + (below is not None)
    assert known > 50
    product = next(extents(2, 1)) * Extent.of(ATOMS[0])
    assert quotient(product, Extent.of(ATOMS[0])) == next(extents(2, 1))


def test_places_that_are_taken_apart_fit_together_again():
    n, m = Extent.of(ATOMS[0]), Extent.of(ATOMS[1])
    for shape, other in [((n, 4, m), (n * 4, m)), ((m, n, 8), (m * n, 2, 4)), ((3, n - 1, 2), (n * 3 - 3, 2))]:
        indices = tuple(Index.of(Variable(f"v{i}", k)) for i, k in enumerate(shape))
        there = split(join(indices, strides_of(shape)), other)
        assert [p.key for p in split(join(there, strides_of(other)), shape)] == [p.key for p in indices]


# --------------------------------------------------------------------------------------------------------------- kernels


class EagerKernels(TritonFuser):
    """Fuses single operations as well."""

    def should_fuse(self, region):
        return bool(region.outputs)


@pytest.fixture
def interpreted(monkeypatch, triton_interpreter):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def executors(interpreted):
    """An executor that fuses single operations, and one as it is."""
    return EagerKernels, TritonFuser


@pytest.fixture
def compiled_for(executors):
    def compile_program(program, **options):
        executor = executors[0]("sizes")
        return thunder.jit(program, executors=[executor], fallback="error", **options), executor

    return compile_program


def check(compiled, program, *inputs):
    torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=1e-5, atol=1e-5)


def test_one_kernel_for_all_lengths(compiled_for):
    def program(x, w):
        return torch.sin(x * w) + 1

    compiled, executor = compiled_for(program)
    for n in (5, 3, 17, 40, 2, 333):
        check(compiled, program, torch.randn(2, n, 16, device=DEVICE), torch.randn(16, device=DEVICE))
    assert thunder.cache_misses(compiled) == 2
    assert executor.compilations == 2, "one for the first length, one for all others"
    (region,) = fusions(compiled)
    assert len(region._variants) == 1
    assert "n0" in region.source and " 96" not in region.source, "3 * 2 * 16 is no number of the text"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("program", [
    lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, 1), lambda x: x.sum((0, 1)), lambda x: x.mean(1),
    lambda x: x.amax((0, 2)), lambda x: F.layer_norm(x, (x.shape[-1],)), lambda x: x.flip(1) + x,
    lambda x: (x[:, 1:] - x[:, :-1]).transpose(0, 1), lambda x: x.reshape(-1, 4).sum(0), lambda x: x.sum() / x.numel(),
    lambda x: torch.cat((x, x * 2), 1).exp(), lambda x: F.pad(x, (1, 2, 3, 0)) * 2, lambda x: x[:, -3:] * x[:, :3],
    lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None], lambda x: x[:, : x.shape[1] // 2].cos() + 1,
    lambda x: torch.stack((x, -x), 1) * x.shape[1], lambda x: torch.tril(x @ x.transpose(1, 2)) + 1,
])  # fmt: skip
def test_operations_on_any_size(program, compiled_for):
    compiled, executor = compiled_for(program)
    counts = []
    for n in (6, 9, 70, 4, 31, 130):
        check(compiled, program, torch.randn(3, n, 8, device=DEVICE))
        counts.append(executor.compilations)
    assert thunder.cache_misses(compiled) == 2
    assert len(set(counts[1:])) == 1 and fusions(compiled)


def test_one_program_of_all_sizes(compiled_for):
    def program(x):
        return torch.softmax(x.transpose(0, 2), 0).sum(1)

    compiled, executor = compiled_for(program, dynamic=True)
    for shape in [(2, 3, 4), (5, 3, 4), (5, 7, 9), (13, 2, 2)]:
        check(compiled, program, torch.randn(shape, device=DEVICE))
    assert thunder.cache_misses(compiled) == 1


def test_sizes_of_0_and_1_are_programs_of_their_own(compiled_for):
    def program(x):
        return x.exp() * 2 + x.sum(0)

    compiled, _ = compiled_for(program)
    for n in (3, 4, 1, 0, 5):
        check(compiled, program, torch.randn(n, 4, device=DEVICE))
    assert thunder.cache_misses(compiled) == 4


def test_strides_follow_from_sizes(compiled_for):
    """What is a part of something larger has strides that are multiples of sizes."""

    def program(q, k, v):
        return q * k + v.exp()

    compiled, executor = compiled_for(program)
    for n in (6, 9, 70, 31):
        whole = torch.randn(3, n, 24, device=DEVICE)
        check(compiled, program, *whole.split(8, -1))
    (region,) = fusions(compiled)
    assert len(region._variants) == 1
    for n in (9, 12, 40):
        rows = torch.randn(3, n + 1, 8, device=DEVICE)
        turned = torch.randn(8, n, 3, device=DEVICE).permute(2, 1, 0)
        check(compiled, program, rows[:, :-1], rows[:, 1:], turned)
    assert thunder.cache_misses(compiled) == 2 and len(region._variants) <= 3


def test_strides_that_follow_from_nothing_are_arguments(compiled_for):
    def program(x):
        return x.exp() + x.transpose(0, 1)

    compiled, _ = compiled_for(program, dynamic=True)
    for n, padded in ((6, 7), (9, 16), (70, 73), (31, 45), (12, 32), (13, 13)):
        whole = torch.randn(n, padded, device=DEVICE)
        check(compiled, program, whole[:, :n])
        check(compiled, program, whole[:, :n].t())
    (region,) = fusions(compiled)
    assert thunder.cache_misses(compiled) == 1 and 4 <= len(region._variants) <= 7


def test_places_beyond_32_bits(monkeypatch, compiled_for):
    def program(x):
        return (x * 2 + x.sum(-1, keepdim=True)).cos()

    monkeypatch.setattr(triton_cuda, "LIMIT", 500)
    compiled, _ = compiled_for(program)
    for n in (6, 9, 70, 8):
        check(compiled, program, torch.randn(n, 8, device=DEVICE))
    (region,) = fusions(compiled)
    assert [wide for *_, wide in region._unusual] == [True], "70 * 8 elements are beyond the limit, the others are not"


def test_regions_that_are_alike_are_compiled_once(executors):
    """Whatever a program calls its sizes."""
    executor = executors[0]("alike")
    first = thunder.jit(lambda x: x.sin() * 2, executors=[executor], dynamic=True)
    second = thunder.jit(lambda s, x: (x[1].sin() * 2, s + 1), executors=[executor], dynamic=True)
    x = torch.randn(5, 7, device=DEVICE)
    first(x)
    before = executor.compilations
    result, _ = second(torch.ones(3, device=DEVICE), [x, x])
    assert torch.equal(result, first(x))
    assert executor.compilations == before + 1, "s + 1 is new"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", (0, 12))
def test_random_regions_on_other_sizes(first, compiled_for):
    fused = missed = recompiled = 0
    for seed in range(first, first + 12):
        region = random_region(seed, SMALL)
        if any(0 in x.shape for x in region.inputs):
            continue
        compiled, executor = compiled_for(region.function, dynamic=True)
        counts = []
        for more in (0, 2, 9):
            region = region.resized(more)
            if more and DEVICE == "cpu" and sum(x.numel() for x in region.inputs) > 10_000:
                break  # the interpreter may take seconds for it
            inputs = region.placed(DEVICE)
            sides = compiled(*inputs), region(inputs), region.exact(region.inputs)
            for number, deviation in enumerate(judge(*([x.cpu() for x in side] for side in sides))):
                assert within_bound(deviation, region, number), f"{deviation} for seed {seed}, {more}:\n{region.text}"
            fused += bool(fusions(compiled)) and not more
            counts.append(executor.compilations)
        missed += thunder.cache_misses(compiled) - 1
        recompiled += executor.compilations - counts[0]
    assert fused > 8 and missed < 3 and recompiled < 3


def test_gradients_of_random_regions_on_other_sizes(compiled_for):
    for seed in range(8):
        region = random_region(seed, SMALL, smooth=True)
        compiled, _ = compiled_for(region.function, dynamic=True)
        for more in (0, 5):
            region = region.resized(more)
            check_gradients(region, compiled, f"seed {seed}, {more}")


# -------------------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_training_on_many_lengths_compiles_regions_twice(executors):
    module, executor = Net().to(DEVICE), executors[1]("lengths")
    compiled = thunder.jit(module, executors=[executor], fallback="error")
    generator = torch.Generator().manual_seed(0)
    counts = []
    for n in torch.randint(2, 60, (12,), generator=generator).tolist():
        ids = torch.randint(11, (3, n), generator=generator).to(DEVICE)
        torch.testing.assert_close(gradients(module, compiled, ids), gradients(module, module, ids))
        counts.append(executor.compilations)
    # PyTorch's attention of a GPU keeps a graph, whose example makes one more program
    assert thunder.cache_misses(compiled) == (2 if DEVICE == "cpu" else 3)
    assert len(set(counts)) == 2 and len(set(counts[1:])) == 1
    regions = fusions(compiled) + fusions(compiled, backward=True)
    assert regions and all(len(region._variants) == 1 for region in regions)


class Rotating(nn.Module):
    """A block of a Llama: rotated heads, fewer keys than queries, a gate, and a loss of shifted labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(13, 16), nn.RMSNorm(16)
        self.qkv, self.gate, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 13)

    def forward(self, ids):
        x = self.norm(self.embed(ids))
        b, t, _ = x.shape
        angles = torch.outer(torch.arange(t, device=x.device).float(), torch.tensor([1.0, 0.1], device=x.device))
        cos, sin = (torch.cat((a, a), -1) for a in (angles.cos(), angles.sin()))
        q, k, v = (y.view(b, t, -1, 4).transpose(1, 2) for y in self.qkv(x).split((16, 8, 8), -1))
        q, k = (y * cos + torch.cat((-y[..., 2:], y[..., :2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 16)
        a, b = self.gate(x + y).chunk(2, -1)
        logits = self.head(x + F.silu(a) * b)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 13), ids[:, 1:].reshape(-1))


def test_a_block_of_a_llama(executors):
    module, executor = Rotating().to(DEVICE), executors[1]("rotating")
    compiled = thunder.jit(module, executors=[executor], fallback="error")
    counts = []
    # the interpreter takes seconds for as many programs as triton_fuser has
    for n in (3, 2, 5) if executors[1] is TritonFuser and DEVICE == "cpu" else (9, 5, 17, 30, 4):
        ids = torch.randint(13, (2, n), device=DEVICE)
        sides = []
        for call in (compiled, module):
            module.zero_grad()
            loss = call(ids)
            loss.backward()
            sides.append((loss, [p.grad.clone() for p in module.parameters()]))
        torch.testing.assert_close(*sides, rtol=1e-4, atol=1e-5)
        counts.append(executor.compilations)
    assert thunder.cache_misses(compiled) <= 3 and len(set(counts[2:])) == 1


def test_what_cannot_be_known_of_a_size_stays_with_pytorch(monkeypatch, compiled_for):
    def program(x):
        return x.exp() * 2

    def unknown(*_, **__):
        raise sizes.Undecided

    monkeypatch.setattr(triton_cuda, "emitted", unknown)
    compiled, _ = compiled_for(program, dynamic=True)
    check(compiled, program, torch.randn(5, 6, device=DEVICE))
    assert not fusions(compiled)
    assert "# not fused: a kernel would have to know more of sizes" in str(thunder.last_traces(compiled)[-1])


OF_SIZES = {
    "numbers": lambda x: x * x.shape[0] + x.shape[0] / 2,
    "halves": lambda x: torch.cat((x[: x.shape[0] // 2], x[x.shape[0] // 2 :].exp()), 0) * 2,
    "padding": lambda x: F.pad(x, (x.shape[0], 1)).sin(),
    "gather": lambda x: x.gather(0, (x.shape[0] - 1 - torch.arange(x.shape[0], device=x.device))[:, None]) * 2,
    "index": lambda x: x[torch.arange(x.shape[0], device=x.device).flip(0)].cos() + 1,
    "embedding": lambda x: F.embedding(torch.arange(x.shape[0], device=x.device) % 3, x) + 1,
    "scatter": lambda x: x.new_zeros(x.shape[0] + 2, 4).index_add(0, torch.arange(x.shape[0], device=x.device), x) * 2,
    "constant": lambda x: x.new_ones(x.shape[0]).sum() * x,
    "range": lambda x: torch.arange(x.shape[0], 2 * x.shape[0], device=x.device)[:, None] * x,
    "view": lambda x: (x.t().reshape(-1) * 2).view(4, x.shape[0]).sum(1),
    "pairs": lambda x: (x[:, 0][:, None] * x[:, 1]).sum() + (x[:, 0][:, None] - x[:, 1]).amax(1),
    "parts": lambda x: torch.cat((x, x)).reshape(2, -1, 4).sum(0) * 2,
}


def sums_and_joins(x, b, scale):
    y = F.gelu(x * scale + b) * x.shape[0]
    return torch.softmax(y, -1), y.sum(0), y.sum(1), torch.cat((x.exp(), y), 0).t().contiguous(), y[:, 1:] - x[:, :-1]


@pytest.mark.parametrize("wide", [False, True])
def test_kernels_of_any_size_compile_without_a_gpu(wide, interpreted):
    compiled = thunder.jit(sums_and_joins, executors=[EagerKernels("sizes")], dynamic=True, fallback="error")
    compiled(torch.randn(40, 12, device=DEVICE), torch.randn(12, device=DEVICE), 0.5)
    launches = [launch for region in fusions(compiled) for launch in region.scheduled(region._shown)[0]]
    lines = compiled_lines(requests(launches, wide), ("cuda", 90, 32))
    assert launches and [line.endswith(" True") for line in lines] == [True] * len(launches)


@pytest.fixture(params=["triton_fuser", "cpp"])
def executor_of_all(request, interpreted):
    """An executor on the kernel IR that fuses whatever it can."""
    if request.param == "triton_fuser":
        return EagerKernels("sizes", always=True)
    executor = CppFuser("sizes", always=True)
    if DEVICE != "cpu" or executor.unavailable():
        pytest.skip(executor.unavailable() or "it runs on CPUs")
    return executor


@pytest.mark.parametrize("name", OF_SIZES)
def test_sizes_and_numbers_in_every_place(name, executor_of_all):
    """Sizes of the results of views and joins, indices, starts of ranges, and numbers that elements are combined
    with."""
    executor = executor_of_all
    compiled = thunder.jit(OF_SIZES[name], executors=[executor], fallback="error", dynamic=True)
    for n in (5, 3, 37):
        check(compiled, OF_SIZES[name], torch.rand(n, 4, device=DEVICE) + 0.1)
    assert thunder.cache_misses(compiled) == 1 and fusions(compiled)
    for region in fusions(compiled):
        ir.verify(region.program)


@pytest.mark.parametrize("program", [
    lambda x: torch.softmax(x, -1) + 1, lambda x: torch.softmax(x, 1) * x.sum((0, 2), keepdim=True),
    lambda x: F.layer_norm(x, (x.shape[-1],)).sum(1), lambda x: (x - x.mean(1, keepdim=True)).exp().transpose(1, 2) * 2,
    lambda x: torch.cat((x.sin(), x[:, 1:]), 1).flip(1) * x.shape[1], lambda x: x.cumsum(-1) * 2, lambda x: x.amax() - x,
    lambda x: (x.sum(0) * 2, (x * x).amax(2), x.reshape(-1, 4).sum(0)), lambda x: F.pad(x, (1, 2, 3, 0)).cos() * 0.5,
])  # fmt: skip
@pytest.mark.parametrize("lengths", [(6, 9, 70, 4, 131), (300, 2, 17)], ids=str)
def test_kernels_of_cpus_on_any_size(program, lengths):
    executor = CppFuser("sizes", always=True)
    if DEVICE != "cpu" or executor.unavailable():
        pytest.skip(executor.unavailable() or "it runs on CPUs")
    compiled = thunder.jit(program, executors=[executor], fallback="error", dynamic=True)
    for n in lengths:
        for shape in ((3, n, 8), (n, 5, 12), (2, 3, 4 * n)):
            check(compiled, program, torch.randn(shape))
    assert thunder.cache_misses(compiled) == 1 and fusions(compiled)
    for region in fusions(compiled):
        ir.verify(region.program)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("first", [0, 16])
def test_random_regions_of_cpus_on_other_sizes(first):
    executor, fused = CppFuser("sizes", always=True), 0
    if DEVICE != "cpu" or executor.unavailable():
        pytest.skip(executor.unavailable() or "it runs on CPUs")
    for seed in range(first, first + 12):
        region = random_region(seed, SMALL)
        if any(0 in x.shape for x in region.inputs):
            continue
        compiled = thunder.jit(region.function, executors=[executor], dynamic=True, fallback="error")
        for more in (0, 2, 40):
            region = region.resized(more)
            sides = compiled(*region.inputs), region(region.inputs), region.exact(region.inputs)
            for number, deviation in enumerate(judge(*sides)):
                assert within_bound(deviation, region, number), f"{deviation} for seed {seed}, {more}:\n{region.text}"
        for function in fusions(compiled):
            ir.verify(function.program)
        fused += bool(fusions(compiled))
    assert fused > 8
