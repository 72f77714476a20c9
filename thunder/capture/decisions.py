"""Decisions by data: which way the captured call goes, and what checks that at run time.

What a decision depends on is computed from the inputs of the call that is captured, as a slice of what was recorded so
far. The answer says which path is captured; `thunder.core.paths` checks it at each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from thunder import compat
from thunder.core.paths import Decision, check_decision, check_value
from thunder.core.proxies import AnyProxy, Condition, NumberProxy, Proxy, TensorProxy, map_structure
from thunder.core.symbol import BoundSymbol, OpTags, current_recorder
from thunder.core.symbolic import RELATIONS
from thunder.executors.torchex import no_autocast
from thunder.ops.explain import as_torch
from thunder.options import RNG_OPTIONS

__all__ = ["Path"]


class Path:
    """The decisions of one capture, in order. It is the recorder's `decide`.

    expected: the decisions of a program that a call has left at the last of them: they are answered as there.
    """

    def __init__(self, c, expected: tuple[Decision, ...] = ()):
        self.c, self.expected = c, expected
        self.taken: list[Decision] = []
        self._values = _Values(c)

    def truth(self, condition: Condition) -> bool | None:
        """Whether the program goes on as where the condition holds. None where that cannot be decided now."""
        if not self._may_decide():
            return None
        a, relation, b = condition.a, condition.relation, condition.b
        where = self.c.user_location()
        answer = self._expected(condition.text(), where)
        if answer is None:
            answer = RELATIONS[relation](self._values.number(a), self._values.number(b))
        self._take(check_decision, (a, relation, b, answer), Decision(condition.text(), answer, where))
        condition.assume(answer)
        return answer

    def value(self, number: NumberProxy) -> int | float | None:
        """The number that the program goes on with. None where that cannot be decided now."""
        if not self._may_decide():
            return None
        where, question = self.c.user_location(), f"the value of {number.expression}"
        answer = self._expected(question, where)
        if answer is None:
            answer = self._values.number(number)
        self._take(check_value, (number, answer), Decision(question, answer, where))
        if number.python_type is int:
            Condition(number, "==", answer, number.unbacked).assume()
        return answer

    def _take(self, check, args: tuple, decision: Decision) -> None:
        check.record(self.c.recorder, (*args, len(self.taken)), {}, None)
        self.taken.append(decision)

    def _expected(self, question: str, where: tuple | None):
        if len(self.taken) >= len(self.expected):
            return None
        known = self.expected[len(self.taken)]
        if known.question == question and known.where == where:
            return known.answer
        self.expected = ()  # another program than the one that was left
        return None

    def _may_decide(self) -> bool:
        c = self.c
        if (
            current_recorder() is not c.recorder
            or c.outer_recorders
            or c.recorder.typing
            or c.options.device is not None
        ):
            return False
        # libraries have a way without values, which is tried first
        if c.asked_whether_compiling and not c.compiling:
            return False
        # ranks would have to decide together
        return not c.placements and not compat.distributed_is_used()


class _Values:
    """Values of what a capture has recorded, computed when they are asked for, each once."""

    def __init__(self, c):
        self.c = c
        self.known: dict[Proxy, Any] = {}
        self.producer: dict[Proxy, int] = {}
        self.seen = 0  # of the bound symbols
        self.drawn = 0  # up to here random operations were run
        self.generators: dict = {}  # device -> state of its default generator behind what was drawn

    def number(self, x):
        """The value of a number, or of a constant. Raises CaptureError where it cannot be computed yet."""
        if not isinstance(x, NumberProxy):
            return x
        bound_symbols = self.c.recorder.bound_symbols
        for i in range(self.seen, len(bound_symbols)):
            self.producer.update(dict.fromkeys(bound_symbols[i].outputs, i))
        self.seen = len(bound_symbols)
        needed = self._slice(x.unbacked)
        random = {i for i in needed if OpTags.RANDOM_OP in bound_symbols[i].sym.tags}
        if random:  # numbers are drawn in the program's order
            drawing = [i for i in range(self.drawn, max(random)) if OpTags.RANDOM_OP in bound_symbols[i].sym.tags]
            needed |= self._slice([o for i in drawing for o in bound_symbols[i].outputs])
        with self._run_mode(bool(random)):
            for i in sorted(needed):
                self._run(bound_symbols[i])
        self.drawn = max(random, default=self.drawn - 1) + 1
        return x.expression.evaluate({u.name: self.known[u] for u in x.unbacked})

    def _slice(self, values) -> set[int]:
        """The places of the bound symbols that compute values which are not known yet."""
        needed: set[int] = set()
        pending = [v for v in values if v not in self.known]
        while pending:
            value = pending.pop()
            place = self.producer.get(value)
            if place is None:
                self.known[value] = self._input(value)
            elif place not in needed:
                needed.add(place)
                bound_symbol = self.c.recorder.bound_symbols[place]
                self._check(bound_symbol)
                pending += (i for i in bound_symbol.inputs if i not in self.known)
        return needed

    def _check(self, b: BoundSymbol) -> None:
        generator = b.kwargs.get("generator") is not None or self.c.options.rng is RNG_OPTIONS.FUSED
        random = OpTags.RANDOM_OP in b.sym.tags
        if OpTags.IN_PLACE in b.sym.tags or (generator if random else OpTags.DONT_DCE in b.sym.tags):
            self._refuse(f"on {b.sym.name}, which has an effect")
        if b.sym.fn is None and not b.subsymbols:
            self._refuse(f"on {b.sym.name}, which nothing runs at capture")

    def _refuse(self, why: str) -> None:
        self.c.refuse(
            f"a decision depends {why}",
            "use operations that go without it (torch.where, masks), or compute it outside and pass it in",
        )

    def _input(self, value: Proxy):
        if isinstance(value, TensorProxy) and value in self.c.real:
            real, source = self.c.real[value]
            table, name = self.c.replaced_sources.get(source, (None, None))
            with compat.DisableTorchFunction():
                return (real if table is None else table[name]).detach()
        if isinstance(value, AnyProxy):
            return value.example
        self._refuse(f"on {value.name}, which is not known at capture")

    def _run(self, b: BoundSymbol) -> None:
        if b.sym.fn is None:
            for inner in b.subsymbols:
                self._run(inner)
            return
        args, kwargs = map_structure(self._given, b.args), map_structure(self._given, b.kwargs)
        if OpTags.OPAQUE in b.sym.tags:  # it may write to what it is given
            args = map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
        self._assign(b.output, no_autocast(b.sym.fn)(*args, **kwargs))

    def _given(self, x):
        if isinstance(x, Proxy):
            return self.known[x]
        if isinstance(x, NumberProxy):
            known = {u.name: self.known[u] for u in x.unbacked}
            return x.expression.evaluate({**self.c.decisions.values, **known})
        return as_torch(x)

    def _assign(self, output, result) -> None:
        if isinstance(output, Proxy):
            self.known[output] = result
        elif isinstance(output, (tuple, list)):
            for o, r in zip(output, result, strict=True):
                self._assign(o, r)
        elif isinstance(output, dict):
            for key, o in output.items():
                self._assign(o, result[key])

    @contextlib.contextmanager
    def _run_mode(self, random: bool) -> Iterator[None]:
        """PyTorch as programs of ours find it; generators as the program would find them, and back."""
        with compat.DisableTorchFunction(), torch.no_grad():
            if not random:
                yield
                return
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices=devices):
                if self.generators:
                    torch.set_rng_state(self.generators["cpu"])
                    for i in devices:
                        torch.cuda.set_rng_state(self.generators[i], i)
                yield
                self.generators = {"cpu": torch.get_rng_state(), **{i: torch.cuda.get_rng_state(i) for i in devices}}
