"""Do all ranks have the same module, and run the same collectives? Checked when a module is prepared, and when a
program is compiled: ranks that differ would wait for each other.

Each rank says what it has: the parameters of the module, or the collectives of its program in order, for every group.
It goes on when every rank of the group has said the same, now or at an earlier compilation: ranks whose inputs have
other shapes may compile at other times, as long as what they communicate is the same.

Ranks do not read what every other rank says. They are counted in the store of the process group, by a tree with 64
branches at each node; the last one publishes that all agree, and the others wait for that. The first rank that says
something writes it down, and compares it with what others are waiting for at that time: who waits for another text has
not said this one, so that neither would end. So a rank asks the store about log64(N) + 3 times, and N ranks together
read no text more than once each, and only where they differ.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from thunder import compat
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import Trace
from thunder.errors import CollectiveError
from thunder.ops.families.lost_ranks import introduce

LONGEST = 120.0  # seconds to wait for ranks that compile later; the group's own timeout where that is shorter
BRANCHES = 64
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
_AGREED, _SILENT = "agreed", "silent"


def check_agreement(traces: Sequence[Trace]) -> None:
    """Waits until all ranks of each group that the traces communicate in have a program with the same collectives.

    Raises CollectiveError, on all ranks that wait, where one has others, and where one has none within two minutes or
    the group's timeout.
    """
    agree(collectives_of(traces))


def agree(collectives: Sequence[tuple[Any, str, str]]) -> None:
    """Waits until all ranks of each group have the same collectives (see `collectives_of`, `check_agreement`)."""
    programs: dict = {}
    for group, said, where in collectives:
        programs.setdefault(group, []).append((said, where))
    if programs:
        introduce()
    for group, said in programs.items():
        lines, places = zip(*said, strict=True)
        ballot_of(group, "collective").agree(lines, _patience(group), places)


def collectives_of(traces: Sequence[Trace]) -> list[tuple[Any, str, str]]:
    """The collectives of programs in order: the group, as ranks have to agree on it, and its place in the user's
    code."""
    collectives = []
    for trace in traces:
        parameters = _of_parameters(trace)
        for operation in trace.bound_symbols:
            group = next((a for a in operation.args if isinstance(a, dist.ProcessGroup)), None)
            if group is not None:
                where = getattr(operation.location, "short", "")
                collectives.append((group, _said(operation, parameters), where))
    return collectives


def check_same_module(groups: Sequence, how: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Waits until all ranks of each group prepare a module, in the same way (`how`), and that has the same parameters
    and buffers. Raises CollectiveError as `check_agreement` does.

    Ranks prepare modules together, one after another: the first of a rank is held against the first of the others.
    """
    is_trained = lambda t: t.requires_grad or not isinstance(t, torch.nn.Parameter)  # noqa: E731
    lines = [f"{n} of {str(t.dtype)[6:]}{list(t.shape)}{'' if is_trained(t) else ', frozen'}" for n, t in named]
    lines = [how, *lines]
    for group in groups:
        ballot = ballot_of(group, "parameter")
        ballot.number += 1
        ballot.agree(lines, _patience(group))


def _of_parameters(trace: Trace) -> dict[Proxy, str]:
    """By value that is computed of a parameter alone, or that a gradient is computed of alone, the name of that: other
    ranks communicate the same one."""
    names: dict[Proxy, str] = {
        a: a.name for a in trace.args if isinstance(a, Proxy) and a.name.endswith(("_shard", "_local"))
    }
    for b in trace.bound_symbols:
        named = {names.get(p) for p in b.inputs}
        if len(named) == 1 and None not in named:
            names |= dict.fromkeys(b.outputs, named.pop())
    gradients = trace.info.cotangents
    ends = {o: gradients[o.name] for o in trace.output_proxies if o.name in gradients}
    for b in reversed(trace.bound_symbols):
        if len(b.outputs) == 1 and b.outputs[0] in ends and len(b.inputs) == 1:
            ends.setdefault(b.inputs[0], ends[b.outputs[0]])
    return {**ends, **names}


def _said(operation: BoundSymbol, parameters: dict[Proxy, str]) -> str:
    """A collective as ranks have to agree on it."""
    tensors = [p for p in operation.inputs if isinstance(p, TensorProxy)]
    names = [parameters[p] for p in (*operation.inputs, *operation.outputs) if p in parameters]
    rest = [repr(a) for a in operation.args if isinstance(a, (str, int, bool)) or a is None]
    name = (operation.subsymbols[0] if operation.subsymbols else operation).sym.name  # not that of who carries it out
    return (
        f"{name} of {', '.join(f'{p.dtype.shortname}{list(p.shape)}' for p in tensors)}"
        + (f" ({', '.join(rest)})" if rest else "")
        + (f" for {', '.join(dict.fromkeys(names))}" if names else "")
    )


def _patience(group) -> float:
    return min(LONGEST, compat.timeout_of(group))


_ballots: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def ballot_of(group, kind: str) -> Ballot:
    """Where the ranks of a group say what they have."""
    ballots = _ballots.setdefault(group, {})
    if kind not in ballots:
        ranks = dist.get_process_group_ranks(group)
        ballots[kind] = Ballot(compat.default_store(), group.group_name, kind, ranks, dist.get_rank())
    return ballots[kind]


