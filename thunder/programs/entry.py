"""A cache entry as a document, and a document as a cache entry of another process.

A document is what JSON says: the questions (`questions`), the texts of the computation, of its backwards and of the
epilogue (`text`), and how they belong together (`program.Connection`).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thunder.cache.entry import (
    CacheEntry,
    Connection,
    Lowered,
    apart_from_autocast,
    connect,
    differentiable,
    drawn_from,
    not_differentiable,
    with_numbers_put_back,
)
from thunder.core.codegen import Printer, failing_line, function_source, line_owners
from thunder.core.paths import Decision, OtherPath
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, Names, OpTags
from thunder.core.symbolic import Decisions
from thunder.core.trace import Trace, TraceInfo
from thunder.errors import ThunderError
from thunder.extend import get_always_executors
from thunder.ops import ltorch
from thunder.ops.functionalize.inplace import writes_back
from thunder.ops.registry import LTORCH, PRIMS
from thunder.options import NUMERICS_OPTIONS, JitOptions
from thunder.pipeline import lower
from thunder.programs.describe import Describer, Unspeakable, named
from thunder.programs.files import FOREIGN
from thunder.programs.foreign import checked, refused_name
from thunder.programs.operators import is_operation
from thunder.programs.questions import Replay, placed_inputs, written_questions
from thunder.programs.ranks import (
    agree_with_others,
    check_one_result,
    no_second_derivative,
    objects_of_placements,
    written_agreement,
)
from thunder.programs.regions import Regions, kept_regions, named_transforms
from thunder.programs.text import (
    Damaged,
    check_computation,
    epilogue_of,
    function_of,
    keep_code,
    kept_code,
    named_by,
    objects_of,
    written_object,
    written_text,
)
from thunder.runtime.autograd import when_called
from thunder.transforms.base import Transform, parameters_read
from thunder.transforms.dce import dce
from thunder.transforms.double_backward import InputsBehind
from thunder.transforms.register_grad import REGISTERED

# ---------------------------------------------------------------------------------------------------------- to text


def document_of(entry: CacheEntry, options: JitOptions, regions: Regions) -> dict:
    """A cache entry whose capture is still open. regions: gets those of the program.

    Raises Unspeakable, in words, for what text cannot say.
    """
    captured = entry.captured
    _refuse(entry)
    communicates = captured.computation.info.communicates
    placements = [q for _, q in placed_inputs(captured._capture)]
    objects_of_ranks = objects_of_placements(placements)
    regions.functions |= objects_of_ranks
    if communicates and entry.connection is not None:
        check_one_result(entry.connection.requires_grad)
    regions.add((entry.forward, entry.backward))
    epilogue, objects = None, {}
    if entry.epilogue is not None:
        text = _body(entry.epilogue)
        used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        objects = {name: x for name, x in entry.epilogue.info.objects.items() if name in used}
        epilogue_of(text, objects)
        epilogue = text
    added = parameters_read(entry.prologue)
    if len(captured.computation.args) != len(captured._input_sources) + len(added):
        raise Unspeakable("a transform changes what the program is given")
    connection, differentiates = entry.connection, entry.connection is not None
    codes: dict[str, str] = {}
    prologue_fn = captured.prologue_fn
    keep_code(codes, "".join(linecache.getlines(prologue_fn.__code__.co_filename)), prologue_fn)
    said = {
        "questions": written_questions(captured._capture, captured._input_sources, objects, added),
        "prologue": str(entry.prologue),  # for reading: it is written anew
        "computation": written_text(entry.forward, codes, regions.functions)
        | {"lines": _lines(captured, entry.forward)},
        "backward": written_text(entry.backward, codes, regions.functions) if differentiates else None,
        "epilogue": epilogue,
        "connection": _connection(connection) if differentiates else None,
        "plain": _plain(connection, options, captured.decisions) if differentiates and not communicates else None,
        "collectives": written_agreement(entry, objects_of_ranks),
        "without": {},
        "codes": codes,
        "regions": regions.said(),
        "facts": {
            "any_input_requires_grad": captured.any_input_requires_grad,
            "may_fail_over": captured.may_fail_over,
            "draws_again": _draws_again(captured, options),
            "constants": {k: v for k, v in captured.constants.items() if type(v) is not tuple},  # ids of this process
            "effects": sorted(captured.effects),
            "transforms": len(options.transforms),
            "path": [[d.question, Describer()(d.answer), d.where] for d in captured.path],
        },
    }
    return said


def _draws_again(captured: Any, options: JitOptions) -> list[str]:
    """The devices whose numbers are drawn again where the program is left: an operation raises and the original
    function runs, or a decision goes the other way."""
    if not captured.may_fail_over and not captured.path:
        return []
    devices, own = drawn_from(captured.computation)
    if own:
        raise Unspeakable(
            "it draws from a torch.Generator that it creates, in a block that handles exceptions or beside a decision"
        )
    return [*map(str, devices)]


def key_of_missing(missing: Sequence[int]) -> str:
    return ",".join(map(str, missing))


def _refuse(entry: CacheEntry) -> None:
    """Raises Unspeakable where a program depends on what a file cannot hold."""
    captured = entry.captured
    of_users = [operation.id for operation in REGISTERED.values() if operation.executor is None]
    reasons = [
        (captured.host_calls, "it calls Python code on the host, which no file holds: call that outside of it"),
        (captured.locks, "it takes a lock, which belongs to one process: take it outside of the function"),
        (entry.tiers is not None, "its kernels are compiled in the background: compile with tiers='one'"),
        (of_users, f"register_grad gave {', '.join(of_users)} another derivative, whose code no file holds"),
    ]
    for holds, words in reasons:
        if holds:
            raise Unspeakable(words)


def _body(trace: Trace) -> str:
    text = function_source(trace, Printer(print_depth=1), include_decorators=False)
    lines = [line for line in text[text.index("def ") :].split("\n") if not line.lstrip().startswith("#")]
    return "\n".join(lines)


def _lines(captured: Any, trace: Trace) -> dict[str, list]:
    """Line number -> the user's line that it came from."""
    source = function_source(trace, Printer(print_depth=1), include_decorators=False)
    before = source[: source.index("\ndef ") + 1].count("\n")
    owners = line_owners(trace).items()
    return {str(n - before): list(captured.where(b.location)) for n, b in owners if b.location is not None}


