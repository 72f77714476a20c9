"""column_parallel and row_parallel: training equals that of one process, and no communication is redundant."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.training import agree, batches, close, compare
from thunder.core.proxies import TensorProxy
from thunder.distributed import FSDPType, clip_grad_norm_, column_parallel, ddp, fsdp, row_parallel
from thunder.distributed.boundary import local_of
from thunder.distributed.placement import placement_of


class Gated(torch.nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.gate, self.up, self.down = (
            torch.nn.Linear(6, 8, bias=bias),
            torch.nn.Linear(6, 8, bias=bias),
            torch.nn.Linear(8, 6, bias=bias),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Scaled(torch.nn.Module):
    """Between two layers, parameters that all ranks hold: one number, one for each feature, one for each sequence."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6)
        self.number, self.features, self.rows = (torch.nn.Parameter(torch.randn(n)) for n in ((), 8, (4, 1)))

    def forward(self, x):
        return self.down(
            torch.tanh(self.up(x)) * self.number
            + self.features * self.rows
            + torch.where(self.rows > 0, self.up(x), 0.5)
        )


class Attention(torch.nn.Module):
    def __init__(self, heads=4, by_hand=False):
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        # the gradient of k's bias is zero: softmax does not see it
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8, bias=name != "k") for name in "qkvo")

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (m(x).view(b, t, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.by_hand:
            y = torch.softmax((q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5, -1) @ v
        else:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(b, t, c))


class Language(torch.nn.Module):
    def __init__(self, by_hand=False):
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(12, 8, padding_idx=9), torch.nn.Embedding(5, 8)
        self.norm, self.attention, self.head = torch.nn.LayerNorm(8), Attention(by_hand=by_hand), torch.nn.Linear(8, 12)

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(h + self.attention(self.norm(h)))


class Grouped(torch.nn.Module):
    """Attention as language models have it: rotated queries and keys, fewer heads of keys and values, a mask, an empty
    cache."""

    def __init__(self, repeat):
        super().__init__()
        self.repeat = repeat
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, n, bias=False) for n in (8, 4, 4, 8))
        self.register_buffer("angles", torch.outer(torch.arange(5.0), torch.tensor([0.5, 0.5])))

    def rotated(self, x):
        return x * self.angles.cos()[None, None] + torch.cat(
            (-x[..., 1:], x[..., :1]), dim=-1
        ) * self.angles.sin().unsqueeze(0)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, -1, 2).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (torch.cat([torch.tensor([], dtype=x.dtype), y], -2) for y in (self.rotated(k), v))
        if self.repeat == "expand":
            k, v = (y[:, :, None, :, :].expand(b, 2, 2, t, 2).reshape(b, 4, t, 2) for y in (k, v))
        elif self.repeat == "repeat_interleave":
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        mask = torch.ones(b, 1, t, t, dtype=torch.bool).tril()
        y = torch.nn.functional.scaled_dot_product_attention(
            self.rotated(q), k, v, attn_mask=mask, enable_gqa=self.repeat == "in attention"
        )
        return x + self.o(y.transpose(1, 2).reshape(b, t, 8))


def seeded(kind, **options):
    torch.manual_seed(0)
    return kind(**options).double()


def split_gated(m, group=None):
    return row_parallel(column_parallel(m, ["gate", "up"], group), ["down"], group)


def split_language(m, group=None, sequence_dim=None):
    m = column_parallel(
        m, ["places", "attention.q", "attention.k", "attention.v", "head"], group, sequence_dim=sequence_dim
    )
    return row_parallel(m, ["tokens", "attention.o"], group, sequence_dim=sequence_dim)


def counts(trace, *names) -> tuple[int, ...]:
    lines = [line.sym.name.removesuffix("_impl") for line in trace.bound_symbols]
    return tuple(lines.count(name) for name in names)


def train(module, prepare, data, of_rank=lambda x: x):
    """Trains as one process does. Returns the compiled module."""
    mine = compare(
        torch.distributed.get_rank(), torch.distributed.get_world_size(), module, prepare, data, of_rank=of_rank
    )
    assert thunder.cache_misses(mine) == 1
    return mine


def tokens(size):
    return batches(size, torch.float64, lambda g: torch.randint(0, 12, (4, 5), generator=g))


