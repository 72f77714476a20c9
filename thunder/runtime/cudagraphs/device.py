"""The device that graphs are recorded on: graphs, streams, memory and clocks, in the few calls that `Memory` and the
tier of graphs need. `DEVICES` has the types of device that record by themselves; tests put an imitation there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from thunder import compat

FREE = 0.25  # of the device's memory, of which a recording takes its own


class GPU:
    """A GPU. `graph()` is a `torch.cuda.CUDAGraph`.

    alignment: bytes by which memory is aligned, as far as the choice of a kernel depends on it.
    """

    alignment = 256

    def __init__(self, device: torch.device):
        self.device = device
        self.index = device.index if device.index is not None else torch.cuda.current_device()

    def graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def pool(self) -> Any:
        """A pool of memory for graphs."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.device)

    def stream(self) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(self.index)

    def handle(self) -> int:
        """The handle of the current stream."""
        return compat.current_stream(self.index)

    def read_on(self, stream: Any, tensor: torch.Tensor) -> None:
        """A stream reads a tensor, whose memory is not given away before that."""
        tensor.record_stream(stream)

    def without_owner(self, tensors: Sequence[torch.Tensor], graph: Any) -> list[torch.Tensor]:
        """Tensors that show the memory of tensors of one storage, and do not keep it allocated. graph: stays alive with
        them, and with it the pool that the memory belongs to."""
        storage = tensors[0].untyped_storage()
        if not storage.nbytes():
            return [*tensors]
        memory = self._at(storage.data_ptr(), storage.nbytes(), graph).untyped_storage()
        shown = [torch.empty(0, dtype=t.dtype, device=t.device) for t in tensors]
        pairs = zip(shown, tensors, strict=True)
        return [s.set_(memory, t.storage_offset(), t.shape, t.stride()) for s, t in pairs]

    def _at(self, address: int, nbytes: int, graph: Any) -> torch.Tensor:
        """The bytes at an address."""
        return torch.as_tensor(_Memory(address, nbytes, graph), device=self.device)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    def is_recording(self) -> bool:
        """Whether the current stream is recorded by somebody."""
        return torch.cuda.is_current_stream_capturing()

    def settle(self) -> None:
        """Waits for the device. Gives cached memory back to it where little is free: a recording cannot."""
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.index)
        if free < FREE * total:
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Waits for the current stream."""
        torch.cuda.current_stream(self.index).synchronize()

    def held_by(self, pool: Any) -> int:
        """Bytes of the device that a pool holds."""
        try:
            segments = torch.cuda.memory_snapshot(tuple(pool), include_traces=False)
        except TypeError:  # before torch 2.11
            segments = torch.cuda.memory_snapshot()
        here = (s for s in segments if s["device"] == self.index)
        return sum(s["total_size"] for s in here if tuple(s["segment_pool_id"]) == tuple(pool))

    def room(self) -> tuple[int, int]:
        """Bytes of the device that a program may still take, and all of them."""
        free, total = torch.cuda.mem_get_info(self.index)
        return free + torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index), total

    def now(self) -> float:
        """Seconds of the host's clock."""
        return time.perf_counter()

    def mark(self) -> Any:
        """A point in the current stream, for `between`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.index))
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds of the device between two points. Waits for the last one."""
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def renew_generator(self) -> None:
        """Gives the default generator a state of its own again, which a recording that failed leaves as that of the
        recording."""
        generator = torch.cuda.default_generators[self.index]
        with contextlib.suppress(RuntimeError):
            generator.graphsafe_set_state(generator.clone_state())


class _Memory:
    """Memory of a GPU, in the form of Numba's interface of CUDA arrays, which PyTorch reads."""

    def __init__(self, address: int, nbytes: int, graph: Any):
        self.graph = graph
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2}


DEVICES: dict[str, Callable[[torch.device], GPU]] = {"cuda": GPU}
