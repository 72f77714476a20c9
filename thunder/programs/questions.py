"""The questions of a program on disk: what a capture asked of the outside, and asking it again in another process.

A prologue is not kept as text that runs. What is kept is what it was made of: sources (paths from the call's arguments,
the function, and objects that have names), questions about what stands there, and the answers, each as `describe` says
it. Another process follows the same paths in its own objects and asks the same questions in the same order. Where each
answer is described as it was, the program is the program of this process as well, and the prologue is written anew,
with this process's objects in it, by the writer that writes all prologues.
"""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.capture import world
from thunder.capture.groups import settings_changed
from thunder.capture.handlers import HOOKS
from thunder.capture.host import replaced_tensors, rooted_modules
from thunder.capture.prologue import PrologueWriter
from thunder.capture.state import Numbers, Outside, Request, Tensors
from thunder.capture.tensors import how_held, is_local
from thunder.capture.world import MISSING, STEPS, Computation, Question, Source, World, same_value
from thunder.core.symbolic import APPLICATIONS, RELATIONS, Decisions, Expression, hold
from thunder.distributed.placement import Placement, placement_of
from thunder.options import JitOptions
from thunder.programs.describe import Describer, Unspeakable, find_named, named
from thunder.programs.ranks import described_placement
from thunder.transforms.base import reading

QUESTIONS: dict[str, Question] = {q.name: q for q in vars(world).values() if isinstance(q, Question)}
_METADATA = ("is_conj", "is_neg", "is_inference")
# what a call at a source may call: what only tells
_TELLING = (contextvars.ContextVar, weakref.ref, functools._lru_cache_wrapper)


class Mismatch(Exception):
    """A program on disk does not fit a call. The words say why."""


def described_tensor(say: Describer, tensor: torch.Tensor, shape: tuple) -> list:
    """What the prologue checks of a tensor."""
    facts = [tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout]
    return [
        *map(say, (type(tensor), tuple(shape), *facts)),
        *(getattr(tensor, name)() for name in _METADATA),
        compat.unwrap_of(tensor) is not None,
    ]


def _described(say: Describer, parameter: torch.Tensor) -> list:
    return described_tensor(say, parameter, tuple(parameter.shape))


# ---------------------------------------------------------------------------------------------------------- to text


