"""Eager calls: Python functions that a compiled program calls as they are, on real values, with their derivatives.

    (t3, g0) = eager_call(0, log, (t2,), {}, (t_scale,), 'Tensor torch.float32 [4] cpu True, gradients of 1', 2, ...)

A function that cannot be captured becomes one, and so does a function behind `thunder.disable`. It runs in program
order, like a host call (`thunder.core.host_calls`): it has a number, the log of a call holds its outcome, and a result
of another type is another path. Tensors that it returns have a gradient: the call keeps the autograd graph that the
function left, and the backward of the program runs it. `leaves` are the tensors with a gradient that the function reads
by itself, such as the parameters of a module: inputs of the program, so that their gradients are the program's.

The program holds answers about the state around it. A function that changes an answer invalidates the program for this
call, which is then run from its beginning in the interpreter, with the outcomes in the log (`thunder.capture.replay`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from thunder import compat
from thunder.core.host_calls import Log, current_log, kind_of
from thunder.core.paths import OtherPath
from thunder.core.proxies import AnyProxy, TensorProxy, like
from thunder.core.symbol import OpTags, Symbol
from thunder.ops.pytorch_derivative import Graph, grafted, run_backward
from thunder.ops.rules import derivatives, effects
from thunder.ops.wanted import wants


class Outcome(NamedTuple):
    """The outcome of an eager call.

    value: its result, with tensors apart from the graph. graph: None where no tensor of the result has a gradient.
    connected: the positions, among the tensors of the result, of those that have one. leaves: the tensors with a
    gradient that the function reads by itself. kind: the type of the result. generators: pairs of a default generator
    that it has drawn from and the state behind. error: what it raised. beside: what no program sees of it. keeps:
    whether it has stored tensors of its graph, or that are computed from its arguments, where neither result nor
    arguments lead, or has a checkpoint with use_reentrant=True, through which autograd runs whole graphs alone.
    """

    value: Any = None
    graph: Graph | None = None
    connected: tuple[int, ...] = ()
    leaves: tuple[torch.Tensor, ...] = ()
    kind: str = ""
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    error: Exception | None = None
    beside: Beside | None = None
    keeps: bool = False


# writes of a program before a call: (a tensor, None, its value), (an object, the name of an attribute, its value)
Shown = tuple[tuple[Any, str | None, Any], ...]


class Beside(NamedTuple):
    """What a function leaves that a program around its call would not know.

    held: tensors with a gradient in objects of the result, and in what it has written to; outputs of the graph.
    written: its arguments that it has written to, by path, and what is in them. entries: the arguments as it got them,
    and their paths. left: what it has left where the program had written before.
    """

    held: tuple[torch.Tensor, ...]
    written: dict[tuple, Any]
    entries: tuple[tuple[torch.Tensor, tuple], ...]
    left: Shown

    def __str__(self) -> str:
        writes = f"writes to arguments {', '.join(map(str, self.written))}" if self.written else ""
        holds = f"gives objects that hold {len(self.held)} tensors with a gradient" if self.held else ""
        overwrites = "writes to what the program has written to before" if self.left else ""
        return " and ".join(filter(None, (writes, holds, overwrites)))


class RunAgain(OtherPath):
    """Raised where a program cannot go on behind an eager call: the function raised, which the program may handle, or
    has changed what the program depends on. The call runs from its beginning in the interpreter, and takes from `log`
    what has happened. changed: the function that has changed an answer, None for an error."""

    def __init__(self, log: Log, changed: Callable | None):
        super().__init__(-1, None)
        self.log, self.changed = log, changed


class Held(NamedTuple):
    """A result that somebody else holds too, such as a list of an object: the program does not open it."""

    value: Any


class Argument(NamedTuple):
    """A result, or a part of one, that is an argument of the call itself: the tensor at `path`."""

    path: tuple


def paths_of(args: tuple, kwargs: dict, kind: type) -> list[tuple]:
    """The paths of the values of a class in arguments: `(0,)`, `("mask",)`, `(1, "a")`."""
    pending, paths = [((key,), x) for key, x in (*enumerate(args), *kwargs.items())], []
    while pending:
        path, x = pending.pop(0)
        if isinstance(x, kind):
            paths.append(path)
        elif type(x) in OPENED:
            pending += [((*path, key), part) for key, part in (x.items() if type(x) is dict else enumerate(x))]
    return paths


def value_at(args: tuple, kwargs: dict, path: tuple) -> Any:
    value: Any = kwargs if type(path[0]) is str else args
    for key in path:
        value = value[key]
    return value


def _replaced(value: Any, path: tuple, new: Any) -> Any:
    if not path:
        return new
    key, *rest = path
    if type(value) is tuple:
        return (*value[:key], _replaced(value[key], tuple(rest), new), *value[key + 1 :])
    copied = value.copy()
    copied[key] = _replaced(value[key], tuple(rest), new)
    return copied


OPENED = (tuple, list, dict)  # containers of arguments and results that programs open


def map_result(function: Callable, value: Any) -> Any:
    """A result with `function` applied to what is in its containers."""
    if type(value) is dict:
        return {k: map_result(function, x) for k, x in value.items()}
    return type(value)(map_result(function, x) for x in value) if type(value) in OPENED else function(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a result, in order."""
    tensors: list[torch.Tensor] = []
    map_result(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, value)
    return tensors


