"""The policy: one table says how a program calls a function that it meets.

    policy(math.sqrt)              # Fold(): runs while the program is captured, once for all calls
    policy(time.time)              # Host(effect="random"): runs at its place in each call
    policy(torch.softmax)          # Record(): is an operation
    policy(copy.deepcopy)          # Interpret(): its bytecode is read
    policy(queue.get, queue)       # Host(effect="outside"): the state of a queue from outside is not watched

A row gives the answer for a module, for a name in it, for one object, for the class of a callable, or for the class of
an object whose methods are called. The most particular row decides. Without a row, Python code is interpreted and
native code runs on the host: nobody knows what it looks at. `python -m thunder policy math.sqrt` prints the row.
"""

from __future__ import annotations

import array
import bisect
import collections
import contextlib
import contextvars
import decimal
import enum
import fnmatch
import functools
import gc
import heapq
import io
import itertools
import math
import operator
import pkgutil
import random
import re
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

from thunder.capture.native import IMMUTABLE, MUTABLE, PRIMITIVE, TYPE_PARAMETERS, is_iterator
from thunder.compat.names import FUNCTORCH, READ_MODULES
from thunder.interpreter import NULL
from thunder.interpreter.attributes import BUILTINS, NATIVE_METHODS, plain_attribute, type_attribute
from thunder.ops import inplace_of, lookup


@dataclass(frozen=True)
class Record:
    """The call is an operation of the program."""


@dataclass(frozen=True)
class Interpret:
    """The bytecode is read. by: a definition of thunder's, `by(capture, function, args, kwargs)`, that stands for the
    function."""

    by: Callable | None = None


@dataclass(frozen=True)
class Fold:
    """The call runs while the program is captured, once for all calls: its result depends on its arguments alone. The
    arguments are constants, or objects that the prologue compares. Python code is interpreted where it is given others.

    looks: whether native code looks inside its arguments. steps: how many of the first arguments it iterates over.
    calls: the special methods of its arguments that it may call, without their underscores; None for any.
    """

    looks: bool = True
    steps: int = 0
    calls: str | None = None

    @property
    def methods(self) -> tuple[str, ...] | None:
        """The names of these methods."""
        return None if self.calls is None else tuple(f"__{name}__" for name in self.calls.split())


@dataclass(frozen=True)
class Ask:
    """The call runs while the program is captured, and the prologue runs it again and compares the answers, where it is
    given constants alone. With other arguments it is folded."""


@dataclass(frozen=True)
class Host:
    """The call runs at its place in each call of the program, with real values.

    effect: "outside" where it may do something that cannot be undone; "random" where another call gives another value,
    and does nothing else than to draw from a generator. gives: the type of all results, where there is one: the
    function is not called while the program is captured, unless its value decides something. names_caller: whether it
    writes down the file, line and function that call it.
    """

    effect: str = "outside"
    gives: type | None = None
    names_caller: bool = False


@dataclass(frozen=True)
class Eager:
    """The call is a part of an eager call, as lines are that cannot be captured: of the smallest Python function around
    it that can be called as it is."""


Answer = Record | Interpret | Fold | Ask | Host | Eager


@dataclass(frozen=True)
class Row:
    """module: of the code, with the modules in it. name: in the module: a qualified name, the class of a method, the
    last part of a name, or a pattern; "" for all. of: in the place of both, an object or a class. python: the answer
    for Python code, where it is another one. library: whether the module's globals and classes are taken to stay as
    they are: programs do not ask for them."""

    answer: Answer
    why: str
    module: str = ""
    name: str = ""
    of: Any = None
    python: Answer | None = None
    library: bool = False

    @property
    def key(self) -> str:
        """What the row is about, in words."""
        if self.of is None:
            return f"{self.module or 'any module'}.{self.name or '*'}"
        return f"{self.of.__module__}.{plain_attribute(self.of, '__qualname__', type(self.of).__qualname__)}"


def _modules(answer: Answer, why: str, modules: str, **more: Any) -> list[Row]:
    return [Row(answer, why, module, **more) for module in modules.split()]


