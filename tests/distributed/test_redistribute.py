"""redistribute: it computes what DTensor's does, its derivative is its dual, and programs are checked by layouts."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import thunder
from tests.distributed.training import close
from thunder.core.trace import Trace
from thunder.distributed import FSDPType, column_parallel, ddp, fsdp, layers, row_parallel
from thunder.distributed.layouts import Axis, I, P, R, S, V
from thunder.distributed.redistribute import TABLE, redistribute

SHAPE = (5, 8, 4)  # of which ranks divide the last two
LAYOUTS = {"S": (S(0, 5), S(1), S(2)), "R": (R,), "I": (I,), "V": (V,), "P": (P,)}
# parts of different sizes are not exchanged for others; DTensor has no word for a shard as a summand of one rank
PAIRS = [
    (src, dst)
    for kinds in TABLE
    for src, dst in itertools.product(*(LAYOUTS[kind] for kind in kinds))
    if (kinds != ("S", "S") or src == dst or src.size is dst.size) and set(kinds) != {"S", "V"}
]


def placement(layout):
    return {"S": Shard(layout.dim), "P": Partial("sum"), "V": Partial("sum")}.get(layout.kind, Replicate())


def local_value(layout, axis, generator):
    """What a rank has of a value that all ranks draw alike; of partial ones, a summand."""
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    if layout.kind == "S":
        missing = torch.zeros(-whole.shape[layout.dim] % axis.size, *SHAPE[1:], dtype=torch.float64)
        return torch.cat([whole, missing] if len(missing) else [whole]).chunk(axis.size, layout.dim)[axis.rank]
    return whole * (axis.rank + 1) if layout.kind in "PV" else whole


def pairing(layout, x, gradient, axis):
    """The product of a value and its gradient, over all ranks: of an invariant one each rank has all of it."""
    total = (x * gradient).sum() / (axis.size if layout == I else 1)
    dist.all_reduce(total, group=axis.group)
    return total


def without_padding(x, layout, axis):
    rows = max(0, min(x.shape[0], SHAPE[0] - axis.rank * x.shape[0]))
    return x[:rows] if layout.size is not None else x


def whole_of_local(x, layout, axis, mesh):
    local = without_padding(x, layout, axis)
    return DTensor.from_local(local, mesh, [placement(layout)], shape=torch.Size(SHAPE), stride=(32, 4, 1))


def computes_the_table(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    axis, generator = Axis(dist.group.WORLD, "tp", "sum"), torch.Generator().manual_seed(0)
    for src, dst in PAIRS:
        x = local_value(src, axis, generator)
        moved = redistribute(x, axis, src, dst)
        if dst == V:
            assert torch.equal(moved, x)
            continue
        wanted = whole_of_local(x, src, axis, mesh).full_tensor()
        torch.testing.assert_close(whole_of_local(moved, dst, axis, mesh).full_tensor(), wanted, msg=f"{src} {dst}")
        if dst.kind in "SRI":  # DTensor says what each rank has
            theirs = whole_of_local(x, src, axis, mesh).redistribute(placements=[placement(dst)]).to_local()
            torch.testing.assert_close(without_padding(moved, dst, axis), theirs, msg=f"{src} {dst}")


def takes_shards_for_summands(rank, size, reduction):
    """A mean over ranks of the losses of their shards: `V -> S` of a summand is its share of the mean."""
    axis, generator = Axis(dist.group.WORLD, "tp", reduction), torch.Generator().manual_seed(2)
    x = local_value(S(1), axis, generator).requires_grad_()
    summand = thunder.jit(lambda x: redistribute(x, axis, S(1), V).clone())(x)
    assert torch.equal(summand, x)
    share = redistribute(summand.detach(), axis, V, S(1))
    assert torch.equal(share, x / size if reduction == "avg" else x)
    (gradient,) = torch.autograd.grad(summand, x, torch.ones_like(x))
    assert torch.equal(gradient, torch.ones_like(x) / (size if reduction == "avg" else 1))


def has_its_dual_for_derivative(rank, size, reduction):
    generator = torch.Generator().manual_seed(1)
    for src, dst in PAIRS:
        axis = Axis(dist.group.WORLD, "tp", reduction)
        x = local_value(src, axis, generator).requires_grad_()
        mine = thunder.jit(lambda x, axis=axis, src=src, dst=dst: redistribute(x, axis, src, dst).clone())
        y = mine(x)
        seed = local_value(dst.dual, axis, generator)
        y.backward(seed)
        scale = {"avg": {R: size, P: size, V: size}}.get(reduction, {})  # whose gradients are averaged
        left = pairing(dst, y.detach(), seed, axis) / scale.get(dst, 1)
        right = pairing(src, x.detach(), x.grad, axis) / scale.get(src, 1)
        torch.testing.assert_close(left, right, msg=lambda text, src=src, dst=dst: f"{src} {dst}: {text}")


@pytest.mark.parametrize("size", [2, 4])
def test_the_table_is_that_of_dtensor(ranks, size):
    ranks(size)(computes_the_table)


@pytest.mark.parametrize("reduction", ["sum", "avg"])
def test_derivatives_are_duals(ranks, reduction):
    ranks(2)(has_its_dual_for_derivative, reduction)


@pytest.mark.parametrize("reduction", ["sum", "avg"])
def test_shards_are_taken_for_summands(ranks, reduction):
    ranks(2)(takes_shards_for_summands, reduction)


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 5)).double()


def split(module):
    return row_parallel(column_parallel(module, ["0"]), ["2"])


def lines(trace: Trace, word: str) -> list[str]:
    return [line.strip().split(" | ")[0] for line in trace.python().splitlines() if word in line]


def is_printed(rank, size):
    sharded = thunder.jit(fsdp(mlp(), sharding_strategy=FSDPType.ZERO2), executors=[])
    whole = thunder.jit(split(mlp()), executors=[])
    for module in (sharded, whole):
        module(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
    distributed = next(t for t in thunder.last_traces(sharded) if t.made_by[0] == "Distribute")
    assert lines(distributed, "0_weight =") == [
        "t_0_weight = ltorch.redistribute(t_0_weight_shard, dp, S0, R)  # cpu f64[8, 6] {dp: R}"
    ]
    assert lines(distributed, "2_bias =") == [
        "t_2_bias = ltorch.redistribute(t_2_bias_shard, dp, S0_of_5, R)  # cpu f64[5] {dp: R}"
    ]
    joint = next(t for t in thunder.last_traces(sharded) if "Grad transform" in t.made_by[0])
    assert lines(joint, "d_t_2_bias_shard =")[0].startswith(
        "d_t_2_bias_shard = ltorch.redistribute(d_t_2_bias, dp, P, S0_of_5)"
    )
    distributed = next(t for t in thunder.last_traces(whole) if t.made_by[0] == "Distribute")
    moved = [line.partition(" = ")[2] for line in lines(distributed, "redistribute(")]
    assert moved[0] == "ltorch.redistribute(input, tp, I, R)  # cpu f64[4, 6] {tp: R}"
    assert len(moved) == 2 and moved[1].endswith(", tp, P, I)  # cpu f64[4, 5]")
    assert [line.rpartition("{")[2] for line in lines(distributed, "linear(")] == ["tp: S1}", "tp: P}"]


def test_programs_print_what_moves(ranks):
    ranks(2)(is_printed)


def has_one_name(rank, size):
    """Axes of the same ranks are one axis, whichever names modules give it; a program prints one."""
    first, other = Axis(dist.group.WORLD, "first", "sum"), Axis(dist.group.WORLD, "other", "sum")
    assert first == other and first != Axis(dist.group.WORLD, "first", "avg")
    program = thunder.jit(lambda x: redistribute(redistribute(x, first, I, S(0)), other, S(0), I) * 1, executors=[])
    x = torch.arange(4.0)
    assert torch.equal(program(x), x)
    moved = [x.partition("(")[2].split(", ")[1] for x in lines(thunder.last_traces(program)[0], "redistribute(")]
    assert moved == ["first", "first"], moved
    for name in ("tp", "rows"):
        module = thunder.jit(column_parallel(mlp(), ["0"], init_device_mesh("cpu", (size,), mesh_dim_names=(name,))))
        module(torch.ones(4, 6, dtype=torch.float64))
        distributed = next(t for t in thunder.last_traces(module) if t.made_by[0] == "Distribute")
        assert ", tp, " in distributed.python()


def test_an_axis_has_one_name_in_a_program(ranks):
    ranks(2)(has_one_name)


def is_checked(rank, size):
    """A layer that reads its input without a redistribution: its gradient would be that of one rank."""
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(layers._Split, "gathered", lambda self, x, axis: x):
        with pytest.raises(AssertionError, match="operand that is invariant over tp would be that of one rank"):
            thunder.jit(split(mlp()), executors=[])(x)
    with mock.patch.object(layers._Split, "summed", lambda self, x, axis: x):
        with pytest.raises(AssertionError, match="invariant over tp would be that of one rank"):
            thunder.jit(split(mlp()), executors=[])(x)
    thunder.jit(split(mlp()), executors=[])(x)


def test_layouts_that_do_not_fit_are_errors(ranks):
    ranks(2)(is_checked)


class Scaled(torch.nn.Module):
    """One number that every rank holds."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = mlp(), torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return self.layers(x) * self.scale


