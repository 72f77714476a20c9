"""Builtins that look at the calling frame: `super()`, `locals()`, `exec`, `sys._getframe` and the like.

Natively they would see the machine's own frames. A row here is `handler(host, function, args, kwargs)`.
"""

from __future__ import annotations

import sys
import types
import warnings

from thunder.interpreter.binding import of
from thunder.interpreter.recursion import set_original_limit
from thunder.interpreter.tracebacks import stub_frame, swallow


def frame_locals(host, frame):
    """The variables of a frame by name, cells unwrapped.

    Before 3.13 it is one dict for each frame, which keeps the values that the program puts into it under other names.
    """
    code = frame.fn.__code__
    cells = {*code.co_cellvars, *code.co_freevars}
    values = {}
    for name, value in frame.locals.items():
        if name in cells and type(value) is types.CellType:
            try:
                value = host.load_cell(frame.fn, value, name)
            except NameError:
                continue
        values[name] = value
    if _SNAPSHOTS:
        return values
    if frame.snapshot is None:
        frame.snapshot = {}
    for name in frame.snapshot.keys() & {*code.co_varnames, *cells} - values.keys():
        del frame.snapshot[name]
    frame.snapshot.update(values)
    return frame.snapshot


_SNAPSHOTS = sys.version_info >= (3, 13)  # PEP 667


def _super(host, function, args, kwargs):
    """`super()`: the class cell and the first argument of the calling frame."""
    if args or not host.stack_of_frames:
        return function(*args, **kwargs)  # it looks at the type of its second argument, never inside
    frame = host.stack_of_frames[-1]
    code, variables = frame.fn.__code__, frame.locals
    if not code.co_argcount:
        raise RuntimeError("super(): no arguments")
    first = code.co_varnames[0]
    if first not in variables:
        raise RuntimeError("super(): arg[0] deleted")
    receiver = variables[first]
    if first in code.co_cellvars and type(receiver) is types.CellType:
        receiver = host.load_cell(frame.fn, receiver, first)
    if "__class__" not in code.co_freevars:
        raise RuntimeError("super(): __class__ cell not found")
    try:
        cls = host.load_cell(frame.fn, variables["__class__"], "__class__")
    except NameError as error:
        cls = swallow(error)
    if cls is None:
        raise RuntimeError("super(): empty __class__ cell")
    if not isinstance(cls, type):
        raise RuntimeError(f"super(): __class__ is not a type ({type(cls).__name__})")
    return super(cls, receiver)


def _locals(host, function, args, kwargs):
    return frame_locals(host, host.stack_of_frames[-1]) if host.stack_of_frames else function()


def _globals(host, function, args, kwargs):
    return host.load_attr(host.stack_of_frames[-1].fn, "__globals__") if host.stack_of_frames else function()


def _vars(host, function, args, kwargs):
    if len(args) != 1 or kwargs:
        return host.call_native(function, args, kwargs) if args or kwargs else _locals(host, function, args, kwargs)
    try:
        return host.load_attr(args[0], "__dict__")
    except AttributeError as error:
        swallow(error)
    raise TypeError("vars() argument must have __dict__ attribute")


def _dir(host, function, args, kwargs):
    return host.call_native(function, args, kwargs) if args else sorted(_locals(host, function, args, kwargs))


def _exec_or_eval(mode):
    """The handler of `exec` or `eval`."""

    def run(host, function, args, kwargs):
        """The code runs natively, in the namespaces of the calling frame where it is given none."""
        if not args:
            return function(**kwargs)  # raises
        source, *spaces = args
        keywords = {name: kwargs[name] for name in kwargs if name not in ("globals", "locals")}
        spaces += [kwargs[name] for name in ("globals", "locals") if name in kwargs]
        if host.stack_of_frames:
            frame = host.stack_of_frames[-1]
            if isinstance(source, (str, bytes)):
                source = source.lstrip(" \t") if isinstance(source, str) and mode == "eval" else source
                source = compile(source, "<string>", mode, frame.fn.__code__.co_flags & _FUTURE, True)
            if not spaces or spaces[0] is None:
                names = spaces[1] if len(spaces) > 1 else None
                spaces = [frame.fn.__globals__, frame_locals(host, frame) if names is None else names]
        return host.call_native(function, [source, *spaces], keywords)

    return run


