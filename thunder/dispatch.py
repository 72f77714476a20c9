"""Which compiled program a call tries first: an index of cache entries by what tells them apart.

The prologue of an entry alone decides whether the entry fits. The index only orders the entries, so a wrong guess costs
time and changes nothing. It does not look into prologues: it notes facts of the call that each entry was compiled for
(shapes, types, numbers; `facts_of`), and its key asks for the few of them in which two entries differed. The key is
a function with readable text:

    def key(fn, args, kwargs):
      return (shape(item(args, 0)), value(attribute(item(args, 1), 'mode')),)

Facts that an entry does not care about (a step counter that is symbolic) are found out by calls: an entry that fits
a call of another key is `loose` in what differs, and is tried after those of the call's own key. Where many are loose,
the key is chosen anew from what none of them is loose in.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from thunder.core.codegen import compile_source
from thunder.program import CacheEntry

__all__ = ["EntryTable", "facts_of"]

DEPTH, WIDTH, FACTS = 3, 16, 256  # how far, how wide and how much of a call is noted
KEY_LENGTH = 8  # facts that a key asks for, at most
LOOSE = 4  # loose entries before the key is chosen anew

# types whose values are compared without running code of the user's
PLAIN = frozenset(
    (int, float, bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.layout, torch.memory_format)
)  # fmt: skip
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


# ---------------------------------------------------------------------------------------------------------------- steps


def item(v: Any, key: Any) -> Any:
    """An element of a builtin container, None where there is none."""
    if type(v) is dict:
        return v.get(key)
    return v[key] if type(v) in (tuple, list) and key < len(v) else None


def attribute(v: Any, name: str) -> Any:
    """What an object's own `__dict__` holds, read without the class."""
    try:
        return object.__getattribute__(v, "__dict__").get(name)
    except AttributeError:
        return None


def owner(v: Any) -> Any:
    return v.__self__ if type(v) is types.MethodType else None


def cell(v: Any, index: int) -> Any:
    """What a closure holds at a place, None where that is empty."""
    try:
        return v.__closure__[index].cell_contents
    except (AttributeError, TypeError, IndexError, ValueError):
        return None


def global_of(v: Any, name: str) -> Any:
    return v.__globals__.get(name) if type(v) is types.FunctionType else None


# ------------------------------------------------------------------------------------------------------------ questions


def shape(v: Any) -> Any:
    return v.shape if type(v) in TENSORS else None


def kind(v: Any) -> Any:
    return (v.dtype, v.device, v.requires_grad, v.layout, type(v)) if type(v) in TENSORS else None


def value(v: Any) -> Any:
    """A plain value with its type; of anything else which type it has."""
    t = type(v)
    return (t, v) if t in PLAIN and v == v else id(t)


def length(v: Any) -> Any:
    return len(v) if type(v) in (tuple, list, dict) else None


def strides(v: Any) -> Any:
    return v.stride() if type(v) in TENSORS and v.layout is torch.strided else None


def identity(v: Any) -> int:
    return id(v)


STEPS: dict[str, Callable] = {f.__name__: f for f in (item, attribute, owner, cell, global_of)}
# in the order in which they are taken into a key: what is rarely another one without a reason comes first
QUESTIONS: dict[str, Callable] = {f.__name__: f for f in (shape, kind, value, length, strides, identity)}
_RANK = {name: rank for rank, name in enumerate(QUESTIONS)}


class Fact(NamedTuple):
    """A question about what is found in a call. place: the expression that finds it, of steps from `args`, `kwargs` or `fn`."""

    question: str
    place: str

    def __str__(self) -> str:
        return f"{self.question}({self.place})"


