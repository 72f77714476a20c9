"""Plans, held against programs that run: bytes, collectives, peaks; and how they change with the number of GPUs."""

import contextlib
import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import thunder
from tests.distributed.test_layouts_and_models import WORDS, experts
from tests.distributed.test_layouts_and_models import build as build_model
from thunder.analysis.cost import multiply_adds
from thunder.distributed import (
    H200,
    FSDPBucketingStrategy,
    FSDPType,
    column_parallel,
    context_parallel,
    ddp,
    fsdp,
    plan,
    planning,
    row_parallel,
)
from thunder.distributed.boundary import local_of
from thunder.distributed.costs import Machine, Memory, collective_of
from thunder.errors import OptionError

ZERO2, ZERO3 = FSDPType.ZERO2, FSDPType.ZERO3


class MLP(torch.nn.Module):
    """Layers with tied weights, of which the rows do not come out even over two ranks, a frozen one, and a buffer."""

    def __init__(self, width=7):
        super().__init__()
        self.first, self.norm, self.last = (
            torch.nn.Linear(6, width),
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 6, bias=False),
        )
        self.frozen, self.tied = torch.nn.Linear(6, 6).requires_grad_(False), torch.nn.Linear(width, 6, bias=False)
        self.tied.weight = self.last.weight
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x):
        y = self.norm(torch.nn.functional.gelu(self.first(x)))
        return (self.last(y) + self.tied(y.sin()) + self.frozen(x) * self.scale).square().mean()


def wrapper_of(strategy, buckets, **options):
    if strategy is None:
        return lambda m: thunder.jit(ddp(m, bucket_size_in_mb=0.0003))
    return lambda m: thunder.jit(fsdp(m, sharding_strategy=strategy, bucketing_strategy=buckets, **options))


def said(traces):
    """The collectives of traces: kind -> (how many, bytes)."""
    figures = {}
    for line in (line for trace in traces for line in trace.bound_symbols):
        if (collective := collective_of(line)) is not None:
            count, nbytes = figures.get(collective[0], (0, 0))
            figures[collective[0]] = count + 1, nbytes + collective[1]
    return figures


def agrees(rank, size, strategy, buckets, options):
    torch.manual_seed(0)
    module = MLP()
    x = torch.randn(4, 6, dtype=options.get("dtype"))
    before = {name: (p.shape, p.data_ptr(), p.requires_grad) for name, p in module.named_parameters()}
    bucket_size = {"bucket_size_in_mb": 0.0003} if strategy is None else {"bucketing_strategy": buckets} | options
    planned = plan(module, x, world_size=size, sharding_strategy=strategy, device="cpu", **bucket_size)
    assert {name: (p.shape, p.data_ptr(), p.requires_grad) for name, p in module.named_parameters()} == before
    compiled = wrapper_of(strategy, buckets, **options)(module)
    optimizer = torch.optim.AdamW([p for p in compiled.parameters() if p.requires_grad])
    compiled(x).backward()
    optimizer.step()
    assert planned.parameters == sum(local_of(p).untyped_storage().nbytes() for p in compiled.parameters())
    gradients = [local_of(p.grad) for p in compiled.parameters() if p.grad is not None]
    assert planned.gradients == sum(g.untyped_storage().nbytes() for g in gradients) > 0
    states = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    state_bytes = sum(local_of(t).nbytes for t in states)
    assert (
        state_bytes > 0 and planned.optimizer == state_bytes if rank == 0 else planned.optimizer >= state_bytes
    )  # the last rank has less
    assert planned.others == x.nbytes + module.scale.nbytes
    ran = said([thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]])
    assert {c.kind: (c.count, c.nbytes) for c in planned.collectives} == ran and ran
    assert planned.saved == thunder.examine.saved_for_backward(compiled).nbytes


