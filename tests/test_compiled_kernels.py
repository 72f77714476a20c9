"""What runs on a GPU, without one: machine code that Triton compiles for it, the directory it is kept in, and launches,
with stand-ins for the driver."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import thunder
from tests import fresh
from thunder import compat
from thunder.executors import triton_fuser
from thunder.executors.triton_kernels import binary, launched, launcher
from thunder.kernels import lower
from thunder.runtime import disk_cache

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="kernels need Triton")


class Everywhere(triton_fuser.TritonFuser):
    """Takes tensors of any device."""

    def runs_on(self, kinds):
        return True

    def can_fuse(self, line):
        return triton_fuser.fusible(line, numbers=True) and lower.lowers(line, triton_fuser._computes, numbers=True)

    def unavailable(self):
        return None


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def driver(directory, monkeypatch):
    """A GPU of capability 9.0 that only writes down what it is asked."""
    calls = []
    properties = types.SimpleNamespace(name="none", multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    for name, value in {
        "current_device": lambda: 0, "get_device_capability": lambda device: (9, 0),
        "get_device_properties": lambda device: properties, "device": lambda device: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(launched, "interpreting", lambda: False)
    monkeypatch.setattr(compat, "current_device", lambda: 0)
    monkeypatch.setattr(compat, "current_stream", lambda index: 7)
    monkeypatch.setattr(compat, "launch_kernel", lambda *arguments: calls.append(arguments), raising=False)
    monkeypatch.setattr(compat, "load_kernel", lambda path, name, shared, device: f"{name} on {device}")
    monkeypatch.setattr(compat, "set_device", lambda device: None)
    monkeypatch.setattr(binary, "_requested", {})
    binary._loaded.cache_clear()
    return calls


@pytest.fixture
def compiled(monkeypatch):
    """Requests that would have gone to Triton."""
    requests = []

    def compile(request):
        requests.append(request)
        return {"name": request.name, "shared": 0, "scratch": 2}, b"code of " + request.text.encode()

    monkeypatch.setattr(binary, "_compile", compile)
    return requests


def program(x, y):
    return torch.exp(x * y) + x


def jit(name, fn=program):
    return thunder.jit(fn, executors=[Everywhere(name)])


X, Y = torch.ones(64), torch.ones(64)


KERNEL = (
    "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(a):\n    i = tl.arange(0, 64)\n  "
    "  tl.store(a + i, tl.sum(tl.load(a + i), 0) + i)\n"
)


def test_triton_compiles_for_a_device(directory):
    """In a process without the interpreter, which a process is with or without."""
    text = f"""
from thunder.executors.triton_kernels import binary
made = binary.binary_of(binary.Request("kernel", {KERNEL!r}, (("*fp32", True),), 4, 90)).result()
print(made.name, open(made.path, "rb").read(4))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(directory.parent / "triton")}
    process = fresh.run("-c", text, env=environment)
    assert process.stdout == "kernel b'\\x7fELF'\n", process.stderr
    assert len(list(directory.glob("*.bin"))) == 1


