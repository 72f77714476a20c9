"""Who is missing when a collective fails: ranks tell each other, through the store of the process group, what they are
at.

The backend knows that a connection was lost, or that nothing came within the group's timeout. Which rank it was is told
by who does not answer: each rank that fails says at which collective, and reads what the others say. A rank of the same
host whose process is gone has ended; any other one that says nothing hangs, or is at something else.
"""

from __future__ import annotations

import os
import socket
import time

import torch.distributed as dist

from thunder import compat
from thunder.errors import CollectiveError

ANSWER = 5.0  # seconds in which other ranks that fail say so
_PROCESS, _FAILED = "thunder process {}", "thunder failed {}"


def introduce() -> None:
    """Says where this rank's process runs."""
    compat.default_store().set(_PROCESS.format(dist.get_rank()), f"{socket.gethostname()} {os.getpid()}")


def failed(error: RuntimeError, what: str, group) -> CollectiveError:
    """The error of a collective `what` that the backend gave up with `error`."""
    me = dist.get_rank()
    others = [r for r in dist.get_process_group_ranks(group) if r != me]
    try:
        said = _answers(me, what, others)
        reasons = [_reason(r) for r in others if r not in said]
        # who waits for the one that ended does not answer either
        reasons = [r for r in reasons if "ended" in r] or reasons
        reasons = reasons or [f"rank {r} failed in {at}" for r, at in said.items()]
    except (RuntimeError, OSError):
        reasons = [
            "the store of the process group does not answer either: the process that holds it has ended (rank 0, or "
            "the launcher)"
        ]
    return CollectiveError(
        f"{what} of the group {group.group_name} of {len(others) + 1} ranks failed on rank {me}: "
        f"{'; '.join(reasons) or 'no other rank takes part'}.\n"
        f"The backend says: {error}\nStart the program again from the last checkpoint; a rank's own output says why "
        "it ended."
    )


def _answers(me: int, what: str, others: list[int]) -> dict[int, str]:
    """What other ranks that failed were at."""
    store, said = compat.default_store(), {}
    store.set(_FAILED.format(me), what)
    until = time.monotonic() + ANSWER
    while True:
        for r in others:
            if r not in said and store.check([_FAILED.format(r)]):
                said[r] = store.get(_FAILED.format(r)).decode()
        if len(said) == len(others) or any(_ended(r) for r in others) or time.monotonic() > until:
            return said
        time.sleep(0.05)


def _reason(rank: int) -> str:
    return f"rank {rank} has ended" if _ended(rank) else f"rank {rank} says nothing: it hangs, or is at something else"


def _ended(rank: int) -> bool:
    """Whether the process of a rank of this host is gone."""
    key = _PROCESS.format(rank)
    store = compat.default_store()
    if not store.check([key]):
        return False
    host, number = store.get(key).decode().rsplit(" ", 1)
    if host != socket.gethostname():
        return False
    try:
        os.kill(int(number), 0)
        # on Linux: who is gone but not yet asked for its exit status
        with open(f"/proc/{number}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:
        return False