class _Writer:
    """Sources and constants of a capture as rows; rows name each other by number."""

    def __init__(self, c: Any):
        self.c = c
        self.rows: list[list] = []
        self.constants: list[Any] = []
        self._known: dict[Source, int] = {}
        self._constants: dict[str, int] = {}
        self._standing: dict[int, list[Source]] = {}
        self._instances: dict[int, Source] = {}  # by the id of their class
        for source, value in c.world.values.items():
            if source.base is not None:
                self._standing.setdefault(id(value), []).append(source)
            if source.step != "const":
                self._instances.setdefault(id(type(value)), source)
        self._open: set[int] = set()  # constants that are being found

    def source(self, source: Source) -> int:
        number = self._known.get(source)
        if number is None:
            row = [*self._row(source), *([source.label] if source.label else [])]
            number = self._known[source] = len(self.rows)
            self.rows.append(row)
        return number

    def _row(self, source: Source) -> list:
        """A source as a file holds it: its base, its step and its key."""
        key = source.key
        if source.step == "const":
            return [None, "const", self._constant(key)]
        if source.base is None:
            return [None, "root", key]
        base = self.source(source.base)
        if source.step in ("keyed", "at"):
            return [base, source.step, self.source(key)]
        if source.step == "number":
            return [base, "number", [said_expression(key.expression), self.names(key.sources)]]
        if source.step == "made":
            raise Unspeakable(f"a guard reads {self.c.world.describe(source)}, which is computed from symbolic sizes")
        if source.step == "of":
            raise Unspeakable(f"a guard reads {self.c.world.describe(source)}, an entry of a cache")
        if source.step == "call":
            check_call(self.c.world.values.get(source.base, MISSING), self.c.world.describe(source))
        said = Describer()(key)
        if source.step != "call" and not _is_key(key, said):
            raise Unspeakable(
                f"a guard reads {self.c.world.describe(source)}, whose key is an object of {type(key).__name__}"
            )
        return [base, source.step, said]

    def names(self, sources: Iterable[tuple[str, Source]]) -> list[list]:
        return [[name, self.source(source)] for name, source in sources]

    def _constant(self, name: str) -> int:
        """The number of an object that the program depends on, among the constants of the file."""
        number = self._constants.get(name)
        if number is None:
            value = self.c.world.constants[name]
            if id(value) in self._open:
                raise Unspeakable(f"the program depends on an object of {type(value).__name__} that only it refers to")
            self._open.add(id(value))
            said = self.described(value)
            self._open.discard(id(value))
            number = self._constants[name] = len(self.constants)
            self.constants.append(said)
        return number

    def described(self, value: Any) -> list:
        """How another process finds the like of an object: by its name, or where it stands."""
        c = self.c
        for part in _FUNCTION_PARTS:
            if value is _part(c.request.fn, part):
                return ["fn", part]
        if value is c.outside.hooks:
            return ["hooks", *map(self._hook_table, value)]
        for i, table in enumerate(c.request.overrides):
            if table is value:
                return ["overrides", i]
        if type(value) is dict and isinstance(name := value.get("__name__"), str):
            if find_named(name, "__name__") is not MISSING and value is vars(_module(name)):
                return ["globals", name]
        said = Describer()(value)
        value_now = named(said)
        if (
            same_value(value_now, value)
            or type(value) is functools.partial
            and type(value_now) is functools.partial
            and value_now.func is value.func
        ):
            return ["named", said]
        if type(value) is types.CellType and id(value) in c.outside.cells:
            owner = c.outside.cells[id(value)]
            return ["cell of", self.described(owner), owner.__closure__.index(value)]
        for source in self._standing.get(id(value), ()):
            try:
                return ["at", self.source(source)]
            except Unspeakable:
                continue
        if id(value) in self._instances:
            return ["type of", self.source(self._instances[id(value)])]
        raise Unspeakable(
            f"the program depends on {_called(value)}, to which no import path, argument or attribute leads"
        )

    def _hook_table(self, table: Any) -> list:
        for name in _GLOBAL_HOOKS:
            if getattr(compat, name) is table:
                return ["all", name]
        modules = [(s, v) for s, v in self.c.world.values.items() if isinstance(v, torch.nn.Module)]
        for source, module in (*self.c.outside.pinned.items(), *modules):
            for name in HOOKS:
                if module.__dict__.get(name) is table:
                    return [self.source(source), name]
        raise Unspeakable("the hooks of a module that is no part of the compiled one")


_GLOBAL_HOOKS = (
    "global_forward_hooks", "global_forward_pre_hooks", "global_backward_hooks", "global_backward_pre_hooks",
)  # fmt: skip


_FUNCTION_PARTS = ("", "__func__", "__self__")  # of what is compiled: a function, a module, or a method


def _part(fn: Any, name: str) -> Any:
    return fn if not name else getattr(fn, name, MISSING) if type(fn) is types.MethodType else MISSING


def _module(name: str) -> types.ModuleType:
    module = named(["module", name])
    if module is MISSING:
        raise Mismatch(f"the module {name} is not imported")
    return module


