"""Handlers: the functions of Python and PyTorch whose calls need care, by identity."""

from __future__ import annotations

import builtins
import functools
import importlib
import itertools
import math
import operator
import os
import types
import weakref
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.hooks import BackwardHook

from thunder import compat
from thunder.capture import changing, eager, host_lines, namespaces, objects
from thunder.capture.calls import Entered
from thunder.capture.construct import construct_object, new_reference, reduced
from thunder.capture.identities import hashable, id_of
from thunder.capture.interface import Capture
from thunder.capture.library import (
    autograd_function,
    backward,
    checkpoints,
    collectives,
    higher_order,
    hooks,
    host_functions,
    leaves,
    levels,
    torch_func,
)
from thunder.capture.native import PRIMITIVE, in_library
from thunder.capture.native_calls import call_builtin, call_native, iterable, iterated
from thunder.capture.operations import SPECIAL_METHODS, record, type_of
from thunder.capture.policy import DEFINED, DEFINED_BY_NAME
from thunder.capture.world import FILLED, HOOKLESS, HOOKS
from thunder.core.host_calls import HostProxy
from thunder.core.numbers import application
from thunder.core.proxies import Condition, NumberProxy, Proxy, TensorProxy, converted, extreme
from thunder.core.symbolic import MATH
from thunder.core.unbacked import assume
from thunder.distributed.placement import communicates_by_itself
from thunder.distributed.prepared import is_adopted
from thunder.extend.debugging import breakpoint_line
from thunder.interpreter import NULL, attributes
from thunder.interpreter.attributes import parts_of
from thunder.interpreter.builtin_calls import FRAME_CALLS
from thunder.interpreter.host import PROTOCOL_CALLS
from thunder.ops.families import random
from thunder.ops.opaque_values import CONSTRUCTORS
from thunder.ops.tensor_values import as_number
from thunder.options import compile_option


def _type(c: Capture, f, args, kwargs):
    if len(args) != 1 or kwargs:
        makes_class = args and isinstance(args[0], type)
        return (construct_object if makes_class else call_native)(c, f, args, kwargs)
    return type_of(c, args[0])


def _number(c: Capture, f, args, kwargs):
    """int and float."""
    if len(args) == 1 and isinstance(args[0], NumberProxy):
        return converted(args[0], f)
    if len(args) == 1 and type(args[0]) is TensorProxy:
        c.synchronize()
        return as_number(args[0], f)
    if args and type(args[0]) is HostProxy:
        return host_lines.run(c, f, args, kwargs, pure=True)
    return PROTOCOL_CALLS[id(f)](c, f, args, kwargs)


MODULE_CALLS = compile_option(
    "max_module_calls", int, 0,
    "calls of one module with parameters in a program; a function with more of them runs the original; 0: any number",
    owner="capture", valid="a number from 0 on", check=lambda n: n >= 0,
)  # fmt: skip


@functools.cache
def _hooks_of_all() -> list[dict]:
    """The hook dicts of all modules, in the order of HOOKS."""
    return [getattr(compat, f"global{n}") for n in HOOKS]


def _module_call(c: Capture, f, args, kwargs):
    """nn.Module.__call__: without hooks it goes straight to forward."""
    m = args[0]
    d = m.__dict__
    if d.get("_compiled_call_impl") is not None:
        c.refuse("a module that torch.compile compiled is called inside", "compile with one of the two")
    if compat.distributed_is_used() and communicates_by_itself(m) and not is_adopted(m):
        collectives.refuse_wrapper(c, f, args, kwargs)
    _count_call(c, m)
    if not d.keys() >= set(HOOKS):  # nn.Module's own __init__ was not called: PyTorch's error
        return c.enter(compat.call_module, args, kwargs)
    tables = [d[n] for n in HOOKS]
    if any(tables) or any(_hooks_of_all()) or any(map(c.containers.snapshots.get, map(id, tables))):
        if f.__code__ in c.request.eager and (result := eager.called(c, f, args, kwargs)) is not NULL:
            if id(m) in c.world.sources:  # it reads the hooks itself
                c.world.ask(c.world.sources[id(m)], HOOKLESS)
            return result
        _guard_hooks(c, m)
        with Entered(c, f, args, kwargs):
            return c.enter(compat.call_module, args, kwargs)
    _watch_hooks(c, m)
    forward = m.forward if isinstance(m, torch.jit.ScriptModule) else c.load_attr(m, "forward")  # which caches it
    return c.call(forward, args[1:], kwargs)


