"""The index of cache entries: it chooses the program that a call tries first, by facts in which entries differ.

The prologue of an entry alone decides whether the entry fits. The index only orders the entries, so a wrong guess costs
time and changes nothing. It does not look into prologues: it notes facts of the call that each entry was compiled for
(shapes, types, numbers; `facts_of`), and is a tree of those questions in which two entries differed:

    shape(item(args, 0))
      torch.Size([2]): value(item(args, 1))
        (str, 'mean'): entry
        (str, 'sum'): entry
      torch.Size([3]): entry

Facts that an entry does not care about (a step counter that is symbolic) are found out by calls: an entry that fits
a call with another answer is `loose` in that question. It stands beside the answers, and is tried after them. Where
many are loose, the question is chosen anew from those in which none is.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from thunder.cache.entry import CacheEntry
from thunder.options import compile_option

ENTRIES = compile_option(
    "max_entries", int, 512,
    "compiled programs kept for one function; a call that fits none of so many runs the original function. "
    "64 with transforms, where the least recently used one goes instead",
    owner="dispatch", valid="a number above 0", check=lambda n: n > 0,
)  # fmt: skip
PATHS = compile_option(
    "max_paths", int, 16,
    "compiled paths of one function beyond a decision by data; a call that goes none of so many runs the original",
    owner="dispatch", valid="a number above 0", check=lambda n: n > 0,
)  # fmt: skip
ENTRIES_WITH_TRANSFORMS = 64  # CUDA graphs hold memory of a GPU
STALE = 32  # an entry that was not used for so many calls an entry gives way to a new one
SCANNED = 64  # of so many calls that run the original function, one asks all entries

DEPTH, WIDTH, FACTS = 3, 16, 256  # how far, how wide and how much of a call is noted
LEVELS = 16  # questions that one call is asked
PAIRED = 4  # entries that are compared with all others for a question in which two differ
LOOSE = 4  # entries that are loose in a question before another one is chosen

# ids of types, since a class of the user's may define equality and hashes of classes: those whose values are compared
# without running code of the user's, builtin containers, and tensors
_OF_PYTHON = (int, float, bool, str, bytes, complex, type(None), type(...))
PLAIN = frozenset(map(id, (*_OF_PYTHON, torch.dtype, torch.layout, torch.memory_format)))
SEQUENCES = frozenset((id(tuple), id(list)))
CONTAINERS = SEQUENCES | {id(dict)}
TENSORS = frozenset((id(torch.Tensor), id(torch.nn.Parameter)))


# ---------------------------------------------------------------------------------------------------------------- steps


def item(v: Any, key: Any) -> Any:
    """An element of a builtin container, None where there is none."""
    if type(v) is dict:
        return v.get(key)
    return v[key] if id(type(v)) in SEQUENCES and type(key) is int and -len(v) <= key < len(v) else None


def attribute(v: Any, name: str) -> Any:
    """A value of an object's own `__dict__`, read without its class."""
    try:
        return object.__getattribute__(v, "__dict__").get(name)
    except AttributeError:
        return None


def owner(v: Any) -> Any:
    return v.__self__ if type(v) is types.MethodType else None


def cell(v: Any, index: int) -> Any:
    """The content of a closure cell, None where it is empty."""
    try:
        return v.__closure__[index].cell_contents
    except (AttributeError, TypeError, IndexError, ValueError):
        return None


def global_of(v: Any, name: str) -> Any:
    return v.__globals__.get(name) if type(v) is types.FunctionType else None


# ------------------------------------------------------------------------------------------------------------ questions


def shape(v: Any) -> Any:
    try:
        return v.shape if id(type(v)) in TENSORS else None
    except RuntimeError:  # a nested tensor has none
        return None


def kind(v: Any) -> Any:
    return (v.dtype, v.device, v.requires_grad, v.layout, type(v)) if id(type(v)) in TENSORS else None


def value(v: Any) -> Any:
    """A plain value with its type; of anything else which type it has."""
    t = type(v)
    return (t, v) if id(t) in PLAIN and v == v else id(t)


def length(v: Any) -> Any:
    return len(v) if id(type(v)) in CONTAINERS else None


def strides(v: Any) -> Any:
    return v.stride() if id(type(v)) in TENSORS and v.layout is torch.strided and not v.is_nested else None


def identity(v: Any) -> int:
    return id(v)


STEPS: dict[str, Callable] = {f.__name__: f for f in (item, attribute, owner, cell, global_of)}
# in the order in which they are taken into a key: questions whose answers rarely differ come first
QUESTIONS: dict[str, Callable] = {f.__name__: f for f in (shape, kind, value, length, strides, identity)}
_RANK = {name: rank for rank, name in enumerate(QUESTIONS)}