def call(
    function: Callable, args: tuple, kwargs: dict, tensors: Sequence[tuple], wanted: Sequence[tuple], kinds: tuple,
    grad: bool, shown: Shown = (), looks: bool = False,
) -> Outcome:  # fmt: skip
    """Calls a function on real values.

    tensors: the paths of the program's tensors in the arguments. wanted: of these, those that have a gradient in the
    program. kinds: of autocast, see `compat.autocast_on`. grad: whether grad mode is on. shown: see `_showing`. looks:
    whether to look for tensors that the function stores elsewhere, which takes a walk over all objects.
    """
    by_path = {path: value_at(args, kwargs, path) for path in tensors}
    states = states_of_generators()
    with torch.set_grad_enabled(grad), compat.autocast_on(kinds) if kinds else contextlib.nullcontext():
        apart = [path for path in wanted if not _is_followed(by_path[path])]
        args, kwargs = _with_gradients(by_path, wanted, args, kwargs)
        before = _contents_of(args, kwargs)
        edges = {path: get_gradient_edge(by_path[path]) for path in wanted}
        known = [args, kwargs, by_path, *before.values(), *_containers_in([*args, *kwargs.values()])]
        with _showing(shown) as left:
            try:
                value = function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the program may handle it
                return Outcome(error=error)
    drawn = tuple((g, now) for g, state in states if not torch.equal(state, now := g.get_state()))
    written = _written_to(before, _contents_of(args, kwargs), grad)
    entries = tuple((x, path) for path, x in by_path.items())
    held = _held(value, written, bool(left), {id(x) for x, _ in entries})
    if looks and not any(map(holds_gradients, _closed(value))):
        known += [before, entries, *entries]
        inside = _nodes_between([*tensors_in(value), *held], edges.values())
        reentrant = any(node.name() == "CheckpointFunctionBackward" for node in inside)
        if reentrant or _keeps([by_path[path] for path in apart], inside, [value, written, held], known):
            set_back(states)
            return Outcome(keeps=True)
    if held or written or left:
        beside, inputs = Beside(held, written, entries, tuple(left)), [edges[path] for path in wanted]
        leaves = _leaves_behind(held, inputs)
        graph = _CallGraph(inputs, leaves, list(held)) if held else None
        return Outcome(Held(value), graph, (), leaves, f"{kind_of(value)} that {beside}", drawn, None, beside)
    if not _is_fresh(value):
        return Outcome(Held(value), kind=kind_of(value), generators=drawn)
    return _outcome_of_fresh(value, by_path, wanted, drawn)