def _count_call(c: Capture, m) -> None:
    most = c.request.options.get(MODULE_CALLS)
    if most and (m._parameters or m._modules):
        c.known.module_calls[id(m)] += 1
        if c.known.module_calls[id(m)] > most:
            c.refuse(
                f"{type(m).__name__} is called more than {most} times (max_module_calls=), each of which would be a "
                "part of one long program",
                "compile what the loop calls",
            )


def _watch_hooks(c: Capture, m) -> None:
    """The hook dicts of a module without hooks, and those of all modules, are checked to stay empty."""
    if id(m) not in c.world.sources or id(m) in c.known.seen_hooks:
        return
    if not c.known.seen_hooks:
        c.world.ask(c.world.const(c.outside.hooks, "hooks"), FILLED)
        c.outside.hooks += _hooks_of_all()
    c.known.seen_hooks.add(id(m))
    if id(m) in c.world.anew:
        c.world.ask(c.world.sources[id(m)], HOOKLESS)
        return
    c.outside.hooks += map(m.__dict__.__getitem__, HOOKS)


def _guard_hooks(c: Capture, m) -> None:
    """The hook dicts of a module with hooks are read by the interpreted call; those that are empty are checked to stay
    so. Keys of forward hooks mean nothing to it where none is one of the special ones."""
    if id(m) not in c.world.sources:
        return
    special = [x for x in (vars(m).get(n) for n in _SPECIAL_HOOKS) if x]
    for n in _SPECIAL_HOOKS if not special else ():
        c.materialize(c.load_attr(m, n))
    for n in HOOKS:
        known = c.containers.snapshots.get(id(vars(m)[n]))  # the module is called for a second time
        hooks = c.load_attr(m, n) if known is None else known
        if id(hooks) in c.containers.lazy and not special and n in HOOKS[:2]:
            c.containers.lazy[id(hooks)].by_position = not dict.__len__(hooks)
        c.materialize(hooks)


# of forward hooks, those that are called in another way, by their keys
_SPECIAL_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def _around_backward(c: Capture, f, args, kwargs):
    """`BackwardHook.setup_input_hook` and `setup_output_hook`: full backward hooks of a module run where its inputs or
    its results have a gradient."""
    _, values = args
    tensors = (x for x in parts_of(values) if isinstance(x, (torch.Tensor, TensorProxy)))
    if torch.is_grad_enabled() and any(c.lift(x).requires_grad for x in tensors):
        c.refuse("a module has full backward hooks", "remove the hooks, or register hooks on tensors")
    return values


def _apply_function(c: Capture, f, args, kwargs):
    """`autograd.Function.apply`."""
    if args[0] is torch.utils.checkpoint.CheckpointFunction:
        return checkpoints.reentrant(c, args[1], args[3:])  # between them stands preserve_rng_state
    return autograd_function.apply(c, f, args, kwargs)


def _is_number(value) -> bool:
    return type(value) in (int, float, bool) or isinstance(value, NumberProxy)


def _make_autocast(c: Capture, f, args, kwargs):
    """`torch.autocast(...)`: without a dtype it takes the one that is set, which is asked where the program has not set
    it."""
    context: Any = call_native(c, f, args, kwargs)
    if (args[1] if len(args) > 1 else kwargs.get("dtype")) is None:
        dtype_now = functools.partial(torch.get_autocast_dtype, context.device)
        if dtype_now() is c.modes.settings.get(f"autocast's dtype on {context.device}"):
            c.world.ask_setting(
                c.world.const(dtype_now, f"autocast's dtype on {context.device}").call("__call__"), dtype_now()
            )
    return context


def _leave_autocast(c: Capture, f, args, kwargs):
    """`autocast.__exit__`: where no other one is around it, the casts that it kept are gone."""
    result = call_native(c, f, args, kwargs)
    if not compat.autocast_nesting():
        c.recorder.casts.clear()
    return result


def _enter_range(c: Capture, f, args, kwargs):
    """`record_function.__enter__`: the operations inside have the name of the range (`transforms/named_ranges.py`)."""
    name = args[0].name
    c.recording.enter_range(name if type(name) is str else type(args[0]).__name__)
    return args[0]


def _leave_range(c: Capture, f, args, kwargs):
    c.recording.leave_range()