CASES = [
    (None, None, {}), (ZERO2, FSDPBucketingStrategy.NONE, {}), (ZERO3, FSDPBucketingStrategy.LAYER, {}),
        (ZERO3, FSDPBucketingStrategy.BLOCK, {}),
    (ZERO2, FSDPBucketingStrategy.NONE, {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
]  # fmt: skip


def test_bytes_and_collectives_are_those_of_a_run_on_two_ranks(ranks):
    for case in CASES:
        ranks(2)(agrees, *case)


class Storages(TorchDispatchMode):
    """Counts the bytes of the memory that operations of PyTorch make and that is still there."""

    def __init__(self):
        super().__init__()
        self.live, self.outside, self.peak = {}, set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        storages = {
            t.untyped_storage()._cdata
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        self.outside |= storages - self.live.keys()
        result = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.outside:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: (ref, n) for key, (ref, n) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(n for _, n in self.live.values()))
        return result


class Chain(torch.nn.Module):
    """Operations that take no memory beside their results."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(16, 16)) for _ in range(5))

    def forward(self, x):
        for w in self.weights:
            x = torch.tanh(x @ w).t().contiguous().view(16, 16).t()
        return x.sum()


@pytest.mark.parametrize("grad", [True, False])
def test_the_peak_is_that_of_a_run(grad):
    module, x = Chain(), torch.randn(16, 16)
    with contextlib.nullcontext() if grad else torch.no_grad():
        planned = plan(module, x, world_size=1, sharding_strategy=None, device="cpu")
        compiled = thunder.jit(module)
        for _ in range(2):
            module.zero_grad()
            storages = Storages()
            with storages:
                loss = compiled(x)
                if grad:
                    loss.backward()
    beyond = planned.peak - planned.parameters - planned.optimizer - planned.others
    assert planned.parameters == 5 * 16 * 16 * 4 and planned.optimizer == (2 * planned.parameters if grad else 0)
    assert planned.gradients == (planned.parameters if grad else 0)
    assert beyond == storages.peak


@pytest.fixture
def lines(monkeypatch):
    """The lines that were found to compute something."""
    positions, seconds_of = [], Machine.seconds_of
    monkeypatch.setattr(
        Machine, "seconds_of", lambda self, line, scratch: positions.append(line) or seconds_of(self, line, scratch)
    )
    return positions


class Gated(torch.nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(3)) for _ in range(3)
        )

    def forward(self, x):
        for gate, up, down in self.layers:
            x = x + down(torch.nn.functional.silu(gate(x)) * up(x))
        return x.square().mean()


@pytest.mark.parametrize("strategy", [None, ZERO2, ZERO3])
def test_what_is_left_at_the_end_are_the_gradients(strategy, monkeypatch, lines):
    walks = []
    monkeypatch.setattr(planning, "Memory", lambda *arguments: walks.append(Memory(*arguments)) or walks[-1])
    with torch.device("meta"):
        model, x = Gated().to(torch.bfloat16), torch.empty(64, 512, dtype=torch.bfloat16)
    planned = plan(model, x, world_size=2, sharding_strategy=strategy)
    loss = cotangent = 2
    assert walks[0].now == planned.gradients + loss + cotangent and planned.gradients == planned.parameters
    assert planned.peak >= planned.parameters + planned.optimizer + planned.others + walks[0].now
    assert any(getattr(line.sym.fn, "over", None) for line in lines), "a result is written over an input"


def planned(**options):
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(4)))
    return plan(model.to(torch.bfloat16), torch.empty(32, 8192, dtype=torch.bfloat16, device="meta"), **options)


def test_more_gpus_hold_less_each_and_communicate_longer():
    sizes = (1, 2, 4, 8, 64, 512, 4096)
    for strategy in (ZERO2, ZERO3):
        plans = planned(world_size=sizes, sharding_strategy=strategy)
        assert [p.world_size for p in plans] == list(sizes)
        for fewer, more in zip(plans, plans[1:]):
            assert more.parameters <= fewer.parameters and more.peak <= fewer.peak and more.gathered >= fewer.gathered
            assert all(b.count == a.count for a, b in zip(fewer.collectives, more.collectives))
            assert (
                sum(c.seconds for c in more.collectives) > sum(c.seconds for c in fewer.collectives)
                or fewer.world_size == 1
            )
        assert plans[0].parameters == 4 * (8192 * 8192 + 8192) * 2 and plans[3].parameters * 8 == plans[0].parameters
        assert plans[-1].parameters * 4096 == plans[0].parameters
    zero2, zero3 = planned(world_size=64), planned(world_size=64, sharding_strategy=ZERO3)
    replicas = planned(world_size=64, sharding_strategy=None)
    assert zero3.communicated > zero2.communicated and replicas.parameters == 64 * zero2.parameters
    assert "64" in str(zero2) and str(planned(world_size=(8, 4096))).count("\n") == 3


def test_the_work_does_not_grow_with_the_number_of_gpus(lines):
    counts = []
    for size in (2, 64, 4096):
        lines.clear()
        planned(world_size=size)
        counts.append(len(lines))
    assert counts[0] == counts[1] == counts[2] > 0


def test_shards_of_a_part_of_the_ranks():
    whole, hybrid = planned(world_size=64), planned(world_size=64, shards=8)
    assert hybrid.parameters == planned(world_size=8).parameters > whole.parameters
    assert {c.kind for c in hybrid.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert planned(world_size=8, shards=8).collectives == planned(world_size=8).collectives


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16, device="meta"))

    def forward(self, x):
        assert x.device.type == "cuda" and x.is_contiguous()
        return torch.nn.functional.scaled_dot_product_attention(
            x * self.w + x, x.sin() * self.w, x.cos() * self.w, is_causal=True
        ).sum()


def test_what_runs_on_gpus_is_planned_without_one(lines):
    """Attention and elementwise operations go to the executors of GPUs, whatever this machine has."""

    plan(Heads(), torch.zeros(2, 8, 128, 64, dtype=torch.bfloat16), world_size=8)
    names = [line.sym.name for line in lines]
    assert (
        "sdpa_cudnn" in names
        and "sdpa_cudnn_backward" in names
        and any(name.startswith("TritonFusion") for name in names)
    )


def test_rows_are_planned_without_a_gpu_as_they_are_computed_with_one(lines):
    layer = torch.nn.Linear(4096, 1024, bias=False, dtype=torch.bfloat16, device="meta")
    for rows, options, device, taken in (
        (1, {}, "cuda", 1),
        (2, {}, "cuda", 0),
        (2, {"matvec_rows": 2}, "cuda", 1),
        (1, {"numerics": "eager"}, "cuda", 0),
        (1, {}, "cpu", 0),
    ):
        lines.clear()
        with torch.no_grad():
            planned = plan(
                thunder.jit(layer, **options),
                torch.empty(rows, 4096, dtype=torch.bfloat16),
                world_size=1,
                device=device,
            )
        assert [line.sym.name for line in lines].count("few_rows_linear") == taken
        assert planned.busy >= layer.weight.nbytes / 10e12


class Several(torch.nn.Module):
    """Buffers that are written to, an operation that PyTorch differentiates, and decisions about constants."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.recurrent = torch.nn.LSTM(36, 16, batch_first=True)

    def forward(self, x):
        y = self.norm(self.convolution(x)).flatten(2)
        if (torch.arange(4, device=x.device) > 2).all():
            y = y.exp()
        return self.recurrent(y)[0].square().mean()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_modules_on_the_meta_device_or_with_memory(device):
    with torch.device(device):
        model, x = Several(), torch.empty(2, 3, 8, 8)
    planned = plan(model, x, world_size=4, sharding_strategy=ZERO3)
    assert planned.gradients == planned.parameters and planned.optimizer == 2 * planned.parameters
    assert planned.others == x.nbytes + sum(b.nbytes for b in model.buffers())
    assert planned.unknown == 1 and "1 pieces of PyTorch's autograd graph" in str(planned), "what PyTorch's LSTM saves"
    assert planned.saved >= 2 * 8 * 36 * 4 and all(b.device.type == device for b in model.buffers())


def test_convolutions_and_attention_are_counted_as_products(lines):
    with torch.device("meta"):
        convolution = torch.nn.Conv2d(4, 6, 3, padding=1, bias=False, groups=2).to(torch.bfloat16)
        x = torch.empty(5, 4, 10, 10, dtype=torch.bfloat16)
    plan(convolution, x, world_size=1)
    plan(Heads(), torch.empty(2, 3, 128, 64, dtype=torch.bfloat16, device="meta"), world_size=1)
    originals = [
        line.subsymbols[0] if line.sym.executor is not None else line for line in lines if not line.sym.is_fusion
    ]
    counts = {
        line.sym.qualified_name.split(".")[-2 if line.sym.name == "default" else -1]: multiply_adds(line)
        for line in originals
    }
    assert counts["conv2d"] == counts["convolution_backward"] == 5 * 10 * 10 * 6 * (2 * 3 * 3), (
        "the input has no gradient"
    )
    scores = 2 * 3 * 128 * 128 * 64
    assert counts["sdpa_cudnn"] == 2 * scores / 2 and counts["sdpa_cudnn_backward"] == 5 * scores / 2, (
        "half of them are hidden"
    )


def test_the_optimizer_is_counted_as_named():
    by_name = {name: planned(world_size=2, optimizer=name) for name in ("sgd", "sgd momentum", "adam", "adamw")}
    assert [p.optimizer // p.parameters for p in by_name.values()] == [0, 1, 2, 2]
    assert planned(world_size=2, optimizer=12).optimizer == 6 * by_name["sgd"].parameters, "12 bytes for numbers of 2"
    with torch.no_grad():
        whole_plan = planned(world_size=2)
    assert whole_plan.optimizer == whole_plan.gradients == whole_plan.saved == 0 and [
        c.kind for c in whole_plan.collectives
    ] == ["all_gather"]


def test_time_follows_the_figures_of_the_machine():
    """A step of products alone takes the time of its operations; slow links are waited for."""
    fast = dict(
        memory=1e30, update=1e30, start=0.0, launch=0.0, host=0.0, collective=0.0, hop=0.0, network_hop=0.0, sharing=0.0
    )
    figures = {
        f: getattr(H200, f)
        for f in ("half", "single", "double", "float8", "attention", "attention_backward", "network")
    } | fast
    free = Machine("free", link=1e30, **figures)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3))).to(torch.bfloat16)
    x = torch.empty(32, 64, dtype=torch.bfloat16, device="meta")
    planned = plan(model, x, world_size=8, machine=free)
    products = 3 + 3 + 2  # x has no gradient
    assert planned.seconds == pytest.approx(
        products * 2 * 32 * 64 * 64 / free.half, rel=1e-6
    ) and planned.waiting == pytest.approx(0.0, abs=1e-12)
    slow = plan(model, x, world_size=8, machine=Machine("slow", link=1e6, **figures))
    moved = (planned.communicated * 7 / 8) / 1e6
    assert sum(c.seconds for c in slow.collectives) == pytest.approx(moved) and slow.seconds >= moved
    assert slow.waiting == pytest.approx(slow.seconds - slow.busy)


