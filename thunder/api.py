"""`thunder.jit` and `thunder.add_transform`: from options to compiled functions and modules."""

from __future__ import annotations

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.capture.numbers import MARK
from thunder.compat.names import warn_of_untried_version
from thunder.compiled import Compiled, compiled_of
from thunder.distributed.placement import is_under_fsdp
from thunder.distributed.prepared import adopt, adopt_called_by
from thunder.errors import OptionError, noted
from thunder.extend import Executor, resolve_executors
from thunder.extend.passes import Pass, PassList, resolve_passes
from thunder.extend.rules import Rule, check_rules
from thunder.methods import CompiledMethod
from thunder.module import ThunderModule
from thunder.options import (
    AUTOMATIC,
    CACHE_OPTIONS,
    FALLBACK_OPTIONS,
    NUMERICS_OPTIONS,
    RNG_OPTIONS,
    SHARP_EDGES_OPTIONS,
    DebugOptions,
    JitOptions,
    check_compile_options,
    check_interpretation,
    check_langctx,
    resolve_cache_option,
    resolve_dynamic,
    resolve_fallback,
    resolve_graphs,
    resolve_numerics,
    resolve_rng,
    resolve_sharp_edges,
    resolve_tiers,
)
from thunder.pipeline import PASSES
from thunder.transforms.base import check_transforms, has_hook, with_executors_of
from thunder.transforms.cudagraph import CUDAGraphTransform


def jit(
    fn: Callable | None = None,
    /,
    *,
    executors: Sequence[Executor | str] | None = None,
    transforms: Sequence | None = None,
    rules: Sequence[Rule] | None = None,
    passes: Callable[[PassList], Iterable[Pass]] | Iterable[Pass] | None = None,
    cache: CACHE_OPTIONS | str | None = None,
    numerics: NUMERICS_OPTIONS | str | None = None,
    rng: RNG_OPTIONS | str | None = None,
    tiers: int | str | None = AUTOMATIC,
    graphs: bool | str = "auto",
    autotune: bool = False,
    sharp_edges: SHARP_EDGES_OPTIONS | str | None = None,
    fallback: FALLBACK_OPTIONS | str | None = None,
    dynamic: bool | None = None,
    disable_torch_autograd: bool = False,
    debug_options: DebugOptions | None = None,
    record_history: bool = False,
    interpretation: Any = None,
    langctx: Any = None,
    **compile_options: Any,
) -> Any:
    """Compiles a function, a method or an `nn.Module`. The first call captures it and compiles a program.

    Later calls run a compiled program if its guards hold, and compile another program otherwise. Can be used as a
    decorator.

    Args:
        fn: The function or module. Without it, `jit` returns a decorator that uses the other arguments.
        executors: Executors or their names, in order of priority. None means the default executors.
        transforms: `thunder.Transform` objects, applied in order.
        rules: Rules of `thunder.rule`, applied in order. Operations that match the pattern of a rule are replaced.
        passes: A list of passes, or a function from the list of `thunder.passes()` to another list.
            `python -m thunder passes` prints the passes, with the facts that each one requires and establishes.
        cache: "constant values", "symbolic values", "same input" or "no caching". By default values are constants,
            except numbers that change from call to call.
        numerics: "close", or "eager" for results and gradients that equal eager's bit for bit, if kernels read the
            same memory layouts (an overwritten view is read as a new tensor). "eager" uses only executors and
            transforms that declare `exact`.
        rng: "torch", or "fused" to let fused kernels draw random numbers. These differ from eager's.
        tiers: The number of the call from which a program runs compiled kernels. Earlier calls run PyTorch's kernels
            while the kernels of fusion executors compile in the background. 0 waits for them in the first call, None
            never fuses, and "one" runs the executors from the first call on. "automatic" is 5 for programs on the CPU
            that use the default executors and are not kept on disk, and "one" for all other programs and under
            torch.use_deterministic_algorithms(True). Results may differ by rounding from that call on.
        graphs: Whether programs on a GPU run as CUDA graphs. "auto" decides at the 16th call of a program, by the
            times of the host and of the device in earlier calls; results do not depend on the decision. True records
            graphs in the second call, as `CUDAGraphTransform` does. False never does.
        autotune: Whether the second call of a program on a GPU measures each kernel with several tile sizes and keeps
            the fastest. Later processes read the choice from disk. Ignored under
            torch.use_deterministic_algorithms(True).
        sharp_edges: "allow", "warn" or "error", for behaviour that a compiled program cannot repeat exactly.
        fallback: What happens if a line cannot be captured. "eager" runs the smallest function that contains the
            line, or the whole function, in eager PyTorch, and warns once. "error" raises CaptureError. If the whole
            function would have to run although `transforms` change it or its parameters were replaced, CaptureError is
            raised in both cases, because the original function would compute something else.
        dynamic: Whether sizes of arguments are symbolic, so that one program serves many sizes: True from the first
            call, False never, None from the second value of a size on, unless an executor or a transform needs a
            program for each size. `thunder.mark_dynamic` makes one dimension symbolic.
        disable_torch_autograd: If True, results never require grad.
        debug_options: A `thunder.DebugOptions`.
        record_history: If True, the full log of interpreted instructions is kept.
        interpretation: Has no effect. Accepted for compatibility with Lightning Thunder.
        langctx: Has no effect. Accepted for compatibility with Lightning Thunder.
        compile_options: Options that executors and passes declare (`memory_budget`, `max_entries`, ...).
            `python -m thunder options` lists them with their types and defaults.

    Returns:
        A callable for a function, a `thunder.ThunderModule` for a module. Both have the attributes `programs`,
        `recompilations` and `lower`.

    Raises:
        TypeError: If `fn` is not callable, or an option is unknown; the message names the most similar option.
        OptionError: If the value of an option is invalid; the message lists the valid values.
    """
    arguments = {n: v for n, v in locals().items() if n not in ("fn", "compile_options")} | compile_options
    warn_of_untried_version()
    options = _resolved(**arguments)
    if fn is None:
        return functools.partial(jit, **arguments)
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(jit(fn.__func__, **arguments))
    if not callable(fn):
        raise TypeError(f"thunder.jit compiles functions and modules, not {type(fn).__name__}")
    return jit_with(fn, options)


