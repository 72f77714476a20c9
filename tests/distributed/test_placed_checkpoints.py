"""State dicts follow from placements: whole ones are the unsharded module's, and what is saved under one placement is
loaded under any other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import thunder
from thunder.distributed import FSDPType, checkpoint, column_parallel, ddp, fsdp, row_parallel

WHOLE = checkpoint.StateDictOptions(full_state_dict=True)


class Net(torch.nn.Module):
    """Rows that ranks do not share evenly, an embedding, a shared weight, a parameter without dimensions, a buffer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.up, self.down, self.norm = (
            torch.nn.Embedding(12, 8),
            torch.nn.Linear(8, 4),
            torch.nn.Linear(4, 8),
            torch.nn.LayerNorm(8),
        )
        self.odd, self.head = torch.nn.Linear(8, 5), torch.nn.Linear(8, 12)
        self.head.weight = self.tokens.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.linspace(-1, 1, 8))

    def forward(self, x):
        h = self.tokens(x) + self.offset
        h = self.norm(h + self.down(self.up(h).tanh()) * self.scale)
        return self.head(h).sum() + self.odd(h).sum()


def seeded_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def optimizer_after_a_step(module) -> torch.optim.Optimizer:
    """A step with gradients that are a function of the parameter, element by element: the same however it is held."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for p in module.parameters():
        p.grad = p.detach().sin()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def split(model, rng: random.Random, group=None):
    """Some of the layers, each by rows or by columns."""
    for name in ("up", "down"):
        way = rng.choice((column_parallel, row_parallel, None))
        if way is not None:
            way(model, [name], group)
    if rng.random() < 0.5:  # one weight, which both layers split alike
        row_parallel(model, ["tokens"], group)
        column_parallel(model, ["head"], group)
    return model


def prepared(model, size: int, seed: int):
    """A module whose parameters are placed somehow on this many ranks, and what was done."""
    rng = random.Random(seed)
    ways = (
        ["none"]
        if size == 1
        else ["fsdp", "split", "ddp"]
        if size == 2
        else ["fsdp", "split and fsdp", "fsdp and split", "replicated", "split and ddp"]
    )
    way, strategy = rng.choice(ways), rng.choice(list(FSDPType))
    if way == "none":
        return model, way
    if way == "fsdp":
        return fsdp(model, sharding_strategy=strategy), way
    if way == "ddp":
        return ddp(model), way
    if way == "split":
        return split(model, rng), way
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if way == "replicated":
        return fsdp(model, process_group=mesh, sharding_strategy=strategy), way
    slices, shards = (mesh["a"], mesh["b"]) if way != "fsdp and split" else (mesh["b"], mesh["a"])
    model = split(model, rng, slices)
    return (
        ddp(model, process_group=shards, broadcast_from=None)
        if way == "split and ddp"
        else fsdp(model, process_group=shards, sharding_strategy=strategy)
    ), way


def trained(size: int, seed: int, values: int):
    """(compiled module, optimizer, what was done) with parameters and state that follow from `values`."""
    model, way = prepared(seeded_net(values), size, seed)
    module = thunder.jit(model) if seed % 2 else model
    return module, optimizer_after_a_step(module), way


def state_of(module, optimizer, options=None):
    return {
        "model": checkpoint.get_model_state_dict(module, options),
        "optimizer": checkpoint.get_optimizer_state_dict(module, optimizer, options),
    }


def check_whole(module, optimizer, values: int, what: str) -> None:
    """The whole state dicts are those of a module that nobody distributed."""
    alone = seeded_net(values)
    alone_optimizer = optimizer_after_a_step(alone)
    wanted, actual = state_of(alone, alone_optimizer), state_of(module, optimizer, WHOLE)
    assert list(actual["model"]) == list(wanted["model"])
    assert actual["optimizer"].pop("param_groups") == wanted["optimizer"].pop("param_groups")
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def saves(rank, size, folder, seed):
    module, optimizer, way = trained(size, seed, values=3)
    check_whole(module, optimizer, 3, f"{way} of {size}")
    checkpoint.save(state_of(module, optimizer), folder)


def loads(rank, size, folder, seed, saved):
    module, optimizer, way = trained(size, seed, values=4)
    state = state_of(module, optimizer)
    checkpoint.load(state, folder)
    checkpoint.load_model_state_dict(state["model"], module)
    checkpoint.load_optimizer_state_dict(state["optimizer"], module, optimizer)
    check_whole(module, optimizer, 3, f"{saved} to {way} of {size}")


SIZES = (1, 2, 4)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_saved_under_one_placement_is_loaded_under_any_other(ranks, tmp_path, seed):
    for i, (size, other) in enumerate(itertools.product(SIZES, SIZES)):
        run = lambda n, function, *args: function(0, 1, *args) if n == 1 else ranks(n)(function, *args)  # noqa: E731
        if other == SIZES[0]:
            run(size, saves, tmp_path / f"{size}", 10 * seed + i)
        run(other, loads, tmp_path / f"{size}", 10 * seed + i + 5, f"{size}")


def whole_state_dicts_of_modules(rank, size, seed):
    model, way = prepared(seeded_net(3), size, seed)
    module = thunder.jit(model)
    wanted, other = seeded_net(3).state_dict(), seeded_net(5).state_dict()
    state = module.original_state_dict()
    assert list(state) == list(wanted)
    torch.testing.assert_close(dict(state), dict(wanted), rtol=0, atol=0, msg=lambda text: f"{way}: {text}")
    module.load_original_state_dict(other)
    torch.testing.assert_close(
        dict(module.original_state_dict(prefix="a.")), {f"a.{k}": v for k, v in other.items()}, rtol=0, atol=0
    )
    x = torch.arange(6).reshape(2, 3)
    alone = seeded_net(5)
    torch.testing.assert_close(module(x), alone(x))
    if way != "ddp":
        with pytest.raises(RuntimeError, match=r"size mismatch for norm.weight.*\[3\].*\[8\]"):
            module.load_original_state_dict(other | {"norm.weight": torch.ones(3)})
    checkpoint.load_model_state_dict(wanted, module, WHOLE)
    first = checkpoint.StateDictOptions(full_state_dict=True, rank0_only=True)
    checkpoint.load_model_state_dict(other if not rank else {}, module, first)
    torch.testing.assert_close(dict(module.original_state_dict()), dict(other), rtol=0, atol=0)


@pytest.mark.parametrize("size, seed", [(size, seed) for size in (2, 4) for seed in range(5)])
def test_original_state_dicts_are_whole(ranks, size, seed):
    ranks(size)(whole_state_dicts_of_modules, seed)


def refuses(rank, size):
    one, other = column_parallel(seeded_net(0), ["up"]), row_parallel(seeded_net(0), ["up"])
    with pytest.raises(
        RuntimeError,
        match=r"up.weight is a part of one on 2 ranks along dimension 0, and is loaded by one on 2 ranks along "
        r"dimension 1",
    ):
        checkpoint.load_model_state_dict(checkpoint.get_model_state_dict(one), other)
    with pytest.raises(
        RuntimeError, match="up.weight is a part of one on 2 ranks along dimension 0, and is loaded by one on 1 rank"
    ):
        checkpoint.load_model_state_dict(checkpoint.get_model_state_dict(one), seeded_net(0))


def test_parts_that_are_loaded_by_other_parts_are_refused(ranks):
    ranks(2)(refuses)