def _names(answer: Answer, why: str, module: str, names: str) -> list[Row]:
    return [Row(answer, why, module, name) for name in names.split()]


def _objects(answer: Answer, why: str, *objects: Any) -> list[Row]:
    return [Row(answer, why, of=x) for x in objects]


_PURE = "depends on its arguments alone"
_CHANGES = "gives another value at each call"
_DRAWS = "draws from a generator of random numbers"
_SYSTEM = "works with the operating system"
_SETTING = "looks at a setting"
_CONTEXT = "computes and prints as a context of this thread says"
_READ = "Python code that is read like the user's"
_LIBRARY: dict[str, Any] = {"python": Fold(), "library": True}

_FRAMES = "watches how Python runs the program"
_MEMORY = "measures memory that Python code takes, which a program takes once"
_ELSEWHERE = "runs Python code that the program does not call"
CODE: list[Row] = [
    # ---------------------------------------------------------------- what capture cannot follow
    *_names(Eager(), "runs code that is not there before", "builtins", "exec eval __build_class__"),
    *_names(Eager(), "looks at all attributes of an object and of its classes", "builtins", "dir"),
    *_names(Eager(), _ELSEWHERE, "threading", "Thread.__init__ Thread.start"),
    *_names(Eager(), _ELSEWHERE, "concurrent.futures", "ThreadPoolExecutor.submit"),
    *_names(Eager(), _ELSEWHERE, "asyncio", "run Runner.run run_until_complete run_forever new_event_loop"),
    *_names(Eager(), _ELSEWHERE, "multiprocessing", "BaseProcess.start"),
    *_names(Eager(), _ELSEWHERE, "weakref", "finalize.__init__"),
    *_names(Eager(), "copies thunder's own context variables, too", "_contextvars", "copy_context"),
    *_names(Ask(), "looks at classes that others make", "builtins", "type.__subclasses__"),
    *_names(Eager(), _FRAMES, "sys", "settrace setprofile"),
    *_names(Eager(), _FRAMES, "threading", "settrace setprofile"),
    *_modules(Eager(), _FRAMES, "_lsprof cProfile profile", python=Eager()),
    *_names(Eager(), _FRAMES, "inspect", "stack trace getouterframes"),
    *_names(
        Eager(), _FRAMES, "traceback",
        "print_stack extract_stack format_stack walk_stack print_exc print_exception print_tb",
    ),
    *_names(Eager(), _FRAMES, "torch.profiler", "profile.__enter__ profile.start"),
    *_names(Eager(), _FRAMES, "torch.autograd.profiler", "profile.__enter__"),
    *_modules(Eager(), _MEMORY, "_tracemalloc"),
    *_names(Eager(), _MEMORY, "tracemalloc", "take_snapshot get_object_traceback"),
    *_names(Eager(), _MEMORY, "gc", "get_count get_objects get_stats"),
    *_names(Eager(), _MEMORY, "sys", "getallocatedblocks"),
    # ---------------------------------------------------------------- Python
    *_modules(
        Fold(), _PURE,
        "builtins operator math itertools functools collections typing typing_extensions types inspect re abc enum "
        "numbers fractions string textwrap dataclasses ast tokenize json heapq bisect codecs pickle importlib "
        "packaging traceback contextvars warnings threading logging optree thunder _thread",
        **_LIBRARY,
    ),
    *_modules(
        Fold(), _PURE,
        "_operator cmath _functools _collections _typing _sre _abc _string _ast _tokenize _json _heapq "
        "_bisect _codecs _pickle _imp _contextvars _warnings _struct binascii unicodedata _datetime datetime "
        "_statistics array _weakref weakref _stat errno marshal _queue _asyncio _hashlib _md5 _sha1 _sha2 "
        "_sha256 _sha512 _sha3 _blake2 zlib zoneinfo _zoneinfo _opcode _multibytecodec _winapi atexit",
    ),
    *_names(Fold(), "asks for the module of its caller", "collections", "namedtuple"),
    *_names(Host(gives=str), _SYSTEM, "builtins", "input"),
    *_names(Host(gives=type(None)), _SYSTEM, "builtins", "print"),
    *_names(Host(), "runs at the end of the process", "atexit", "register unregister"),
    *_names(Host("random"), _CHANGES, "threading", "active_count enumerate"),
    *_names(Host(), _CHANGES, "_thread", "_count interrupt_main"),
    *_names(Host("random"), _CHANGES, "_datetime", "*.now *.today *.utcnow"),
    *_names(Host("random"), _CHANGES, "datetime", "*.now *.today *.utcnow"),
    *_modules(Host("random"), _CONTEXT, "decimal"),
    *_names(Host("random"), _SETTING, "_csv", "read* list_dialects get_dialect"),
    *_names(Host(), "shows a warning", "warnings", "warn_explicit showwarning"),
    *_names(Host(), "shows a warning", "_warnings", "warn_explicit"),
    *_names(
        Host(names_caller=True), "writes a record", "logging",
        "debug info warning warn error exception critical fatal log",
    ),
    *_modules(Host(), _SYSTEM, "linecache", python=Host(), library=True),
    *_modules(Host(), "shows progress", "tqdm", python=Host(), library=True),
    *_modules(Host("random"), _DRAWS, "random", python=Host("random"), library=True),
    *_modules(Host("random"), _DRAWS, "_random numpy.random", python=Host("random"), library=True),
    *_names(Host("random"), _DRAWS, "numpy.random", "get_state"),
    *_names(Host("random"), _DRAWS, "posix", "urandom getrandom"),
    *_modules(Host("random"), _CHANGES, "time", **_LIBRARY),
    *_modules(Host("random"), _CHANGES, "gc resource"),
    *_names(Fold(), _PURE, "time", "struct_time"),
    *_names(Host("random", type(None)), "waits", "time", "sleep"),
    *_names(Host("random", float), _CHANGES, "time", "time perf_counter monotonic"),
    *_names(Host("random", int), _CHANGES, "time", "time_ns perf_counter_ns"),
    *_names(Host("random", float), _DRAWS, "random", "Random.uniform Random.gauss"),
    *_names(Host("random", float), _DRAWS, "_random", "Random.random"),
    *_names(Host("random", int), _DRAWS, "random", "Random.randint Random.randrange"),
    # ---------------------------------------------------------------- the process and its files
    *_modules(Host(), _SYSTEM, "os io tempfile", python=Host(), library=True),
    *_modules(Host(), _SYSTEM, "sys", library=True),
    *_modules(Fold(), _PURE, "posixpath genericpath pathlib", **_LIBRARY),
    *_modules(Fold(), "the files of a package do not change", "huggingface_hub", **_LIBRARY),
    *_names(Interpret(), _READ, "os", "_Environ getenv PathLike"),
    *_names(Fold(), _PURE, "os", "fspath fsencode fsdecode _createenviron.<locals> _fscodec.<locals>"),
    *_names(Fold(), _PURE, "posix", "fspath struct_time _path_normpath _path_splitroot_ex _path_splitroot"),
    *_names(Ask(), _SETTING, "posix", "getpid getppid getuid geteuid getgid cpu_count"),
    *_names(Fold(), "an object that the program makes", "_io", "StringIO BytesIO"),
    *_names(Fold(), "an object that the program makes", "io", "StringIO BytesIO"),
    *_names(
        Fold(), _PURE, "sys",
        "intern exc_info exception getsizeof getdefaultencoding getfilesystemencoding getfilesystemencodeerrors "
        "is_finalizing audit exit _getframe _getframemodulename call_tracing gettrace getprofile",
    ),
    *_names(Ask(), _SETTING, "_signal", "getsignal"),
    *_names(Ask(), _SETTING, "sys", "getrecursionlimit getswitchinterval get_int_max_str_digits getdlopenflags"),
    *_names(
        Host(), _SYSTEM, "posixpath",
        "expanduser expandvars realpath abspath relpath lexists ismount islink _joinrealpath",
    ),
    *_names(
        Host(), _SYSTEM, "genericpath",
        "exists lexists isfile isdir islink getsize getmtime getatime getctime samefile sameopenfile isjunction",
    ),
    *_names(
        Host(), _SYSTEM, "pathlib",
        "read_text read_bytes write_text write_bytes open exists is_file is_dir stat lstat iterdir glob rglob walk "
        "mkdir unlink touch rename replace cwd home resolve absolute expanduser rmdir chmod symlink_to samefile",
    ),
    # ---------------------------------------------------------------- NumPy
    *_modules(Fold(), _PURE, "numpy", **_LIBRARY),
    *_names(Host("random", float), _DRAWS, "numpy.random", "RandomState.rand"),
    # ---------------------------------------------------------------- PyTorch
    *_modules(Fold(), "PyTorch's own, which capture follows", "torch", python=Interpret(), library=True),
    *_modules(
        Fold(), "a mode or a setting of PyTorch's, which capture follows",
        "torch.autograd torch.amp torch.cuda torch.cpu torch.xpu torch.mps torch.mtia torch.accelerator torch.backends "
        "torch.compiler torch._dynamo torch.overrides torch.__future__ torch._C torch.utils._python_dispatch "
        "torch.utils._device torch.profiler torch.jit torch.fx torch.distributed torch.multiprocessing torch.export "
        "torch._subclasses torch.library torch._library torch._ops torch._guards torch.nested torch.serialization",
        **_LIBRARY,
    ),
    *_modules(
        Fold(), _PURE,
        "torch.utils._pytree torch._refs torch._prims_common torch._meta_registrations torch._utils torch._tensor "
        "torch._tensor_str torch.types torch.storage torch.utils.hooks torch._classes torch._sources "
        "torch._namedtensor torch._weights_only_unpickler torch._vendor torch.package torch._inductor "
        "torch.utils._sympy torch.fx.experimental torch._higher_order_ops torch._prims torch._decomp torch._export "
        "torch._functorch.config",
        **_LIBRARY,
    ),
    *_names(
        Fold(), "a setting of PyTorch's, which capture follows", "torch",
        "set_default_device set_default_dtype set_default_tensor_type use_deterministic_algorithms get_default_device "
        "set_deterministic_debug_mode set_float32_matmul_precision set_warn_always",
    ),
    *_names(Fold(), "a mode, which capture follows", "torch", "is_grad_enabled is_inference_mode_enabled"),
    *_names(Fold(), "a mode, which capture follows", "torch", "is_autocast_enabled"),
    *_names(Fold(), "true while no program runs", "torch.cuda", "is_current_stream_capturing"),
    *_names(Host(gives=type(None)), _SYSTEM, "torch.serialization", "save"),
    *_names(Host(), _SYSTEM, "torch.serialization", "load"),
    *_names(
        Host(), "works with a device", "torch.cuda",
        "synchronize empty_cache mem_get_info memory_* max_memory_* reset_* utilization temperature power_draw",
    ),
    *(
        row
        for module in (
            "torch numpy threading _thread warnings _asyncio functools optree importlib logging huggingface_hub"
        ).split()
        for row in _names(Ask(), _SETTING, module, "get* is_* are_* has_* current_* active_* *enabled")
    ),
    # ---------------------------------------------------------------- Python code of libraries that is read
    *_modules(
        Fold(), _READ,
        "torch.nn.modules torch.nn.functional torch.functional torch.utils.checkpoint torch.nn.utils.parametrize "
        "contextlib thunder.tests torch.nn.utils.rnn torch.nn.init torch.nn.attention torch.distributions torch.random "
        "torch.signal torch.optim torch.nn.utils.clip_grad torch.amp.grad_scaler torch.cuda.amp.grad_scaler "
        "thunder.distributed.accumulation "
        + " ".join(READ_MODULES),
        python=Interpret(),
    ),
    *_modules(Fold(), _READ, FUNCTORCH, python=Interpret(), library=True),
]  # fmt: skip