_FUTURE = 0x1FF0000  # CO_FUTURE_*: the `from __future__` imports of the calling code


def _get_frame(host, function, args, kwargs):
    """A real frame object that looks like the interpreted frame; its f_back leads to the machine."""
    depth = args[0] if args else 0
    frames = host.stack_of_frames
    if depth >= len(frames):
        return sys._getframe(depth - len(frames) + 1)
    frame = frames[-1 - depth]
    real, frame.record.stub = stub_frame(
        frame.fn.__code__, frame.record.stub, frame.fn.__globals__, dict(frame_locals(host, frame))
    )
    return real


def _get_frame_module_name(host, function, args, kwargs):
    depth = args[0] if args else kwargs.get("depth", 0)
    frames = host.stack_of_frames
    return frames[-1 - depth].fn.__globals__.get("__name__") if depth < len(frames) else None


def _exc_info(host, function, args, kwargs):
    error = host.exc
    return (type(error), error, error.__traceback__) if error is not None else function()


def _exception(host, function, args, kwargs):
    return host.exc if host.exc is not None else function()


def _warn(host, function, args, kwargs):
    """warnings.warn: the warning is attributed to the interpreted frame that `stacklevel` names."""
    parameters: list = [*args, None, None, None, None]
    message, category, level, source = parameters[:4]
    category = kwargs.get("category", category)
    level = kwargs.get("stacklevel", level) or 1
    source = kwargs.get("source", source)
    if not args or kwargs.keys() - {"category", "stacklevel", "source"} or not 1 <= level <= len(host.stack_of_frames):
        return host.call_native(function, args, kwargs)
    frame = host.stack_of_frames[-level]
    code, namespace = frame.fn.__code__, frame.fn.__globals__
    category = type(message) if isinstance(message, Warning) else category or UserWarning
    line = frame.record.line(code, frame.ip) or code.co_firstlineno
    registry = namespace.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, category, code.co_filename, line, namespace.get("__name__", "<string>"), registry, source=source
    )


def _set_recursion_limit(host, function, args, kwargs):
    limit = int(args[0])
    if limit < 1:
        raise ValueError("recursion limit must be greater or equal than 1")
    set_original_limit(limit)
    host.recursion_limit = limit


@of(2, 3, named=True)
def _getattr(host, value, name, *default):
    if not default:
        return host.load_attr(value, name)
    try:
        return host.load_attr(value, name)
    except AttributeError as error:
        swallow(error)
        return default[0]


@of(2, named=True)
def _hasattr(host, value, name):
    try:
        host.load_attr(value, name)
        return True
    except AttributeError as error:
        swallow(error)
        return False


_ROWS = {
    super: _super,
    locals: _locals,
    globals: _globals,
    vars: _vars,
    dir: _dir,
    exec: _exec_or_eval("exec"),
    eval: _exec_or_eval("eval"),
    sys._getframe: _get_frame,
    sys.exc_info: _exc_info,
    sys.exception: _exception,
    sys.getrecursionlimit: lambda host, function, args, kwargs: host.recursion_limit,
    warnings.warn: _warn,
    sys.setrecursionlimit: _set_recursion_limit,
    getattr: _getattr,
    hasattr: _hasattr,
    setattr: of(3, named=True)(lambda host, *args: host.store_attr(*args)),
    delattr: of(2, named=True)(lambda host, *args: host.delete_attr(*args)),
}
if hasattr(sys, "_getframemodulename"):  # from 3.12
    _ROWS[sys._getframemodulename] = _get_frame_module_name  # pyright: ignore[reportAttributeAccessIssue]
# By identity, so that a callable that cannot be hashed can be looked up.
FRAME_CALLS = {id(function): handler for function, handler in _ROWS.items()}