def _called(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{type(value).__name__} {name}" if isinstance(name, str) else f"an object of {type(value).__qualname__}"


def _is_key(key: Any, said: Any) -> bool:
    key_now = named(said)
    return key_now is key or type(key_now) is type(key) and key_now == key


def check_call(owner: Any, path: str) -> None:
    """Raises Unspeakable for a call that may do something."""
    tells = isinstance(owner, (*_TELLING, functools.partial)) or (getattr(owner, "__module__", None) or "").startswith(
        ("thunder.", "torch")
    )
    if isinstance(owner, functools.partial) and not isinstance(owner.func, functools._lru_cache_wrapper):
        tells = tells and (getattr(owner.func, "__module__", None) or "").startswith(("thunder.", "torch"))
    if not tells:
        raise Unspeakable(f"a guard calls {path}, which may do something else in another process")


def written_questions(
    c: Any, input_sources: list[Source], objects: dict[str, Any], added: Sequence[tuple[dict, str]]
) -> dict:
    """What a capture asked, as JSON says it, before the capture is closed. objects: what the epilogue names. added: the
    parameters that transforms added to the inputs, each with the table of overrides that holds it.

    Raises Unspeakable.
    """
    _refuse_what_is_left_out(c)
    write, say = _Writer(c), Describer()
    changed = settings_changed(c.world)
    guards = []
    for (source, question, operand), want in c.world.observed.items():
        if source in changed:
            continue
        if QUESTIONS.get(question.name) is not question:
            raise Unspeakable(f"its guard {question.name!r} has no form on disk")
        try:
            about = ["source", write.source(operand)] if type(operand) is Source else ["value", say(operand)]
            guards.append([write.source(source), question.name, say(want), *(about if operand is not None else ())])
        except Unspeakable as error:
            raise Unspeakable(f"{c.world.describe(source)}: {error}") from None
    tensors = [
        [write.source(s), described_tensor(say, c.guarded_tensor(s), shape)] for s, shape in c.tensors.shapes.items()
    ]
    real = [[write.source(s), p in c.tensors.mutated] for p, (_, s) in c.tensors.real.items() if p in c.tensors.used]
    distinct = [[[write.source(s) for s in sources], what] for sources, what in c.distinct_groups()]
    pinned = [write.source(s) for s in c.outside.pinned]
    tables = [id(table) for table in c.request.overrides]
    replaced = [[write.source(s), tables.index(id(t)), name] for s, (t, name) in c.tensors.replaced_sources.items()]
    inputs = [write.source(s) for s in input_sources]
    required = [write.source(s) for s in c.tensors.required.values()]
    places = {name: write.described(x) for name, x in objects.items()}
    local = [[write.source(s), rows] for s, rows in c.tensors.local.items()]
    placed = [[write.source(s), described_placement(q)] for s, q in placed_inputs(c)]
    return {
        "local": local, "placed": placed,
        "parameters": list(c.world.parameters), "arguments": len(c.request.args), "keywords": list(c.request.kwargs),
        "sources": write.rows, "constants": write.constants, "asked": guards, "tensors": tensors, "real": real,
        "distinct": distinct, "pinned": pinned, "inputs": inputs, "objects": places,
        "required": required, "replaced": replaced,
        "added": [[tables.index(id(t)), name, _described(say, t[name])] for t, name in added],
        "numbers": write.names(c.numbers.sources.items()),
        "relations": [
            [said_expression(a), relation, said_expression(b), outcome]
            for (a, relation, b), outcome in c.numbers.decisions.relations.items()
        ],
    }  # fmt: skip


def placed_inputs(c: Any) -> list[tuple[Source, Placement]]:
    """The inputs that ranks hold together."""
    return [(c.tensors.real[p][1], q) for p, q in c.tensors.placements.items() if p in c.tensors.real]


def _refuse_what_is_left_out(c: Any) -> None:
    """Raises Unspeakable for inputs that a file cannot describe."""
    if c.tensors.opaque or c.tensors.holds_opaque:
        raise Unspeakable("it takes sparse or nested tensors, or tensors of a subclass with rules of its own")
    if any(placement_of(x) is not None for table in c.request.overrides for x in table.values()):
        raise Unspeakable("ranks hold parts of its parameters: let each rank capture the program")
    if c.outside.passing or c.outside.met:
        raise Unspeakable("it depends on id() of an object, which another process has not")
    if c.sharp_edges:
        raise Unspeakable(
            "it holds values that capture froze (thunder.last_sharp_edges lists them): pass them as arguments"
        )


def said_expression(e: Expression) -> list:
    """An expression as JSON says it. Raises Unspeakable for numbers that operations compute."""
    return [[[a if isinstance(a, str) else _said_application(*a) for a in mono], c] for mono, c in e.terms.items()]


def _said_application(name: Any, *operands: Expression) -> list:
    if not isinstance(name, str):
        raise Unspeakable("a number that operations compute decides in it")
    return [name, *map(said_expression, operands)]


# -------------------------------------------------------------------------------------------------------- from text


def expression_of(said: list) -> Expression:
    """The expression that `said_expression` says. Raises Mismatch for an unknown function."""
    return Expression({tuple(map(_atom, mono)): c for mono, c in said})


def _atom(said: Any) -> Any:
    if isinstance(said, str):
        return said
    name, *operands = said
    if name not in APPLICATIONS:
        raise Mismatch(f"a number that {name!r} computes")
    return (name, *map(expression_of, operands))


_STEPS = {*STEPS, "attr", "size"}


class Replay:
    """A call of this process, asked what another capture asked, for `PrologueWriter`.

    Raises Mismatch, in words, where an answer is another one.
    """

    def __init__(
        self, said: dict, fn: Any, args: tuple, kwargs: dict, overrides: tuple[dict, ...],
        code_of: Callable[[str], types.CodeType | None],
    ):  # fmt: skip
        self.code_of = code_of
        self.said, self.world = said, World(tuple(said["parameters"]))
        self.request = Request(fn, args, kwargs, JitOptions(), overrides=overrides)
        self.outside, self.tensors = Outside(rooted_modules(fn)), Tensors(replaced_tensors(fn, overrides))
        self.numbers = Numbers(False, False)
        self._sources: list[Source] = []
        self.placements: list[Placement] = []  # of the inputs that ranks hold together

    def prologue(self) -> tuple[Any, Any, list[Any]]:
        """The prologue's trace and function, and weak references to what must be alive for it to fit a call."""
        self._call_shape()
        say = Describer()
        for row in self.said["sources"]:
            self._sources.append(self._new_source(*row))
        with compat.DisableTorchFunction():  # questions are no operations of the program
            for source in map(self.source, self.said["pinned"]):
                model = self.outside.pinned[source] = self.value(source)
                if not isinstance(model, torch.nn.Module):
                    raise Mismatch(f"{self.world.describe(source)} was a module, is {type(model).__name__}")
            self._ask(say)
            for number, table, name in self.said["replaced"]:
                self.tensors.replaced_sources[self.source(number)] = self._table_with(table, name), name
            self._look_at_tensors(say)
            self._look_at_ranks()
            self._numbers()
            for source in self._sources:
                if source.step == "const":  # the writer asks for all of them, questions for some
                    self.value(source)
            writer = PrologueWriter(self, [self.source(i) for i in self.said["inputs"]], self.code_of)
            trace, function = writer.write()
            for number, name, want in self.said["added"]:
                table = self._table_with(number, name)
                if (now := _described(say, table[name])) != want:
                    raise Mismatch(f"parameter {name} was the tensor {_short(want)}, is {_short(now)}")
                trace = reading(trace, table, name)
        return trace, trace.python_callable() if self.said["added"] else function, writer.weak

    def _table_with(self, number: int, name: str) -> dict[str, torch.Tensor]:
        """The parameters or the buffers that stand in for the module's, with this one among them."""
        tables = self.request.overrides
        if number not in range(len(tables)) or name not in tables[number]:
            raise Mismatch(f"parameter {name} was replaced by a transform, and is not here")
        return tables[number]

    def objects(self) -> dict[str, Any]:
        """What the epilogue names."""
        return {name: self.object_at(description) for name, description in self.said["objects"].items()}

    def _call_shape(self) -> None:
        args, kwargs = self.request.args, self.request.kwargs
        if len(args) != self.said["arguments"] or list(kwargs) != self.said["keywords"]:
            was = f"{self.said['arguments']} positional arguments and the keywords {self.said['keywords']}"
            raise Mismatch(f"the call had {was}, has {len(args)} and {list(kwargs)}")

    def _ask(self, say: Describer) -> None:
        """All questions in their order: what one asks may stand only where those before it were answered as then. It
        is one loop, since a program has a thousand questions."""
        sources, observe = self._sources, self.world.answer
        source, question = None, ""
        try:
            for number, question, want, *about in self.said["asked"]:
                source, question_object = sources[number], QUESTIONS[question]
                operand = other = None
                if about:
                    operand = sources[about[1]] if about[0] == "source" else named(about[1])
                    other = self.value(operand) if type(operand) is Source else operand
                answer = question_object.ask(self.value(source), other)
                observe(source, question_object, operand, answer)
                if (now := say(answer)) != want:
                    raise Mismatch(f"the answer to {question!r} was {_short(want)}, is {_short(now)}")
        except (Unspeakable, Mismatch) as error:
            what = str(error)
        except Exception as error:  # noqa: BLE001 - whatever what stands there now raises
            what = f"the question {question!r} raised {type(error).__name__}: {error}"
        else:
            return
        raise Mismatch(f"{self.world.describe(source) if source is not None else 'the document'}: {what}")

    def _look_at_tensors(self, say: Describer) -> None:
        """Compares the tensors of a call with those of the program. Raises Mismatch."""
        for number, want in self.said["tensors"]:
            source = self.source(number)
            tensor = self.value(source)
            if not isinstance(tensor, torch.Tensor):
                raise Mismatch(f"{self.world.describe(source)} was a tensor, is {type(tensor).__name__}")
            tensor = self.guarded_tensor(source)
            symbolic = {i for i, n in enumerate(named(want[1]) or ()) if n is None}  # any size fits there
            shape = tuple(None if i in symbolic else n for i, n in enumerate(tensor.shape))
            now = described_tensor(say, tensor, shape)
            if now != want:
                was = f"the tensor {_short(want)}, is {_short(now)}"
                raise Mismatch(f"{self.world.describe(source)} was {was}")
            self.tensors.shapes[source] = shape
        self.tensors.required = {number: self.source(number) for number in self.said["required"]}
        for i, (number, mutated) in enumerate(self.said["real"]):
            proxy: Any = i  # in the place of one
            self.tensors.real[proxy] = (None, self.source(number))
            self.tensors.used.add(proxy)
            if mutated:
                self.tensors.mutated[proxy] = None

    def _look_at_ranks(self) -> None:
        """How the ranks hold the inputs. Raises Mismatch."""
        for number, rows in self.said["local"]:
            if not is_local(self.guarded_tensor(self.source(number))):
                raise Mismatch(f"{self.world.describe(self.source(number))} was a DTensor, and is none")
            self.tensors.local[self.source(number)] = rows
        for number, want in self.said["placed"]:
            source = self.source(number)
            placement = how_held(self.guarded_tensor(source))
            now = None if placement is None else described_placement(placement)
            if placement is None or now != want:
                raise Mismatch(f"{self.world.describe(source)}: the ranks held it as {want}, hold it as {now}")
            self.placements.append(placement)

    def _numbers(self) -> None:
        """The numbers that stay symbolic, and the relations that the program was decided by."""
        sources = self.numbers.sources = {name: self.source(n) for name, n in self.said["numbers"]}
        decisions = self.numbers.decisions = Decisions({name: self.value(s) for name, s in sources.items()})
        for a, relation, b, outcome in self.said["relations"]:
            if relation not in RELATIONS:
                raise Mismatch(f"a relation {relation!r}")
            key = expression_of(a), relation, expression_of(b)
            try:
                fits = hold({key: outcome}, decisions.values)
            except (TypeError, ValueError, ArithmeticError):  # as where the prologue's check raises
                fits = False
            if not fits:
                values_now = ", ".join(
                    f"{self.world.describe(s)} is {self.world.values[s]!r}" for s in sources.values()
                )
                raise Mismatch(f"{key[0]} {relation} {key[2]} was {outcome}, and {values_now}")
            decisions.relations[key] = outcome
        decisions.close()

    # what PrologueWriter asks of a capture
    def guarded_tensor(self, source: Source) -> torch.Tensor:
        replaced = self.tensors.replaced_sources.get(source)
        return self.world.values[source] if replaced is None else replaced[0][replaced[1]]

    def distinct_groups(self) -> list[tuple[list[Source], str]]:
        return [([self.source(i) for i in sources], what) for sources, what in self.said["distinct"]]

    # --- sources
    def value(self, source: Source) -> Any:
        """What stands at a source in this process."""
        values, base, step = self.world.values, source.base, source.step
        if source in values:
            return values[source]
        if base is None:
            value = self.object_at(self.said["constants"][source.key])
            self.world.pin(source.key, value)
        else:
            owner = self.value(base)
            if step == "call":
                try:
                    check_call(owner, self.world.describe(source))
                except Unspeakable as error:
                    raise Mismatch(str(error)) from None
            elif step in ("keyed", "at"):
                self.value(source.key)
            elif step == "number":
                for _, number in source.key.sources:
                    self.value(number)
            value = source.fetch(owner, values)
        self.world.note(source, value)
        return value

    def source(self, number: int) -> Source:
        return self._sources[number]

    def _new_source(self, base: int | None, step: str, key: Any, label: str = "") -> Source:
        """The source of a row, which names rows before it."""
        if base is not None:
            if step in ("keyed", "at"):
                key = self._sources[key]
            elif step == "number":
                expression, names = key
                key = Computation(expression_of(expression), tuple((name, self._sources[n]) for name, n in names))
            elif step not in _STEPS:
                raise Mismatch(f"a step {step!r}")
            elif type(key) is list:
                key = named(key)
            return self._sources[base].child(step, key, label)
        if step == "root":
            source = Source(None, "root", key, label)
            request = self.request
            self.world.note(source, {"fn": request.fn, "args": request.args, "kwargs": request.kwargs}[key])
            return source
        if step != "const":
            raise Mismatch("a path that begins nowhere")
        return Source(None, "const", key, label)

    def object_at(self, description: list) -> Any:
        """The object of this process that stands where `_Writer.described` says. Raises Mismatch where nothing does."""
        kind, *rest = description
        if kind == "hooks":
            return [
                getattr(compat, name) if owner == "all" and name in _GLOBAL_HOOKS else self._hooks_at(owner, name)
                for owner, name in rest
            ]
        if kind == "fn" and rest[0] in _FUNCTION_PARTS:
            value = _part(self.request.fn, rest[0])
        elif kind == "overrides":
            return self.request.overrides[rest[0]]
        elif kind == "globals":
            return vars(_module(rest[0]))
        elif kind == "at":
            value = self.value(self.source(rest[0]))
        elif kind == "type of":
            value = type(self.value(self.source(rest[0])))
        elif kind == "cell of":
            value = self.object_at(rest[0]).__closure__[rest[1]]
        else:
            value = named(rest[0])
        if value is MISSING:
            raise Mismatch(f"{_short(rest[0])} is not found: it changed, or what has it is not imported yet")
        return value

    def _hooks_at(self, owner: Any, name: str) -> Any:
        if name not in HOOKS:
            raise Mismatch(f"{name!r} is no table of hooks")
        return self.value(self.source(owner)).__dict__[name]


def _short(said: Any) -> str:
    """A description in a sentence."""
    if isinstance(said, list) and said and isinstance(said[0], str):
        inside = " ".join(_short(x) for x in said[1:] if not isinstance(x, int) or isinstance(x, bool))
        said = f"{said[0]} {inside}" if said[0] not in ("class", "torch", "module", "float", "device") else inside
    text = said if isinstance(said, str) else repr(said)
    return text if len(text) <= 120 else text[:117] + "..."
