"""Is every operator of PyTorch right under thunder.jit? PyTorch's own operator database, `op_db`, asks.

    python benchmarks/op_coverage.py [--entries REGEX] [--dtypes float32 ...] [--samples N] [--shard i/n] [--seed N] [-j
    PROCESSES] [--json FILE]

Every entry of the database, on the CPU, in float32, int64, bool, complex64 and bfloat16 where the entry takes them,
with every sample it gives. A sample becomes the source of a small function, as a user would write it: tensors are
parameters, everything else stands in the text. That function is called in eager PyTorch and through `thunder.jit`,
twice, in each of the entry's forms: function, method, in-place method, operator, in-place operator, `out=`.

forward: the results are equal bit for bit (NaN equals NaN), with dtype, shape, strides, device, requires_grad and the
memory they share with the arguments; what the call writes to its arguments is the same; the generator of random numbers
stands where eager's does. Random operations are drawn with the same seed, so they are compared like all others; of what
is not initialised (`empty`) everything but the values is. under grad what is an argument may come back as a view of it.
In place under grad and with out=, where thunder runs the function itself and PyTorch another kernel that rounds
otherwise, the values are those of the function. gradient: where PyTorch differentiates, the result and its gradients
for random cotangents are as close as rounding allows: within the tolerances of torch.testing, or, for gradients, no
further from the gradient in float64 than four times what eager is. refused: PyTorch raises an error, and so does
thunder, of the same class and with the same first words. clear: PyTorch computes it, and thunder says by a CaptureError
that it does not. wrong: everything else.

Printed: counts for each type, what every operation in the programs was (KINDS), and all that
is not right, by name with its reason. The exit status is 1 when anything is wrong, or one of the bars is missed where
the whole database ran.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

import thunder
from thunder.core.proxies import TensorProxy, proxies_in
from thunder.errors import CaptureError
from thunder.ops import opaque
from thunder.ops.torch_types import to_torch_dtype

DTYPES = {
    "float32": torch.float32,
    "int64": torch.int64,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "bfloat16": torch.bfloat16,
}
# their values are whatever was in memory
UNDEFINED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"}


def is_defined(info, kwargs: dict) -> bool:
    """Whether eager gives the same values twice: LAPACK's gelsy reads pivots that nobody set."""
    return info.name not in UNDEFINED and not (info.name.startswith("linalg.lstsq") and kwargs.get("driver") == "gelsy")


BARS = {"forward": 0.98, "gradient": 0.97, "opaque": 0.40}
SEED = 42


# ---------------------------------------------------------------------------------------------------------------- a
# sample as a program


@dataclass
class Program:
    """A call as a function of its tensors. run: the function. tensors: what it is called with. source: its text."""

    run: Callable
    tensors: list[torch.Tensor]
    source: str


_LITERALS = (int, float, bool, str, type(None), type(Ellipsis))


class _Writer:
    """Writes values as Python: tensors as parameters, numbers and text as they are, everything else as a global."""

    def __init__(self):
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.globals: dict[str, object] = {}

    def value(self, x) -> str:
        if isinstance(x, torch.Tensor):
            return self.tensors.setdefault(id(x), (f"x{len(self.tensors)}", x))[0]
        if type(x) in (list, tuple):
            inner = ", ".join(map(self.value, x))
            return f"[{inner}]" if type(x) is list else f"({inner},)" if len(x) == 1 else f"({inner})"
        if type(x) is dict:
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in x.items()) + "}"
        if type(x) is slice:
            return f"slice({self.value(x.start)}, {self.value(x.stop)}, {self.value(x.step)})"
        if type(x) in _LITERALS and not (type(x) is float and (x != x or x in (float("inf"), -float("inf")))):
            return "..." if x is ... else repr(x)
        if isinstance(x, (torch.dtype, torch.layout, torch.memory_format)):
            return str(x)
        name = f"c{len(self.globals)}"
        self.globals[name] = x
        return name


