"""The inductor executor: what it computes, in which layout, how often it compiles, and what it leaves to PyTorch."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import cpu_vec_isa
from torch.utils._python_dispatch import TorchDispatchMode

import thunder
from thunder import compat
from thunder.compat import inductor as compat_inductor
from thunder.compat.inductor import compile_with_inductor
from thunder.executors.inductor import inductor_ex, torch_compile_cat_ex, torch_compile_ex
from thunder.tests.litgpt_model import GPT

pytestmark = pytest.mark.skipif(
    inductor_ex.unavailable() is not None, reason=f"Inductor cannot compile here: {inductor_ex.unavailable()}"
)


def names(compiled) -> list[str]:
    return [line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols if line.outputs]


def region_of(compiled, at: int = 0):
    return thunder.examine.get_fusions(thunder.last_traces(compiled)[-1])[at][1]


def gpt(depth: int) -> GPT:
    torch.manual_seed(0)
    return GPT.from_name(
        "llama2-like",
        n_layer=depth,
        n_embd=32,
        n_head=4,
        head_size=8,
        intermediate_size=96,
        block_size=32,
        vocab_size=64,
    )


def test_names_that_users_know():
    assert thunder.get_executor("inductor") is inductor_ex and thunder.get_executor("torchcompile") is torch_compile_ex
    assert torch_compile_cat_ex is inductor_ex and type(torch_compile_ex) is type(inductor_ex)
    with pytest.raises(ValueError, match="numerics"):
        thunder.jit(lambda x: x, executors=["inductor"], numerics="eager")


@pytest.mark.slow
def test_a_step_is_as_near_to_float64_as_eager_and_layers_are_compiled_once():
    """Depth 2 and depth 4 have the same regions, forward and backward."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    compiled_regions = []
    for depth in (2, 4):
        model = gpt(depth)
        gradients = {}
        for kind in ("float64", "eager", "inductor"):
            called = gpt(depth).double() if kind == "float64" else model
            inductor_ex._compiled.clear() if depth == 2 else None
            before = inductor_ex.compilations
            loss = (
                (thunder.jit(called, executors=["inductor"]) if kind == "inductor" else called)(tokens).square().mean()
            )
            gradients[kind] = torch.autograd.grad(loss, list(called.parameters()))
        compiled_regions.append(inductor_ex.compilations - before)
        for ours, eager, exact in zip(gradients["inductor"], gradients["eager"], gradients["float64"], strict=True):
            scale = exact.norm()
            assert (ours - exact).norm() / scale <= 3 * (eager - exact).norm() / scale + 1e-7
    assert compiled_regions[0] > 3 and compiled_regions[1] == 0
    assert all(
        sum(r.compilations for r in (region, *region._overwriting.values())) == 1
        for region in inductor_ex._compiled.values()
    )


