"""Eager calls: which function becomes one where a program is refused, and how its calls are recorded.

A refusal costs the smallest function around the refused line that can be called as it is. `note_candidate` notes it
while the refusal goes up through the calls. The program is captured again, and `called` records calls of that function
(see `thunder.ops.eager_calls`). A function can be called where it may be given everything it is called with, and where
it sees the state that it would see in eager mode.

Of the standard library the function that the user's code calls is the smallest one, or the class whose objects it makes
or is a method of. It changes nothing that a program depends on: where it is given nothing of the program's, its calls
are one host call each. So are those of functions that call the host, whether they could be read or not:

    subprocess.run(["true"])  # is host_call(0, run, (['true'],), {}, 'CompletedProcess', 0)
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat
from thunder.capture import changing, containers, host_lines
from thunder.capture.dispatch import LibraryCall
from thunder.capture.interface import Capture
from thunder.capture.library.functional import original
from thunder.capture.native import PRIMITIVE
from thunder.capture.policy import is_of_library
from thunder.capture.reachable import Reach, names_of, reaches_parts
from thunder.capture.world import Source
from thunder.core.host_calls import HostProxy
from thunder.core.proxies import AnyProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.regions import leading_to
from thunder.core.symbol import current_recorder
from thunder.errors import CaptureError, FallbackWarning, user_line, warn_user
from thunder.interpreter import NULL
from thunder.interpreter.attributes import cell_value, parts_of, plain_attribute
from thunder.interpreter.decode import COROUTINE, decode
from thunder.ops.eager_calls import (
    OPENED,
    Argument,
    Held,
    Outcome,
    Shown,
    kind_with_leaves,
    map_result,
    paths_of,
    results_of,
    symbol_for,
    value_at,
)
from thunder.options import FALLBACK_OPTIONS


def note_failure(c: Capture, error: Exception) -> None:
    """The program fails with an exception that no code of the user's raises: thunder fails on it, or it does by itself.
    The innermost function around it is tried as an eager call, which shows which."""
    if c.request.options.fallback is not FALLBACK_OPTIONS.EAGER or user_line(error)[1]:
        return
    for call in c.fallbacks.calls_left_by(error):
        if c.fallbacks.candidate is None:
            note_function(c, *call)
    if c.fallbacks.candidate is not None:
        c.request.eager.failing.add(c.fallbacks.candidate.unit)


def note_function(c: Capture, f: types.FunctionType, args, kwargs, happened: tuple) -> None:
    """A refusal leaves a call of `f`. happened: what had happened when it was entered."""
    if f.__code__ is _code_of(c.request.fn) or not _stands_alone(f):  # there is nothing around the compiled function
        return
    if c.request.eager.may_have(f.__code__) and _can_be_called(c, f, args, kwargs, behind=True):
        # the log of a program that this call has left counts earlier calls of it otherwise
        counts_others = bool(c.request.path) and c.calls[decode(f.__code__)] > 1
        c.fallbacks.name(f.__code__, c.dispatch.is_as_before(happened) and not counts_others)


def note_library(c: Capture, entered: LibraryCall) -> bool:
    """Notes what of the standard library, which the user's code has entered, may run as it is from now on: the class
    whose method it is, or the function. Gives whether there is anything."""
    f, args, kwargs = entered.function, entered.args, entered.kwargs
    if not c.dispatch.is_as_before(entered.happened):
        return False
    if args and note_class(c, type(args[0]), f.__code__.co_name == "__init__"):
        return True
    if (
        c.fallbacks.candidate is None
        and c.request.eager.may_have(f.__code__)
        and _may_be_given(c, (*args, *kwargs.values()))
    ):
        c.fallbacks.name(f.__code__, True)
    return c.fallbacks.candidate is not None


def note_class(c: Capture, cls: type, is_made_here: bool = False) -> bool:
    """Notes a class of the standard library, where its objects may be the host's from now on. is_made_here: since the
    call of the class nothing has run on the host. Otherwise it is one host call more than before, where others were
    counted: none may have had an effect, and no other path counts them."""
    if str(cls.__module__).split(".")[0] not in _CLASSES or not c.request.eager.may_have(cls):
        return False
    if c.fallbacks.candidate is None and (is_made_here or not (c.dispatch.log.effects or c.request.path)):
        c.fallbacks.name(cls, True)
    return c.fallbacks.candidate is not None


_CLASSES = sys.stdlib_module_names - {"builtins"}


def _may_be_given(c: Capture, values: tuple) -> bool:
    """Whether host code may be given all of these: no tensors, whose gradients and sizes it would not see, and nothing
    that the program may have written to."""
    if any(type(p) is TensorProxy for p in parts_of(values)):
        return False
    lent = len(c.path.lent)
    try:
        for value in values:
            host_lines.operand(c, value, False)
    except CaptureError:
        return False
    finally:
        del c.path.lent[lent:]  # nothing is given yet
    return True


def _stands_alone(f: types.FunctionType) -> bool:
    """Whether a function may be called apart from the program: it does not look at the autograd graph of its
    arguments, as `Tensor.backward` does, nor at its caller, and is no part of PyTorch's or thunder's own machinery."""
    if decode(f.__code__).foreign == COROUTINE:  # which runs when somebody awaits it
        return False
    module = f.__globals__.get("__name__") or ""
    if module.split(".")[0] in ("torch", "thunder") and not module.startswith(_APART):
        return False
    names = names_of(f.__code__)
    return _GRAPH.isdisjoint(names) and _CALLER.isdisjoint(names) and not names >= {"inspect", "stack"}


_APART = ("torch.nn", "torch.optim", "torch.distributions", "torch.masked", "torch.utils.checkpoint", "thunder.tests")
_GRAPH = {"backward", "grad_fn", "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "create_graph"}
_CALLER = {"_getframe", "currentframe", "print_stack", "extract_stack", "format_stack", "walk_stack"}


def _code_of(fn: Any) -> types.CodeType | None:
    """The code of the compiled function, or of the forward of the compiled module."""
    fn = original(fn)
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    return plain_attribute(getattr(fn, "__func__", fn), "__code__")


def _can_be_called(c: Capture, f: Callable, args, kwargs, behind: bool = False) -> bool:
    """behind: asked when the call has ended, where the program may have written inside of it."""
    lent = len(c.path.lent)
    try:
        _check_nesting(c, f)
        if not behind:
            _writes_to_show(c, f, args, kwargs)
        _check_placements(c, f, args, kwargs)
        _function(c, f)
        _arguments(c, args, kwargs)
        return True
    except CaptureError:
        return False
    finally:
        del c.path.lent[lent:]


def called(c: Capture, f: Callable, args, kwargs) -> Any:
    """The result of an eager call, or of a host call of the standard library; NULL where the function cannot be called
    as it is, and is read."""
    if c.dispatch.library is None and is_of_library(f) and _may_be_given(c, (*args, *kwargs.values())):
        return host_lines.run(c, f, args, kwargs, effect="outside")
    return NULL if isinstance(f, type) or not _can_be_called(c, f, args, kwargs) else _record(c, f, args, kwargs)


def disabled(c: Capture, f: Callable, args, kwargs) -> Any:
    """The result of a call of a function that the user wants called as it is.

    Raises CaptureError where it cannot stand in the program.
    """
    _check_nesting(c, f)
    _check_placements(c, f, args, kwargs)
    return _record(c, f, args, kwargs)


def call_operator(c: Capture, f: Callable, args, kwargs, error: Exception) -> Any:
    """The result of an operator of the user's that could not be typed: it is called as it is.

    Raises `error` where programs have no eager calls.
    """
    if c.request.options.fallback is not FALLBACK_OPTIONS.EAGER:
        raise error
    result = disabled(c, f, args, kwargs)
    reason = f"{f} runs as it is in each call of the program: no rule for fake tensors (register_fake) gives its result"
    warn_user(f"{reason} here ({type(error).__name__}: {error})", FallbackWarning)
    return result


def _unit(f: Any) -> types.CodeType | type:
    """The code of a function, or the class: what eager calls are known by."""
    return getattr(f, "__code__", f)


def _record(c: Capture, f: Callable, args, kwargs) -> Any:
    """Runs an eager call at capture and records it."""
    pending = _writes_to_show(c, f, args, kwargs)
    function = _function(c, f)
    args, kwargs = _arguments(c, args, kwargs)
    tensors = tuple(paths_of(args, kwargs, TensorProxy))
    context = c.recorder.context
    grad = context.grad_enabled
    proxies = {path: value_at(args, kwargs, path) for path in tensors}
    wanted = tuple(path for path, p in proxies.items() if grad and p.requires_grad)
    kinds = context.autocast.state[0] if context.autocast is not None else ()
    index = c.dispatch.host_calls
    outcome = c.path.run_eager_call(index, function, args, kwargs, (tensors, wanted, kinds, grad), pending)
    if outcome.error is not None:
        c.fallbacks.note_raises(c.request.eager.not_failing(_unit(f)))
        c.refuse(f"{_name(f)}() raises {type(outcome.error).__name__}, which the program may handle")
    leaves = tuple(_leaf(c, leaf, _name(f)) for leaf in outcome.leaves)
    kind = kind_with_leaves(outcome)
    decision = c.path.take_kind(_name(f), kind)
    c.dispatch.count_host_call()
    c.fallbacks.note_call(f)
    results, shown = _typed(c, outcome, proxies, _name(f))
    graph = AnyProxy("") if outcome.graph is not None else None
    inputs = () if graph is None else _inputs_behind(c, (*(proxies[path] for path in wanted), *leaves))
    arguments = (index, function, args, kwargs, leaves, kind, decision, tensors, wanted, kinds, grad, pending, inputs)
    symbol_for((results, graph)).record(c.recorder, arguments, {}, (results, graph))
    if any(type(result) is HostProxy for result in results):
        c.path.shown |= dict.fromkeys(proxies.values())
    for result, value in (*zip(results, results_of(outcome), strict=True), (graph, outcome.graph)):
        if isinstance(result, Proxy):
            c.path.knows(result, value)
            c.path.hold(result)
            host_lines.share(c, result, (args, kwargs))
    return shown


def _inputs_behind(c: Capture, values: Sequence[TensorProxy]) -> tuple[str, ...]:
    """Names of the program's inputs that gradients of these values go to."""
    operations = leading_to(c.recorder.bound_symbols, values)
    read = {*values, *(i for operation in operations for i in operation.inputs)}
    return tuple(p.name for p in c.tensors.real if p in read and p.requires_grad)


