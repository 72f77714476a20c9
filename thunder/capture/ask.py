"""Questions: every look at the outside world is one, and the prologue asks it again before each call.

Each question is one row of this file: how to ask at capture (`World.ask`), the text of the same in the prologue, and
the words of a miss.
"""

from __future__ import annotations

import array
import marshal
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch

from thunder import compat
from thunder.capture.native import IMMUTABLE, PRIMITIVE, container_base, plain_base
from thunder.capture.sources import MISSING
from thunder.ops.opaque_values import metadata


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
    if (base := plain_base(type(a))) is not None:
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
FILLED = Question("hooks", lambda v, _: any(v), "passes.any_filled({v})", IS, "a module has hooks now")
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

_NAMED = {
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
    elif kind in _NAMED:
        text = f"{_NAMED[kind]} {value.__name__}"
    elif kind is types.CodeType:
        text = f"that of line {value.co_firstlineno}"
    elif kind is tuple and not is_data(value):
        text = f"({', '.join(map(say, value[:8]))}{', ...' if len(value) > 8 else ''})"
    else:
        shown = value is MISSING or is_data(value) or kind in PRIMITIVE or issubclass(kind, IMMUTABLE)
        text = repr(value) if shown else object.__repr__(value)
    return text if len(text) <= 60 else text[:57] + "..."


def was_is(path: str, was: str, now) -> str:
    return f"{path} was {was}, is {say(now)}"