@pytest.mark.slow
def test_the_regions_of_a_program_are_compiled_beside_each_other_for_the_strides_that_come(monkeypatch):
    """What attention gives, and what is taken apart and turned around, is not row-major. A region whose strides were
    not foreseen is compiled again."""
    happened = []

    def compile_noted(*args):
        run, results, wait = compile_with_inductor(*args)
        happened.append("begun")

        def waited():
            happened.append("waited for")
            wait()

        return run, results, waited

    monkeypatch.setattr(compat, "compile_with_inductor", compile_noted)
    inductor_ex._compiled.clear()
    model = gpt(2)
    step = thunder.jit(model, executors=["inductor"])
    loss = step(torch.randint(64, (2, 16))).square().mean()
    forward = len({f for _, f in thunder.examine.get_fusions(thunder.last_traces(step)[-1])})
    assert happened == ["begun"] * forward + ["waited for"] * forward and forward > 3
    happened.clear()
    torch.autograd.grad(loss, list(model.parameters()))
    backward = len(happened) // 2
    assert happened == ["begun"] * backward + ["waited for"] * backward and backward > 2

    def program(x, y):
        return (x.exp() * 2.0) @ y.t(), (y.sin() + 1.0) @ x.t()

    compiled = thunder.jit(program, executors=["inductor"])
    for x, y in ((torch.randn(5, 7), torch.randn(7, 5).t()), (torch.randn(7, 5).t(), torch.randn(5, 7))):
        for got, want in zip(compiled(x, y), program(x, y), strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()


def test_a_region_that_reads_nothing():
    """Positions, masks and slopes of attention are computed from sizes alone."""

    def program(x):
        positions = torch.arange(x.shape[-1]) * 2 + 1
        return x.reshape(2, 3) @ torch.where(positions[:, None] > positions[None], 0.5, 1.5), positions

    compiled, x = thunder.jit(program, executors=["inductor"]), torch.randn(2, 3)
    for got, want in zip(compiled(x), program(x), strict=True):
        torch.testing.assert_close(got, want)
    assert any(not line.inputs for line in thunder.last_traces(compiled)[-1].bound_symbols if line.sym.is_fusion)


def test_types_that_inductor_does_not_know():
    """PyTorch's kernel gives the mean and the deviation of layer_norm in float32 where the weight is; its rules for
    fake tensors say bfloat16, which is too few digits for the backward."""
    inputs = ((torch.randn(4, 8) + 3.0).bfloat16(), torch.randn(8), torch.randn(8))

    def program(x, weight, bias):
        return F.layer_norm(x * 2.0, (8,), weight, bias).sin()

    def gradients(f, inputs):
        inputs = [i.requires_grad_() for i in inputs]
        return torch.autograd.grad(f(*inputs).sum(), inputs)

    compiled = thunder.jit(program, executors=["inductor"], debug_options=thunder.DebugOptions(check_traces=True))
    exact = gradients(program, [i.double() for i in inputs])
    for got, eager, right in zip(gradients(compiled, inputs), gradients(program, inputs), exact, strict=True):
        assert got.dtype == eager.dtype and (got - right).abs().max() <= 2 * (eager - right).abs().max()


def test_vector_instructions_are_found_without_compiling_programs(monkeypatch):
    """Inductor compiles and loads one for each kind. What it finds then was compared by hand: the same."""
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability != ("AVX512" if compat.has_avx512() else "AVX2"):
        pytest.skip("other processors, and those that are told to do less than they can, are left to Inductor")
    check = cpu_vec_isa.VecISA.check_build
    compat_inductor._find_vectors.cache_clear()
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for kind in (cpu_vec_isa.VecISA, *cpu_vec_isa.VecISA.__subclasses__()):
        for method in vars(kind).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
    commands = []
    monkeypatch.setattr(
        compat_inductor.subprocess,
        "run",
        lambda command, run=subprocess.run, **options: commands.append(command) or run(command, **options),
    )
    compat_inductor._find_vectors()
    assert (
        any("-fsyntax-only" in c for c in commands)
        and not any("-shared" in c for c in commands)
        and cpu_vec_isa.VecISA.check_build is check
    )
    assert cpu_vec_isa.valid_vec_isa_list()
    assert cpu_vec_isa.pick_vec_isa().bit_width() == {"AVX2": 256, "AVX512": 512}[capability]


@pytest.mark.slow
def test_code_for_other_vector_instructions_is_not_taken_from_disk(monkeypatch):
    """A home directory that machines share, and ATEN_CPU_CAPABILITY: PyTorch's keys know of neither. Code for AVX-512
    under AVX2's headers computes wrong numbers, and under none it does not compile."""

    def program(x):
        return torch.sin(x) * x + 0.515

    x = torch.randn(37, 130)
    want, right = program(x), program(x.double())
    for capability in (None, "default"):
        monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
        if capability is not None:
            monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        inductor_ex._compiled.clear()
        got = thunder.jit(program, executors=["inductor"])(x)
        assert (got - right).abs().max() <= 2 * (want - right).abs().max()


def test_results_are_laid_out_as_pytorch_lays_them_out_and_new_strides_are_compiled_once():
    def program(x, y):
        z = (x * y).exp() + 1.0
        return z, z.sum(0), z.transpose(0, 1), x[0]

    compiled = thunder.jit(program, executors=["inductor"])
    plain, turned = torch.randn(5, 7), torch.randn(7, 5).t()
    for x, y, compilations in (
        (plain, plain, 1),
        (turned, turned, 2),
        (turned, turned, 2),
        (plain[:, ::2], turned[:, ::2], 1),
        (plain[:1], turned[:1], 1),
    ):
        got, want = compiled(x, y), program(x, y)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
        assert got[2].data_ptr() == got[0].data_ptr() and got[3].data_ptr() == x.data_ptr()
        assert region_of(compiled).compilations == compilations
    assert names(compiled)[0] == "__getitem__" and names(compiled)[1].startswith("Inductor"), (
        "a view of an input is made outside"
    )


def test_what_is_written_to_and_negatives_of_memory():
    def program(x, y):
        x.mul_(2.0).add_(y)
        return x.sin() * y

    compiled = thunder.jit(program, executors=["inductor"])
    x, y = torch.randn(5), torch.view_as_complex(torch.randn(5, 2)).conj().imag
    assert y.is_neg()
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(compiled(mine, y), program(theirs, y))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("executor", ["inductor", "torchcompile"])
def test_what_pytorch_refuses_is_refused_and_random_numbers_are_its_own(executor):
    """In a kernel, a bad index or an integer divided by zero would end the process."""

    def program(x, table, places, divisor):
        y = F.dropout(x.exp() * 2.0 + 1.0, 0.5)
        quotients = (
            places // divisor * 2,
            torch.div(places, divisor, rounding_mode="trunc") * 2,
            places % divisor * 2,
            torch.fmod(places, divisor) * 2,
        )
        losses = F.cross_entropy(table * 2.0, places) + 1.0, F.binary_cross_entropy(x.clamp(min=0.0), x.sigmoid()) + 1.0
        return y, F.embedding(places, table) * 2.0 + 1.0, *quotients, *losses

    compiled = thunder.jit(program, executors=[executor])
    x, table, places, divisor = (
        torch.linspace(-1.0, 1.0, 8),
        torch.randn(4, 4),
        torch.tensor([0, 3, 1, 3]),
        torch.tensor([1, 2, 3, 2]),
    )
    torch.manual_seed(3)
    got = compiled(x, table, places, divisor)
    torch.manual_seed(3)
    for a, b in zip(got, program(x, table, places, divisor), strict=True):
        torch.testing.assert_close(a, b)
    for wrong in ((x, table, places + 1, divisor), (x, table, places, divisor - 1), (x * 2, table, places, divisor)):
        with pytest.raises((IndexError, RuntimeError)) as eager:
            program(*wrong)
        with pytest.raises(type(eager.value)) as ours:
            compiled(*wrong)
        assert str(ours.value).splitlines()[0] == str(eager.value).splitlines()[0]


_MAPS = (
    torch.abs, torch.asinh, torch.atan, torch.ceil, torch.trunc, torch.cos, torch.tan, torch.digamma, torch.lgamma,
    torch.erf, torch.erfinv, torch.expm1, torch.sigmoid, torch.isinf,
    torch.signbit, torch.log1p, torch.rsqrt, torch.sgn, torch.round, torch.nan_to_num, F.silu, F.softplus, F.elu,
    F.hardswish, F.mish,
    lambda x: x.fmod(1.5), lambda x: x.remainder(-1.5), lambda x: x.pow(3), lambda x: torch.maximum(x, -x),
        lambda x: torch.where(x > 0, x, 2.0), lambda x: x.atan2(x + 1.0),
)  # fmt: skip
_JOINED = (
    lambda x: x.sum(), lambda x: x.mean(0), lambda x: x.amax(1), lambda x: x.prod(1), lambda x: x.var(0),
        lambda x: x.std(1), lambda x: x.logsumexp(0), lambda x: x.argmax(1),
    lambda x: x.softmax(-1), lambda x: x.log_softmax(0), lambda x: F.layer_norm(x, (10,)),
        lambda x: F.rms_norm(x, (10,)), lambda x: x.flip(0) * 2, lambda x: torch.cat([x, x * 2], 1),
    lambda x: F.pad(x, (1, 2, 0, 1), value=3.0), lambda x: x.roll(2, 0) * 2, lambda x: x.tril() * 2,
        lambda x: x.unfold(0, 3, 1) * 2, lambda x: x.t() * x.t(), lambda x: F.glu(x),
)  # fmt: skip


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("functions", "dtype"), [(_MAPS, torch.float32), (_JOINED, torch.float32), (_JOINED, torch.bfloat16)]
)
def test_functions_agree_with_pytorch(functions, dtype):
    """All in one region. Values, with infinities and NaNs where these are maps, within the rounding of the type; types,
    shapes and strides exactly."""
    torch.manual_seed(0)
    x = (torch.randn(9, 10) * 2).to(dtype)
    if functions is _MAPS:
        x[0, :5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])

    def program(x):
        return [f(x) for f in functions]

    compiled = thunder.jit(program, executors=["inductor"])
    got, want = compiled(x), program(x)
    assert sum(name.startswith("Inductor") for name in names(compiled)) <= 2 and len(names(compiled)) < len(functions)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert a.stride() == b.stride()


