"""What communication there is, and when: buckets, the order of starts and waits, and the bytes that live."""

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.training import batches, compare
from thunder.analysis.aliases import alias_bases
from thunder.analysis.cost import nbytes
from thunder.core.check import check
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.distributed import FSDPBucketingStrategy, FSDPType, bucketing, ddp, fsdp
from thunder.distributed.schedule import overlap

ZERO2, ZERO3 = FSDPType.ZERO2, FSDPType.ZERO3
NONE, LAYER, BLOCK = FSDPBucketingStrategy.NONE, FSDPBucketingStrategy.LAYER, FSDPBucketingStrategy.BLOCK


class Blocks(torch.nn.Module):
    """Three blocks of four parameters in two layers, between two layers."""

    def __init__(self, width=6):
        super().__init__()
        self.first = torch.nn.Linear(6, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width))
            for _ in range(3)
        )
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def blocks(**options):
    torch.manual_seed(0)
    return Blocks(**options).double()


def starts(trace) -> list[int]:
    """For each collective that a trace starts: of how many tensors it is."""
    return [
        len(line.outputs) for line in trace.bound_symbols if any(isinstance(o, FutureTensorProxy) for o in line.outputs)
    ]


def most_in_flight(trace, kind="") -> tuple[int, int]:
    """The most collectives of a kind, and the most bytes that they fill or read, that are under way at once."""
    flying, most, largest = {}, 0, 0
    for line in trace.bound_symbols:
        if kind in line.sym.name and any(isinstance(o, FutureTensorProxy) for o in line.outputs):
            flying[line] = max(sum(map(nbytes, line.inputs)), sum(map(nbytes, line.outputs)))
        if line.sym.name == "wait_impl":  # the first wait is for all that started together
            flying = {started: size for started, size in flying.items() if set(started.outputs).isdisjoint(line.inputs)}
        most, largest = max(most, len(flying)), max(largest, sum(flying.values()))
    return most, largest


def buckets(rank, size, strategy, bucketing, forward, backward):
    def prepare(m):
        return fsdp(m, sharding_strategy=strategy, bucketing_strategy=bucketing)

    compiled = compare(rank, size, blocks(), prepare, batches(size, torch.float64))
    assert starts(thunder.last_traces(compiled)[-1]) == forward
    assert sorted(starts(thunder.last_backward_traces(compiled)[-1])) == sorted(backward)


def buckets_in_pieces(rank, size):
    before, bucketing.PIECE = bucketing.PIECE, (6 * 6 * 8 + 6 * 8) // 8  # of one layer
    try:
        buckets(rank, size, ZERO2, BLOCK, [2] * 8, [2] * 8)
        buckets(rank, size, ZERO3, BLOCK, [2] * 8, [2] * 8 + [1] * 6)
    finally:
        bucketing.PIECE = before


def test_large_buckets_are_communicated_in_pieces(ranks):
    ranks(2)(buckets_in_pieces)


def gathers_one_by_one(rank, size):
    with mock.patch.object(
        torch.distributed.ProcessGroup, "allgather_into_tensor_coalesced", side_effect=AssertionError
    ):
        buckets(rank, size, ZERO3, BLOCK, [2, 4, 4, 4, 2], [2, 4, 4, 4, 2] + [2, 2, 2])


def test_gloo_is_given_no_several_tensors_to_gather(ranks):
    """Two such of its collectives that run at once break the memory of the process, once in some hundred thousand."""
    ranks(2)(gathers_one_by_one)


def buckets_by_size(rank, size):
    for megabytes, wanted in ((25.0, [16]), (0, [1] * 16), (400 / 2**20, None)):
        compiled = compare(
            rank, size, blocks(), lambda m: ddp(m, bucket_size_in_mb=megabytes), batches(size, torch.float64)
        )
        positions = starts(thunder.last_backward_traces(compiled)[-1])
        assert sum(positions) == 16 and (positions == wanted or wanted is None and 4 <= len(positions) <= 8)


def test_buckets(ranks):
    group = ranks(2)
    group(buckets, ZERO2, NONE, [1] * 16, [1] * 16)
    group(buckets, ZERO2, LAYER, [2] * 8, [2] * 8)
    group(buckets, ZERO2, BLOCK, [2, 4, 4, 4, 2], [2, 4, 4, 4, 2])
    # the backward gathers the weights of all layers but the first, whose input needs no gradient, and the last, whose
    # weight it has
    group(buckets, ZERO3, NONE, [1] * 16, [1] * 16 + [1] * 6)
    group(buckets, ZERO3, LAYER, [2] * 8, [2] * 8 + [1] * 6)
    group(buckets, ZERO3, BLOCK, [2, 4, 4, 4, 2], [2, 4, 4, 4, 2] + [2, 2, 2])


