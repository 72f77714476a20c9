"""Options of `thunder.jit`, typed."""

from __future__ import annotations

import difflib
import enum
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from thunder.errors import OptionError, did_you_mean, warn_user

__all__ = [
    "CACHE_OPTIONS", "SHARP_EDGES_OPTIONS", "FALLBACK_OPTIONS",
    "resolve_dynamic", "resolve_fallback", "NUMERICS_OPTIONS", "RNG_OPTIONS", "DebugOptions", "JitOptions",
    "resolve_cache_option", "resolve_sharp_edges",
    "resolve_numerics", "resolve_rng", "resolve_tiers", "resolve_graphs",
    "RECOMPILE_WARNING_LIMIT", "cache_directory",
    "CompileOption", "compile_option", "COMPILE_OPTIONS", "check_compile_options", "EnvironmentOption", "ENVIRONMENT",
]  # fmt: skip


class CACHE_OPTIONS(enum.Enum):
    """How a program depends on the numbers and sizes of its inputs."""

    # other numbers, strings or sizes compile the function again (see
    # JitOptions.numbers_may_change)
    CONSTANT_VALUES = "constant values"
    # numbers and tensor sizes may change, as long as decisions on them have the same answers
    SYMBOLIC_VALUES = "symbolic values"
    SAME_INPUT = "same input"  # the first program is run for every input: nothing is checked, nor what is one object
    NO_CACHING = "no caching"  # compiled anew at every call


class SHARP_EDGES_OPTIONS(enum.Enum):
    """What happens if a program does something that a compiled program cannot repeat exactly, such as drawing
    Python's random numbers."""

    ALLOW = "allow"
    WARN = "warn"
    ERROR = "error"


class FALLBACK_OPTIONS(enum.Enum):
    """What happens if a program cannot be captured."""

    EAGER = "eager"  # the original function runs, once, and a FallbackWarning says why
    ERROR = "error"  # a CaptureError says why, and nothing runs


class NUMERICS_OPTIONS(enum.Enum):
    """How close results are to those of eager PyTorch."""

    CLOSE = "close"  # they may differ by rounding: executors and transforms compute in their own way
    EAGER = "eager"  # bit for bit the same: only executors and transforms that say they are `exact`


class RNG_OPTIONS(enum.Enum):
    """Whether PyTorch or fused kernels draw random numbers."""

    TORCH = "torch"  # PyTorch, one operation after the other: the same seed gives the same numbers as eager
    # a fusion executor may, from a seed that PyTorch draws for each call: other numbers of the same distribution
    FUSED = "fused"


# values of `tiers`
AUTOMATIC = "automatic"  # on the CPU compiled kernels from the call AUTOMATIC_CALL on; elsewhere one tier
ONE = "one"  # the executors run as they are from the first call on, and no other is added
AUTOMATIC_CALL = 5
GRAPHS_CALL = 16  # the call at which graphs="auto" decides whether a program is recorded


RECOMPILE_WARNING_LIMIT = 8  # compilations of one function, after which a RecompileWarning says why they happen


# ------------------------------------------------------------------------------------------------------ the environment


@dataclass(frozen=True)
class EnvironmentOption:
    """A variable of the environment that thunder asks for. kind: str or bool; default: the value where it is not
    set."""

    name: str
    kind: type
    default: Any
    description: str

    @property
    def value(self) -> Any:
        text = os.environ.get(self.name)
        if not text:
            return self.default
        return text.lower() in ("1", "true", "on", "yes", "y") if self.kind is bool else text

    def assign(self, value: str | None) -> None:
        """Sets it for this process and those that it starts."""
        os.environ.pop(self.name, None)
        if value is not None:
            os.environ[self.name] = value