def _with_gradients(
    by_path: dict[tuple, torch.Tensor], wanted: Sequence[tuple], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """The arguments with tensors that autograd follows at the wanted paths. They take their places in `by_path` too."""
    apart = [path for path in wanted if not _is_followed(by_path[path])]
    for path, entry in zip(apart, grafted([by_path[path] for path in apart]) if apart else (), strict=True):
        by_path[path] = entry
        if type(path[0]) is str:
            kwargs = _replaced(kwargs, path, entry)
        else:
            args = _replaced(args, path, entry)
    return args, kwargs


def _is_followed(x: torch.Tensor) -> bool:
    """Whether gradients reach a tensor. A view that is made under no_grad of a leaf says that it requires grad."""
    if not x.requires_grad or x.grad_fn is not None:
        return x.requires_grad
    with torch.enable_grad():
        view: Any = x.view_as(x).grad_fn
    return view.next_functions[0][0] is not None


def _outcome_of_fresh(value: Any, by_path: dict[tuple, torch.Tensor], wanted: Sequence[tuple], drawn: tuple) -> Outcome:
    """What a call has given that left nothing behind: the program opens its containers. by_path: the tensors among its
    arguments, by their paths. wanted: those that have a gradient. drawn: the generators that it has drawn from."""
    paths = {id(x): path for path, x in by_path.items()}
    value = map_result(lambda x: Argument(paths[id(x)]) if id(x) in paths else x, value)
    results = tensors_in(value)
    connected = tuple(i for i, x in enumerate(results) if x.requires_grad)
    outputs, inputs = [results[i] for i in connected], [by_path[path] for path in wanted]
    leaves = _leaves_behind(outputs, inputs)
    graph = _CallGraph(inputs, leaves, outputs) if outputs else None
    apart = map_result(lambda x: x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x, value)
    return Outcome(apart, graph, connected, leaves, _described(value), drawn)


@contextlib.contextmanager
def _showing(shown: Shown) -> Iterator[list[tuple[Any, str | None, Any]]]:
    """Carries out writes of the program, which come into force at its end, for the duration of a call.

    Gives a list, in which the writes of the function to the same places are behind it.
    """
    before, left = [], list[tuple[Any, str | None, Any]]()
    for owner, name, value in shown:
        before.append(_value_there(owner, name))
        _write(owner, name, value)
    versions = [versions_of([owner] if name is None else ()) for owner, name, _ in shown]
    try:
        yield left
    finally:
        for (owner, name, value), was, version in zip(shown, before, versions, strict=True):
            now = _value_there(owner, name)
            if name is not None:
                left += [] if now is value else [(owner, name, now)]
            elif versions_of([owner]) != version:
                left.append((owner, None, now))
            elif not torch.equal(now, value):  # batch norm does not count what it writes to its statistics
                left.append((owner.data, None, now))
            _write(owner, name, was)


def _value_there(owner: Any, name: str | None) -> Any:
    return owner.detach().clone() if name is None else vars(owner).get(name, _ABSENT)


def _write(owner: Any, name: str | None, value: Any) -> None:
    """Nobody else sees it: the version of a tensor is not counted up."""
    if name is None:
        owner.data.copy_(value)
    elif value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


_ABSENT = object()


def _is_fresh(value: Any) -> bool:
    """Whether nobody but the caller holds the lists and dicts of a result: there are as many references to them as to
    those of a copy."""
    copy = map_result(lambda x: None, value)
    return _references(value) == _references_from_here(copy)


def _references_from_here(value: Any) -> list[int]:
    """`_references`, with as many variables of thunder's own as those that hold a result."""
    return _references(value)


def _contents_of(args: tuple, kwargs: dict) -> dict[tuple, Any]:
    """What is in the containers and tensors of the arguments, by path: of a tensor, how often it was written to."""
    pending, contents = [((key,), x) for key, x in (*enumerate(args), *kwargs.items())], dict[tuple, Any]()
    while pending:
        path, x = pending.pop()
        if type(x) in OPENED:
            if type(x) is not tuple:
                contents[path] = x.copy()
            pending += [((*path, key), part) for key, part in (x.items() if type(x) is dict else enumerate(x))]
        elif isinstance(x, torch.Tensor):
            contents[path] = x, *versions_of([x])
    return contents


def _written_to(before: dict[tuple, Any], now: dict[tuple, Any], grad: bool) -> dict[tuple, Any]:
    """The arguments that have changed, and what is in them."""
    changed = {path: now[path] for path, was in before.items() if path in now and not _are_same(was, now[path])}
    with torch.set_grad_enabled(grad):
        return {path: x[0].clone() if type(x) is tuple else x for path, x in changed.items()}


def _are_same(was: Any, now: Any) -> bool:
    """Whether a container holds the same objects in the same order."""
    if type(was) is not type(now) or len(was) != len(now):
        return False
    if type(was) is dict:
        return list(was) == list(now) and all(map(operator.is_, was.values(), now.values()))
    return all(a is b or type(a) is int and a == b for a, b in zip(was, now, strict=True))


def _held(value: Any, written: dict[tuple, Any], left: bool, entries: set[int]) -> tuple[torch.Tensor, ...]:
    """The tensors with a gradient that a program around the call would not see, arguments of the call aside. left:
    whether the program sees none of the result, since the call has written where the program has."""
    tensors = dict[int, torch.Tensor]()

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None:
            tensors[id(x)] = x
        return x

    closed = _closed(value)
    if closed or written or left:
        _replace_tensors(closed, note, set())
        if tensors or written or left:  # all of them then
            _replace_tensors([value, *written.values()], note, set())
    return tuple(x for number, x in tensors.items() if number not in entries)


def _nodes_between(outputs: Iterable[torch.Tensor], inputs: Iterable[GradientEdge]) -> set:
    """The nodes of the graph that a function left, without those that accumulate gradients of leaves."""
    ends = {None, *(edge.node for edge in inputs)}
    pending, inside = [x.grad_fn for x in outputs], set[Any]()
    while pending:
        if (node := pending.pop()) not in ends and node not in inside:
            inside.add(node)
            pending += [following for following, _ in node.next_functions]
    return {node for node in inside if node.next_functions}


def _keeps(arguments: list[torch.Tensor], inside: set, results: list[Any], known: list[Any]) -> bool:
    """Whether somebody else holds a tensor that is computed from the arguments of a call, or an argument itself: its
    gradient would end where the function begins. So would that of a tensor whose graph is a part of that of the
    results, which the backward of the program frees. inside: the nodes of that graph. results: what the program gets.
    known: what holds the arguments."""
    if not arguments and not inside:
        return False
    seen = {id(x) for x in arguments}
    _replace_tensors(results, lambda x: seen.add(id(x)) or x, set())
    for _ in range(2):  # once more without the garbage that the function has left
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and id(x) not in seen]
        with compat.DisableTorchFunction():
            nodes = {id(x): x.grad_fn for x in tensors}
            ends = inside.union(x.grad_fn for x in arguments)
        suspects = [x for x in tensors if nodes[id(x)] is not None and _reaches(nodes[id(x)], ends)]
        own = {id(x) for x in (suspects, tensors, arguments, results, *known, *_containers_in(results))}
        if not any(map(_is_holder, (x for x in gc.get_referrers(*suspects, *arguments) if id(x) not in own))):
            return False
        gc.collect()
    return True