def program_of(function, args: tuple, kwargs: dict, *, form: str = "function", on_copy: bool = False) -> Program:
    """The program that calls `function` with these arguments, in one of `forms`. on_copy: the first tensor is cloned
    first, and the clone returned as well."""
    writer = _Writer()
    arguments = [writer.value(a) for a in args]
    keywords = [f"{k}={writer.value(v)}" for k, v in kwargs.items()]
    lines = []
    if on_copy:
        lines.append(f"y = {arguments[0]}.clone()")
        arguments[0] = "y"
    name = getattr(function, "__name__", "")
    if (
        form in ("method", "inplace")
        and args
        and isinstance(args[0], torch.Tensor)
        and getattr(torch.Tensor, name, None) == function
    ):
        call = f"{arguments[0]}.{name}({', '.join([*arguments[1:], *keywords])})"
    else:
        writer.globals["function"] = function
        call = f"function({', '.join([*arguments, *keywords])})"
    lines.append(f"return {call}, y" if on_copy else f"return {call}")
    source = f"def program({', '.join(n for n, _ in writer.tensors.values())}):\n" + "".join(
        f"    {line}\n" for line in lines
    )
    space = {"torch": torch, "slice": slice, **writer.globals}
    exec(compile(source, "<sample>", "exec"), space)
    return Program(space["program"], [t for _, t in writer.tensors.values()], source)  # type: ignore[arg-type]


def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in the same layout; tensors that share memory share it again."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if t.layout is not torch.strided or t.is_nested:
            return t.detach().clone()
        if t.is_conj():
            return copy(t.detach().conj()).conj()
        if t.is_neg():
            return torch._neg_view(copy(torch._neg_view(t.detach())))
        memory = t.untyped_storage()
        if memory.data_ptr() not in storages:
            storages[memory.data_ptr()] = memory.clone()
        return torch.empty(0, dtype=t.dtype).set_(storages[memory.data_ptr()], t.storage_offset(), t.shape, t.stride())

    return [copy(t).requires_grad_(t.requires_grad) for t in tensors]


# ----------------------------------------------------------------------------------------------------------------
# running it, and comparing


REFUSALS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
    NotImplementedError,
    AttributeError,
    AssertionError,
    KeyError,
    ZeroDivisionError,
)


@dataclass
class Outcome:
    """What a run gave. result: as it is returned; tensors: what the program was called with, afterwards. generator: the
    state of the random numbers."""

    result: object
    tensors: list[torch.Tensor]
    error: Exception | None
    generator: torch.Tensor | None = None


def outcome(run: Callable, tensors: list[torch.Tensor]) -> Outcome:
    torch.default_generator.manual_seed(SEED)
    try:
        result = run(*tensors)
    except (*REFUSALS, CaptureError) as error:
        return Outcome(None, tensors, error)
    return Outcome(result, tensors, None, torch.default_generator.get_state())


def leaves(value) -> list:
    if isinstance(value, dict):
        return [x for v in value.values() for x in leaves(v)]
    return (
        [x for v in value for x in leaves(v)]
        if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)
        else [value]
    )