def environment_of_children() -> dict[str, str]:
    """This process's environment, for one that imports what this one imports."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


CACHE_DIR = EnvironmentOption("THUNDER_CACHE_DIR", str, None, "where compiled kernels are kept from process to process")
C_COMPILER = EnvironmentOption("CC", str, None, "the C compiler of prologues' checks and of Triton's launches")
CXX_COMPILER = EnvironmentOption("CXX", str, None, "the C++ compiler of kernels on the CPU")
INDUCTOR_CACHE_DIR = EnvironmentOption(
    "TORCHINDUCTOR_CACHE_DIR", str, None, "Inductor's own cache, which processes share"
)
SEARCH_PATH = EnvironmentOption("PATH", str, None, "where compilers are looked for")
LOCAL_RANK = EnvironmentOption("LOCAL_RANK", str, None, "the process's number on its machine, which says its GPU")
TRITON_INTERPRET = EnvironmentOption(
    "TRITON_INTERPRET", bool, False, "Triton's interpreter runs kernels, on any device"
)
LOGS = EnvironmentOption(
    "THUNDER_LOGS", str, "", "topics to log: recompiles, guards, passes, output_code, fallbacks; by commas"
)
FALLBACK = EnvironmentOption("THUNDER_FALLBACK", str, "eager", "the default of fallback=")
KEEP_PROGRAMS = EnvironmentOption(
    "THUNDER_KEEP_PROGRAMS", bool, False, "programs are kept on disk where thunder.jit is not told (keep_programs=)"
)
DEBUG = EnvironmentOption(
    "THUNDER_DEBUG", str, "", "what programs look at while they run: nan, inf, shapes, slow, separated by commas"
)
TIERS = EnvironmentOption("THUNDER_TIERS", str, AUTOMATIC, 'the default of tiers=: "one", "none" or a call')
GRAPHS = EnvironmentOption("THUNDER_GRAPHS", str, "auto", 'the default of graphs=: "auto", "on" or "off"')
DISABLE = EnvironmentOption("THUNDER_DISABLE", bool, False, "the original functions run, and nothing is compiled")
DEBUG_TOPICS = ("nan", "inf", "shapes", "slow")


def debug_topics() -> frozenset[str]:
    """The topics of THUNDER_DEBUG. Raises OptionError for one that there is not."""
    topics = frozenset(t for t in DEBUG.value.replace(" ", "").split(",") if t)
    for topic in topics - set(DEBUG_TOPICS):
        near = did_you_mean(topic, DEBUG_TOPICS)
        raise OptionError(f"THUNDER_DEBUG={topic!r} is no topic; {near}valid: {', '.join(DEBUG_TOPICS)}")
    return topics


ENVIRONMENT = (
    DEBUG, DISABLE, TIERS,
    FALLBACK, LOGS, KEEP_PROGRAMS, CACHE_DIR, C_COMPILER, CXX_COMPILER, INDUCTOR_CACHE_DIR, SEARCH_PATH,
    LOCAL_RANK, TRITON_INTERPRET,
)  # fmt: skip


def cache_directory() -> Path:
    """Where compiled kernels are kept: THUNDER_CACHE_DIR, or `thunder` where the platform keeps a user's caches."""
    directory = CACHE_DIR.value
    if directory:
        return Path(directory).expanduser().absolute()
    if sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
        home = os.environ.get("XDG_CACHE_HOME") or caches
    return Path(home).expanduser().absolute() / "thunder"


# ------------------------------------------------------------------------------------------------------ compile options


@dataclass(frozen=True)
class CompileOption:
    """A keyword of `thunder.jit` that an executor or a pass declares where it reads it, by `compile_option`.

    kind: the type of its values, or several; an int is a float, and a bool is no number. valid: in words, which values
    of the type are accepted; check: whether one is. owner: the executor or pass.
    """

    name: str
    kind: type | tuple[type, ...]
    default: Any
    description: str
    owner: str
    valid: str = ""
    check: Callable[[Any], bool] = lambda value: True

    @property
    def kind_name(self) -> str:
        return " or ".join(t.__name__ for t in (self.kind if isinstance(self.kind, tuple) else (self.kind,)))

    def checked(self, value: Any) -> Any:
        """The value. Raises OptionError for one of another type, and for one that is not accepted."""
        kinds = self.kind if isinstance(self.kind, tuple) else (self.kind,)
        kinds = (*kinds, int) if float in kinds else kinds
        fits = type(value) is bool if bool in kinds and isinstance(value, bool) else isinstance(value, kinds)
        if isinstance(value, bool) and bool not in kinds:
            fits = False
        if not fits or not self.check(value):
            valid = self.valid or f"values of type {self.kind_name}"
            raise OptionError(f"{self.name}={value!r} is not an option; valid: {valid} ({self.description})")
        return value


COMPILE_OPTIONS: dict[str, CompileOption] = {}


