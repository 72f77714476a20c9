"""What cannot be captured, and what is wrong in the user's program: who raises what, where it points, and that the
function is usable after."""

from __future__ import annotations

import io
import linecache
import sys
import traceback
import types
import warnings

import numpy
import pytest
import torch
from torch import nn

import thunder
from thunder.core.symbol import current_recorder
from thunder.errors import CaptureError, SharpEdgeError

X = torch.arange(6.0).reshape(2, 3) + 1
PARAMETER = nn.Parameter(torch.ones(3))
REFUSED: dict[str, tuple] = {}
SWITCH = {"bad": True}


def decided(x):
    return x * 2 if x.sum() > 0 else x


with warnings.catch_warnings(action="ignore"):  # torch.jit's are of its own
    SCRIPTED, SCRIPTED_MODULE = torch.jit.script(decided), torch.jit.script(nn.Linear(3, 3))


def refused(says: str, *args):
    """says: part of the reason. The line of the program that ends in `# here` is the one that the error must show."""

    def add(function):
        REFUSED[function.__name__] = (function, says, args or (X.clone(),))
        return function

    return add


# ----------------------------------------------------------------------------------------------------------------
# values of tensors


@refused("the program writes to a NumPy array that shares memory with a tensor", X, numpy.zeros(3))
def numpy_array_written_to(x, t):
    y = torch.from_numpy(t) * 2
    t[0] += 1  # here
    return x, y


@refused("sys.stdout is assigned, which the library's own code reads")
def output_redirected(x):
    sys.stdout = io.StringIO()  # here
    return x


SPACE = types.SimpleNamespace(a=1)


@refused("global SPACE, which the program has written to, goes to code that thunder does not read")
def written_object_compared_by_native_code(x):
    SPACE.a = 2
    return x * (SPACE == types.SimpleNamespace(a=2))  # here


# ----------------------------------------------------------------------------------------------------------------
# constructs


@refused("torch.compile")
def torch_compile_inside(x):
    return torch.compile(torch.nn.ReLU())(x)  # here


@refused("a generator leaves")
def generator_as_a_result(x):
    products = (x * i for i in range(2))
    next(products)
    return products


@refused("code that is awaited")
async def coroutine_as_a_result(x):
    return x * 2


@refused("a map leaves")
def map_as_a_result(x):
    return map(lambda i: x * i, range(2))


@refused("a generator leaves")
def generator_inside_a_result(x):
    products = (x * i for i in range(2))
    next(products)
    return {"a": [products]}


@refused("view of a dict", {"a": X}.values())
def dict_view_as_an_argument(v):
    return sum(v)


@refused("attribute 'sum' is set on a tensor")
def attribute_set_on_a_tensor(x):
    x.sum = 1  # here
    return x


@refused("default device")
def default_device_left_changed(x):
    torch.device("cpu").__enter__()
    return x


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, says, args = REFUSED[name]
    compiled = thunder.jit(function)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    for _ in range(2):  # the second time as the first: nothing is left behind
        with pytest.raises(CaptureError) as raised:
            compiled(*args)
        error, text = raised.value, str(raised.value)
        assert says in error.reason, text
        assert error.remedy and error.remedy in text
        lines = {n: line for n, line in enumerate(linecache.getlines(__file__), 1) if "# here" in line}
        first = function.__code__.co_firstlineno
        wanted = [n for n in lines if first <= n <= first + 12 and n < next_function(first)]
        if wanted:
            assert error.location is not None and error.location[:2] == (__file__, wanted[0]), (error.location, wanted)
            assert lines[wanted[0]].strip() in text and f"{__file__}:{wanted[0]}" in text
        assert error.location[0] == __file__ and __file__ in text
    assert (torch.is_grad_enabled(), torch.get_default_dtype(), current_recorder()) == (grad, dtype, None)
    assert torch._C._len_torch_function_stack() == 0


STARTS = sorted(f.__code__.co_firstlineno for f, _, _ in REFUSED.values())


