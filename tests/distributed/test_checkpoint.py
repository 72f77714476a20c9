"""Checkpoints: saved on some ranks, loaded on others, or on one without a process group."""

import os
import pickle
import signal
import time
import warnings

import pytest
import torch

import thunder
from tests import fresh
from tests.distributed.training import batches
from thunder.distributed import FSDPType, checkpoint, ddp, fsdp

OPTIONS = checkpoint.StateDictOptions()


class Tied(torch.nn.Module):
    """Uneven rows, a tied weight, a buffer and a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 7), torch.nn.Linear(6, 7)
        self.last.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("offset", torch.linspace(-1, 1, 7))

    def forward(self, x):
        return torch.tanh(self.first(x) + self.offset) * self.scale + self.last(x)


def trainer(prepare):
    torch.manual_seed(0)
    module = thunder.jit(prepare(Tied().double()))
    return module, torch.optim.AdamW(module.parameters(), lr=0.05)


def train(module, optimizer, data, rank, size):
    """The losses over the data of all ranks."""
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = module(x.chunk(size)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        together = loss.detach().clone()
        if size > 1:
            torch.distributed.all_reduce(together)
        losses.append(together / size)
    return torch.stack(losses)


def state_of(module, optimizer):
    return {
        "model": checkpoint.get_model_state_dict(module, OPTIONS),
        "optimizer": checkpoint.get_optimizer_state_dict(module, optimizer, OPTIONS),
    }


def saves(rank, size, folder):
    """Three steps, a checkpoint, and what the two steps after it lead to."""
    module, optimizer = trainer(lambda m: fsdp(m, sharding_strategy=FSDPType.ZERO3))
    data = batches(4, torch.float64)
    train(module, optimizer, data[:3], rank, size)
    state = state_of(module, optimizer)
    assert list(state["model"]) == list(Tied().state_dict())
    assert state["model"]["first.weight"].shape == (7, 6)
    assert (
        state["model"]["first.weight"].to_local().untyped_storage().data_ptr()
        == module.first.weight.to_local().untyped_storage().data_ptr()
    )
    checkpoint.save(state, folder)
    losses = train(module, optimizer, data[3:], rank, size)
    whole = checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert checkpoint.has_fsdp_modules(module)
    assert (
        not checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True, rank0_only=True))
        or not rank
    )
    return losses, {name: t.clone() for name, t in whole.items()}


def continues(rank, size, folder):
    module, optimizer = trainer(fsdp if size > 1 else lambda m: m)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    state = state_of(module, optimizer)
    assert not optimizer.state  # to ask for state to load into is no step
    checkpoint.load(state, folder)
    checkpoint.load_model_state_dict(state["model"], module, OPTIONS)
    checkpoint.load_optimizer_state_dict(state["optimizer"], module, optimizer, OPTIONS)
    losses = train(module, optimizer, batches(4, torch.float64)[3:], rank, size)
    return losses, {
        name: t.clone()
        for name, t in checkpoint.get_model_state_dict(
            module, checkpoint.StateDictOptions(full_state_dict=True)
        ).items()
    }


def test_saved_on_four_loaded_on_two_and_one_goes_on_as_if_uninterrupted(ranks, tmp_path):
    losses, parameters = ranks(4)(saves, tmp_path / "state")[0]
    for actual in (
        continues(0, 1, tmp_path / "state"),
        *ranks(2)(continues, tmp_path / "state"),
        *ranks(4)(continues, tmp_path / "state"),
    ):
        torch.testing.assert_close(actual[0], losses, rtol=1e-12, atol=1e-12)
        for name, t in parameters.items():
            torch.testing.assert_close(actual[1][name], t, rtol=1e-11, atol=1e-11, msg=name)


def loads_whole(rank, size, folder):
    torch.manual_seed(0)
    wanted = Tied().double().state_dict()
    torch.manual_seed(rank + 1)
    module = thunder.jit(fsdp(Tied().double()))
    first = checkpoint.StateDictOptions(full_state_dict=True, rank0_only=True)
    checkpoint.load_model_state_dict(wanted if not rank else {}, module, first)
    state = checkpoint.get_model_state_dict(module, checkpoint.StateDictOptions(full_state_dict=True))
    for name, t in wanted.items():
        assert torch.equal(state[name], t), name
    with pytest.raises(
        RuntimeError,
        match=r"(?s)Error\(s\) in loading state_dict for Tied.*Missing key\(s\).*first.bias.*Unexpected.*extra",
    ):
        checkpoint.load_model_state_dict(
            {k: v for k, v in wanted.items() if k != "first.bias"} | {"extra": torch.ones(1)}, module, OPTIONS
        )
    with pytest.raises(RuntimeError, match="size mismatch for first.weight"):
        checkpoint.load_model_state_dict(wanted | {"first.weight": torch.ones(2, 6)}, module, OPTIONS)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load({}, folder / "nothing")
    other = torch.distributed.new_group([rank], use_local_synchronization=True)
    alone = fsdp(Tied().double(), process_group=other)
    with pytest.raises(
        RuntimeError, match="is a part of one on 1 ranks along dimension 0, and is loaded by one on 2 ranks"
    ):
        checkpoint.load_model_state_dict(checkpoint.get_model_state_dict(alone, OPTIONS), module, OPTIONS)
    replicated = ddp(Tied().double())
    assert not checkpoint.has_fsdp_modules(replicated)
    assert all(type(t) is torch.Tensor for t in checkpoint.get_model_state_dict(replicated, OPTIONS).values())


def test_whole_state_dicts_and_errors(ranks, tmp_path):
    ranks(2)(loads_whole, tmp_path)


def _writes_slowly(folder, started):
    """Saves once, and is killed while it saves again."""
    import torch.distributed.checkpoint as dcp

    checkpoint.save({"a": torch.ones(3)}, folder)
    write = dcp.FileSystemWriter.write_data

    def slow(*args, **kwargs):
        result = write(*args, **kwargs)
        started.set()
        time.sleep(60)
        return result

    dcp.FileSystemWriter.write_data = slow
    checkpoint.save({"a": torch.zeros(3)}, folder)


def test_an_interrupted_save_leaves_the_old_checkpoint(tmp_path):
    context = fresh.context()
    started = context.Event()
    process = context.Process(target=_writes_slowly, args=(tmp_path / "state", started))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    state = {"a": torch.zeros(3)}
    checkpoint.load(state, tmp_path / "state")
    assert state["a"].tolist() == [1, 1, 1]
    checkpoint.save({"a": torch.full((3,), 2.0)}, tmp_path / "state")  # what was left over is in nobody's way
    checkpoint.load(state, tmp_path / "state")
    assert state["a"].tolist() == [2, 2, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state"]
    (tmp_path / "state").rename(tmp_path / "state.previous")  # killed between the two renames
    checkpoint.load(state, tmp_path / "state")


class Other:
    pass


def test_a_description_that_names_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("code of a checkpoint runs",)

    state = {"weight": torch.ones(3)}
    checkpoint.save(state, tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match="names builtins.print, which describes no checkpoint"):
        checkpoint.load(state, tmp_path / "state")


def test_values_are_loaded_as_weights_alone_or_with_a_warning(tmp_path):
    state = {"weight": torch.ones(3), "step": 3, "names": ["a", {"b": 1.5}], "dtype": torch.float16}
    checkpoint.save(state, tmp_path / "state")
    loaded = {"weight": torch.zeros(3), "step": 0, "names": ["", {"b": 0.0}], "dtype": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(loaded, tmp_path / "state")
    assert torch.equal(loaded.pop("weight"), torch.ones(3)) and loaded == {k: state[k] for k in loaded}
    checkpoint.save({"other": Other()}, tmp_path / "other")
    loaded = {"other": None}
    with pytest.warns(UserWarning, match="other of the checkpoint is an object that .* refuses"):
        checkpoint.load(loaded, tmp_path / "other")
    assert type(loaded["other"]).__name__ == "Other"