def compile_option(
    name: str, kind: type | tuple[type, ...], default: Any, description: str, *, owner: str, valid: str = "",
    check: Callable[[Any], bool] = lambda value: True,
) -> CompileOption:  # fmt: skip
    """Declares a keyword of `thunder.jit`, which is read by `options.get(option)` of a JitOptions.

    Raises OptionError where another owner has declared the name.
    """
    known = COMPILE_OPTIONS.get(name)
    if known is not None and known.owner != owner:
        raise OptionError(f"the compile option {name} of {owner}: {known.owner} has declared one of that name")
    option = COMPILE_OPTIONS[name] = CompileOption(name, kind, default, description, owner, valid, check)
    return option


_OF_TORCH_COMPILE = {
    "fullgraph": "a program is one graph here: leave it out",
    "backend": "executors=[...] says who runs the operations",
    "mode": "thunder.compile(..., recipe=...) has recipes by name",
    "options": "compile options are keywords themselves",
    "disable": "call the function that was not compiled",
}


# accepted, since programs written for Lightning Thunder pass them; a warning says that they change nothing
_OF_2024 = {
    "torch_compile_fullgraph": "a region is always one graph",
    "fusion_type": "regions join along the flow of data",
    "use_apex_cross_entropy": 'executors=["apex"] asks for it',
    "auto_recompute_intermediates": "memory_budget= chooses the values to recompute",
    **dict.fromkeys(
        ("sdpa_debug", "cudnn_sdpa_bwd_may_cat_grad_qkv", "disable_replace_uniform", "skip_inplace_alias_updates",
         "disable_inplace_copy_check", "thunderfx_disable_split_autograd", "is_differentiable_outputs"),
        "there is nothing to switch",
    ),
    **dict.fromkeys(
        ("nv_enable_linear", "nv_enable_matmul", "nv_enable_sdpa", "nv_enable_scatter", "nv_enable_shape_only_fusion",
         "nv_store_fusion_inputs", "nv_save_fake_inputs", "nv_enable_options", "nv_disable_options", "nv_skip_cache"),
        "nvFuser takes nothing here",
    ),
}  # fmt: skip


def check_compile_options(options: Mapping[str, Any], keywords: Iterable[str]) -> None:
    """Raises TypeError for a keyword that nobody has declared, and OptionError for a value that is not valid.

    keywords: those of `thunder.jit` itself.
    """
    for name, value in options.items():
        if name in COMPILE_OPTIONS:
            COMPILE_OPTIONS[name].checked(value)
            continue
        if name in _OF_2024:
            warn_user(f"thunder.jit(..., {name}=...) has no effect: {_OF_2024[name]}", UserWarning)
            continue
        near = difflib.get_close_matches(name, [*keywords, *COMPILE_OPTIONS], 1)
        if name in _OF_TORCH_COMPILE:
            hint = f"it is torch.compile's; {_OF_TORCH_COMPILE[name]}"
        else:
            hint = f"did you mean {near[0]}=?" if near else "`python -m thunder options` lists those there are"
        raise TypeError(f"thunder.jit() got an unexpected keyword argument {name!r}: {hint}")


# ---------------------------------------------------------------------------------------------------------- thunder.jit


E = TypeVar("E", bound=enum.Enum)


def _resolve(kind: type[E], value: Any, what: str) -> E:
    if isinstance(value, kind):
        return value
    for member in kind:
        if isinstance(value, str) and value.lower() == member.value:
            return member
    valid = [m.value for m in kind]
    near = did_you_mean(value, valid)
    raise OptionError(f"{what}={value!r} is not an option; {near}valid: {', '.join(map(repr, valid))}")


def resolve_cache_option(option: CACHE_OPTIONS | str | None) -> CACHE_OPTIONS:
    """Raises OptionError, which names the valid values, for anything else."""
    return CACHE_OPTIONS.CONSTANT_VALUES if option is None else _resolve(CACHE_OPTIONS, option, "cache")


def resolve_sharp_edges(option: SHARP_EDGES_OPTIONS | str | None) -> SHARP_EDGES_OPTIONS:
    """Raises OptionError, which names the valid values, for anything else."""
    return SHARP_EDGES_OPTIONS.WARN if option is None else _resolve(SHARP_EDGES_OPTIONS, option, "sharp_edges")


def resolve_fallback(option: FALLBACK_OPTIONS | str | None) -> FALLBACK_OPTIONS:
    """Raises OptionError, which names the valid values, for anything else."""
    return _resolve(FALLBACK_OPTIONS, FALLBACK.value if option is None else option, "fallback")


