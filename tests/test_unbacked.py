"""Data-dependent sizes and numbers. Each program is compared with itself in eager, for data that selects nothing,
one element, some, and all; compiled once."""

import math
import re
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

import thunder
from tests.counting import calls_during
from thunder.core.rewrite import rewrite
from thunder.errors import CaptureError
from thunder.extend import FusionExecutor, OperatorExecutor, deregister_executor, register_executor

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
        assert (got.shape, got.dtype, got.stride(), got.requires_grad) == (
            want.shape,
            want.dtype,
            want.stride(),
            want.requires_grad,
        )
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
        position, token = torch.where(mask[i])
        h = (x[None, token].reshape(-1, 4) * (i + 1)).tanh() * weights[token, position, None]
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
    sorted_boxes = boxes[order]
    return sorted_boxes[: min(3, sorted_boxes.shape[0])], scores[order]


def packed(x):
    lengths = (rows(x).long() * 3 + 1).tolist()
    flat = x.repeat_interleave(torch.tensor(4), 0)
    parts = flat[: sum(lengths)].split(lengths)
    return torch.stack([p.sum(0) for p in parts])


def scattered(x):
    out = torch.zeros(ROWS, 4)
    out[rows(x)] = x[rows(x)] * 2
    return out


def written_through_masks(x):
    y = x.clone()
    y[rows(x)] += 1
    y[x > 0.5] *= 2
    y[rows(x).nonzero()[:, 0], 1] = 7.0
    return y


def written_through_slices(x):
    y, n = x.clone(), rows(x).sum().item()
    y[:n] = 0
    y[n:].add_(1)
    y[:n] += 3
    y[:, 0][:n] += 2
    return y


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
    "written through masks and places": written_through_masks,
    "written through slices at numbers": written_through_slices,
    "dropout in eval": lambda x: F.dropout(x[rows(x)], 0.5, False),
    "opaque operation": lambda x: torch.fft.fft(x[rows(x)], dim=1).real,
    "opaque operation that changes the size": lambda x: torch.nn.functional.unfold(x[None, None, rows(x)],
    (1, 2)) if False else torch.combinations(torch.arange(3)),
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
    "conditions returned": lambda x: [x[rows(x)].shape[0] > 3, {"most": x.max().item() <= 0.5},
    torch.sym_not(x[rows(x)].shape[0] == 0), isinstance(x.max().item() > 0, bool)],
    "equal": lambda x: (torch.equal(x, x.abs()), x.equal(x + 0), x.equal(x[0]),
    torch.equal(x[x > 0], x[x[:, 0] > 0].reshape(-1)), type(x.equal(x + 0))),
    "allclose": lambda x: (torch.allclose(x, x.abs()), x.allclose(x * (1 + 1e-7)),
    torch.allclose(input=x, other=x + 1, atol=2.0), x.allclose(x / 0 * 0, equal_nan=True)),
    "equal constants": lambda x: x + 1 if torch.equal(torch.arange(3),
    torch.tensor([0, 1, 2])) and not torch.allclose(torch.ones(2), torch.zeros(2)) else x,
    "is_nonzero": lambda x: (torch.is_nonzero(rows(x).sum()), (x > 0).any().is_nonzero()),
    "bools": lambda x: ((x > 0).all().item(), rows(x).tolist(), (x > 0).all().item(), int((x > 0).any())),
    "a checked bool": lambda x: (lambda same: (torch._check(torch.sym_not(same)),
    x + 1 + same if not same else x)[1])(torch.equal(x, x + 1)),
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


# ----------------------------------------------------------------------------------------------------------------
# derivatives

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
    "size in the derivative": lambda x, w: (
        (x[rows(x)] @ w).reshape(-1).view(x[rows(x)].shape[0], 3).softmax(0).pow(2).sum()
    ),
    "divided by a size": lambda x, w: (x @ w).sum() / max(x[rows(x)].shape[0], 1),
    "broadcast against one row": lambda x, w: ((x[rows(x)] @ w) * w[:1]).sum(),
    "broadcast against another count": lambda x, w: ((x[rows(x)] @ w)[:, :1] * (x[rows(x)] @ w)[:1, :]).sum(),
    "two counts": lambda x, w: ((x[rows(x)] @ w) * (x[x[:, 0] > 0] @ w)).sum(),
    "joined": lambda x, w: torch.cat([x[rows(x)] @ w, x @ w]).cumsum(0).sum(),
    "split at numbers": lambda x, w: sum(
        p.sum(0).pow(2).sum() for p in (x @ w).split((lambda n: [n, ROWS - n])(rows(x).sum().item()))
    ),
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
    "assigned to a part of what is selected": lambda x, w: assigned_to_a_part((x @ w)[rows(x)][:, 0]).pow(2).sum(),
    "written in place": lambda x, w: (x[rows(x)] @ w).mul_(2).add_(1).pow(2).sum(),
    "checkpointed": lambda x, w: torch.utils.checkpoint.checkpoint(selected_product, x, w, use_reentrant=False),
}


