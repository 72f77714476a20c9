"""Binding of arguments to parameters. Native code binds, in a function of the same parameters, and words the errors."""

from __future__ import annotations

import types

from thunder.interpreter.instructions import NULL

CO_VARARGS, CO_VARKEYWORDS = 4, 8


def bind(f, record, arguments, keywords, default):
    """The variables of a call `f(*arguments, **keywords)` by name; `record` is the decoded code of `f`.

    `default(f, name, value)` is asked for every default value that is used, and with None for a name where the number
    of defaults is part of an error. Raises TypeError as CPython does.
    """
    defaults, by_name = f.__defaults__ or (), f.__kwdefaults__ or {}
    form = len(defaults), *by_name
    binder = record.binders.get(form)
    if binder is None:
        binder = record.binders[form] = _binder(f, form)
    try:
        bound = binder(*arguments, **keywords)
    except TypeError:
        bound = None
    if bound is None:
        default(f, None, None)
        return _binder(f, form)(*arguments, **keywords)  # raises, with the name of this function
    for name in [n for n, value in bound.items() if value is NULL]:
        by_position = name in record.arguments
        value = defaults[record.arguments.index(name) - record.argument_count] if by_position else by_name[name]
        bound[name] = default(f, name, value)
    return bound


def _template():
    return locals()


def _binder(f, form) -> types.FunctionType:
    """A native function of the parameters of `f` that returns them by name, NULL for each default value."""
    code, (count, *names) = f.__code__, form
    parameters = code.co_argcount + code.co_kwonlyargcount
    parameters += bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    binder_code = _template.__code__.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=code.co_varnames[:parameters],
        co_nlocals=parameters,
        co_flags=_template.__code__.co_flags | code.co_flags & (CO_VARARGS | CO_VARKEYWORDS),
    )
    binder = types.FunctionType(binder_code, {"locals": locals}, f.__name__, (NULL,) * count)
    binder.__kwdefaults__, binder.__qualname__ = dict.fromkeys(names, NULL), f.__qualname__
    return binder


def of(*counts, named=False):
    """Makes a handler of a builtin's calls from `run(host, *args)`, for calls with so many positional arguments; native
    code answers others. named: the second argument is the name of an attribute."""

    def make(run):
        def handler(host, function, args, kwargs):
            if named and len(args) > 1:
                args = [args[0], host.attribute_name(args[1]), *args[2:]]
            if kwargs or len(args) not in counts or named and not isinstance(args[1], str):
                return host.call_native(function, args, kwargs)
            return run(host, *args)

        return handler

    return make