def resolve_numerics(
    option: NUMERICS_OPTIONS | str | None, executors: Sequence, transforms: Sequence, asked_for: Sequence
) -> tuple[NUMERICS_OPTIONS, tuple]:
    """The option, and which of the executors may be used. Raises OptionError for another value, and for what was asked
    for and is not `exact` under "eager"."""
    numerics = NUMERICS_OPTIONS.CLOSE if option is None else _resolve(NUMERICS_OPTIONS, option, "numerics")
    if numerics is NUMERICS_OPTIONS.CLOSE:
        return numerics, tuple(executors)
    names = {getattr(e, "name", e) for e in asked_for}
    for e in executors:
        if not e.exact and e.name in names:
            raise OptionError(
                f"numerics='eager' and executors=[{e.name}]: that executor does not say that its results are "
                "PyTorch's bit for bit (exact=True): leave one of the two out"
            )
    for t in transforms:
        if not getattr(t, "exact", False):
            raise OptionError(
                f"numerics='eager' and transforms=[{type(t).__name__}]: that transform does not say that it keeps "
                "results bit for bit (exact = True): leave one of the two out"
            )
    return numerics, tuple(e for e in executors if e.exact)


def resolve_dynamic(dynamic: bool | None, cache: CACHE_OPTIONS | None) -> bool | None:
    """None, which is automatic, only where `cache` was not said. Raises OptionError for anything but a bool."""
    if dynamic is not None and not isinstance(dynamic, bool):
        raise OptionError(f"dynamic={dynamic!r} is not an option; valid: None, True, False")
    if dynamic is None and cache is not None:
        return cache is CACHE_OPTIONS.SYMBOLIC_VALUES
    return dynamic


def resolve_rng(option: RNG_OPTIONS | str | None, numerics: NUMERICS_OPTIONS) -> RNG_OPTIONS:
    """Raises OptionError for another value, and for "fused" together with numerics="eager"."""
    rng = RNG_OPTIONS.TORCH if option is None else _resolve(RNG_OPTIONS, option, "rng")
    if rng is RNG_OPTIONS.FUSED and numerics is NUMERICS_OPTIONS.EAGER:
        raise OptionError(
            "rng='fused' and numerics='eager': numbers that a fusion executor draws are not eager's: leave one of "
            "the two out"
        )
    return rng


def resolve_tiers(tiers: Any) -> int | str | None:
    """Raises OptionError for anything but a number of calls, None, "one" and "automatic", which stands for what
    THUNDER_TIERS says."""
    name = "tiers"
    if tiers == AUTOMATIC and (said := TIERS.value) != AUTOMATIC:
        name, tiers = TIERS.name, int(said) if said.isdecimal() else None if said == "none" else said
    if tiers is None or tiers in (AUTOMATIC, ONE) or type(tiers) is int and tiers >= 0:
        return tiers
    raise OptionError(
        f"{name}={tiers!r} is not an option; valid: {AUTOMATIC!r}, {ONE!r}, None, or the number of the call that has "
        "compiled kernels: 5; 0: the first one waits for them"
    )


def resolve_graphs(graphs: Any) -> bool | None:
    """None for "auto". Raises OptionError for anything but "auto", True and False. "auto" stands for the value of
    THUNDER_GRAPHS."""
    name, known = "graphs", {"auto": None, "on": True, "off": False}
    if isinstance(graphs, bool):
        return graphs
    if graphs == "auto" and (said := GRAPHS.value) != "auto":
        name, graphs = GRAPHS.name, said
    if isinstance(graphs, str) and graphs in known and (name != "graphs" or graphs == "auto"):
        return known[graphs]
    valid = "'auto', True, False" if name == "graphs" else "'auto', 'on', 'off'"
    raise OptionError(f"{name}={graphs!r} is not an option; valid: {valid}")


_INTERPRETATIONS = ("python interpreter", "translate functions", "translate python")


def check_interpretation(interpretation: Any) -> None:
    """The 2024 option `interpretation`: its values are accepted, and all mean the one way of capturing a program there
    is."""
    value = getattr(interpretation, "value", interpretation)
    if value is not None and value not in _INTERPRETATIONS:
        raise OptionError(
            f"interpretation={interpretation!r} is not an option; valid: {', '.join(map(repr, _INTERPRETATIONS))}"
        )


