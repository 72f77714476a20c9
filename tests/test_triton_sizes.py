"""Sizes that stay symbolic in the Triton fuser, under Triton's interpreter: kernels take them as arguments, are right
for all of them, and are made once."""

import itertools
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import thunder
from benchmarks.random_regions import SMALL, judge, random_region
from thunder.executors.triton_fuser import TritonFuser
from thunder.executors.triton_kernels import launch, variants
from thunder.kernels import sizes
from thunder.kernels.index import Index, Variable, join, split, strides_of
from thunder.kernels.sizes import Atom, Extent, at_least, floor, quotient, value_of

from .test_dynamic_sizes import Net, gradients
from .test_triton_fuser import DEVICE, Eager, fusions, within_bound

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
        place = tuple(Index.of(Variable(f"v{i}", k)) for i, k in enumerate(shape))
        there = split(join(place, strides_of(shape)), other)
        assert [p.key for p in split(join(there, strides_of(other)), shape)] == [p.key for p in place]


# --------------------------------------------------------------------------------------------------------------- kernels


def compiled_for(program, **options):
    executor = Eager("sizes")
    return thunder.jit(program, executors=[executor], fallback="error", **options), executor


def check(compiled, program, *inputs):
    torch.testing.assert_close(compiled(*inputs), program(*inputs), rtol=1e-5, atol=1e-5)


def test_one_kernel_for_all_lengths():
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


@pytest.mark.parametrize("program", [
    lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, 1), lambda x: x.sum((0, 1)), lambda x: x.mean(1),
    lambda x: x.amax((0, 2)), lambda x: F.layer_norm(x, (x.shape[-1],)), lambda x: x.flip(1) + x,
    lambda x: (x[:, 1:] - x[:, :-1]).transpose(0, 1), lambda x: x.reshape(-1, 4).sum(0), lambda x: x.sum() / x.numel(),
    lambda x: torch.cat((x, x * 2), 1).exp(), lambda x: F.pad(x, (1, 2, 3, 0)) * 2, lambda x: x[:, -3:] * x[:, :3],
    lambda x: x * torch.arange(x.shape[1], device=x.device)[:, None], lambda x: x[:, : x.shape[1] // 2].cos() + 1,
    lambda x: torch.stack((x, -x), 1) * x.shape[1], lambda x: torch.tril(x @ x.transpose(1, 2)) + 1,
])  # fmt: skip
def test_operations_on_any_size(program):
    compiled, executor = compiled_for(program)
    counts = []
    for n in (6, 9, 70, 4, 31, 130):
        check(compiled, program, torch.randn(3, n, 8, device=DEVICE))
        counts.append(executor.compilations)
    assert thunder.cache_misses(compiled) == 2
    assert len(set(counts[1:])) == 1 and fusions(compiled)


def test_one_program_of_all_sizes():
    def program(x):
        return torch.softmax(x.transpose(0, 2), 0).sum(1)

    compiled, executor = compiled_for(program, dynamic=True)
    for shape in [(2, 3, 4), (5, 3, 4), (5, 7, 9), (13, 2, 2)]:
        check(compiled, program, torch.randn(shape, device=DEVICE))
    assert thunder.cache_misses(compiled) == 1


def test_sizes_of_0_and_1_are_programs_of_their_own():
    def program(x):
        return x.exp() * 2 + x.sum(0)

    compiled, _ = compiled_for(program)
    for n in (3, 4, 1, 0, 5):
        check(compiled, program, torch.randn(n, 4, device=DEVICE))
    assert thunder.cache_misses(compiled) == 4


def test_strides_follow_from_sizes():
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


def test_strides_that_follow_from_nothing_are_arguments():
    def program(x):
        return x.exp() + x.transpose(0, 1)

    compiled, _ = compiled_for(program, dynamic=True)
    for n, padded in ((6, 7), (9, 16), (70, 73), (31, 45), (12, 32), (13, 13)):
        whole = torch.randn(n, padded, device=DEVICE)
        check(compiled, program, whole[:, :n])
        check(compiled, program, whole[:, :n].t())
    (region,) = fusions(compiled)
    assert thunder.cache_misses(compiled) == 1 and 4 <= len(region._variants) <= 7


def test_places_beyond_32_bits(monkeypatch):
    def program(x):
        return (x * 2 + x.sum(-1, keepdim=True)).cos()

    monkeypatch.setattr(variants, "LIMIT", 500)
    compiled, _ = compiled_for(program)
    for n in (6, 9, 70, 8):
        check(compiled, program, torch.randn(n, 8, device=DEVICE))
    (region,) = fusions(compiled)
    assert [wide for *_, wide in region._unusual] == [True], "70 * 8 elements are beyond the limit, the others are not"


def test_regions_that_are_alike_are_compiled_once():
    """Whatever a program calls its sizes."""
    executor = Eager("alike")
    first = thunder.jit(lambda x: x.sin() * 2, executors=[executor], dynamic=True)
    second = thunder.jit(lambda s, x: (x[1].sin() * 2, s + 1), executors=[executor], dynamic=True)
    x = torch.randn(5, 7, device=DEVICE)
    first(x)
    before = executor.compilations
    result, _ = second(torch.ones(3, device=DEVICE), [x, x])
    assert torch.equal(result, first(x))
    assert executor.compilations == before + 1, "s + 1 is new"


@pytest.mark.parametrize("first", (0, 12))
def test_random_regions_on_other_sizes(first):
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


def test_gradients_of_random_regions_on_other_sizes():
    for seed in range(8):
        region = random_region(seed, SMALL, smooth=True)
        compiled, _ = compiled_for(region.function, dynamic=True)
        for more in (0, 5):
            region = region.resized(more)
            sides = []
            for run, inputs in (
                (lambda x: compiled(*x), region.placed(DEVICE)),  # noqa: B023
                (region, region.placed(DEVICE)),
                (region.exact, [x.double() for x in region.inputs]),
            ):
                leaves = [x.detach().requires_grad_() for x in inputs]
                sides.append([x.cpu() for x in region.with_gradients(run(leaves), leaves)])
            for deviation in judge(*sides):
                assert not deviation.wrong and deviation.got <= 4 * deviation.eager + 8 * region.unit, (
                    f"{deviation} for seed {seed}, {more}:\n{region.text}"
                )


# -------------------------------------------------------------------------------------------------------------- training


def test_training_on_many_lengths_compiles_regions_twice():
    module, executor = Net().to(DEVICE), TritonFuser("lengths")
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


def test_a_block_of_a_llama():
    module, executor = Rotating().to(DEVICE), TritonFuser("rotating")
    compiled = thunder.jit(module, executors=[executor], fallback="error")
    counts = []
    for n in (9, 5, 17, 30, 4):
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


def test_what_cannot_be_known_of_a_size_stays_with_pytorch(monkeypatch):
    def program(x):
        return x.exp() * 2

    def unknown(*_, **__):
        raise sizes.Undecided

    monkeypatch.setattr(launch, "emit", unknown)
    compiled, _ = compiled_for(program, dynamic=True)
    check(compiled, program, torch.randn(5, 6, device=DEVICE))
    assert not fusions(compiled)
    assert "# not fused: a kernel would have to know more of sizes" in str(thunder.last_traces(compiled)[-1])