def gated(rank, size):
    mine = train(seeded(Gated), split_gated, [x[:4] for x in batches(size, torch.float64)])
    gate, down = mine._model.gate, mine._model.down
    assert local_of(gate.weight).shape == (8 // size, 6) and local_of(gate.bias).shape == (8 // size,)
    assert local_of(down.weight).shape == (6, 8 // size) and local_of(down.bias).shape == (6,)
    # one sum forward; one backward, where both gradients of x meet
    assert counts(thunder.last_traces(mine)[-1], "all_reduce", "all_gather") == (1, 0)
    assert counts(thunder.last_backward_traces(mine)[-1], "all_reduce", "all_gather") == (0, 0)  # x needs no gradient
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (g,) = torch.autograd.grad(mine(x).square().sum(), x)
    assert counts(thunder.last_backward_traces(mine)[-1], "all_reduce", "all_gather") == (1, 0)
    same = [torch.empty_like(g) for _ in range(size)]
    torch.distributed.all_gather(same, g)
    assert all(torch.equal(g, other) for other in same)


def scaled(rank, size):
    mine = train(
        seeded(Scaled),
        lambda m: row_parallel(column_parallel(m, ["up"]), ["down"]),
        [x[:4] for x in batches(size, torch.float64)],
    )
    assert counts(thunder.last_traces(mine)[-1], "all_reduce", "all_gather") == (1, 0)


def language(rank, size, by_hand):
    mine = train(seeded(Language, by_hand=by_hand), split_language, tokens(size))
    # embeddings: a sum and a join; attention: a sum; head: a join
    assert counts(thunder.last_traces(mine)[-1], "all_reduce", "all_gather") == (2, 2)
    model = mine._model
    assert (
        local_of(model.tokens.weight).shape == (12 // size, 8)
        and local_of(model.places.weight).shape == (5, 8 // size)
        and local_of(model.head.bias).shape == (12 // size,)
    )


def grouped(rank, size, repeat):
    data = batches(size, torch.float64, lambda g: torch.randn(4, 5, 8, dtype=torch.float64, generator=g))
    mine = train(
        seeded(Grouped, repeat=repeat), lambda m: row_parallel(column_parallel(m, ["q", "k", "v"]), ["o"]), data
    )
    assert counts(thunder.last_traces(mine)[-1], "all_reduce", "all_gather") == (1, 0)


def picks(x):
    """Each takes all of the second dimension of three, which becomes that of the number beside it."""
    second = [
        x[..., 1],
        x[:, :, None, ::2],
        x[None, 0],
        x[1:, ...],
        x.unsqueeze(-1),
        torch.cat((x, torch.ones(2, 4, 1, dtype=x.dtype)), 2),
    ]
    third = [x.unsqueeze(1), x.unsqueeze(dim=0), x.expand(3, *x.shape), x[:, None].expand(-1, 2, -1, -1)]
    return [*((y, 1) for y in second), *((y, 2) for y in third)]


def picks_more(x):
    """These need more than a part, or another one."""
    twice = torch.cat((x, x), 1)
    return [
        (y, 1)
        for y in (
            x[:, [1, 0, 3, 2]],
            x[:, 0::1],
            x[:, torch.tensor([3, 0, 1, 2])],
            twice[:, :4],
            twice[:, 2:6],
            x[:, 2:].repeat_interleave(2, 1),
            x.flip(1),
        )
    ]


class Picking(torch.nn.Module):
    def __init__(self, pick):
        super().__init__()
        self.up, self.down, self.pick = torch.nn.Linear(6, 4), torch.nn.Linear(4, 2), pick

    def forward(self, x):
        h = self.up(x).transpose(1, 2)
        return torch.cat(
            [self.down(y.transpose(dim, -1)).sin().flatten() * (i + 1) for i, (y, dim) in enumerate(self.pick(h))]
        )


def picking(rank, size):
    data = batches(size, torch.float64, lambda g: torch.randn(2, 3, 6, dtype=torch.float64, generator=g))
    for pick, joined in ((picks, 0), (picks_more, 1)):
        mine = train(seeded(Picking, pick=pick), lambda m: row_parallel(column_parallel(m, ["up"]), ["down"]), data)
        assert counts(thunder.last_traces(mine)[-1], "all_gather") == (joined,)


def test_what_lies_between_layers_is_computed_of_parts(ranks):
    for repeat in ("expand", "repeat_interleave", "in attention"):
        ranks(2)(grouped, repeat)
    ranks(2)(picking)


def test_layers_train_as_in_one_process(ranks):
    ranks(2)(gated)
    ranks(2)(scaled)
    ranks(2)(language, False)
    ranks(2)(language, True)


def shares_sequences(rank, size):
    data = batches(size, torch.float64, lambda g: torch.randint(0, 12, (3, 4), generator=g))
    mine = train(seeded(Language), lambda m: split_language(m, sequence_dim=1), data)
    forward, backward = thunder.last_traces(mine)[-1], thunder.last_backward_traces(mine)[-1]
    # tokens and attention are summed to parts; what q, k and v read and what the head reads is gathered; places and the
    # head's result are joined
    assert counts(forward, "all_reduce", "reduce_scatter", "all_gather") == (0, 2, 4)
    norms = [line for line in forward.bound_symbols if "layer_norm" in str(line)]
    assert [tuple(line.inputs[0].shape) for line in norms] == [(3, 2, 8)]  # of this rank's places
    # gradients of the norm, which are sums over places, are summed over ranks
    assert counts(backward, "all_reduce")[0] >= 1
    whole = seeded(Language)
    odd = torch.randint(0, 12, (3, 3), generator=torch.Generator().manual_seed(0))
    close(
        thunder.jit(split_language(seeded(Language), sequence_dim=1))(odd).detach(),
        whole(odd).detach(),
        "a sequence that the ranks do not divide",
    )


def test_ranks_share_sequences_between_layers(ranks):
    ranks(2)(shares_sequences)


class WithLoss(torch.nn.Module):
    """A norm written by hand, and losses of words, some of which do not count."""

    def __init__(self, reduction):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.up, self.down, self.reduction = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), reduction

    def forward(self, x):
        h = self.tokens(x)
        h = h + self.down(torch.nn.functional.gelu(self.up(h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt())))
        logits, words = self.head(h).flatten(0, 1), x.roll(-1, 1).flatten()
        return torch.nn.functional.cross_entropy(logits, words, ignore_index=3, reduction=self.reduction)


def losses_of_parts(rank, size, reduction, inside):
    """No rank has the logits of all words, nor a sequence's whole activations outside of layers; also where the
    backward is a part of the program."""

    def split(m):
        column_parallel(m, ["up", "head"], sequence_dim=1)
        return row_parallel(m, ["tokens", "down"], sequence_dim=1)

    torch.manual_seed(0)
    one = WithLoss(reduction).double()
    module = split(copy.deepcopy(one))
    compiled = thunder.jit(module, executors=[])

    def step(x):
        loss = module(x)
        loss.backward()
        return loss.detach()

    whole_step = thunder.jit(step, executors=[])
    for x in batches(1, torch.float64, lambda g: torch.randint(0, 12, (3, 4), generator=g), steps=3):
        one.zero_grad(), module.zero_grad()
        expected = one(x)
        expected.backward()
        if inside:
            loss = whole_step(x)
        else:
            loss = compiled(x)
            loss.backward()
        close(loss.detach(), expected.detach(), "loss", 1e-12)
        for (name, p), q in zip(module.named_parameters(), one.parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad, f"gradient of {name}", 1e-11)
    traces = [thunder.last_traces(whole_step if inside else compiled)[-1]]
    traces += [] if inside else [thunder.last_backward_traces(compiled)[-1]]
    values = [o for t in traces for b in t.bound_symbols for o in b.outputs if isinstance(o, TensorProxy)]
    assert not any(12 in o.shape and o.numel() > 12 * 8 for o in values), "logits of all words"
    if not inside:  # what two layers read, and the largest logits
        assert counts(traces[0], "all_gather", "reduce_scatter", "all_reduce") == (3, 2, 1)
    return sum(counts(t, "all_gather", "reduce_scatter", "all_reduce")[1] for t in traces)


def test_losses_of_parts_of_the_vocabulary(ranks):
    for reduction in ("mean", "sum"):
        module, whole_step = (ranks(2)(losses_of_parts, reduction, inside)[0] for inside in (False, True))
        assert module == whole_step  # as many sums


def no_class(rank, size):
    whole = WithLoss("mean").double()
    m = column_parallel(copy.deepcopy(whole), ["head"])
    x, h = torch.tensor([[1, 2, 30]]), torch.ones(3, 8).double()
    for reduction in ("mean", "sum"):
        loss = thunder.jit(lambda h, y, r=reduction: torch.nn.functional.cross_entropy(m.head(h), y, reduction=r))
        with pytest.raises(IndexError, match="out of range"):
            loss(h, x[0])
        ignored = torch.tensor([1, 2, -100])
        expected = torch.nn.functional.cross_entropy(whole.head(h), ignored, reduction=reduction)
        close(loss(h, ignored).detach(), expected.detach(), "a loss with an ignored target")


def test_a_target_that_is_no_class_is_an_error_on_each_rank(ranks):
    ranks(2)(no_class)


def no_row(rank, size):
    """An id that no rank has a row for."""
    whole = torch.nn.Embedding(8, 3, padding_idx=5).double()
    table = row_parallel(torch.nn.Sequential(copy.deepcopy(whole)), ["0"])
    compiled = thunder.jit(table)
    for wrong in (-1, 8, 30, -9):
        for x in (torch.tensor([[1, wrong, 3]]), torch.tensor([[1, wrong, 3]], dtype=torch.int32)):
            unused = thunder.jit(lambda x: (table(x), x + 1)[1])
            for call in (compiled, unused, thunder.jit(lambda x: table(x).square().sum().backward())):
                with pytest.raises(IndexError, match="index out of range"):
                    call(x)
    x = torch.arange(8).repeat(2, 1)
    (whole(x) * x[..., None]).sum().backward()
    (compiled(x) * x[..., None]).sum().backward()
    close(table[0].weight.grad.full_tensor(), whole.weight.grad, "the gradient of a table", 1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_an_id_that_no_rank_has_is_an_error_on_each_rank(ranks, size):
    ranks(size)(no_row)


def one_alone(rank, size):
    class Tied(torch.nn.Module):
        """The weight of a split embedding is used whole as well."""

        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(12, 8)

        def forward(self, x):
            h = self.embedding(x)
            return h @ self.embedding.weight.t() + self.embedding.weight.norm()

    train(seeded(Tied), lambda m: column_parallel(m, ["embedding"]), tokens(size))
    train(seeded(Gated), lambda m: column_parallel(m, ["gate"]), [x[:4] for x in batches(size, torch.float64)])
    train(seeded(Gated), lambda m: row_parallel(m, ["up", "down"]), [x[:4] for x in batches(size, torch.float64)])
    column_parallel(model := seeded(Language), "head")
    assert placement_of(model.head.weight).joining[0][1].dim == 0
    with pytest.raises(RuntimeError, match="parameter head.weight is distributed already"):
        row_parallel(model, ["head"])
    with pytest.raises(
        ValueError, match="dimension 0 of places.weight has 5 elements; valid: a multiple of the 2 ranks"
    ):
        row_parallel(model, ["places"])
    with torch.device("meta"):
        model = Language()
    with pytest.raises(RuntimeError, match="parameter head.weight is on the meta device"):
        column_parallel(model, ["head"])
    with pytest.raises(RuntimeError, match="tokens.weight is on the meta device"):
        ddp(model)
    with pytest.raises(TypeError, match="splits Linear and Embedding modules; norm is a LayerNorm"):
        column_parallel(model, ["norm"])


def test_layers_one_at_a_time_and_what_is_refused(ranks):
    ranks(2)(one_alone)


def with_data_parallelism(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "layers"))
    of_rank = lambda x: x.chunk(2)[mesh.get_local_rank("data")]
    for strategy in (FSDPType.ZERO2, FSDPType.ZERO3):
        prepare = lambda m: fsdp(
            split_language(m, mesh["layers"]), process_group=mesh["data"], sharding_strategy=strategy
        )
        mine = train(seeded(Language), prepare, tokens(size), of_rank)
        assert (
            local_of(mine._model.attention.o.weight).shape == (4, 4)
            and local_of(mine._model.attention.q.weight).shape == (2, 8)
            and local_of(mine._model.norm.weight).shape == (4,)
        )
        assert counts(thunder.last_traces(mine)[-1], "all_reduce") == (2,)
    whole, mine = (
        seeded(Language),
        thunder.jit(fsdp(split_language(seeded(Language), mesh["layers"]), process_group=mesh["data"])),
    )
    x = tokens(size)[0]
    whole(x).square().mean().backward()
    mine(of_rank(x)).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    close(clip_grad_norm_(mine, 0.01), expected, "norm over shards of parts")
    agree(mine, whole, 0, gradients=True)
    train(
        seeded(Gated),
        lambda m: ddp(split_gated(m, mesh["layers"]), process_group=mesh["data"], broadcast_from=None),
        [x[:4] for x in batches(1, torch.float64)],
        of_rank,
    )


def test_together_with_data_parallelism_on_a_mesh(ranks):
    ranks(4)(with_data_parallelism)