def next_function(first: int) -> int:
    return next((n for n in STARTS if n > first), first + 12)


# ----------------------------------------------------------------------------------------------------------------
# usable after


def may_fail(x, how=None):
    if how == "attribute":
        x.sum = 1
    if how == "raise":
        raise ValueError("mine")
    if how == "shape":
        return x @ x
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "exit":
        raise SystemExit(3)
    if how == "name":
        return undefined_name  # noqa: F821
    return x * 2


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("attribute", CaptureError),
        ("raise", ValueError),
        ("shape", RuntimeError),
        ("interrupt", KeyboardInterrupt),
        ("exit", SystemExit),
        ("name", NameError),
    ],
)
def test_usable_after_a_failure(how, kind):
    compiled = thunder.jit(may_fail)
    for before in range(2):
        with pytest.raises(kind):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                compiled(X, how)
        assert current_recorder() is None and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert torch.equal(compiled(X), X * 2)
    assert thunder.cache_hits(compiled) == 1


def test_modes_that_a_failing_program_set_are_restored():
    def f(x):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            x.sum = 1

    with pytest.raises(CaptureError):
        thunder.jit(f)(X)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and torch.ones(1).device.type == "cpu"
    assert torch.equal(thunder.jit(lambda x: x @ x.T)(X), X @ X.T)


# ----------------------------------------------------------------------------------------------------------------
# errors of the program itself

WRONG: dict[str, tuple] = {}


def wrong(*args, **kwargs):
    def add(function):
        WRONG[function.__name__] = (function, args or (X,), kwargs)
        return function

    return add


@wrong()
def matmul_shapes(x):
    return x @ x


@wrong()
def broadcast_shapes(x):
    return x + torch.ones(4)


@wrong()
def reshape_sizes(x):
    return x.reshape(4, 4)


@wrong()
def dimension_out_of_range(x):
    return torch.softmax(x, 3)


@wrong()
def cat_shapes(x):
    return torch.cat([x, torch.ones(5, 5)])


@wrong()
def index_out_of_range(x):
    return x[7]


@wrong()
def too_many_indices(x):
    return x[0, 0, 0]


@wrong()
def wrong_dtype(x):
    return torch.nn.functional.embedding(x, torch.ones(3, 3))


@wrong()
def linear_shapes(x):
    return nn.functional.linear(x, torch.ones(5, 7))


@wrong()
def unknown_keyword_of_an_operation(x):
    return torch.add(x, 1, nonsense=2)


@wrong()
def unknown_name_in_torch(x):
    return torch.no_such_function(x)


@wrong()
def unknown_method(x):
    return x.no_such_method()


@wrong()
def undefined(x):
    return x + not_defined_anywhere  # noqa: F821


@wrong()
def unbound_local(x):
    if x.shape[0] == 100:
        y = 1
    return x + y


@wrong()
def missing_key(x):
    return {"a": x}["b"]


