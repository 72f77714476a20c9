"""Canonical instructions that build values and take them apart: containers, text, patterns."""

from __future__ import annotations

import functools

from thunder.interpreter.instructions import before_stars, function_text, is_iterable, take
from thunder.interpreter.matching import match_class, match_keys
from thunder.interpreter.tracebacks import swallow

SEQUENCE_FLAG, MAPPING_FLAG = 1 << 5, 1 << 6  # Py_TPFLAGS_SEQUENCE, Py_TPFLAGS_MAPPING


def BUILD_LIST(frame, stack, n):
    stack.append(take(stack, n))


def BUILD_TUPLE(frame, stack, n):
    stack.append(tuple(take(stack, n)))


def BUILD_SET(frame, stack, n):
    elements = take(stack, n)
    stack.append(set(frame.host.hashed(elements)))


def BUILD_MAP(frame, stack, n):
    flat = take(stack, 2 * n)
    stack.append(dict(zip(frame.host.hashed(flat[::2]), flat[1::2])))  # noqa: B905 - the lengths are equal


def BUILD_CONST_KEY_MAP(frame, stack, n):
    keys = stack.pop()
    stack.append(dict(zip(keys, take(stack, n))))  # noqa: B905 - the lengths are equal


def BUILD_SLICE(frame, stack, n):
    stack.append(slice(*take(stack, n)))


def BUILD_STRING(frame, stack, n):
    stack.append(frame.host.join(take(stack, n)))


def LIST_EXTEND(frame, stack, n):
    values = stack.pop()
    if not is_iterable(values):
        raise TypeError(f"Value after * must be an iterable, not {type(values).__name__}")
    stack[-n].extend(frame.host.steps(values))


def SET_UPDATE(frame, stack, n):
    elements = [x for x in frame.host.steps(stack.pop())]  # without asking for their number
    stack[-n].update(frame.host.hashed(elements, stack[-n]))


def DICT_UPDATE(frame, stack, n):
    values = stack.pop()
    entries = _mapping(frame.host, values, lambda kind: f"{kind!r} object is not a mapping")
    frame.host.hashed([*entries], stack[-n])
    stack[-n].update(entries)


def _mapping(host, values, words):
    """The items of `**values` as a dict: an attribute that is missing anywhere in it means that it is no mapping."""
    try:
        return host.mapping(values)
    except AttributeError as error:
        swallow(error)
    raise TypeError(words(host.type_name(values)))


def DICT_MERGE(frame, stack, depths):
    """`**values` of a call: like DICT_UPDATE, but a key may come once only."""
    n, callable_depth = depths
    values = stack.pop()
    target, function = stack[-n], stack[-callable_depth]
    mapping = _mapping(
        frame.host, values, lambda kind: f"{before_stars(function)} after ** must be a mapping, not {kind}"
    )
    for key, value in mapping.items():
        if key in target:
            raise TypeError(f"{function_text(function)} got multiple values for keyword argument {key!r}")
        target[key] = value


def LIST_TO_TUPLE(frame, stack, _):
    stack[-1] = tuple(stack[-1])


def LIST_APPEND(frame, stack, n):
    value = stack.pop()
    stack[-n].append(value)


def SET_ADD(frame, stack, n):
    value = stack.pop()
    (value,) = frame.host.hashed((value,), stack[-n])
    stack[-n].add(value)


def MAP_ADD(frame, stack, n):
    key, value = take(stack, 2)
    (key,) = frame.host.hashed((key,), stack[-n])
    stack[-n][key] = value


def UNPACK_SEQUENCE(frame, stack, n):
    stack.extend(frame.host.unpack(stack.pop(), n))


def UNPACK_EX(frame, stack, counts):
    stack.extend(frame.host.unpack(stack.pop(), counts & 255, counts >> 8))


@functools.cache
def unpacker(before, after=None):
    """A native function that unpacks a value into `before` names, and `*rest` and `after` names unless `after` is None.

    It returns them in reverse, as the stack wants them. Native code gives the errors of the running version.
    """
    names = [f"a{k}" for k in range(before)]
    if after is not None:
        names += ["*rest", *(f"b{k}" for k in range(after))]
    returned = ", ".join(name.lstrip("*") for name in reversed(names))
    namespace: dict = {}
    source = f"def unpack(value):\n    [{', '.join(names)}] = value\n    return [{returned}]"
    exec(compile(source, __file__, "exec"), namespace)  # named like this file, so that tracebacks leave it out
    return namespace["unpack"]


# ---------------------------------------------------------------- text

CONVERSIONS = (None, str, repr, ascii)


def FORMAT_VALUE(frame, stack, flags):
    spec = stack.pop() if flags & 4 else ""
    stack[-1] = frame.host.format_value(stack[-1], flags & 3, spec)


def CONVERT_VALUE(frame, stack, conversion):
    stack[-1] = frame.host.call(CONVERSIONS[conversion], [stack[-1]], {})


# ---------------------------------------------------------------- patterns


def GET_LEN(frame, stack, _):
    stack.append(frame.host.call(len, [stack[-1]], {}))


def MATCH_SEQUENCE(frame, stack, _):
    stack.append(bool(frame.host.pattern_type(stack[-1]).__flags__ & SEQUENCE_FLAG))


def MATCH_MAPPING(frame, stack, _):
    stack.append(bool(frame.host.pattern_type(stack[-1]).__flags__ & MAPPING_FLAG))


def MATCH_KEYS(frame, stack, _):
    stack.append(match_keys(frame.host, stack[-2], stack[-1]))


def MATCH_CLASS(frame, stack, positional):
    subject, cls, names = take(stack, 3)
    stack.append(match_class(frame.host, subject, cls, positional, names))
