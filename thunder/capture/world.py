"""World: the outside of a program, as a capture knows it: sources, questions, and every answer.

A source says where a value comes from: a path from the call's arguments, the function or a pinned object. Each object
reachable from there has one, in a table by identity. A question is one way to look at the value at a source, a row of
this file: how to ask at capture, the text of the same in the prologue, and the words of a miss. `World.ask` asks, and
remembers the answer: a program depends on exactly these answers, and its prologue asks for them again.
"""

from __future__ import annotations

import array
import collections
import enum
import gc
import itertools
import marshal
import operator
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

from thunder import compat
from thunder.capture.native import IMMUTABLE, PRIMITIVE, container_base, plain_base
from thunder.core.symbolic import Expression
from thunder.interpreter.attributes import cell_value, plain_attribute
from thunder.interpreter.instructions import PLAIN
from thunder.ops.opaque_values import metadata

_VARIABLES = ("number", "made", "of", "len", "tensor")  # variables are called so
_PRIVATE_STEPS = {"_lc_original", "__self__", "_parameters", "_buffers", "_modules", "__dict__"}


class _Missing:
    """The value at a source where there is none."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()


def find(owner: Any, name: str):
    """An attribute without the class's `__getattribute__` and `__getattr__`: an object's own, or one of its class."""
    return plain_attribute(owner, name, MISSING)


def item(container, key):
    """The item of a builtin container, or of one of a subclass, under a key."""
    if isinstance(container, dict):
        return dict.get(container, key, MISSING)  # `dict.__getitem__` would call a `__missing__`
    base: Any = list if isinstance(container, list) else tuple if isinstance(container, tuple) else None
    try:
        return container[key] if base is None else base.__getitem__(container, key)
    except (KeyError, IndexError):
        return MISSING


def nth(container, index: int):
    """The value at a position of a dict whose keys are numbers that nobody chooses, as those of a module's hooks."""
    return next(itertools.islice(dict.values(container), index, None), MISSING)


def called(owner, how: tuple):
    """The result of a method of an object that stands for changing state (a context variable, a weak reference)."""
    name, *args = how
    try:
        return getattr(owner, name)(*args)
    except LookupError:
        return MISSING


def held(proxy, _=None):
    """The mapping that a mappingproxy shows."""
    return gc.get_referents(proxy)[0]


def cell(function, index: int):
    return cell_value(function.__closure__[index], MISSING)


def length_of(container, _=None) -> int:
    """`len` of a builtin container or a text, or of one of a subclass."""
    base: Any = next(b for b in (list, dict, set, collections.deque, str, bytes) if isinstance(container, b))
    return base.__len__(container)