def masked(y):
    return y.masked_select(y > 0)


def assigned(x, w):
    y = (x @ w).clone()
    y[rows(x)] = (x @ w)[rows(x)] * 3
    return y


def assigned_to_a_part(y):
    places = (y > 0).nonzero()[:, 0]
    out = torch.zeros_like(y)
    out[places] = y[places]
    return out


def selected_product(x, w):
    y = x[rows(x)] @ w
    return (y.reshape(y.shape[0], 3, 1) * y.shape[0]).sin().sum()


def gradients(function, x, w):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = function(x, w)
    return out.detach(), *torch.autograd.grad(out, (x, w), allow_unused=True)


@pytest.mark.parametrize("name", DIFFERENTIATED)
@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_gradients_equal_eagers(name, budget):
    program, w = DIFFERENTIATED[name], torch.linspace(-1, 1, 12).reshape(4, 3)
    compiled = thunder.jit(program, memory_budget=budget, debug_options=thunder.DebugOptions(check_traces=True))
    for x in DATA:
        want, got = outcome(gradients, program, x, w), outcome(gradients, compiled, x, w)
        assert len(got) == len(want), (got, want)
        for g, e in zip(got, want):
            assert (g is None) == (e is None)
            if e is not None:
                torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert thunder.cache_misses(compiled) == 1


def test_a_backward_that_is_differentiated():
    w = torch.linspace(-1, 1, 12).reshape(4, 3)

    def second(function, x):
        x, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x, w_), w_, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), (x, w_))

    for name in ("rows", "masked_select", "two counts", "size in the derivative", "repeat_interleave", "experts"):
        compiled = thunder.jit(DIFFERENTIATED[name])
        for x in DATA:
            torch.testing.assert_close(second(compiled, x), second(DIFFERENTIATED[name], x), rtol=1e-4, atol=1e-4)


def test_numbers_beside_differentiated_results():
    def program(x, w):
        y = x[rows(x)] @ w
        return y, y.shape, y.shape[0] + 1, {"largest": x.detach().max().item()}

    compiled = thunder.jit(program)
    for x in DATA:
        w = torch.ones(4, 3, requires_grad=True)
        got, want = compiled(x, w), program(x, w)
        assert_same(got[:3], want[:3])
        assert got[3] == want[3]
        assert torch.equal(*(torch.autograd.grad(result[0].sum(), w)[0] for result in (got, want)))
    assert thunder.cache_misses(compiled) == 1


def test_transforms_inside_programs():
    w = torch.linspace(-1, 1, 12).reshape(4, 3)
    loss = DIFFERENTIATED["size in the derivative"]
    for program in (
        lambda x: torch.func.grad(loss, 1)(x, w),
        lambda x: torch.func.grad(lambda w: torch.func.grad(loss, 1)(x, w).pow(2).sum())(w),
        lambda x: torch.func.jvp(lambda w: DIFFERENTIATED["rows"](x, w), (w,), (torch.ones_like(w),)),
    ):
        compiled = thunder.jit(program)
        for x in DATA:
            torch.testing.assert_close(compiled(x), program(x), rtol=1e-4, atol=1e-4)
        assert thunder.cache_misses(compiled) == 1