@dataclass(eq=False)
class Ballot:
    """One rank's view of what the ranks of a group say. kind: "collective" or "parameter". number: of the module that
    is prepared, so that equal modules are told apart; 0 for programs, which agree with earlier ones. said: the digests
    of this rank's texts. settled: so many of the first texts are decided."""

    store: Any
    name: str
    kind: str
    ranks: list[int]
    me: int
    number: int = 0
    said: set[str] = field(default_factory=set)
    settled: int = 0

    def agree(self, lines: Sequence[str], patience: float, places: Sequence[str] = ()) -> None:
        """Waits until every rank has said these lines. places: where the lines are in this rank's code. Raises
        CollectiveError where one waits for others, and where one says nothing within `patience` seconds."""
        digest = self.say(lines)
        outcome = self._outcome(digest, patience) or self._decide(digest, f"{self._silent(digest)} {_SILENT}")
        if outcome == _AGREED:
            return
        rank, other = outcome.split()
        late, last = other == _SILENT, self._key("last", rank)
        if late:
            other = self.store.get(last).decode() if self.store.check([last]) else None
        raise CollectiveError(self._difference(lines, int(rank), other and self._text(other), late, places))

    def say(self, lines: Sequence[str]) -> str:
        """Counts this rank among those that say these lines. Returns their digest."""
        text = "\n".join(lines)
        digest = hashlib.sha256(f"{self.number}\n{text}".encode()).hexdigest()
        self.store.set(self._key("last", self.me), digest)
        if digest in self.said:
            return digest
        self.said.add(digest)
        count = 0
        for node in self._way(self.ranks.index(self.me)):  # to the root, whose count is that of all
            count = self.store.add(self._key(digest, node), 1)
        if count == 1:
            self.store.set(self._key("text", digest), text)
        if count == len(self.ranks):
            self.store.set(self._key("outcome", digest), _AGREED)
        elif count == 1:
            self._compare(digest)
        return digest

    def _compare(self, digest: str) -> None:
        """Writes down what this rank says first, and ends the wait of those that wait for something else."""
        count = self.store.add(self._key("texts"), 1)
        self.store.set(self._key("texts", count), f"{self.me} {digest}")
        waiting = []
        for i in range(self.settled + 1, count):
            rank, other = self.store.get(self._key("texts", i)).decode().split()
            if not self.store.check([self._key("outcome", other)]):
                waiting.append((rank, other))
            elif i == self.settled + 1:
                self.settled = i
        # this rank's own first: who reads the others' goes on. Where all have agreed, others wait for the next
        if waiting and self._decide(digest, " ".join(waiting[0])) == _AGREED:
            return
        for _, other in waiting:
            self._decide(other, f"{self.me} {digest}")

    def _decide(self, digest: str, outcome: str) -> str:
        """Ends the wait of those that say a text, where nothing is decided yet. Returns what is."""
        return self.store.compare_set(self._key("outcome", digest), "", outcome).decode()

    def _outcome(self, digest: str, patience: float) -> str | None:
        """What is decided about a text: that all agree, or "rank digest" of a rank that says something else, or
        that says nothing; None where nothing is decided in time."""
        key, until = self._key("outcome", digest), time.monotonic() + patience
        while not self.store.check([key]):
            left = until - time.monotonic()
            if left <= 0:
                return None
            try:  # in pieces: other threads use the store as well
                self.store.wait([key], timedelta(seconds=min(left, 0.5)))
            except RuntimeError:
                continue
        return self.store.get(key).decode()

    def _way(self, index: int) -> Iterator[str]:
        """The nodes of the tree from a rank's leaf to the root."""
        width, level = len(self.ranks), 0
        yield f"0/{index}"
        while width > 1:
            index, width, level = index // BRANCHES, -(-width // BRANCHES), level + 1
            yield f"{level}/{index}"

    def _silent(self, digest: str) -> int:
        """The first rank that does not say a text."""
        level, index = len(list(self._way(0))) - 1, 0
        while level:
            level, first = level - 1, index * BRANCHES
            below = BRANCHES**level  # ranks of a node
            nodes = range(first, min(first + BRANCHES, -(-len(self.ranks) // below)))
            index = next((i for i in nodes if not self._is_full(digest, level, i, below)), nodes[-1])
        return self.ranks[index]

    def _is_full(self, digest: str, level: int, index: int, below: int) -> bool:
        wanted = min(below, len(self.ranks) - index * below)
        return self.store.add(self._key(digest, f"{level}/{index}"), 0) == wanted

    def _text(self, digest: str) -> list[str]:
        return self.store.get(self._key("text", digest)).decode().split("\n")

    def _key(self, *parts: Any) -> str:
        return " ".join(("thunder", self.kind, self.name, *map(str, parts)))

    def _difference(
        self, lines: Sequence[str], other: int, theirs: Sequence[str] | None, late: bool, places: Sequence[str]
    ) -> str:
        """The words of a mistake: the first line in which two ranks differ, what each has there, and the remedy. late:
        the other rank did not take part in time. places: the user's lines."""
        do_differently, do_alike, did_nothing, remedy = _WORDS[self.kind]
        pairs = enumerate(zip_longest(lines, theirs or [], fillvalue="none"))
        at, (mine, its) = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (0, ("", "")))
        number, count = (at, len(lines) - 1) if self.kind == "parameter" else (at + 1, len(lines))
        which = f"{self.kind} {number} of {count}" if number else "the call"
        what = f"{which} is {mine} on rank {self.me} and {its} on rank {other}"
        if late:
            what = (
                f"rank {other} did not {do_alike} in time; in its last one, {what}"
                if theirs
                else f"rank {other} {did_nothing} in time"
            )
        where = places[min(at, len(places) - 1)] if places else ""
        what += f".\nOn rank {self.me} that is for {where}" if where else ""
        return f"ranks of the group {self.name} {do_differently}: {what}.\nEvery rank has to {remedy}."
