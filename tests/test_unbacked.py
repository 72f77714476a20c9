"""Sizes and numbers that data decides. Each program is compared with itself in eager, for data that selects nothing, one element, some, and all; compiled once."""

import pytest
import torch
import torch.nn.functional as F

import thunder

ROWS = 6


def data(seed: int, share: float) -> torch.Tensor:
    """[6, 4], with a share of the rows above 0, and nothing above 0 in the others."""
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(seed)) + 0.1
    x[round(share * ROWS) :] *= -1
    return x[torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed + 1))]


DATA = [data(0, 0.5), data(1, 0.0), data(2, 1 / ROWS), data(3, 1.0), data(4, 2 / ROWS)]


def assert_same(got, want) -> None:
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        assert (got.shape, got.dtype, got.stride(), got.requires_grad) == (want.shape, want.dtype, want.stride(), want.requires_grad)
        assert torch.equal(got, want) or torch.allclose(got, want, rtol=0, atol=0, equal_nan=True)
    elif isinstance(want, (tuple, list)) and not isinstance(want, torch.Size):
        assert len(got) == len(want)
        for a, b in zip(got, want):
            assert_same(a, b)
    else:
        assert got == want or got != got and want != want


def outcome(function, *args):
    """What a call gives, or the class and first words of what it raises."""
    try:
        return function(*args)
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error), str(error).split("\n")[0][:60]


def rows(x):
    return x[:, 0] > 0


def experts(x):
    """Mixture of experts: each token goes to the experts that its scores choose."""
    scores = torch.stack([x.sum(1), -x.sum(1), x[:, 0]], 1).softmax(-1)
    weights, chosen = scores.topk(2, -1)
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, 3).permute(2, 1, 0)
    for i in range(3):
        place, token = torch.where(mask[i])
        h = (x[None, token].reshape(-1, 4) * (i + 1)).tanh() * weights[token, place, None]
        out.index_add_(0, token, h)
    return out


def masked_loss(x):
    labels = torch.where(rows(x), x.argmax(1), -100)
    keep = labels != -100
    return F.cross_entropy(x[keep], labels[keep])


def filtered_boxes(x):
    keep = torch.where(x[:, 0] > 0)[0]
    boxes, scores = x[keep, :2], x[keep, 2]
    order = scores.argsort(descending=True)
    kept = boxes[order]
    return kept[: min(3, kept.shape[0])], scores[order]


def packed(x):
    lengths = (rows(x).long() * 3 + 1).tolist()
    flat = x.repeat_interleave(torch.tensor(4), 0)
    parts = flat[: sum(lengths)].split(lengths)
    return torch.stack([p.sum(0) for p in parts])


def scattered(x):
    out = torch.zeros(ROWS, 4)
    out[rows(x)] = x[rows(x)] * 2
    return out


def conditions(x):
    n = rows(x).sum().item()
    torch._check(n >= 0)
    torch._check(n <= ROWS, lambda: "too many")
    return torch.ones(n, 2) if n >= 0 else x