@pytest.mark.parametrize("inner", [lambda x: x[x > 0], lambda x: x * x.max().item()], ids=["mask", "item"])
def test_vmap_refuses_as_pytorch_does(inner):
    with pytest.raises(RuntimeError) as eager:
        torch.vmap(inner)(DATA[0])
    with pytest.raises(RuntimeError) as ours:
        thunder.jit(lambda x: torch.vmap(inner)(x))(DATA[0])
    assert str(ours.value).split()[:8] == str(eager.value).split()[:8]


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(8, 4)
        self.experts = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x):
        tokens = x.view(-1, 8)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, position = torch.where(chosen == i)
            out.index_add_(0, token, expert(tokens[token]) * weights[token, position, None])
        return out.view(x.shape)


def test_experts_train_as_in_eager():
    torch.manual_seed(0)
    model, reference = Experts(), Experts()
    reference.load_state_dict(model.state_dict())
    compiled = thunder.jit(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, reference)]
    for step in range(6):
        x = torch.randn(2, 3 if step < 5 else 1, 8, generator=torch.Generator().manual_seed(step))
        losses = []
        for m, optimizer in zip((compiled, reference), optimizers):
            optimizer.zero_grad()
            losses.append((m(x) - x.flip(0)).pow(2).mean())
            losses[-1].backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
    for a, b in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(a, b)
    assert thunder.cache_misses(compiled) == 2  # one for each shape of the input


@pytest.mark.parametrize("kind", [torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN])
def test_recurrent_networks_on_packed_sequences(kind):
    torch.manual_seed(0)
    network = kind(4, 5, batch_first=True, bidirectional=True)

    def program(x):
        lengths = rows(x).view(3, 2).sum(1) + 1
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x.view(3, 2, 4).repeat(1, 2, 1), lengths, batch_first=True, enforce_sorted=False
        )
        return torch.nn.utils.rnn.pad_packed_sequence(network(packed)[0], batch_first=True)

    def gradients_of(function, x):
        x = x.clone().requires_grad_()
        out, lengths = function(x)
        return out, lengths, *torch.autograd.grad(out.sum(), (x, *network.parameters()))

    compiled = thunder.jit(program)
    for x in DATA:
        for got, want in zip(gradients_of(compiled, x), gradients_of(program, x), strict=True):
            torch.testing.assert_close(got, want)
    assert thunder.cache_misses(compiled) == 1


@pytest.mark.parametrize(
    "name",
    [
        "rows",
        "broadcast against another count",
        "item as the end of a slice",
        "size returned",
        "stacked, joined",
        "reshaped",
    ],
)
def test_beside_symbolic_sizes(name):
    program = PROGRAMS[name]
    compiled = thunder.jit(program, cache="symbolic values")
    for x in [*DATA, torch.cat([DATA[0], DATA[2]]), torch.cat(DATA)]:
        assert_same(outcome(compiled, x), outcome(program, x))
    assert thunder.cache_misses(compiled) < 4


def contrasted(a, b):
    """As SimCLR's loss takes the diagonals of similarities out."""
    n = a.shape[0]
    others = ~torch.eye(n, dtype=torch.bool)
    x, y = a[others].view(n, -1), b[others].view(n, -1)
    return torch.cat([torch.cat([a, x], 1), torch.cat([b, y], 1)], 0).sin().sum()


def test_gradients_beside_symbolic_sizes():
    """Of a slice whose length is a number of the arguments', beside others that are the same in many examples."""
    compiled = thunder.jit(contrasted, fallback="error")
    for n in (8, 12, 5):
        g = torch.Generator().manual_seed(n)
        inputs = [torch.randn(n, n, generator=g, requires_grad=True) for _ in range(2)]
        want = torch.autograd.grad(contrasted(*inputs), inputs)
        for ours, theirs in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
            assert torch.equal(ours, theirs)
    assert len(compiled.programs) == 2


def test_under_autocast():
    def program(x, w):
        return F.linear(x[rows(x)], w).softmax(0)

    compiled = thunder.jit(program)
    for x in DATA:
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(compiled(x, torch.ones(3, 4)), program(x, torch.ones(3, 4)))


# ----------------------------------------------------------------------------------------------------------------
# traces