def test_what_kernels_call_compiles(directory):
    """Functions that the interpreter knows, and Triton of each version for a device."""
    text = """
from thunder.executors.triton_kernels import binary
from thunder.kernels.triton_cuda import HEADER
from thunder.kernels.triton_helpers import HELPERS
of_two = ["_floor_divide", "_remainder"]
calls = [f"{name}(x)" for name in HELPERS if name not in ("_uniform", *of_two)]
calls += [f"{name}(i, tl.full([1], 3, tl.int32))" for name in of_two] + ["_uniform(seed, 3, i, 0)", "tl.div_rn(x, 3.0)", "_sqrt(x.to(tl.float64))", "_rsqrt(x.to(tl.float64))"]
body = ["i = tl.arange(0, 64)", "x = tl.load(a + i)", "seed = tl.load(b + tl.zeros([1], tl.int32))", "tl.store(a + i, " + " + ".join(calls) + ")"]
text = HEADER + "".join(HELPERS.values()) + "\\n@triton.jit\\ndef kernel(a, b):\\n    " + "\\n    ".join(body) + "\\n"
made = binary.binary_of(binary.Request("kernel", text, (("*fp32", True), ("*i64", True)), 4, 90)).result()
print(open(made.path, "rb").read(4))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(directory.parent / "triton")}
    process = fresh.run("-c", text, env=environment)
    assert process.stdout == "b'\\x7fELF'\n", process.stderr


def test_a_process_for_kernels_that_has_ended_is_replaced(directory, monkeypatch):
    """One that has ended while nothing was compiled is no failure; one that ends each time is, in words."""
    servers = []

    class Server:
        def __init__(self, module, idle):
            self.requests, self.code, self.is_closed = 0, None, False
            servers.append(self)

        def poll(self):
            return self.code

        def close(self):
            self.is_closed = True

        def run(self, request):
            self.requests += 1
            if self.requests == dies:
                self.code = -9
                raise binary.Died(self.code)
            return {"name": request.name, "shared": 0, "scratch": 0}, b"code"

    monkeypatch.setattr(binary, "_servers", [])
    monkeypatch.setattr(binary, "ForkServer", Server)
    dies = 2
    for number in range(4):
        facts, code = binary._compile(binary.Request(f"kernel{number}", "", (), 4, 90))
        assert (facts["name"], code) == (f"kernel{number}", b"code")
    assert [server.requests for server in servers] == [2, 2, 2, 1]
    assert [server.is_closed for server in servers] == [True, True, True, False]
    dies = 1
    servers[-1].requests = 0
    with pytest.raises(RuntimeError, match="compiles the kernel k has ended with -9"):
        binary._compile(binary.Request("k", "", (), 4, 90))

    def none_left(module, idle):
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(binary, "ForkServer", none_left)
    monkeypatch.setattr(binary.Request, "compile", lambda self: ("here", self.name))
    assert binary._compile(binary.Request("k", "", (), 4, 90)) == ("here", "k")


def test_handwritten_kernels_compile(directory):
    """Each for a device, as its executor asks for it; Triton is imported by the processes that compile alone."""
    text = """
import sys
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: (9, 0)
from thunder.executors import embedding_gradient, float8, linear_cross_entropy, matvec
from thunder.executors.triton_kernels import binary
half, wide, long, short = torch.bfloat16, torch.float32, torch.int64, torch.int32
of_type = float8._of_type(torch.float8_e4m3fn)
asked = [
    (matvec._row, [half] * 6, matvec._settings_of_row((512, 256), 1024, False)),
    (matvec._rows, [half] * 4, matvec._settings_of_rows(7, 512, 1024, True)),
    (embedding_gradient._each_row, [half, long, short, half], embedding_gradient._settings_of_rows(99, 4096, -1)),
    (embedding_gradient._long_rows, [half, long, long, short, half], embedding_gradient._settings_of_long_rows(9, 64, 1)),
    (linear_cross_entropy._kernel, [half, long, torch.bool, half, wide, wide], ((4,), (999, 1000, True, 1024), 4)),
    (float8._write_both, [half, wide, torch.float8_e4m3fn, torch.float8_e4m3fn, wide],
     ((8,), (64, 96, 96, 1, *of_type, True, 64, 128), 4)),
    (float8._write_each_row, [half, torch.float8_e4m3fn, wide], ((8,), (96, 96, 1, *of_type, 128), 8)),
    (float8._write_each_column, [half, torch.float8_e4m3fn, wide], ((8,), (64, 96, 96, 1, *of_type, 32, 128), 8)),
]
for kernel, dtypes, settings in asked:
    kernel.start(dtypes, settings, torch.device("cuda"))
made = [request.result() for request in binary._requested.values()]
print(len(made), {open(b.path, "rb").read(4) for b in made}, "triton" in sys.modules)
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(directory.parent / "triton")}
    process = fresh.run("-c", text, env=environment)
    assert process.stdout == "8 {b'\\x7fELF'} False\n", process.stderr


def test_a_launch_passes_addresses(driver, compiled):
    function = jit("addresses")
    out = function(X, Y)
    assert driver == [
        ("fused_mul_exp_add on 0", 1, 1, 1, 1, 0, "OOOOO", (X.data_ptr(), Y.data_ptr(), out.data_ptr(), None, None), 7)
    ]
    assert [r.arguments for r in compiled] == [(("*fp32", True),) * 3]
    function(X, Y)
    assert len(driver) == 2 and len(compiled) == 1


def test_reads_and_additions_by_index_tensors_compile(driver, compiled, directory):
    """And run by PyTorch where it is asked for deterministic algorithms. What is added to is not copied where it is
    overwritten."""

    def sums(x, source, i):
        return torch.cat((x, torch.zeros_like(x).index_add(0, i, (source * x[i]).exp())), -1)

    def written(x, source, i):
        x.index_add_(0, i, source.exp())
        return source * 2

    x, source, i = torch.ones(8, 32), torch.ones(100, 32), torch.zeros(100, dtype=torch.int64)
    function = jit("indices", sums)
    function(x, source, i)
    launched = len(driver)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(function(x, source, i), sums(x, source, i))
    finally:
        torch.use_deterministic_algorithms(False)
    assert launched and len(driver) == launched
    jit("overwritten", written)(x.clone(), source, i)
    assert len(driver) == launched + 1
    check_compiles(compiled, directory)