def test_buckets_of_replicas_fill_to_a_size(ranks):
    ranks(2)(buckets_by_size)


def overlaps(rank, size):
    for strategy in (ZERO2, ZERO3):
        for limit, most in ((2**30, 16), (1000, 3), (1, 1)):
            compiled = thunder.jit(fsdp(blocks(), sharding_strategy=strategy), communication_bytes_in_flight=limit)
            compiled(batches(size, torch.float64)[0].chunk(size)[rank]).sum().backward()
            forward, backward = thunder.last_traces(compiled)[-1], thunder.last_backward_traces(compiled)[-1]
            if limit == 2**30:  # all gathers first; every reduction is waited for when all have started
                assert most_in_flight(forward)[0] == 16 and most_in_flight(backward)[0] >= 16
                lines = [line.sym.name for line in forward.bound_symbols if line.sym.name != "python_del"]
                assert lines[:16] == ["all_gather_impl"] * 16
                waits = [line.sym.name for line in backward.bound_symbols if line.sym.name != "python_del"][-16:]
                assert waits == ["wait_impl"] * 16
            else:
                count, size_in_flight = most_in_flight(forward)
                assert 1 <= count <= most or size_in_flight <= limit
                for kind in ("gather", "reduce"):
                    assert most_in_flight(backward, kind)[1] <= max(limit, 6 * 6 * 8)


def test_collectives_start_early_and_are_waited_for_late_within_a_limit(ranks):
    ranks(2)(overlaps)


def gathers_while_it_reduces(rank, size):
    """With room for a block and a half: between the start of a reduction and somebody who waits for it the program
    computes, though the next block is gathered."""
    compiled = thunder.jit(
        fsdp(blocks(), sharding_strategy=ZERO3, bucketing_strategy=BLOCK),
        communication_bytes_in_flight=3 * (6 * 6 * 8 + 6 * 8),
    )
    compiled(batches(size, torch.float64)[0].chunk(size)[rank]).sum().backward()
    lines = [line for line in thunder.last_backward_traces(compiled)[-1].bound_symbols if line.sym.name != "python_del"]
    names, makers = [line.sym.name for line in lines], {o: at for at, line in enumerate(lines) for o in line.outputs}
    # of the last block, after which the first one is gathered
    start = [at for at, name in enumerate(names) if name == "reduce_scatter_together_impl"][1]
    waits = next(at for at, line in enumerate(lines) if names[at] == "wait_impl" and makers[line.inputs[0]] == start)
    between = names[start:waits]
    assert between.index("all_gather_together_impl") < between.index("mm")


def test_gathers_do_not_wait_for_reductions(ranks):
    ranks(2)(gathers_while_it_reduces)


def peak_bytes(trace) -> int:
    """The most bytes of values that a program holds at once, freed where its `del` lines say; a view holds what it
    shows."""
    bases, alive, most = alias_bases(trace.bound_symbols, maybe=True), {}, 0
    for line in trace.bound_symbols:
        for o in line.outputs:
            if isinstance(o, TensorProxy):
                # what is waited for is there already
                source = line.inputs[0] if line.sym.name == "wait_impl" else bases[o]
                alive[o] = alive.get(source, source)
        if line.sym.name == "python_del":
            for i in line.inputs:
                alive.pop(i, None)
        most = max(most, sum(map(nbytes, set(alive.values()))))
    return most