def _is_holder(x: Any) -> bool:
    """Frames are those of this call; what a node of autograd saves belongs to the graph."""
    if isinstance(x, (types.FrameType, BackwardCFunction)):
        return False
    return not (type(x) is dict and any(isinstance(owner, BackwardCFunction) for owner in gc.get_referrers(x)))


def _reaches(node: Any, ends: set) -> bool:
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return False


def _containers_in(values: list[Any]) -> list[Any]:
    """The containers that values open to, themselves among them."""
    pending, containers = list(values), []
    while pending:
        if type(x := pending.pop()) in OPENED:
            containers.append(x)
            pending += x.values() if type(x) is dict else x
    return containers


_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _closed(value: Any) -> list[Any]:
    """The objects in a result that the program does not open."""
    parts: list[Any] = []
    map_result(parts.append, value)
    return [x for x in parts if not isinstance(x, (torch.Tensor, *_PLAIN))]


def _replace_tensors(value: Any, function: Callable, seen: set[int]) -> Any:
    """A value with `function` applied to the tensors in it, in the objects themselves; in new ones where they are
    tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _NOT_ENTERED) or id(value) in seen or len(seen) > _MOST:
        return value
    if isinstance(value, tuple):
        parts = [_replace_tensors(x, function, seen) for x in value]
        same = all(map(operator.is_, parts, value))
        return value if same else tuple.__new__(type(value), parts)
    seen.add(id(value))
    for keys, read, write in _tables(value):
        for key in keys:
            if (new := _replace_tensors(old := read(key), function, seen)) is not old:
                write(key, new)
    return value


_NOT_ENTERED = (type, types.ModuleType, types.FunctionType, torch.nn.Module, *_PLAIN)


def _tables(value: Any) -> Iterator[tuple[Iterable, Callable, Callable]]:
    """Where an object holds others: keys, how one is read, and how it is written."""
    if isinstance(value, list):
        yield range(len(value)), list(value).__getitem__, functools.partial(list.__setitem__, value)
    if isinstance(value, dict):
        yield list(dict.keys(value)), dict(value).__getitem__, functools.partial(dict.__setitem__, value)
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(value, "__dict__")
        yield list(attributes), attributes.__getitem__, attributes.__setitem__
    for base in type(value).__mro__:
        members = vars(base) if "__slots__" in vars(base) else {}
        slots = {name: slot for name, slot in members.items() if type(slot) is types.MemberDescriptorType}
        filled = dict[str, Any]()
        for name, slot in slots.items():
            with contextlib.suppress(AttributeError):  # of an empty slot; a class below may have the name for another
                filled[name] = slot.__get__(value)
        yield filled, filled.__getitem__, lambda name, new, slots=slots: slots[name].__set__(value, new)


def holds_gradients(value: Any) -> bool:
    """Whether a result that the program does not open leads to a tensor with a gradient in a way that
    `_replace_tensors` does not go, or is an iterator, whose elements come later."""
    return hasattr(type(value), "__next__") or leads_to_tensor(value, lambda x: x.grad_fn is not None)


def leads_to_tensor(value: Any, is_meant: Callable[[torch.Tensor], bool] = lambda x: True) -> bool:
    """Whether an object leads to such a tensor. Classes, modules of Python and of PyTorch are not entered."""
    pending, seen = collections.deque([value]), set[int]()
    while pending and len(seen) < _MOST:
        value = pending.popleft()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, torch.nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and is_meant(value):
            return True
        if isinstance(value, types.FunctionType):
            value = value.__closure__, value.__defaults__, value.__kwdefaults__
        pending += gc.get_referents(value)
    return False


_MOST = 2000  # objects behind a result that are looked at


def _references(value: Any) -> list[int]:
    """How many references there are to each list and dict of a result."""
    if type(value) not in OPENED:
        return []
    inside = [n for x in (value.values() if type(value) is dict else value) for n in _references(x)]
    return inside if type(value) is tuple else [sys.getrefcount(value), *inside]


def states_of_generators() -> list[tuple[torch.Generator, torch.Tensor]]:
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [(g, g.get_state()) for g in (torch.default_generator, *cuda)]


def set_back(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


class _CallGraph(Graph):
    """The graph of an eager call. leaves: the last of its inputs, see `Outcome`."""

    __slots__ = ("leaves",)

    def __init__(self, inputs: Sequence, leaves: tuple[torch.Tensor, ...], outputs: list[torch.Tensor]):
        super().__init__([*inputs, *leaves], outputs)
        self.leaves = leaves


@contextlib.contextmanager
def _without_hooks(graph: Graph) -> Iterator[None]:
    """A backward inside the block leaves out the hooks of leaves: they run once, where the program's gradient reaches
    the leaf."""
    tables: list[Any] = [x._backward_hooks for x in getattr(graph, "leaves", ()) if x._backward_hooks]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, was in zip(tables, hooks, strict=True):
            table.update(was)


def _leaves_behind(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | GradientEdge]
) -> tuple[torch.Tensor, ...]:
    """The leaves that a graph reaches beside its inputs, in the order in which a walk from the outputs meets them.

    Those that the graph alone holds were made inside of the call, and nobody sees their gradients: they are left out.
    """
    known = {id(x) for x in inputs}
    stops = {x.node if isinstance(x, GradientEdge) else x.grad_fn for x in inputs} - {None}
    pending, seen, leaves = [x.grad_fn for x in outputs], set(stops), dict[int, torch.Tensor]()
    unseen: list[torch.Tensor] = []
    for x in outputs:
        if x.grad_fn is None and id(x) not in known:
            leaves[id(x)] = x
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            if sys.getrefcount(variable) == _references_of_unseen() and not _has_hooks(variable):
                unseen.append(variable)
            else:
                leaves.setdefault(id(variable), variable)
        pending += [following for following, _ in node.next_functions]
    return tuple(leaves.values() if leaves or inputs else unseen)


@functools.cache
def _references_of_unseen() -> int:
    """How many references there are to a leaf that a graph alone holds, as `_leaves_behind` counts them."""
    with torch.enable_grad():
        view: Any = torch.zeros(1, requires_grad=True).view_as(torch.zeros(1)).grad_fn
    variable = view.next_functions[0][0].variable
    return sys.getrefcount(variable)


def _has_hooks(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks) or bool(leaf._post_accumulate_grad_hooks)


def _described(value: Any) -> str:
    """The type of a result, and of what is in it."""
    if type(value) is Argument:
        return f"argument {value.path}"
    if type(value) in (tuple, list):
        return f"{type(value).__name__}({', '.join(map(_described, value))})"
    if type(value) is dict:
        return f"dict({', '.join(f'{k!r}: {_described(v)}' for k, v in value.items())})"
    return kind_of(value)


def kind_with_leaves(outcome: Outcome) -> str:
    """The type of a result, with the numbers of the tensors with a gradient that the function reads by itself."""
    numbers = ", ".join(str(_number_of(leaf)) for leaf in outcome.leaves)
    return f"{outcome.kind}, gradients of {numbers}" if numbers else outcome.kind


_NUMBERS: dict[int, tuple[weakref.ref, int]] = {}  # by id: a leaf, and its number
_COUNT = itertools.count()


def _number_of(leaf: torch.Tensor) -> int:
    """A number of a leaf in this process, by which results that depend on other leaves are told apart."""
    known = _NUMBERS.get(id(leaf))
    if known is None or known[0]() is not leaf:
        forget = weakref.ref(leaf, lambda reference, key=id(leaf): _forget(key, reference))
        known = _NUMBERS[id(leaf)] = forget, next(_COUNT)
    return known[1]


def _forget(key: int, reference: weakref.ref) -> None:
    if key in _NUMBERS and _NUMBERS[key][0] is reference:
        del _NUMBERS[key]


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each tensor was written to; those of inference mode do not say."""
    with compat.DisableTorchFunction():
        return [x._version for x in tensors if not x.is_inference()]


