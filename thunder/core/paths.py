"""Paths: data-dependent decisions of a program are taken at capture, and checked when it runs.

Capture computes the answer of a decision for its inputs, continues with that answer, and records a check of it:

    t0 = ltorch.sum(x)
    v0 = ltorch.item(t0)
    v0 > 0 or check_decision(v0, '>', 0, True, 0)

So a program is one path through the user's function. A check that finds another answer raises `OtherPath`. Until then
there were no effects that the user could see, and the program of the other path runs instead (`thunder.compiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from thunder.core.proxies import RELATIONS
from thunder.core.regions import leading_to
from thunder.core.symbol import BoundSymbol, OpTags, Symbol, primitive


class Decision(NamedTuple):
    """question: in words. answer: True, False or a number. where: (filename, line, function, source line) of the user's
    code, or None."""

    question: str
    answer: Any
    where: tuple | None


class OtherPath(Exception):
    """Raised where a decision has another answer. index: the number of the decision. answer: the new answer. log: the
    results of host calls before it (`thunder.core.host_calls`)."""

    log: Any = None

    def __init__(self, index: int, answer: Any):
        super().__init__(f"decision {index} is {answer!r}")
        self.index, self.answer = index, answer


_TAGS = (OpTags.DONT_DCE, OpTags.DECISION)


@primitive(lambda a, relation, b, answer, index: None, tags=_TAGS)
def check_decision(a, relation: str, b, answer: bool, index: int) -> None:
    if RELATIONS[relation](a, b) is not answer:
        raise OtherPath(index, not answer)


def _other_answer(operation: BoundSymbol, printer: Any) -> str:
    a, relation, b, answer, _ = operation.args
    return f"{printer.value(a)} {relation} {printer.value(b)} {'or' if answer else 'and'}"


check_decision.condition = _other_answer


@primitive(lambda value, answer, index: None, tags=_TAGS)
def check_value(value, answer, index: int) -> None:
    if repr(value) != repr(answer):  # nan is nan, and 0.0 is not -0.0
        raise OtherPath(index, value)


_SYMBOLS = {check_decision, check_value}


def _symbols(operation: BoundSymbol) -> tuple[Symbol, ...]:
    """The symbol of an operation, and the one that it had before an executor took it."""
    return operation.sym, *(b.sym for b in operation.subsymbols[:1])


def decided_first(operations: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """The operations with each decision, and what it depends on, as early as effects allow. So a decision by a mask
    parts no operations that fuse, and a GPU waits for no more than the mask.

    Before: `t0 = ltorch.exp(x)`, `v0 = ltorch.item(y)`, `v0 > 0 or check_decision(...)`, `t1 = ltorch.exp(t0)`. After:
    `v0`, its check, `t0`, `t1`.
    """
    ordered, waiting = list[BoundSymbol](), list[BoundSymbol]()  # waiting: since the last effect
    for operation in operations:
        if OpTags.DECISION in operation.sym.tags and not _SYMBOLS.isdisjoint(_symbols(operation)):
            first = leading_to(waiting, operation.inputs)
            ordered += [*first, operation]
            moved = set(map(id, first))
            waiting = [other for other in waiting if id(other) not in moved]
        elif OpTags.DONT_DCE in operation.sym.tags:
            ordered += [*waiting, operation]
            waiting = []
        else:
            waiting.append(operation)
    return ordered + waiting


def last_decision(bound_symbols: list[BoundSymbol]) -> int:
    """The place of the last check of a decision, -1 where there is none. No argument is written to before it."""
    return max((i for i, b in enumerate(bound_symbols) if OpTags.DECISION in b.sym.tags), default=-1)
