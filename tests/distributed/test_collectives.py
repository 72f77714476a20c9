"""Collectives that programs call: values as eager's, derivatives of the sum of all ranks' losses."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh

import thunder
from tests.distributed.training import close
from thunder.core.proxies import FutureTensorProxy
from thunder.errors import CaptureError, MissingImplementationError

ltorch = thunder.torch
N = 2


def reduced(x):
    y = x * 2
    dist.all_reduce(y)
    return y + x


def reduced_later(x):
    y = x * 2
    work = dist.all_reduce(y, op=dist.ReduceOp.MAX, async_op=True)
    z = x.sin()
    work.wait()
    return y * z


def a_view_is_reduced(x):
    y = x.clone()
    dist.all_reduce(y[1:3])
    return y * x


def gathered(x):
    out = torch.empty(N * x.shape[0], *x.shape[1:], dtype=x.dtype)
    dist.all_gather_into_tensor(out, x.sin())
    return out * 3


def gathered_list(x):
    outs = [torch.empty_like(x) for _ in range(N)]
    dist.all_gather(outs, x.sin())
    return outs[0] + 2 * outs[1]


def scattered(x):
    out = torch.empty(x.shape[0] // N, *x.shape[1:], dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x.sin())
    return out * 3


def scattered_list(x):
    out = torch.empty(x.shape[0] // N, *x.shape[1:], dtype=x.dtype)
    dist.reduce_scatter(out, list(x.sin().chunk(N)))
    return out * 3


def broadcasted(x):
    y = x.sin()
    dist.broadcast(y, src=1)
    return y * x


def exchanged(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.sin())
    return out * x


def functional_reduced(x):
    return functional.all_reduce(x.sin(), "avg", dist.group.WORLD) * x


def functional_gathered(x):
    return functional.all_gather_tensor(x.sin(), 1, dist.group.WORLD) + 1


def functional_scattered(x):
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.sin(), "sum", 0, dist.group.WORLD)) * 2


def functional_exchanged(x):
    return functional.all_to_all_single(x.sin(), None, None, dist.group.WORLD) * x


def of_nn(x):
    parts = differentiable.all_gather(x.sin())
    return differentiable.all_reduce(x.cos()) * parts[0] + parts[1]


def by_names_of_lightning(x):
    """In place, with names of `thunder.torch`."""
    y, out = x.sin(), torch.empty(x.shape[0] // N, *x.shape[1:], dtype=x.dtype)
    ltorch.all_reduce_(y, group=dist.group.WORLD)
    ltorch.reduce_scatter_(out, y * x)
    everything = torch.empty_like(x)
    ltorch.all_gather_(everything, out)
    return everything * x


PROGRAMS = (
    by_names_of_lightning, reduced, reduced_later, a_view_is_reduced, gathered, gathered_list, scattered, scattered_list, broadcasted,
    exchanged, functional_reduced, functional_gathered,
    functional_scattered, functional_exchanged, of_nn,
)  # fmt: skip


def computes(rank, size, index):
    program = PROGRAMS[index]
    torch.manual_seed(rank)
    x = torch.randn(4, 6, dtype=torch.float64)
    compiled = thunder.jit(program)
    for _ in range(2):  # the second call is the compiled program alone
        actual, wanted = compiled(x), program(x)
        assert torch.equal(actual, torch.as_tensor(wanted)), program.__name__
    if program is reduced_later:
        return
    weights = torch.randn(actual.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5 + rank))
    x.requires_grad_()
    (compiled(x) * weights).sum().backward()
    # the derivative of the sum of both ranks' losses, by differences along one direction in which all ranks move
    direction, h = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9 + rank)), 1e-5
    with torch.no_grad():
        slope = (compiled(x + h * direction) * weights).sum() - (compiled(x - h * direction) * weights).sum()
        both = torch.stack([slope / (2 * h), (x.grad * direction).sum()])
    dist.all_reduce(both)
    assert torch.allclose(both[0], both[1], rtol=1e-8), (program.__name__, both)


def test_programs_compute_what_eager_does_and_have_derivatives(ranks):
    for index in range(len(PROGRAMS)):
        ranks(N)(computes, index)


def waits(rank, size):
    group = dist.group.WORLD

    @thunder.jit
    def program(x):
        future = ltorch.all_gather(x, group, True)
        reduced = ltorch.all_reduce(x * 2, op=dist.ReduceOp.MAX, group=group, async_op=True)
        return {"gathered": future, "reduced": ltorch.wait(reduced) + 1}

    x = torch.full((2, 3), float(rank), dtype=torch.float64)
    eager = program(x)
    assert torch.equal(
        eager["gathered"], torch.tensor([0.0, 0, 1, 1], dtype=torch.float64).unsqueeze(1).expand(4, 3)
    ) and torch.equal(eager["reduced"], torch.full_like(x, 3))
    first = thunder.last_traces(program)[0]
    assert sum(isinstance(o, FutureTensorProxy) for line in first.bound_symbols for o in line.outputs) == 2
    assert str(first).count("ltorch.wait(") == 2 and "group_default_pg" in str(first)
    gathered = thunder.jit(lambda x: ltorch.all_gather(x, group, False, 1))(x)
    close(gathered, torch.cat([torch.zeros_like(x), torch.ones_like(x)], 1), "gathered along the second dimension")
    scattered = thunder.jit(lambda x: ltorch.reduce_scatter(x, "avg", group, False, 0))(x)
    assert torch.equal(scattered, torch.full((1, 3), 0.5, dtype=torch.float64))
    assert thunder.jit(lambda x: ltorch.all_gather(x.sum(), group))(x).tolist() == [0, 6]


def refuses(rank, size):
    x = torch.randn(3, 4, dtype=torch.float64)

    def barred(x):
        dist.barrier()
        return x

    def sends(x):
        dist.send(x, 1 - dist.get_rank())
        return x

    for program in (barred, sends):
        with pytest.raises(
            CaptureError, match=r"torch.distributed.\w+ is called inside of it(.|\n)*test_collectives.py"
        ):
            thunder.jit(program)(x)
    group = dist.group.WORLD
    with pytest.raises(RuntimeError, match="size 3 of dimension 0 is not divisible by the 2 ranks"):
        thunder.jit(lambda x: ltorch.reduce_scatter(x, "sum", group))(x)
    with pytest.raises(ValueError, match="is none of those that programs have: sum, avg"):
        thunder.jit(lambda x: ltorch.all_reduce(x, "median", group))(x)
    with pytest.raises(MissingImplementationError, match="all_reduce with max has no derivative"):
        thunder.jit(lambda x: ltorch.all_reduce(x, "max", group))(x.requires_grad_())


def another_group(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    columns = mesh.get_group("columns")

    def program(x, group):
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    compiled = thunder.jit(program)
    x = torch.tensor([float(rank)])
    assert compiled(x, columns).item() == {0: 1, 1: 1, 2: 5, 3: 5}[rank]
    # another group is another program
    assert compiled(x, mesh.get_group("rows")).item() == {0: 2, 1: 4, 2: 2, 3: 4}[rank]
    assert compiled(x, columns).item() == {0: 1, 1: 1, 2: 5, 3: 5}[rank] and thunder.cache_misses(compiled) == 2
    assert "group_mesh_columns" in str(thunder.last_traces(compiled)[-1])
    root = thunder.jit(lambda x: functional.broadcast(x, 2 * (rank // 2) + 1, (mesh, 1)))(x)
    assert root.item() == {0: 1, 1: 1, 2: 3, 3: 3}[rank]


def test_futures_are_values_and_waits_lines(ranks):
    ranks(N)(waits)


def test_what_is_refused(ranks):
    ranks(N)(refuses)


def test_groups_of_a_mesh(ranks):
    ranks(4)(another_group)
