"""PyTorch's own tools, and torchmetrics."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from .common import Compile, batches, classified, language_loss, mlp, model_of, program, tokens, trained, weights


def data_set() -> TensorDataset:
    return TensorDataset(*(torch.cat(column) for column in zip(*batches(), strict=True)))


# --- data and metrics
@program("torchmetrics")
def accuracy_over_a_loader_with_workers(compiled: Compile) -> Any:
    import torchmetrics

    model, metric = compiled(mlp()), torchmetrics.Accuracy("multiclass", num_classes=4)
    for x, y in DataLoader(data_set(), 6, num_workers=1):
        metric.update(model(x).detach(), y)
    return float(metric.compute())


@program("torchmetrics", "a collection in the step of training")
def metrics_in_the_step(compiled: Compile) -> Any:
    import torchmetrics

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y):
            scores = self.net(x)
            with torch.no_grad():
                right = torchmetrics.functional.accuracy(scores, y, "multiclass", num_classes=4, validate_args=False)
            return F.cross_entropy(scores, y), right, scores.detach()

    model, results = compiled(Step()), []
    metrics = torchmetrics.MetricCollection([
        torchmetrics.F1Score("multiclass", num_classes=4), torchmetrics.AUROC("multiclass", num_classes=4),
        torchmetrics.ConfusionMatrix("multiclass", num_classes=4),
    ])  # fmt: skip
    mean, optimizer = torchmetrics.MeanMetric(), torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches():
        loss, right, scores = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics.update(scores, y)
        mean.update(loss.detach())
        results += [float(right), loss.item()]
    return results, metrics.compute(), float(mean.compute()), weights(model)


@program("torchmetrics", "similarity of images as a loss")
def metric_as_loss(compiled: Compile) -> Any:
    import torchmetrics

    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            return 1 - torchmetrics.functional.image.structural_similarity_index_measure(self.net(x), x, data_range=1.0)

    model = compiled(Scored())
    x = torch.linspace(0, 1, 256).view(1, 1, 16, 16)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, x: m(x), [x] * 3), weights(model)


class Rows(IterableDataset):
    def __iter__(self):
        yield from (row for row in zip(*(torch.cat(c) for c in zip(*batches(), strict=True)), strict=True))


@program("torch", "workers that stay, rows of a stream, a batch that is smaller")
def workers(compiled: Compile) -> Any:
    model = compiled(mlp())
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    stream = DataLoader(Rows(), 5, num_workers=1, persistent_workers=True)
    shuffled = DataLoader(data_set(), 5, shuffle=True, generator=torch.Generator().manual_seed(0))
    for data in (stream, shuffled, stream):
        losses += trained(model, optimizer, classified, list(data))
    return losses, weights(model)


# --- saving
@program("torch")
def save_load_and_copy(compiled: Compile) -> Any:
    model, x = compiled(mlp()), batches()[0][0]
    model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again, other = torch.load(buffer, weights_only=False), compiled(mlp())
    other.load_state_dict(model.state_dict())
    return again(x).detach(), other(x).detach(), copy.deepcopy(model)(x).detach()


@program("torch", "a checkpoint that plain PyTorch loads, and its way back")
def checkpoint(compiled: Compile) -> Any:
    def started():
        model = mlp()
        return model, torch.optim.AdamW(model.parameters(), 1e-2)

    plain, _ = started()
    model = compiled(plain)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trained(model, optimizer, classified, batches())
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/kept.pt")
        loaded = torch.load(f"{folder}/kept.pt", weights_only=True)
    again, its_optimizer = started()
    again.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    more = trained(again, its_optimizer, classified, batches())
    back = compiled(mlp())
    back.load_state_dict(again.state_dict())
    return more, weights(again), back(batches()[0][0]).detach(), list(loaded["model"]) == list(again.state_dict())


@program("torch", "distributed checkpoints")
def distributed_checkpoint(compiled: Compile) -> Any:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = compiled(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trained(model, optimizer, classified, batches())
    with tempfile.TemporaryDirectory() as folder:
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        again = mlp()
        its_optimizer = torch.optim.AdamW(again.parameters(), 1e-2)
        states = get_state_dict(again, its_optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
        set_state_dict(again, its_optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return weights(model), weights(again), trained(again, its_optimizer, classified, batches())


# --- loops
@program("torch")
def averaged_weights(compiled: Compile) -> Any:
    model = compiled(mlp())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        trained(model, optimizer, classified, [batch])
        averaged.update_parameters(model)
    return averaged(batches()[0][0]).detach()


@program("torch", "gradient scaler, bf16", "bf16")
def gradient_scaler(compiled: Compile) -> Any:
    model, scaler = compiled(mlp()), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for batch in batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = classified(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, weights(model)


@program("torch", "gradient scaler, fp16", "f16")
def half(compiled: Compile) -> Any:
    model, scaler = compiled(mlp()), torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=2)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in batches():
        with torch.autocast("cpu", torch.float16):
            loss = classified(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    return losses, weights(model)


@program("torch")
def line_search(compiled: Compile) -> Any:
    model, batch = compiled(mlp()), batches()[0]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = classified(model, batch)
        loss.backward()
        return loss

    return optimizer.step(closure).item(), weights(model)


@program("torch", "optimizers in the backward, one cycle of rates")
def optimizer_in_backward(compiled: Compile) -> Any:
    model = compiled(model_of("gpt2"))
    optimizers = {p: torch.optim.AdamW([p], 1e-3) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=5) for o in optimizers.values()]
    losses = []
    for _ in range(3):
        loss = language_loss(model, tokens(2, 9))
        loss.backward()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    return losses, weights(model)


@program("torch", "hooks of modules and tensors")
def hooks(compiled: Compile) -> Any:
    plain, seen = mlp(), []
    plain[1].register_forward_hook(lambda m, inputs, result: result * 1.5)
    plain[0].register_forward_pre_hook(lambda m, inputs: (inputs[0] + 1,))
    plain[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    model = compiled(plain)
    model.register_forward_hook(lambda m, inputs, result: seen.append(float(result.detach().sum())))
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), classified, batches()), seen, weights(model)


@program("torch", "parametrizations: weight norm, spectral norm, pruning")
def parametrized(compiled: Compile) -> Any:
    from torch.nn.utils import parametrizations, prune

    plain = nn.Sequential(*mlp(), nn.Linear(4, 4))
    parametrizations.weight_norm(plain[0])
    parametrizations.spectral_norm(plain[3])
    prune.l1_unstructured(plain[4], "weight", 0.5)
    model = compiled(plain)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), classified, batches()), weights(model)


@program("torch", "batch norm: an average's statistics, frozen statistics")
def statistics(compiled: Compile) -> Any:
    torch.manual_seed(0)
    model = compiled(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)))
    averaged, optimizer = torch.optim.swa_utils.AveragedModel(model), torch.optim.SGD(model.parameters(), 0.1)
    losses = trained(model, optimizer, classified, batches())
    averaged.update_parameters(model)
    torch.optim.swa_utils.update_bn([x for x, _ in batches()], averaged)
    model.eval()
    losses += trained(model, optimizer, classified, batches())
    return losses, weights(model), weights(averaged)


@program("torch", "a critic and its slow copy")
def slow_copy(compiled: Compile) -> Any:
    critic = compiled(mlp())
    target = copy.deepcopy(critic).requires_grad_(False)
    optimizer, losses = torch.optim.Adam(critic.parameters(), 1e-2), []
    for x, action in batches():
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * target(x).amax(-1)
        loss = F.smooth_l1_loss(critic(x).gather(1, action[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        losses.append(loss.item())
    return losses, weights(target)


@program("torch", "gradients of inputs, a penalty on them")
def penalty(compiled: Compile) -> Any:
    model = compiled(mlp())
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x, y in batches():
        x = x.requires_grad_()
        scores = model(x)
        (g,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = F.cross_entropy(scores, y) + ((g.norm(2, 1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights(model)


@program("torch", "checkpoints of stages, reentrant")
def stages(compiled: Compile) -> Any:
    class Staged(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.GELU()) for _ in range(4)))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(torch.utils.checkpoint.checkpoint_sequential(self.body, 2, x, use_reentrant=True))

    model, data = compiled(Staged()), [(x.requires_grad_(), y) for x, y in batches()]
    torch.manual_seed(1)
    return trained(model, torch.optim.SGD(model.parameters(), 0.1), classified, data), weights(model)


# --- several processes
def worker(rank: int, folder: str, model: nn.Module, state: dict[str, Any]) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads that OpenMP waits for
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        parallel = nn.parallel.DistributedDataParallel(model, **state)
        optimizer, losses = torch.optim.SGD(parallel.parameters(), 0.1), []
        rows = torch.utils.data.distributed.DistributedSampler(data_set(), 2, rank, shuffle=False)
        for step, batch in enumerate(DataLoader(data_set(), 4, sampler=rows)):
            if step % 2 == 0:
                with parallel.no_sync():
                    classified(parallel, batch).backward()
                continue
            loss = classified(parallel, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        programs = [str(p.forward) for p in getattr(model, "programs", ())]
        torch.save({"losses": losses, "weights": weights(model), "programs": programs}, f"{folder}/{rank}")
    finally:
        torch.distributed.destroy_process_group()


def two_ranks(**state: Any):
    def run(compiled: Compile) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            model = compiled(mlp())
            torch.multiprocessing.start_processes(worker, (folder, model, state), nprocs=2, start_method="fork")
            loaded = [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(2)]
        for rank in loaded:
            getattr(compiled, "elsewhere", []).extend(rank.pop("programs"))
        return loaded

    return run


program("torch", "DDP of two processes, accumulation")(two_ranks())
program("torch", "DDP of two processes, unused parameters looked for")(two_ranks(find_unused_parameters=True))
program("torch", "DDP of two processes, gradients as views")(two_ranks(gradient_as_bucket_view=True))


@program("torch")
def data_parallel_over_one_process(compiled: Compile) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = torch.nn.parallel.DistributedDataParallel(compiled(mlp()))
            return trained(model, torch.optim.SGD(model.parameters(), 0.1), classified, batches())
        finally:
            torch.distributed.destroy_process_group()
