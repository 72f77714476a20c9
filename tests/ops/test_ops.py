"""Every operation with samples goes through the same tests."""

import collections

import pytest
import torch

import thunder
from benchmarks.training import CountCalls
from tests.ops.harness import (
    SAMPLED,
    as_program,
    by_decomposition,
    fits,
    gradient_cases,
    proxies_of,
    samples_of,
    saved_bytes,
    tensors_in,
    torch_function,
)
from thunder.core.symbol import OpTags
from thunder.errors import ThunderError
from thunder.ops import LTORCH
from thunder.ops.families import collectives
from thunder.ops.registry import _BY_TORCH
from thunder.ops.rules import memory
from thunder.ops.torch_types import to_torch_dtype

# PyTorch's own warnings about samples it is given
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in (
        ".*padding='same' with even kernel lengths",
        "reduction. 'mean' divides the total loss",
        "index_reduce\\(\\) is in beta",
        "Casting complex values to real",
        "B?Complex(Half|32) support is experimental",
        "To copy construct from a tensor",
        ".*size_average and reduce args",
        "(at|torch)\\S+ is deprecated",
    )
]
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
# decompositions are compared in float64; these lose more than that type's rounding by their nature
LOOSE = {"special_zeta": 1e-6, "polygamma": 1e-6}
UNDEFINED = {"empty", "empty_like"}  # their values are whatever was in memory
NOT_DETERMINED = {"eigh", "svd"}  # results are defined up to a sign


def accepted(program, tensors) -> bool:
    """Whether PyTorch takes these arguments; a sample may be written for fewer types than it is tried on."""
    torch.manual_seed(0)
    try:
        program(*tensors)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return False
    return True


# types that an operation refuses with an error of its own, and why
REFUSED = {"einsum": {torch.bool}}  # the type of a sum of bools follows the way PyTorch happens to compute it


def cases(name, dtypes=DTYPES):
    for dtype in dtypes:
        if dtype in REFUSED.get(name, ()):
            continue
        for args, kwargs in samples_of(LTORCH[name], dtype):
            program, tensors = as_program(LTORCH[name], args, kwargs)
            if accepted(program, tensors):
                yield program, tensors


def run(program, tensors):
    torch.manual_seed(0)
    return program(*tensors)


@pytest.mark.parametrize("name", SAMPLED)
def test_forward_and_types_equal_pytorchs(name):
    tried = 0
    for program, tensors in cases(name):
        want = tensors_in(run(program, tensors))
        compiled = thunder.jit(program, debug_options=thunder.DebugOptions(check_traces=True))
        with torch.no_grad():
            got = tensors_in(run(compiled, tensors))
        for g, w, p in zip(got, want, proxies_of(compiled), strict=True):
            assert fits(p.shape, w.shape) and (to_torch_dtype(p.dtype), p.device.type) == (w.dtype, w.device.type), (
                tensors
            )
            if name not in UNDEFINED:
                torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)
        tried += 1
    assert tried, "no sample was accepted by PyTorch"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name", [n for n in SAMPLED if LTORCH[n].decomposition is not None and OpTags.RANDOM_OP not in LTORCH[n].tags]
)
def test_decomposition_equals_the_operation(name):
    opened = 0
    for program, tensors in cases(name, (torch.float64, torch.int64, torch.bool)):
        compiled = thunder.jit(program)
        with torch.no_grad():
            want = tensors_in(run(compiled, tensors))
        trace = thunder.last_traces(compiled)[1]
        if any(b.sym is LTORCH[name] and not b.subsymbols and not b.aliases for b in trace.bound_symbols):
            continue  # a kernel that has a decomposition for some arguments
        inputs = [tensors[i] for i, _ in enumerate(tensors)]
        used = {
            a.name: t for a, t in zip(thunder.last_traces(compiled)[0].args, _inputs(compiled, inputs), strict=True)
        }
        got, _ = by_decomposition(compiled, [used[a.name] for a in trace.args])
        if name not in UNDEFINED:
            for g, w in zip(tensors_in(got), want, strict=True):
                # float64 to 1e-7; results of other types (dtype= arguments, integer samples) to PyTorch's own tolerance
                # for that type
                close = (
                    {"rtol": LOOSE.get(name, 1e-7), "atol": LOOSE.get(name, 1e-7)} if w.dtype is torch.float64 else {}
                )
                torch.testing.assert_close(g, w, equal_nan=True, **close)
        opened += 1
    assert opened, "no sample was opened"