class State(threading.local):
    """The answers that one program depends on, asked again behind eager calls. ask: asks them, for the call that runs
    on this thread, and returns the inputs of the program, or why it does not fit."""

    ask: Callable[[], Any] | None = None
    inputs: tuple = ()

    def holds(self, versions: Sequence[int]) -> bool:
        """Whether the program's inputs are those that it began with, and nobody has written to them."""
        if self.ask is None:
            return True
        inputs = self.ask()
        if type(inputs) is not tuple or len(inputs) != len(self.inputs):
            return False
        return all(map(_is_same, inputs, self.inputs)) and self.versions() == versions

    def versions(self) -> list[int]:
        return versions_of(x for x in self.inputs if isinstance(x, torch.Tensor))


def _is_same(a: Any, b: Any) -> bool:
    """Whether an input is the one before: the local tensor of a DTensor is another object each time."""
    if not isinstance(a, torch.Tensor):
        return a is b or a == b
    return a is b or hasattr(b, "local_of") and (a.data_ptr(), a.shape) == (b.data_ptr(), b.shape)


class _Current(threading.local):
    """The state of the innermost program that runs on this thread."""

    state: State | None = None  # of the innermost program that runs on this thread


_CURRENT = _Current()


def asking_again(prologue: Callable, state: State) -> Callable:
    """The prologue of a program with eager calls, behind which its questions are asked again."""

    def run(fn, args, kwargs):
        inputs = prologue(fn, args, kwargs)
        if type(inputs) is tuple:
            state.ask, state.inputs = lambda: prologue(fn, args, kwargs), inputs
        return inputs

    return run


