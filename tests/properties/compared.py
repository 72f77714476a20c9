"""Run a generated program under CPython and compiled, call by call, and compare everything that can be seen.

A program is the text of a module that defines `f`, `ARGS` and `KWARGS`, and the statements (`steps`) that run between
two calls of `f`. `run` gives a verdict for each call; `shrink` drops parts of a program that is wrong until every part
is needed; `script` prints it as a file that runs by itself.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copyreg
import dataclasses
import enum
import functools
import gc
import io
import itertools
import linecache
import operator
import random
import re
import signal
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import thunder
from tests.properties import surroundings
from thunder.errors import FallbackWarning, SharpEdgeWarning, ThunderError

MODULE = "generated_program"
_ids = itertools.count()


@dataclasses.dataclass(frozen=True)
class Program:
    """source: the module's text. steps: a mutation before each further call. neutral: indices of steps that change
    nothing that the program reads."""

    source: str
    steps: tuple[str, ...] = ()
    neutral: frozenset[int] = frozenset()


@dataclasses.dataclass
class Verdict:
    """What a call gave.

    kind: "same", "wrong", "refused" (an error in words), "failed" (thunder's own mistake in words), "unstable" (CPython
    differs from itself), "warned" (another result, and a warning that says so). needless: it recompiled though nothing
    that it reads had changed. checked: it could have, needlessly.
    """

    kind: str
    words: str = ""
    needless: bool = False
    checked: bool = False


class Hang(BaseException):
    """A call took longer than any generated program does."""


# ------------------------------------------------------------------------------------------------ describing values

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_ATOMS = (int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, slice)
_HIDDEN = {
    "__slotnames__", "__doc__", "__module__", "__dict__", "__weakref__", "__builtins__", "__qualname__",
    "__firstlineno__",
}  # fmt: skip
_ITERATORS = (types.GeneratorType, types.CoroutineType, type(iter([])), type(iter(())), type(iter({})))


def _made_by_cpython(name: str, value: Any) -> bool:
    """Whether CPython puts this into a class by itself: caches of abc, and, before Python 3.14, empty annotations when
    they are asked for, as isinstance does for a runtime-checkable protocol."""
    return name.startswith("_abc") or name == "__annotations__" and not value


class Description:
    """Lines `path: text` that are the same for two values where no program can tell one from the other."""

    def __init__(self, identities: bool = False):
        self.lines: list[str] = []
        self.seen: dict[int, tuple[str, Any]] = {}
        self.memory: dict[int, str] = {}
        self.identities = identities
        self.opaque = False  # something is in it that cannot be looked at without changing it

    def add(self, path: str, value: Any) -> None:
        kind = type(value)
        if isinstance(value, _ATOMS) and kind.__module__ == "builtins" or isinstance(value, np.generic | enum.Enum):
            self.lines.append(f"{path}: {kind.__qualname__} {value!r}")
            return
        if isinstance(value, torch.dtype | torch.device | torch.layout) or kind is torch.Size:
            self.lines.append(f"{path}: {value}")
            return
        if id(value) in self.seen:
            self.lines.append(f"{path}: same as {self.seen[id(value)][0]}")
            return
        if kind is not tuple and kind is not frozenset and kind is not types.MethodType:
            self.seen[id(value)] = path, value
        number = f" {id(value)}" if self.identities and kind not in (types.MethodType, tuple, frozenset) else ""
        if isinstance(value, type):
            self.lines.append(f"{path}: class {value.__qualname__}{number}")
            if value.__module__ == MODULE:
                self.add(f"{path}.__bases__", value.__bases__)
                self._named(path, {k: v for k, v in vars(value).items() if not _made_by_cpython(k, v)}, "vars")
            return
        self.lines.append(f"{path}: {kind.__qualname__}{number}")
        self._content(path, value, kind)
        self._attributes(path, value, kind)

    def _named(self, path: str, table: Any, what: str) -> None:
        self.lines.append(f"{path}: {what} {[k for k in table if k not in _HIDDEN]}")
        for k, v in table.items():
            if k not in _HIDDEN:
                self.add(f"{path}.{k}", v)

    def _items(self, path: str, items: Iterator) -> None:
        n = 0
        for n, v in enumerate(items, 1):
            self.add(f"{path}[{n - 1}]", v)
        self.lines.append(f"{path}: {n} items")

    def _content(self, path: str, value: Any, kind: type) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif isinstance(value, np.ndarray):
            self.lines.append(f"{path}: {value.dtype} {value.shape} {value.tolist()!r}")
        elif isinstance(value, dict) and path.endswith("_hooks"):  # by numbers that PyTorch counts up for all modules
            self._items(path, iter(dict.values(value)))
        elif isinstance(value, dict):
            ordered = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
            for i, k in enumerate(ordered.keys(value)):
                self.add(f"{path}.key{i}", k)
                name = repr(k) if type(k) in (int, str, bool, float, type(None)) else i
                self.add(f"{path}[{name}]", dict.__getitem__(value, k))
            self.add(f"{path}.default_factory", getattr(value, "default_factory", None))
        elif isinstance(value, types.MappingProxyType):
            with contextlib.suppress(Exception):  # a proxy of something that is no mapping
                self.add(f"{path}.items()", tuple(dict(value).items()))
        elif isinstance(value, list | tuple | collections.deque):
            base = next(b for b in (list, tuple, collections.deque) if isinstance(value, b))
            self._items(path, base.__iter__(value))
        elif isinstance(value, set | frozenset):
            base = set if isinstance(value, set) else frozenset
            self.lines.append(f"{path}: {sorted(_ADDRESS.sub('', repr(v)) for v in base.__iter__(value))}")
        elif isinstance(value, collections.abc.KeysView | collections.abc.ValuesView | collections.abc.ItemsView):
            with contextlib.suppress(Exception):  # a view of something that is no mapping
                self._items(path, iter(list(value)))
        elif isinstance(value, types.FunctionType):
            self.lines.append(f"{path}: {value.__name__} {value.__qualname__}")
            self.add(f"{path}.__code__.co_code", value.__code__.co_code)
            self.add(f"{path}.__defaults__", value.__defaults__)
            self.add(f"{path}.__kwdefaults__", value.__kwdefaults__)
            for i, cell in enumerate(value.__closure__ or ()):
                with contextlib.suppress(ValueError):
                    self.add(f"{path}.__closure__[{i}]", cell.cell_contents)
        elif isinstance(value, types.MethodType):
            self.add(f"{path}.__func__", value.__func__)
            self.add(f"{path}.__self__", value.__self__)
        elif isinstance(value, functools.partial):
            self.add(f"{path}.func", value.func)
            self.add(f"{path}.args", value.args)
            self.add(f"{path}.keywords", value.keywords)
        elif isinstance(value, weakref.ref):
            self.add(f"{path}()", value())
        elif isinstance(value, random.Random):
            self.lines.append(f"{path}: {hash(value.getstate())}")
        elif isinstance(value, property):
            self.add(f"{path}.fget", value.fget)
        elif isinstance(value, staticmethod | classmethod):
            self.add(f"{path}.__func__", value.__func__)
        elif isinstance(value, BaseException):
            self.add(f"{path}.args", value.args)
            self.add(f"{path}.__cause__", value.__cause__)
        elif isinstance(value, types.ModuleType):
            if not _is_imported(value):
                self._named(path, vars(value), "vars")
        elif isinstance(value, types.CellType):
            with contextlib.suppress(ValueError):
                self.add(f"{path}.cell_contents", value.cell_contents)
        elif isinstance(value, collections.abc.Iterator):
            self.opaque = True
            hint = operator.length_hint(value, -1) if kind.__module__ == "builtins" else -1
            self.lines.append(f"{path}: {hint} left")
        elif kind.__module__ != MODULE and not hasattr(value, "__dict__"):
            self.lines.append(f"{path}: {_ADDRESS.sub('', repr(value))}")

    def _attributes(self, path: str, value: Any, kind: type) -> None:
        if isinstance(value, type | types.ModuleType | torch.Tensor | functools.cached_property):
            return
        with contextlib.suppress(AttributeError, TypeError):
            own = object.__getattribute__(value, "__dict__")
            if own and type(own) is dict and (kind.__module__ != "logging"):
                self._named(path, own, "attributes")
        for base in kind.__mro__:
            names = vars(base).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if base.__module__ == MODULE and name not in ("__dict__", "__weakref__"):
                    with contextlib.suppress(AttributeError):
                        self.add(f"{path}.{name}", object.__getattribute__(value, name))

    def _tensor(self, path: str, t: torch.Tensor) -> None:
        if isinstance(t, torch.nn.parameter.UninitializedTensorMixin):
            return
        where = t.untyped_storage().data_ptr() if t.layout is torch.strided and t.numel() else 0
        shared = f", memory of {self.memory[where]}" if where and self.memory.setdefault(where, path) != path else ""
        grad = " requires grad" if t.requires_grad else ""
        self.lines.append(f"{path}: {t.dtype} {list(t.shape)}{grad} {t.detach().tolist()}{shared}")
        if t.is_leaf and t.grad is not None:
            self.add(f"{path}.grad", t.grad)


def describe(value: Any, path: str, identities: bool = False) -> Description:
    """`value` and everything reachable from it. No code of the program's runs."""
    description = Description(identities)
    description.add(path, value)
    return description


