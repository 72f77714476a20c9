"""ExceptionGroup and except*."""

from tests.interpreter.corpus.kit import program


def group():
    return ExceptionGroup("g", [ValueError("v"), TypeError("t"), ExceptionGroup("inner", [KeyError("k"), ValueError("w")])])


@program()
def handles_everything():
    log = []
    try:
        raise group()
    except* ValueError as e:
        log.append([str(x) for x in e.exceptions])
    except* (TypeError, KeyError) as e:
        log.append(len(e.exceptions))
    return log


@program()
def rest_is_raised():
    try:
        raise group()
    except* ValueError:
        pass


@program()
def nothing_matches():
    try:
        raise group()
    except* OSError:
        pass


@program()
def naked_exception_is_wrapped():
    try:
        raise ValueError("single")
    except* ValueError as e:
        return_value = type(e).__name__, e.message, [str(x) for x in e.exceptions]
    return return_value


@program()
def naked_exception_passes():
    try:
        raise OSError("single")
    except* ValueError:
        pass


@program()
def raises_in_handler():
    try:
        raise group()
    except* ValueError:
        raise OSError("new")
    except* TypeError:
        pass


@program()
def raises_in_two_handlers():
    try:
        raise ExceptionGroup("g", [ValueError(1), TypeError(2)])
    except* ValueError:
        raise OSError("a")
    except* TypeError as e:
        raise RuntimeError("b") from e


@program()
def reraises_part():
    try:
        raise group()
    except* ValueError:
        raise
    except* TypeError:
        pass


@program()
def else_and_finally():
    log = []
    try:
        pass
    except* ValueError:
        log.append("no")
    else:
        log.append("else")
    finally:
        log.append("finally")
    return log


@program()
def group_methods():
    g = group()
    match, rest = g.split(ValueError)
    return (
        [str(e) for e in match.exceptions],
        rest.exceptions[0].args,
        g.subgroup(KeyError).exceptions[0].message,
        g.derive([OSError()]).message,
        g.subgroup(OSError),
    )


@program()
def group_caught_by_plain_except():
    try:
        raise group()
    except ExceptionGroup as e:
        return e.message, len(e.exceptions)


@program()
def catching_group_with_star_fails():
    try:
        raise group()
    except* ExceptionGroup:
        pass


@program()
def nested_star_handlers():
    log = []
    try:
        try:
            raise group()
        except* KeyError as e:
            log.append(repr(e.exceptions[0].exceptions))
    except* (ValueError, TypeError) as e:
        log.append(len(e.exceptions))
    return log


@program()
def star_in_loop():
    out = []
    for kind in (ValueError, TypeError):
        try:
            raise ExceptionGroup("x", [kind(1)])
        except* ValueError:
            out.append("v")
        except* TypeError:
            out.append("t")
    return out


@program()
def star_handler_in_function():
    def handle(f):
        try:
            f()
        except* ValueError as e:
            return_list.append(e.exceptions[0].args)

    def fail():
        raise ExceptionGroup("deep", [ValueError("x"), OSError("left")])

    return_list = []
    try:
        handle(fail)
    except ExceptionGroup as rest:
        return return_list, repr(rest)