def with_state(program: Callable, state: State) -> Callable:
    """The computation of a program with eager calls."""

    def run(*inputs):
        outer, _CURRENT.state = _CURRENT.state, state
        try:
            return program(*inputs)
        finally:
            _CURRENT.state = outer
            state.ask, state.inputs = None, ()

    return run


def _run(
    index: int, function: Callable, args: tuple, kwargs: dict, leaves: tuple, kind: str, decision: int,
    tensors: tuple[tuple, ...], wanted: tuple[tuple, ...], kinds: tuple, grad: bool, shown: Shown,
    inputs: tuple[str, ...],
) -> tuple:  # fmt: skip
    """Runs an eager call in a program: the result of the log where the call was made before, else the function on real
    values. index: the position of the call in the log."""
    log, state = current_log(), _CURRENT.state
    outcome = log.result(index, function) if log is not None and index in log else None
    if outcome is None:
        before = state.versions() if state is not None else []
        outcome = call(function, args, kwargs, tensors, wanted, kinds, grad, shown)
        log = Log() if log is None else log
        log.happens(index, function, module_of(args), outcome, shown_by(outcome, args, kwargs))
        if outcome.error is not None:
            raise RunAgain(log, None) from outcome.error
        if state is not None and not state.holds(before):
            raise RunAgain(log, function)
    else:
        _draw(outcome)
    answer = kind_with_leaves(outcome)
    if answer != kind:
        raise OtherPath(decision, answer)
    return results_of(outcome), outcome.graph


