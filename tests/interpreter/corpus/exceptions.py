"""Raising, catching, finally, chaining, and what tracebacks show."""

import sys

from tests.interpreter.corpus.kit import program


class AppError(Exception):
    def __init__(self, code, detail="none"):
        super().__init__(f"[{code}] {detail}")
        self.code = code


@program(0)
@program("x")
@program(4)
def try_except_else_finally(v):
    log = []
    try:
        r = 8 // v
    except ZeroDivisionError as e:
        log.append(f"zero: {e}")
        r = None
    except (TypeError, KeyError) as e:
        log.append(type(e).__name__)
        r = "type"
    else:
        log.append("else")
    finally:
        log.append("finally")
    return r, log


@program()
def finally_overrides_return():
    def f():
        try:
            return 1
        finally:
            return 2  # noqa: B012

    def g():
        for i in range(3):
            try:
                continue
            finally:
                if i == 1:
                    break  # noqa: B012
        return i

    return f(), g()


@program()
def finally_swallows_exception():
    def f():
        try:
            raise ValueError
        finally:
            return "swallowed"  # noqa: B012

    return f()


@program()
def finally_sees_exception_pass():
    log = []

    def f():
        try:
            raise KeyError("k")
        finally:
            log.append("cleanup")

    try:
        f()
    except KeyError as e:
        log.append(e.args)
    return log


@program()
def return_value_kept_through_finally():
    def f():
        x = 1
        try:
            return x
        finally:
            x = 2

    return f()


@program()
def nested_try():
    log = []
    try:
        try:
            raise ValueError("a")
        except KeyError:
            log.append("wrong")
        finally:
            log.append("inner finally")
    except ValueError as e:
        log.append(str(e))
        try:
            raise TypeError("b")
        except TypeError as t:
            log.append((str(t), str(t.__context__)))
    return log


@program()
def uncaught_with_traceback():
    def a():
        b()

    def b():
        c(1)

    def c(n):
        raise RuntimeError(f"n={n}")

    a()


@program()
def traceback_of_multiline_call():
    def f(*a):
        raise ValueError("deep")

    return [
        1,
        f(
            2,
            3,
        ),
    ]


@program()
def raise_class_and_instance():
    out = []
    for make in (lambda: ValueError, lambda: ValueError("x"), lambda: AppError(3)):
        try:
            raise make()
        except Exception as e:  # noqa: BLE001
            out.append((type(e).__name__, e.args, str(e)))
    return out


@program()
def raise_from():
    try:
        {}["k"]
    except KeyError as e:
        raise AppError(5, "wrapped") from e


@program()
def raise_from_none():
    try:
        {}["k"]
    except KeyError:
        raise AppError(6) from None


@program()
def raise_from_class():
    raise ValueError("v") from KeyError


@program()
def raise_from_bad_cause():
    raise ValueError("v") from 5


@program()
def implicit_context():
    try:
        [][0]
    except IndexError:
        {}["missing"]


@program()
def context_chain_of_three():
    try:
        try:
            raise ValueError(1)
        except ValueError:
            raise KeyError(2)
    except KeyError:
        raise TypeError(3)


@program()
def context_in_finally():
    try:
        raise ValueError("first")
    finally:
        [].pop()


@program()
def context_through_function():
    def helper():
        raise KeyError("in helper")

    try:
        raise ValueError("outer")
    except ValueError:
        helper()


@program()
def context_not_set_after_handler():
    try:
        raise ValueError
    except ValueError:
        pass
    raise KeyError("clean")


@program()
def bare_raise():
    try:
        int("x")
    except ValueError:
        raise


@program()
def bare_raise_in_helper():
    def again():
        raise

    try:
        1 / 0
    except ZeroDivisionError:
        again()


@program()
def bare_raise_without_exception():
    raise


@program()
def raise_same_exception_again():
    try:
        raise ValueError("v")
    except ValueError as e:
        saved = e
    raise saved


@program()
def raise_variable_in_handler():
    try:
        raise ValueError("v")
    except ValueError as e:
        raise e


@program()
def raise_not_an_exception():
    raise "text"


@program()
def raise_class_that_is_no_exception():
    class NotOne:
        pass

    raise NotOne


@program()
def catch_not_an_exception():
    try:
        raise ValueError("original")
    except 5:
        pass


@program()
def catch_tuple_with_bad_member():
    try:
        raise ValueError("original")
    except (KeyError, "str"):
        pass


@program()
def exception_class_constructor_fails():
    class Picky(Exception):
        def __init__(self, a):
            pass

    raise Picky


@program()
def exception_variable_is_deleted():
    try:
        raise ValueError
    except ValueError as e:
        pass
    try:
        return e  # noqa: F821
    except UnboundLocalError as error:
        return str(error)


@program()
def exception_hierarchy():
    class Base(Exception):
        pass

    class Derived(Base):
        pass

    out = []
    for kind in (Base, Derived, LookupError, IndexError):
        try:
            raise kind("m")
        except Derived:
            out.append("derived")
        except Base:
            out.append("base")
        except (IndexError, KeyError) as e:
            out.append(type(e).__name__)
        except LookupError:
            out.append("lookup")
    return out


@program()
def custom_exception_attributes():
    try:
        raise AppError(7, detail="d")
    except AppError as e:
        return e.code, e.args, repr(e), isinstance(e, Exception)


@program()
def exception_methods():
    class Shown(Exception):
        def __str__(self):
            return "shown!"

    raise Shown(1, 2)