def _torch_compile(c: Capture, f, args, kwargs):
    """A function that is compiled inside is a part of this program as it is."""
    fn = args[0] if args else kwargs.get("model")
    if callable(kwargs.get("backend")) or isinstance(fn, torch.nn.Module):
        kind = "a module" if isinstance(fn, torch.nn.Module) else "a backend of one's own"
        reason = f"torch.compile of {kind} is called inside the program"
        c.refuse(reason, "compile with one of the two: remove the inner torch.compile")
    return functools.partial(f, **kwargs) if fn is None else fn


# handlers of functions whose modules are imported only by programs that use them
DEFINED_BY_NAME |= {**higher_order.BY_NAME, **torch_func.BY_NAME}


def _constant(value):
    return lambda c, f, args, kwargs: value


def _extreme(c: Capture, f, args, kwargs):
    """min and max of numbers some of which are symbolic."""
    numbers = args if len(args) > 1 else args[0] if args and type(args[0]) in (list, tuple) else ()
    symbolic = any(isinstance(n, NumberProxy) for n in numbers)
    if symbolic and not kwargs and all(isinstance(n, (int, float, NumberProxy)) for n in numbers):
        return functools.reduce(lambda a, b: extreme(f.__name__, a, b), numbers)
    return call_builtin(c, f, args, kwargs)


def _of_numbers(c: Capture, f, args, kwargs):
    """A function of `math` of numbers with values, some of which are symbolic."""
    symbolic = [n for n in args if isinstance(n, NumberProxy)]
    if kwargs or not symbolic or any(n.unbacked for n in symbolic) or not all(map(_is_number, args)):
        return call_builtin(c, f, args, kwargs)
    result = application(f"math.{f.__name__}", *args)
    return bool(result) if f in (math.isnan, math.isinf, math.isfinite) else result


def _symbolic(c: Capture, f, args, kwargs):
    """torch.sym_max and the like: Python's functions without branching."""
    if f is torch.sym_not:
        return args[0].__sym_not__() if type(args[0]) is Condition else not args[0]
    if f in (torch.sym_int, torch.sym_float):
        return converted(args[0], int if f is torch.sym_int else float)
    result = extreme("max" if f is torch.sym_max else "min", *args)
    has_float = any(isinstance(x, float) or isinstance(x, NumberProxy) and x.python_type is float for x in args)
    return converted(result, float) if has_float else result


def _instance_check(c: Capture, f, args, kwargs):
    """type.__instancecheck__, called by name: proxies are of the classes that they stand for."""
    kind = type_of(c, args[1]) if len(args) == 2 else None
    if kind is not None and (kind is not type(args[1]) or args[0] in kind.__mro__):
        return type.__subclasscheck__(args[0], kind)
    return call_native(c, f, args, kwargs)


def _hash(c: Capture, f, args, kwargs):
    return PROTOCOL_CALLS[id(f)](c, f, [changing.settled(c, hashable(c, a)) for a in args], kwargs)


def _chained(c: Capture, f, args, kwargs):
    """itertools.chain.from_iterable."""
    _, *iterables = args
    if len(iterables) == 1 and not kwargs:
        iterables = [map(functools.partial(iterated, c), iterable(c, iterables[0]))]
    return call_native(c, f, iterables, kwargs)


def _accumulate(c: Capture, f, args, kwargs):
    """itertools.accumulate, which adds where it is given no function."""
    if (args[1] if len(args) > 1 else kwargs.get("func")) is None:
        args, kwargs = args[:1], kwargs | {"func": operator.add}
    return call_native(c, f, [iterable(c, a) if i == 0 else a for i, a in enumerate(args)], kwargs)


def _compress(c: Capture, f, args, kwargs):
    """itertools.compress, which asks selectors for the truth."""
    if len(args) == 2 and not kwargs:
        args = [iterable(c, args[0]), map(c.truth, iterable(c, args[1]))]
    return call_native(c, f, args, kwargs)


def _check_is_size(c: Capture, f, args, kwargs):
    """torch._check_is_size: of a data-dependent number; others are checked by PyTorch's own function."""
    (n, *rest), most = args, kwargs.get("max")
    if not (isinstance(n, NumberProxy) and n.unbacked):
        return c.enter(f, args, kwargs)
    message = rest[0] if rest else kwargs.get("message")
    for condition in (c.compare(">=", n, 0), True if most is None else c.compare("<=", n, most)):
        _check_with(c, compat.check_with, [RuntimeError, condition, message], {})