def _draw(outcome: Outcome) -> None:
    """Sets the generators to their states behind a call that has happened."""
    set_back(outcome.generators)


def closed_parts(outcome: Outcome) -> list[Any]:
    """The objects in a result that the program does not open, besides tensors, numbers and text."""
    return [x for x in results_of(outcome) if not isinstance(x, (torch.Tensor, int, float, complex, str, type(None)))]


def results_of(outcome: Outcome) -> tuple:
    """The values in a result, in order, without arguments of the call."""
    if type(outcome.value) is Held:
        return (outcome.value.value,)
    values: list[Any] = []
    map_result(lambda x: values.append(x) if type(x) is not Argument else None, outcome.value)
    return tuple(values)


def with_arguments(value: Any, args: tuple, kwargs: dict) -> Any:
    """A result with the arguments of the call that are in it."""

    def as_returned(x: Any) -> Any:
        return value_at(args, kwargs, x.path) if type(x) is Argument else x

    return value.value if type(value) is Held else map_result(as_returned, value)


_BACKWARD = "eager_call_backward"
_ONCE = (
    "an eager call keeps the autograd graph that its function left, which is run once: the derivative of a backward "
    "through it is not known"
)


def symbol_for(output: tuple[tuple, AnyProxy | None]) -> Symbol:
    """The symbol of one eager call. output: the values in its result, and the graph, as the call at capture gave
    them."""

    def meta(*args, **kwargs):
        results = tuple(x.replace(name="") if type(x) is TensorProxy else x for x in output[0])
        return results, None if output[1] is None else AnyProxy("")

    symbol, differentiated = (
        Symbol("eager_call", meta, is_prim=True, tags=(OpTags.DONT_DCE, OpTags.DECISION), fn=_run) for _ in range(2)
    )
    symbol.typed_by_running = differentiated.typed_by_running = True  # the outcome says which results have a gradient
    symbol.grad_rule = functools.partial(_derivative, differentiated)
    derivatives.once_differentiable.set(_ONCE, differentiated)
    return symbol


def module_of(args: Sequence) -> torch.nn.Module | None:
    """The module that a function is called of: `Module.__call__` is the same function for all."""
    return args[0] if args and isinstance(args[0], torch.nn.Module) else None


# Objects that a function gives may show the memory of tensors that it was given without a reference to them, as
# pointers of ctypes do. What else kept these alive, such as a list of the program's, is no part of the program.
keep_alive = Symbol(
    "keep_alive", lambda *tensors: None, is_prim=True, tags=(OpTags.DONT_DCE,), fn=lambda *tensors: None
)  # fmt: skip


def shown_by(outcome: Outcome, args: tuple, kwargs: dict) -> tuple:
    """The arguments whose memory the objects in an outcome may show."""
    return (args, kwargs) if outcome.error is None and closed_parts(outcome) else ()


def is_eager_call(symbol: Symbol) -> bool:
    return symbol.fn is _run


def is_eager_backward(symbol: Symbol) -> bool:
    return symbol.name == _BACKWARD


def runs_python(graph: Graph) -> bool:
    """Whether a backward through a graph runs a node that is written in Python: an `autograd.Function`, or the hooks of
    a module."""
    pending = [x.grad_fn for x in graph.outputs]
    seen = {None, *(x.node if isinstance(x, GradientEdge) else x.grad_fn for x in graph.inputs)}
    while pending:
        if (node := pending.pop()) not in seen:
            if isinstance(node, BackwardCFunction):
                return True
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
    return False


def _run_backward(graph: Graph, cotangents: tuple, names: tuple[str, ...]) -> tuple:
    """The gradients of the call's inputs. What its function does in a backward, as a checkpoint that runs it again, is
    done where autograd wants the gradient of one of the program's inputs with these names."""
    with _without_hooks(graph):
        return run_backward(graph, cotangents if wants(names) else (None,) * len(cotangents))