def check_langctx(langctx: Any) -> None:
    """The option `langctx`: PyTorch's is the one language of programs. Raises OptionError for anything else."""
    value = getattr(langctx, "name", langctx)
    if value is not None and str(value).lower() not in ("torch", "languages.torch"):
        raise OptionError(f"langctx={langctx!r} is not an option; valid: None, 'torch'")


class DebugOptions:
    """Options for debugging the compiler. Unknown names, and values of a wrong type, raise TypeError.

    `register_option` adds an option.

    Args:
        check_traces: Checks every trace after each pass, and the result of every operation when it runs. A positive
            number, which selected a level in Lightning Thunder, means True.
        record_interpreter_history: Keeps the full log of interpreted instructions.
        show_interpreter_progress: Reports on stderr when interpretation begins and ends.
    """

    _registered: dict[str, tuple[type, Any, str]] = {
        "check_traces": (int, False, "check each trace after its pass, and each result when the program runs"),
        "record_interpreter_history": (bool, False, "keep the full log of interpreted instructions"),
        "show_interpreter_progress": (bool, False, "say on stderr when interpretation begins and ends"),
    }

    def __init__(self, **options: Any):
        for name, value in options.items():
            if name not in self._registered:
                raise TypeError(f"unknown debug option {name!r}; known: {', '.join(self._registered)}")
            kind = self._registered[name][0]
            if not isinstance(value, kind):
                raise TypeError(f"debug option {name} must be {kind.__name__}, not {type(value).__name__}")
        self._values = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._registered:
            raise AttributeError(f"no debug option {name!r}")
        return self._values.get(name, self._registered[name][1])

    def __repr__(self) -> str:
        changed = {k: v for k, v in self._values.items() if v != self._registered[k][1]}
        return f"DebugOptions({', '.join(f'{k}={v!r}' for k, v in changed.items())})"

    @classmethod
    def register_option(cls, name: str, typ: type, default: Any, doc: str = "") -> None:
        cls._registered[name] = (typ, default, doc)
        cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n        {name}: {doc}\n    "

    @classmethod
    def list_options(cls, docstr: bool = False) -> None:
        """Prints the options, with their descriptions if `docstr` is True."""
        for name, (kind, default, doc) in cls._registered.items():
            print(f"{name}: {kind.__name__} = {default!r}" + (f"  {doc}" if docstr else ""))


@dataclass
class JitOptions:
    """Everything `thunder.jit` was told, resolved.

    compile_options: those of the declared options that were given; `get` reads them.

    passes: the list of passes, a `PassList`.
    dynamic: whether sizes of arguments stay symbolic: from the first call, never, or (None) from the second value on.
    numbers_may_change: a number that had another value before stays symbolic the second time (a position in a
    cache). So it is where `cache` was not said. default_executors: whether no executors were named. device: where
    programs see the tensors of a call and of modules, of a program that is looked at and never run; None: where they
    are. graphs: whether programs are recorded as CUDA graphs; None where measurements say it. autotune: whether kernels
    are measured at the second call.
    """

    executors: tuple = ()
    cache: CACHE_OPTIONS = CACHE_OPTIONS.CONSTANT_VALUES
    numbers_may_change: bool = False
    dynamic: bool | None = None
    sharp_edges: SHARP_EDGES_OPTIONS = SHARP_EDGES_OPTIONS.WARN
    fallback: FALLBACK_OPTIONS = FALLBACK_OPTIONS.EAGER
    disable_torch_autograd: bool = False
    transforms: Sequence = ()
    rules: Sequence = ()
    passes: Any = ()
    numerics: NUMERICS_OPTIONS = NUMERICS_OPTIONS.CLOSE
    rng: RNG_OPTIONS = RNG_OPTIONS.TORCH
    tiers: int | str | None = AUTOMATIC
    graphs: bool | None = None
    autotune: bool = False
    debug: DebugOptions = field(default_factory=DebugOptions)
    default_executors: bool = True
    device: Any = None
    compile_options: dict[str, Any] = field(default_factory=dict)
    used_compile_options: dict[str, str] = field(default_factory=dict)

    def get(self, option: CompileOption) -> Any:
        """The value of a compile option; `thunder.last_compile_options` prints it as used."""
        self.used_compile_options[option.name] = option.description
        return self.compile_options.get(option.name, option.default)

    @property
    def replacements(self) -> dict:
        """Functions of the user's that executors divert to their own operations; the first executor decides."""
        merged: dict = {}
        for executor in reversed(self.executors):
            merged.update(executor.replacements)
        return merged