def _name(f: Callable) -> str:
    return getattr(f, "__qualname__", type(f).__qualname__)


def _check_nesting(c: Capture, f: Callable) -> None:
    """Refuses an eager call inside of transforms of functions and of checkpoints."""
    inside = (
        current_recorder() is not c.recorder or c.recording.outer or c.recording.levels or c.recorder.context.checkpoint
    )
    if inside or c.dispatch.is_in_cache or c.dispatch.reading is not None or c.dispatch.library is not None:
        c.refuse(f"{_name(f)}() would run inside of a transform of functions or a checkpoint")
    if compat.function_modes() != c.modes.functions:
        c.refuse(f"{_name(f)}() would run outside of a torch-function mode that the program has entered")


def _writes_to_show(c: Capture, f: Callable, args: tuple, kwargs: dict) -> Shown:
    """The writes of the program so far that the function may look at: those to tensors and to attributes of objects
    are carried out for the duration of the call. Refuses an eager call that could look at others."""
    effects, tensors = list(c.effects), list(c.tensors.mutated)
    written = [original for _, original, *_ in containers.changes(c)]
    if not (tensors or written or effects):
        return ()
    reach, shown = Reach((f, *(_seen_by(c, x) for x in (*args, *kwargs.values())))), list[tuple[Any, str | None, Any]]()
    hidden = any(map(reach.reaches, written))
    for p in tensors:
        if reach.reaches_memory(c.tensors.real[p][0]):
            now = c.recorder.latest(p)
            hidden = hidden or p.requires_grad or now.requires_grad
            shown.append((p, None, now))
    for kind, owner, name, value in effects:
        if kind == "global" and name is not None:
            hidden = hidden or reach.reads_global(owner, name)
        elif kind == "context":
            hidden = True
        elif reach.reaches(_seen_by(c, owner)):
            hidden = hidden or kind != "attr" or not _is_plain(owner) or type(value) is TensorProxy
            shown.append((owner, name, value))
    if hidden:
        c.refuse(f"{_name(f)}() may look at what the program has written to before")
    return tuple((p if name is None else _argument(c, p), name, _argument(c, x)) for p, name, x in shown)