def test_a_ring_and_where_it_leaves_the_node():
    inside = H200.seconds_of_collective("all_gather", 8 << 30, 8, 1)
    assert inside == pytest.approx(H200.collective + 7 * H200.hop + 7 / 8 * (8 << 30) / H200.link)
    between = H200.seconds_of_collective("all_gather", 8 << 30, 16, 1)
    assert between > inside and H200.seconds_of_collective("all_gather", 8 << 30, 16, 8) > between, (
        "one GPU of each node has one network card's share"
    )
    assert H200.seconds_of_collective("all_reduce", 8 << 30, 8, 1) == pytest.approx(2 * inside - H200.collective)


def test_compiled_programs_are_not_compiled_anew_because_of_a_plan(ranks):
    ranks(2)(stays_compiled)


def stays_compiled(rank, size):
    module = thunder.jit(ddp(MLP()))
    x = torch.randn(4, 6)
    module(x)
    other = copy.deepcopy(MLP())
    plan(other, x, world_size=4096, device="cpu")
    module(x)
    assert thunder.cache_misses(module) == 1
    with pytest.raises(RuntimeError, match="distributed already"):
        plan(module, x, world_size=2)


def test_options_of_a_compiled_module_are_its_own(lines):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Tanh())
    for options, fused in (({}, True), ({"executors": []}, False), ({"numerics": "eager"}, False)):
        lines.clear()
        model = thunder.jit(module, **options)
        plan(model, torch.zeros(4, 8), world_size=2)
        assert any(line.sym.name.startswith("TritonFusion") for line in lines) is fused and lines
        assert thunder.cache_misses(model) == 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"world_size": 0}, "world_size=0 is not an option"), ({"world_size": ()}, "is not a number of GPUs"),
            ({"world_size": True}, "world_size=True"),
        ({"world_size": 12, "shards": 8}, "a number that divides 12"), ({"world_size": 8, "shards": 0}, "shards=0"),
        ({"world_size": 8, "optimizer": "adagrad"}, "'adamw'"),
            ({"world_size": 8, "device": "tpu"}, "valid: 'cuda', 'cpu'"),
        ({"world_size": 8, "sharding_strategy": "zero2"}, "FSDPType.ZERO2"),
            ({"world_size": 8, "bucketing_strategy": 3}, "FSDPBucketingStrategy"),
        ({"world_size": 8, "sharding_strategy": None, "bucket_size_in_mb": -1}, "0 or more"),
            ({"world_size": 8, "sharding_strategy": None, "shards": 2}, "no option shards"),
    ],
)  # fmt: skip
def test_options_that_are_none_say_so(options, words):
    with pytest.raises(OptionError, match=words):
        planned(**options)