def _check_with(c: Capture, f, args, kwargs):
    """torch._check_with, which all of torch._check, _check_value, _check_tensor_all and the like call: a condition on
    data-dependent numbers is checked when the program runs. One with another error is a decision of the program."""
    error, condition, message = args
    if type(condition) is not Condition:
        return c.enter(f, args, kwargs)
    if error is not RuntimeError:
        return c.enter(f, [error, c.truth(condition), message], kwargs)
    text = f"Expected {condition.text()}" if message is None else str(c.call(message, [], {}))
    assume(condition, text)
    return None


def _assert(c: Capture, f, args, kwargs):
    """torch._assert: a condition on tensors cannot be asked, one on data-dependent numbers is checked when the program
    runs."""
    condition, message = args
    if type(condition) is Condition:
        assume(condition, message)
        return None
    if type(condition) is TensorProxy:
        c.sharp("an assertion on a tensor's value is not checked in the compiled program")
        return None
    return c.enter(f, args, kwargs)


def _print(c: Capture, f, args, kwargs):
    return host_lines.run_impure(c, f, [_printable(c, a) for a in args], kwargs)


def _printable(c: Capture, value):
    """An argument of print: an object's text comes from its class, which may be the user's."""
    known = (Proxy, NumberProxy, Condition, *host_lines.FIXED)
    plain = type(value) in PRIMITIVE | {list, tuple, dict, set} or isinstance(value, known)
    return host_lines.printed(c, value) if plain else c.call(str, [value], {})


_APPLY = vars(torch.autograd.Function)["apply"]  # a class method, from torch 2.15 on one in C


def install() -> None:
    """Puts the handlers where calls look for them."""
    DEFINED.update(FRAME_CALLS)
    DEFINED.update(PROTOCOL_CALLS)
    table = {
        **_of_python(), **_of_modules(), **_of_settings(), **_of_tensors(), **_of_derivatives(), **_of_private_names(),
        **torch_func.HANDLERS, **levels.HANDLERS, **host_functions.handlers(),
        **hooks.HANDLERS,
    }  # fmt: skip
    # what the user has put in the place of a function of a library is the user's Python
    table = {f: h for f, h in table.items() if type(f) is not types.FunctionType or in_library(f.__module__)}
    DEFINED.update({id(f): h for f, h in table.items()})
    KEEP.extend(table)


def _of_python() -> dict:
    """Handlers of builtins and of the standard library."""
    return {
        type: _type, id: id_of, hash: _hash, print: _print, int: _number, float: _number,
        breakpoint: lambda c, f, a, k: breakpoint_line(),
        **dict.fromkeys((__import__, importlib.import_module), namespaces.import_module),
        object.__reduce_ex__: reduced, weakref.ref.__new__: new_reference, type.__instancecheck__: _instance_check,
        vars(itertools.chain)["from_iterable"]: _chained,
        itertools.accumulate: _accumulate, itertools.compress: _compress,
        **dict.fromkeys((dir, exec, eval, builtins.__build_class__), lambda c, f, a, k: host_lines.refuse(c, f)),
        os.getenv: lambda c, f, a, k: c.call(c.load_attr(c.load_attr(os, "environ"), "get"), a, k),
        min: _extreme, max: _extreme,
        **{f: _of_numbers for f in MATH.values() if id(f) not in PROTOCOL_CALLS},
    }  # fmt: skip


def _of_modules() -> dict:
    """Handlers of what modules run through."""
    M = torch.nn.Module
    return {
        M.__call__: _module_call,
        M.__getattr__: lambda c, f, a, k: objects.of_torch_module(c, *a),
        M.__setattr__: _module_setattr,
        torch.utils.checkpoint.checkpoint: checkpoints.call,
        torch.nn.Parameter: leaves.parameter, torch.nn.Parameter.__deepcopy__: leaves.copied,
    }  # fmt: skip