def _connection(connection: Connection) -> dict:
    """The parts of a connection to autograd, as a file holds them."""
    tensors = [i for i, a in enumerate(connection.computation.args) if isinstance(a, TensorProxy)]
    saved = [list(pair) for pair in connection.inputs.saved]
    unsaved = [i for i in tensors if i not in {i for i, _ in saved}]
    say = Describer()
    return {
        "result": connection.result[connection.result.index("def ") :],
        "objects": {name: written_object(x) for name, x in connection.objects.items()},
        "own": connection.own, "shown": connection.shown, "requires_grad": connection.requires_grad,
        "inputs": [unsaved, saved, list(connection.inputs.numbers)],
        "random": None if connection.random is None else [say(device) for device in connection.random],
        "dense": connection.dense, "derived": connection.derived, "names": connection.names, "fuses": connection.fuses,
        "unreached": connection.unreached,
    }  # fmt: skip


def _plain(connection: Connection, options: JitOptions, decisions: Decisions) -> dict:
    """The outputs that require grad, computed from the arguments by PyTorch's functions alone, so that PyTorch can
    differentiate it, as text: for derivatives that the document does not hold."""
    computation = connection.computation
    decisions_taken = [b for b in computation.bound_symbols if OpTags.DECISION in b.sym.tags]  # by the forward
    operations = [b.copied() for b in computation.bound_symbols if not writes_back(b) and b not in decisions_taken]
    for b in operations:
        is_known = LTORCH.get(b.sym.name) is b.sym or PRIMS.get(b.sym.name) is b.sym
        if not is_known and not (getattr(b.sym.decomposition, "__module__", None) or "").startswith("thunder."):
            raise Unspeakable(f"the operation {b.sym.name} has a derivative of its own")
    outputs = tuple(o for o in connection.cut.outputs if o.requires_grad)
    operations = _detaching(operations, computation.names)
    program = dce(computation.replace(name="plain", bound_symbols=operations, output=outputs, info=TraceInfo()))
    executors = tuple(get_always_executors())
    alone = dataclasses.replace(options, executors=executors, transforms=(), numerics=NUMERICS_OPTIONS.CLOSE)
    with decisions.anew({}) as more:
        said = written_text(lower(program, alone, executors)[-1], {}, named_transforms(options.transforms))
    if more:
        raise Unspeakable("its derivative branches on sizes: compile with dynamic=False")
    return said


