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
    """Compiles a function, a method or an `nn.Module`. Nothing happens until the first call, which captures it.

    executors: executors or their names, in the order they are asked; None means the default ones.
    transforms: applied in order.
    rules: of `thunder.rule`, applied in order: operations that compute what a pattern does are replaced.
    passes: the passes that run, in order: a function from the list that `thunder.passes()` gives to another one, or a
    list. `python -m thunder passes` prints them with the facts that each needs and gives.
    cache: "constant values", "symbolic values", "same input" or "no caching"; where it is not given, values are
    constants but for numbers that change from call to call.
    dynamic: sizes of arguments stay symbolic in a program, so that it fits other sizes too: True from the first call,
    False never; by default a size does from its second value on, unless an executor that fuses, or a transform, makes a
    program for each size. `thunder.mark_dynamic(tensor, dim)` says it of one dimension.
    numerics: "close", or "eager" for results and gradients that are eager's bit for bit where kernels read the same
    layouts (a view that was overwritten is read as a new tensor): only executors and transforms that say they are
    `exact` are used.
    rng: "torch", or "fused": fusion executors may draw random numbers of their own.
    tiers: the number of the call from which on a program runs compiled kernels; calls before it run PyTorch's, while
    those of fusion executors are compiled in the background. 0 waits at the first call, None never fuses. On the CPU
    these are the executor cpp's, which need not be named. Results change by rounding at that call. "one": the executors
    run as they are from the first call on. "automatic" (the default): 5 for programs on the CPU with the default
    executors that are not kept on disk, without torch.use_deterministic_algorithms(True), else "one".
    graphs: whether programs on a GPU run as CUDA graphs, which the host launches as one. "auto" (the default): the 16th
    call of a program decides by the times of the host and the device at the calls before it; results do not depend on
    that. True: from the second call on, as `CUDAGraphTransform` does. False: never.
    autotune: whether the second call measures kernels on a GPU with several tiles each. The fastest are taken from then
    on, and later processes find them on disk. Nothing is measured under torch.use_deterministic_algorithms(True).
    sharp_edges: "allow", "warn" (the default) or "error".
    fallback: for programs that cannot be captured. "eager" (the default) runs the original function and warns once;
    "error" raises CaptureError and runs nothing. With transforms other than CUDA graphs, or where parameters are
    replaced, it is always an error, since the original would compute something else.
    disable_torch_autograd: results never require grad.
    debug_options: see `thunder.DebugOptions`. record_history: keep the full interpreter log.
    interpretation, langctx: accepted as in 2024.
    compile_options: those that executors and passes declare (`memory_budget`, `max_entries`, ...);
    `python -m thunder options` lists them with their types and defaults.

    Returns a callable for a function, a `thunder.ThunderModule` for a module. Both have `programs`, `recompilations`
    and `lower`. Used without a function it is a decorator that takes options.
    Raises TypeError for an unknown option, which names the near one, and for something that cannot be called;
    OptionError for a value that is not valid, which names the valid ones.
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
    """Sizes of `tensor` in these dimensions stay symbolic in programs that are compiled for it, from the first call on.
    The functions of torch._dynamo (`mark_dynamic`, `maybe_mark_dynamic`, `mark_unbacked`, `mark_static`) have the same
    meaning as there, but that a program that decides by a size is no error: each answer has a program.

    min, max: bounds of the sizes. Programs hold for all sizes, and do not need them.

    Raises IndexError for a dimension that it does not have, OptionError for a size that is not between the bounds.
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
    """Compiles the original of `cfn` again, with one more transform or a list of them after those that it has.

    disable_torch_autograd_support: results never require grad. All other options are kept.
    Raises OptionError where `cfn` is not compiled or `transform` is no transform.
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
