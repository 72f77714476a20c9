"""thunder: a source-to-source compiler for PyTorch.

    compiled = thunder.jit(model_or_function)
    compiled(x)
    print(thunder.last_traces(compiled)[-1])

Names are imported when they are first used, so that `thunder.interpreter` and `thunder.core` can be had without torch.
"""

from __future__ import annotations

from thunder._lazy import names_from
from thunder.version import VERSION

__version__ = VERSION

_FROM = {
    "thunder.api": ("jit", "add_transform", "mark_dynamic"),
    "thunder.recipes": ("compile", "Recipe"),
    "thunder.precompiled": ("precompile", "load"),
    "thunder.transforms.base": ("Transform",),
    "thunder.transforms.autocast": ("autocast",),
    "thunder.extend.opaque": ("opaque",),
    "thunder.extend.disable": ("disable",),
    "thunder.extend.debugging": ("debug_print",),
    "thunder.tracing": ("trace",),
    "thunder.inspect.verify": ("verify",),
    "thunder.inspect.explain": ("explain",),
    "thunder.inspect.faults": ("debug",),
    "thunder.inspect.exporting": ("export",),
    "thunder.inspect.minify": ("minify",),
    "thunder.inspect.opcheck": ("opcheck",),
    "thunder.inspect.profile": ("profile", "profiler_ranges"),
    "thunder.inspect.report": ("report", "Report"),
    "thunder.module": ("ThunderModule",),
    "thunder.options": (
        "DebugOptions", "CACHE_OPTIONS", "SHARP_EDGES_OPTIONS", "FALLBACK_OPTIONS", "NUMERICS_OPTIONS", "RNG_OPTIONS",
    ),
    "thunder.pipeline": ("passes",),
    "thunder.extend.passes": ("Pass", "PassList"),
    "thunder.extend.rules": ("rule", "Rule"),
    "thunder.inspect.queries": (
        "compile_data", "compile_stats", "last_traces", "last_backward_traces", "last_prologue_traces",
        "last_epilogue_traces", "last_kernels", "cache_option", "cache_hits",
        "cache_misses", "list_transforms", "last_interpreted_instructions", "last_interpreter_log",
        "print_last_interpreter_log", "last_compile_options",
        "last_recompile_reasons", "last_paths", "get_auto_registered_torch_op_names", "last_sharp_edges",
    ),
    "thunder.extend": ("get_all_executors", "get_default_executors", "get_always_executors", "get_executor",
    "resolve_executors", "add_default_executor", "add_always_executor", "remove_default_executor",
    "remove_always_executor", "set_default_executors", "set_always_executors"),
    "thunder.core.proxies": ("Proxy", "TensorProxy", "NumberProxy"),
    "thunder.core.trace": ("TraceCtx", "Trace"),
    "thunder.core": ("devices", "dtypes"),
    "thunder.core.dtypes": (
        "bool8", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bfloat16", "float16",
        "float32", "float64", "complex32", "complex64",
        "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    ),
}  # fmt: skip
_MODULES = (
    "core",
    "distributed",
    "dynamo",
    "errors",
    "examine",
    "executors",
    "extend",
    "functional",
    "interpreter",
    "ops",
    "quantization",
    "recipes",
    "torch",
    "transforms",
)

__all__ = sorted([*_MODULES, *(name for names in _FROM.values() for name in names)])
# names of Lightning Thunder, loaded on demand
_OF_LIGHTNING = {
    "thunder.compat.lightning": (
        "grad", "Plugin", "pytorch_executor", "sdpa_executor", "apex_executor", "nvfuser_executor", "cudnn_executor",
        "custom_op_executor", "torchcompile_cat_executor", "torchcompile_xentropy_executor",
    ),
}  # fmt: skip
__getattr__, __dir__ = names_from(__name__, _FROM | _OF_LIGHTNING)