class Fact(NamedTuple):
    """A question about something in a call. place: the expression that finds it, from `args`, `kwargs` or `fn`."""

    question: str
    source: str

    def __str__(self) -> str:
        return f"{self.question}({self.source})"


def _parts(source: str, v: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object, with the expressions that find them."""
    t = type(v)
    if id(t) in SEQUENCES:
        yield from ((f"item({source}, {i})", x) for i, x in enumerate(v[:WIDTH]))
    elif t is dict:
        items = [(k, x) for k, x in itertools.islice(v.items(), WIDTH) if type(k) is str or type(k) is int]
        yield from ((f"item({source}, {k!r})", x) for k, x in items)
    elif t is types.MethodType:
        yield f"owner({source})", v.__self__
    elif t is types.FunctionType:
        yield from ((f"cell({source}, {i})", cell(v, i)) for i in range(len(v.__closure__ or ())))
        names = (n for n in v.__code__.co_names if n in v.__globals__)
        yield from ((f"global_of({source}, {n!r})", v.__globals__[n]) for n in names)
    elif id(t) not in PLAIN and not issubclass(t, (type, types.ModuleType, torch.Tensor, functools.partial)):
        try:
            held = object.__getattribute__(v, "__dict__")
        except AttributeError:
            return
        names = [n for n in held if type(n) is str and not n.startswith("_")]
        yield from ((f"attribute({source}, {n!r})", held[n]) for n in names[:WIDTH])


def _questions(v: Any) -> tuple[str, ...]:
    t = id(type(v))
    if t in TENSORS:
        return "shape", "kind", "value", "strides"
    if t in CONTAINERS:
        return "value", "length"
    return ("value",) if t in PLAIN else ("value", "identity")


def facts_of(fn: Callable, args: tuple, kwargs: dict) -> dict[Fact, Any]:
    """The facts of a call, as far as `DEPTH`, `WIDTH` and `FACTS` go.

    No code of the user's runs, and no argument is kept alive.
    """
    facts: dict[Fact, Any] = {}
    level: list[tuple[str, Any]] = [("args", args), ("kwargs", kwargs), ("fn", fn)]
    for _ in range(DEPTH + 1):
        below: list[tuple[str, Any]] = []
        for source, v in level:
            if len(facts) >= FACTS:
                return facts
            for question in _questions(v):
                facts[Fact(question, source)] = QUESTIONS[question](v)
            below += _parts(source, v)
        level = below
    return facts


# ----------------------------------------------------------------------------------------------------------------- tree


@dataclass(eq=False)
class _Known:
    """An entry, the facts of the call that it was compiled for, and those that it fits other calls without."""

    entry: CacheEntry
    facts: dict[Fact, Any]
    loose: set[Fact] = field(default_factory=set)

    def answer(self, fact: Fact) -> Any:
        return _answer(self.facts, fact)


class _Node:
    """A part of the tree: a leaf with entries, or a question with a node for each answer.

    rest: the node of the entries that are loose in the question.
    """

    __slots__ = ("entries", "known", "fact", "ask", "answers", "rest", "chosen_for", "depth")

    def __init__(self, depth: int = 0):
        self.depth = depth
        self.entries: list[CacheEntry] = []  # of a leaf; the last one that fitted a call comes first
        self.known: list[_Known] = []  # all under this node
        self.fact: Fact | None = None
        self.ask: Callable | None = None
        self.answers: dict[Any, _Node] = {}
        self.rest: _Node | None = None
        self.chosen_for = 0  # entries in `rest` when the question was chosen

    def likely(self, fn: Callable, args: tuple, kwargs: dict) -> list[CacheEntry]:
        """The entries that may fit a call, the most likely first. Another entry fits only if the index has to learn."""
        ask = self.ask  # another thread may choose anew meanwhile
        if ask is None:
            return self.entries
        node, rest = self.answers.get(ask(fn, args, kwargs)), self.rest
        if node is None:
            return _NONE if rest is None else rest.entries if rest.ask is None else rest.likely(fn, args, kwargs)
        entries = node.entries if node.ask is None else node.likely(fn, args, kwargs)
        return entries if rest is None else entries + rest.likely(fn, args, kwargs)

    def add(self, known: _Known) -> None:
        self.known.append(known)
        if self.fact is not None:
            self._below(known).add(known)
            return
        self.entries.insert(0, known.entry)
        if len(self.known) > 1 and self.depth < LEVELS:
            self._choose()

    def remove(self, known: _Known) -> None:
        """The entry is gone; answers that no other entry gives are forgotten."""
        self.known.remove(known)
        if self.fact is None:
            self.entries.remove(known.entry)
            return
        below = self._below(known)
        below.remove(known)
        if not below.known:  # answers that no entry gives are forgotten
            if below is self.rest:
                self.rest = None
            else:
                del self.answers[known.answer(self.fact)]

    def loosen(self, known: _Known, facts: dict[Fact, Any]) -> None:
        """The entry fits a call with these facts, which leads elsewhere."""
        if self.fact is None:
            return
        below = self._below(known)
        if self.fact in known.loose or known.answer(self.fact) == _answer(facts, self.fact):
            below.loosen(known, facts)
            return
        self.remove(known)
        known.loose.add(self.fact)
        self.add(known)
        below = self._below(known)
        if len(below.known) > max(LOOSE, 2 * self.chosen_for):
            self._choose()
        else:
            below.loosen(known, facts)

    def _below(self, known: _Known) -> _Node:
        """The node for an entry's answer to this node's question, made where there is none."""
        assert self.fact is not None, "a leaf has nothing below"
        if self.fact in known.loose:
            if self.rest is None:
                self.rest = _Node(self.depth + 1)
            return self.rest
        answer = known.answer(self.fact)
        child = self.answers.get(answer)
        if child is None:
            child = self.answers[answer] = _Node(self.depth + 1)
        return child

    def _choose(self) -> None:
        """Asks a question that divides the entries, where there is one, in the place of the question before."""
        self.ask, self.fact, self.answers, self.rest = None, None, {}, None
        newest = self.known[::-1]
        pairs = ((one, other) for i, one in enumerate(newest[:PAIRED]) for other in newest[i + 1 :])
        fact = next(filter(None, (self._telling(one, other) for one, other in pairs)), None)
        if fact is not None:
            self.fact = fact
            for known in self.known:
                self._below(known).add(known)
            self.chosen_for = len(self.rest.known) if self.rest is not None else 0
            self.ask, self.entries = _asking(fact), []
            return
        self.entries = [known.entry for known in sorted(self.known, key=lambda k: k.entry.used, reverse=True)]

    def _telling(self, a: _Known, b: _Known) -> Fact | None:
        """A fact in which two entries differ: one in which few are loose, of an early question, near the call."""
        differing = [
            f for f in {**a.facts, **b.facts} if f not in a.loose and f not in b.loose and a.answer(f) != b.answer(f)
        ]
        if not differing:
            return None
        return min(differing, key=lambda f: (sum(f in k.loose for k in self.known), _RANK[f.question], len(f.source)))

    def __str__(self) -> str:
        if self.fact is None:
            return f"{len(self.entries)} entries"
        below = [(repr(answer), node) for answer, node in self.answers.items()]
        below += [("any other", self.rest)] if self.rest is not None else []
        lines = [str(self.fact), *(f"{answer}: {node}" for answer, node in below)]
        return "\n".join(lines).replace("\n", "\n  ")


_NONE: list[CacheEntry] = []


def _answer(facts: dict[Fact, Any], fact: Fact) -> Any:
    """A fact of a call; where nothing is, the answer for None."""
    return facts[fact] if fact in facts else QUESTIONS[fact.question](None)


@functools.lru_cache(maxsize=1024)
def _asking(fact: Fact) -> Callable:
    """A function of a call, (fn, args, kwargs), that answers a question about it."""
    return eval(f"lambda fn, args, kwargs: {fact}", {**STEPS, **QUESTIONS})


class EntryTable:
    """The cache entries for calls in the same modes. tree: says which of them may fit a call."""

    __slots__ = ("tree", "_known")

    def __init__(self):
        self.tree = _Node()
        self._known: dict[CacheEntry, _Known] = {}

    def by_last_use(self) -> list[CacheEntry]:
        """All entries, the last one that ran first."""
        return sorted(self._known, key=lambda e: e.used, reverse=True)

    def add(self, entry: Any, facts: dict[Fact, Any]) -> None:
        """A new entry (or a refusal, which stands for one), compiled for a call with these facts."""
        known = self._known[entry] = _Known(entry, facts)
        self.tree.add(known)

    def remove(self, entry: Any) -> None:
        self.tree.remove(self._known.pop(entry))

    def learn(self, entry: CacheEntry, facts: dict[Fact, Any]) -> None:
        """A call with these facts was not likely to fit the entry, and did."""
        self.tree.loosen(self._known[entry], facts)