PROGRAMS = {
    "sum of what is selected": lambda x: x[x > 0].sum(),
    "mean over an unknown number": lambda x: x[x > 0].mean(),
    "rows": lambda x: x[rows(x)],
    "rows and one column": lambda x: x[rows(x), 1],
    "columns of rows": lambda x: x[rows(x)][:, 1:3] * 2,
    "two masks": lambda x: x[x[:, 0] > 0, torch.tensor([True, False, False, False])],
    "mask beside indices": lambda x: x[rows(x), torch.tensor([2])],
    "mask behind a slice": lambda x: x.t()[:, rows(x)],
    "mask of no dimensions": lambda x: x[x.sum() > 0],
    "assigned through a mask": scattered,
    "nonzero": lambda x: x.gt(0).nonzero(),
    "nonzero as tuple": lambda x: torch.nonzero(x > 0, as_tuple=True),
    "nonzero as index": lambda x: x[rows(x).nonzero().squeeze(1)],
    "where alone": lambda x: torch.where(rows(x))[0] + 1,
    "argwhere": lambda x: torch.argwhere(x > 0),
    "masked_select": lambda x: torch.masked_select(x, x > 0) * 2,
    "masked_select broadcast": lambda x: x.masked_select(rows(x)[:, None]).exp(),
    "unique": lambda x: (x > 0).int().unique(),
    "unique with all": lambda x: torch.unique(x.round().int(), return_inverse=True, return_counts=True),
    "unique of a dimension": lambda x: torch.unique(rows(x).int(), dim=0, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(rows(x), return_counts=True),
    "repeat_interleave": lambda x: x.repeat_interleave(rows(x).long() * 2, 0),
    "repeat_interleave alone": lambda x: torch.repeat_interleave(rows(x).long()),
    "bincount": lambda x: torch.bincount(rows(x).long() * 3),
    "one_hot": lambda x: F.one_hot(rows(x).long()),
    "size returned": lambda x: (x[rows(x)].shape[0], x[rows(x)].shape, x[rows(x)].numel(), len(x[rows(x)])),
    "size in arithmetic": lambda x: x.sum() / max(x[rows(x)].shape[0], 1),
    "reshaped": lambda x: x[rows(x)].reshape(-1, 2).sum(1),
    "viewed": lambda x: x[rows(x)].view(x[rows(x)].shape[0], 2, 2).transpose(1, 2).reshape(-1),
    "flattened and split": lambda x: x[rows(x)].flatten(0).view(-1, 4),
    "unsqueezed, expanded": lambda x: x[rows(x)][:, None].expand(-1, 3, -1).sum(1),
    "stacked, joined": lambda x: torch.cat([x[rows(x)], x[~rows(x)], x], 0),
    "stacked": lambda x: torch.stack([x[rows(x)], x[rows(x)] + 1]),
    "broadcast against one": lambda x: x[rows(x)] + x[:1],
    "broadcast against another count": lambda x: x[rows(x)] + x[x[:, 1] > 0],
    "broadcast of a column": lambda x: x[rows(x)] * x[rows(x)][:, :1],
    "broadcast against a constant size": lambda x: x[rows(x)][:, 0] + torch.ones(3, 1),
    "outer": lambda x: x[rows(x)][:, None, 0] * x[rows(x)][None, :, 1],
    "matmul": lambda x: x[rows(x)] @ x.t(),
    "gram": lambda x: x[rows(x)] @ x[rows(x)].t(),
    "inner": lambda x: x[rows(x)].t() @ x[rows(x)],
    "linear": lambda x: F.linear(x[rows(x)], torch.ones(3, 4), torch.ones(3)),
    "softmax": lambda x: x[rows(x)].softmax(0),
    "layer_norm": lambda x: F.layer_norm(x[rows(x)], (4,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, rows(x)], x[None], x[None]),
    "sort": lambda x: x[rows(x)].sort(0).values,
    "cumsum": lambda x: x[rows(x)].cumsum(0),
    "reductions": lambda x: (x[rows(x)].sum(0), x[rows(x)].mean(1), x[rows(x)].prod()),
    "arange": lambda x: torch.arange(x[rows(x)].shape[0]) * 2,
    "zeros": lambda x: torch.zeros(x[rows(x)].shape[0], 3) + torch.ones_like(x[rows(x)])[:, :3],
    "new_zeros": lambda x: x.new_zeros(x[rows(x)].shape),
    "index_add": lambda x: torch.zeros(4, 4).index_add(0, rows(x).nonzero().squeeze(1) % 4, x[rows(x)]),
    "scatter_add": lambda x: torch.zeros(4).scatter_add(0, rows(x).nonzero()[:, 0] % 4, x[rows(x), 0]),
    "gather": lambda x: x[rows(x)].gather(1, x[rows(x)].argmax(1, keepdim=True)),
    "embedding": lambda x: F.embedding(rows(x).nonzero().squeeze(-1), torch.arange(24.0).view(6, 4)),
    "sliced by its own size": lambda x: x[: x[rows(x)].shape[0]],
    "sliced from its own size": lambda x: x[x[rows(x)].shape[0] :] * 2,
    "slice of what is selected": lambda x: x[rows(x)][:2],
    "last ones of what is selected": lambda x: x[rows(x)][-2:],
    "every second": lambda x: x[rows(x)][::2],
    "shifted": lambda x: x[rows(x)][1:] - x[rows(x)][:-1],
    "selected twice": lambda x: x[rows(x)][x[rows(x)][:, 1] > 0.5],
    "split in two": lambda x: x[rows(x)].split(2, 1)[1],
    "chunks of the other dimension": lambda x: x[rows(x)].chunk(2, -1)[0],
    "permuted, flipped, rolled": lambda x: x[rows(x)].permute(1, 0).flip(1).roll(1, 0),
    "padded": lambda x: F.pad(x[rows(x)], (0, 0, 1, 2)),
    "triangle": lambda x: torch.ones(x[rows(x)].shape[0], x[rows(x)].shape[0]).tril(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x[rows(x)], x),
    "written in place": lambda x: x[rows(x)].mul_(2).add_(x[rows(x)]),
    "view written in place": lambda x: (lambda y: (y[:, 0].zero_(), y)[1])(x[rows(x)]),
    "dropout in eval": lambda x: F.dropout(x[rows(x)], 0.5, False),
    "opaque operation": lambda x: torch.fft.fft(x[rows(x)], dim=1).real,
    "opaque operation that changes the size": lambda x: torch.nn.functional.unfold(x[None, None, rows(x)], (1, 2)) if False else torch.combinations(torch.arange(3)),
    "item times a tensor": lambda x: x * x.max().item(),
    "item of integers": lambda x: x + rows(x).sum().item(),
    "item in arithmetic": lambda x: (x * 2 ** rows(x).sum().item() / 3) if False else x * (rows(x).sum().item() * 2 + 1) / 3,
    "item returned": lambda x: (x.max().item(), rows(x).sum().item(), rows(x).sum().item() // 2),
    "item as a size": lambda x: torch.zeros(int(rows(x).sum().item())),
    "int as a size": lambda x: torch.ones(int(rows(x).sum()), 3),
    "int of a float": lambda x: torch.ones(int(x.abs().max() * 3)),
    "float of a tensor": lambda x: x * float(x.max()),
    "item as the end of a slice": lambda x: x[: rows(x).sum().item()],
    "tensor as the end of a slice": lambda x: x[: rows(x).sum()],
    "tensor as the start of a slice": lambda x: x[rows(x).sum() :],
    "item from the end": lambda x: x[: -rows(x).sum().item()],
    "item as an index": lambda x: x[x[:, 0].argmax().item()],
    "item as a bound": lambda x: x.clamp(max=x[0, 0].item()),
    "item filled in": lambda x: torch.full((2, 2), x.max().item()),
    "item to a tensor": lambda x: torch.tensor([rows(x).sum().item(), 3]),
    "items in a list": lambda x: sum(rows(x).long().tolist()),
    "narrow from a tensor": lambda x: x.narrow(0, rows(x).sum() // 2, 2),
    "tensor_split at places in a tensor": lambda x: x.tensor_split(torch.stack([rows(x).sum() // 2, rows(x).sum()])),
    "minimum of a size": lambda x: x[: min(x[rows(x)].shape[0], 2)],
    "checked": conditions,
    "the size is at least zero": lambda x: x + 1 if x[rows(x)].shape[0] >= 0 else x,
    "a size equals itself": lambda x: (lambda y: y + 1 if y.exp().shape[0] == y.shape[0] else y)(x[rows(x)]),
    "experts": experts,
    "loss over a mask": masked_loss,
    "boxes": filtered_boxes,
    "packed sequences": packed,
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_programs_equal_eager(name):
    program = PROGRAMS[name]
    compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    for x in DATA:
        want = outcome(program, x)
        assert_same(outcome(compiled, x), want)
    assert thunder.cache_misses(compiled) == 1


# ---------------------------------------------------------------------------------------------------------------- derivatives

DIFFERENTIATED = {
    "sum of what is selected": lambda x, w: x[x > 0].sum(),
    "rows": lambda x, w: (x[rows(x)] @ w).tanh().sum(),
    "mean over an unknown number": lambda x, w: (x[rows(x)] @ w).pow(2).mean(),
    "masked_select": lambda x, w: (masked(x @ w) * 3).exp().sum(),
    "masked_select broadcast": lambda x, w: (x @ w).masked_select(rows(x)[:, None]).sum(),
    "nonzero as index": lambda x, w: ((x @ w)[rows(x).nonzero().squeeze(1)] ** 2).sum(),
    "where as index": lambda x, w: (x[torch.where(rows(x))[0]] @ w).relu().sum(),
    "repeat_interleave": lambda x, w: (x.repeat_interleave(rows(x).long() + 1, 0) @ w).sin().sum(),
    "assigned through a mask": lambda x, w: ((x @ w).index_put((rows(x),), x[rows(x)] @ w * 2)).sum(),
    "setitem through a mask": lambda x, w: assigned(x, w).pow(2).sum(),
    "index_add": lambda x, w: torch.zeros(4, 3).index_add(0, rows(x).nonzero()[:, 0] % 4, x[rows(x)] @ w).pow(2).sum(),
    "size in the derivative": lambda x, w: (x[rows(x)] @ w).reshape(-1).view(x[rows(x)].shape[0], 3).softmax(0).pow(2).sum(),
    "divided by a size": lambda x, w: (x @ w).sum() / max(x[rows(x)].shape[0], 1),
    "broadcast against one row": lambda x, w: ((x[rows(x)] @ w) * w[:1]).sum(),
    "broadcast against another count": lambda x, w: ((x[rows(x)] @ w)[:, :1] * (x[rows(x)] @ w)[:1, :]).sum(),
    "two counts": lambda x, w: ((x[rows(x)] @ w) * (x[x[:, 0] > 0] @ w)).sum(),
    "joined": lambda x, w: torch.cat([x[rows(x)] @ w, x @ w]).cumsum(0).sum(),
    "split at numbers": lambda x, w: sum(p.sum(0).pow(2).sum() for p in (x @ w).split((lambda n: [n, ROWS - n])(rows(x).sum().item()))),
    "slice at a number": lambda x, w: (x @ w)[: rows(x).sum().item()].pow(2).sum(),
    "selected by a number": lambda x, w: (x @ w)[x[:, 0].argmax().item()].pow(2).sum(),
    "scaled by a number": lambda x, w: ((x @ w) * x.detach().max().item()).pow(2).sum(),
    "layer_norm": lambda x, w: F.layer_norm(x[rows(x)], (4,)).matmul(w).pow(3).sum(),
    "sort": lambda x, w: (x[rows(x)] @ w).sort(0).values.cumsum(0).sum(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, rows(x)], x[None], x[None]).matmul(w).sum(),
    "opaque operation": lambda x, w: torch.special.i0e(x[rows(x)] @ w).sum(),
    "opaque operation of two": lambda x, w: torch.cdist(x[rows(x)] @ w, x @ w).sum(),
    "cross entropy": lambda x, w: F.cross_entropy((x @ w)[rows(x)], (x @ w).argmax(1)[rows(x)]),
    "experts": lambda x, w: experts(x).matmul(w).pow(2).sum(),
    "boxes": lambda x, w: sum(p.sum() for p in filtered_boxes(x)) + w.sum(),
    "written in place": lambda x, w: (x[rows(x)] @ w).mul_(2).add_(1).pow(2).sum(),
    "checkpointed": lambda x, w: torch.utils.checkpoint.checkpoint(selected_product, x, w, use_reentrant=False),
}


def masked(y):
    return y.masked_select(y > 0)


def assigned(x, w):
    y = (x @ w).clone()
    y[rows(x)] = (x @ w)[rows(x)] * 3
    return y


def selected_product(x, w):
    y = x[rows(x)] @ w
    return (y.reshape(y.shape[0], 3, 1) * y.shape[0]).sin().sum()


def gradients(function, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = function(x, w)
    return out.detach(), *torch.autograd.grad(out, (x, w), allow_unused=True)


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_gradients_equal_eagers(name):
    program, w = DIFFERENTIATED[name], torch.linspace(-1, 1, 12).reshape(4, 3)
    compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    for x in DATA:
        want, got = outcome(gradients, program, x, w), outcome(gradients, compiled, x, w)
        assert len(got) == len(want), (got, want)
        for g, e in zip(got, want):
            assert (g is None) == (e is None)
            if e is not None:
                torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert thunder.cache_misses(compiled) == 1