def reduces_along_two_axes(rank, size):
    """Shards first, then replicas of shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    x, whole = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), Scaled()
    mine = thunder.jit(fsdp(Scaled(), process_group=mesh), executors=[])
    mine(x.chunk(size)[rank]).square().mean().backward()
    whole(x).square().mean().backward()
    for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
        close(p.grad.full_tensor(), q.grad, "a gradient")
    joint = next(t for t in thunder.last_traces(mine) if "Grad transform" in t.made_by[0])
    line = lines(joint, "d_t_layers_0_weight_shard =")[0]
    assert "redistribute(d_t_layers_0_weight, (dp, replicas), (P, P), (S0, I))" in line


def test_gradients_of_shards_are_reduced_before_those_of_replicas(ranks):
    ranks(4)(reduces_along_two_axes)


def is_left_without_synchronization(rank, size):
    for prepare in (ddp, fsdp):
        mine = thunder.jit(prepare(Scaled()), executors=[])
        with mine.no_sync():
            mine(torch.ones(4, 6, dtype=torch.float64)).sum().backward()
            distributed = next(t for t in thunder.last_traces(mine) if t.made_by[0] == "Distribute")
            assert len(lines(distributed, "without_synchronization")) == 5
            assert len(lines(distributed, "ltorch.redistribute")) == (4 if prepare is fsdp else 0), distributed.python()


def test_no_sync_leaves_gradients_partial(ranks):
    ranks(2)(is_left_without_synchronization)
