"""World: the outside of a program, as a capture knows it: where values come from, and every answer that it got.

An object reachable from the call's arguments, from the function, its globals or closures has a source, in a table by
identity. `World.ask` asks about the value at a source and remembers the answer: a program depends on exactly these
answers, and its prologue asks for them again (`thunder.capture.ask` lists the questions).
"""

from __future__ import annotations

from typing import Any

import torch

from thunder import compat
from thunder.capture.ask import IDENTITY, PRESENT, VALUE, Question
from thunder.capture.sources import MISSING, Source
from thunder.interpreter.attributes import plain_attribute

_NEW = object()


class World:
    """The outside of one program. Everything that a table names by its id is kept alive until the capture is over.

    parameters: names of the function's positional parameters, for messages. sources: where objects stand, by id.
    origins: the same of values that are asked as a whole, and that leave the program as the values there. anew: ids of
    objects that are known by their structure (see `values`). constants: objects that generated code holds, by name;
    constant_sources: their sources, by id. values: what stands at a source. observed: the answers, by source, question
    and operand. settings: sources of settings of PyTorch that the program asked for.
    """

    __slots__ = (
        "parameters", "sources", "origins", "anew", "constants", "constant_sources", "values", "observed", "settings",
        "keep",
    )  # fmt: skip

    def __init__(self, parameters: tuple[str, ...] = ()):
        self.parameters = parameters
        self.sources: dict[int, Source] = {}
        self.origins: dict[int, Source] = {}
        self.anew: set[int] = set()
        self.constants: dict[str, Any] = {}
        self.constant_sources: dict[int, Source] = {}
        self.values: dict[Source, Any] = {}
        self.observed: dict[tuple[Source, Question, Any], Any] = {}
        self.settings: set[Source] = set()
        self.keep: dict[int, Any] = {}

    # --- where values come from
    def hold(self, value: Any) -> int:
        """The value stays, so that its id, which is returned, stays its own."""
        self.keep[id(value)] = value
        return id(value)

    def know(self, value: Any, source: Source) -> None:
        """The value stands at a source; the program depends on what it reads of it."""
        self.sources[self.hold(value)] = source

    def know_whole(self, value: Any, source: Source) -> None:
        """The value stands at a source, and leaves as the value there."""
        self.origins[self.hold(value)] = source

    def know_anew(self, value: Any) -> None:
        """Another object with the same structure will do in the place of the value."""
        self.anew.add(self.hold(value))

    def source_of(self, value: Any) -> Source | None:
        """Where an object stands that the program reads."""
        return self.sources.get(id(value))

    def const(self, value: Any, label: str = "") -> Source:
        """A source that is the object itself, pinned in the generated code."""
        known = self.constant_sources.get(id(value))
        if known is None:
            if id(value) in self.anew:
                self.ask(self.sources[id(value)], IDENTITY)
            name = f"K{len(self.constants)}"
            self.pin(name, value)
            text = label or plain_attribute(value, "__name__", type(value).__name__)
            known = self.constant_sources[self.hold(value)] = Source(None, "const", name, text)
        return known

    def pin(self, name: str, value: Any) -> None:
        """Generated code holds an object under this name."""
        self.constants[name] = value

    def describe(self, source: Source) -> str:
        """A source in words, as messages say it."""
        return source.describe(self.parameters)

    # --- what stands there
    def note(self, source: Source, value: Any) -> None:
        """This value stands at a source."""
        self.values[source] = value

    def value_at(self, source: Source) -> Any:
        """The value at a source; MISSING where there is none. Only `ask` and `reach` may look at it."""
        value = self.values.get(source, _NEW)
        if value is _NEW:
            if source.base is None:
                value = self.constants[source.key]
            else:
                with compat.DisableTorchFunction():
                    value = source.fetch(self.value_at(source.base), self.values)
            self.values[source] = value
        return value

    def is_there(self, source: Source) -> bool:
        """Whether something stands at a source. Where nothing does, that is asked."""
        return self.value_at(source) is not MISSING or self.ask(source, PRESENT)

    # --- questions
    def ask(self, source: Source, question: Question, operand: Any = None) -> Any:
        """The answer to a question about the value at a source, which the prologue asks again. The operand may be
        another source."""
        key = source, question, operand
        answer = self.observed.get(key, _NEW)
        if answer is _NEW:
            other = self.value_at(operand) if type(operand) is Source else operand
            value = self.value_at(source)
            if issubclass(type(value), torch.Tensor):
                with compat.DisableTorchFunction():  # the question is no operation of the program
                    answer = question.ask(value, other)
            else:
                answer = question.ask(value, other)
            self.observed[key] = answer
        return answer

    def answer(self, source: Source, question: Question, operand: Any, answer: Any) -> None:
        """A question was answered elsewhere."""
        self.observed[source, question, operand] = answer

    def ask_setting(self, source: Source, answer: Any) -> None:
        """The program depends on a setting of PyTorch's at a source."""
        self.settings.add(source)
        self.note(source, answer)
        self.ask(source, VALUE)