def tensor_of(array, _=None) -> torch.Tensor:
    """The tensor that shares the memory of an array; of a copy where nobody may write to that."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


STEPS = {
    "item": item,
    "nth": nth,
    "find": find,
    "cell": cell,
    "call": called,
    "held": held,
    "tensor": tensor_of,
    "len": length_of,
}  # how such a step is taken


class Computation(NamedTuple):
    """A number that is computed of numbers from outside. sources: of the symbols in the expression, by their names."""

    expression: Expression
    sources: tuple[tuple[str, Source], ...]

    def evaluate(self, values: dict[Source, Any]):
        return self.expression.evaluate({name: values[source] for name, source in self.sources})

    def text(self, names: Callable[[Source], str]) -> str:
        """The expression with other names for its symbols."""
        return str(self.expression.renamed({name: names(source) for name, source in self.sources}))


class Source:
    """A path: a base, and one step from it. Interned through `children`, so that two equal paths are one object.

    step: "root" (key: "fn", "args" or "kwargs"), "const" (key: the name of a pinned object), "attr" (an attribute),
    "find" (an attribute that no code of the user's answers), "item", "nth" (the value at a position of a dict), "keyed"
    (an item whose key is the tensor at another source), "held" (the mapping behind a mappingproxy), "tensor" (that of
    an array), "cell" (key: index in the closure), "call" (key: a method's name and arguments), "size" (key: a dimension
    of a tensor), "len", "at" (an item whose key is the number at another source), "number" (key: a `Computation`, of
    the base among others), "made" (what the base makes of a shape, of ints and sources of numbers), or "of" (what it
    gives of the values at sources). label:
    how a root or constant is called when a person reads about it.
    """

    __slots__ = ("base", "root", "step", "key", "label", "_children")

    def __init__(self, base: Source | None, step: str, key, label: str = ""):
        self.base: Any = base
        self.root: Source = self if base is None else base.root
        self.step, self.key, self.label = step, key, label
        self._children: dict = {}

    def fetch(self, base, values: dict[Source, Any]):
        """The value here, below the object `base`; `values` has those at other sources. MISSING where there is none."""
        if self.step == "attr":
            return getattr(base, self.key, MISSING)
        if self.step == "size":
            return base.shape[self.key]
        if self.step in ("keyed", "at"):
            return item(base, values[self.key])
        if self.step == "number":
            return self.key.evaluate(values)
        if self.step in ("made", "of"):
            return base(tuple(values[n] if type(n) is Source else n for n in self.key))
        return STEPS[self.step](base, self.key)

    def child(self, step: str, key, label: str = "") -> Source:
        source = self._children.get((step, type(key), key))
        if source is None:
            source = self._children[step, type(key), key] = Source(self, step, key, label)
        return source

    def forget(self) -> None:
        """Forgets the sources below, of which no more are looked for."""
        below, self._children = self._children, {}
        for source in below.values():
            source.forget()

    def attr(self, name: str) -> Source:
        return self.child("attr", name)

    def item(self, key) -> Source:
        return self.child("item", key)

    def find(self, name: str) -> Source:
        return self.child("find", name)

    def call(self, name: str, *args) -> Source:
        return self.child("call", (name, *args))

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument itself, and no part of one."""
        return self.base is not None and self.base.step == "root" and self.base.key in ("args", "kwargs")

    def steps(self) -> list[Source]:
        """The path from below its root to here."""
        steps: list[Source] = []
        s = self
        while s.base is not None:
            steps.append(s)
            s = s.base
        return steps[::-1]

    def describe(self, parameters: tuple[str, ...] = ()) -> str:
        """The path as the user would write it: `x`, `x['a'][0]`, `model.fc.weight`, `global scale`."""
        text, steps = self.root.label or str(self.root.key), self.steps()
        if self.root.key == "args" and steps and isinstance(steps[0].key, int):
            i = steps[0].key
            text, steps = parameters[i] if i < len(parameters) else f"args[{i}]", steps[1:]
        elif self.root.key == "kwargs" and steps:
            text, steps = str(steps[0].key), steps[1:]
        for s in steps:
            text = s._described(text, parameters)
        return text

    def _described(self, text: str, parameters: tuple[str, ...]) -> str:
        """A path with this step, behind the text of the steps before."""
        step, key, base = self.step, self.key, self.base
        inside = base.base is not None and base.key in _PRIVATE_STEPS
        if step == "attr" and key in _PRIVATE_STEPS or step in ("held", "tensor", "made"):
            return text
        if step in ("attr", "find") or step == "item" and inside:
            return f"{text}.{key}" if text else str(key)
        if step == "item" and text.endswith("."):  # a name in a module
            return text + key
        if step == "item" and text == "global":
            return f"global {key}"
        if step == "call":
            arguments = f"({', '.join(map(repr, key[1:]))})"
            return f"{text}.{key[0]}{arguments}" if key[0] != "__call__" else f"{text}{arguments}"
        if step == "of":
            return f"{text}({', '.join(source.describe(parameters) for source in key)})"
        if step == "cell":
            return f"closure variable {self.label or key}"
        if step == "size":
            return f"{text}.shape[{key}]"
        if step == "len":
            return f"len({text})"
        if step == "number":
            return key.text(lambda source: source.describe(parameters))
        return f"{text}[{key.describe(parameters)}]" if step in ("keyed", "at") else f"{text}[{key!r}]"

    def name(self, parameters: tuple[str, ...] = ()) -> str:
        """A variable name for the value: the parameter's own, `t_<position>_<path>` below an object, `t_<path>` below
        the compiled module."""
        steps = self.steps()
        if steps and steps[0].key == ("__call__",):
            keys = [self.root.label, *(str(s.key) for s in steps[1:])]
        else:
            keys = [
                s.key.name(parameters) if s.step in ("keyed", "at") else s.step if s.step in _VARIABLES else str(s.key)
                for s in steps
                if not (s.step == "attr" and s.key in _PRIVATE_STEPS)
            ]
        root = self.root.key
        if root in ("args", "kwargs") and steps:
            first = steps[0].key
            own = first if isinstance(first, str) else parameters[first] if first < len(parameters) else f"args_{first}"
            if len(steps) > 1 and all(s.step == "item" for s in steps):
                keys = [own, *keys[1:]]
            elif len(steps) > 1:
                keys = ["t", str(first), *keys[1:]]
            else:
                keys = [own]
        elif root == "fn":
            keys = ["t", *keys]
        words = [k if k.isidentifier() or k.isdigit() else re.sub(r"\W", "_", k) for k in keys]
        name = "_".join(words) or "t"
        return name if name.isidentifier() else f"t_{name}"


class Question(NamedTuple):
    """One way to look at the value at a source.

    ask(value, operand) gives the answer at capture. `text` is the same in the prologue, where {v} is the value and {k}
    the operand. `changed` is the condition of a miss: {now} is the new answer, {was} the one of capture. `words` says
    it, of the source at {path}; a pair where the answer is yes or no: for when it was yes, and for when it was no.
    """

    name: str
    ask: Callable[[Any, Any], Any]
    text: str
    changed: str
    words: Any  # str | tuple[str, str]

    __hash__ = object.__hash__  # a question is a key often, and hashing its fields takes long


# ---------------------------------------------------------------- functions of questions and prologues


def same_value(a, b) -> bool:
    """Whether two values have the same types and are equal; 0.0 is not -0.0, nan is itself. Runs no method of a user's
    class."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return tuple.__len__(a) == tuple.__len__(b) and all(map(same_value, tuple.__iter__(a), tuple.__iter__(b)))
    if isinstance(a, slice):
        return all(map(same_value, (a.start, a.stop, a.step), (b.start, b.stop, b.step)))
    kind = type(a)
    if (base := kind if kind in PLAIN else plain_base(kind)) is not None:
        return base.__repr__(a) == base.__repr__(b) if base in (float, complex) else base.__eq__(a, b)
    return repr(a) == repr(b) if isinstance(a, IMMUTABLE) else a is b or type(a) in PRIMITIVE and a == b


def same_elements(elements: tuple, want: tuple) -> bool:
    """Whether keys of a dict, or elements of a set, are the same as before, in the same order."""
    return len(elements) == len(want) and (
        all(map(operator.is_, elements, want)) or all(map(same_value, elements, want))
    )


def is_data(value) -> bool:
    """Whether a value is numbers, text, None, and lists, tuples and dicts of them, no list or dict in two places: it is
    nothing but its content."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _NESTED and id(value) in seen:
            if kind is not tuple:
                return False
            continue
        seen.add(id(value))
        inside = [*value, *value.values()] if kind is dict else value if kind in _NESTED else (value,)
        kinds = set(map(type, inside))
        if not kinds <= _NUMBERS | _NESTED:
            return False
        if kinds & _NESTED:
            pending += [x for x in inside if type(x) in _NESTED]
    return True


_NUMBERS = {int, float, bool, complex, str, bytes, type(None)}
_NESTED = {list, tuple, dict}


def content(value):
    """Bytes that differ where the contents differ, types included."""
    if isinstance(value, numpy.ndarray):
        return type(value), value.dtype.str, value.shape, numpy.ndarray.tobytes(value)
    if isinstance(value, array.array):
        return value.typecode, value.tobytes()
    try:
        return type(value), bytes(value) if type(value) is bytearray else marshal.dumps(value, 2)
    except ValueError:  # it holds something else now
        return type(value), None


def length(value) -> int:
    """`len` without the user's `__len__`, for a container."""
    base = container_base(type(value))
    return len(value) if base is None else base.__len__(value)


def keys(value) -> tuple:
    """The keys of a dict or the elements of a set, without the user's methods."""
    base = container_base(type(value))
    return tuple(value) if base is None else tuple(base.__iter__(value))


def of_content(answer: tuple) -> Any:
    """The container that `content` gave the answer for; the answer where it was another value."""
    return marshal.loads(answer[-1]) if answer[0] in (list, dict, set, tuple) and answer[-1] else answer


def placement(a: torch.Tensor, b: torch.Tensor) -> tuple | None:
    """How two tensors lie in one memory: their strides, and how many elements the first is behind the second; None in
    two memories."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return None
    return a.stride(), b.stride(), a.storage_offset() - b.storage_offset()


def history(tensor: torch.Tensor) -> tuple:
    """The properties of a tensor that decide whether autograd allows a write: whether it is a leaf, and which kind of
    view."""
    base = tensor._base
    if base is None:
        return (tensor.is_leaf,)
    return tensor.is_leaf, base.is_leaf, compat.creation_meta(tensor).name


def one_history(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether autograd knows two tensors as views of one memory."""
    return a is b or (a if a._base is None else a._base) is (b if b._base is None else b._base)


_hooks_of, _late_hooks_of = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def hooked(tensor) -> bool:
    return bool(_hooks_of(tensor)) or bool(_late_hooks_of(tensor))


# of modules; the last two are the backward's
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_hooks_of_module = operator.itemgetter(*HOOKS)


def hookless(module) -> bool:
    """Whether a call of a module is its `forward`."""
    fields = vars(module)
    return fields.get("_compiled_call_impl") is None and not any(_hooks_of_module(fields))


def options_of_shards(module) -> tuple:
    return compat.fully_shard_options(module)


def kind(value) -> tuple | None:
    if not isinstance(value, torch.Tensor):
        return None
    with compat.DisableTorchFunction():  # a subclass would answer each property in Python
        return metadata(value)


# ---------------------------------------------------------------- the table

# Shape, dtype, device and the like are asked for all tensors in one batch (`Tensors.shapes`), and relations between
# symbolic numbers have rules of their own (`Numbers.decisions`).

IS, EQUAL = "{now} is not {was}", "{now} != {was}"
_TWO = ("{path} and {k} were one object", "{path} and {k} became one object")
TYPE = Question("type", lambda v, _: type(v), "type({v})", IS, "{path} was of type {was}, is of type {now}")
IDENTITY = Question("is", lambda v, _: v, "{v}", IS, "{path} is another object than before: was {was}, is {now}")
VALUE = Question("value", lambda v, _: v, "{v}", "not same_value({now}, {was})", "{path} was {was}, is {now}")
LENGTH = Question("len", lambda v, _: length(v), "length({v})", EQUAL, "len({path}) was {was}, is {now}")
KEYS = Question(
    "keys",
    lambda v, _: keys(v),
    "keys({v})",
    "not same_elements({now}, {was})",
    "the keys of {path} changed: were {was}, are {now}",
)
ELEMENTS = KEYS._replace(name="elements", words="the elements of {path} changed: were {was}, are {now}")
CONTENT = Question("content", lambda v, _: content(v), "content({v})", EQUAL, "the content of {path} changed")
HOLDS = Question(
    "holds",
    lambda v, k: set.__contains__(v, k),
    "({k} in {v})",
    IS,
    ("{path} held {k}, does not", "{path} holds {k} now"),
)
REPLACED = KEYS._replace(name="overrides", words="other parameters of the compiled module are replaced than before")
PRESENT = Question(
    "present", lambda v, _: v is not MISSING, "({v} is not MISSING)", IS, ("{path} is gone", "{path} exists now")
)
SAME = Question("same", lambda v, other: v is other, "({v} is {k})", IS, _TWO)
SHARED = Question("shared", placement, "placement({v}, {k})", EQUAL, "{path} and {k} shared memory in another way")
HISTORY = Question(
    "history", lambda v, _: history(v), "history({v})", EQUAL, "{path} is another leaf or view than before"
)
VIEWS = Question(
    "views", one_history, "one_history({v}, {k})", IS,
    ("autograd knew {path} and {k} as views of one memory", "autograd knows {path} and {k} as views of one memory"),
)  # fmt: skip
KIND = Question("metadata", lambda v, _: kind(v), "kind({v})", EQUAL, "{path} is another kind of tensor than before")
FILLED = Question("hooks", lambda v, _: any(v), "checks.any_filled({v})", IS, "a module has hooks now")
HOOKLESS = Question("module_hooks", lambda m, _: hookless(m), "hookless({v})", IS, "{path} has hooks now")
HOOKED = Question(
    "tensor_hooks", lambda v, _: hooked(v), "hooked({v})", IS, "a tensor whose gradient is computed has hooks now"
)
SHARDED_WITH = Question(
    "sharded_with", lambda m, _: options_of_shards(m), "options_of_shards({v})", EQUAL,
    "fully_shard of {path} has other options than before",
)  # fmt: skip

HELPERS: dict[str, Any] = {
    f.__name__: f for f in (
        same_value, same_elements, content, length, keys, placement, history, one_history, hooked,
        hookless, kind, options_of_shards)
}  # fmt: skip


# ---------------------------------------------------------------- words

_KINDS = {
    types.FunctionType: "function", types.BuiltinFunctionType: "function", types.ModuleType: "module",
    types.MethodDescriptorType: "method", types.WrapperDescriptorType: "method",
}  # fmt: skip


def say(value) -> str:
    """A value in a reason: short, tensors by their metadata, objects without their own methods."""
    if isinstance(value, torch.Tensor):
        return f"{value.device} {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    kind = type(value)
    if issubclass(kind, type):
        text = value.__name__
    elif kind in _KINDS:
        text = f"{_KINDS[kind]} {value.__name__}"
    elif kind is types.CodeType:
        text = f"that of line {value.co_firstlineno}"
    elif kind is tuple and not is_data(value):
        text = f"({', '.join(map(say, value[:8]))}{', ...' if len(value) > 8 else ''})"
    else:
        shown = value is MISSING or is_data(value) or kind in PRIMITIVE or issubclass(kind, IMMUTABLE)
        text = repr(value) if shown else object.__repr__(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value) -> str:
    """A value as an expression in a guard that is read: functions and classes by their names, other objects without a
    literal by class and address."""
    kind = type(value)
    if kind is tuple and not is_data(value):
        return f"({''.join(f'{spell(x)}, ' for x in value).rstrip()})"
    if isinstance(value, (type, *_KINDS)):
        return expression(value.__name__)
    if kind is types.CodeType:
        return f"code_of_line_{value.co_firstlineno}"
    if value is MISSING:
        return "MISSING"
    shown = is_data(value) or kind in PRIMITIVE or issubclass(kind, IMMUTABLE)
    text = str(value) if isinstance(value, (enum.Enum, torch.dtype)) else repr(value) if shown else ""
    return text if _is_expression(text) else expression(f"{kind.__name__}_at_{id(value):x}")


def expression(path: str) -> str:
    """A source in words as an expression: `scale` for `global scale`."""
    path = path.removeprefix("global ").removeprefix("closure variable ")
    path = path.replace("<locals>.", "").replace("<lambda>", "lambda_")
    return path if _is_expression(path) else re.sub(r"\W+", "_", path)


def _is_expression(text: str) -> bool:
    try:
        return bool(compile(text, "guard", "eval"))
    except (SyntaxError, ValueError):
        return False


def was_is(path: str, was: str, now) -> str:
    return f"{path} was {was}, is {say(now)}"


_NEW = object()


class World:
    """The outside of one program. Everything that a table names by its id is kept alive until the capture is over.

    parameters: names of the function's positional parameters, for messages. sources: where objects stand, by id.
    origins: the same of values that are asked as a whole, and that leave the program as the values there. anew: ids of
    objects that are known by their structure (see `values`). constants: objects that generated code holds, by name;
    constant_sources: their sources, by id. values: what stands at a source. observed: the answers, by source, question
    and operand. settings: sources of settings of PyTorch that the program asked for.
    """

    __slots__ = (
        "parameters", "sources", "origins", "anew", "constants", "constant_sources", "values", "observed", "settings",
        "keep",
    )  # fmt: skip

    def __init__(self, parameters: tuple[str, ...] = ()):
        self.parameters = parameters
        self.sources: dict[int, Source] = {}
        self.origins: dict[int, Source] = {}
        self.anew: set[int] = set()
        self.constants: dict[str, Any] = {}
        self.constant_sources: dict[int, Source] = {}
        self.values: dict[Source, Any] = {}
        self.observed: dict[tuple[Source, Question, Any], Any] = {}
        self.settings: set[Source] = set()
        self.keep: dict[int, Any] = {}

    # --- where values come from
    def hold(self, value: Any) -> int:
        """The value stays, so that its id, which is returned, stays its own."""
        self.keep[id(value)] = value
        return id(value)

    def know(self, value: Any, source: Source) -> None:
        """The value stands at a source; the program depends on what it reads of it."""
        self.sources[self.hold(value)] = source

    def know_whole(self, value: Any, source: Source) -> None:
        """The value stands at a source, and leaves as the value there."""
        self.origins[self.hold(value)] = source

    def know_anew(self, value: Any) -> None:
        """Another object with the same structure will do in the place of the value."""
        self.anew.add(self.hold(value))

    def source_of(self, value: Any) -> Source | None:
        """Where an object stands that the program reads."""
        return self.sources.get(id(value))

    def const(self, value: Any, label: str = "") -> Source:
        """A source that is the object itself, pinned in the generated code."""
        known = self.constant_sources.get(id(value))
        if known is None:
            if id(value) in self.anew:
                self.ask(self.sources[id(value)], IDENTITY)
            name = f"K{len(self.constants)}"
            self.pin(name, value)
            text = label or plain_attribute(value, "__name__", type(value).__name__)
            known = self.constant_sources[self.hold(value)] = Source(None, "const", name, text)
        return known

    def pin(self, name: str, value: Any) -> None:
        """Generated code holds an object under this name."""
        self.constants[name] = value

    def describe(self, source: Source) -> str:
        """A source in words, as messages say it."""
        return source.describe(self.parameters)

    # --- what stands there
    def note(self, source: Source, value: Any) -> None:
        """This value stands at a source."""
        self.values[source] = value

    def value_at(self, source: Source) -> Any:
        """The value at a source; MISSING where there is none. Only `ask` and `reach` may look at it."""
        value = self.values.get(source, _NEW)
        if value is _NEW:
            if source.base is None:
                value = self.constants[source.key]
            else:
                with compat.DisableTorchFunction():
                    value = source.fetch(self.value_at(source.base), self.values)
            self.values[source] = value
        return value

    def is_there(self, source: Source) -> bool:
        """Whether something stands at a source. Where nothing does, that is asked."""
        return self.value_at(source) is not MISSING or self.ask(source, PRESENT)

    # --- questions
    def ask(self, source: Source, question: Question, operand: Any = None) -> Any:
        """The answer to a question about the value at a source, which the prologue asks again. The operand may be
        another source."""
        key = source, question, operand
        answer = self.observed.get(key, _NEW)
        if answer is _NEW:
            other = self.value_at(operand) if type(operand) is Source else operand
            value = self.value_at(source)
            if issubclass(type(value), torch.Tensor):
                with compat.DisableTorchFunction():  # the question is no operation of the program
                    answer = question.ask(value, other)
            else:
                answer = question.ask(value, other)
            self.observed[key] = answer
        return answer

    def answer(self, source: Source, question: Question, operand: Any, answer: Any) -> None:
        """A question was answered elsewhere."""
        self.observed[source, question, operand] = answer

    def ask_setting(self, source: Source, answer: Any) -> None:
        """The program depends on a setting of PyTorch's at a source."""
        self.settings.add(source)
        self.note(source, answer)
        self.ask(source, VALUE)
