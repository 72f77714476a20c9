"""Distributed training on `torch.distributed`: data parallelism as placements of parameters, and communication as lines
of traces.

    model = thunder.jit(thunder.distributed.fsdp(model))

In the order of the flow: `data_parallel` (`ddp` and `fsdp` prepare a module), `layouts` (how the ranks of an axis hold
a value), `placement` (how they hold a parameter), `redistribute` (what moves between them), `bucketing` (several at
once), `schedule` (early starts, late waits), `accumulation` (`no_sync`); `tensor_parallel` and `layers` split layers,
`layout_types` checks what ranks have; `planning` and `costs` say what a step takes before it runs. The collectives are
operations: `thunder.ops.families.collectives`.
"""

from __future__ import annotations

from thunder._lazy import names_from

_FROM = {
    "thunder.distributed.data_parallel": ("ddp", "fsdp", "copy_default_process_group"),
    "thunder.distributed.transforms": ("DDPTransform", "FSDPTransform"),
    "thunder.distributed.tensor_parallel": ("column_parallel", "row_parallel"),
    "thunder.distributed.context_parallel": ("context_parallel",),
    "thunder.distributed.expert_parallel": ("expert_parallel",),
    "thunder.distributed.pipelines": ("PipelineStage", "pipeline_stages"),
    "thunder.distributed.planning": ("plan",),
    "thunder.distributed.layout_search": ("Candidate", "search"),
    "thunder.distributed.costs": ("Machine", "H200"),
    "thunder.distributed.accumulation": ("no_sync", "clip_grad_norm_"),
    "thunder.distributed.placement": (
        "FSDPType", "FSDPBucketingStrategy", "skip_data_parallel_grad_sync", "set_skip_data_parallel_grad_sync",
        "reset_skip_data_parallel_grad_sync",
        "get_skip_data_parallel_grad_sync",
    ),
}  # fmt: skip

__all__ = sorted(["checkpoint", *(name for names in _FROM.values() for name in names)])
__getattr__, __dir__ = names_from(__name__, _FROM)