def _is_plain(owner: Any) -> bool:
    """Whether attributes of an object are in its dict."""
    attributes = plain_attribute(owner, "__dict__")
    return type(attributes) is dict and not isinstance(owner, torch.Tensor)


def _check_placements(c: Capture, f: Callable, args: tuple, kwargs: dict) -> None:
    """Refuses an eager call of a function that reads parameters of which this rank holds a part, or that calls a module
    of PyTorch's FSDP or DDP: gradients of the program do not reach what these do in a backward."""
    values = (f, *(_seen_by(c, x) for x in (*args, *kwargs.values())))
    if reaches_parts(values):
        c.refuse(f"{_name(f)}() reads parameters of which each rank holds a part, and cannot be called as it is")


def _seen_by(c: Capture, value: Any) -> Any:
    """An argument as the function gets it."""
    look = c.containers.looks.get(id(value))
    return value if look is None else look.original


def _function(c: Capture, f: Callable) -> Any:
    """The function as the program holds it: a constant, or where it comes from outside with a closure, an input."""
    if type(f) is not types.FunctionType:
        return f
    if id(f) in c.fresh and (f.__closure__ or f.__defaults__ or f.__kwdefaults__):
        for cell in f.__closure__ or ():
            _check_seen(c, cell_value(cell, None), f)
        for value in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            _check_seen(c, value, f)
    by_parts = f.__closure__ or id(f) in c.world.anew
    source = c.outside.function_sources.get(id(f)) if by_parts else None
    return f if source is None else changing.read(c, f, source)