def test_what_is_no_module():
    with pytest.raises(TypeError, match="plan takes an nn.Module"):
        plan(torch.sin, torch.zeros(3), world_size=8)


def test_what_the_model_raises():
    for world_size in (1, 8):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            plan(MLP(), torch.empty(4, 5), world_size=world_size)


def test_graphs_are_refused():
    from thunder.transforms.cudagraph import CUDAGraphTransform

    model = thunder.jit(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), transforms=[CUDAGraphTransform()])
    with pytest.raises(OptionError, match="CUDA graphs"):
        plan(model, torch.zeros(4, 8), world_size=2)


class Split(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8)
        self.down, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        return self.last(x + self.down(torch.nn.functional.gelu(self.up(x)))).square().mean()


def split_layers(rank, size, shards):
    """Layers that ranks split: the plan has the collectives, and the bytes, of the program that runs."""
    mesh = init_device_mesh("cpu", (shards, size // shards), mesh_dim_names=("data", "layers"))
    torch.manual_seed(0)
    module = row_parallel(column_parallel(Split(), ["up"], mesh["layers"]), ["down"], mesh["layers"])
    x = torch.randn(4, 3, 6, requires_grad=True)
    options = {"sharding_strategy": None} if shards == 1 else {"sharding_strategy": ZERO3}
    predicted = plan(module, x, world_size=size, device="cpu", **options)
    compiled = thunder.jit(module if shards == 1 else fsdp(module, process_group=mesh["data"], **options))
    compiled(x).backward()
    ran = said([thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]])
    planned = {c.kind: (c.count, c.nbytes) for c in predicted.collectives}
    assert planned == ran and planned["all_reduce"][0] == 2, planned
    assert predicted.parameters == sum(local_of(p).untyped_storage().nbytes() for p in compiled.parameters())
    with pytest.raises(OptionError, match="layers that are split over 2 ranks"):
        plan(module if shards == 1 else column_parallel(Split(), ["up"], mesh["layers"]), x, world_size=3)


def test_layers_that_ranks_split_are_planned_with_their_sums(ranks):
    ranks(2)(split_layers, 1)
    ranks(4)(split_layers, 2)


def shares(rank, size):
    """Positions and experts: the plan has the collectives of a run; rows that go to experts count as evenly shared."""
    tokens = torch.arange(64).view(4, 16) % WORDS
    for prepare, sizes_are_known in ((context_parallel, True), (experts, False)):
        module = prepare(build_model("grouped").float())
        told = plan(module, tokens, world_size=size, sharding_strategy=None, device="cpu")
        compiled = thunder.jit(module)
        compiled(tokens).backward()
        ran = said([thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]])
        planned = {c.kind: (c.count, c.nbytes) for c in told.collectives}
        assert ran and planned.keys() == ran.keys()
        assert all(planned[kind][0] == ran[kind][0] for kind in ran), (planned, ran)
        assert planned == ran or not sizes_are_known


def test_shared_positions_and_experts_are_planned_as_they_are_held(ranks):
    ranks(2)(shares)