_KEEPS = "keeps or compares its arguments, and does not look inside of them"
_STEPS = "iterates over its arguments"
_ALL = 1 << 10  # arguments
_NUMBERS = "float index int complex"
OBJECTS: list[Row] = [
    *_objects(
        Fold(looks=False), _KEEPS,
        isinstance, issubclass, id, callable, next, dict, collections.OrderedDict, types.MethodType, functools.partial,
        object.__new__, __import__, torch.nn.Module.__init__, weakref.ref, type,
        contextlib.nullcontext, itertools.chain, itertools.accumulate, itertools.compress,
    ),
    *_objects(
        Fold(looks=False, steps=_ALL), _KEEPS,
        list, tuple, set, frozenset, zip, enumerate, map, filter, iter, reversed, collections.deque, itertools.cycle,
        itertools.islice, itertools.pairwise, itertools.product, itertools.permutations, itertools.combinations,
        itertools.combinations_with_replacement, itertools.zip_longest, itertools.starmap, itertools.takewhile,
        itertools.dropwhile, itertools.filterfalse,
    ),
    *_objects(Fold(looks=False, steps=2), _KEEPS, functools.reduce),
    *_objects(Fold(looks=False, calls="hash"), _KEEPS, hash),
    *_objects(Fold(looks=False, calls="repr"), _KEEPS, repr),
    # ---------------------------------------------------------------- what native code calls of its arguments
    *_objects(Fold(calls="repr"), _PURE, ascii),
    *_objects(Fold(calls="str repr bytes"), _PURE, str),
    *_objects(Fold(calls="format str repr"), _PURE, format),
    *_objects(Fold(calls="bytes index iter len getitem next"), _PURE, bytes),
    *_objects(Fold(calls="index"), _PURE, range, bin, hex, oct, chr, operator.index),
    *_objects(Fold(calls=f"{_NUMBERS} trunc"), _PURE, int, float, complex),
    *_objects(Fold(calls=f"{_NUMBERS} round"), _PURE, round),
    *(
        row
        for f in vars(math).values() if callable(f)
        for row in _objects(Fold(calls=f"{_NUMBERS} {f.__name__}"), _PURE, f)
    ),
    *_objects(
        Fold(calls="lt"), _PURE,
        *{f for module in (bisect, heapq) for f in vars(module).values() if type(f) is types.BuiltinFunctionType},
    ),
    *_objects(Fold(calls="abs"), _PURE, abs),
    *_objects(Fold(calls="len"), _PURE, len),
    *_objects(Fold(calls=""), _PURE, type.__new__, ord, slice, types.MappingProxyType),
    *_objects(Fold(steps=1), _STEPS, sorted, sum, min, max),
    *_objects(Fold(steps=_ALL), _STEPS, any, all, dict.fromkeys, str.join, "".join),
]  # fmt: skip