def _kind(value):
    """The structure of a result without its leaves."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value), [_kind(v) for v in value]
    return {k: _kind(v) for k, v in value.items()} if isinstance(value, dict) else isinstance(value, torch.Tensor)


def _shown_arguments(x: torch.Tensor, tensors: list[torch.Tensor], identity: bool) -> list:
    """Which arguments x is, and whether it shares memory with one and from which element on."""
    results: list = [i for i, t in enumerate(tensors) if identity and t is x]
    if x.layout is not torch.strided or x.is_nested:
        return results
    memory = x.untyped_storage().data_ptr()
    if memory and any(
        t.layout is torch.strided and not t.is_nested and t.untyped_storage().data_ptr() == memory for t in tensors
    ):
        results.append(("memory", x.storage_offset()))
    return results


def _about(x: torch.Tensor) -> dict:
    if x.layout is torch.strided and not x.is_nested:
        return {
            "dtype": x.dtype,
            "shape": tuple(x.shape),
            "strides": x.stride(),
            "device": x.device,
            "requires_grad": x.requires_grad,
            "conj": x.is_conj(),
            "neg": x.is_neg(),
        }
    return {
        "dtype": x.dtype,
        "layout": x.layout,
        "device": x.device,
        "requires_grad": x.requires_grad,
        "class": type(x),
    }


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(x) if x.is_complex() else x


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    if a.layout is not torch.strided:
        return same_values(a.to_dense(), b.to_dense())
    a, b = _bits(a), _bits(b)
    if torch.equal(a, b) and not (a.dtype.is_floating_point and not torch.equal(a.signbit(), b.signbit())):
        return True
    if not a.dtype.is_floating_point:
        return False
    nan = a.isnan() & b.isnan()
    return bool((nan | ((a == b) & (a.signbit() == b.signbit()))).all())


def difference(want: Outcome, got: Outcome, defined: bool, identity: bool = True) -> str | None:
    """How two runs differ; None where they do not. identity: whether a result that is an argument has to be that
    object, and not a view of it."""
    if _kind(want.result) != _kind(got.result):
        return f"the result is {_kind(got.result)} where PyTorch's is {_kind(want.result)}"
    for w, g in zip(leaves(want.result), leaves(got.result), strict=True):
        if not isinstance(w, torch.Tensor):
            if type(w) is not type(g) or not (w == g or w != w and g != g):
                return f"the result is {g!r} where PyTorch's is {w!r}"
            continue
        if _about(w) != _about(g):
            return "; ".join(
                f"{k} is {b} where PyTorch's is {a}"
                for (k, a), b in zip(_about(w).items(), _about(g).values(), strict=False)
                if a != b
            )
        if (shown := _shown_arguments(w, want.tensors, identity)) != (
            shows := _shown_arguments(g, got.tensors, identity)
        ):
            return f"it shares memory with arguments {shows}, PyTorch's result with {shown}"
        if defined and not same_values(w, g):
            return _VALUES
    for i, (w, g) in enumerate(zip(want.tensors, got.tensors, strict=True)):
        if w is not g and (_about(w) != _about(g) or defined and not same_values(w, g)):
            return f"argument {i} differs afterwards"
    if not torch.equal(want.generator, got.generator):  # type: ignore[arg-type]
        return "the generator stands elsewhere"
    return None


_VALUES = "values differ"


def _by_other_kernel(function, args: tuple, kwargs: dict, got, want) -> bool:
    """Whether a result of an in-place or out= form is what the function itself computes: PyTorch rounds otherwise in
    some kernels that write to an argument."""
    program = program_of(function, args, {k: v for k, v in kwargs.items() if k != "out"})
    plain = leaves(outcome(program.run, program.tensors).result)
    pairs = list(zip(leaves(got), plain, leaves(want), strict=True))
    return all(same_values(g, p.to(g.dtype)) and close_enough(g, w, w) for g, p, w in pairs)


def words(error: Exception) -> list[str]:
    return str(error).split()[:4]


def judged_error(want: Outcome, got: Outcome) -> tuple[str, str] | None:
    """(verdict, reason) where one of two runs raised."""
    if want.error is None and got.error is None:
        return None
    if isinstance(got.error, CaptureError):
        return ("clear" if want.error is None else "refused"), str(got.error).split("\n")[0]
    if want.error is None:
        return "wrong", f"{type(got.error).__name__}: {got.error}".split("\n")[0]
    if got.error is None:
        return "wrong", f"PyTorch raises {type(want.error).__name__}: {want.error}".split("\n")[0]
    if type(want.error) is not type(got.error) or words(want.error) != words(got.error):
        return "wrong", f"{type(got.error).__name__}: {got.error}".split("\n")[
            0
        ] + f" where PyTorch raises {type(want.error).__name__}: {want.error}".split("\n")[0]
    return "refused", ""


# ----------------------------------------------------------------------------------------------------------------
# gradients


def gradients(outputs: list, wanted: list[torch.Tensor]) -> tuple:
    """The gradients of what requires grad, for cotangents that are the same in every run."""
    outputs = [o for o in leaves(outputs) if isinstance(o, torch.Tensor) and o.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dense = [o.to_dense() if o.layout is not torch.strided else o for o in outputs]
    cotangents = [
        torch.randn(o.shape, dtype=torch.complex128 if o.is_complex() else torch.float64, generator=generator).to(
            o.dtype
        )
        for o in dense
    ]
    return torch.autograd.grad(dense, wanted, cotangents, allow_unused=True)


def _in_double(x):
    if isinstance(x, torch.Tensor):
        wide = {torch.complex64: torch.complex128}.get(x.dtype, torch.float64 if x.is_floating_point() else x.dtype)
        return x.detach().to(wide).requires_grad_(x.requires_grad)
    if type(x) in (list, tuple):
        return type(x)([_in_double(v) for v in x])
    return (
        {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.complex64: torch.complex128}.get(x, x)
        if isinstance(x, torch.dtype)
        else x
    )


def close_enough(got: torch.Tensor, want: torch.Tensor, reference: torch.Tensor | None) -> bool:
    """Within the tolerances of torch.testing, or, given the gradient in float64, no further from it than four times
    what eager is, and four units in the last place."""
    try:
        torch.testing.assert_close(got, want, equal_nan=True)
        return True
    except AssertionError:
        if reference is None or got.shape != reference.shape:
            return False
    finite = torch.isfinite(_bits(want)) & torch.isfinite(_bits(reference).to(want.real.dtype))
    if not torch.equal(torch.isfinite(_bits(got)) & finite, finite):
        return False
    g, w, r = (_bits(x).double().where(finite, 0) for x in (got, want, reference))
    unit = torch.finfo(got.dtype).eps * r.abs().max()
    return bool((g - r).abs().max() <= 4 * (w - r).abs().max() + 4 * unit)


# ---------------------------------------------------------------------------------------------------------------- one
# entry


@dataclass
class Check:
    """One judgement. form: how the operation was called; which: "forward" or "gradient"; verdict: "equal", "refused",
    "clear" or "wrong"."""

    entry: str
    dtype: str
    form: str
    which: str
    verdict: str
    reason: str = ""
    sample: str = ""


@dataclass
class Report:
    """All checks of an entry, and what the operations in its programs were."""

    entry: str
    checks: list[Check] = field(default_factory=list)
    support: dict[str, str] = field(default_factory=dict)  # operation -> one of KINDS
    recompiled: int = 0


def spoken(args, kwargs) -> str:
    def one(x):
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if type(x) in (list, tuple):
            return type(x)(map(one, x))
        return x

    return re.sub(
        r"'(\w+\[[\d, ]*\])'", r"\1", f"{tuple(map(one, args))} {({k: one(v) for k, v in kwargs.items()}) or ''}"
    )[:300].strip()


def forms(info) -> list[tuple[str, Callable]]:
    """The ways to call an entry, each with the callable."""
    callables = [
        ("function", info.op), ("method", info.method_variant), ("inplace", info.inplace_variant),
            ("operator", info.operator_variant),
        ("inplace operator", info.inplace_operator_variant), ("out", info.op if info.supports_out else None),
    ]  # fmt: skip
    return [(name, f) for name, f in callables if f is not None]


# what an operation is, from what is known least to what is known most
KINDS = ("opaque", "by example", "own rule", "decomposition")


def kind_of(symbol) -> str:
    if opaque.is_opaque(symbol):
        return "opaque"
    if symbol.typed_by_running:
        return "by example"
    return "decomposition" if symbol.decomposition is not None else "own rule"


def _computation(compiled):
    return thunder.compile_stats(compiled).last_entry.captured.computation


def _mistyped(compiled, result) -> str | None:
    """How the types that the trace gives its outputs differ from what it computes: what comes after an operation is
    decided by them."""
    computation = _computation(compiled)
    tensors, proxies, arguments = (
        [x for x in leaves(result) if isinstance(x, torch.Tensor)],
        proxies_in(computation.output, []),
        set(computation.args),
    )
    if len(tensors) != len(proxies):  # a result is an argument, or one result stands in two places
        return None
    for x, p in zip(tensors, proxies, strict=True):
        if (
            type(p) is TensorProxy
            and p not in arguments
            and all(type(n) is int for n in p.shape)
            and (p.shape, to_torch_dtype(p.dtype)) != (x.shape, x.dtype)
        ):
            return (
                f"the trace says {to_torch_dtype(p.dtype)}{list(p.shape)} where the result is {x.dtype}{list(x.shape)}"
            )
    return None


def check_forward(info, function, form: str, args: tuple, kwargs: dict, report: Report) -> tuple[str, str] | None:
    """(verdict, reason); None where the form does not take the sample at all."""
    program = program_of(function, args, kwargs, form=form)
    mutates = form in ("inplace", "inplace operator", "out") or info.name.endswith("_")
    fresh = copied if mutates else list
    versions = [t._version for t in program.tensors if not t.is_inference()]
    want = outcome(program.run, fresh(program.tensors))
    if form == "out" and want.error is not None:
        return None
    if not mutates and versions != [t._version for t in program.tensors if not t.is_inference()]:  # it writes after all
        return None
    compiled = thunder.jit(program.run, fallback="error")
    for again in (False, True):
        got = outcome(compiled, fresh(program.tensors))
        judged = judged_error(want, got)
        if judged is not None:
            return judged
        different = difference(want, got, is_defined(info, kwargs))
        different = different or _mistyped(compiled, got.result)
        if different is not None and not (
            form == "out" and different == _VALUES and _by_other_kernel(info.op, args, kwargs, got.result, want.result)
        ):
            return "wrong", different + (" in the second call" if again else "")
    if form == "function":
        report.support |= {line.sym.qualified_name: kind_of(line.sym) for line in _computation(compiled).bound_symbols}
    report.recompiled += thunder.cache_misses(compiled) > 1
    return "equal", ""


def _difference_with_grad(info, args: tuple, kwargs: dict, want: Outcome, got: Outcome, in_place: bool) -> str | None:
    """As `difference`, but for rounding: PyTorch takes another kernel where a gradient is wanted (matmul folds
    batches), and in some forms that write to an argument."""
    different = difference(want, got, is_defined(info, kwargs), identity=False)
    if different != _VALUES:
        return different
    if all(
        close_enough(g, w, None)
        for g, w in zip(leaves(got.result), leaves(want.result), strict=True)
        if isinstance(w, torch.Tensor)
    ):
        return None
    return None if in_place and _by_other_kernel(info.op, args, kwargs, got.result[0], want.result[0]) else different


def check_gradient(info, function, form: str, args: tuple, kwargs: dict, after: Callable) -> tuple[str, str] | None:
    """(verdict, reason); None where PyTorch does not differentiate the sample."""
    in_place = form in ("inplace", "inplace operator")
    program = program_of(function, args, kwargs, form=form, on_copy=in_place)
    wanted = [t for t in program.tensors if t.requires_grad]
    want = outcome(program.run, program.tensors)
    if (
        want.error is not None
        or not wanted
        or not any(isinstance(o, torch.Tensor) and o.requires_grad for o in leaves(want.result))
    ):
        return None
    try:
        expected = gradients(after(want.result), wanted)
    except REFUSALS:
        return None
    got = outcome(thunder.jit(program.run, fallback="error"), program.tensors)
    judged = judged_error(want, got)
    if judged is not None:
        return judged
    different = _difference_with_grad(info, args, kwargs, want, got, in_place)
    if different is not None:
        return "wrong", different
    try:
        results = gradients(after(got.result), wanted)
    except CaptureError as error:
        return "clear", str(error).split("\n")[0]
    except REFUSALS as error:
        return "wrong", f"in the backward: {type(error).__name__}: {error}".split("\n")[0]
    if not is_defined(info, kwargs):
        return "equal", ""
    reference = None
    for i, (g, e) in enumerate(zip(results, expected, strict=True)):
        if (g is None) != (e is None):
            return (
                "wrong",
                f"the gradient of tensor {i} is {'None' if g is None else 'a tensor'}, PyTorch's is "
                f"{'None' if e is None else 'a tensor'}",
            )
        if g is None:
            continue
        if (g.dtype, g.shape, g.layout) != (e.dtype, e.shape, e.layout):
            return (
                "wrong",
                f"the gradient of tensor {i} is {g.dtype}{list(g.shape)}, PyTorch's is {e.dtype}{list(e.shape)}",
            )
        if g.layout is not torch.strided:
            g, e = g.to_dense(), e.to_dense()
        if not close_enough(g, e, None):
            if reference is None:
                reference = _reference(function, args, kwargs, form, in_place, after, len(wanted))
            if not close_enough(g, e, reference[i]):
                return (
                    "wrong",
                    f"the gradient of tensor {i} differs by up to {float((g - e).abs().max()):.3g}, its largest "
                    f"element is {float(e.abs().max()):.3g}",
                )
    return "equal", ""


def _reference(function, args, kwargs, form: str, in_place: bool, after, count: int) -> list:
    """Eager's gradients in float64; Nones where it takes no float64."""
    program = program_of(
        function, _in_double(args), {k: _in_double(v) for k, v in kwargs.items()}, form=form, on_copy=in_place
    )
    wide = outcome(program.run, program.tensors)
    wanted = [t for t in program.tensors if t.requires_grad]
    try:
        return (
            list(gradients(after(wide.result), wanted))
            if wide.error is None and len(wanted) == count
            else [None] * count
        )
    except REFUSALS:
        return [None] * count