def check_compiles(requests, directory):
    """Triton compiles what was asked for."""
    requests = [tuple(request) for request in requests]
    text = f"""
from thunder.executors.triton_kernels import binary
for request in {requests!r}:
    print(open(binary.binary_of(binary.Request(*request)).result().path, "rb").read(4))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(directory.parent / "triton")}
    environment |= {"THUNDER_CACHE_DIR": str(directory.parent / "other")}
    process = fresh.run("-c", text, env=environment)
    assert process.stdout == "b'\\x7fELF'\n" * len(requests), process.stderr


def test_operations_on_integers_compile(driver, compiled, directory):
    def all_of_them(x, y):
        return torch.cat([x // 3, x % 5, ~x, x << 3, x >> 7, torch.maximum(x, y), torch.minimum(x, y).clamp(2, 9)])

    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.arange(64).to(kind)
        jit(f"of {kind}", all_of_them)(x, x)
    assert len(compiled) == 5
    check_compiles(compiled, directory)


def test_places_of_extremes_compile(driver, compiled, directory):
    def router(x):
        values, places = torch.topk(x.float().softmax(-1), 2, -1)
        return values / values.sum(-1, keepdim=True), places, (x * 2).argmax(-1)

    for kind in (torch.float32, torch.bfloat16):
        jit(f"of {kind}", router)(torch.ones(64, 8, dtype=kind))
    jit("row", lambda x: (x * 2).argmax(-1))(torch.ones(1, 32000))
    assert len(compiled) >= 3
    check_compiles(compiled, directory)


def test_what_begins_elsewhere_has_kernels_of_its_own(driver, compiled):
    function = jit("begins")
    function(X, Y)
    moved = torch.ones(65)[1:]
    for _ in range(2):
        function(moved, Y)
    assert [r.arguments for r in compiled] == [
        (("*fp32", True),) * 3,
        (("*fp32", False), ("*fp32", True), ("*fp32", True)),
    ]
    assert [call[7][0] for call in driver] == [X.data_ptr(), moved.data_ptr(), moved.data_ptr()]


def test_a_thread_is_given_the_context_of_its_device(driver, compiled, monkeypatch):
    """PyTorch's launcher takes that of device 0 in a thread that has none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    monkeypatch.setattr(compat, "set_device", lambda device: driver.append(f"device {device}"))
    jit("context")(X, Y)
    *devices, launched = driver
    assert devices and set(devices) == {"device 1"} and launched[0] == "fused_mul_exp_add on 1"


def test_numbers_are_passed_as_doubles(driver, compiled):
    function = jit("numbers", lambda x, n: (x * (1 - n.item() / 3) + n.item()).sin())
    n = torch.tensor(0.1, dtype=torch.float64)
    for value in (0.1, -7.0):
        out = function(X, n.fill_(value))
    assert [r.arguments for r in compiled] == [(("*fp32", True),) * 2 + (("fp64", False),) * 2]
    assert driver[-1][6:8] == ("OOddOO", (X.data_ptr(), out.data_ptr(), 1 - -7.0 / 3, -7.0, None, None))


def test_parts_are_one_launch(driver, compiled):
    function = jit("parts", lambda xs: [program(x, x) for x in xs])
    xs = [torch.ones(64), torch.ones(5000), torch.ones(3, 2)]
    outs = function(xs)
    ((name, *grid), (*_, kinds, arguments, _)) = driver[0][:4], driver[0]
    assert len(driver) == 1 and (name, grid) == ("fused_mul_exp_add on 0", [42, 1, 1])
    assert kinds == "OOOOOOOO" and [*arguments[:6]] == [t.data_ptr() for pair in zip(xs, outs) for t in pair]