_EXPOSED = "the prologue compares its state, or nobody can change it"
RECEIVERS: list[Row] = _objects(
    Fold(), _EXPOSED,
    *MUTABLE, *(kind for kind in IMMUTABLE if kind is not decimal.Decimal), *TYPE_PARAMETERS,
    tuple, frozenset, slice, type, int, float, complex, str, bytes,
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MappingProxyType, types.GenericAlias,
    types.UnionType, types.SimpleNamespace, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType, contextvars.ContextVar,
    weakref.ref, re.Match,
    struct.Struct, operator.itemgetter, operator.attrgetter, operator.methodcaller, functools.partial, torch.nn.Module,
    property, staticmethod, classmethod, numpy.ndarray, numpy.dtype, enum.Enum, random.Random, BaseException,
    type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
RECEIVERS += _objects(Host(), _CONTEXT, decimal.Decimal)
RECEIVERS += _objects(
    Host(), "others write to the memory",
    bytearray, array.array, memoryview, torch.UntypedStorage, torch.TypedStorage,
)  # fmt: skip

# thunder's definitions: by the id of a function, by the class of a callable, and by module and name, where few programs
# import the module. `handlers`, `calls` and `library` fill them
DEFINED: dict[int, Callable] = {}
DEFINED_BY_KIND: dict[type, Callable] = {}
DEFINED_BY_NAME: dict[tuple, Callable] = {}

_PYTHON = Row(Interpret(), "Python code without another row")
_NATIVE = Row(Host(), "native code that no row knows")
_OPERATION = Row(Record(), "an operation of PyTorch's")
_STATELESS = Row(Fold(), "an object without a state in C")
_UNWATCHED = Row(Host(), "an object whose state in C is not watched")


def policy(function: Any, receiver: Any = None) -> Answer:
    """How a program calls a function, or a method of an object from outside.

    receiver: the object, where it is from outside. What an object is that the program made says the function.
    """
    return row_of(function, receiver).answer


def row_of(function: Any, receiver: Any = None) -> Row:
    """The row that decides about a call. Its answer is that for the code of the function: Python's or native."""
    if receiver is not None and not is_watched(receiver):
        return _of_receiver(receiver)
    row = native_row(function)
    if type(row.answer) is Eager:
        return row
    by = DEFINED.get(id(function)) or DEFINED_BY_KIND.get(type(function))
    if by is not None:
        return Row(Interpret(by), "thunder defines it", of=function)
    if type(function) in _FUNCTIONS and (lookup(function) is not None or inplace_of(function) is not None):
        return _OPERATION
    return row


def native_row(function: Any) -> Row:
    """As `row_of`, of a function that thunder calls as it is: the definitions, which may do so, are left out."""
    row = _OF_OBJECTS.get(id(function))
    if row is None:
        module, name = code_of(function)
        row = _by_name(module, name, type(function) is types.FunctionType)
    return row


_FUNCTIONS = {types.FunctionType, *BUILTINS, *NATIVE_METHODS}


def folded(function: Any) -> Fold:
    """How native code that is folded treats its arguments."""
    answer = native_row(function).answer
    return answer if type(answer) is Fold else _LOOKS


_LOOKS = Fold()


def code_of(function: Any) -> tuple[str, str]:
    """The module that the code of a callable belongs to, and its qualified name there. A method is one of the class
    that has it, a class whatever makes its objects."""
    kind = type(function)
    if kind is types.MethodType:
        return code_of(function.__func__)
    if kind is types.FunctionType:
        return function.__globals__.get("__name__") or "", function.__qualname__
    if issubclass(kind, type):
        return _of_constructor(function)
    if kind in NATIVE_METHODS or kind in (types.MethodWrapperType, types.ClassMethodDescriptorType):
        return _of_class(function.__objclass__, function.__name__)
    if kind in BUILTINS and function.__module__ is None:
        receiver, name = function.__self__, function.__name__
        of_class = isinstance(receiver, type) and type_attribute(receiver, name) is not NULL
        return _of_class(receiver if of_class else type(receiver), name, native=True)
    module = plain_attribute(function, "__module__")
    name = plain_attribute(function, "__qualname__") or plain_attribute(function, "__name__")
    has_own_name = isinstance(module, str) and isinstance(name, str) and "__name__" in dir(kind)
    return (module, name) if has_own_name else _of_class(kind, "__call__")


def bound_method(value: Any) -> Any:
    """The descriptor of a method in C that is bound to an object; None for other values, such as functions of modules
    and methods of classes."""
    if type(value) not in _BOUND:
        return None
    methods = (vars(base).get(value.__name__) for base in type(value.__self__).__mro__)
    return next((method for method in methods if type(method) in NATIVE_METHODS), None)


_BOUND = {types.MethodWrapperType, *BUILTINS}


def _of_class(kind: type, name: str, native: bool = False) -> tuple[str, str]:
    """native: `super()` may have passed over methods of the same name in Python."""
    owner = kind
    for base in kind.__mro__:
        method = base.__dict__.get(name, NULL)
        if method is not NULL and not (native and type(method) is types.FunctionType):
            if type(method) is types.FunctionType:
                return code_of(method)
            owner = base
            break
    module = owner.__module__
    return module if isinstance(module, str) else "", f"{owner.__qualname__}.{name}"


def _of_constructor(kind: type) -> tuple[str, str]:
    """`__new__` of a class, or `__init__` where a common base makes its objects."""
    module, name = _of_class(kind, "__new__")
    return _of_class(kind, "__init__") if name.startswith(_COMMON) else (module, name)


_COMMON = ("object.", "pybind11_object.", "Generic.", "Protocol.")


@functools.lru_cache(maxsize=10_000)
def _by_name(module: str, name: str, python: bool) -> Row:
    """The row of a function by the names of its module, class and itself, the most special one."""
    prefixes = list(_prefixes(module))
    last, owner = name.rpartition(".")[2], name.rpartition(".")[0]
    keys = ((prefix, n) for prefix in prefixes for n in (name, owner, last) if n)
    named = next((_OF_NAMES[key] for key in keys if key in _OF_NAMES), None)
    if named is not None:
        return named
    whole = next((_OF_MODULES[prefix] for prefix in prefixes if prefix in _OF_MODULES), None)
    row = _NATIVE if whole is None else whole
    if python:
        row = _PYTHON if whole is None or whole.python is None else replace(whole, answer=whole.python)
    for pattern in (p for prefix in prefixes for p in _OF_PATTERNS.get(prefix, ())):
        refines = type(pattern.answer) is not Ask or type(row.answer) is Fold
        if refines and any(fnmatch.fnmatchcase(n, pattern.name) for n in (name, last.lstrip("_"))):
            return pattern
    return row


def _prefixes(module: str) -> Iterator[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether the globals and classes of a module are taken to stay as they are."""
    rows = (_OF_MODULES[prefix] for prefix in _prefixes(module or "") if prefix in _OF_MODULES)
    row = next(rows, None)
    return row is not None and row.library


def class_of_library(kind: type) -> bool:
    """Whether a class is one of a library whose classes stay as they are. A class that Python's own code has made of a
    user's says that it stands there."""
    module = kind.__module__
    if module in ("abc", "types"):
        return vars(sys.modules[module]).get(kind.__qualname__) is kind
    return is_library(module)


@functools.cache
def read_of_library(module: str | None) -> bool:
    """Whether functions of a module are the standard library's, and are read as the user's are, but for those that may
    wait for what the program does later."""
    top = (module or "").split(".")[0]
    return top in sys.stdlib_module_names and top not in _WAITING and not is_library(module)


def is_of_library(f: Any) -> bool:
    """Whether a function is one of these, or a class."""
    return isinstance(f, type) or read_of_library(f.__globals__.get("__name__"))


_WAITING = {"queue", "concurrent", "asyncio", "sched"}


def is_watched(receiver: Any) -> bool:
    """Whether the prologue compares the state of an object from outside, or nobody can change it."""
    return type(_of_receiver(receiver).answer) is not Host


def _of_receiver(receiver: Any) -> Row:
    kind = type(receiver)
    if kind in PRIMITIVE:
        return _STATELESS
    row = next((_OF_RECEIVERS[base] for base in kind.__mro__ if base in _OF_RECEIVERS), None)
    if row is not None:
        return row
    if is_constant(receiver) or is_iterator(receiver) and not isinstance(receiver, io.IOBase):
        return _STATELESS
    return _of_class_in_c(kind)


def is_constant(value: Any) -> bool:
    """Whether an object of native code cannot change: its class, in C, hashes and compares by value and sets nothing,
    and what the object holds cannot change either. A container that only native code can reach is no reason against."""
    pending, seen = [value], set[int]()
    while pending:
        inside = pending.pop()
        if id(inside) in seen or type(inside) in PRIMITIVE or isinstance(inside, _STAYING):
            continue
        seen.add(id(inside))
        if isinstance(inside, weakref.ref):  # whose object is none of its referents
            return False
        if len(seen) > _MOST or not (type(inside) in _INSIDE and inside is not value or _is_value_in_c(type(inside))):
            return False
        pending += gc.get_referents(inside)
    return True


_MOST = 1000  # objects: a larger one is taken to change
_STAYING = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, *IMMUTABLE)
_INSIDE = (list, dict, tuple)


@functools.cache
def _is_value_in_c(kind: type) -> bool:
    """Whether a class in C hashes and compares its objects by value, and has no way to set anything."""
    if kind.__dictoffset__:
        return False
    for name in ("__hash__", "__eq__"):
        method = type_attribute(kind, name)
        if method is NULL or method is vars(object)[name] or isinstance(method, types.FunctionType):
            return False
    spaces = [vars(base) for base in kind.__mro__ if base is not object]
    if any(name in space for space in spaces for name in _CHANGING):
        return False
    return not any(type(x) is property and x.fset is not None for space in spaces for x in space.values())


_CHANGING = ("__setitem__", "__delitem__", "__setattr__", "__next__", "__iadd__", "__ior__", "__slots__")


def is_of_constant(function: Any, args: list) -> bool:
    """Whether native code is a property or a method of a constant, its first argument, and is given nothing else but
    numbers and text. Members that pybind11 makes do not know their class."""
    if not args or {*map(type, args[1:])} - PRIMITIVE or not is_constant(args[0]):
        return False
    members = (member for base in type(args[0]).__mro__ if base is not object for member in vars(base).values())
    return any(function in (plain_attribute(m, "fget"), plain_attribute(m, "__func__")) for m in members)


@functools.cache
def _of_class_in_c(kind: type) -> Row:
    bases = (base for base in kind.__mro__ if base is not object and base.__module__ != "pybind11_builtins")
    owners = [base for base in bases if _has_state(base)]
    return _STATELESS if all(_is_followed(base.__module__) for base in owners) else _UNWATCHED


def is_of_host(receiver: Any) -> bool:
    """Whether an object from outside is a value of the host wherever the program uses it: it has methods in C alone,
    and its state is not watched."""
    return not is_watched(receiver) and _is_in_c(type(receiver))


@functools.cache
def _is_in_c(kind: type) -> bool:
    members = (value for base in kind.__mro__ for value in vars(base).values())
    in_c = not any(type(value) in (types.FunctionType, property) for value in members)
    return in_c and (kind in _OF_RECEIVERS or not is_library(kind.__module__))


def _is_followed(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] in _FOLLOWED


_FOLLOWED = ("torch", "numpy", "optree", "thunder")  # whose objects capture knows, or nobody changes


def _has_state(base: type) -> bool:
    """Whether a class keeps, in C, what only its methods show. Slots and attributes are asked."""
    return any(type(m) in _OF_C and n not in ("__dict__", "__weakref__") for n, m in vars(base).items())


_OF_C = (*NATIVE_METHODS, types.GetSetDescriptorType)


# ---------------------------------------------------------------- the table, by its keys

_OF_MODULES = {row.module: row for row in CODE if not row.name}
_OF_NAMES = {(row.module, row.name): row for row in CODE if row.name and "*" not in row.name}
_OF_PATTERNS: dict[str, list[Row]] = {}
for _row in CODE:
    if "*" in _row.name:
        _OF_PATTERNS.setdefault(_row.module, []).append(_row)
_OF_OBJECTS = {id(row.of): row for row in OBJECTS}
_OF_RECEIVERS = {row.of: row for row in RECEIVERS}


def describe(name: str) -> str:
    """The row that decides about a callable of this name, in words. Raises ImportError or AttributeError."""
    function = pkgutil.resolve_name(name)
    row = row_of(function, None if bound_method(function) is None else function.__self__)
    answer, more = row.answer, ""
    if type(answer) is Interpret and answer.by is not None:
        more = f", by thunder's definition in {answer.by.__module__}"
    elif type(answer) is Host:
        more = f", {_EFFECTS[answer.effect]}"
    module, qualified = code_of(function)
    return f"{name} ({module}.{qualified}): {type(answer).__name__}{more}\n  {row.why} (row {row.key})"


_EFFECTS = {"outside": "with an effect that is not undone", "random": "without an effect but on its generator"}
