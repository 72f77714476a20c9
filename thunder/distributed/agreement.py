"""Do all ranks have the same module, and run the same collectives? Asked when it is prepared, and when a program is
compiled: ranks that differ would wait for each other.

Each rank writes down which collectives its program has, in order, for every group, and looks whether the other ranks of
the group have a program with the same ones: from an earlier compilation, or one that goes on now. Ranks whose inputs
have other shapes may compile at other times, as long as what they communicate is the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist

from thunder import compat
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.errors import CollectiveError
from thunder.ops.families.lost_ranks import introduce

LONGEST = 120.0  # seconds to wait for ranks that compile later; the group's own timeout where that is shorter
_WORDS = {
    "collective": (
        "run different programs", "compile a program with the same collectives", "compiled no program",
        "run the same collectives in the same order: look for code or shapes of parameters that depend on the rank, "
        "and for calls that only some ranks make",
    ),
    "parameter": (
        "prepare different modules", "prepare a module with the same parameters", "prepared no module",
        "prepare the same module: look for sizes and types that depend on the rank",
    ),
}  # fmt: skip
_HAS, _WAITS, _LAST = "thunder program {} {} {}", "thunder waits {} {}", "thunder last program {} {}"
_PREPARES = "thunder prepares {} {} {}"
_prepared: dict[str, int] = {}  # by the name of a group: how many modules this rank prepared


def check_agreement(traces: Sequence[Trace]) -> None:
    """Waits until all ranks of each group that the traces communicate in have a program with the same collectives.

    Raises CollectiveError, on all ranks that wait, where one has others, and where one has none within two minutes or
    the group's timeout.
    """
    programs: dict = {}
    for trace in traces:
        for operation in trace.bound_symbols:
            group = next((a for a in operation.args if isinstance(a, dist.ProcessGroup)), None)
            if group is not None:
                programs.setdefault(group, []).append(_said(operation))
    if programs:
        introduce()
    for group, lines in programs.items():
        _agree(group, lines)


def check_same_module(groups: Sequence, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Waits until all ranks of each group prepare a module, and that has the same parameters and buffers. Raises
    CollectiveError as `check_agreement` does.

    Ranks prepare modules together, one after another: the first of a rank is held against the first of the others.
    """
    lines = [f"{name} of {str(t.dtype)[6:]}{list(t.shape)}" for name, t in named]
    store, me = compat.default_store(), dist.get_rank()
    for group in groups:
        name, until = group.group_name, _deadline(group)
        number = _prepared[name] = _prepared.get(name, 0) + 1
        text = "\n".join(lines)
        store.set(_PREPARES.format(name, me, number), text)
        for r in dist.get_process_group_ranks(group):
            key, pause = _PREPARES.format(name, r, number), 0.001
            while not (late := time.monotonic() > until) and not store.check([key]):
                time.sleep(pause)
                pause = min(0.05, pause * 2)
            theirs = None if late else store.get(key).decode()
            if theirs != text:
                raise CollectiveError(_difference(name, me, lines, "parameter", r, theirs and theirs.split("\n"), late))


def _said(operation: BoundSymbol) -> str:
    """A collective as ranks have to agree on it."""
    tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
    rest = [repr(a) for a in operation.args if isinstance(a, (str, int, bool)) or a is None]
    name = (operation.subsymbols[0] if operation.subsymbols else operation).sym.name  # not that of who carries it out
    return f"{name} of {', '.join(f'{p.dtype.shortname}{list(p.shape)}' for p in tensors)}" + (
        f" ({', '.join(rest)})" if rest else ""
    )


def _deadline(group) -> float:
    return time.monotonic() + min(LONGEST, compat.timeout_of(group))


def _agree(group, lines: list[str]) -> None:
    store, me, name = compat.default_store(), dist.get_rank(), group.group_name
    text = "\n".join(lines)
    digest = _digest(text)
    store.set(_LAST.format(name, me), text)
    store.set(_HAS.format(name, me, digest), "")
    store.set(_WAITS.format(name, me), digest)
    missing = [r for r in dist.get_process_group_ranks(group) if r != me]
    until = _deadline(group)
    pause = 0.001
    while missing := [r for r in missing if not store.check([_HAS.format(name, r, digest)])]:
        late = time.monotonic() > until
        for r in missing:
            key = _WAITS.format(name, r)
            theirs = store.get(key).decode() if store.check([key]) else ""
            # what this rank had, it will find
            other = (
                theirs not in ("", digest)
                and not theirs.startswith("not ")
                and not store.check([_HAS.format(name, me, theirs)])
            )
            if late or other or theirs == f"not {digest}":
                # that it has to give up as well, if it comes with that again
                store.set(_WAITS.format(name, me), f"not {theirs if other else _last_digest(store, name, r)}")
                last = (
                    store.get(_LAST.format(name, r)).decode().split("\n")
                    if store.check([_LAST.format(name, r)])
                    else None
                )
                raise CollectiveError(_difference(name, me, lines, "collective", r, last, late))
        time.sleep(pause)
        pause = min(0.05, pause * 2)
    store.set(_WAITS.format(name, me), "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _last_digest(store, name: str, rank: int) -> str:
    key = _LAST.format(name, rank)
    return _digest(store.get(key).decode()) if store.check([key]) else ""


def _difference(
    name: str, me: int, lines: list[str], kind: str, other: int, theirs: Sequence[str] | None, late: bool
) -> str:
    do_differently, do_alike, did_nothing, remedy = _WORDS[kind]
    pairs = enumerate(zip_longest(lines, theirs or [], fillvalue="none"))
    place, (mine, its) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, ("", "")))
    what = f"{kind} {place + 1} of {len(lines)} is {mine} on rank {me} and {its} on rank {other}"
    if late:
        what = (
            f"rank {other} did not {do_alike} in time; in its last one, {what}"
            if theirs
            else f"rank {other} {did_nothing} in time"
        )
    return f"ranks of the group {name} {do_differently}: {what}.\nEvery rank has to {remedy}."
