"""Typing by example: what a function of PyTorch gives for tensors like those that proxies stand for.

Fake tensors are the examples, or, where a tensor is none that shape, type and device describe, tensors of zeros. The
same examples say in PyTorch's words why it refuses arguments. `run_line` runs an operation on them, or on real tensors,
and `no_autocast` a program of operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from thunder import compat
from thunder.core.proxies import (
    AnyProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
    concrete,
    leaves,
    map_structure,
    number_value,
    proxies_in,
)
from thunder.core.symbol import BoundSymbol, current_recorder, user_location
from thunder.core.unbacked import fresh_size, varying
from thunder.errors import CaptureError, DataDependentError, ThunderError
from thunder.ops.opaque_values import (
    CONSTRUCTORS,
    fix_shared,
    holds_unusual,
    is_unusual,
    refuse,
    refuse_write,
    unwritten,
)
from thunder.ops.promotion import same_device
from thunder.ops.shape_rules import Unfit
from thunder.ops.torch_types import from_tensor_device, from_tensor_dtype, to_torch_device, to_torch_dtype

_EXAMPLES = 40  # sizes that PyTorch's function is run with, where they are symbolic
_FEW = 1 << 22  # elements up to which a fake is a dense tensor; beyond it is one element, expanded


def fake(x) -> Any:
    """A tensor of zeros with a proxy's metadata, on the CPU; other values as torch takes them."""
    if isinstance(x, TensorProxy):
        shape = tuple(number_value(n) for n in x.shape)
        dtype = to_torch_dtype(x.dtype)
        count = 1
        for n in shape:
            count *= n
        return (
            torch.zeros(shape, dtype=dtype, device="cpu")
            if count <= _FEW
            else torch.zeros((), dtype=dtype, device="cpu").expand(shape)
        )
    return number_value(x) if isinstance(x, NumberProxy) else as_torch(x)


def example(x, make: Callable = torch.empty, value: Callable = concrete, **options):
    """What PyTorch is called with in the place of a value of a trace, to see what it gives: a tensor that `make` makes
    with a proxy's shape, type and device.

    value: gives that of a symbolic number. `concrete` makes it a guard, `number_value` does not.
    """
    if isinstance(x, TensorProxy):
        return make(
            tuple(map(value, x.shape)), dtype=to_torch_dtype(x.dtype), device=to_torch_device(x.device), **options
        )
    return x.example if isinstance(x, AnyProxy) else as_torch(value(x))


def as_torch(x):
    """thunder's dtypes and devices as torch's; everything else as it is."""
    if type(x).__module__.startswith("thunder.core"):
        return (
            to_torch_dtype(x)
            if type(x).__name__ == "dtype"
            else to_torch_device(x)
            if type(x).__name__ == "Device"
            else x
        )
    return x


def run_line(
    operation: BoundSymbol, values: dict[Proxy, object], number: Callable[[Any], Any] = NumberProxy.concrete
) -> None:
    """Calls the PyTorch functions of an operation, or of its decomposition, with the values known so far, and adds its
    results to them. number: the value of one that stays symbolic."""
    if operation.sym.fn is None:
        for sub in operation.subsymbols:
            run_line(sub, values, number)
        values.update({old: values.get(new, new) for old, new in operation.aliases.items()})
        return

    def real(x):
        return values[x] if isinstance(x, Proxy) else number(x) if isinstance(x, NumberProxy) else as_torch(x)

    try:
        result = operation.sym.fn(*map_structure(real, operation.args), **map_structure(real, operation.kwargs))
    except (
        ValueError
    ) as error:  # of a view of fake tensors that strides do not allow, where PyTorch's functions raise RuntimeError
        raise RuntimeError(str(error)) from error
    assign(operation.output, result, values)


def assign(said, result, values: dict[Proxy, Any]) -> None:
    """Notes the results of an operation under its proxies."""
    if isinstance(said, Proxy):
        values[said] = result
    elif isinstance(said, (tuple, list)):
        for s, r in zip(said, result, strict=True):
            assign(s, r, values)
    elif isinstance(said, dict):
        for k, s in said.items():
            assign(s, result[k], values)


def no_autocast(function):
    """Decorator of generated programs: torch.autocast does not change them, the casts it asks for are written out in
    them.

    Costs one flag test when autocast is off.
    """

    any_autocast = compat.any_autocast

    @functools.wraps(function)
    def run(*args, **kwargs):
        if not any_autocast():
            return function(*args, **kwargs)
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        try:
            return function(*args, **kwargs)
        finally:
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)

    return run