def _detaching(operations: Sequence[BoundSymbol], names: Names) -> list[BoundSymbol]:
    """Operations for PyTorch to differentiate: what the user computed without grad is detached."""
    detach, detached = ltorch.detach, []
    for b in operations:
        stops = b.sym is not detach and any(isinstance(i, TensorProxy) and i.requires_grad for i in b.inputs)
        stopped = {
            o: o.replace(name=names.make("t"), requires_grad=True)
            for o in b.outputs
            if stops and isinstance(o, TensorProxy) and not o.requires_grad and not b.has_input(o)
            if o.dtype.category >= 2  # others have no gradients
        }
        detached.append(b.swap(stopped))
        detached += [detach.bind(new, output=o, context=b.context) for o, new in stopped.items()]
    return detached


# -------------------------------------------------------------------------------------------------------- from text


def text_only() -> ThunderError:
    """What is raised where bound symbols of a program from the disk are asked for."""
    return ThunderError(
        "this program comes from the disk, as text, and has no bound symbols to look at: for reports, profiles and "
        "explanations compile the function with keep_programs=False"
    )


class TextTrace(Trace):
    """A trace of which there is the text."""

    __slots__ = ("text",)

    def __init__(self, name: str, text: str, function: Callable | None, info: TraceInfo | None = None):
        self.text = text
        super().__init__(name, (), (), None, Names(), info=info)
        self._callable = function

    def _text(self, printer: Printer, include_decorators: bool) -> str:
        return self.text

    @property
    def bound_symbols(self) -> tuple:  # type: ignore[override]
        """Raises ThunderError: who looks at them would find none."""
        raise text_only()

    @bound_symbols.setter
    def bound_symbols(self, symbols: tuple) -> None:
        pass


class Loaded:
    """What a cache entry from disk knows in the place of a capture."""

    host_calls = locks = eager_codes = ()
    failure = None
    has_eager_calls = False
    sharp_edges: tuple = ()
    instructions = 0

    def __init__(self, document: Mapping, weak: list):
        facts = document["facts"]
        self.may_fail_over: bool = facts["may_fail_over"]
        self.path = tuple(map(_decision, facts["path"]))
        self.constants: dict = facts["constants"]
        self.effects = frozenset(facts["effects"])
        self.parameters = tuple(document["questions"]["parameters"])
        info = TraceInfo(layouts={"": document["collectives"]} if document["collectives"] else {})  # it communicates
        self.computation = TextTrace("computation", document["computation"]["text"], None, info)
        self.computation_traces = [self.computation]
        self._weak, self._lines, self.retired = weak, document["computation"]["lines"], False

    @property
    def outlived(self) -> bool:
        return self.retired or any(reference() is None for reference in self._weak)

    def user_location(self, trace: Trace, traceback: Any) -> tuple | None:
        """The user's line that the failing bound symbol came from, where it still stands there."""
        function = trace._callable
        failing = failing_line(function, traceback) if function is not None else None
        line = self._lines.get(str(failing.tb_lineno)) if failing is not None else None
        same = line is not None and linecache.getline(line[0], line[1]).strip() == line[3].strip()
        return tuple(line) if same else None


def _decision(said: list) -> Decision:
    question, answer, where = said
    return Decision(question, named(answer), None if where is None else tuple(where))


def begins_with(document: Mapping, path: Sequence[Decision]) -> bool:
    """Whether the decisions of a document's program begin with these."""
    return tuple(map(_decision, document["facts"]["path"]))[: len(path)] == tuple(path)


def check_texts(document: Mapping) -> None:
    """Raises Damaged where a text of a document is none of a computation: those that are not asked for as well."""
    transforms = named_transforms([Transform()] * document["facts"]["transforms"])
    texts = [document[part] for part in ("computation", "backward", "plain")]
    for text in (*texts, *document["without"].values()):
        if text is not None:
            function_of(text, {"codes": {}, "regions": transforms})
            if document.get(FOREIGN) and (name := refused_name(named_by(text, transforms))) is not None:
                raise Damaged(f"its text calls {name}, whose operands cannot be checked: let each process capture it")
    if document["connection"] is not None:
        result = {"text": document["connection"]["result"], "objects": document["connection"]["objects"]}
        if any(map(is_operation, named_by(result, {}))):
            raise Damaged("the text of its result calls an operation")


