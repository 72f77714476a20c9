"""What fsdp does to modules of every kind: ties, frozen parameters, scalars, buffers, the meta device, types,
meshes."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.training import agree, batches, close, compare, optimizer_of
from tests.test_transforms_api import LowRank, Quantize
from thunder.distributed import DDPTransform, FSDPBucketingStrategy, FSDPTransform, FSDPType, ddp, fsdp
from thunder.distributed.boundary import local_of
from thunder.distributed.data_parallel import sharded
from thunder.distributed.layouts import PlannedGroup
from thunder.distributed.placement import place, placement_of, placing_copies

ZERO2, ZERO3 = FSDPType.ZERO2, FSDPType.ZERO3


class Tied(torch.nn.Module):
    """Embedding and head share their weight; a scale without dimensions; a buffer that the forward writes to."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, tokens):
        self.calls.add_(1)
        return self.head(torch.tanh(self.embedding(tokens)) * self.scale)


class Adapted(torch.nn.Module):
    """A frozen layer and a trained correction of low rank, whose product is computed of parameters alone."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(6, 7).requires_grad_(False)
        self.a, self.b = torch.nn.Parameter(torch.randn(2, 6)), torch.nn.Parameter(torch.randn(7, 2))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


def seeded(kind):
    torch.manual_seed(0)
    return kind().double()


def tokens(size):
    return batches(size, torch.float64, lambda g: torch.randint(0, 11, (4 * size, 3), generator=g))


def ties(rank, size, strategy):
    compiled = compare(rank, size, seeded(Tied), lambda m: fsdp(m, sharding_strategy=strategy), tokens(size))
    assert compiled._model.head.weight is compiled._model.embedding.weight
    rows = compiled._model.head.weight.to_local().shape[0]
    assert rows == len(torch.arange(11).chunk(size)[rank]) and compiled._model.scale.shape == ()
    assert len(compiled.state_dict()) == 4 and compiled._model.calls == 5
    text = str(thunder.last_traces(compiled)[-1])
    assert text.count("all_gather_impl(") == 1


def ties_of_ddp(rank, size):
    compare(rank, size, seeded(Tied), lambda m: ddp(m), tokens(size))


def adapts(rank, size, strategy):
    compiled = compare(
        rank, size, seeded(Adapted), lambda m: fsdp(m, sharding_strategy=strategy), batches(size, torch.float64)
    )
    text = "".join(
        line
        for line in str(thunder.last_backward_traces(compiled)[-1]).splitlines(True)
        if not line.strip().startswith("#")
    )
    assert text.count("reduce_scatter_impl(") == 2  # of the two trained parameters
    # the sum that the layer multiplies by is dead in the backward, since the input gets no gradient. The backward reads
    # both factors: the first of them stays from the forward under ZeRO-3, the other one is gathered again
    assert text.count("all_gather_impl(") == (1 if strategy is ZERO3 else 0)


@pytest.mark.parametrize("strategy", (ZERO2, ZERO3), ids=lambda s: s.name)
def test_tied_and_frozen_parameters(ranks, strategy):
    ranks(2)(ties, strategy)
    ranks(2)(adapts, strategy)


def test_tied_parameters_of_ddp(ranks):
    ranks(2)(ties_of_ddp)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 5)
        self.last.weight2 = self.first.weight  # shared by a module that does not fill it

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def from_meta(rank, size):
    with torch.device("meta"):
        mine = Normed()
    assert all(t.is_meta for t in (*mine.parameters(), *mine.buffers()))
    torch.manual_seed(3)
    fsdp(mine)
    torch.manual_seed(3)
    whole = Normed()
    agree(mine, whole, 0)  # filled in the order that a module on the CPU is
    for (name, b), c in zip(mine.named_buffers(), whole.buffers(), strict=True):
        assert torch.equal(b, c), name
    assert mine.last.weight2 is mine.first.weight
    compare_after(rank, size, whole, mine)


def compare_after(rank, size, whole, mine):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2))
    part = x.chunk(size)[rank]
    compiled = thunder.jit(mine)
    whole.eval(), mine.eval()  # statistics of a batch are those of a rank's part
    compiled(part).square().mean().backward()
    whole(x).square().mean().backward()
    agree(mine, whole, 0, gradients=True)

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(3, device="meta"))

    with pytest.raises(RuntimeError, match=r"inner \(Bare\) has weight on the meta device and no reset_parameters"):
        fsdp(torch.nn.ModuleDict({"inner": Bare()}))


def test_a_module_on_the_meta_device_is_filled_part_by_part(ranks):
    ranks(2)(from_meta)


def starts_from_one_rank(rank, size):
    for prepare in (lambda m: ddp(m), lambda m: fsdp(m, broadcast_from=1)):
        torch.manual_seed(rank)
        mine = prepare(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)))
        torch.manual_seed(1 if placement_of(mine[0].weight).is_sharded else 0)
        agree(mine, torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)), 0)


def test_ranks_start_with_the_parameters_of_one(ranks):
    ranks(2)(starts_from_one_rank)


def mixes_types(rank, size, strategy):
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    x = torch.randn(8, 6)
    mine = thunder.jit(
        fsdp(copy.deepcopy(module), dtype=torch.bfloat16, reduce_dtype=torch.float32, sharding_strategy=strategy)
    )
    actual = mine(x.chunk(size)[rank].bfloat16())
    actual.float().square().mean().backward()
    assert actual.dtype is torch.bfloat16 and all(p.dtype is p.grad.dtype is torch.float32 for p in mine.parameters())
    low = copy.deepcopy(module).bfloat16()
    parts = [low(part.bfloat16()).float().square().mean() for part in x.chunk(size)]
    gradients = [torch.autograd.grad(part, low.parameters(), retain_graph=True) for part in parts]
    for p, *each in zip(mine.parameters(), *gradients, strict=True):
        # of bfloat16 gradients
        close(
            local_of(p.grad),
            placement_of(p).part_of(sum(g.float() for g in each) / size),
            "gradient reduced in float32",
        )
    text = str(thunder.last_traces(mine)[-1]) + str(thunder.last_backward_traces(mine)[-1])
    assert '"future of cpu bf16[8, 6]"' in text and '"future of cpu f32[4, 6]"' in text


def test_programs_compute_in_bfloat16_and_reduce_in_float32(ranks):
    ranks(2)(mixes_types, ZERO2)
    ranks(2)(mixes_types, ZERO3)


def on_a_mesh(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    module = seeded(Tied)
    compiled = compare(rank, size, module, lambda m: fsdp(m, process_group=mesh), tokens(size))
    assert compiled._model.embedding.weight.to_local().shape == (6 - rank % 2, 6)  # 11 rows on two ranks
    text = str(thunder.last_backward_traces(compiled)[-1])
    assert "group_mesh_shards, True)" in text and "group_mesh_replicas, True)" in text
    torch.manual_seed(rank)
    mine = fsdp(Tied(), process_group=mesh, broadcast_from=2)
    torch.manual_seed(2)
    agree(mine, Tied(), 0)


def test_shards_over_one_dimension_of_a_mesh_and_replicas_over_the_other(ranks):
    ranks(4)(on_a_mesh)


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Dropout(0.0), torch.nn.Linear(9, 6))
            for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def checkpoints(rank, size, strategy):
    compare(
        rank, size, seeded(Checkpointed), lambda m: fsdp(m, sharding_strategy=strategy), batches(size, torch.float64)
    )
    compare(
        rank,
        size,
        seeded(Checkpointed),
        lambda m: fsdp(m, sharding_strategy=strategy),
        batches(size, torch.float64),
        options={"memory_budget": 0.3},
    )


def test_with_activation_checkpoints_and_a_memory_budget(ranks):
    for strategy in (ZERO2, ZERO3):
        ranks(2)(checkpoints, strategy)


def copies(rank, size):
    whole, mine = seeded(Tied), fsdp(seeded(Tied))
    compiled = thunder.jit(mine)
    x = tokens(size)[0]
    compiled(x.chunk(size)[rank])
    for copied in (thunder.jit(copy.deepcopy(mine)), copy.deepcopy(compiled)):
        assert copied._model.head.weight is copied._model.embedding.weight is not mine.head.weight
        whole.zero_grad()
        copied(x.chunk(size)[rank]).square().mean().backward()
        whole(x).square().mean().backward()
        agree(copied, whole, 0, gradients=True)
    assert mine.scale.grad is None
    with pytest.raises(RuntimeError, match=r"parameter [\w.]+ is held by several ranks, and is not pickled"):
        pickle.dumps(mine)
    pickle.dumps(mine.state_dict())


def test_copies_are_placed_as_well(ranks):
    ranks(2)(copies)


def refuses(rank, size):
    mine = fsdp(torch.nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="parameter weight is distributed already"):
        ddp(thunder.jit(mine))
    with pytest.raises(TypeError, match="takes an nn.Module"):
        fsdp(torch.sin)
    with pytest.raises(ValueError, match="valid: FSDPType.ZERO2, FSDPType.ZERO3"):
        fsdp(torch.nn.Linear(4, 4), sharding_strategy="zero2")

    grown = fsdp(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    grown.append(torch.nn.Linear(4, 4))
    with pytest.raises(
        thunder.errors.CaptureError,
        match="parameter 1.weight was added to the module, or replaced, after it was prepared",
    ):
        thunder.jit(grown)(torch.randn(2, 4))

    @thunder.jit
    def written(x):
        with torch.no_grad():
            mine.weight.mul_(2)
        return mine(x)

    with pytest.raises(thunder.errors.CaptureError, match="each rank holds a part of it, and a result requires"):
        written(torch.randn(2, 4))
    f = thunder.jit(lambda x: (mine(x), mine.weight, mine.weight.stride(), mine.weight.shape))
    with torch.no_grad():
        out, weight, stride, shape = f(torch.randn(2, 4))
    assert out.shape == (2, 4) and weight.shape == shape == (4, 4) and stride == (4, 1)


def test_what_is_refused_and_what_programs_see(ranks):
    ranks(2)(refuses)


def is_differentiated_twice(rank, size, strategy):
    whole, mine = seeded(Checkpointed), thunder.jit(fsdp(seeded(Checkpointed), sharding_strategy=strategy))
    x = batches(size, torch.float64)[0]
    for model, data in ((whole, x), (mine, x.chunk(size)[rank])):
        data = data.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(data).square().sum(), data, create_graph=True)
        (g.square().sum() / len(data)).backward()
    agree(mine, whole, 0, gradients=True)


def under_autocast(rank, size, strategy):
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    mine = thunder.jit(fsdp(copy.deepcopy(whole), sharding_strategy=strategy))
    parts = torch.randn(4 * size, 6).chunk(size)
    gradients = []
    for i, part in enumerate(parts):  # one context each: within one, eager adds gradients up in bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            expected = whole(part)
        gradients.append(torch.autograd.grad(expected.sum(), whole.parameters()))
        if i == rank:
            with torch.autocast("cpu", torch.bfloat16):
                actual = mine(part)
            assert torch.equal(actual, expected) and actual.dtype is torch.bfloat16
            actual.sum().backward()
    for p, *each in zip(mine.parameters(), *gradients, strict=True):
        close(local_of(p.grad), placement_of(p).part_of(sum(each) / size), "gradient")


def without_grad(rank, size):
    whole, mine = seeded(Tied), thunder.jit(fsdp(seeded(Tied), bucketing_strategy=FSDPBucketingStrategy.LAYER))
    x = tokens(size)[0].chunk(size)[rank]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(mine(x), whole(x), "result")


def test_second_derivatives_autocast_and_inference(ranks):
    for strategy in (ZERO2, ZERO3):
        ranks(2)(is_differentiated_twice, strategy)
        ranks(2)(under_autocast, strategy)
    ranks(2)(without_grad)


def tuned(module):
    """The transforms of another test file make parameters of the default dtype."""
    for name, parameter in module._overrides_parameters.items():
        parameter.data = parameter.data.double() if parameter.is_floating_point() else parameter.data
    return module


def with_what_transforms_gave(rank, size, strategy):
    def prepare(m):
        return ddp(m) if strategy is None else fsdp(m, sharding_strategy=strategy)

    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()

    whole = tuned(thunder.jit(build(), transforms=[LowRank("2", 1)]))
    mine = prepare(tuned(thunder.jit(build(), transforms=[LowRank("2", 1)])))
    assert {n: len(local_of(p)) for n, p in mine.named_parameters()}["2.lora_b"] == (
        3 if strategy is None else 2 - rank
    )
    optimizers = optimizer_of(whole), optimizer_of(mine)
    for step, x in enumerate(batches(size, torch.float64)):
        whole(x).square().mean().backward()
        mine(x.chunk(size)[rank]).square().mean().backward()
        agree(mine, whole, step, gradients=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        agree(mine, whole, step)
    listed = [FSDPTransform(sharding_strategy=strategy) if strategy is not None else DDPTransform()]
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    quantized = thunder.jit(build(), transforms=[Quantize()])
    for transforms, prepared in (([Quantize(), *listed], lambda m: m), ([Quantize()], prepare)):
        actual = prepared(thunder.jit(build(), transforms=transforms))
        close(actual(x).detach(), quantized(x).detach(), "of weights as int8")
        weight = local_of(actual.get_parameter("0.weight"))
        assert weight.dtype is torch.int8 and len(weight) == (5 if strategy is None else 3 - rank)
    for late in (
        thunder.jit(prepare(build()), transforms=[Quantize()]),
        thunder.jit(build(), transforms=[*listed, Quantize()]),
    ):
        with pytest.raises(
            thunder.errors.CaptureError,
            match="a transform put another tensor in the place of 0.weight, of which the ranks",
        ):
            late(x)


def test_with_transforms_that_replace_parameters(ranks):
    for strategy in (None, ZERO2, ZERO3):
        ranks(2)(with_what_transforms_gave, strategy)


def changes_types(rank, size):
    for prepare, wanted in (
        (ddp, torch.float64),
        (fsdp, torch.float64),
        (lambda m: fsdp(m, dtype=torch.bfloat16), torch.bfloat16),
    ):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
        mine, x = (
            thunder.jit(prepare(copy.deepcopy(module))),
            torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),
        )
        mine(x.to(wanted if wanted is torch.bfloat16 else torch.float32))
        mine.double()
        actual, expected = mine(x.to(wanted)), module.to(wanted)(x.to(wanted))
        assert actual.dtype is wanted and torch.equal(actual, expected)
        actual.sum().backward()
        assert all(p.dtype is p.grad.dtype is torch.float64 for p in mine.parameters())


def test_the_type_of_parameters_may_change(ranks):
    ranks(2)(changes_types)


def takes_what_it_cannot(rank, size):
    whole, mine = torch.nn.Linear(6, 8), thunder.jit(fsdp(torch.nn.Linear(6, 8)))
    for module in (whole, mine):  # of shards, PyTorch would speak of other sizes
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(4x7 and 6x8\)"):
            module(torch.randn(4, 7))


def test_errors_speak_of_whole_parameters(ranks):
    ranks(2)(takes_what_it_cannot)


def test_programs_that_read_no_parts_fail_as_they_are():
    """Also while the process has parameters of which it holds a part."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    placement = sharded("weight", parameter, (PlannedGroup(2),), FSDPType.ZERO2, FSDPBucketingStrategy.NONE, None, None)
    with placing_copies():
        place(parameter, placement)
        with pytest.raises(TypeError, match="'Tensor' object is not callable"):
            thunder.jit(lambda x: (x + 1)())(torch.ones(2))
        with pytest.raises(TypeError, match="not callable"):
            thunder.jit(lambda x: (x + parameter.sum())())(torch.ones(2))