def test_complex_numbers_and_sizes_that_data_decides_stay_with_pytorch():
    compiled = thunder.jit(lambda z, x: ((z * 2 + 1) * z, x.nonzero() * 2 + 1), executors=["inductor"])
    z, x = torch.randn(3, dtype=torch.complex64), torch.tensor([0.0, 1.0, 2.0])
    got = compiled(z, x)
    torch.testing.assert_close(got[0], (z * 2 + 1) * z)
    assert torch.equal(got[1], x.nonzero() * 2 + 1)
    assert not any(name.startswith("Inductor") for name in names(compiled))


def test_another_process_finds_the_kernels_on_disk():
    """What a process remembers is forgotten here; Inductor's cache of graphs is asked, and has the region."""

    def program(x):
        return (x * 3.0).cos() + x.tanh()

    x = torch.randn(6, 4)
    thunder.jit(program, executors=["inductor"])(x)
    inductor_ex._compiled.clear()
    before = counters["inductor"]["fxgraph_cache_hit"]
    compiled = thunder.jit(program, executors=["inductor"])
    torch.testing.assert_close(compiled(x), program(x))
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1


@pytest.mark.parametrize("later", [False, True], ids=["when it is lowered", "by the C++ compiler"])
def test_a_region_that_inductor_does_not_compile_is_an_error_that_names_it(monkeypatch, later):
    def refuse(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(
        compat, "compile_with_inductor", (lambda run, tensors, *rest: (run, run(*tensors), refuse)) if later else refuse
    )
    inductor_ex._compiled.clear()
    compiled = thunder.jit(lambda x: x.sin() * 7.0 - 0.125, executors=["inductor"])
    for _ in range(2):
        with pytest.raises(
            thunder.errors.MissingImplementationError,
            match=r"Inductor does not compile a region of sin, mul, sub: no\nLeave the executor",
        ):
            compiled(torch.randn(3))


def test_nvfuser_is_a_name_that_says_why_it_takes_nothing(monkeypatch):
    from thunder import extend

    monkeypatch.setattr(extend, "_warned", set())
    with pytest.warns(UserWarning, match="the executor nvfuser has no effect here: .*no wheel of nvFuser loads"):
        compiled = thunder.jit(lambda x: x.sin() * 2.0 + 1.0, executors=["nvfuser"])
    x = torch.randn(3)
    assert torch.equal(compiled(x), x.sin() * 2.0 + 1.0) and names(compiled) == ["sin", "mul", "add"]


def test_results_take_the_place_of_what_nobody_has_any_more():
    """A value between two regions is written over, and no argument, result, or what is still read."""

    def program(x, w):
        h = x @ w
        y = h.sin() * 2.0 + 1.0
        z = (y @ w).cos() * 3.0 + 1.0
        return z, y, (z * y).tanh() - z

    x, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    compiled = thunder.jit(program, executors=["inductor"])
    for _ in range(2):
        before = x.clone(), w.clone()
        got, want = compiled(x, w), program(x, w)
        for a, b in zip((*got, x, w), (*want, *before), strict=True):
            torch.testing.assert_close(a, b)
        assert len({t.data_ptr() for t in (*got, x, w)}) == 5
    assert [line.header for line in thunder.last_traces(compiled)[-1].bound_symbols if line.header] == [
        "y may be written over h",
        "z may be written over t4",
    ]
    h = torch.randn(64, 64, dtype=torch.float64)
    (y,) = region_of(compiled)(h)
    assert y.data_ptr() == h.data_ptr()


def test_what_views_show_dies_with_the_last_of_them():
    """A value is written over though products read views of it, and not before the last view of it was read, nor beside
    one."""

    def program(x, w):
        h = x @ w
        a = (h.view(-1, 8) @ w[:8, :8]).view(64, 64)
        y = h.sin() * 2.0 + a
        late = y.t()
        z = y.cos() * 3.0 + y.view(4096).flip(0).view(64, 64)
        return (z @ w).tanh() * 2.0, (late @ w).exp() * 0.5

    x, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64) / 8
    compiled = thunder.jit(program, executors=["inductor"])
    for _ in range(2):
        for a, b in zip(compiled(x, w), program(x, w), strict=True):
            torch.testing.assert_close(a, b)
    headers = [line.header for line in thunder.last_traces(compiled)[-1].bound_symbols if line.header]
    assert any("written over h" in h for h in headers) and not any("written over y" in h for h in headers), headers