def samples(info, dtype: torch.dtype, requires_grad: bool, count: int | None) -> Iterator:
    # not info.sample_inputs, which reads the sources of the whole call stack to name the test
    torch.manual_seed(SEED)
    try:
        yield from itertools.islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad), count)
    except REFUSALS:
        if not requires_grad:
            raise


def check_entry(index: int, dtypes: list[str], count: int | None) -> Report:
    """All checks of `op_db[index]`."""
    info = op_db[index]
    report = Report(info.formatted_name)
    for name in dtypes:
        dtype = DTYPES[name]
        if dtype not in info.supported_dtypes("cpu"):
            continue
        for sample in samples(info, dtype, False, count):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            for form, function in forms(info):
                keywords = kwargs
                if form == "out":
                    out = outcome(
                        program_of(function, args, kwargs).run, program_of(function, args, kwargs).tensors
                    ).result
                    if "out" in kwargs or not leaves(out) or not all(isinstance(o, torch.Tensor) for o in leaves(out)):
                        continue
                    out = [torch.empty_like(o).zero_() for o in leaves(out)]
                    keywords = {**kwargs, "out": out[0] if len(out) == 1 else tuple(out)}
                elif form == "inplace operator" and not isinstance(args[0], torch.Tensor):
                    continue
                judged = check_forward(info, function, form, args, keywords, report)
                if judged is not None:
                    report.checks.append(
                        Check(
                            report.entry,
                            name,
                            form,
                            "forward",
                            *judged,
                            "" if judged[0] == "equal" else spoken(args, kwargs),
                        )
                    )
        if not info.supports_autograd or dtype not in info.supported_backward_dtypes("cpu"):
            continue
        for sample in samples(info, dtype, True, count):
            args, kwargs = (sample.input, *sample.args), dict(sample.kwargs)
            for form, function in forms(info):
                if form == "out" or form.startswith("inplace") and not info.supports_inplace_autograd:
                    continue
                judged = check_gradient(info, function, form, args, kwargs, sample.output_process_fn_grad)
                if judged is not None:
                    report.checks.append(
                        Check(
                            report.entry,
                            name,
                            form,
                            "gradient",
                            *judged,
                            "" if judged[0] == "equal" else spoken(args, kwargs),
                        )
                    )
    return report


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """oneDNN's bfloat16 kernels end the process on some processors, eager's too; PyTorch warns about its own samples;
    random entries seed the generator themselves, which is done around the program here; one thread, so that sums have
    one order."""
    onednn, threads, seeding = (
        torch._C._get_mkldnn_enabled(),
        torch.get_num_threads(),
        common_methods_invocations.wrapper_set_seed,
    )
    torch._C._set_mkldnn_enabled(False)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # fake tensors log what they then raise
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        common_methods_invocations.wrapper_set_seed = seeding
        torch.set_num_threads(threads)