def bytes_that_live(rank, size):
    """Parameters are 8 layers of 128 KiB of which a rank holds half; activations are next to nothing."""
    peaks, saved = {}, {}
    for strategy in (ZERO2, ZERO3):
        torch.manual_seed(0)
        module = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(8))).double()
        compiled = thunder.jit(fsdp(module, sharding_strategy=strategy), communication_bytes_in_flight=1)
        x = torch.randn(2, 128, dtype=torch.float64)

        def step():
            stored = {}

            def pack(t):
                stored[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                loss = compiled(x).sum()
            saved[strategy] = sum(stored.values())
            loss.backward()
            for p in module.parameters():
                p.grad = None

        step()
        peaks[strategy] = (
            peak_bytes(thunder.last_traces(compiled)[-1]),
            peak_bytes(thunder.last_backward_traces(compiled)[-1]),
        )
    whole, shard, little = 128 * 128 * 8, 64 * 128 * 8, 40_000
    # the first layer's weight is not needed, the last one's at once
    assert saved[ZERO2] >= 7 * whole and saved[ZERO3] <= 6 * shard + whole + little
    assert peaks[ZERO2][0] >= 7 * whole and peaks[ZERO2][1] >= 8 * whole
    forward, backward = peaks[ZERO3]
    assert forward <= 2 * whole + little  # one to compute with, and one ahead
    # shards that their gradients take the place of, and what is gathered and reduced at once
    assert backward <= 7 * shard + 2 * whole + little


def test_zero3_keeps_shards_for_the_backward_and_zero2_what_was_gathered(ranks):
    ranks(2)(bytes_that_live)


class Shared(torch.nn.Module):
    """Two biases with one gradient, one whose gradient is the cotangent itself, and one that is a view of it: none may
    be overwritten."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Parameter(torch.randn(4, 6)) for _ in range(3))
        self.layer, self.embedding = torch.nn.Linear(6, 6), torch.nn.Embedding(4, 6)

    def forward(self, x):
        return self.layer(x[:4] + self.a + self.b + self.embedding(torch.arange(4))) + self.c


def gradients_of_their_own(rank, size):
    torch.manual_seed(0)
    module = Shared().double()
    mine = thunder.jit(ddp(module))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    y, seed = mine(x), torch.full((4, 6), 2.0 + rank, dtype=torch.float64)
    y.backward(seed)
    assert torch.equal(seed, torch.full_like(seed, 2.0 + rank)) and torch.equal(
        module.c.grad, torch.full_like(seed, 2.5)
    )
    assert torch.equal(module.a.grad, module.b.grad) and module.a.grad.data_ptr() != module.b.grad.data_ptr()
    weight = module.layer.weight.detach()
    assert torch.allclose(x.grad, seed @ weight) and torch.allclose(module.a.grad, torch.full_like(seed, 2.5) @ weight)
    line = next(line for line in thunder.last_backward_traces(mine)[-1].bound_symbols if "all_reduce" in line.sym.name)
    # weights have gradients that nobody else reads
    assert sorted(line.args[2]) == [False, False, False, False, True, True]


def test_gradients_that_others_read_are_not_overwritten(ranks):
    ranks(2)(gradients_of_their_own)


def waits_in_another_order(rank, size):
    """What a fusion executor may leave: the second collective is waited for first. One at a time may be under way."""
    group = torch.distributed.group.WORLD

    def program(a, b):
        first, second = thunder.torch.all_gather(a, group, True), thunder.torch.all_gather(b, group, True)
        y = thunder.torch.wait(second) * 2
        return thunder.torch.wait(first) + y

    compiled = thunder.jit(program)
    a, b = torch.full((2,), 1.0 + rank), torch.full((2,), 3.0 + rank)
    wanted = compiled(a, b)
    assert wanted.tolist() == [7.0, 7.0, 10.0, 10.0]
    traces = thunder.last_traces(compiled)
    undeleted = traces[[t.made_by[0] for t in traces].index("Delete Last Used") - 1]
    scheduled = check(overlap(undeleted, 1))
    assert torch.equal(scheduled.python_callable()(a, b), wanted)
    assert [line.sym.name for line in scheduled.bound_symbols][:3] == [
        "all_gather_impl",
        "all_gather_impl",
        "wait_impl",
    ]


def test_a_collective_has_started_when_it_is_waited_for(ranks):
    ranks(2)(waits_in_another_order)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.LSTM(6, 4, batch_first=True)

    def forward(self, x):
        return self.cells(x[:, None].expand(-1, 3, -1))[0][:, -1]


def gradients_of_one_line(rank, size):
    torch.manual_seed(0)
    for strategy in (ZERO2, ZERO3):
        mine = compare(
            rank,
            size,
            Recurrent().double(),
            lambda m, s=strategy: fsdp(m, sharding_strategy=s),
            batches(size, torch.float64),
        )
        for trace in thunder.last_backward_traces(mine):
            check(trace)


def test_several_reductions_read_what_one_line_makes(ranks):
    ranks(2)(gradients_of_one_line)


def reduces_twice(rank, size):
    """Gradients are reduced to shards, and these over replicas, while the backward computes the next ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for strategy in (ZERO2, ZERO3):
        prepare = lambda m, s=strategy: fsdp(m, process_group=mesh, sharding_strategy=s, bucketing_strategy=BLOCK)
        mine = compare(rank, size, blocks(), prepare, batches(size, torch.float64))
        lines = [
            line
            for line in check(thunder.last_backward_traces(mine)[-1]).bound_symbols
            if line.sym.name != "python_del"
        ]
        names, makers = (
            [line.sym.name for line in lines],
            {o: at for at, line in enumerate(lines) for o in line.outputs},
        )
        for name in ("reduce_scatter_together_impl", "all_reduce_together_impl"):
            starts = [at for at, each in enumerate(names) if each == name]
            waits = [
                next(i for i, line in enumerate(lines) if names[i] == "wait_impl" and makers[line.inputs[0]] == at)
                for at in starts
            ]
            assert len(starts) == 5 and all(
                "mm" in names[start:wait] for start, wait in list(zip(starts, waits))[1:3]
            ), name


def test_shards_are_reduced_over_replicas_meanwhile(ranks):
    ranks(4)(reduces_twice)