def entry_of(
    document: Mapping, modes: tuple, fn: Any, args: tuple, kwargs: dict, overrides: tuple[dict, ...],
    transforms: Sequence, retired: Callable[[], None],
) -> CacheEntry:  # fmt: skip
    """The cache entry that a document says, for a call that it fits. transforms: of this process. retired: is called
    when its kernels turn out to be for other calls, and it fits none any more.

    Raises Mismatch where the document does not fit the call, Damaged where it is none.
    """

    def retire() -> None:
        captured.retired = True
        entry.retire("its kernels are for inputs that lie otherwise in memory, or are gone")
        retired()

    regions = kept_regions(document.get("regions", {}), retire) | named_transforms(transforms)
    trusted: dict[str, dict] = {"codes": document.get("codes", {}), "regions": regions}
    guarded = checked if document.get(FOREIGN) else _as_it_is
    code_of = functools.partial(kept_code, trusted["codes"])
    replay = Replay(document["questions"], fn, args, kwargs, overrides, code_of)
    prologue, prologue_fn, weak = replay.prologue()
    regions |= objects_of_placements(replay.placements)
    computation, backward = document["computation"], document["backward"]
    forward_fn, backwards = function_of(computation, trusted), []
    if document["connection"] is None:
        run = not_differentiable(guarded(forward_fn), modes, document["facts"]["any_input_requires_grad"])
    else:
        backward_fn = when_called(lambda: function_of(backward, trusted))
        run = differentiable(
            _connected(document, trusted, guarded, forward_fn, backward_fn, modes, replay.numbers.decisions), modes
        )
        backwards = [TextTrace("backward", backward["text"], backward_fn)]
    captured: Any = Loaded(document, weak)
    left = Exception if captured.may_fail_over else OtherPath
    run = with_numbers_put_back(run, [*map(torch.device, document["facts"]["draws_again"])], [], left)
    captured.prologue_traces, captured.prologue_fn = [prologue], prologue_fn
    captured.epilogue_traces, captured.epilogue_fn = [], None
    if document["epilogue"] is not None:
        captured.epilogue_fn = guarded(epilogue_of(document["epilogue"], replay.objects()))
        captured.epilogue_traces = [TextTrace("epilogue", document["epilogue"], captured.epilogue_fn)]
    traces = [TextTrace("computation", computation["text"], forward_fn)]
    entry = CacheEntry(captured, Lowered(traces, backwards, run, []), modes)
    entry.from_disk = True
    agree_with_others(document["collectives"], regions)
    return entry


def _as_it_is(function: Callable) -> Callable:
    return function


def _connected(
    document: Mapping, trusted: dict, guarded: Callable, forward: Callable, backward: Callable, modes: tuple,
    decisions: Decisions,
) -> Callable:  # fmt: skip
    """The forward and the backward of a document, connected to autograd. guarded: makes the function that is called of
    a text's function."""
    said = document["connection"]
    unsaved, saved, numbers = said["inputs"]
    nothing: Any = None  # there are no traces of it
    connection = Connection(
        said["result"], objects_of(said["objects"]), said["own"], said["shown"], said["requires_grad"],
        InputsBehind(unsaved, [(i, index) for i, index in saved], numbers),
        None if said["random"] is None else [named(device) for device in said["random"]],
        said["dense"], said["derived"], said["names"], said["fuses"], nothing, nothing, nothing,
        unreached=said["unreached"],
    )  # fmt: skip
    check_computation(connection.result, "result", connection.objects)
    apart, arguments = apart_from_autocast(connection), len(unsaved) + len(saved) + len(numbers)

    def without(missing: Sequence[int]) -> Callable | None:
        text = document["without"].get(key_of_missing(missing))
        return None if text is None else apart(guarded(function_of(text, trusted)))

    def again(missing: Sequence[int]) -> tuple[Callable, list[int]]:
        if document["plain"] is None:
            return no_second_derivative, list(range(arguments))
        return guarded(_differentiated(document["plain"], trusted, missing, arguments)), list(range(arguments))

    return connect(
        connection, guarded(forward), guarded(backward), modes, make_without=without, make_batched=lambda missing: None,
        make_again=again, decisions=decisions,
    )  # fmt: skip


def _differentiated(plain: dict, trusted: dict, missing: Sequence[int], arguments: int) -> Callable:
    """The gradients as PyTorch computes them, from the arguments and the cotangents that are not missing."""
    compute = function_of(plain, trusted)

    def run(*operands):
        inputs, cotangents = operands[:arguments], operands[arguments:]
        again, differentiable = torch.is_grad_enabled(), [i for i, x in enumerate(inputs) if x.requires_grad]
        with torch.enable_grad():
            outputs = [o for i, o in enumerate(compute(*inputs)) if i not in missing]
            computed = torch.autograd.grad(
                outputs, [inputs[i] for i in differentiable], cotangents, allow_unused=True, create_graph=again
            )
        gradients: list[torch.Tensor | None] = [None] * arguments
        for i, gradient in zip(differentiable, computed, strict=True):
            gradients[i] = gradient
        return tuple(gradients)

    return run