def _inputs(compiled, tensors):
    """The computation's inputs in its own order, as the prologue hands them on."""
    entry = thunder.compile_stats(compiled).last_entry
    inputs = entry.prologue_fn(compiled.fn, tuple(tensors), {})
    assert isinstance(inputs, tuple), inputs
    return inputs


DIFFERENTIATED = [n for n in SAMPLED if n not in NOT_DETERMINED]


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradient_equals_autograds(name):
    for case in gradient_cases(name):
        compiled = thunder.jit(case.program)
        torch.manual_seed(0)
        got = tensors_in(compiled(*case.leaves))
        assert [o.requires_grad for o in got] == [o.requires_grad for o in case.forward]
        if name not in UNDEFINED:
            torch.testing.assert_close(got, case.forward, rtol=0, atol=0, equal_nan=True)
        outputs = [o for o in got if o.requires_grad]
        torch.testing.assert_close(case.differentiated(outputs), case.gradients, rtol=1e-10, atol=1e-10, equal_nan=True)
        if case.which != "all":
            continue
        layouts = (
            [torch.ones((), dtype=c.dtype).expand(c.shape) for c in case.cotangents],
            [c.t().contiguous().t() if c.dim() == 2 else c for c in case.cotangents],
        )
        eager = [o for o in case.forward if o.requires_grad]
        for cotangents in layouts:
            torch.testing.assert_close(
                case.differentiated(outputs, cotangents),
                case.differentiated(eager, cotangents),
                rtol=1e-10,
                atol=1e-10,
                equal_nan=True,
            )


def connected(program):
    """The results that require grad: gradcheck's fast mode stumbles over others among them."""
    return lambda *arguments: tuple(o for o in tensors_in(program(*arguments)) if o.requires_grad)


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "name", [n for n in DIFFERENTIATED if LTORCH[n].grad_rule is not None and OpTags.RANDOM_OP not in LTORCH[n].tags]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_rules_agree_with_difference_quotients(name, dtype):
    """One sample each, where PyTorch's own derivative does: not at a jump, or where a subgradient is chosen."""
    for case in gradient_cases(name, (dtype,)):
        double = case.which == "all" and all(x.dtype is dtype for x in case.wanted)
        if double and torch.autograd.gradcheck(
            connected(case.program), case.leaves, fast_mode=True, raise_exception=False, check_undefined_grad=False
        ):
            assert torch.autograd.gradcheck(
                connected(thunder.jit(case.program)), case.leaves, fast_mode=True, check_undefined_grad=False
            )
            break


# operations that call a little more than eager does, and why
MORE_CALLS = {
    "clamp": "a zero that where makes a tensor of", "clip": "as clamp", "resolve_neg": "a result that is its "
        "argument is a view of it", "resolve_conj": "as resolve_neg",
    "copysign": "zeros for the sign, which eager makes of the whole shape at once", "getitem": "a 0-dim index is "
        "read by eager, which waits for it",
    "einsum": "the cotangent, arranged for each operand", "matmul": "the rows of the left side, which eager saved folded", "setitem": "the functional form copies",
}  # fmt: skip


# each gradient is an operation of its own, which arranges operands: views are not counted
ARRANGES = {"einsum"}
VIEWS = {f"aten.{name}" for name in (
    "permute.default", "transpose.int", "t.default", "view.default", "_unsafe_view.default", "unsqueeze.default",
    "squeeze.dim", "squeeze.dims", "expand.default",
)}  # fmt: skip


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_training_is_never_heavier_than_eager(name):
    """Bytes saved for the backward, and ATen calls of forward and backward. Where PyTorch's own graph is kept,
    detaching its ends is all that comes on top; a result that is a view of memory of its own is detached, since PyTorch
    refuses writes to views that an autograd function returns."""
    with CountCalls() as counter:
        torch.ones(()).detach()
    one = counter.calls["aten.detach.default"]  # torch 2.9 tells modes of each detach twice
    for case in gradient_cases(name, (torch.float64,)):
        if case.which != "all":
            continue
        compiled = thunder.jit(case.program)
        case.step(compiled)
        assert saved_bytes(compiled, case.leaves) <= saved_bytes(case.program, case.leaves), case.leaves
        calls = []
        for run in (compiled, case.program):
            with CountCalls() as counter:
                case.step(run)
            hidden = VIEWS if name in ARRANGES else ()
            calls.append(collections.Counter({n: k for n, k in counter.calls.items() if n not in hidden}))
        more = calls[0].total() - calls[1].total()
        detached = calls[0]["aten.detach.default"] - calls[1]["aten.detach.default"]
        has_graph = any("_with_graph" in line.sym.name for line in thunder.last_traces(compiled)[-1].bound_symbols)
        more -= detached if has_graph else max(0, min(detached, one * len(case.forward)))
        assert more <= 0 or (name in MORE_CALLS and more <= 4), (more, calls[0] - calls[1], calls[1] - calls[0])