def _resolved(
    *, executors, transforms, rules, passes, cache, numerics, rng, tiers, graphs, autotune, sharp_edges, fallback,
    dynamic, disable_torch_autograd, debug_options, record_history, interpretation, langctx, **compile_options,
) -> JitOptions:  # fmt: skip
    """The arguments of `thunder.jit`, checked."""
    gone = {"early_transforms": "pass transforms=", "use_cudagraphs": "pass a CUDA graph transform in transforms="}
    for old, hint in gone.items():
        if old in compile_options:
            raise RuntimeError(f"{old} is not an option anymore: {hint}")
    if "executors_list" in compile_options:
        warnings.warn("executors_list is an old spelling of executors", stacklevel=3)
        executors = compile_options.pop("executors_list")
    for name, value in (
        ("disable_torch_autograd", disable_torch_autograd),
        ("record_history", record_history),
        ("autotune", autotune),
    ):
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is not an option; valid: True, False")
    check_interpretation(interpretation)
    check_langctx(langctx)
    given_transforms = check_transforms(() if transforms is None else transforms)
    resolved_graphs = resolve_graphs(graphs)
    if resolved_graphs and not any(isinstance(t, CUDAGraphTransform) for t in given_transforms):
        given_transforms = (*given_transforms, CUDAGraphTransform())
    chosen = with_executors_of(given_transforms, resolve_executors(executors))
    # executors declare some, so they are loaded before
    check_compile_options(compile_options, jit.__kwdefaults__ or ())
    numerics, chosen = resolve_numerics(
        numerics, chosen, given_transforms, [*with_executors_of(given_transforms, ()), *(executors or ())]
    )
    debug = DebugOptions() if debug_options is None else debug_options
    if not isinstance(debug, DebugOptions):
        raise OptionError(f"debug_options={debug!r} is not an option; valid: thunder.DebugOptions(...)")
    if record_history:
        debug = DebugOptions(**(debug._values | {"record_interpreter_history": True}))
    options = JitOptions(
        executors=chosen,
        cache=resolve_cache_option(cache),
        numbers_may_change=cache is None,
        dynamic=resolve_dynamic(dynamic, None if cache is None else resolve_cache_option(cache)),
        sharp_edges=resolve_sharp_edges(sharp_edges),
        fallback=resolve_fallback(fallback),
        disable_torch_autograd=disable_torch_autograd,
        transforms=given_transforms,
        rules=_exact_rules(check_rules(() if rules is None else rules), numerics),
        passes=PASSES if passes is None else resolve_passes(passes, PASSES),
        numerics=numerics,
        rng=resolve_rng(rng, numerics),
        tiers=resolve_tiers(tiers),
        graphs=resolved_graphs,
        autotune=autotune,
        debug=debug,
        default_executors=executors is None,
        compile_options=compile_options,
    )
    options.executors = tuple(e.configured(options) for e in chosen)
    return options