def test_triton_compiles_parts_and_numbers(directory):
    text = """
import torch, thunder
from thunder.executors import triton_fuser
from thunder.executors.triton_kernels import binary
from thunder.kernels import lower, triton_cuda

class Planned(triton_fuser._Plans):
    def runs_on(self, kinds): return True
    def unavailable(self): return None
    def can_fuse(self, line):
        return triton_fuser.fusible(line, numbers=True) and lower.lowers(line, triton_fuser._computes, numbers=True)

def update(ps, gs, ns):
    return [(p * n - g / (1 - n**2)).sqrt() for p, g, n in zip(ps, gs, ns.tolist())]

shapes = [(2048, 3), (8, 128), (7,), (1024,), ()]
ps, gs = ([torch.ones(s) for s in shapes] for _ in range(2))
entry, _ = thunder.jit(update, executors=[Planned("planned"), "torch"]).entry_for((ps, gs, torch.ones(5)), {})
(region,) = [b.sym.fn for b in entry.computation_traces[-1].bound_symbols if b.sym.is_fusion]
(launch,), _ = region.scheduled(region.usual_strides())
source = triton_cuda.emitted(launch, False)
arguments = ("*fp32", True),
made = binary.binary_of(binary.Request(
    source.name, source.text,
    (*arguments * len(source.buffers), *(("fp64", False),) * len(source.numbers)), source.warps, 90,
)).result()
print(made.name, len(source.buffers), len(source.numbers), open(made.path, "rb").read(4))
"""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(directory.parent / "triton")}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], capture_output=True, text=True, env=environment
    )
    assert process.stdout == "fused_mul_true_divide_sub_sqrt 15 10 b'\\x7fELF'\n", process.stderr


def test_negatives_are_resolved(driver, compiled):
    function = jit("negatives")
    negative = torch._neg_view(torch.ones(64))
    assert negative.is_neg()
    function(negative, X)
    function(negative.resolve_neg(), X)
    for call in driver:
        assert call[7][0] != negative.data_ptr(), "its memory holds the numbers with another sign"


def test_kernels_for_other_strides_are_other_kernels(driver, compiled):
    function = jit("strides")
    square = torch.ones(8, 8)
    function(square, square)
    function(square.t(), square)
    function(square, square)
    assert len(compiled) == 2 and len(driver) == 3


def test_the_kernels_of_a_program_are_compiled_before_it_runs(driver, compiled):
    entry, _ = jit("early", lambda x, y: torch.exp(program(x, y) @ y.T) * x).entry_for((X[None], Y[None]), {})
    for line in entry.computation_traces[-1].bound_symbols:
        if line.sym.is_fusion:
            (expected,) = line.sym.fn._expected.values()
            assert all(binary.result().name for binary in expected.binaries)
    assert len(compiled) == 2 and not driver


def test_another_process_finds_the_code_on_the_disk(driver, compiled, monkeypatch, directory):
    jit("first")(X, Y)
    monkeypatch.setattr(binary, "_requested", {})  # as in another process
    jit("second")(X, Y)
    assert len(compiled) == 1 and len(driver) == 2
    (binary_file,) = directory.glob("*.bin")
    binary_file.write_bytes(binary_file.read_bytes()[:-1])
    monkeypatch.setattr(binary, "_requested", {})
    jit("third")(X, Y)
    assert len(compiled) == 2, "a damaged file is compiled again"
    monkeypatch.setattr(binary, "_requested", {})
    jit("fourth")(X, Y)
    assert len(compiled) == 2, "and replaced"
    monkeypatch.setattr(binary, "_requested", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(binary.importlib.metadata, "version", lambda package: "another")
    jit("fifth")(X, Y)
    assert [r.capability for r in compiled] == [90, 90, 80]
    assert len(list(directory.glob("*.bin"))) == 2


def test_where_triton_fails_the_operations_run_and_the_next_program_tries_again(driver, monkeypatch):
    requests = []

    def fail(request):
        requests.append(request)
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(binary, "_compile", fail)
    for number in (1, 2):
        function = jit(f"fails {number}")
        with pytest.warns(UserWarning, match="no kernel is compiled: no such instruction"):
            result = function(X, Y)
        binary.wait_for_kernels()
        assert len(requests) == number
        assert torch.equal(result, function(X, Y)) and len(requests) == number


def test_without_triton_in_the_process(directory):
    """Importing it takes longer than all the rest, where the code is on the disk."""
    text = (
        "import sys, thunder.executors.triton_fuser, thunder.executors.triton_kernels.launcher as l; "
        "l.interpreting(); print([m for m in sys.modules if m == 'triton'])"
    )
    process = fresh.run("-c", text, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert process.stdout == "[]\n"


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"triton": types.ModuleType("triton")},
        {"triton": types.ModuleType("triton"), "triton.knobs": types.ModuleType("knobs")},
    ],
)
def test_triton_may_be_half_imported(monkeypatch, modules):
    """By a thread that compiles a kernel."""
    for name in ("triton", "triton.knobs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for value, wanted in (("1", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert launcher.interpreting() == wanted


# ---------------------------------------------------------------------------------------------------------------- the
# directory


def test_what_is_stored_is_found(directory):
    key = disk_cache.key_of("what", 1, (2, "three"))
    assert disk_cache.load(key) is None
    disk_cache.store(key, {"fact": 1}, b"content")
    facts, path = disk_cache.load(key)
    assert facts == {"fact": 1} and path.read_bytes() == b"content" and path.parent == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert disk_cache.key_of("what", 1, (2, "three")) == key != disk_cache.key_of("what", "1", (2, "three"))


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[]", b"not json", b'{"sha256": 3}', json.dumps({"fact": 1, "sha256": "0" * 64}).encode()]
)
def test_damaged_files_are_missing(directory, damage):
    disk_cache.store("key", {"fact": 1}, b"content")
    (directory / "key.json").write_bytes(damage)
    assert disk_cache.load("key") is None
    disk_cache.store("key", {"fact": 2}, b"new")
    assert disk_cache.load("key")[0] == {"fact": 2}


