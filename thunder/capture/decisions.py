"""Decisions by data: which way the captured call goes, and the checks of that at run time.

The operands of a decision are computed from the inputs of the call that is captured, as a slice of its bound symbols.
 The answer says which path is captured; `thunder.core.paths` checks it at each call.
"""

from __future__ import annotations

import contextlib
import operator
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.capture.examples import is_tried
from thunder.capture.interface import Capture
from thunder.capture.library.locks import check_host_call
from thunder.capture.path import Path
from thunder.capture.reachable import Reach
from thunder.capture.tensors import check_apart
from thunder.capture.world import VALUE, Source
from thunder.core import signals
from thunder.core.host_calls import (
    CONTAINERS,
    HostProxy,
    Log,
    contents,
    host_call,
    logged,
    name_of,
    taken_from_log,
)
from thunder.core.paths import Decision, check_decision, check_value
from thunder.core.proxies import (
    AnyProxy,
    Condition,
    NumberProxy,
    Proxy,
    TensorProxy,
    map_structure,
    proxies_in,
)
from thunder.core.symbol import BoundSymbol, OpTags, current_recorder, detached, recording
from thunder.core.symbolic import RELATIONS
from thunder.core.unbacked import made_of
from thunder.distributed.boundary import locals_of
from thunder.errors import CaptureError, FallbackWarning, warn_user
from thunder.ops import eager_calls
from thunder.ops.eager_calls import Outcome, versions_of
from thunder.ops.families.random import generator_of
from thunder.ops.infer import as_torch, assign, no_autocast
from thunder.ops.rules import effects


class RaisesBefore(CaptureError):
    """The program raises before a decision, with the exception that is this one's cause: it may catch that, where a
    compiled one could not."""


class DecidedPath(Path):
    """The path of a capture, decided by the values of the call that is captured. It is the recorder's `decide`."""

    def __init__(self, c: Capture, expected: tuple[Decision, ...], log: Log):
        super().__init__(expected)
        self.c = c
        self._values = _Values(c, log)

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

    def beside_data(self, number: NumberProxy) -> Any:
        """A number of the arguments that stands beside data-dependent ones, which by itself decides nothing."""
        return made_of(self.c.recorder, number) if current_recorder() is self.c.recording.recorder else None

    def errors_are_handled(self) -> bool:
        return is_tried(self.c)

    def at_capture(self, number: NumberProxy) -> int | float | None:
        """The number in the call that is captured, by which nothing is decided. None where that is not known."""
        if not self._may_decide():
            return None
        try:
            return self._values.number(number)
        except CaptureError:
            return None

    def host_value(self, proxy: HostProxy) -> Any:
        """The value that the program goes on with."""
        if proxy in self._made_of and proxy not in self._settled:
            self._settled[proxy] = self.value_of(proxy)
            for known in self._made_of[proxy]:
                self.c.world.ask(known, VALUE) if isinstance(known, Source) else known.concrete()
        if proxy not in self._settled:
            where, question = self.c.user_location(), f"the value of {proxy.name}"
            answer = self._expected(question, where)
            answer = self.value_of(proxy) if answer is None else answer
            self._take(check_value, (proxy, answer), Decision(question, answer, where))
            self._settled[proxy] = answer
        return self._settled[proxy]

    def take_kind(self, name: str, kind: str) -> int:
        """The number of a decision by the type of a host call's result, which the host call checks."""
        self.taken.append(Decision(f"the type of the result of {name}()", kind, self.c.user_location()))
        return len(self.taken) - 1

    def run_host_call(
        self, index: int | None, function, args: tuple, kwargs: dict, effect: str, lent: tuple, frames: tuple
    ) -> Any:
        """The result of a host call that is not recorded yet, after those before it."""
        check_host_call(self.c)
        return self._values.host_call(index, function, args, kwargs, effect, lent, frames)

    def run_eager_call(
        self, index: int, function, args: tuple, kwargs: dict, how: tuple, shown: eager_calls.Shown
    ) -> Outcome:
        """The outcome of an eager call that is not recorded yet, after the calls before it. how, shown: see
        `eager_calls.call`."""
        check_host_call(self.c)
        return self._values.eager_call(index, function, args, kwargs, how, shown)

    def watch(self, p: TensorProxy) -> None:
        """Host code has seen memory of a tensor: the program must not write to it any more."""
        memory = self.c.recorder.memory
        base = memory.base(memory.holder(p))
        self.watched.append((base, memory.latest(base)))

    def keep_alive(self) -> None:
        """At the end of the program."""
        if self.shown:
            eager_calls.keep_alive.record(self.c.recorder, tuple(self.shown), {}, None)

    def check_watched(self) -> None:
        memory = self.c.recorder.memory
        if any(one.is_changed for one in self.lent):
            self.c.refuse("the program changes a container that it has passed to code on the host", "give it a copy")
        if any(memory.latest(base) is not seen for base, seen in self.watched):
            self.c.refuse(
                "the program writes to a tensor that shares memory with a NumPy array",
                "write to a clone of it",
            )

    def knows(self, proxy: Proxy, value: Any, ran: BoundSymbol | None = None) -> None:
        """The value of a proxy. ran: the bound symbol that gives it, whose operations have run."""
        self._values.known[proxy] = value
        self._values.ran.update(() if ran is None else (ran,))

    def equals(self, proxy: Proxy, other: Proxy) -> None:
        """A proxy has the value of another."""
        self._values.equal[proxy] = other

    def value_of(self, proxy: Proxy) -> Any:
        """The value of a proxy at capture."""
        return self._values.of([proxy])[0]

    def _take(self, check, args: tuple, decision: Decision) -> None:
        check.record(self.c.recording.recorder, (*args, len(self.taken)), {}, None)
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
        """Whether data may decide here: not inside of a transform, on another device, or between ranks."""
        c = self.c
        recorder = current_recorder()
        if recorder is not c.recording.recorder or recorder.typing:
            return False
        communicates = bool(c.tensors.placements) or _has_process_group()
        if communicates:
            self.why = "; ranks that communicate would have to decide together"
        if communicates or c.request.options.device is not None:
            self.may_not_decide = True
            return False
        return True


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _may_draw(b: BoundSymbol) -> bool:
    return not b.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.OPAQUE))


