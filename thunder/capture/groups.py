"""Which facts a prologue checks together.

Attributes of objects that stay (modules of the compiled one, globals, classes) are checked in one pass for each way to
look; entries of one container, at once. Facts that others imply are left out. The others are checked one by one, in the
order in which they were asked.
"""

from __future__ import annotations

import collections
import types
from typing import Any

from thunder.capture.world import (
    HOOKED,
    IDENTITY,
    KEYS,
    MISSING,
    PRESENT,
    SAME,
    TYPE,
    VALUE,
    Question,
    Source,
    World,
    same_value,
)

DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
TABLES = (dict, collections.OrderedDict, types.MappingProxyType)  # whose items no code of the user's answers


class Groups:
    """The answers of a capture, sorted. A row is (container, key, expected, source, question).

    entries, absent, attributes, types: rows of objects that stay. hooked: sources of tensors that must have no hooks.
    single: (source, question, operand, answer), or (container, None, rows, None) for rows of one container that is
    known only when the prologue runs, in the place of the first of them. apart: groups of objects that are different
    ones, where the program compared more pairs of them than there are objects.
    """

    def __init__(self, writer):
        self.writer, self.capture = writer, writer.capture
        self.entries: list[tuple] = []
        self.absent: list[tuple] = []
        self.attributes: list[tuple] = []
        self.types: list[tuple] = []
        self.hooked: list[Source] = []
        self.single: list[tuple] = []
        self._held: dict[Source, list] = {}
        changed = settings_changed(self.capture.world)
        self.apart = _groups_apart(self.capture.world.observed)
        told = {source for group in self.apart for source in group}
        for (source, question, operand), want in self.capture.world.observed.items():
            if source in changed or self._is_implied(source, question, want):
                continue
            if question is SAME and want is False and source in told:
                continue
            if operand is not None or not self._is_grouped(source, question, want):
                self.single.append((source, question, operand, want))

    def _is_implied(self, source: Source, question: Question, want) -> bool:
        """Whether another fact says this one."""
        observed = self.capture.world.observed
        if question is IDENTITY:
            return source.step == "const"
        if question is not PRESENT:
            return False
        if want and any(observed.get((source, q, None), MISSING) is not MISSING for q in (TYPE, VALUE, IDENTITY)):
            return True
        return source.step == "item" and (source.base, KEYS, None) in observed

    def _is_grouped(self, source: Source, question: Question, want) -> bool:
        """Puts a fact into its group; False where it has none."""
        capture, writer, step = self.capture, self.writer, source.step
        if question is TYPE:
            constants, pinned = capture.world.constants, capture.outside.pinned
            stays = constants[source.key] if step == "const" else pinned.get(source, MISSING)
            return stays is not MISSING and _add(self.types, stays, None, want, source, question)
        if question is HOOKED:
            self.hooked.append(source)
            return True
        if question is PRESENT:
            if want:
                return False
            rows, want = self.absent, MISSING
        elif question is VALUE or question is IDENTITY and not writer.is_weak(want):
            rows = self.entries
            if question is IDENTITY and step in ("attr", "cell") and source.base.step == "const":
                owner, name = capture.world.constants[source.base.key], source.key
                if step == "cell":
                    owner, name = owner.__closure__[name], "cell_contents"
                return _add(self.attributes, owner, name, want, source, question)
        else:
            return False
        table = writer.table(source)
        if type(table) in TABLES and (source.key in table) is (want is not MISSING):
            return _add(rows, table, source.key, want, source, question)
        container = self._container(source, question)
        if container is None:
            return False
        if container not in self._held:
            self._held[container] = []
            self.single.append((container, None, self._held[container], None))
        return _add(self._held[container], None, source.key, want, source, question)

    def _container(self, source: Source, question: Question) -> Source | None:
        """The source of the dict that holds the value at a source: a plain one, or the `__dict__` of an object."""
        base = source.base
        if source.step == "attr" and self.writer.in_dict(source):
            return base.attr("__dict__")
        if source.step != "item":
            return None
        if base.step == "attr" and base.key == "__dict__":
            return base
        # values are compared one by one: those in a dict that is made for each call are rarely the same objects
        return base if question is not VALUE and self.writer.type_of(base) in DICTS else None


def _groups_apart(observed: dict[tuple, Any]) -> list[list[Source]]:
    """The objects of each group in which the program compared more pairs than there are objects, and no pair was one
    object. One guard for all is linear; it is stronger than those of the pairs where not all were compared."""
    beside: dict[Source, list[Source]] = collections.defaultdict(list)
    for (a, question, b), want in observed.items():
        if question is SAME and want is False:
            beside[a].append(b)
            beside[b].append(a)
    groups, seen = [], set[Source]()
    for source in beside:
        if source in seen:
            continue
        group, pending = [], collections.deque([source])
        while pending:
            if (one := pending.popleft()) not in seen:
                seen.add(one)
                group.append(one)
                pending += beside[one]
        if sum(len(beside[one]) for one in group) > 2 * len(group):
            groups.append(group)
    return groups


def settings_changed(world: World) -> set[Source]:
    """PyTorch's settings that the program changed itself after it asked for them: the next call finds the same
    as this one."""
    sources = set()
    for source, question, _ in world.observed:
        if source in world.settings and question is VALUE and source.base is not None:
            now = source.fetch(world.value_at(source.base), world.values)
            if not same_value(now, world.values[source]):
                sources.add(source)
    return sources


def _add(rows: list, *row) -> bool:
    rows.append(row)
    return True