def test_threads_share_one_temporary_directory(monkeypatch):
    """What is compiled in a pool is written to a directory that stays."""
    paths = []

    def slowly(prefix):
        time.sleep(0.05)
        paths.append(types.SimpleNamespace(name=f"/{prefix}{len(paths)}"))
        return paths[-1]

    monkeypatch.setattr(disk_cache, "_temporary_directory", functools.cache(lambda: slowly("thunder")))
    with ThreadPoolExecutor(4) as pool:
        temporaries = set(pool.map(lambda _: disk_cache._temporary(), range(4)))
    assert len(temporaries) == len(paths) == 1


def test_processes_that_write_the_same_find_whole_files(directory):
    text = """
import sys
from thunder.runtime import disk_cache
for i in range(200):
    content = sys.argv[1].encode() * (1000 + i)
    disk_cache.store("key", {"who": sys.argv[1]}, content)
    found = disk_cache.load("key")
    assert found is None or found[0]["who"] in "ab" and len(set(found[1].read_bytes())) == 1
"""
    running = [fresh.Program("-c", text, who) for who in "ab"]
    assert [program.result().stderr[-500:] for program in running] == ["", ""]
    disk_cache.store("key", {"who": "c"}, b"c")
    assert disk_cache.load("key")[0] == {"who": "c"}
    assert sorted(p.name for p in directory.iterdir()) == ["key.bin", "key.json"], (
        "nothing is left of files that were being written"
    )


def test_a_directory_that_others_may_write_to_is_not_used(directory):
    directory.mkdir()
    directory.chmod(0o777)
    disk_cache._trusted.cache_clear()
    with pytest.warns(UserWarning, match="others may write to it"):
        path = disk_cache.store("key", {}, b"content")
    assert path.parent != directory and disk_cache.load("key")[1] == path and not list(directory.iterdir())


def test_where_nothing_can_be_written_it_is_kept_for_the_process(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THUNDER_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert disk_cache.store("other", {}, b"content").read_bytes() == b"content"


def test_what_was_not_read_for_longest_goes(directory, monkeypatch):
    for i in range(4):
        disk_cache.store(f"key{i}", {}, bytes(1000))
        for suffix in ("bin", "json"):
            os.utime(directory / f"key{i}.{suffix}", (i, i))
    disk_cache.load("key0")
    monkeypatch.setattr(disk_cache, "LIMIT", 4000)
    disk_cache._prune_once.cache_clear()
    disk_cache.store("key4", {}, bytes(100))
    assert disk_cache.load("key4") and disk_cache.load("key0") and disk_cache.load("key1") is None
    assert sum(p.stat().st_size for p in directory.iterdir()) <= 2000
    disk_cache._prune_once.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_forked_process_compiles_with_threads_of_its_own(driver, compiled):
    jit("parent")(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which is what is tested
        child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = (
                0
                if binary.binary_of(binary.Request("other", "text", (), 4, 90)).result(timeout=60).name == "other"
                else 2
            )
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_started_for_tensors_of_the_cpu(monkeypatch):
    """A machine with a GPU has programs for the CPU as well."""
    from thunder.executors import linear_cross_entropy

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear_cross_entropy._kernel, "request", lambda *_: pytest.fail("it is started"))
    linear_cross_entropy._kernel.start([torch.float32] * 6, ((1,), (), 4), torch.device("cpu"))