def _checked(task: tuple) -> Report:
    with settings():
        return check_entry(*task)


# ---------------------------------------------------------------------------------------------------------------- all
# entries


def chosen(pattern: str, shard: tuple[int, int], seed: int) -> list[int]:
    """Indices of the entries whose names the pattern matches whole, of one shard of n. The seed shuffles them."""
    results = [i for i, info in enumerate(op_db) if re.fullmatch(pattern, info.formatted_name)]
    random.Random(seed).shuffle(results)
    return results[shard[0] - 1 :: shard[1]]


def run(
    indices: list[int], dtypes: list[str], count: int | None = None, processes: int = 1, progress: bool = False
) -> list[Report]:
    tasks = [(i, dtypes, count) for i in indices]
    if processes == 1:
        reports = map(_checked, tasks)
        return [_shown(r) if progress else r for r in reports]
    with ProcessPoolExecutor(processes) as pool:
        return [_shown(r) if progress else r for r in pool.map(_checked, tasks)]


def _shown(report: Report) -> Report:
    bad = Counter(c.verdict for c in report.checks if c.verdict in ("clear", "wrong"))
    print(f"  {report.entry}: {len(report.checks)} checks {dict(bad) or ''}", file=sys.stderr, flush=True)
    return report


def support_of(report: Report) -> str:
    """An entry is opaque when any operation in its programs is; else a decomposition where all are."""
    kinds = set(report.support.values())
    return next((k for k in KINDS if k in kinds), "nothing recorded")


