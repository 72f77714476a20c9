"""A device on the CPU that records graphs as CUDA does.

`FakeGraph` has the methods of `torch.cuda.CUDAGraph`. While it captures, operations of the thread are not computed:
their results are addresses in the memory of the pool, which hold garbage, and what they would launch is recorded. A
replay runs the recorded launches on the recorded addresses, and no other code. Memory that was freed while something
was recorded is given away again, so that results which are read too late are overwritten. What waits for the device
raises, as on a GPU. Kernels of executors are launches as well: those of `cpp`, and those that Triton's interpreter runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from thunder.core.utils import has_triton
from thunder.executors.cpp_fuser import KernelRegion
from thunder.runtime.cudagraphs.device import GPU

ALIGNMENT = 64  # of the CPU's allocator
POOL_BYTES = 1 << 24
NOT_PERMITTED = "operation not permitted when stream is capturing"
WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::masked_select"}


class Pool:
    """Memory of graphs: blocks that are given away again when the storage in them has died."""

    def __init__(self):
        self.memory = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        self.start = -self.memory.data_ptr() % ALIGNMENT
        self.end, self.free = self.start, list[tuple[int, int]]()  # of what was given away; (size, offset)
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()

    def storage(self, nbytes: int) -> tuple[torch.UntypedStorage, int]:
        """A storage in a block, and the offset of the block."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        fitting = sorted(block for block in self.free if block[0] >= size)
        if fitting:
            block = fitting[0]
            self.free.remove(block)
        else:
            block, self.end = (size, self.end), self.end + size
            assert self.end <= POOL_BYTES, "the fake pool is too small"
        size, offset = block
        owner = (ctypes.c_char * size).from_address(self.memory.data_ptr() + offset)
        owner.memory = self.memory  # of a pool that is not taken any more
        weakref.finalize(owner, self.free.append, block)
        whole = torch.frombuffer(owner, dtype=torch.uint8, count=size)
        return whole.untyped_storage(), offset


