"""PyTorch's own data parallelism around compiled modules."""

import contextlib
import copy
import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import thunder
from tests.distributed.training import STEPS, batches, close, optimizer_of


def mlp():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)).double()


def whole_of(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def trains(rank, size, wrap):
    module = mlp()
    whole = copy.deepcopy(module)
    mine, compiled = {"ddp": wrapped_in_ddp, "fully_shard": wrapped_in_fully_shard}[wrap](module)
    optimizers = optimizer_of(whole), optimizer_of(mine)
    for step, x in enumerate(batches(size, torch.float64)):
        whole(x).square().mean().backward()
        mine(x.chunk(size)[rank]).square().mean().backward()
        for (name, p), q in zip(mine.named_parameters(), whole.parameters(), strict=True):
            close(whole_of(p.grad), q.grad, f"gradient of {name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, p), q in zip(mine.named_parameters(), whole.parameters(), strict=True):
            close(whole_of(p.detach()), q.detach(), f"{name} after step {step}")
    assert step == STEPS - 1 and thunder.cache_misses(compiled) == 1


def wrapped_in_ddp(module):
    compiled = thunder.jit(module)
    return DistributedDataParallel(compiled), compiled


def wrapped_in_fully_shard(module):
    compiled = thunder.jit(module)
    return fully_shard(compiled), compiled


def test_distributed_data_parallel_around_a_compiled_module(ranks):
    ranks(2)(trains, "ddp")


def test_fully_shard_around_a_compiled_module(ranks):
    ranks(2)(trains, "fully_shard")


class Counts(torch.nn.Module):
    """Buffers that each call changes, on each rank in another way, and a layer that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
        self.frozen = torch.nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.norm(self.first(x)))))


def inside(rank, size):
    """DistributedDataParallel's module compiled as it is, beside DistributedDataParallel in eager."""
    modules = [DistributedDataParallel(Counts().double()) for _ in range(2)]
    eager, compiled = modules[0], thunder.jit(modules[1], executors=[])
    assert [n for n, _ in compiled.named_parameters()] == [n for n, _ in eager.named_parameters()]
    optimizers = [optimizer_of(m) for m in (eager, compiled)]

    def equal(what):
        for (name, p), q in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            close(p.detach(), q.detach(), f"{name} {what}")
            if q.grad is not None:
                close(p.grad, q.grad, f"gradient of {name} {what}")
        for (name, b), q in zip(compiled.named_buffers(), eager.buffers(), strict=True):
            close(b.double(), q.double(), f"{name} {what}")

    for step, x in enumerate(batches(size, torch.float64)):
        losses = [m(x.chunk(size)[rank]).square().mean() for m in (eager, compiled)]
        for value in losses:
            value.backward()
        close(losses[1].detach(), losses[0].detach(), "loss")
        equal(f"in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert thunder.cache_misses(compiled) == 1
    names = [b.sym.name.removesuffix("_impl") for b in thunder.last_backward_traces(compiled)[-1].bound_symbols]
    assert names.count("all_reduce_together") == 1
    with eager.no_sync():
        eager(x.chunk(size)[rank]).sum().backward()
    eager(x.chunk(size)[rank] * 2).sum().backward()
    with compiled.no_sync():
        compiled(x.chunk(size)[rank]).sum().backward()
    compiled(x.chunk(size)[rank] * 2).sum().backward()
    equal("behind no_sync")
    for m in (eager, compiled):
        m.eval()
    with torch.no_grad():
        close(compiled(x.chunk(size)[rank]), eager(x.chunk(size)[rank]), "evaluated")


def refuses(rank, size):
    x = torch.ones(4, 6, dtype=torch.float64)
    wrapped = DistributedDataParallel(mlp())
    compiled = thunder.jit(wrapped, executors=[])
    with wrapped.no_sync(), pytest.raises(thunder.errors.CaptureError, match="under its own no_sync"):
        compiled(x)
    with wrapped.join(), pytest.raises(thunder.errors.CaptureError, match="under its join"):
        compiled(x)
    wrapped = DistributedDataParallel(mlp())
    wrapped.register_comm_hook(None, lambda state, bucket: bucket.get_future_for_testing())
    with pytest.raises(NotImplementedError, match="under DistributedDataParallel with a communication hook"):
        thunder.jit(wrapped)
    module = mlp()
    module._ddp_params_and_buffers_to_ignore = ["0.weight"]
    with pytest.raises(NotImplementedError, match="with parameters or buffers to ignore"):
        thunder.jit(DistributedDataParallel(module))


def test_modules_of_distributed_data_parallel(ranks):
    ranks(2)(inside)
    ranks(2)(refuses)


def prepared_by_torch(size):
    mesh = init_device_mesh("cpu", (size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return {
        "fully_shard": fully_shard(mlp(), mesh=mesh),
        "parallelize_module": parallelize_module(mlp(), mesh, plan),
        "DistributedDataParallel": DistributedDataParallel(mlp()),
    }


def inside_of_functions(rank, size):
    """Modules that PyTorch prepared, called by a compiled function that names them: right. Those that it is given, and
    those whose options programs do not follow, are refused in words."""
    data = batches(size, torch.float64, steps=3)
    for name, module in prepared_by_torch(size).items():
        whole, part = mlp(), (lambda x: x) if name == "parallelize_module" else lambda x: x.chunk(size)[rank]
        if name != "parallelize_module":  # whose DTensors say all
            with pytest.raises(
                thunder.errors.CaptureError, match="a wrapper of PyTorch's that communicates by effects"
            ):
                thunder.jit(lambda m, x: m(x), fallback="error", executors=[])(module, part(data[0]))
        compiled = thunder.jit(lambda x, m=None: (m or module)(x), fallback="error", executors=[])  # noqa: B023
        for step, x in enumerate(data):  # the wrappers' state is another one in the second step
            for m in (module, whole):
                m.zero_grad()
            compiled(part(x)).square().mean().backward()
            whole(x).square().mean().backward()
            for (key, p), q in zip(module.named_parameters(), whole.parameters(), strict=True):
                assert p.grad is not None, f"{key} under {name} has no gradient"
                close(whole_of(p.grad), q.grad, f"gradient of {key} under {name} in step {step}")
        assert thunder.cache_misses(compiled) == 1
    module = fully_shard(mlp(), mesh=init_device_mesh("cpu", (size,)))
    module.set_gradient_divide_factor(3.0)
    compiled, eager = thunder.jit(lambda x: module(x), fallback="eager", executors=[]), fully_shard(mlp())
    eager.set_gradient_divide_factor(3.0)
    with warnings.catch_warnings(action="ignore", category=thunder.errors.FallbackWarning):
        compiled(data[0]).sum().backward()  # the original, with PyTorch's hooks
    eager(data[0]).sum().backward()
    for p, q in zip(module.parameters(), eager.parameters(), strict=True):
        close(whole_of(p.grad), whole_of(q.grad), "gradient")


@pytest.mark.parametrize("size", [2, 4])
def test_prepared_modules_inside_of_functions(ranks, size):
    ranks(size)(inside_of_functions, timeout=150.0)


def dtensor_values(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = batches(size, torch.float64)[0]
    of_all = distribute_tensor(x, mesh, [Shard(0)])
    for function, argument, words in (
        (lambda d: (d * 2).sin(), of_all, None),
        (lambda d: d.sum(0), of_all, None),
        (lambda x: DTensor.from_local(x, mesh, [Shard(1)]) * 2, x, None),
        (lambda d: d.redistribute(mesh, [Replicate()]).to_local() * 2, of_all, None),
        (lambda d: (d.sin().sum(0) * 2).full_tensor(), of_all, None),
        (lambda x: (DTensor.from_local(x, mesh, [Shard(0)]) * 2).full_tensor(), x, None),
        (lambda x: DTensor.from_local(x * (rank + 1), mesh, [Partial()]).full_tensor() * 2, x, None),
        (lambda x: DTensor.from_local(x, mesh, [Partial()]).to_local(), x, "to_local of a DTensor whose values"),
        (lambda x: distribute_tensor(x, mesh, [Shard(0)]).to_local(), x, "distribute_tensor"),
    ):
        with contextlib.nullcontext() if words is None else pytest.raises(thunder.errors.CaptureError, match=words):
            actual, wanted = thunder.jit(function, fallback="error", executors=[])(argument), function(argument)
            close(whole_of(actual), whole_of(wanted), "a result")
        with warnings.catch_warnings(action="ignore", category=thunder.errors.FallbackWarning):
            actual = thunder.jit(function, fallback="eager", executors=[])(argument)
        assert type(actual) is type(function(argument))
        close(whole_of(actual), whole_of(function(argument)), "a result")


def test_dtensor_values(ranks):
    ranks(2)(dtensor_values)


def dtensor_inputs(rank, size):
    """Gradients of inputs are DTensors, and another mesh or other placements are another program."""
    mesh = init_device_mesh("cpu", (size,))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compiled = thunder.jit(lambda d, w: (d @ w).sin().full_tensor(), executors=[])
    for i, (of_x, of_w) in enumerate(((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1)))):
        collected, wanted = [], []
        for results, function in ((collected, compiled), (wanted, lambda d, w: (d @ w).sin().full_tensor())):
            inputs = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, of_x), (x.t(), of_w))]
            for _ in range(2):
                y = function(*inputs)
                y.square().sum().backward()
            results += [y, *(t.grad for t in inputs)]
        assert [type(t) for t in collected] == [type(t) for t in wanted] and thunder.cache_misses(compiled) == i + 1
        for one, other in zip(collected, wanted, strict=True):
            close(whole_of(one).detach(), whole_of(other).detach(), f"{of_x} {of_w}")


def test_dtensor_inputs(ranks):
    ranks(2)(dtensor_inputs)


def dtensor_results(rank, size):
    """Results have DTensor's own placements, also of rows that the ranks do not divide, and are differentiated through;
    a DTensor that came in is itself."""
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(0)
    for shape, placement in (((5, 6), Shard(0)), ((4, 8), Shard(1)), ((1, 6), Shard(0)), ((4, 6), Replicate())):
        x = torch.randn(shape, dtype=torch.float64, generator=generator)
        function = lambda d: {"sine": (d * 2).sin(), "of rows": [d.exp().t()], "given": d}
        inputs = [distribute_tensor(x, mesh, [placement]).requires_grad_() for _ in range(2)]
        actual, wanted = thunder.jit(function, fallback="error", executors=[])(inputs[0]), function(inputs[1])
        assert actual["given"] is inputs[0]
        for one, other in ((actual["sine"], wanted["sine"]), (actual["of rows"][0], wanted["of rows"][0])):
            assert isinstance(one, DTensor) and one.placements == other.placements and one.shape == other.shape
            close(one.to_local().detach(), other.to_local().detach(), f"{placement} of {shape}")
        for results in (actual, wanted):
            (results["sine"].square().sum() + results["of rows"][0].sum()).backward()
        close(inputs[0].grad.full_tensor(), inputs[1].grad.full_tensor(), f"gradient of {placement} of {shape}")


def test_dtensor_results(ranks):
    ranks(2)(dtensor_results)
    ranks(4)(dtensor_results)