@wrong()
def division_by_zero(x):
    return x * (1 // 0)


@wrong()
def raised_from(x):
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("converted") from error


@wrong()
def not_callable(x):
    return x(1)


@wrong()
def unpacking(x):
    a, b, c = x.shape
    return a


@wrong()
def tensor_plus_string(x):
    return x + "a"


@wrong()
def endless_recursion(x):
    return endless_recursion(x)


@wrong(X, X)
def too_many_arguments(x):
    return x


@wrong(X, y=2)
def unexpected_keyword(x):
    return x


@wrong(X)
def missing_argument(x, y):
    return x


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_the_program(name):
    """The same class, words, cause and lines of the user's program as in eager."""
    function, args, kwargs = WRONG[name]
    with pytest.raises(Exception) as eager:  # noqa: PT011 - compared below
        function(*args, **kwargs)
    compiled = thunder.jit(function)
    for _ in range(2):
        with pytest.raises(type(eager.value)) as raised:
            compiled(*args, **kwargs)
        assert type(raised.value) is type(eager.value)
        assert str(raised.value).split("\n")[0] == str(eager.value).split("\n")[0]
        assert type(raised.value.__cause__) is type(eager.value.__cause__)
        if name != "endless_recursion":
            assert user_lines(raised.value, function) == user_lines(eager.value, function)


def user_lines(error, function) -> list:
    return [
        (s.lineno, s.name)
        for s in traceback.extract_tb(error.__traceback__)
        if s.filename == __file__ and s.name == function.__name__
    ]


def test_no_interpreter_frames_in_a_traceback():
    compiled = thunder.jit(undefined)
    with pytest.raises(NameError) as raised:
        compiled(X)
    files = [s.filename for s in traceback.extract_tb(raised.value.__traceback__)]
    assert not any("/interpreter/" in f or "/capture/" in f and "tests" not in f for f in files), files


def test_an_error_at_run_time_names_the_users_line():
    def f(x, i):
        return x.index_select(0, i)

    compiled = thunder.jit(f)
    assert torch.equal(compiled(X, torch.tensor([1])), X[[1]])
    with pytest.raises((IndexError, RuntimeError)) as raised:
        compiled(X, torch.tensor([9]))
    text = "".join(traceback.format_exception(raised.value))
    assert "x.index_select(0, i)" in text and __file__ in text, text


def test_a_wrong_number_of_arguments_for_a_module():
    compiled = thunder.jit(nn.Linear(3, 3))
    with torch.no_grad():
        with pytest.raises(TypeError, match=r"forward\(\) missing 1 required positional argument: 'input'"):
            compiled()
        with pytest.raises(TypeError, match=r"forward\(\) takes 2 positional arguments but 3 were given"):
            compiled(X, X)
        assert compiled(X).shape == (2, 3)


def test_an_exception_that_depends_on_arguments_only():
    def f(x, n):
        if n < 0:
            raise ValueError(f"n is {n}")
        return x * n

    compiled = thunder.jit(f)
    for n in (1, -1, 1, -2, 2):
        if n < 0:
            with pytest.raises(ValueError, match=f"n is {n}"):
                compiled(X, n)
        else:
            assert torch.equal(compiled(X, n), X * n)


# ---------------------------------------------------------------------------------------------------------------- sharp
# edges

ITERATOR = iter(range(100))


def outside_iterator(x):
    return x * next(ITERATOR)


def test_an_iterator_from_outside_is_not_advanced_unless_that_is_allowed():
    with pytest.raises(CaptureError, match="an iterator from outside is advanced"):
        thunder.jit(outside_iterator)(X)
    with pytest.raises(SharpEdgeError, match="iterator"):
        thunder.jit(outside_iterator, sharp_edges="error")(X)
    compiled = thunder.jit(outside_iterator, sharp_edges="allow")
    torch.testing.assert_close(compiled(X), compiled(X))
    assert any("iterator" in text for text in thunder.last_sharp_edges(compiled))


@pytest.mark.parametrize(
    ("options", "valid"),
    [
        ({"cache": "nonsense"}, "constant values"),
        ({"sharp_edges": "nonsense"}, "allow"),
        ({"interpretation": "nonsense"}, "python interpreter"),
    ],
)
def test_wrong_options_name_the_valid_ones(options, valid):
    with pytest.raises(ValueError, match=valid):
        thunder.jit(may_fail, **options)


def test_scripted_functions_are_read_as_python():
    compiled = thunder.jit(lambda x: SCRIPTED(x) if x.ndim == 2 else x)
    assert torch.equal(compiled(X), X * 2) and torch.equal(compiled(-X), -X)
    with warnings.catch_warnings(action="ignore"):
        scripted = torch.jit.script(nn.functional.softsign)
    x = X.clone().requires_grad_()
    result = thunder.jit(lambda x: scripted(x) * 2)(x)
    assert torch.equal(result, nn.functional.softsign(x) * 2)
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 / (1 + X) ** 2)


def test_modules_of_torchscript_are_refused():
    with pytest.raises(NotImplementedError, match="compile the module that it was scripted or traced from"):
        thunder.jit(SCRIPTED_MODULE)