def _check_seen(c: Capture, value: Any, f: Callable) -> None:
    """Refuses a value of the program's in the closure of a function that runs as it is."""
    if type(value) not in PRIMITIVE and not isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
        c.refuse(f"{_name(f)}() keeps a value of the program in its closure")


def _arguments(c: Capture, args, kwargs) -> tuple[tuple, dict]:
    return tuple(_argument(c, x) for x in args), {k: _argument(c, x) for k, x in kwargs.items()}


def _argument(c: Capture, value: Any) -> Any:
    """An argument as the bound symbol holds it: a value of the program's, a constant, or an object from outside, which
    is an input."""
    look = c.containers.looks.get(id(value))
    if look is not None:
        return changing.read(c, look.original, look.source)
    if isinstance(value, (Proxy, NumberProxy)) or type(value) in PRIMITIVE:
        return host_lines.operand(c, value, False)
    source: Source | None = c.world.sources.get(id(value)) or c.world.origins.get(id(value))
    if source is not None and not isinstance(value, torch.Tensor):
        return changing.read(c, c.world.value_at(source), source)  # the program may have a copy, of its own values
    if type(value) in OPENED:
        if type(value) is not tuple:
            c.path.lend(value)
        c.materialize(value)
        if type(value) is dict:
            return {k: _argument(c, x) for k, x in value.items()}
        return type(value)(_argument(c, x) for x in value)
    if type(value) is types.FunctionType and id(value) not in c.fresh:
        return _function(c, value)
    return host_lines.operand(c, value, False)


def _leaf(c: Capture, tensor: torch.Tensor, name: str) -> TensorProxy:
    """The input for a tensor with a gradient that the function reads by itself."""
    known = c.tensors.proxies.get(id(tensor))
    if known:
        return next(iter(known.values()))
    return c.read(tensor, _source_of_leaf(c, tensor) or c.world.const(tensor, f"a tensor that {name} reads"))


def _source_of_leaf(c: Capture, tensor: torch.Tensor) -> Source | None:
    """The path of a parameter below a module that the program knows."""
    known = ((c.world.keep.get(number), source) for number, source in c.world.sources.items() if source.step != "const")
    pending, seen = [pair for pair in known if isinstance(pair[0], torch.nn.Module)], set[int]()
    while pending:
        module, source = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for table in ("_parameters", "_modules"):
            members = vars(module).get(table)
            for key, member in members.items() if isinstance(members, dict) else ():  # TorchScript's have none
                if member is tensor:
                    return source.attr(table).item(key)
                if isinstance(member, torch.nn.Module):
                    pending.append((member, source.attr(table).item(key)))
    return None


def _typed(c: Capture, outcome: Outcome, proxies: dict[tuple, TensorProxy], name: str) -> tuple[tuple, Any]:
    """The values in the result as the bound symbol holds them, and the result as the program gets it."""
    position, results = itertools.count(), list[Any]()

    def typed(x):
        if type(x) is Argument:
            return proxies[x.path]
        connected = isinstance(x, torch.Tensor) and next(position) in outcome.connected
        result, shown = host_lines.typed(c, name, type(x), x, (), connected)
        results.append(result)
        return shown

    value = outcome.value
    shown = typed(value.value) if type(value) is Held else map_result(typed, value)
    return tuple(results), shown
