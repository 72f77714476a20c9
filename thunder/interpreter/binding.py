"""Binding of arguments to parameters, with CPython's error messages (after Python/ceval.c, initialize_locals)."""

from __future__ import annotations

CO_VARARGS, CO_VARKEYWORDS = 4, 8


def bind(f, record, arguments, keywords, default):
    """The variables of a call `f(*arguments, **keywords)` by name; `record` is the decoded code of `f`.

    `default(f, name, value)` is asked for every default value that is used, and with None for a name where the number
    of defaults is part of an error. Raises TypeError as CPython does.
    """
    positional, total, given = record.argument_count, record.parameter_count, len(arguments)
    bound = dict(zip(record.arguments, arguments))  # noqa: B905 - surplus goes to *args, or is an error below
    if record.plain and given <= positional:  # neither *args nor **kwargs
        if keywords:
            if keywords.keys() <= record.by_keyword and bound.keys().isdisjoint(keywords):
                bound.update(keywords)
            else:
                _bind_keywords(f, f.__code__.co_varnames, total, keywords, bound, None)
        if len(bound) == total:
            return bound
    else:
        _bind_variable(f, record, arguments, keywords, bound, default)
    names = f.__code__.co_varnames
    if given < positional:
        _bind_defaults(f, names, given, bound, default)
    if total > positional:
        _bind_keyword_defaults(f, names[positional:total], bound, default)
    return bound


def _bind_variable(f, record, arguments, keywords, bound, default):
    """Bind *args, **kwargs and keywords; too many positional arguments are found here."""
    code = f.__code__
    names, positional, total = code.co_varnames, record.argument_count, record.parameter_count
    extra = None
    after = total
    if code.co_flags & CO_VARARGS:
        bound[names[after]] = tuple(arguments[positional:])
        after += 1
    if code.co_flags & CO_VARKEYWORDS:
        extra = bound[names[after]] = {}
    if keywords:
        _bind_keywords(f, names, total, keywords, bound, extra)
    if len(arguments) > positional and not code.co_flags & CO_VARARGS:
        default(f, None, None)
        raise _too_many(f, names, len(arguments), bound)


def _bind_keywords(f, names, total, keywords, bound, extra):
    positional_only = f.__code__.co_posonlyargcount
    allowed = names[positional_only:total]
    for key, value in keywords.items():
        if not isinstance(key, str):
            raise TypeError("keywords must be strings")
        if key in allowed:
            if key in bound:
                raise TypeError(f"{f.__qualname__}() got multiple values for argument '{key}'")
            bound[key] = value
        elif extra is not None:
            extra[key] = value
        else:
            clashes = [name for name in names[:positional_only] if name in keywords]
            if clashes:
                raise TypeError(
                    f"{f.__qualname__}() got some positional-only arguments passed as keyword arguments: "
                    f"'{', '.join(clashes)}'"
                )
            raise TypeError(f"{f.__qualname__}() got an unexpected keyword argument '{key}'")


def _bind_defaults(f, names, given, bound, default):
    code = f.__code__
    defaults = f.__defaults__ or ()
    positional = code.co_argcount
    first = positional - len(defaults)
    missing = [name for name in names[given:first] if name not in bound]
    if missing:
        default(f, None, None)
        raise _missing(f, "positional", missing)
    for k in range(max(given, first), positional):
        name = names[k]
        if name not in bound:
            bound[name] = default(f, name, defaults[k - first])


def _bind_keyword_defaults(f, names, bound, default):
    defaults = f.__kwdefaults__ or {}
    missing = []
    for name in names:
        if name not in bound:
            if name in defaults:
                bound[name] = default(f, name, defaults[name])
            else:
                missing.append(name)
    if missing:
        default(f, None, None)
        raise _missing(f, "keyword-only", missing)


def _missing(f, kind, missing):
    quoted = [repr(name) for name in missing]
    if len(quoted) > 2:
        text = ", ".join(quoted[:-1]) + f", and {quoted[-1]}"
    else:
        text = " and ".join(quoted)
    plural = "" if len(missing) == 1 else "s"
    return TypeError(f"{f.__qualname__}() missing {len(missing)} required {kind} argument{plural}: {text}")


def _too_many(f, names, given, bound):
    code = f.__code__
    positional, defaults = code.co_argcount, len(f.__defaults__ or ())
    keyword_given = sum(name in bound for name in names[positional : positional + code.co_kwonlyargcount])
    takes = f"from {positional - defaults} to {positional}" if defaults else str(positional)
    plural = "s" if defaults or positional != 1 else ""
    also = ""
    if keyword_given:
        also = f" positional argument{'' if given == 1 else 's'} (and {keyword_given} keyword-only argument"
        also += f"{'' if keyword_given == 1 else 's'})"
    verb = "was" if given == 1 and not keyword_given else "were"
    return TypeError(f"{f.__qualname__}() takes {takes} positional argument{plural} but {given}{also} {verb} given")


def of(*counts, named=False):
    """Makes a handler of a builtin's calls from `run(host, *args)`, for calls with so many positional arguments; native
    code answers others. named: the second argument is a str."""

    def make(run):
        def handler(host, function, args, kwargs):
            if kwargs or len(args) not in counts or named and not isinstance(args[1], str):
                return host.call_native(function, args, kwargs)
            return run(host, *args)

        return handler

    return make
