"""Effects: the program's writes to the outside, which its epilogue carries out at the end of each call.

While a program is captured they are kept here: the program reads what it has written, and others see none of it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from thunder.capture.world import Source
from thunder.interpreter import NULL


class _Deleted:
    """The value of an attribute or name that the program has deleted."""


DELETED = _Deleted()


class Effect(NamedTuple):
    """A write. kind: attr, entry (of the `__dict__`), delattr, cell, global, grad, data or context."""

    kind: str
    owner: Any
    name: str | None
    value: Any


class Effects:
    """The values that the program has written, by owner and name; a cell and a context variable have the name None.

    held: these values, by the id of the owner and the name, to be read only.
    """

    def __init__(self):
        self._values: dict[tuple[int, Any], Any] = {}
        self.held: Mapping[tuple[int, Any], Any] = MappingProxyType(self._values)
        self._targets: dict[tuple[int, Any], tuple[str, Any, Any]] = {}  # (kind, owner, name) of what is carried out
        # by the sources of what is written to, the values; None where they are not known
        self.places: dict[Source, Any] = {}
        # of context variables that the program has set: the token of its first `set`
        self._tokens: dict[contextvars.ContextVar, contextvars.Token] = {}
        self.settings: Mapping[str, Any] = {}  # settings of PyTorch's that stay in force

    # --- what the program reads
    def __bool__(self) -> bool:
        return bool(self._values)

    def __iter__(self) -> Iterator[Effect]:
        """The writes to carry out."""
        return (Effect(*target, self._values[key]) for key, target in self._targets.items())

    def value(self, owner: Any, name: str | None, default: Any = NULL) -> Any:
        """What the program has written there: a value or DELETED; `default` where it has written nothing."""
        return self._values.get((id(owner), name), default) if self._values else default

    def names(self, owner: Any) -> list[Any]:
        """The names under which the program has written to an object."""
        return [name for i, name in self._values if i == id(owner)]

    @property
    def is_carried_out(self) -> bool:
        """Whether there is a write for the epilogue."""
        return bool(self._targets)

    # --- what the program writes
    def hold(self, owner: Any, name: str | None, value: Any) -> None:
        """The program reads this value there; nothing is carried out."""
        self._values[id(owner), name] = value

    def write(self, kind: str, owner: Any, name: str | None, value: Any) -> None:
        """The program writes a value, DELETED to delete one."""
        self._values[id(owner), name] = value
        self._targets[id(owner), name] = kind, owner, name

    def write_to_tensor(self, tensor: Any, proxy: Any, name: str, value: Any) -> None:
        """The program writes to a tensor from outside, through the first of its proxies that it has written to."""
        self._values[id(tensor), name] = value
        self._targets.setdefault((id(tensor), name), (name, proxy, name))

    def drop(self, owner: Any, name: str) -> None:
        """The program deletes what it has written."""
        del self._values[id(owner), name], self._targets[id(owner), name]

    def note(self, places: Mapping[Source, Any]) -> None:
        """The program changes what stands at these sources."""
        self.places |= places

    # --- context variables
    def token(self, variable: contextvars.ContextVar) -> contextvars.Token | None:
        """The token of the program's first `set` of a context variable."""
        return self._tokens.get(variable)

    def note_token(self, variable: contextvars.ContextVar, token: contextvars.Token | None) -> None:
        """The program sets a variable, or (None) resets it to what it was."""
        if token is None:
            del self._tokens[variable]
        else:
            self._tokens.setdefault(variable, token)

    def restore_variables(self) -> list[contextvars.ContextVar]:
        """Gives the context variables that the program leaves set their values from before, and returns them."""
        variables = list(self._tokens)
        for variable, token in self._tokens.items():
            self.write("context", variable, None, variable.get())
            variable.reset(token)
        self._tokens = {}
        return variables
