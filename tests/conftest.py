"""Set-up of all tests."""

import gc
import os
import random
import zlib
from collections import defaultdict

import numpy
import pytest
import torch

os.environ.setdefault("THUNDER_TIERS", "one")  # tests compile no kernels that they do not ask for
os.environ.setdefault("THUNDER_FALLBACK", "error")  # a program that is not captured is a failure
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, whichever test does that
    # Without devices torch.manual_seed queues the seed and its caller's formatted stack for each kind of device: 1.3 ms
    # a call and memory that grows, against 2 us for the CPU's generator.
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        devices.manual_seed_all = lambda seed: None


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="at most so many cases of each test that has parameters")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Mark slow what `sweep` leaves out, and select the cases of `--cases`, evenly over those of a test."""
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and zlib.crc32(item.name.encode()) % sweep.args[0]:
            item.add_marker(pytest.mark.slow)
    wanted = config.getoption("--cases")
    if not wanted:
        return
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.split("[")[0]].append(item)
    chosen = set()
    for items_of_test in cases.values():
        step = max(1, len(items_of_test) / wanted)
        chosen |= {id(items_of_test[int(i * step)]) for i in range(min(wanted, len(items_of_test)))}
    config.hook.pytest_deselected(items=[i for i in items if id(i) not in chosen])
    items[:] = [i for i in items if id(i) in chosen]


def pytest_collection(session):
    """Keep the garbage collector from walking over all modules and tests, again and again: they stay."""
    gc.disable()


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def freeze():
    """What a file has imported and compiled stays too."""
    yield
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(scope="module")
def native_extension():
    """The extension in C++ that an earlier run has left on this machine; tests/test_extension.py builds one."""
    from thunder.runtime import disk_cache, extensions

    compiler = extensions._compiler()
    known = disk_cache.load(extensions._key(compiler)) if compiler else None
    if known is None or known[0].get("failed"):
        pytest.skip("no large or warm program has had the extension built on this machine")
    return extensions.loaded_extension()


@pytest.fixture(scope="session")
def triton_interpreter():
    """Triton's interpreter without three faults. Before 3.7, it makes an index of an array of one dimension, which NumPy
    refuses from 2.4 on: in loops to a number that a kernel has loaded. Before 3.6, it reads a value that is broadcast
    to the places of an atomic as if it were dense. And what it broadcasts of a comparison of floats are floats."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    usual, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder
    atomic, splat = builder.create_atomic_rmw, builder.create_splat

    def patch(tensor, *scope):
        usual(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def splat_of_truth(self, shape, value):
        if value.data.dtype == bool:
            return interpreter.TensorHandle(numpy.full(shape.shape, value.data.item()), interpreter.tl.int1)
        return splat(self, shape, value)

    def dense_atomic(self, operation, places, value, *args):
        dense = interpreter.TensorHandle(numpy.ascontiguousarray(value.data), value.dtype)
        return atomic(self, operation, places, dense, *args)

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang_tensor", patch)
        changes.setattr(builder, "create_atomic_rmw", dense_atomic)
        changes.setattr(builder, "create_splat", splat_of_truth)
        yield


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests ran before, in the samples of PyTorch's op_db as well, which ask Python for
    some."""
    random.seed(0)
    torch.manual_seed(0)
