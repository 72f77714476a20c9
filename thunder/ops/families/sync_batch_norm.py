"""The parts of batch norm over several devices. PyTorch has all but `batch_norm_update_stats` for CUDA alone."""

from __future__ import annotations

import torch

from thunder.core.dtypes import float32
from thunder.core.proxies import like
from thunder.ops.families.norm_kernels import compute_dtype
from thunder.ops.functionalize.inplace import overwrite
from thunder.ops.registry import alias, torch_prim


def _channels(a, dtype=None):
    return like(a, (a.shape[1],), compute_dtype(a.dtype) if dtype is None else dtype)


batch_norm_stats = torch_prim(torch.batch_norm_stats, name="batch_norm_stats")(
    lambda a, eps: (_channels(a), _channels(a))
)
batch_norm_elemt = torch_prim(torch.batch_norm_elemt, name="batch_norm_elemt")(
    lambda a, weight, bias, mean, invstd, eps: like(a)
)
batch_norm_backward_elemt = torch_prim(torch.batch_norm_backward_elemt, name="batch_norm_backward_elemt")(
    lambda grad_out, a, mean, invstd, weight, sum_dy, sum_dy_xmu, count: like(a)
)


@torch_prim(torch.batch_norm_backward_reduce)
def batch_norm_backward_reduce(grad_out, a, mean, invstd, weight, input_g, weight_g, bias_g):
    sums = (_channels(a), _channels(a)) if input_g else (None, None)
    return (
        *sums,
        (like(weight) if weight_g and weight is not None else None),
        (like(weight) if bias_g and weight is not None else None),
    )


def _gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
    return _channels(a, mean.dtype), _channels(a, mean.dtype)


def _gather(name: str) -> None:
    function = getattr(torch, name)

    def run(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        running = [None if t is None else t.clone() for t in (running_mean, running_var)]
        return *function(a, mean, invstd, *running, momentum, eps, counts), *running

    def meta(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        return *_gathered(a, mean, invstd, running_mean, running_var, momentum, eps, counts), *(
            None if t is None else like(t) for t in (running_mean, running_var)
        )

    symbol = torch_prim(fn=run, name=name)(meta)

    @alias(function)
    def call(a, mean, invstd, running_mean, running_var, momentum, eps, counts):
        """The running statistics are written to."""
        mean_, invstd_, *new = symbol(a, mean, invstd, running_mean, running_var, momentum, eps, counts)
        for target, value in zip((running_mean, running_var), new, strict=True):
            if target is not None:
                overwrite(target, value)
        return mean_, invstd_


_gather("batch_norm_gather_stats")
_gather("batch_norm_gather_stats_with_counts")


def _run_update_stats(a, running_mean, running_var, momentum):
    running = [None if t is None else t.clone() for t in (running_mean, running_var)]
    return *torch.batch_norm_update_stats(a, *running, momentum), *running


@torch_prim(fn=_run_update_stats)
def batch_norm_update_stats(a, running_mean, running_var, momentum):
    """Mean and variance of the batch, and what the running ones become."""
    mixed = a.device.type != "cpu" or any(t is not None and t.dtype is float32 for t in (running_mean, running_var))
    kept = _channels(a, None if mixed else a.dtype)
    return kept, like(kept), *(None if t is None else like(t) for t in (running_mean, running_var))


@alias(torch.batch_norm_update_stats)
def _batch_norm_update_stats(a, running_mean, running_var, momentum):
    mean, var, *new = batch_norm_update_stats(a, running_mean, running_var, momentum)
    for target, value in zip((running_mean, running_var), new, strict=True):
        if target is not None:
            overwrite(target, value)
    return mean, var