def test_sizes_are_printed_by_name():
    def program(x):
        y = x[x > 0]
        return y.reshape(y.shape[0] * 1, 1) + y.sum()

    compiled = thunder.jit(program)
    compiled(DATA[0])
    text = thunder.last_traces(compiled)[-1].python(memory=True, include_decorators=False)
    assert_expected_inline(
        text.partition("import torch\n\n")[2],
        """\
def computation(x):
  # x: "cpu f32[6, 4]"
  t0 = torch.gt(x, float32_0)  # t0: "cpu b8[6, 4]"
  y = Tensor.__getitem__(x, t0)  # y: "cpu f32[u0]"
  del x, t0
  u0 = size(y, 0)
  t2 = torch.reshape(y, (u0, 1))  # t2: "cpu f32[u0, 1]"
  del u0
  t3 = torch.sum(y)  # t3: "cpu f32[]"
  del y
  t4 = torch.add(t2, t3)  # t4: "cpu f32[u0, 1]"
  del t2, t3
  return t4""",
    )


def test_examples_are_checked_when_the_program_runs():
    compiled = thunder.jit(lambda x: x[x[:, 0].argmax().item()])
    compiled(DATA[0])
    text = thunder.last_traces(compiled)[-1].python(print_depth=1)
    assert "check_sizes(t2, (4,), 'getitem')" in text


def test_a_size_that_was_not_foreseen_is_an_error():
    """An operation whose author told thunder less than it does: what comes out is looked at."""

    five = thunder.opaque(
        lambda x: x[:5].clone(),
        meta=lambda x: torch.empty(5 if x.shape[0] >= 0 and x.shape[0] != 4 else 5, 4),
        name="five",
    )
    compiled = thunder.jit(lambda x: five(x[rows(x)]) * 2)
    assert torch.equal(compiled(data(0, 1.0)), data(0, 1.0)[:5] * 2)
    with pytest.raises(
        RuntimeError,
        match=r"the result of five has the shape \[3, 4\], where the compiled program was made for \[5, 4\]",
    ):
        compiled(DATA[0])


def test_sizes_that_data_decides_are_not_fused():
    taken = []

    class Joining(FusionExecutor):
        def fuse(self, region, counter):
            taken.append([line.sym.name for line in region.bound_symbols])
            return None

    executor = Joining("joining_sizes")
    register_executor(executor)
    for name in ("ltorch.add", "ltorch.mul", "ltorch.exp"):
        executor.register_supported(name)
    try:
        compiled = thunder.jit(lambda x: ((x * 2).exp(), (x[x > 0] * 2).exp() + 1), executors=[executor])
        compiled(DATA[0])
    finally:
        deregister_executor(executor)
    assert taken == [["mul", "exp"]]


def two_counts(x):
    y, z = x[x > 0].exp(), x[x < 0.5].exp()
    return y.sin().mul(2), z.mul(3)


def as_large_as_one_row(a, *rest) -> bool:
    """What no pass may ask: it depends on data."""
    return a.shape == (4,)


class Asking(FusionExecutor):
    def should_fuse(self, region):
        return True

    def fuse(self, region, counter):
        assert as_large_as_one_row(region.inputs[0])

    def can_fuse(self, operation):
        return operation.sym.name in ("sin", "mul") and (operation.sym.name == "sin" or super().can_fuse(operation))


def test_executors_that_ask_about_sizes_take_nothing():
    checks, rewrites = OperatorExecutor("checks_sizes"), OperatorExecutor("rewrites_by_sizes")
    checks.register_implementation("ltorch.exp", execution_transform=lambda a: a, checker=as_large_as_one_row)
    rewrites.register_implementation("ltorch.exp", execution_transform=lambda a: a if as_large_as_one_row(a) else -a)
    fuses = Asking("fuses_by_sizes")
    fuses.register_supported("ltorch.mul", as_large_as_one_row)
    executors = [register_executor(e) for e in (checks, rewrites, fuses)]
    try:
        compiled = thunder.jit(two_counts, executors=executors, fallback="error")
        for x in DATA:
            for ours, theirs in zip(compiled(x), two_counts(x), strict=True):
                assert_same(ours, theirs)
    finally:
        for executor in executors:
            deregister_executor(executor)
    assert len(compiled.programs) == 1