def totals(reports: list[Report]) -> dict:
    """Counts and shares: what --json writes beside the checks."""
    checks = [c for r in reports for c in r.checks]
    counts = {name: Counter((c.which, c.verdict) for c in checks if c.dtype == name) for name in DTYPES}
    counts["total"] = sum(counts.values(), Counter())

    def share(which: str) -> float:
        taken = sum(counts["total"][which, v] for v in ("equal", "clear", "wrong"))
        return counts["total"][which, "equal"] / taken if taken else 1.0

    support = Counter(map(support_of, reports))
    return {
        "entries": len(reports), "counts": {k: {f"{which} {v}": n for (which, v), n in sorted(c.items())} for k,
        c in counts.items()}, "forward": share("forward"),
        "gradient": share("gradient"), "support": dict(support), "opaque": support["opaque"] / max(len(reports), 1),
        "wrong": sum(c.verdict == "wrong" for c in checks),
        "recompiled": sum(r.recompiled for r in reports),
    }  # fmt: skip


def show(reports: list[Report], results: dict) -> None:
    columns = [f"{which} {v}" for which in ("forward", "gradient") for v in ("equal", "refused", "clear", "wrong")]
    print(f"{'':10}{'entries':>9}" + "".join(f"{c:>18}" for c in columns))
    for name, counts in results["counts"].items():
        entries = sum(any(c.dtype == name for c in r.checks) for r in reports) if name != "total" else len(reports)
        print(f"{name:10}{entries:>9}" + "".join(f"{counts.get(c, 0):>18}" for c in columns))
    print(
        "\nentries by support: "
        + ", ".join(f"{n} {k}" for k, n in results["support"].items())
        + f"; opaque {results['opaque']:.1%}"
    )
    print(
        f"forward right: {results['forward']:.2%} of what PyTorch computes; gradients right: {results['gradient']:.2%} "
        f"of what PyTorch differentiates; wrong: {results['wrong']}"
    )
    print(f"compiled again in the second call: {results['recompiled']} programs")
    for verdict in ("wrong", "clear"):
        reasons: dict[tuple, list[Check]] = {}
        for c in (c for r in reports for c in r.checks if c.verdict == verdict):
            reasons.setdefault((c.entry, re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", c.reason)), []).append(c)
        print(f"\n{verdict}: {len({e for e, _ in reasons})} entries" if reasons else f"\n{verdict}: none")
        for (entry, _), checks in sorted(reasons.items()):
            where = sorted({f"{c.form} {c.which}" for c in checks})
            print(
                f"  {entry} ({len(checks)}; {', '.join(where)}; {', '.join(sorted({c.dtype for c in checks}))}): "
                f"{checks[0].reason}  [{checks[0].sample}]"
            )
    print(
        "\nnot initialised, compared without values: "
        + ", ".join(sorted(r.entry for r in reports if r.entry in UNDEFINED))
    )
    print("opaque entries: " + ", ".join(sorted(r.entry for r in reports if support_of(r) == "opaque")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", default=".*", metavar="REGEX", help="entries whose name matches whole")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--samples", type=int, help="at most so many of each entry and type")
    parser.add_argument("--shard", default="1/1", metavar="i/n")
    parser.add_argument("--seed", type=int, default=0, help="of the order that shards are cut from")
    parser.add_argument("-j", "--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--progress", action="store_true", help="a line for each entry on stderr")
    options = parser.parse_args()
    shard = tuple(map(int, options.shard.split("/")))
    reports = run(
        chosen(options.entries, shard, options.seed),
        options.dtypes,
        options.samples,
        options.processes,
        options.progress,
    )  # type: ignore[arg-type]
    results = totals(reports)
    show(reports, results)
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    **results,
                    "reports": [
                        asdict(r) | {"checks": [asdict(c) for c in r.checks if c.verdict != "equal"]} for r in reports
                    ],
                },
                indent=1,
            )
        )
    whole = options.entries == ".*" and shard[1] == 1 and options.samples is None
    missed = whole and (
        results["forward"] < BARS["forward"]
        or results["gradient"] < BARS["gradient"]
        or results["opaque"] > BARS["opaque"]
    )
    return int(results["wrong"] > 0 or missed)


if __name__ == "__main__":
    sys.exit(main())
