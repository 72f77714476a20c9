"""Rows that move between the ranks of a group, as many as data say: for mixtures of experts.

The rows of a tensor are sorted by expert. Each rank has as many experts as the others, the first rank the first ones.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from thunder.core.devices import cpu
from thunder.core.dtypes import int32, int64
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import primitive
from thunder.core.unbacked import fresh_size
from thunder.ops.families.collectives import Future, Started


def _exchanged(x: torch.Tensor, sent: list[int], received: list[int], group) -> torch.Tensor:
    """The rows of all ranks for this one, in the order of ranks; `sent` and `received` say how many, for each rank."""
    x = x[: sum(sent)].contiguous()
    out = x.new_empty((sum(received), *x.shape[1:]))
    start = lambda: dist.all_to_all_single(out, x, received, sent, group=group, async_op=True)  # noqa: E731
    return Future(Started("all_to_all", (x,), group, start), lambda: out).wait()


def _regrouped(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Rows in groups of `sizes`, a matrix, with the groups in the order of its transpose."""
    if min(sizes.shape) == 1:
        return x
    groups = x.split(sizes.flatten().tolist())
    rows, columns = sizes.shape
    return torch.cat([groups[i * columns + j] for j in range(columns) for i in range(rows)])


def _rows_typed(offs, group):
    return (
        TensorProxy(shape=(2, group.size(), offs.shape[0] // group.size()), dtype=int64, device=cpu),
        like(offs, (offs.shape[0] // group.size(),), int32),
    )


@primitive(_rows_typed, module="ltorch")
def rows_of_experts(offs, group):
    """(sizes, ends): how many rows this rank has for each expert of each rank, and how many each rank has for each of
    its own experts, on the host; and where the rows of its experts end, when they are all there. offs: where the rows
    of each expert end on this rank."""
    counts = torch.diff(offs.long(), prepend=offs.new_zeros(1, dtype=torch.int64))
    received = torch.empty_like(counts)
    start = lambda: dist.all_to_all_single(received, counts, group=group, async_op=True)  # noqa: E731
    Started("all_to_all", (counts,), group, start).wait()
    ends = received.view(group.size(), -1).sum(0).cumsum(0).to(torch.int32)
    return torch.stack([counts, received]).cpu().view(2, group.size(), -1), ends


@primitive(
    lambda x, sizes, group, rows=None: like(x, (fresh_size() if rows is None else rows, *x.shape[1:])), module="ltorch"
)
def dispatch_rows(x, sizes, group, rows=None):
    """The rows of all ranks for the experts of this one, sorted by expert. rows: how many, where a program knows."""
    own, others = sizes
    exchanged = _exchanged(x, own.sum(1).tolist(), others.sum(1).tolist(), group)
    return _regrouped(exchanged, others)


@primitive(lambda x, sizes, group, rows: like(x, (rows, *x.shape[1:])), module="ltorch")
def collect_rows(x, sizes, group, rows):
    """The rows of this rank, back from the ranks that they were dispatched to, and zeros behind them: so many as there
    were."""
    own, others = sizes
    exchanged = _exchanged(_regrouped(x, others.t()), others.sum(1).tolist(), own.sum(1).tolist(), group)
    return (
        exchanged
        if exchanged.shape[0] == rows
        else torch.cat([exchanged, exchanged.new_zeros(rows - len(exchanged), *exchanged.shape[1:])])
    )


@dispatch_rows.vjp
def _(x, sizes, group, rows=None):
    g = yield dispatch_rows(x, sizes, group, rows)
    return collect_rows(g, sizes, group, x.shape[0]), None


@collect_rows.vjp
def _(x, sizes, group, rows):
    g = yield collect_rows(x, sizes, group, rows)
    return dispatch_rows(g, sizes, group, x.shape[0]), None