def as_pytorch(symbol, args: tuple, kwargs: dict, error: Exception) -> Exception | None:
    """The error PyTorch raises for arguments like these; for those that only thunder refuses, one that names the
    operation, or None. The examples are zeros on the CPU: a rule that looks at devices or values raises by itself."""
    if symbol.fn is None or isinstance(error, ThunderError):
        return None
    try:
        with compat.probing(draws=True):  # casts are operations by now
            symbol.fn(*map_structure(fake, args), **map_structure(fake, kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as better:
        return better.with_traceback(None)
    return RuntimeError(f"{symbol.name}(): {error}") if isinstance(error, Unfit) else None


# ----------------------------------------------------------------------------------------------------------------
# types of results


def typed_by_running(function: Callable, name: str) -> Callable:
    """A meta rule that runs the function on examples."""

    def meta(*args, **kwargs):
        if function in CONSTRUCTORS or holds_unusual((args, kwargs)):
            return _typed_on_zeros(function, name, args, kwargs)
        if varying((args, kwargs)):
            unknown = DataDependentError(f"what {name} gives for other sizes")
            unknown.examples = _EXAMPLES
            raise unknown
        try:
            return _typed_on_fakes(compat.FakeTensorMode(), function, name, args, kwargs)
        except (compat.DataDependentOutput, compat.DynamicOutputShape):
            mode = compat.fake_mode_of_sizes()
        try:  # data-dependent sizes come out as symbols
            return _typed_on_fakes(mode, function, name, args, kwargs)
        except (
            compat.DataDependentOutput,
            compat.DynamicOutputShape,
            compat.UnsupportedOperator,
            torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode,
        ) as error:
            raise CaptureError(
                f"the shape or value of {name}'s result depends on data",
                location=user_location(),
                remedy="compute it outside of the compiled function and pass it in, or use an operation with a fixed "
                "output shape",
            ) from error

    return meta


def without_memory(x, value: Callable = concrete):
    """A tensor of PyTorch's device "meta" for a proxy; other values as `example` gives them."""
    return example(x, lambda shape, dtype, device: torch.empty(shape, dtype=dtype, device="meta"), value)


def typed_on_meta(function: Callable) -> Callable:
    """A meta rule that runs the function on tensors without memory, which is faster than fake tensors are."""

    def meta(*args, **kwargs):
        tensors = [p for p in proxies_in(kwargs, proxies_in(args, [])) if isinstance(p, TensorProxy)]
        device, recorder = same_device(*tensors), current_recorder()
        grad = recorder is not None and recorder.context.grad_enabled

        def on_meta(x):
            meta_value = without_memory(x)
            return meta_value.requires_grad_(grad and x.requires_grad) if isinstance(x, TensorProxy) else meta_value

        def typed(x):
            if not isinstance(x, torch.Tensor):
                return x
            dtype = from_tensor_dtype(x.dtype)
            return TensorProxy(shape=tuple(x.shape), dtype=dtype, device=device, requires_grad=x.requires_grad)

        with compat.probing(grad), compat.quiet():
            return map_structure(typed, function(*map_structure(on_meta, args), **map_structure(on_meta, kwargs)))

    return meta


# results that say something of shapes and types
_PLAIN = (
    bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip


def differentiates_fakes(values) -> bool:
    """Whether this PyTorch can differentiate fake tensors like these: a build without CUDA ends the process where they
    are on a GPU, as those of a plan are."""
    return torch.backends.cuda.is_built() or not any(
        p.device.type == "cuda" for p in proxies_in(values, []) if isinstance(p, TensorProxy)
    )


def saved_by_autograd(operation: BoundSymbol, value: TensorProxy) -> bool:
    """Whether PyTorch's derivative of an operation keeps the memory of an argument or a result. True where PyTorch does
    not tell."""
    function, examples, storages = operation.sym.fn, dict[Any, torch.Tensor](), set[int]()
    if function is None or operation.sym.is_prim or not differentiates_fakes(operation.inputs):
        return True

    def argument(x):
        if not isinstance(x, TensorProxy):
            return example(x, value=number_value)
        if x not in examples:
            examples[x] = example(x, value=number_value, requires_grad=x.requires_grad)
        return examples[x]

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages.add(x.untyped_storage()._cdata)
        return x

    try:
        with compat.quiet_fake_tensors(), compat.probing(True), compat.FakeTensorMode():
            with torch.autograd.graph.saved_tensors_hooks(keep, keep):
                results = function(
                    *map_structure(argument, operation.args), **map_structure(argument, operation.kwargs)
                )
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return True
    examples |= zip(operation.outputs, (x for x in leaves(results) if isinstance(x, torch.Tensor)), strict=False)
    return value not in examples or examples[value].untyped_storage()._cdata in storages


def _proxy_of(x: torch.Tensor, requires_grad: bool) -> TensorProxy:
    sizes = [fresh_size() if isinstance(n, torch.SymInt) and not n.node.is_constant() else int(n) for n in x.shape]
    dtype, device = from_tensor_dtype(x.dtype), from_tensor_device(x.device)
    return TensorProxy(shape=tuple(sizes), dtype=dtype, device=device, requires_grad=requires_grad)


def _typed_on_fakes(mode: compat.FakeTensorMode, function, name: str, args: tuple, kwargs: dict):
    """The type of a PyTorch function's result, from a call on fake tensors. Raises what PyTorch raises, and
    CaptureError for a result that no program can hold."""
    recorder = current_recorder()
    grad = recorder is not None and recorder.context.grad_enabled
    tracks = differentiates_fakes((args, kwargs))
    known: dict[int, TensorProxy] = {}
    fakes: list[torch.Tensor] = []  # ids in `known` stay valid while these live

    def fake(x):
        if not isinstance(x, TensorProxy):
            return mode.from_tensor(x) if isinstance(x, torch.Tensor) else example(x)
        fakes.append(example(x, requires_grad=grad and tracks and x.requires_grad))
        known[id(fakes[-1])] = x
        return fakes[-1]

    with compat.quiet_fake_tensors(), compat.probing(grad), mode:
        out = function(*map_structure(fake, args), **map_structure(fake, kwargs))

    def typed(x):
        if not isinstance(x, torch.Tensor):
            if not isinstance(x, _PLAIN):
                what = f"{name} gives a {type(x).__name__}, which stands for memory of a tensor"
                raise CaptureError(what, location=user_location(), remedy="ask for it outside of the compiled function")
            return x
        if id(x) in known:
            return known[id(x)]
        proxy = _proxy_of(x, x.requires_grad if tracks else grad and any(p.requires_grad for p in known.values()))
        if recorder is not None and recorder.memory is not None:
            storage = x.untyped_storage()._cdata
            for argument in fakes:
                if argument.untyped_storage()._cdata == storage:
                    recorder.memory.share(proxy, known[id(argument)])
        return proxy

    with compat.DisableTorchFunction():
        if any(isinstance(x, torch.Tensor) and is_unusual(x) for x in leaves(out)):
            return _typed_on_zeros(function, name, args, kwargs)
        return map_structure(typed, out)


def _typed_on_zeros(function: Callable, name: str, args: tuple, kwargs: dict) -> Any:
    """For tensors that a proxy cannot describe.

    Raises CaptureError where a gradient would have to pass through such a tensor, where something is written to it, and
    where the program asks for a value.
    """
    proxies = proxies_in(kwargs, proxies_in(args, []))
    if name.endswith("_") and not name.endswith("__"):
        refuse_write(name)
    recorder = current_recorder()
    differentiable = (
        recorder is not None
        and recorder.context.grad_enabled
        and any(isinstance(p, TensorProxy) and p.requires_grad for p in proxies)
    )
    known: dict[int, Proxy] = {}

    def zeros(x):
        example_of_zeros = example(x, torch.zeros)
        if isinstance(x, Proxy):
            known[id(example_of_zeros)] = x
        return example_of_zeros

    with compat.probing(draws=True, own_rules=True):
        examples = map_structure(zeros, (args, kwargs))
        with unwritten(name, leaves(examples)):
            out = function(*examples[0], **examples[1])

        def typed(x):
            if not isinstance(x, torch.Tensor):
                if isinstance(x, (int, float)):
                    refuse(
                        f"{name} asks for a value of a sparse or nested tensor, or of one of a subclass with its own "
                        "rules",
                        "compute it outside and pass it in",
                    )
                return x
            if id(x) in known:
                return known[id(x)]
            if is_unusual(x):
                return AnyProxy("", x)
            return _proxy_of(x, differentiable and (x.is_floating_point() or x.is_complex()))

        result = map_structure(typed, out)
        if recorder is not None and recorder.memory is not None:
            fix_shared(recorder.memory, zip(leaves(out), leaves(result), strict=True), leaves(examples), known)
    if differentiable and any(isinstance(p, AnyProxy) for p in leaves(result)):
        refuse(
            f"{name} gives a sparse or nested tensor that requires grad",
            "detach what it is made of, or compute it outside",
        )
    return result