def _parts(place: str, v: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, with the expressions that find it."""
    t = type(v)
    if t in (tuple, list):
        yield from ((f"item({place}, {i})", x) for i, x in enumerate(v[:WIDTH]))
    elif t is dict:
        yield from ((f"item({place}, {k!r})", x) for k, x in list(v.items())[:WIDTH] if type(k) in (str, int))
    elif t is types.MethodType:
        yield f"owner({place})", v.__self__
    elif t is types.FunctionType:
        yield from ((f"cell({place}, {i})", cell(v, i)) for i in range(len(v.__closure__ or ())))
        names = (n for n in v.__code__.co_names if n in v.__globals__)
        yield from ((f"global_of({place}, {n!r})", v.__globals__[n]) for n in names)
    elif t not in PLAIN and not isinstance(v, (type, types.ModuleType, torch.Tensor)):
        try:
            held = object.__getattribute__(v, "__dict__")
        except AttributeError:
            return
        names = [n for n in held if type(n) is str and not n.startswith("_")]
        yield from ((f"attribute({place}, {n!r})", held[n]) for n in names[:WIDTH])


def _questions(v: Any) -> tuple[str, ...]:
    t = type(v)
    if t in TENSORS:
        return "shape", "kind", "value", "strides"
    if t in (tuple, list, dict):
        return "value", "length"
    return ("value",) if t in PLAIN else ("value", "identity")


def facts_of(fn: Callable, args: tuple, kwargs: dict) -> dict[Fact, Any]:
    """What a call looks like, as far as `DEPTH`, `WIDTH` and `FACTS` go. No code of the user's runs, and no argument is kept."""
    found: dict[Fact, Any] = {}
    level: list[tuple[str, Any]] = [("args", args), ("kwargs", kwargs), ("fn", fn)]
    for _ in range(DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for place, v in level:
            if len(found) >= FACTS:
                return found
            for question in _questions(v):
                try:
                    found[Fact(question, place)] = QUESTIONS[question](v)
                except RuntimeError:  # a nested tensor has no shape
                    continue
            below += _parts(place, v)
        level = below
    return found


# ---------------------------------------------------------------------------------------------------------------- table


class EntryTable:
    """The cache entries for calls in the same modes.

    entries: all of them. key: None while nothing is known that tells them apart; then the last one that fitted a call
    comes first.
    """

    def __init__(self):
        self.entries: list[CacheEntry] = []
        self.key: Callable | None = None
        self.loose: list[CacheEntry] = []
        self._buckets: dict[tuple, list[CacheEntry]] = {}
        self._asked: list[Fact] = []
        self._facts: dict[CacheEntry, dict[Fact, Any]] = {}
        self._loose_in: dict[CacheEntry, set[Fact]] = {}
        self._chosen_for = 0  # loose entries when the key was last chosen anew

    def likely(self, fn: Callable, args: tuple, kwargs: dict) -> list[CacheEntry]:
        """The entries that may fit a call, the most likely first. Another entry fits only if the index has to learn."""
        try:
            found = self._buckets.get(self.key(fn, args, kwargs), _NONE)  # type: ignore[misc]
        except RuntimeError:  # a nested tensor has no shape
            found = _NONE
        if not self.loose:
            return found
        return found + self.loose if found else self.loose

    def by_last_use(self) -> list[CacheEntry]:
        return sorted(self.entries, key=lambda e: e.used, reverse=True)

    def add(self, entry: CacheEntry, facts: dict[Fact, Any]) -> None:
        """A new entry, compiled for a call with these facts."""
        self.entries.insert(0, entry)
        self._facts[entry] = facts
        self._loose_in[entry] = set()
        self._place(entry)
        self._separate(entry)

    def remove(self, entry: CacheEntry) -> None:
        self.entries.remove(entry)
        del self._facts[entry], self._loose_in[entry]
        self._rebuild()

    def learn(self, entry: CacheEntry, facts: dict[Fact, Any]) -> None:
        """A call with these facts was not likely to fit the entry, and did."""
        if self.key is None:
            return
        was, known = self._facts[entry], self._loose_in[entry]
        found = {f for f in self._asked if _answer(was, f) != _answer(facts, f)} - known
        if not found:
            return
        known |= found
        self._rebuild()
        if len(self.loose) > max(LOOSE, 2 * self._chosen_for):
            self._ask([])
            for each in self.entries:
                self._separate(each)
            self._chosen_for = len(self.loose)

    # --- the key
    def _key_of(self, entry: CacheEntry) -> tuple:
        facts = self._facts[entry]
        return tuple([_answer(facts, f) for f in self._asked])

    def _place(self, entry: CacheEntry) -> None:
        if self._loose_in[entry].isdisjoint(self._asked):
            key = self._key_of(entry)
            self._buckets[key] = [entry, *self._buckets.get(key, ())]
        else:
            self.loose = [entry, *self.loose]

    def _rebuild(self) -> None:
        self._buckets, self.loose = {}, []
        for entry in reversed(self.by_last_use()):
            self._place(entry)

    def _ask(self, asked: list[Fact]) -> None:
        self._asked = asked
        self._rebuild()
        self.key = _key(asked) if asked else None

    def _separate(self, entry: CacheEntry) -> None:
        """Asks for more, until no other entry that differs has the key of this one."""
        while len(self._asked) < KEY_LENGTH and self._loose_in[entry].isdisjoint(self._asked):
            others = [e for e in self._buckets[self._key_of(entry)] if e is not entry]
            telling = self._telling(entry, others[0]) if others else None
            if telling is None:
                return
            self._ask([*self._asked, telling])

    def _telling(self, a: CacheEntry, b: CacheEntry) -> Fact | None:
        """A fact in which two entries differ: one in which few are loose, of a kind that comes early, near the call."""
        one, other = self._facts[a], self._facts[b]
        differing = [f for f in {**one, **other} if f not in self._asked and _answer(one, f) != _answer(other, f)]
        if not differing:
            return None
        return min(differing, key=lambda f: (sum(f in s for s in self._loose_in.values()), _RANK[f.question], len(f.place)))


_NONE: list[CacheEntry] = []


def _answer(facts: dict[Fact, Any], fact: Fact) -> Any:
    """A fact of a call; where nothing is, what the key finds there."""
    return facts[fact] if fact in facts else QUESTIONS[fact.question](None)


def _key(asked: list[Fact]) -> Callable:
    text = f"def key(fn, args, kwargs):\n  return ({', '.join(map(str, asked))},)\n"
    return compile_source(text, "key", {**STEPS, **QUESTIONS})