def _moves_generators(b: BoundSymbol) -> bool:
    """Whether an operation may use the default generators by other means than PyTorch's random operations."""
    return b.sym is host_call or OpTags.OPAQUE in b.sym.tags or bool(effects.holds_generator.of(b.sym))


def _may_call_host_code(b: BoundSymbol) -> bool:
    return not b.sym.tags.isdisjoint((OpTags.OPAQUE, OpTags.DECISION))


def _in_order(b: BoundSymbol) -> bool:
    return _may_draw(b) or b.sym is host_call and b.args[0] is not None


def _is_below_half(dtype: torch.dtype) -> bool:
    """Whether a dtype has fewer bits than float16: PyTorch compares no values of these."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _cloned(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def _gives_back(value: Any, arguments: tuple) -> bool:
    """Whether a container that a host call gives holds a tensor that the call was given, or one of its memory, whose
    identity and history the program would lose."""
    if type(value) not in (*CONTAINERS, tuple):
        return False
    inside = [
        t.untyped_storage()._cdata for t in contents(value) if type(t) is torch.Tensor and t.layout is torch.strided
    ]
    return any(
        isinstance(t, torch.Tensor) and t.layout is torch.strided and t.untyped_storage()._cdata in inside
        for t in contents(arguments)
    )


class _Values:
    """Values of a capture's bound symbols, computed when they are asked for, each once."""

    def __init__(self, c: Capture, log: Log):
        self.c, self.log = c, log
        self.known: dict[Proxy, Any] = {}
        self.equal: dict[Proxy, Proxy] = {}  # arguments of functions that are recorded apart -> what they are given
        self.producer: dict[Proxy, int] = {}
        self.ordered: list[int] = []  # places of bound symbols that run in the program's order, and have not
        self.ran: set[BoundSymbol] = set()  # of these, those that have
        self.seen: list[BoundSymbol] = []
        self.copies: dict[int, torch.Generator] = {}  # of the user's generators
        self.generators: dict[
            torch.device, torch.Tensor
        ] = {}  # device -> state of its default generator behind the last draw

    def number(self, x):
        """The value of a number, or of a constant. Raises CaptureError where it cannot be computed yet."""
        if not isinstance(x, NumberProxy):
            return x
        self.of(x.unbacked)
        return self._number(x)

    def host_call(
        self, index: int | None, function, args: tuple, kwargs: dict, effect: str, lent: tuple, frames: tuple
    ) -> Any:
        """The result of a host call that is not recorded yet. One with a number runs after those before it."""
        proxies = proxies_in((args, kwargs), [])
        connects = self.c.recorder.context.grad_enabled and any(
            type(p) is TensorProxy and p.requires_grad for p in proxies
        )
        self.of(proxies, everything_before=index is not None)
        states = eager_calls.states_of_generators() if connects else []
        with self._run_mode(), logged(self.log):
            args, kwargs = map_structure(self._operand, args), map_structure(self._operand, kwargs)
            if lent:  # what it does to a tensor shows, and is not done
                args, kwargs = map_structure(_cloned, args), map_structure(_cloned, kwargs)
            with self.log.at(self.c.location()), signals.as_they_are():
                value = taken_from_log(index, function, args, kwargs, effect, lent, frames)
            gives_back = _gives_back(value, (args, kwargs))
        if changed := self.log.take_changed():
            what = f"a {type(changed.container).__name__} that {changed.name}() was given"
            reason = f"{name_of(function, args)}() changes {what}"
            self.c.refuse(reason, "give it a container from outside of the compiled function, or call it there")
        if gives_back:
            reason = f"{name_of(function, args)}() gives back a {type(value).__name__} with a tensor that it is given"
            self.c.refuse(reason, "call it outside of the compiled function")
        if (
            connects
            and index is not None
            and not isinstance(value, torch.Tensor)
            and eager_calls.leads_to_tensor(value)
        ):
            self.log.forget(index, value)
            eager_calls.set_back(states)
            reason = (
                f"{name_of(function, args)}() gives a {type(value).__name__} with tensors whose gradients would be lost"
            )
            warn_user(f"{reason}: it runs twice in this call", FallbackWarning)
            self.c.refuse(reason, "call it outside of the compiled function")
        return value

    def eager_call(
        self, index: int, function, args: tuple, kwargs: dict, how: tuple, shown: eager_calls.Shown
    ) -> Outcome:
        """Runs an eager call behind everything before it. Refuses one that wrote where the program would not see it."""
        self.of(proxies_in((function, args, kwargs, shown), []), everything_before=True)
        if index in self.log:
            called: Any = self._operand(function)
            return self.log.result(index, called)
        function, args, kwargs = (map_structure(self._operand, x) for x in (function, args, kwargs))
        places = [self.c.tensors.real[p][0] if name is None else self._operand(p) for p, name, _ in shown]
        shown = tuple((p, name, self._operand(x)) for p, (_, name, x) in zip(places, shown, strict=True))
        read = [real for real, _ in self.c.tensors.real.values()]
        versions, before = versions_of(read), self._contents_read((function, args, kwargs))
        with (
            recording(None),
            compat.without_function_modes(),
            compat.without_fakes(),
            self._generators_of_program(),
            signals.as_they_are(),
        ):
            outcome = eager_calls.call(function, args, kwargs, *how, shown=shown, looks=True)
        name = getattr(function, "__qualname__", type(function).__qualname__)
        codes = [function.__code__] if hasattr(function, "__code__") else []
        if self._set_back(before):
            reason = f"{name}() writes to a tensor that the program has read"
            self._refuse_what_ran(codes, reason, "call it outside of the function")
        unseen = outcome.beside is None and any(map(eager_calls.holds_gradients, eager_calls.closed_parts(outcome)))
        if unseen or outcome.keeps:
            gives = "gives an object that leads to tensors with a gradient, or gives some later"
            stores = "stores tensors with a gradient, or calls a checkpoint with use_reentrant=True"
            self._refuse_what_ran(codes, f"{name}() {stores if outcome.keeps else gives}")
        if outcome.graph is not None and any(x.grad_fn is None for x in outcome.graph.outputs):
            self._refuse_what_ran(codes, f"{name}() gives a leaf that requires grad", "make it outside")
        with self.log.at(self.c.location()):
            memory = eager_calls.shown_by(outcome, args, kwargs)
            self.log.happens(index, function, eager_calls.module_of(args), outcome, memory)
        if outcome.beside is not None:
            self.c.request.eager.exclude(codes)
            self.c.refuse(f"{name}() {outcome.beside}")
        if versions_of(read) != versions:
            self.c.refuse(f"{name}() writes to a tensor that the program reads", "call it outside of the function")
        return outcome

    def _refuse_what_ran(self, codes: list[types.CodeType], reason: str, remedy: str = "") -> None:
        """Refuses an eager call that has run: it runs again as a part of the function around it."""
        self.c.request.eager.exclude(codes)
        warn_user(f"{reason}: it runs twice in this call", FallbackWarning)
        self.c.refuse(reason, remedy)

    def _set_back(self, before: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Gives tensors the values that they had. Says whether they had others."""
        with self._run_mode():
            changed = any(
                x.shape != values.shape or not torch.isclose(x, values, 0, 0, equal_nan=True).all()
                for x, values in before
            )
            for x, values in before if changed else ():
                x.data = x.data.copy_(values) if x.shape == values.shape else values
        return changed

    def _contents_read(self, called: tuple) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors from outside that operations so far have read, and that a function reaches, with copies of them:
        these operations run behind it in this call of the program."""
        real, bound_symbols = self.c.tensors.real, self.c.recorder.bound_symbols
        read = dict.fromkeys(p for b in bound_symbols for p in b.inputs if type(p) is TensorProxy and p in real)
        if not read:
            return []
        with self._run_mode():
            reach, tensors = Reach(called), [real[p][0] for p in read]
            tensors = [x for x in tensors if x.layout is torch.strided and not _is_below_half(x.dtype)]
            return [(x, x.clone()) for x in tensors if reach.reaches_memory(x)]

    def of(self, values, everything_before: bool = False) -> list:
        """Values of proxies. everything_before: host calls that were recorded and have not run do so."""
        if self.c.tensors.passed_twice:
            check_apart(self.c)
        bound_symbols = [b for recorder in self.c.recording.all for b in recorder.bound_symbols]
        self._look_at(bound_symbols)
        needed = self._slice(values)
        while True:  # numbers are drawn, and host calls run, in the program's order
            last = max(needed.intersection(self.ordered), default=-1)
            calls = {i for i in self.ordered if everything_before and bound_symbols[i].sym is host_call}
            before = calls.union(i for i in self.ordered if i < last) - needed
            if not before:
                break
            needed |= before
            for i in before:
                self._check(bound_symbols[i])
                needed |= self._slice(bound_symbols[i].inputs)
        with self._run_mode([bound_symbols[i] for i in needed]):
            for i in sorted(needed):
                try:
                    self._run(bound_symbols[i])
                except Exception as error:
                    reason = f"before this decision it raises {type(error).__name__}: {error}"
                    raise RaisesBefore(reason, location=self.c.user_location()) from error
        self.ran.update(bound_symbols[i] for i in needed.intersection(self.ordered))
        self.ordered = [i for i in self.ordered if i not in needed]
        return [self.known[self._origin(v)] for v in values]

    def _look_at(self, bound_symbols: Sequence[BoundSymbol]) -> None:
        """Notes where values are produced. A backward inside of the program replaces operations."""
        if len(self.seen) > len(bound_symbols) or not all(map(operator.is_, self.seen, bound_symbols)):
            self.producer, self.ordered, self.seen = {}, [], []
        for i in range(len(self.seen), len(bound_symbols)):
            self.producer.update(dict.fromkeys(bound_symbols[i].outputs, i))
            if _in_order(bound_symbols[i]) and bound_symbols[i] not in self.ran:
                self.ordered.append(i)
        self.seen += bound_symbols[len(self.seen) :]

    def _number(self, x: NumberProxy):
        known = {u.name: self.known[u] for u in x.unbacked}
        return x.expression.evaluate({**self.c.numbers.decisions.values, **known})

    def _slice(self, values) -> set[int]:
        """The places of the bound symbols that compute values which are not known yet."""
        needed: set[int] = set()
        pending = [*values]
        while pending:
            value = self._origin(pending.pop())
            if value in self.known:
                continue
            position = self.producer.get(value)
            if position is None:
                self.known[value] = self._input(value)
            elif position not in needed:
                needed.add(position)
                bound_symbol = self.seen[position]
                self._check(bound_symbol)
                pending += bound_symbol.inputs
        return needed

    def _origin(self, value: Proxy) -> Proxy:
        while value in self.equal:
            value = self.equal[value]
        return value

    def _check(self, b: BoundSymbol) -> None:
        effect = OpTags.DONT_DCE in b.sym.tags and b.sym.tags.isdisjoint((OpTags.RANDOM_OP, OpTags.DECISION))
        if OpTags.IN_PLACE in b.sym.tags or effect:
            self._refuse(f"on {b.sym.name}, which has an effect")
        if b.sym.fn is None and not b.subsymbols and b.sym.decomposition is None:
            self._refuse(f"on {b.sym.name}, which nothing runs at capture")

    def _refuse(self, why: str) -> None:
        self.c.refuse(
            f"a branch depends {why}",
            "use operations that go without it (torch.where, masks), or compute it outside and pass it in",
        )

    def _input(self, value: Proxy):
        """The value of an input of the program. Refuses one of which a rank holds a part, or that is not known."""
        if isinstance(value, TensorProxy) and value in self.c.tensors.real:
            placement = self.c.tensors.placements.get(value)
            if placement is not None and (placement.is_split or placement.dtype is not placement.held_dtype):
                reason = (
                    f"its value is needed during capture and depends on {value.name}, of which each rank holds a part"
                )
                self.c.refuse(reason, "compute it outside of the compiled function")
            real, source = self.c.tensors.real[value]
            table, name = self.c.tensors.replaced_sources.get(source, (None, None))
            real = real if table is None else table[name]  # as the program has it: a host call may give it back
            if source not in self.c.tensors.local:  # no DTensor
                return real
            with self._run_mode():
                return locals_of((real,), (self.c.tensors.local[source],))[0]
        if isinstance(value, AnyProxy):
            return value.example
        self._refuse(f"on {value.name}, which is not known at capture")

    def _run(self, b: BoundSymbol) -> None:
        """Computes the outputs of a bound symbol, by its function or by the bound symbols that it consists of."""
        if b.sym.fn is None:
            subsymbols, result = b.subsymbols, b.output
            if not subsymbols and b.sym.decomposition is not None:  # one that was recorded by its result alone
                with detached(self.c.recorder.context) as recorder:
                    result = b.sym.decomposition(*b.args, **b.kwargs)
                subsymbols = recorder.bound_symbols
            for inner in subsymbols:
                self._run(inner)
            if result is not b.output:
                assign(b.output, map_structure(self._operand, result), self.known)
            return
        args, kwargs = map_structure(self._operand, b.args), map_structure(self._operand, b.kwargs)
        if b.sym is host_call:
            with logged(self.log), self.log.at(b.location and b.location[:2]), signals.as_they_are():
                assign(b.output, taken_from_log(*args[:4], *args[6:]), self.known)
            return
        if OpTags.OPAQUE in b.sym.tags:  # it may write to its arguments
            args = map_structure(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)
        with logged(self.log) if _may_call_host_code(b) else contextlib.nullcontext():
            result = no_autocast(b.sym.fn)(*args, **kwargs)
        assign(b.output, result, self.known)

    def _operand(self, x):
        """An argument of a bound symbol with the values at capture in the place of proxies."""
        if isinstance(x, Proxy):
            return self.known[self._origin(x)]
        if isinstance(x, NumberProxy):
            return self._number(x)
        if type(x) is torch.Generator:  # which only the program draws from
            copied = self.copies.get(id(x))
            if copied is None:
                copied = self.copies[id(x)] = torch.Generator(x.device)
                copied.set_state(x.get_state())
            return copied
        return as_torch(x)

    @contextlib.contextmanager
    def _run_mode(self, operations: Sequence[BoundSymbol] = ()) -> Iterator[None]:
        """PyTorch as programs of ours find it, for these operations; generators as the program would find them."""
        drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if any(map(_may_draw, operations)):
            drawing = self._generators_of_program() if any(map(_moves_generators, operations)) else self._apart()
        with recording(None), compat.DisableTorchFunction(), compat.without_dispatch_modes(), torch.no_grad(), drawing:
            yield

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Generators of the capture in the states of the default ones, which other threads do not see move."""
        states = self.generators or _states_of_generators()
        generators = {device: torch.Generator(device).set_state(state) for device, state in states.items()}
        with compat.drawing_apart(generators):
            yield
        self.generators = {device: generator.get_state() for device, generator in generators.items()}

    @contextlib.contextmanager
    def _generators_of_program(self) -> Iterator[None]:
        """The default generators as the program would find them here, and back."""
        with torch.random.fork_rng(devices=[d.index for d in _states_of_generators() if d.type == "cuda"]):
            for device, state in self.generators.items():
                generator_of(device).set_state(state)
            yield
            self.generators = _states_of_generators()


def _states_of_generators() -> dict[torch.device, torch.Tensor]:
    """By device, the state of its default generator."""
    return {g.device: g.get_state() for g, _ in eager_calls.states_of_generators()}
