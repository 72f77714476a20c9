"""PyTorch's own samples of operations, `op_db`, as a second and foreign source: everything it knows and `lookup` knows
runs through a trace."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.ops.harness import Opened, fits, tensors_in
from tests.ops.tracing import carried_out, differentiated, traced
from thunder.core.proxies import map_structure
from thunder.core.symbol import OpTags
from thunder.errors import CaptureError, MissingImplementationError
from thunder.ops import inplace_of, lookup, opaque
from thunder.ops.torch_types import to_torch_dtype

pytestmark = [
    # PyTorch's own warnings about its own samples
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
KNOWN = [info for info in op_db if lookup(info.op) is not None]
IN_PLACE = [
    i
    for i in op_db
    if i.inplace_variant is not None and (inplace_of(i.inplace_variant) or lookup(i.inplace_variant) or lookup(i.op))
]
# entries whose function is one of PyTorch's testing code, around operations that are known
WRAPPED = [info for info in op_db if lookup(info.op) is None and inspect.isfunction(info.op)]

# what cannot be captured, and why
REFUSED = {
    "tensor_split": "the number of parts in a tensor",
    "nn.functional.batch_norm": "updates running statistics of its caller", "nn.functional.instance_norm": "updates "
        "running statistics of its caller",
    "native_batch_norm": "updates running statistics of its caller", "_native_batch_norm_legit": "updates running "
        "statistics of its caller",
    "squeeze": "changes a shape in place", "unsqueeze": "changes a shape in place", "transpose": "changes a shape in "
        "place", "t": "changes a shape in place",
    "as_strided": "changes a shape in place", "swapaxes": "changes a shape in place", "swapdims": "changes a shape "
        "in place",
}  # fmt: skip
# decompositions that decide by sizes or data-dependent numbers, for some arguments
BY_DATA = {"narrow", "tensor_split", "nn.functional.one_hot"}
# their values are whatever was in memory
UNDEFINED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}
# PyTorch's own results are not the same from call to call: the driver gelsy begins with pivots that happen to be in
# memory
VARYING = {"linalg.lstsq"}
# refused by PyTorch when the program runs, not when it is captured: the first are about data, the others are arguments
# that only PyTorch checks. The list may only become shorter.
LATE = {"gather", "scatter", "scatter_add", "take", "cov"} | {
    f"nn.functional.{name}"
    for name in (
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
        "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool1d",
        "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool3d", "conv1d", "conv2d", "conv3d", "triplet_margin_loss",
        "huber_loss",
    )
} | {"index_add", "linalg.cross", "as_strided_scatter", "nn.functional.group_norm",
    "nn.functional.max_unpool3d"}  # fmt: skip
# samples that are refused though PyTorch takes them
GAPS = {
    "nn.functional.batch_norm": "an input of one dimension", "nn.functional.batch_norm_without_cudnn": "an input of "
        "one dimension",
}  # fmt: skip


def entries(infos):
    return [
        pytest.param(
            i,
            id=i.formatted_name,
            marks=[pytest.mark.xfail(strict=True, reason=GAPS[i.name])] if i.name in GAPS else (),
        )
        for i in infos
    ]


def first_dtype(info):
    supported = info.supported_dtypes("cpu")
    return next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in supported), None)


def calls(info, dtypes, count: int):
    """(args, kwargs, result) of PyTorch's first samples in these types, of those that it takes."""
    for dtype in dtypes:
        if dtype is None or dtype not in info.supported_dtypes("cpu"):
            continue
        # not info.sample_inputs, which reads the sources of the whole call stack to name the test
        for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, False), count):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            torch.default_generator.manual_seed(42)
            try:
                yield args, kwargs, info.op(*args, **kwargs)
            except REFUSALS:
                continue


def spoken(args, kwargs) -> str:
    return str(
        map_structure(lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x, (args, kwargs))
    )


def refusal(function, args, kwargs) -> Exception | None:
    """What PyTorch raises."""
    try:
        function(*args, **kwargs)
    except REFUSALS as error:
        return error
    return None


