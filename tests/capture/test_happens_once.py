"""Effects on objects in C happen once where the program is given up behind them, and values of the host change
containers of the program once."""

import array
import collections
import csv
import ctypes
import functools
import inspect
import io
import mmap
import pickle
import types

import pytest

import thunder

pytestmark = pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")


@functools.lru_cache
def cached():
    """Code that looks at such a function is refused."""


def increments(o):
    o[0] += 1
    return o[0]


def sets(o):
    o[0] = o[1] + o[0]
    return o[0]


def extends(o):
    o += array.array("i", [7])
    return len(o)


def repeats(o):
    o *= 2
    return len(o)


def deletes(o):
    del o[0]
    return len(o)


def sets_an_attribute(o):
    o.value += 1
    return o.value


def steps_in_python(o):
    return [o[0], *csv.DictReader(["a,b", "1,2", "3,4"])], [x for x in csv.DictReader(["a,b", "1,2"])]


def steps(o):
    return next(o), [x for x in o][:2]


def numbers():
    return array.array("i", [1, 2, 3, 4, 5])


def memory():
    m = mmap.mmap(-1, 16)
    m[0] = 5
    return m


CASES = [
    *((numbers, f) for f in (increments, sets, extends, repeats, deletes, steps_in_python)),
    *((lambda: (ctypes.c_int * 3)(1, 2, 3), f) for f in (increments, sets)),
    *((memory, f) for f in (increments, sets)),
    (lambda: memoryview(bytearray(b"abcd")), increments),
    (lambda: ctypes.c_int(3), sets_an_attribute),
    (lambda: io.StringIO("a\nb\nc\nd\n"), steps),
]


@pytest.mark.parametrize("make, change", CASES, ids=lambda f: f.__name__)
def test_a_change_of_an_object_in_c_happens_once(make, change):
    def run(jit):
        o = make()

        def f(x):
            result = change(o)
            inspect.signature(cached)
            return result

        f = jit(f)
        messages = []
        for _ in range(3):
            try:
                messages.append(f(1.0))
            except StopIteration as error:
                messages.append(type(error))
        return messages

    assert run(functools.partial(thunder.jit, fallback="eager")) == run(lambda f: f)


OUTSIDE = array.array("d", [1.0])


def a_list():
    first = second = [5.0]
    first += OUTSIDE
    return first, second


def a_deque():
    values = collections.deque([5.0])
    values += OUTSIDE
    return list(values)


def a_dict():
    values = {9.0: 1}
    values |= collections.Counter(OUTSIDE.tolist())
    return values


def a_set():
    values = {5.0, 1.0}
    values -= set(OUTSIDE)
    values ^= set(OUTSIDE)
    return values


@pytest.mark.parametrize("make", [a_list, a_deque, a_dict, a_set])
def test_a_container_of_the_program_is_changed_by_a_value_of_the_host(make):
    def run(jit):
        f = jit(lambda x: make())
        results = []
        for i in range(3):
            results.append(f(1.0))
            OUTSIDE.append(i + 2.0)
        del OUTSIDE[1:]
        return results

    assert run(functools.partial(thunder.jit, fallback="eager")) == run(lambda f: f)


class Named(dict):
    """A dict with attributes."""


PLACE = types.ModuleType("place")


def test_an_eager_call_sees_attributes_that_the_program_has_written_to_containers():
    def f(x):
        PLACE.held["b"].a = 4

        def inner():
            return pickle.dumps(PLACE.held["b"])

        return inner()

    compiled = thunder.jit(f, fallback="eager")
    for _ in range(2):
        PLACE.held = {"b": Named({"a": False})}
        assert vars(pickle.loads(compiled(1.0))) == {"a": 4}