@program()
def exc_info_and_exception():
    out = [sys.exc_info()[0]]
    try:
        raise KeyError("k")
    except KeyError as e:
        out.append(sys.exc_info()[1] is e)
        out.append(sys.exception() is e)
        try:
            raise ValueError
        except ValueError:
            out.append(sys.exc_info()[0].__name__)
        out.append(sys.exc_info()[0].__name__)
    out.append(sys.exc_info())
    return out


@program()
def exc_info_in_called_function():
    def current():
        return sys.exc_info()[0]

    try:
        raise ValueError
    except ValueError:
        return current().__name__


@program()
def traceback_object():
    def f():
        raise ValueError("x")

    try:
        f()
    except ValueError as e:
        tb = e.__traceback__
        lines = []
        while tb:
            lines.append((tb.tb_frame.f_code.co_name, tb.tb_lineno - tb.tb_frame.f_code.co_firstlineno))
            tb = tb.tb_next
        return lines


@program()
def traceback_module_text():
    import traceback

    def f(n):
        return n + "s"

    try:
        f(1)
    except TypeError as e:
        text = "".join(traceback.format_exception(e))
        return text.count("line"), "f(1)" in text, "TypeError" in text, traceback.format_exc() == text


@program()
def with_traceback_and_notes():
    e = ValueError("noted")
    e.add_note("first note")
    e.add_note("second")
    try:
        raise e
    except ValueError as caught:
        assert caught.__notes__ == ["first note", "second"]
        raise


@program()
def keyboard_interrupt_by_user():
    """KeyboardInterrupt that the program raises itself."""
    try:
        raise KeyboardInterrupt("stop")
    except Exception:  # noqa: BLE001
        return "wrong"
    finally:
        print("cleanup")


@program()
def system_exit():
    try:
        sys.exit(3)
    except SystemExit as e:
        return e.code


@program()
def base_exception_passes_except_exception():
    class Odd(BaseException):
        pass

    try:
        try:
            raise Odd("o")
        except Exception:  # noqa: BLE001
            return "no"
    except BaseException as e:  # noqa: BLE001
        return type(e).__name__


@program()
def exception_in_except_expression():
    try:
        raise ValueError("a")
    except undefined_name:  # noqa: F821
        pass


@program()
def loop_with_try():
    out = []
    for v in ["1", "x", None, "4"]:
        try:
            n = int(v)
        except ValueError:
            out.append("bad")
            continue
        except TypeError:
            break
        finally:
            out.append("f")
        out.append(n)
    else:
        out.append("complete")
    return out


@program()
def retry_until_success():
    attempts = 0

    def flaky():
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(f"attempt {attempts}")
        return "ok"

    while True:
        try:
            return flaky(), attempts
        except OSError as e:
            last = str(e)  # noqa: F841


@program()
def error_through_native_code():
    def key(x):
        return 1 / x

    return sorted([1, 0, 2], key=key)


@program()
def error_through_map_and_generator():
    def half(x):
        return x // (x - 2)

    def source():
        yield 1
        yield 2

    return list(map(half, source()))


@program()
def attribute_error_details():
    class A:
        pass

    try:
        A().missing
    except AttributeError as e:
        return e.name, type(e.obj).__name__, str(e)


@program()
def key_error_str():
    try:
        {"a": 1}["b c"]
    except KeyError as e:
        return str(e), repr(e), e.args


@program()
def unpack_traceback_in_loop():
    for a, b in [(1, 2), (3,)]:
        print(a, b)


@program()
def stop_iteration_from_function():
    def f():
        raise StopIteration(5)

    try:
        f()
    except StopIteration as s:
        return s.value


@program()
def recursive_cleanup():
    log = []

    def f(n):
        try:
            if n == 0:
                raise ValueError("bottom")
            f(n - 1)
        finally:
            log.append(n)

    try:
        f(3)
    except ValueError:
        return log


@program()
def suppressed_context_attributes():
    try:
        try:
            raise ValueError("cause")
        except ValueError as v:
            raise KeyError("effect") from v
    except KeyError as k:
        return str(k.__cause__), k.__cause__ is k.__context__, k.__suppress_context__


@program()
def context_cycle_avoided():
    a = ValueError("a")
    try:
        raise a
    except ValueError:
        try:
            raise KeyError("b")
        except KeyError:
            raise a


@program()
def assertion_inside_try():
    try:
        assert 0, "zero"
    except AssertionError as e:
        return e.args


@program()
def exceptions_as_values():
    errors = [ValueError(1), KeyError("k")]
    return [type(e).__name__ for e in errors], errors[0].args, {type(e): str(e) for e in errors}, ValueError(1) == ValueError(1)


@program()
def sys_exc_info_restored_after_nested_function():
    def inner():
        try:
            raise KeyError
        except KeyError:
            pass

    try:
        raise ValueError("kept")
    except ValueError:
        inner()
        return str(sys.exc_info()[1])


@program()
def return_inside_except_clears_state():
    def f():
        try:
            raise ValueError
        except ValueError:
            return "r"

    value = f()
    return value, sys.exc_info()


@program()
def break_inside_except_clears_state():
    for _ in range(1):
        try:
            raise ValueError
        except ValueError:
            break
    raise KeyError("no context")


@program()
def warnings_are_issued():
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("careful", stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    return [(str(w.message), w.category.__name__) for w in caught]
