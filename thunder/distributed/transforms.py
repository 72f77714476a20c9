"""`ddp` and `fsdp` as transforms: `thunder.jit(model, transforms=[FSDPTransform()])` is `thunder.jit(fsdp(model))`."""

from __future__ import annotations

from thunder.distributed.data_parallel import ddp, fsdp
from thunder.transforms.base import Transform


class DDPTransform(Transform):
    """Applies `thunder.distributed.ddp` to the module that is compiled. The arguments are those of `ddp`."""

    def __init__(self, process_group=None, bucket_size_in_mb: float = 25.0, broadcast_from: int | None = 0):
        self.options = {
            "process_group": process_group,
            "bucket_size_in_mb": bucket_size_in_mb,
            "broadcast_from": broadcast_from,
        }

    def transform_module(self, model) -> None:
        ddp(model, **self.options)


class FSDPTransform(Transform):
    """Applies `thunder.distributed.fsdp` to the module that is compiled. The arguments are those of `fsdp`.

    release_original_parameters: has no effect, since only shards are stored in any case.
    """

    def __init__(self, *, release_original_parameters: bool = True, **options):
        self.options = options

    def transform_module(self, model) -> None:
        fsdp(model, **self.options)