class _Capturing(TorchDispatchMode):
    def __init__(self, graph: FakeGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.graph.launched(func, args, kwargs or {})


class _OnGPU(TorchFunctionMode):
    """Functions that look at values on the CPU, and not on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _one_hot(tensor, num_classes):
    return (tensor.unsqueeze(-1) == torch.arange(num_classes)).long()


_CAPTURING: dict[int, FakeGraph] = {}  # by thread


@contextlib.contextmanager
def _kernels_are_launches():
    """Kernels of the threads that capture are recorded, and not run."""
    run_region = KernelRegion.__call__

    def region(self, *args):
        graph = _CAPTURING.get(threading.get_ident())
        return run_region(self, *args) if graph is None else graph.region(lambda *args: run_region(self, *args), args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelRegion, "__call__", region))
        if has_triton():
            from triton.runtime.interpreter import GridExecutor

            run_kernel = GridExecutor.__call__

            def kernel(self, *args, **kwargs):
                graph = _CAPTURING.get(threading.get_ident())
                if graph is None:
                    return run_kernel(self, *args, **kwargs)
                graph.kernel(lambda *args: run_kernel(self, *args, **kwargs), args)

            stack.enter_context(mock.patch.object(GridExecutor, "__call__", kernel))
        yield


class FakeGraph:
    def __init__(self, gpu: FakeGPU):
        self.gpu, self.world, self.launches = gpu, gpu.world, []
        self.failed = False

    # --- the methods of torch.cuda.CUDAGraph
    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if self.world.recording.get(threading.get_ident()):
            raise RuntimeError(NOT_PERMITTED)
        if pool.end > pool.start and not pool.graphs:  # as PyTorch, where results of those that are gone live
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.world.recording[threading.get_ident()] = _CAPTURING[threading.get_ident()] = self
        self.pool, self.allocated, self.outside = pool, [], []
        self.unused = {offset for _, offset in pool.free}, pool.end  # of the pool, before the capture
        self.modes = contextlib.ExitStack()
        for mode in (_kernels_are_launches(), _OnGPU(), _Capturing(self)):
            self.modes.enter_context(mode)

    def capture_end(self) -> None:
        self.modes.close()
        del self.world.recording[threading.get_ident()], _CAPTURING[threading.get_ident()]
        if self.failed or not all(memory.is_permitted() for memory in self.outside):
            raise RuntimeError("the capture was invalidated")
        self.pool.graphs.add(self)
        free, end = self.unused
        for offset, size in self.allocated:  # nothing has been computed, and what was there before is not overwritten
            if offset in free or offset >= end:
                self.pool.memory[offset : offset + size] = 255

    def replay(self) -> None:
        self.world.replays += 1
        self.gpu.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for launch in self.launches:
                launch()

    # --- what is launched
    def launched(self, func, args, kwargs):
        self.world.launches += 1
        if self.world.launches == self.world.out_of_memory_at:
            self.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        schema = func._schema
        if schema.name in WAITS or func.overloadpacket in (torch.ops.aten.index,) and _has_mask(args):
            self.failed = True
            raise RuntimeError(NOT_PERMITTED)
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        fresh = [r for r in schema.returns if r.alias_info is None]
        written = _written(schema, args, kwargs)
        if not fresh and not written and schema.returns and self._is_view(func, args, kwargs):
            return func(*args, **kwargs)
        addresses = tree_map_only(torch.Tensor, self._address, (args, kwargs))
        if schema.name.endswith("_") or any(a.is_out for a in schema.arguments):  # others are not counted
            for t in written:
                torch.autograd.graph.increment_version(t)
        if not fresh and written:  # in place
            self.launches.append(lambda: func(*_opened(addresses[0]), **_opened(addresses[1])))
            return written[0] if len(schema.returns) == 1 else tuple(written) if schema.returns else None
        results = self._results(func, args, kwargs)
        places = [(r, self._address(r)) for r in _tensors(results)]
        self.launches.append(_Launch(func, addresses, [path for _, path in places]))
        return results

    def kernel(self, run, args) -> None:
        """A kernel that writes to some of its arguments."""
        addresses = tree_map_only(torch.Tensor, self._address, args)
        self.launches.append(lambda: run(*_opened(addresses)))

    def region(self, run, args):
        """Kernels with results of the types that they give for zeros."""
        addresses = tree_map_only(torch.Tensor, self._address, args)
        with _disable_current_modes():
            zeros = tree_map_only(torch.Tensor, lambda t: _like(t, "cpu").zero_(), args)
            results = [self._allocated(r) for r in run(*zeros)]
        self.launches.append(_Launch(run, (addresses, {}), [self._address(r) for r in results]))
        return results

    def _is_view(self, func, args, kwargs) -> bool:
        """Whether an operation that may copy does not."""
        typed_arguments, typed = _typed(func, args, kwargs)
        return {t.untyped_storage()._cdata for t in _tensors(typed)} <= {
            t.untyped_storage()._cdata for t in typed_arguments
        }

    def _results(self, func, args, kwargs):
        """Results of the types that an operation gives, in memory of the pool."""
        return tree_map_only(torch.Tensor, self._allocated, _typed(func, args, kwargs)[1])

    def _allocated(self, like: torch.Tensor) -> torch.Tensor:
        nbytes = like.untyped_storage().nbytes()
        storage, offset = self.pool.storage(nbytes)
        self.allocated.append((offset, nbytes))
        view = torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())
        self.world.blocks[storage._cdata] = (weakref.ref(self.pool), offset, StorageWeakRef(storage))
        return view

    def _address(self, t: torch.Tensor):
        """A function that gives the tensor at an address, and holds nothing."""
        data = t.untyped_storage()._cdata
        start = t.storage_offset()
        known = self.world.blocks.get(data)
        if known is not None and not known[2].expired():
            pool, offset, _ = known
            at = offset // t.element_size() + start
            memory = pool()
            return _Address(lambda: memory.memory.untyped_storage(), t.dtype, at, t.shape, t.stride())
        self.outside.append(memory := _Outside(t))
        return _Address(memory.storage, t.dtype, start, t.shape, t.stride())


class _Outside:
    """Memory outside of the pool, at its address. A number that the host made while it recorded is an argument of the
    launch, as on a GPU; a copy of more from there waits for the device."""

    def __init__(self, t: torch.Tensor):
        memory = t.untyped_storage()
        self._reference, self._start, self._nbytes = StorageWeakRef(memory), memory.data_ptr(), memory.nbytes()
        is_number = t.dim() == 0 and self._nbytes == t.element_size()
        self._number = memory.clone() if is_number else None
        self._is_argument = False

    def is_permitted(self) -> bool:
        """At the end of a capture, which holds its inputs."""
        self._is_argument = self._reference.expired()
        return not self._is_argument or self._number is not None

    def storage(self) -> torch.UntypedStorage:
        if self._is_argument:
            assert self._number is not None
            return self._number
        if not self._reference.expired():
            return torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        # a graph knows addresses: another tensor lies there now
        owner = (ctypes.c_char * self._nbytes).from_address(self._start)
        return torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()


class _Address:
    def __init__(self, storage, dtype, start, shape, strides):
        self.storage, self.dtype, self.start, self.shape, self.strides = storage, dtype, start, shape, strides

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.dtype).set_(self.storage(), self.start, self.shape, self.strides)


class _Launch:
    def __init__(self, func, addresses, places):
        self.func, self.addresses, self.places = func, addresses, places

    def __call__(self) -> None:
        results = self.func(*_opened(self.addresses[0]), **_opened(self.addresses[1]))
        for path, r in zip(self.places, _tensors(results), strict=True):
            if not r.numel():
                continue  # of statistics that nothing reads, which the CPU leaves out
            once(path.tensor()).copy_(once(r))


def once(t: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor, each once."""
    return t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def _opened(x):
    return tree_map_only(_Address, _Address.tensor, x)


def _like(t: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)


def _typed(func, args, kwargs):
    """Zeros in the place of the arguments, and the results for them: types of results are those of the CPU's kernels.
    What draws numbers runs on the meta device."""
    addresses, device = [], "meta" if torch.Tag.nondeterministic_seeded in func.tags else "cpu"

    def moved(t):
        addresses.append(_like(t, device))
        return addresses[-1] if device == "meta" else addresses[-1].zero_()

    kwargs = {k: torch.device(device) if k == "device" and v is not None else v for k, v in kwargs.items()}
    with torch.no_grad(), _disable_current_modes():
        return addresses, func(*tree_map_only(torch.Tensor, moved, args), **tree_map_only(torch.Tensor, moved, kwargs))


def _tensors(x) -> list[torch.Tensor]:
    storages = []
    tree_map_only(torch.Tensor, storages.append, x)
    return storages


def _has_mask(args) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))