def check(info, trace, inputs, want) -> None:
    want = tensors_in(want)
    for proxy, tensor in zip(trace.output, want, strict=True):
        assert fits(proxy.shape, tensor.shape) and (to_torch_dtype(proxy.dtype), proxy.device.type) == (
            tensor.dtype,
            tensor.device.type,
        )
    torch.default_generator.manual_seed(42)
    got = carried_out(trace, inputs)
    if info.name not in UNDEFINED:
        exact = {} if info.name in VARYING else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(got, want, **exact, equal_nan=True, check_stride=False)


@pytest.mark.parametrize("info", entries(KNOWN))
def test_forward_and_types_equal_pytorchs(info):
    tried = 0
    more = calls(
        info, (torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.float16), 2
    )
    for args, kwargs, want in itertools.chain(calls(info, (first_dtype(info),), 8), more):
        tried += 1
        for function in {info.op, info.method_variant}:
            if function is None or lookup(function) is None:
                continue
            try:
                trace, inputs = traced(function, args, kwargs)
            except CaptureError:
                assert info.name in REFUSED, spoken(args, kwargs)
                continue
            check(info, trace, inputs, want)
    assert tried, "PyTorch took none of its samples"


@pytest.mark.parametrize("info", WRAPPED, ids=lambda i: i.formatted_name)
def test_wrapped_operations_equal_pytorchs(info):
    """Samples behind a Python function: those that consist of known operations are compared; an opaque operation is the
    frontend's matter."""
    for args, kwargs, want in calls(info, (first_dtype(info),), 4):
        try:
            trace, inputs = traced(info.op, args, kwargs, inside=True)
        except (*REFUSALS, CaptureError, AttributeError):
            pytest.skip("needs the interpreter: it calls what only real tensors take")
        if any(opaque.is_opaque(line.sym) for line in trace.bound_symbols):
            pytest.skip(
                "opaque: "
                + ", ".join(sorted({line.sym.name for line in trace.bound_symbols if opaque.is_opaque(line.sym)}))
            )
        check(info, trace, inputs, want)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("info", KNOWN, ids=lambda i: i.formatted_name)
def test_decompositions_equal_the_operation(info):
    dtype = torch.float64 if torch.float64 in info.supported_dtypes("cpu") else first_dtype(info)
    opened = 0
    for args, kwargs, want in calls(info, (dtype,), 6):
        try:
            trace, inputs = traced(info.op, args, kwargs)
        except (CaptureError, *REFUSALS):
            continue  # the test above tells
        symbols = [line.sym for line in trace.bound_symbols]
        if any(OpTags.RANDOM_OP in s.tags for s in symbols) or all(s.decomposition is None for s in symbols):
            continue
        if any(
            line.sym.is_prim and line.sym.decomposition is not None and not line.subsymbols
            for line in trace.bound_symbols
        ):
            continue  # a kernel whose decomposition does not know these arguments
        try:
            got = carried_out(trace, inputs, [Opened("opened")])
        except MissingImplementationError as error:
            assert "data-dependent sizes" in str(error) and info.name in BY_DATA
            continue
        if info.name not in UNDEFINED:
            torch.testing.assert_close(got, tensors_in(want), equal_nan=True, check_stride=False)
        opened += 1
    if not opened:
        pytest.skip("a primitive")


# gradients that eager has none of, or the other way round, and why
NONE_OR_ZEROS = {"linalg.norm": "order 0, by PyTorch's own graph"}