def test_rules_that_ask_about_sizes_leave_the_operation():
    def rule(operation, out):
        out.trace(lambda *args: args[0], operation) if operation.sym.name == "exp" else out.write(operation)
        assert operation.sym.name != "exp" or as_large_as_one_row(*operation.args)

    asks = thunder.Pass("Asks", lambda trace, _: rewrite(trace, rule, optional=True))
    compiled = thunder.jit(two_counts, passes=lambda known: known.before("Partition", asks), fallback="error")
    for x in DATA:
        for ours, theirs in zip(compiled(x), two_counts(x), strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize(
    "decides",
    [
        lambda trace: [as_large_as_one_row(b.output) for b in trace.bound_symbols],
        lambda trace: [int(b.output.shape[0]) for b in trace.bound_symbols if b.sym.name == "exp"],
    ],
)
def test_a_pass_that_asks_about_sizes_is_left_out(decides):
    asks = thunder.Pass("Asks", lambda trace, _: decides(trace) and trace.replace(bound_symbols=[]))
    compiled = thunder.jit(two_counts, passes=lambda known: known.before("Partition", asks), fallback="error")
    with pytest.warns(UserWarning, match="the pass Asks is left out: .*known only when the program runs"):
        results = compiled(DATA[0])
    for ours, theirs in zip(results, two_counts(DATA[0]), strict=True):
        assert_same(ours, theirs)


# ----------------------------------------------------------------------------------------------------------------
# what is decided, and what is checked

DECIDED = {  # with the number of programs for DATA
    "a branch on a size": (lambda x: x if x[rows(x)].shape[0] == 0 else -x, 2),
    "a branch on a number": (lambda x: x if x.max().item() > 0.5 else -x, 2),
    "a branch on a tensor": (lambda x: x if x.sum() > 0 else -x, 2),
    "a loop over what is selected": (lambda x: [row.sum() for row in x[rows(x)]], 5),
    "a range": (lambda x: sum(x[i].sum() for i in range(rows(x).sum().item())), 5),
    "a text": (lambda x: f"{x[rows(x)].shape[0]} rows", 1),
    "a dimension that may go": (lambda x: x[rows(x)].squeeze(), 2),
    "a branch on equality": (lambda x: x if torch.equal(x, x.abs()) else -x, 2),
    "a branch on a bool": (lambda x: x if (x > 0).all().item() else -x, 2),
    "a condition negated": (lambda x: not torch.allclose(x, x.abs()), 2),
    "a condition compared": (lambda x: (x.max().item() > 0.5) == True, 2),  # noqa: E712
    "conditions joined": (lambda x: (x.max().item() > 0.5) & (x.min().item() > 0.5), 2),
    "a condition as a text": (lambda x: f"{x.max().item() > 0.5}", 2),
    "a condition as an operand": (lambda x: x * (x.max().item() > 0.5), 2),
    "a condition in a tensor": (lambda x: torch.tensor([x.max().item() > 0.5]), 2),
    "a condition as a number": (lambda x: x * int(x[rows(x)].shape[0] > 3), 2),
    "parts as many as a size": (lambda x: x[rows(x)].split(2), 4),
    "the sign of an exponent": (lambda x: x * 2 ** rows(x).sum().item(), 1),
    "a list as long as a size": (lambda x: x[rows(x)].tolist(), 5),
    "an element of a list": (lambda x: list(range(9))[rows(x).sum().item()], 5),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_what_a_program_decides_by_data(name):
    program, programs = DECIDED[name]
    compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
    for x in DATA:
        assert_same(outcome(compiled, x), outcome(program, x))
    assert thunder.cache_misses(compiled) == programs
    assert all("lambda x" in decision.where[3] for entry in compiled.programs for decision in entry.path)


def test_memory_written_and_read_at_places_that_data_decides_is_refused():
    program = lambda x: (lambda y, n: y[n:].copy_(y[: ROWS - n]))(x.clone(), rows(x).sum().item())  # noqa: E731
    with pytest.raises(CaptureError, match="at data-dependent places") as raised:
        thunder.jit(program)(DATA[0])
    assert raised.value.remedy and raised.value.location[0] == __file__ and "lambda x" in raised.value.location[3]


def test_checks_run_with_the_program():
    def program(x):
        n = x[rows(x)].shape[0]
        torch._check(n > 1, lambda: f"more than {1} row is needed")
        return x.sum() if n != 1 and n >= 2 else x

    compiled = thunder.jit(program)
    for x in DATA:
        assert_same(outcome(compiled, x), outcome(program, x))
    assert thunder.cache_misses(compiled) == 1
    with pytest.raises(RuntimeError, match="more than 1 row is needed"):
        compiled(DATA[1])


CHECKED = {
    "all": lambda x: torch._check_tensor_all(x > 0),
    "all, in words": lambda x: torch._check_tensor_all(x > 0, lambda: "positive"),
    "all, another error": lambda x: torch._check_tensor_all_with(ValueError, x > 0, lambda: "positive"),
    "a number": lambda x: torch._check((x > 0).sum().item() == 3, lambda: "three"),
    "a value": lambda x: torch._check_value((x > 0).sum().item() == 3, lambda: "three"),
    "an index": lambda x: torch._check_index((x > 0).sum().item() == 3),
    "a size": lambda x: torch._check_is_size(int(x.sum().item())),
    "no data": lambda x: torch._check(x.shape[0] == 3),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.filterwarnings("ignore:_check_is_size:FutureWarning")
def test_checks_of_pytorch_raise_its_errors(name):
    def program(x):
        CHECKED[name](x)
        return x * 2

    compiled = thunder.jit(program, fallback="error")
    for x in (torch.ones(3), torch.full((3,), 2.0), -torch.ones(3), torch.ones(3)):
        assert_same(outcome(compiled, x), outcome(program, x))
    assert thunder.cache_misses(compiled) <= 2


def test_equality_is_computed_by_pytorch():
    nan = torch.tensor([1.0, math.nan])
    for a, b in ((nan, nan.clone()), (nan, nan), (nan.int(), nan), (nan, nan.double()), (nan, torch.ones(3))):
        for function in (torch.equal, torch.allclose):
            assert_same(
                outcome(thunder.jit(lambda a, b, function=function: function(a, b)), a, b), outcome(function, a, b)
            )
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        thunder.jit(torch.is_nonzero)(nan)


def test_conditions_that_are_checked_decide():
    def program(x, y):
        a, b = x[x > 0], y[y > 0]
        torch._check(a.shape[0] == b.shape[0])
        return (a * b + b) if a.shape[0] == b.shape[0] else a

    compiled = thunder.jit(program)
    for x in DATA:
        assert_same(compiled(x, x * 2), program(x, x * 2))
    with pytest.raises(RuntimeError, match="Expected"):
        compiled(DATA[0], DATA[1])


def test_symbolic_functions():
    def program(x):
        n = x[rows(x)].shape[0]
        return (
            x * torch.sym_max(n, 2),
            torch.sym_min(n, 2),
            torch.sym_float(n) / 2,
            torch.sym_int(n),
            math.ceil(n / 2),
            sum([n, n]),
            max(n, 0),
            min(n, 2, 7),
        )

    compiled = thunder.jit(program)
    for x in DATA:
        assert_same(compiled(x), program(x))
    assert thunder.cache_misses(compiled) == 1


def test_a_negative_number_is_no_size():
    compiled = thunder.jit(lambda x: torch.zeros(int(x.sum())))
    assert compiled(torch.ones(3)).shape == (3,)
    with pytest.raises(RuntimeError) as eager:  # versions of PyTorch word it differently
        torch.zeros(-3)
    with pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        compiled(-torch.ones(3))


def test_errors_of_the_run_are_pytorchs():
    for program in (
        lambda x: x[rows(x)] + torch.ones(2, 4),
        lambda x: torch.stack([x[rows(x)], x[:3]]),
        lambda x: x[rows(x)].view(-1, 8),
        lambda x: x.t() @ x[rows(x)],
    ):
        compiled = thunder.jit(program)
        for x in DATA:
            assert_same(outcome(compiled, x), outcome(program, x))


def test_what_is_saved_and_as_large_as_data_decides_is_listed_without_a_size():
    compiled = thunder.jit(lambda x: x[rows(x)].exp().sum() * x[rows(x)].shape[0])
    compiled(DATA[0].clone().requires_grad_())
    saved = thunder.examine.saved_for_backward(compiled)
    assert {v.kind: v.nbytes for v in saved}["cpu f32[u0, 4]"] is None
    assert "?" in str(saved) and "1 tensors of data-dependent sizes" in str(saved)


def test_tensors_among_sizes_are_numbers():
    def fn(x, n):
        padded = F.pad(x[None], (1, torch.ceil(n / 2).to(torch.int64)), mode="reflect")
        return padded.sum() * 2 + F.pad(x, (0, n)).exp().sum() + F.pad(x, (n, n)).sin().sum(), padded.shape[-1]

    compiled = thunder.jit(fn, fallback="error")
    for n in (2, 4, 2):
        x, n = torch.randn(4, 4, requires_grad=True), torch.tensor(n)
        (ours, size), (theirs, expected) = compiled(x, n), fn(x, n)
        assert torch.equal(ours, theirs) and size == expected
        assert torch.equal(*(torch.autograd.grad(y, x)[0] for y in (ours, theirs)))


def test_tensors_among_sizes_whose_annotation_is_one_int():
    """`size: int | None` of interpolate takes a tuple as well."""

    def fn(x, sizes):
        scaled = (F.interpolate(x, size=(h, w), mode="bilinear", align_corners=True) for h, w in zip(sizes, sizes))
        return torch.cat([F.pad(y, (0, 5 - h, 0, 5 - h)) for y, h in zip(scaled, sizes)])

    compiled = thunder.jit(fn, fallback="error")
    for sizes in ([3, 4], [2, 5], [3, 4]):
        x, sizes = torch.randn(1, 2, 5, 5, requires_grad=True), torch.tensor(sizes)
        ours, theirs = compiled(x, sizes), fn(x, sizes)
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(y.exp().sum(), x)[0] for y in (ours, theirs)))


class Collected(NamedTuple):
    values: torch.Tensor
    rows: int


class Sized(tuple):
    """Made by tuple.__new__, and by object.__init__ behind it."""

    def __new__(cls, values, rows):
        return super().__new__(cls, (values, rows))

    def __init__(self, values, rows):
        super().__init__()
        self.shown = rows


class Holder:
    def __new__(cls, rows):
        return object.__new__(cls)

    def __init__(self, rows):
        self.rows = rows


def test_tuples_of_data_dependent_numbers():
    """Native code that makes a tuple or an object keeps the number; none of it is a call on the host."""

    def fn(x, places):
        n = int(places.max()) + 1
        held = Collected(x, n)
        more = held._replace(rows=held.rows + 1)
        sized = Sized(x, more.rows)
        return held, x * more.rows + sized[1] + sized.shown + Holder(n).rows

    compiled = thunder.jit(fn, fallback="error")
    for places in ([1, 2], [4, 0]):
        x, places = torch.randn(3), torch.tensor(places)
        (ours, product), (theirs, expected) = compiled(x, places), fn(x, places)
        assert type(ours) is Collected and ours.rows == theirs.rows and torch.equal(product, expected)
    assert "host_call" not in str(thunder.last_traces(compiled)[0]) and len(compiled.programs) == 1


@pytest.mark.parametrize("function", [torch.ops.aten.renorm, torch.renorm])
def test_gradients_pass_through_unknown_functions_of_data_dependent_sizes(function):
    def fn(x, keep):
        return function(x[keep.nonzero()[:, 0]] * 2, 2, 0, 1.0).sum()

    compiled = thunder.jit(fn, fallback="error")
    for mask in ([1, 0, 1, 1, 0], [0, 1, 0, 0, 0]):
        x, keep = torch.rand(5, 4, requires_grad=True), torch.tensor(mask)
        (ours,), (theirs,) = (torch.autograd.grad(f(x, keep), x) for f in (compiled, fn))
        assert theirs.any() and torch.allclose(ours, theirs)


def test_the_work_of_reads_is_linear():
    def program(x, n):
        for _ in range(n):
            x = x * x.sum().item()
        return x

    def calls(n):
        compiled = thunder.jit(program, cache="constant values")
        return calls_during(lambda: compiled(torch.ones(2), n))

    calls(10)
    few, more, most = calls(100), calls(200), calls(400)
    assert most - more < 2.2 * (more - few)


def test_indices_of_sizes_that_only_data_tell_to_be_equal():
    def program(x, m, n):
        rows = torch.cat([x[m], x[n]])
        labels = torch.cat([m.nonzero()[:, 0], n.nonzero()[:, 0]])
        return rows[torch.arange(rows.shape[0]), labels % 2]

    compiled, x = thunder.jit(program, fallback="error"), torch.randn(6, 2)
    for seed in range(3):
        m, n = (data(seed + k, 0.5).flatten()[:6] > 0 for k in (0, 7))
        assert torch.equal(compiled(x, m, n), program(x, m, n))
    assert thunder.cache_misses(compiled) == 1