def test_number_of_gradients_that_are_compared():
    """Operations and samples whose gradient the tests above compare with PyTorch's: they may only become more."""
    counts = [sum(1 for _ in gradient_cases(name)) for name in DIFFERENTIATED]
    operations, samples = sum(n > 0 for n in counts), sum(counts)
    print(f"gradients compared: {operations} operations, {samples} samples")
    # torch 2.11 refuses a few samples of torch 2.13's 322 and 2088
    assert operations >= 320 and samples >= 2074, (operations, samples)


@pytest.mark.parametrize("name", [n for n in SAMPLED if getattr(torch.Tensor, f"{n}_", None) is not None])
def test_in_place_form_on_a_temporary(name):
    method = getattr(torch.Tensor, f"{name}_")
    for args, kwargs in samples_of(LTORCH[name], torch.float64):
        if not args or not isinstance(args[0], torch.Tensor):
            continue

        def program(x, *rest, kwargs=kwargs):
            y = x.clone()
            z = method(y, *rest, **kwargs)
            return y * 1, z * 1

        try:
            torch.manual_seed(0)
            want = program(*args)
        except (RuntimeError, TypeError):
            continue  # PyTorch has no such in-place form, or refuses the shapes
        torch.manual_seed(0)
        try:
            got = thunder.jit(program)(*args)
        except ThunderError as error:
            assert "changes the shape of a tensor in place" in str(error)
            continue
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(n for n, s in LTORCH.items() if s.error_sampler is not None))
def test_errors_read_as_pytorchs(name):
    symbol = LTORCH[name]
    for args, kwargs in samples_of(symbol, torch.float32, "error_sampler"):
        program, tensors = as_program(symbol, args, kwargs)
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)) as want:
            program(*tensors)
        with pytest.raises((RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)) as got:
            thunder.jit(program)(*tensors)
        assert type(got.value) is type(want.value)
        assert str(got.value).split()[:4] == str(want.value).split()[:4]


def test_at_least_200_torch_functions_are_defined():
    names = {getattr(f, "__name__", "") for f in _BY_TORCH}
    assert len({n for n in names if n and not n.startswith("_")}) >= 200


def test_every_operation_has_samples_or_is_listed():
    """An operation without samples is untested: the list of those may only become shorter."""
    # those in test_foreach.py
    without = {
        n
        for n, s in LTORCH.items()
        if s.sampler is None and torch_function(s) is not None and not n.startswith("_foreach_")
    }
    # no tensor: test_unbacked.py; a process group: tests/distributed
    without -= {"equal", "allclose", "is_nonzero", *collectives.__all__}
    assert len(without) <= 40, sorted(without)


PROMOTED = (torch.add, torch.mul, torch.true_divide, torch.pow, torch.maximum, torch.eq, torch.where)
TYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


@pytest.mark.parametrize("function", PROMOTED, ids=lambda f: f.__name__)
def test_promotion_is_pytorchs(function):
    """All pairs of types, for tensors with dimensions, 0-dim tensors and Python numbers."""
    condition = torch.tensor([True, False])
    values = [torch.ones(2, dtype=d) for d in TYPES] + [torch.ones((), dtype=d) for d in TYPES] + [True, 2, 2.5, 1 + 2j]

    def program(a, b):
        return torch.where(condition, a, b) if function is torch.where else function(a, b)

    pairs = 0
    for a in values:
        compiled = thunder.jit(program)
        for b in values:
            if not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor):
                continue
            try:
                want = program(a, b)
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            with pytest.warns(thunder.errors.RecompileWarning) if thunder.cache_misses(compiled) == 8 else _nothing():
                got = compiled(a, b)
            assert (got.dtype, got.shape) == (want.dtype, want.shape), (a, b)
            pairs += 1
    assert pairs > 100


class _nothing:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("name", [name for name in SAMPLED if memory.owns_result.of(LTORCH[name])])
def test_results_that_are_owned_share_no_memory(name):
    """They may be written over: of every type, since some operations give back what they have nothing to do for."""
    symbol, requests = LTORCH[name], 0
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        for args, kwargs in samples_of(symbol, dtype):
            try:
                result = symbol.fn(*args, **kwargs)
            except (RuntimeError, TypeError):  # not of this type
                continue
            input_storages = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs)) if t.numel()}
            assert input_storages.isdisjoint(t.untyped_storage().data_ptr() for t in tensors_in(result) if t.numel())
            requests += 1
    assert requests
