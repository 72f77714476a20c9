"""Context parallelism: ranks share the positions of sequences."""

import pytest
import torch
import torch.distributed as dist

import thunder
from tests.distributed.training import batches, close
from thunder.core.proxies import like
from thunder.core.symbol import Symbol
from thunder.distributed import context_parallel, fsdp
from thunder.distributed.layouts import Axis, I, R, S
from thunder.distributed.redistribute import redistribute
from thunder.ops.families.attention import attended_in_blocks, flash_attention, flash_attention_backward

F = torch.nn.functional


def divides(rank, size):
    """Parts in each order: of one sequence or several in a row, folded or not. Joined they are the whole value, and
    gradients of copies are summed."""
    generator = torch.Generator().manual_seed(0)
    for groups, folded, dim in ((1, True, 1), (1, True, 0), (4, False, 0), (2, True, 0), (4, True, 1)):
        axis = Axis(dist.group.WORLD, "cp", "sum", groups=groups, folded=folded)
        x = torch.randn(16 * size, 16 * size, dtype=torch.float64, generator=generator).requires_grad_()
        weight = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        part = redistribute(x.detach(), axis, I, S(dim))
        rows = x.unflatten(dim, (groups, -1)).detach().chunk(2 * size if folded else size, dim + 1)
        own = [rows[rank], rows[2 * size - 1 - rank]] if folded else [rows[rank]]
        assert torch.equal(part, torch.cat(own, dim + 1).flatten(dim, dim + 1))
        assert torch.equal(redistribute(part, axis, S(dim), I), x)

        def loss(x, axis=axis, dim=dim, weight=weight):
            part = redistribute(x, axis, I, S(dim))
            whole = redistribute(part.sin(), axis, S(dim), R)
            return (redistribute(whole * weight, axis, R, S(dim))).sum()

        thunder.jit(loss)(x).backward()
        close(x.grad, (weight * x.detach().cos()) * 1.0, f"gradient of parts of {groups}")


def test_ranks_divide_sequences(ranks):
    ranks(2)(divides)


def test_attention_of_rows_in_blocks():
    """The rule of GPUs' kernels, here by the CPU's: results and gradients are those of a mask."""

    def forward(query, key, value, is_causal):
        return flash_attention(query, key, value, None, is_causal, None, False)

    def backward(g, query, key, value, out, sums, is_causal):
        return flash_attention_backward(g, query, key, value, out, sums, None, is_causal, None, False)

    in_blocks = lambda q, k, v: attended_in_blocks(q, k, v, forward, backward)
    attend = Symbol("attend", lambda q, k, v: like(q), decomposition=lambda q, k, v: next(in_blocks(q, k, v)))
    attend.vjp(in_blocks)

    torch.manual_seed(0)
    for rows, keys in ((4, 12), (8, 8), (5, 6)):
        q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64, requires_grad=True) for n in (rows, keys, keys))
        mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        wanted = F.scaled_dot_product_attention(q, k, v, mask)
        g = torch.randn_like(wanted)
        actual = thunder.jit(lambda q, k, v: attend(q, k, v) * 1.0)(q, k, v)
        close(actual.detach(), wanted.detach(), f"attention of {rows} rows to {keys} keys")
        pairs = (torch.autograd.grad(y, (q, k, v), g) for y in (actual, wanted))
        for name, mine, theirs in zip("qkv", *pairs, strict=True):
            close(mine, theirs, f"gradient of {name}")


class Model(torch.nn.Module):
    def __init__(self, **loss):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.qkv, self.o, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8)
        self.register_buffer("weight", torch.rand(12))
        self.loss = loss

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        q, k, v = self.qkv(self.norm(x)).split((8, 4, 4), -1)
        q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        options = {name: self.weight if value is True else value for name, value in self.loss.items()}
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), **options)


def names(trace):
    return [b.sym.name.removesuffix("_impl") for b in trace.bound_symbols]


def trains(rank, size):
    """Losses of all kinds; sequences that the ranks do not divide are computed by every rank. Keys and values are all
    that is gathered."""
    for length, loss in (
        (16, {}), (16, {"ignore_index": 3, "label_smoothing": 0.1}), (16, {"weight": True, "ignore_index": 2}),
        (16, {"reduction": "sum"}), (10, {}),
    ):  # fmt: skip
        one, module = Model(**loss).double(), context_parallel(Model(**loss).double())
        compiled = thunder.jit(module, executors=[])
        tokens, targets = batches(1, None, lambda g, n=length: torch.randint(0, 12, (3, n), generator=g), steps=2)
        losses, wanted = (m(tokens, targets) for m in (compiled, one))
        close(losses.detach(), wanted.detach(), f"loss {loss}")
        losses.backward()
        wanted.backward()
        for (name, p), q in zip(module.named_parameters(), one.parameters(), strict=True):
            close(p.grad, q.grad, f"gradient of {name} with {loss}")
        forward = names(thunder.last_traces(compiled)[-1])
        assert forward.count("all_gather") == (2 if length == 16 else 0)
        distributed = next(t for t in thunder.last_traces(compiled) if t.made_by[0] == "Distribute")
        keys = [b.args[1].shape[-2] for b in distributed.bound_symbols if b.sym.name == "lower_right_attention"]
        assert sum(keys) == (length * (2 * size + 1) // (2 * size) if length == 16 else 0)


def refuses(rank, size):
    with pytest.raises(RuntimeError, match=r"tokens.weight is distributed already: share positions first"):
        context_parallel(fsdp(Model()))
    with pytest.raises(TypeError, match="context_parallel takes an nn.Module"):
        context_parallel(lambda x: x)


def test_losses_of_shared_positions(ranks):
    ranks(2)(trains)
    ranks(2)(refuses)
