"""Mapping and class patterns of `match`, after CPython's match_keys and match_class (Python/ceval.c)."""

from __future__ import annotations

from thunder.interpreter.tracebacks import swallow

MATCH_SELF_FLAG = 1 << 22  # _Py_TPFLAGS_MATCH_SELF: int(x), str(x) ... capture the subject itself
_MISSING = object()


def match_keys(host, subject, keys):
    """The values of `keys` in a mapping as a tuple, or None when one is missing."""
    seen, values = set(), []
    get = host.load_attr(subject, "get") if keys else None
    for key in keys:
        if key in seen:
            raise ValueError(f"mapping pattern checks duplicate key ({key!r})")
        seen.add(key)
        value = host.call(get, [key, _MISSING], {})
        if value is _MISSING:
            return None
        values.append(value)
    return tuple(values)


def match_class(host, subject, cls, positional, names):
    """The attributes that a class pattern asks for as a tuple, or None when the subject does not match."""
    if not isinstance(cls, type):
        _raise_no_class(cls)
    if not host.call(isinstance, [subject, cls], {}):
        return None
    values, seen = [], set()
    if positional:
        attributes = _positional_attributes(host, cls, positional)
        if attributes is None:
            values.append(subject)
        else:
            names = (*attributes[:positional], *names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"__match_args__ elements must be strings (got {type(name).__name__})")
        if name in seen:
            raise TypeError(f"{cls.__name__}() got multiple sub-patterns for attribute {name!r}")
        seen.add(name)
        value = _attribute(host, subject, name)
        if value is _MISSING:
            return None
        values.append(value)
    return tuple(values)


def _raise_no_class(cls):
    """Raise the running version's error for `case cls()` when `cls` is no class."""
    match None:
        case cls():
            pass


def _positional_attributes(host, cls, positional):
    """`__match_args__`, checked; None when the one positional sub-pattern is the subject itself."""
    try:
        attributes = host.load_attr(cls, "__match_args__")
    except AttributeError as error:
        swallow(error)
        attributes = None
    if attributes is None:
        if cls.__flags__ & MATCH_SELF_FLAG:
            allowed = 1
        else:
            attributes, allowed = (), 0
    else:
        if not isinstance(attributes, tuple):
            kind = type(attributes).__name__
            raise TypeError(f"{cls.__name__}.__match_args__ must be a tuple (got {kind})")
        allowed = len(attributes)
    if allowed < positional:
        plural = "" if allowed == 1 else "s"
        raise TypeError(f"{cls.__name__}() accepts {allowed} positional sub-pattern{plural} ({positional} given)")
    return attributes


def _attribute(host, subject, name):
    try:
        return host.load_attr(subject, name)
    except AttributeError as error:
        swallow(error)
        return _MISSING
