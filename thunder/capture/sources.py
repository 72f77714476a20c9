"""Sources: where a value of the user's program comes from, as a path from the call's arguments, the function or a
pinned object."""

from __future__ import annotations

import collections
import gc
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from thunder.core.symbolic import Expression
from thunder.interpreter.attributes import cell_value, plain_attribute

_NAMED = ("number", "made", "of", "len", "tensor")  # variables are called so
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
                s.key.name(parameters) if s.step in ("keyed", "at") else s.step if s.step in _NAMED else str(s.key)
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