def difference(ours: list[str], theirs: list[str]) -> str:
    """The first line in which two descriptions differ, "" where they do not."""
    for a, b in itertools.zip_longest(ours, theirs, fillvalue="(nothing)"):
        a, b = _ADDRESS.sub("", a), _ADDRESS.sub("", b)
        if a != b:
            return f"{a[:300]}   IN EAGER   {b[:300]}"
    return ""


# ------------------------------------------------------------------------------------------------ running programs


def _free_frames(error: BaseException | None) -> None:
    """Let go of the frames that raised, so that their generators are closed now on both sides."""
    seen = []
    while error is not None and error not in seen:
        seen.append(error)
        error.__traceback__, error = None, error.__context__


def _is_imported(module: types.ModuleType) -> bool:
    return sys.modules.get(module.__name__) is module


def _is_own(value: Any) -> bool:
    """Whether it is no class or function of a library."""
    functions = type, types.FunctionType, types.BuiltinFunctionType
    return not isinstance(value, functions) or value.__module__ in (MODULE, None)


class Side:
    """One of the two worlds that a program runs in."""

    def __init__(self, source: str, filename: str, names: dict[str, Callable] | None = None):
        self.collects = names is _COLLECTED
        self.module = types.ModuleType(MODULE)
        sys.modules[MODULE] = self.module
        self.space = vars(self.module)
        if names:
            self.space["__builtins__"] = vars(builtins) | names
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(source, filename, "exec"), self.space)
            for kind in [v for v in self.space.values() if isinstance(v, type) and v.__module__ == MODULE]:
                copyreg._slotnames(kind)  # kept in the class by the first copy of an object, and seen by `dir`
        self.imported = {k for k, v in self.space.items() if isinstance(v, types.ModuleType) and _is_imported(v)}
        self.original = set(self.space) - self.imported
        self.names = [
            k for k, v in self.space.items() if k not in self.imported and not k.startswith("_") and _is_own(v)
        ]

    def enter(self) -> None:
        sys.modules[MODULE] = self.module

    def call(self, function: Callable) -> tuple[list[str], BaseException | None, list, Any]:
        """What one call gives, in words: result or error, state left behind, what was printed; the error; warnings."""
        self.enter()
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        printed, error, result = io.StringIO(), None, None
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            try:
                result = function(*self.space["ARGS"], **self.space.get("KWARGS", {}))
            except Exception as e:  # noqa: BLE001 - the errors of generated programs are compared
                error = e
                _free_frames(e)
            if self.collects:
                gc.collect()
        modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
        description = Description()
        if error is not None:
            first = " ".join(_ADDRESS.sub("", str(error)).split("\n")[0].split()[:6])
            description.lines.append(f"raised {type(error).__qualname__}: {first}")
        else:
            description.add("result", result)
        self.state(description)
        description.lines += [f"printed: {_ADDRESS.sub('', printed.getvalue())}", f"modes: {modes}"]
        return description.lines, error, caught, result

    def state(self, description: Description) -> Description:
        self.enter()
        for name in self.names:
            if name in self.space:
                description.add(name, self.space[name])
        new = set(self.space) - self.imported - self.original
        description.lines.append(f"names: {sorted(n for n in new if not n.startswith('_'))}")
        description.lines.append(f"surroundings: {surroundings.state()}")
        return description

    def step(self, text: str, filename: str) -> str:
        self.enter()
        torch.manual_seed(0)  # for the parameters of modules
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(compile(text, filename, "exec"), self.space)
            except Exception as e:  # noqa: BLE001 - a mutation that an object refuses
                return type(e).__name__
        return ""