def _exact_rules(rules: tuple[Rule, ...], numerics: NUMERICS_OPTIONS) -> tuple[Rule, ...]:
    """The rules. Raises OptionError for one that is not exact under "eager"."""
    for one in rules if numerics is NUMERICS_OPTIONS.EAGER else ():
        if not one.exact:
            raise OptionError(
                f"numerics='eager' and rules=[{one.name}]: that rule does not say that its results are equal bit for "
                "bit (exact=True): leave one of the two out"
            )
    return rules


def compiled_or_jit(fn: Callable) -> Compiled:
    """The compiled function behind `fn`; `thunder.jit` with default options compiles what is not compiled."""
    compiled = compiled_of(fn) or compiled_of(jit(fn))
    assert compiled is not None, "thunder.jit makes something compiled"
    return compiled


def mark_dynamic(tensor: torch.Tensor, *dims: int, min: int | None = None, max: int | None = None) -> None:
    """Makes the sizes of a tensor in some dimensions symbolic in programs that are compiled for it, from the first call
    on.

    `mark_dynamic`, `maybe_mark_dynamic`, `mark_unbacked` and `mark_static` of torch._dynamo have the same meaning as in
    torch.compile, with one difference: a branch on such a size is not an error, since each branch gets a program.

    Args:
        tensor: The tensor.
        dims: The dimensions.
        min: The smallest size. Programs do not depend on the bounds; only this tensor is compared with them.
        max: The largest size.

    Raises:
        IndexError: If the tensor does not have one of the dimensions.
        OptionError: If a size of the tensor is outside the bounds.
    """
    for dim in dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"mark_dynamic: dim {dim} of a tensor with {tensor.dim()} dimensions")
        if min is not None and tensor.shape[dim] < min or max is not None and tensor.shape[dim] > max:
            raise OptionError(f"mark_dynamic: size {tensor.shape[dim]} of dim {dim} is not between {min} and {max}")
    known = getattr(tensor, MARK, frozenset())
    setattr(tensor, MARK, known | {dim % tensor.dim() for dim in dims})


def jit_with(fn: Callable, options: JitOptions):
    """`thunder.jit` with options already resolved. A compiled function is compiled anew from its original."""
    if isinstance(fn, ThunderModule):
        fn = fn._model
    if isinstance(fn, (Compiled, CompiledMethod)):
        fn = fn._lc_original
    if isinstance(fn, types.MethodType) and isinstance(method := getattr(fn, "_compiled", None), Compiled):
        fn = method.fn  # of a compiled module
    if not isinstance(fn, torch.nn.Module):
        if compat.distributed_is_used():
            adopt_called_by(fn)
        return Compiled(fn, options)
    _refuse_wrapped(fn)
    if compat.distributed_is_used():
        adopt(fn)
    module = ThunderModule(fn, Compiled(fn, options))
    for transform in options.transforms:
        if has_hook(transform, "transform_module"):
            with noted(f"{type(transform).__name__}.transform_module"):
                transform.transform_module(module)
    return module


def _refuse_wrapped(module: torch.nn.Module) -> None:
    """Raises NotImplementedError for PyTorch's wrappers, which go around a compiled module, and for TorchScript."""
    what = "thunder.jit of a "
    if isinstance(module, torch.jit.ScriptModule):
        raise NotImplementedError(f"{what}TorchScript module: compile the module that it was scripted or traced from")
    if any(is_under_fsdp(m) and not compat.is_fully_sharded(m) for m in module.modules()):
        after = "compile the module first, then shard the result, or use fully_shard or thunder.distributed.fsdp"
        raise NotImplementedError(f"{what}module under FullyShardedDataParallel: {after}")


def add_transform(cfn: Callable, *, transform: Any, disable_torch_autograd_support: bool = False) -> Any:
    """Compiles the original function of `cfn` again, with additional transforms.

    Args:
        cfn: A compiled function or module.
        transform: A `thunder.Transform` or a list of them. They follow the transforms that `cfn` has.
        disable_torch_autograd_support: If True, results never require grad. All other options stay the same.

    Raises:
        OptionError: If `cfn` is not compiled, or `transform` is not a transform.
    """
    compiled = compiled_of(cfn)
    if compiled is None:
        advice = "thunder.jit(..., transforms=[...]) makes one"
        raise OptionError(f"add_transform takes a compiled function or module, not {type(cfn).__name__}: {advice}")
    added = check_transforms(transform if isinstance(transform, (tuple, list)) else [transform])
    options = compiled.options
    resolve_numerics(options.numerics, with_executors_of(added, ()), added, with_executors_of(added, ()))
    options = dataclasses.replace(
        options,
        executors=with_executors_of(added, options.executors),
        transforms=(*options.transforms, *added),
        disable_torch_autograd=options.disable_torch_autograd or disable_torch_autograd_support,
        used_compile_options={},
    )
    return jit_with(compiled.fn, options)