def test_a_result_over_a_view_is_no_view():
    """PyTorch's linear gives one. A result that is a view could not be written to under grad."""

    def program(x, w, b):
        return F.linear(x, w, b).sin() * 2.0 + 1.0

    compiled = thunder.jit(program, executors=["inductor"])
    x, w, b = torch.randn(4, 64, 64), torch.randn(64, 64, requires_grad=True), torch.randn(64)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            got, want = compiled(x, w, b), program(x, w, b)
            assert got._base is None
            torch.testing.assert_close(got.mul_(2.0), want.mul_(2.0))


def test_equal_results_have_memory_of_their_own():
    """Inductor computes what is equal once. What a later region writes over may be none of a pair."""

    def program(x, w):
        h = x @ w
        a, b = h.sin() * 2.0, h.sin() * 2.0
        return a, b, h * 1.0 + 0.0, (b.cos() + a) @ w

    x, w = torch.randn(64, 64, dtype=torch.float64), torch.randn(64, 64, dtype=torch.float64)
    got, want = thunder.jit(program, executors=["inductor"])(x, w), program(x, w)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert len({t.data_ptr() for t in got}) == 4


def test_a_backward_that_is_run_again_finds_what_it_saved():
    x, w = (torch.randn(64, 64, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def program(x, w):
        return ((x @ w).sin().tanh() @ w).cos() * 2.0

    compiled = thunder.jit(program, executors=["inductor"])
    g = torch.randn(64, 64, dtype=torch.float64)
    want = torch.autograd.grad(program(x, w), (x, w), g)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or len(saved) - 1, lambda i: saved[i]):
        hooked = compiled(x, w)
    held = [t.clone() for t in saved]
    plain = compiled(x, w)
    for out, keep in ((plain, True), (plain, True), (plain, False), (hooked, False)):
        for a, b in zip(torch.autograd.grad(out, (x, w), g, retain_graph=keep), want, strict=True):
            torch.testing.assert_close(a, b)
    assert held and all(map(torch.equal, saved, held)), "what hooks keep is theirs"
    assert any(line.header for line in thunder.last_backward_traces(compiled)[-1].bound_symbols)


def test_kernels_that_write_over_something_else_are_others_on_disk():
    """Inductor's caches do not go by what is written over."""

    def program(x, y):
        return (x * y).sin() + 1.0

    x, y = torch.randn(80, 64), torch.randn(80, 64)
    compiled = thunder.jit(program, executors=["inductor"])
    want = compiled(x, y)
    torch.testing.assert_close(want, program(x, y))
    for _ in range(2):
        for dying in (0, 1):
            region = type(region_of(compiled))(region_of(compiled).region).writing_over([dying])
            copies = [x.clone(), y.clone()]
            (got,) = region(*copies)
            assert torch.equal(got, want) and got.data_ptr() == copies[dying].data_ptr()
            assert torch.equal(copies[1 - dying], (x, y)[1 - dying])
    assert region_of(compiled).writing_over([]).over == {} and region_of(compiled).writing_over([0, 1]).over == {0: 0}


def test_what_both_halves_would_write_is_written_once():
    """What a product of the backward reads, and the forward wrote for a product, is saved on a CPU; what only regions
    read is computed again."""
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    compiled = thunder.jit(lambda x, w: (((x @ w).sin() * 2.0) @ w).sum(), executors=["inductor"])
    compiled(x, w).backward()
    backward = thunder.last_backward_traces(compiled)[-1]
    regions = [line for line in backward.bound_symbols if line.sym.is_fusion]
    assert all(sub.sym.name != "sin" for line in regions for sub in line.subsymbols), "its product's input is saved"
    assert any(sub.sym.name == "cos" for line in regions for sub in line.subsymbols), "its derivative is not"


def test_a_broadcast_cotangent_is_written_out_once():
    """Each of the two products of a linear layer's gradients would copy it. None comes where an output plays no part,
    and other cotangents come as they are."""
    x, w, v = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def program(x, w, v):
        return F.linear(x.sin() * 2.0, w), F.linear(x, v), x.cos() * 3.0

    class Operands(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.mm.default:
                regions.extend(0 in t.stride() for t in args)
            return function(*args, **(kwargs or {}))

    for executors, copies in ((["inductor"], False), ([], True)):
        compiled, regions = thunder.jit(program, executors=executors), []
        for loss in (lambda a, b, c: a.sum() + c.sum(), lambda a, b, c: a.sum() * 2.0 + b.square().sum()):
            with Operands():
                got = torch.autograd.grad(loss(*compiled(x, w, v)), (x, w, v), allow_unused=True)
            for a, b in zip(
                got, torch.autograd.grad(loss(*program(x, w, v)), (x, w, v), allow_unused=True), strict=True
            ):
                torch.testing.assert_close(a, b)
        assert any(regions) is copies and len(regions) > 4