def _written(schema, args, kwargs) -> list[torch.Tensor]:
    results = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = kwargs.get(a.name) if a.name in kwargs or i >= len(args) else args[i]
            results += _tensors(value)
    return results


class World:
    """What the fake devices of a test share.

    host, device, graphed: seconds that the host and the device take for a forward or a backward, and for one that
    replays graphs. out_of_memory_at: the number, among the launches of all captures, of one that finds no memory.
    """

    def __init__(self):
        self.host, self.device, self.graphed = 1.0, 0.5, 0.5
        self.recording: dict[int, FakeGraph] = {}  # by thread
        self.blocks: dict[int, tuple] = {}  # by storage: its pool, its offset, and whether it lives
        self.replays = self.launches = self.out_of_memory_at = 0
        self.ticks, self.room, self.recorded_by_user = 0.0, (1 << 30, 1 << 30), False
        self.local = threading.local()

    @contextlib.contextmanager
    def stream(self, handle: int):
        before, self.local.handle = getattr(self.local, "handle", 0), handle
        try:
            yield
        finally:
            self.local.handle = before


class FakeStream:
    def __init__(self, handle: int):
        self.cuda_stream = handle

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGPU(GPU):
    alignment = ALIGNMENT

    def __init__(self, device: torch.device, world: World):
        self.device, self.index, self.world, self.replays = device, 0, world, 0

    def graph(self) -> FakeGraph:
        return FakeGraph(self)

    def pool(self) -> Pool:
        return Pool()

    def new_stream(self) -> FakeStream:
        return FakeStream(-1)

    def stream(self) -> FakeStream:
        return FakeStream(self.handle())

    def handle(self) -> int:
        return getattr(self.world.local, "handle", 0)

    def read_on(self, stream: FakeStream, tensor: torch.Tensor) -> None:
        pass

    def _at(self, address: int, nbytes: int, graph: FakeGraph) -> torch.Tensor:
        owner = (ctypes.c_char * nbytes).from_address(address)
        owner.graph = graph
        return torch.frombuffer(owner, dtype=torch.uint8)

    def on(self, stream: FakeStream):
        return self.world.stream(stream.cuda_stream)

    def is_recording(self) -> bool:
        return self.world.recorded_by_user or threading.get_ident() in self.world.recording

    def settle(self) -> None:
        if self.is_recording():
            raise RuntimeError(NOT_PERMITTED)

    wait = settle

    def held_by(self, pool: Pool) -> int:
        return pool.end

    def room(self) -> tuple[int, int]:
        return self.world.room

    def now(self) -> float:
        self.world.ticks += self.world.host
        return self.world.ticks

    def mark(self) -> int:
        return self.world.replays

    def between(self, first: int, last: int) -> float:
        return self.world.graphed if last > first else max(self.world.host, self.world.device)

    def renew_generator(self) -> None:
        pass