def _derivative(symbol: Symbol, *arguments):
    """The derivative rule of an eager call: the backward runs PyTorch's engine on the graph that the call left."""
    _, _, args, kwargs, leaves, _, _, _, wanted, _, _, _, names = arguments
    results, graph = call = symbol(*arguments)
    cotangent, _ = yield call
    if graph is None:
        return ()
    connected = [i for i, p in enumerate(results) if type(p) is TensorProxy and p.requires_grad]
    cotangents = tuple(None if cotangent is None else cotangent[i] for i in connected)
    inputs = (*(value_at(args, kwargs, path) for path in wanted), *leaves)
    backward = Symbol(_BACKWARD, lambda *_: tuple(map(like, inputs)), is_prim=True, fn=_run_backward)
    derivatives.once_differentiable.set(_ONCE, backward)
    derivatives.accepts_missing_cotangents.add(backward)
    effects.asks_autograd.add(backward)
    gradients = backward(graph, cotangents, names)
    table = dict(zip(wanted, gradients, strict=False))
    of_args = tuple(_structured(x, (i,), table) for i, x in enumerate(args))
    of_kwargs = {name: _structured(x, (name,), table) for name, x in kwargs.items()}
    return None, None, of_args, of_kwargs, tuple(gradients[len(wanted) :])


def _structured(value: Any, path: tuple, gradients: dict[tuple, Any]) -> Any:
    """The gradients of an argument, in its structure."""
    if type(value) is dict:
        return {k: _structured(x, (*path, k), gradients) for k, x in value.items()}
    if type(value) in OPENED:
        return tuple(_structured(x, (*path, i), gradients) for i, x in enumerate(value))
    return gradients.get(path)


class _Connected(torch.autograd.Function):
    """The value of an eager call that has happened, connected to the arguments of the call that runs again."""

    @staticmethod
    def forward(ctx, graph, *inputs):
        ctx.graph = graph
        return tuple(x.detach() for x in graph.outputs)

    @staticmethod
    def backward(ctx, *cotangents):
        keeps, graph = compat.keeps_graph(), ctx.graph
        with _without_hooks(graph):
            gradients = torch.autograd.grad(graph.outputs, graph.inputs, cotangents, keeps, allow_unused=True)
        return None, *gradients


def happened(outcome: Outcome, args: tuple, kwargs: dict) -> Any:
    """The result of an eager call that has happened, for a call with equal arguments. Raises its error."""
    if outcome.error is not None:
        raise outcome.error
    _draw(outcome)
    if outcome.beside is not None:
        return _with_beside(outcome, outcome.beside, args, kwargs)
    value = outcome.value
    if outcome.graph is not None and torch.is_grad_enabled():
        operands = [value_at(args, kwargs, path) for path in paths_of(args, kwargs, torch.Tensor)]
        inputs = [*(x for x in operands if x.requires_grad), *outcome.leaves]
        results = dict(zip(outcome.connected, _Connected.apply(outcome.graph, *inputs), strict=True))
        position = itertools.count()
        value = map_result(lambda x: results.get(next(position), x) if isinstance(x, torch.Tensor) else x, value)
    return with_arguments(value, args, kwargs)


def _with_beside(outcome: Outcome, beside: Beside, args: tuple, kwargs: dict) -> Any:
    """The result of such a call, with its tensors connected to the arguments and what it wrote written to them."""
    connected = {id(x): value_at(args, kwargs, path) for x, path in beside.entries}
    if outcome.graph is not None and torch.is_grad_enabled():
        inputs = [x for x in connected.values() if x.requires_grad] + list(outcome.leaves)
        results = _Connected.apply(outcome.graph, *inputs)
        connected |= dict(zip(map(id, beside.held), results, strict=True))
    both = [outcome.value.value, beside.written]
    value, written = _replace_tensors(both, lambda x: connected.get(id(x), x), set())
    for path, now in written.items():
        target = value_at(args, kwargs, path)
        if isinstance(target, torch.Tensor):
            target.copy_(now)
        elif isinstance(target, list):
            target[:] = now
        else:
            target.clear()
            target.update(now)
    for owner, name, now in beside.left:
        if name is None:
            owner.copy_(now)
        else:
            _write(owner, name, now)
    return value