_TIMERS = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}


@contextlib.contextmanager
def restored(seconds: float = 20.0):
    """Leave no mode, no module and no hang behind. When the garbage collector runs is not the program's to say.

    seconds: of the processor, which other work on the machine does not use up, or ten times as many of the clock.
    """

    def hang(*_):
        raise Hang

    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    before = [signal.signal(s, hang) for s in _TIMERS.values()]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        for (timer, number), handler in zip(_TIMERS.items(), before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        sys.modules.pop(MODULE, None)
        surroundings.restore()


def run(program: Program, jit: Callable | None = None) -> list[Verdict]:
    """A verdict for each call. A call that is refused is made by CPython instead, and the program goes on."""
    verdicts = _in_file(program, jit or functools.partial(thunder.jit, numerics="eager"))
    if verdicts[-1].kind == "wrong" and any(
        _in_file(program, lambda f: f, names)[-1].kind == "wrong" for names in ({}, _ELSEWHERE, _COLLECTED)
    ):
        verdicts[-1] = Verdict("unstable", verdicts[-1].words)  # it differs from run to run by itself
    return verdicts


_FAR = 1 << 44  # also in float32


def _hash_elsewhere(value: Any) -> int:
    hashed = hash(value)
    return hashed + _FAR if hashed in (id(value), object.__hash__(value)) else hashed


# builtins of a world whose objects lie at other addresses
_ELSEWHERE = {"id": lambda value: id(value) + _FAR, "hash": _hash_elsewhere}

_COLLECTED: dict[str, Callable] = {}  # a world where the garbage collector runs before a call ends


def _in_file(program: Program, jit: Callable, names: dict[str, Callable] | None = None) -> list[Verdict]:
    """Run a program that tracebacks, `inspect` and the interpreter find the source of."""
    filename = f"<generated {next(_ids)}>"
    linecache.cache[filename] = (len(program.source), None, program.source.splitlines(True), filename)
    try:
        with restored():
            return _run(program, filename, jit, names)
    except Hang:
        return [Verdict("wrong", "hangs")]
    finally:
        linecache.cache.pop(filename, None)


def _run(program: Program, filename: str, jit: Callable, names: dict[str, Callable] | None) -> list[Verdict]:
    theirs, ours = Side(program.source, filename), Side(program.source, filename, names)
    compiled = jit(ours.space["f"])
    verdicts: list[Verdict] = []
    known: list[list[str]] = []  # states that a call was compiled for
    fits = False  # whether a program fitted the call before
    warned: list[str] = []
    refusals: list[str] = []
    for number in range(len(program.steps) + 1):
        if number:
            texts = [side.step(program.steps[number - 1], filename) for side in (theirs, ours)]
            if texts[0] != texts[1]:
                return [*verdicts, Verdict("wrong", f"step {number - 1}: {texts[1]}   IN EAGER   {texts[0]}")]
        before = ours.state(Description(identities=True))
        modes = torch.is_grad_enabled(), torch.get_default_dtype()
        words, *_ = theirs.call(theirs.space["f"])
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
        misses, programs = _misses(compiled), _programs(compiled)
        verdict = _compare(ours, compiled, words, before, number, warned, refusals)
        if verdict.kind == "same" and refusals and programs == _programs(compiled):
            verdict.kind, verdict.words = "refused", refusals[-1]  # and eager ran
        verdicts.append(verdict)
        if verdict.kind == "wrong":
            return verdicts
        recompiled = _misses(compiled) > misses
        fitted, fits = fits, verdict.kind == "same" and not words[0].startswith("raised")
        if fits:  # a call that raises leaves no program behind
            unread = before.lines in known or fitted and number - 1 in program.neutral
            verdict.checked = bool(known) and not before.opaque and unread
            if verdict.checked and recompiled:
                verdict.needless = True
                verdict.words = "; ".join(thunder.last_recompile_reasons(compiled))
            known.append(before.lines)
    return verdicts


def _programs(compiled: Any) -> tuple[int, int]:
    """How many programs were compiled, and how many calls ran one of those that were there."""
    if not type(compiled).__module__.startswith("thunder."):
        return 0, 0
    return len(compiled.programs), thunder.cache_hits(compiled)


def _misses(compiled: Any) -> int:
    return thunder.cache_misses(compiled) if type(compiled).__module__.startswith("thunder.") else 0


def _compare(
    ours: Side,
    compiled: Any,
    words: list[str],
    before: Description,
    number: int,
    warned: list[str],
    refusals: list[str],
) -> Verdict:
    actual, error, caught, _ = ours.call(compiled)
    if isinstance(error, ThunderError) and not words[0].startswith(f"raised {type(error).__qualname__}"):
        text = refusal(error)
        own = "please report" in str(error) or not text.startswith(("CaptureError", "DataDependentError", "SharpEdge"))
        if not own:
            after = ours.state(Description(identities=True))
            if effect := difference(after.lines, before.lines):
                return Verdict("wrong", f"call {number} is refused ({text}) and leaves an effect: {effect}")
            ours.call(ours.space["f"])
            return Verdict("refused", text)
        again, *_ = ours.call(ours.space["f"])  # thunder may have run the program already
        return Verdict("failed", text) if again == words else Verdict("failed", text + " (with effects)")
    for w in caught:  # thunder warns once a site, so that a later call may differ without a warning of its own
        if issubclass(w.category, SharpEdgeWarning):
            warned.append(str(w.message).split("\n")[0])
    refusals += (_in_general(str(w.message)) for w in caught if issubclass(w.category, FallbackWarning))
    if different := difference(actual, words):
        return Verdict("warned", _in_general(warned[0])) if warned else Verdict("wrong", f"call {number}: {different}")
    reports = [str(w.message) for w in caught if "please report" in str(w.message)]  # and the original function ran
    return Verdict("failed", _in_general(reports[0])) if reports else Verdict("same")


_NAMES = re.compile(r"'[^']*'|\"[^\"]*\"|<[^>]*>|\b0x[0-9a-f]+|\b[0-9]+\b")


def refusal(error: BaseException) -> str:
    """An error's class and first line without names and numbers: what it is counted under."""
    return f"{type(error).__name__}: {_in_general(str(error))}"


def _in_general(text: str) -> str:
    return _NAMES.sub("_", text.split("\n")[0].removeprefix("cannot capture this program: "))[:160]


def wrong(program: Program, kind: str = "wrong", jit: Callable | None = None) -> str:
    """The words of the first call of that kind, or ""."""
    try:
        verdicts = run(program, jit)
    except Exception:  # noqa: BLE001 - a shrunk program need not run
        return ""
    return next((v.words for v in verdicts if v.kind == kind), "")


_RAISED = re.compile(r"raised (\w+)")


def kind_of(words: str) -> tuple:
    """What a shrunk program has to keep of the words that say how it is wrong."""
    ours, _, theirs = words.partition("   IN EAGER   ")
    effect = "leaves an effect" in ours
    return (
        effect,
        *(_RAISED.findall(side)[:1] for side in (ours, theirs)),
        "same as" in ours,
        "same as" in theirs,
        "Proxy" in ours,
    )


def script(program: Program) -> str:
    """A file that runs the program by itself; with the argument `eager` without thunder."""
    calls = ["show()"]
    for step in program.steps:
        calls += [step, "show()"]
    return "\n".join(
        [
            program.source.rstrip(), "", "import sys, thunder",
            'call = f if "eager" in sys.argv else thunder.jit(f, numerics="eager")',
            'KWARGS = globals().get("KWARGS", {})',
            "def show():", "    try: print(call(*ARGS, **KWARGS))",
            "    except Exception as e: print(type(e).__name__, str(e)[:300])", *calls, "",
        ]
    )  # fmt: skip
