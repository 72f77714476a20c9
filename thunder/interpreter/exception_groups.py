"""`except*`: which part of a group a clause handles, and what of it goes on (PEP 654; Python/ceval.c, exceptions.c)."""

from __future__ import annotations

from thunder.interpreter.instructions import check_exception_classes, matches, take


def CHECK_EG_MATCH(frame, stack, _):
    """`except* wanted`: the part of an exception that it does not handle, and above it the part that it does, which is
    the handled exception from here on; None for either."""
    error, wanted = take(stack, 2)
    _check_no_groups(wanted)
    rest, handled = _parts(frame.host, error, wanted)
    if handled is not None:
        frame.exc = frame.host.exc = handled
    stack += rest, handled


def _check_no_groups(wanted) -> None:
    check_exception_classes(wanted)
    if any(issubclass(t, BaseExceptionGroup) for t in (wanted if isinstance(wanted, tuple) else (wanted,))):
        raise TypeError("catching ExceptionGroup with except* is not allowed. Use except instead.")


def _parts(host, error, wanted) -> tuple:
    """What a clause leaves of an exception, and what it handles: an exception that is no group is handled as one."""
    is_group = isinstance(error, BaseExceptionGroup)
    if error is None:
        return None, None
    if matches(error, wanted):
        return None, error if is_group else BaseExceptionGroup("", [error])
    if not is_group:
        return error, None
    pair = host.call(host.load_attr(error, "split"), [wanted], {})
    if not isinstance(pair, tuple):
        raise TypeError(f"{type(error).__name__}.split must return a tuple, not {type(pair).__name__}")
    if len(pair) < 2:
        raise TypeError(f"{type(error).__name__}.split must return a 2-tuple, got tuple of size {len(pair)}")
    return pair[1], pair[0]


def PREP_RERAISE_STAR(frame, stack, _):
    """The exception that goes on behind all clauses, None where there is none: what they have raised, and the parts of
    the original that none has handled or that a clause has raised again, in the original's structure."""
    original, errors = take(stack, 2)
    stack.append(_going_on(original, errors))


def _going_on(original, errors):
    """See PREP_RERAISE_STAR. errors: what each clause has raised, and what is left, or None."""
    if not isinstance(original, BaseExceptionGroup):  # one clause at most has handled it
        return errors[0] if errors else None
    errors = [error for error in errors if error is not None]
    parts = [error for error in errors if _is_part(error, original)]
    raised = [error for error in errors if not _is_part(error, original)]
    leaves = _leaves_of(parts)
    rest = BaseExceptionGroup.split(original, lambda error: id(error) in leaves)[0]
    if rest is not None:
        raised.append(rest)
    if len(raised) > 1:
        return BaseExceptionGroup("", raised)
    return raised[0] if raised else None


def _is_part(error, original) -> bool:
    """Whether an exception is a part of the original that has been raised again: it is a group, and has its origin."""
    return isinstance(error, BaseExceptionGroup) and all(
        getattr(error, name) is getattr(original, name) for name in ("__traceback__", "__cause__", "__context__")
    )


def _leaves_of(groups) -> set[int]:
    """The ids of the exceptions in groups that are no groups."""
    leaves, pending = set(), [*groups]
    while pending:
        error = pending.pop()
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.add(id(error))
    return leaves