@pytest.mark.parametrize(
    "info",
    [i for i in KNOWN if i.supports_autograd and torch.float64 in i.supported_dtypes("cpu")],
    ids=lambda i: i.formatted_name,
)
def test_gradients_equal_autograds(info):
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", torch.float64, True), 4):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        torch.default_generator.manual_seed(42)
        try:
            want = tensors_in(info.op(*args, **kwargs))
            trace, inputs = traced(info.op, args, kwargs, grad=True)
        except (*REFUSALS, CaptureError):
            continue  # the tests above tell
        outputs = list({id(o): o for o in want if o.requires_grad and not any(o is x for x in inputs)}.values())
        leaves = [x for x in inputs if x.requires_grad]
        if not outputs or not leaves or [o.requires_grad for o in trace.output] != [o.requires_grad for o in want]:
            continue
        if any(o is x for o in want for x in inputs) or any(o is a for o in trace.output for a in trace.args):
            continue  # an output that is an argument is the frontend's matter
        cotangents = [torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1)) for o in outputs]
        try:
            expected = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
        except RuntimeError as error:
            # for these cotangents: phases of eigenvectors
            assert "is ill-defined" in str(error) or "not differentiable" in str(error), error
            continue
        torch.default_generator.manual_seed(42)
        got, gradients = differentiated(trace, inputs, cotangents)
        if info.name not in UNDEFINED:
            exact = {} if info.name in VARYING else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(
                got, list({id(o): o for o in want}.values()), **exact, equal_nan=True, check_stride=False
            )
        gradients_of_leaves = [g for x, g in zip(inputs, gradients, strict=True) if x.requires_grad]
        for x, g, e in zip(leaves, gradients_of_leaves, expected, strict=True):
            assert (g is None) == (e is None) or info.name in NONE_OR_ZEROS, spoken(args, kwargs)
            assert g is None or (g.shape, g.dtype) == (x.shape, x.dtype)
            torch.testing.assert_close(
                g, e if g is None or e is not None else torch.zeros_like(g), rtol=1e-9, atol=1e-9, equal_nan=True
            )


@pytest.mark.parametrize("info", IN_PLACE, ids=lambda i: i.formatted_name)
def test_in_place_forms_on_a_temporary(info):
    function = info.inplace_variant

    def program(x, *rest, **kwargs):
        y = x.clone()
        z = function(y, *rest, **kwargs)
        return y.mul(1), z.mul(1)

    for args, kwargs, _ in calls(info, (first_dtype(info),), 5):
        torch.default_generator.manual_seed(42)
        try:
            want = program(*args, **kwargs)
        except REFUSALS:
            continue
        if want[0].shape != args[0].shape and info.name not in REFUSED:
            continue  # it resizes its first argument
        try:
            trace, inputs = traced(program, args, kwargs, inside=True)
        except CaptureError:
            assert info.name in REFUSED, spoken(args, kwargs)
            continue
        except TypeError as error:
            assert "doesn't apply to a 'TensorProxy'" in str(error)
            pytest.skip("needs the interpreter: a method descriptor")
        check(info, trace, inputs, want)


@pytest.mark.parametrize(
    "info",
    [i for i in KNOWN if i.error_inputs_func is not None and not i.name.startswith("__")],
    ids=lambda i: i.formatted_name,
)
def test_errors_are_pytorchs(info):
    for sample in (e.sample_input for e in info.error_inputs_func(info, "cpu")):
        args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
        if isinstance(args[0], torch.Tensor) and args[0].ndim > 64:
            continue  # PyTorch's own limit of dimensions
        want = refusal(info.op, args, kwargs)
        if want is None:
            continue
        if kwargs.get("out") is not None:
            with pytest.raises((*REFUSALS, CaptureError)):
                traced(info.op, args, kwargs)
            continue
        with pytest.raises((*REFUSALS, CaptureError)) as got:
            trace, inputs = traced(info.op, args, kwargs)
            assert info.name in LATE, f"captured, though PyTorch refuses it: {want!r}"
            carried_out(trace, inputs)
        if isinstance(got.value, CaptureError):
            assert info.name in REFUSED, spoken(args, kwargs)
            continue
        assert type(got.value) is type(want)
        assert str(got.value).split()[:4] == str(want).split()[:4]


def test_how_many_entries_are_known(capsys):
    with capsys.disabled():
        print(
            f"\nop_db: {len(op_db)} entries, {len(KNOWN)} by operations of ours, {len(WRAPPED)} behind functions of "
            f"its own, {len(IN_PLACE)} in-place forms"
        )
    assert len(KNOWN) >= 420