def _of_settings() -> dict:
    """Handlers of PyTorch's modes, and of its questions for who runs the code."""
    return {
        torch.compile: _torch_compile,
        torch.random.fork_rng: lambda c, f, a, k: random.fork_rng(*a, **k),
        torch.autocast: _make_autocast, torch.autocast.__exit__: _leave_autocast,
        torch.cpu.amp.autocast.__exit__: _leave_autocast,  # pyright: ignore[reportPrivateImportUsage]
        torch.cuda.amp.autocast.__exit__: _leave_autocast,
        torch.compiler.is_compiling: lambda c, f, a, k: c.compiling,
        torch.compiler.is_dynamo_compiling: _constant(False),
        torch.overrides.has_torch_function: _constant(False),
        torch.overrides.has_torch_function_unary: _constant(False),
        torch.overrides.has_torch_function_variadic: _constant(False),
        torch.jit.is_scripting: _constant(False),  # pyright: ignore[reportPrivateImportUsage]
        torch.jit.is_tracing: _constant(False),  # pyright: ignore[reportPrivateImportUsage]
        torch.autograd.profiler.record_function.__enter__: _enter_range,
        torch.autograd.profiler.record_function.__exit__: _leave_range,
    }  # fmt: skip


def _of_tensors() -> dict:
    """Handlers of functions that give tensors, and of those of symbolic numbers."""
    return {
        **{getattr(torch.Tensor, n): handler for n, handler in SPECIAL_METHODS.items()},
        **dict.fromkeys((torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_float, torch.sym_not), _symbolic),
        **dict.fromkeys(CONSTRUCTORS, record),
    }


def _of_derivatives() -> dict:
    """Handlers of autograd's functions."""
    return {
        torch.autograd.graph.saved_tensors_hooks.__enter__: _hook_saved_tensors,
        torch.autograd.graph.saved_tensors_hooks.__exit__: _constant(None),
        getattr(_APPLY, "__func__", _APPLY): _apply_function,
        **dict.fromkeys((BackwardHook.setup_input_hook, BackwardHook.setup_output_hook), _around_backward),
        torch.autograd.backward: lambda c, f, a, k: c.enter(f, a, k),
        torch.autograd.grad: lambda c, f, a, k: c.enter(f, a, k),
    }


def _of_private_names() -> dict:
    """Handlers of functions of PyTorch's that this version has under a private name."""
    return compat.existing({
        "call_wrapped_module": _module_call, "call_module": _module_call, "tracing_state": _constant(None),
        "log_api_usage_once": _constant(None),
        "group_tensors": backward.group_by_device_and_dtype, "make_gradients": backward.make_gradients,
        "run_engine": backward.run_engine,
        "assert": _assert, "check_with": _check_with, "check_is_size": _check_is_size,
    })  # fmt: skip


def _hook_saved_tensors(c: Capture, f, args, kwargs) -> None:
    """Hooks of what autograd saves: a compiled program saves other tensors, and elsewhere. Those that only move them
    change nothing that a program computes."""
    if torch.is_grad_enabled() and not isinstance(args[0], torch.autograd.graph.save_on_cpu):
        c.refuse(
            "hooks of saved tensors (torch.autograd.graph.saved_tensors_hooks) are entered inside the program",
            "enter them outside of the compiled function",
        )


KEEP: list = []


_HOLDS = {"_parameters": torch.nn.Parameter, "_buffers": torch.Tensor, "_modules": torch.nn.Module}


def _module_setattr(c: Capture, f, args, kwargs):
    """nn.Module.__setattr__ of an outside module: any value but a parameter, buffer or child is an attribute, without
    looking at all others. A new value of one stands in the dict that has it."""
    m, n, v = args
    if id(m) not in c.world.sources:  # made inside
        return c.enter(f, args, kwargs)
    kind, where = type_of(c, v), next((w for w in _HOLDS if _holds(c, m, w, n)), None)
    if where is None and not issubclass(kind, (torch.nn.Parameter, torch.nn.Module)):
        return attributes.set_attribute(c, m, n, v)
    moves = where == "_buffers" and issubclass(kind, torch.nn.Parameter)
    if where is None or moves or v is not None and not issubclass(kind, _HOLDS[where]):
        return c.enter(f, args, kwargs)
    if id(m.__dict__[where].get(n)) in c.tensors.replaced:
        c.refuse(
            f"{n!r} is assigned, for which a transform has put another tensor in the place of the module's own",
            "leave this buffer to the module",
        )
    return c.setitem(c.load_attr(m, where), n, v)


def _holds(c: Capture, m, where: str, n: str) -> bool:
    table = m.__dict__.get(where)
    known = table is not None and (n in table or id(table) in c.containers.snapshots)
    return known and c.contains(c.load_attr(m, where), n)
