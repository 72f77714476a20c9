"""Host code in programs: it runs at each call, in order, with real values, and exactly once whatever path is taken."""

import array
import bisect
import collections
import contextlib
import csv
import datetime
import heapq
import io
import json
import logging
import math
import os
import pickle
import queue
import random
import time
import uuid
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import thunder
from thunder.core import host_calls
from thunder.errors import CaptureError, FallbackWarning, SharpEdgeError

PROGRAMS = {}
CALLS = 6


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def printed(x, directory):
    print("sum", x.sum(), f"{x.sum():.3f}", x.shape)
    return x + 1


@program
def printed_between_decisions(x, directory):
    print("begin")
    if x.sum() > 0:
        print("positive", x.sum().item())
    else:
        print("negative")
    if x[0] > 0:
        print("first is positive")
    return x * 2


@program
def formatted(x, directory):
    n = x.sum().item()
    return "%.2f %s" % (n, "x"), "{:.3f} {}".format(n, 1), str(n), f"{x}", repr(x + 1), f"{n!r:>30}"


@program
def text_that_is_taken_apart(x, directory):
    text = f"{x.sum():.2f}"
    if text.startswith("-"):
        return x, text[1:], len(text)
    return -x, text.split("."), text.replace(".", ",")


@program
def random_numbers(x, directory):
    noise = random.random()
    if random.random() < 0.5:
        return x * noise
    return x + random.uniform(1, 2) * random.randint(1, 5)


@program
def random_choices(x, directory):
    name = random.choice(["sin", "cos"])
    return getattr(torch, name)(x) * random.gauss(0, 1)


@program
def numpy_random_numbers(x, directory):
    noise = torch.from_numpy(np.random.randn(3)).float()
    if np.random.rand() > 0.5:
        return x + noise
    return x * noise * np.random.uniform(0, 1)


@program
def orders_of_random_numbers(x, directory):
    a = torch.rand(8)
    first = torch.as_tensor(np.argsort(a.numpy()))
    b, c = torch.rand(8), torch.randn(3)  # on which no host call depends
    d = torch.rand(8)
    return x, a, first, b, c, d, torch.as_tensor(np.argsort(d.numpy()))


@program
def random_between_torchs(x, directory):
    y = x + torch.rand(3)
    if random.random() > 0.5:
        y = y * torch.rand(3)
    if y.sum() > 1:
        y = y - random.random()
    return y + torch.rand(3)


@program
def logged_through_logging(x, directory):
    logging.getLogger("programs").warning("loss %.2f", x.sum().item())
    return x


@program
def read_from_a_file(x, directory):
    with open(Path(directory) / "scale.json") as file:
        scale = json.load(file)["scale"]
    return x * scale


@program
def read_text(x, directory):
    return x * len(Path(directory, "scale.json").read_text())


@program
def appended_to_a_file(x, directory):
    with open(os.path.join(directory, "log.txt"), "a") as file:
        file.write(f"{x.sum():.3f}\n")
        if x.sum() > 0:
            file.write("positive\n")
    return x


@program
def listed_directory(x, directory):
    return x * len(os.listdir(directory))


@program
def json_of_numbers(x, directory):
    return json.dumps({"loss": x.sum().item(), "n": x.numel()})


@program
def json_of_one_number(x, directory):  # called: an object of a class in C, which has no name
    return x * json.loads(json.dumps(x.norm().item()))


@program
def mathematics_of_numbers(x, directory):
    n = x.abs().sum().item()
    return math.exp(n), math.log(n), math.isnan(n), math.hypot(n, 1.0)


@program
def effects_of_python_around(x, directory):
    events = []
    events.append("a")
    print(events, x.sum().item() > 0)
    events.append("b")
    return events


@program
def values_as_arrays(x, directory):
    a = x.numpy()
    k = int(np.argmax(a))
    return x[k] * float(a.mean()), torch.from_numpy(np.sort(a)), a.shape[0], np.asarray(x * 2).sum().item()


@program
def detached_values(x, directory):
    weights = np.exp(x.detach().cpu().numpy())
    weights = weights / weights.sum()
    if weights[0] > 0.5:
        return x * torch.from_numpy(weights)
    return x


LOG: list = []


@program
def logged_in_a_global(x, directory):
    LOG.append(f"{x.sum():.2f}")
    return x, len(LOG)


TIMES: collections.deque = collections.deque(maxlen=3)


def outcome(function, x, directory):
    """Result, printed text, what Python's and NumPy's generators give next, files and globals."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        result = function(x, directory)
    files = {p.name: p.read_text() for p in sorted(Path(directory).iterdir())}
    return result, out.getvalue(), random.random(), np.random.rand(), torch.rand(2), files, list(LOG)


def assert_same(got, want) -> None:
    assert type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want), (got, want)
        for a, b in zip(got, want):
            assert_same(a, b)
    else:
        assert got == want


def trail(function, directory, caplog) -> list:
    directory.mkdir()
    (directory / "scale.json").write_text('{"scale": 3}')
    LOG.clear()
    caplog.clear()
    messages = []
    for call in range(CALLS):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(call)
        x = torch.randn(3, generator=torch.Generator().manual_seed(call % 4))
        messages.append((outcome(function, x, str(directory)), [r.getMessage() for r in caplog.records]))
    return messages


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name, tmp_path, caplog):
    function = PROGRAMS[name]
    want = trail(function, tmp_path / "eager", caplog)
    (tmp_path / "eager").rename(tmp_path / "before")
    compiled = thunder.jit(function, fallback="error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trail(compiled, tmp_path / "eager", caplog)
    assert_same(got, want)


def _added(x):
    a = np.zeros(3)
    np.add(a, x.numpy(), out=a)
    return x + torch.from_numpy(a)


def _added_in_place(x):
    a = np.zeros(3)
    a += x.numpy()
    return x + torch.from_numpy(a)


def _shuffled(x):
    a = np.arange(3)
    np.random.shuffle(a)
    return x + torch.tensor(a)


def _written_later(x):
    a = np.ones(3)
    b = a * x.numpy()
    a[1] = 5
    return x + torch.tensor(b) + torch.tensor(a)


def _filled(x):
    a = np.zeros(3)
    a.fill(x.sum().item())
    return x + torch.tensor(a)


def _scattered(x):
    np.random.rand(1).item()
    a = np.zeros((2, 3), dtype=bool)
    np.put_along_axis(a, np.random.choice(np.arange(3), (2, 1)), 1, -1)
    y = x[torch.tensor(a, dtype=torch.bool)[0]]
    return y if y.sum() > 1 else -y


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
@pytest.mark.parametrize("fn", [_added, _added_in_place, _shuffled, _written_later, _filled, _scattered])
def test_host_code_changes_arrays_that_the_program_makes(fn):
    with pytest.raises(CaptureError, match="NumPy array, which it may change|data-dependent values into a ndarray"):
        thunder.jit(fn, fallback="error")(torch.zeros(3))
    compiled = thunder.jit(fn, fallback="eager")
    inputs = [torch.full((3,), v) for v in (0.0, 1.0, 0.5, 1.0, 0.0, 2.0)]
    np.random.seed(0)
    ours = [compiled(x) for x in inputs]
    np.random.seed(0)
    for mine, x in zip(ours, inputs, strict=True):
        theirs = fn(x)
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def test_arrays_of_the_program_stay_constants_where_no_host_code_gets_them():
    def fn(x):
        return x + torch.tensor(np.arange(3)) * float(np.linspace(0, 1, 3)[1])

    compiled = thunder.jit(fn, fallback="error")
    assert torch.equal(compiled(torch.ones(3)), fn(torch.ones(3)))
    assert "host_call" not in str(compiled.programs[0]) and "tolist" not in str(compiled.programs[0])


def test_native_code_of_another_library_gets_tensors():
    distances = pytest.importorskip("scipy.optimize").linear_sum_assignment

    def fn(x):
        with torch.no_grad():
            rows, columns = distances(x)
        return x[torch.as_tensor(rows), torch.as_tensor(columns)].sum()

    compiled = thunder.jit(fn, fallback="error")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 4)
        assert torch.equal(compiled(x), fn(x))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(compiled(a), a)[0], torch.autograd.grad(fn(b), b)[0])


def test_it_is_printed_as_a_bound_symbol():
    compiled = thunder.jit(lambda x: x * random.random())
    compiled(torch.ones(2))
    assert "v0 = host_call(0, random, (), {}, 'float', None, 'random')" in str(thunder.last_traces(compiled)[0])


def test_every_effect_happens_once_on_every_path(capsys):
    def f(x):
        print("one")
        if x[0] > 0:
            print("two")
            if x[1] > 0:
                print("three")
        print("four")
        return x

    compiled, inputs = thunder.jit(f), [(1, 1), (1, -1), (-1, 1), (1, 1), (-1, -1), (1, -1)]
    for a, b in inputs:
        f(torch.tensor([a, b]))
        want = capsys.readouterr().out
        compiled(torch.tensor([a, b]))
        assert capsys.readouterr().out == want


def test_no_effect_is_repeated_where_an_operation_fails(capsys):
    """The original, which would handle the error, does not run after host code: the error is raised."""

    def f(x, i):
        print("once")
        try:
            return torch.ones(3)[i] + x
        except IndexError:
            return x

    compiled = thunder.jit(f, fallback="eager")
    compiled(torch.ones(2), torch.tensor(1))
    with pytest.raises(IndexError):
        compiled(torch.ones(2), torch.tensor(5))
    assert capsys.readouterr().out == "once\n" * 2


def test_time_passes():
    compiled = thunder.jit(lambda x: (x, time.time(), time.perf_counter()))
    compiled(torch.ones(2))
    before = time.time(), time.perf_counter()
    _, *now = compiled(torch.ones(2))
    assert all(b <= n <= b + 60 for b, n in zip(before, now))


def test_other_values_at_each_call():
    compiled = thunder.jit(lambda x: (x, uuid.uuid4().hex))
    assert compiled(torch.ones(2))[1] != compiled(torch.ones(2))[1]


def test_a_type_that_changes_is_another_path(tmp_path):
    file = tmp_path / "value.json"

    def f(x):
        return x * json.loads(file.read_text())

    compiled = thunder.jit(f)
    for text in ("2", "2.5", "3", "0.5"):
        file.write_text(text)
        assert torch.equal(compiled(torch.ones(2)), f(torch.ones(2)))
    assert thunder.cache_misses(compiled) == 2


def test_under_grad():
    def f(x):
        print(f"{x.sum():.2f}")
        return x * random.random()

    x = torch.ones(3, requires_grad=True)
    random.seed(0)
    (want,) = torch.autograd.grad(f(x).sum(), x)
    random.seed(0)
    (got,) = torch.autograd.grad(thunder.jit(f)(x).sum(), x)
    assert torch.equal(got, want)


def test_what_host_code_may_change_is_refused():
    def f(x):
        order = [0, 1, 2]
        np.random.RandomState(0).shuffle(order)
        return x[order]

    with pytest.raises(CaptureError, match="shuffle.. runs on the host and changes a list that it is given"):
        thunder.jit(f, fallback="error")(torch.ones(3))
    with pytest.warns(FallbackWarning):
        assert torch.equal(thunder.jit(f, fallback="eager")(torch.arange(3.0)), f(torch.arange(3.0)))


def test_a_container_that_host_code_was_given_is_not_changed_later():
    def changed(x):
        row = [1, float(x.sum())]
        with open(os.devnull, "w") as file:
            csv.writer(file).writerow(row)
        row.append(3)
        return x * len(row)

    with pytest.raises(CaptureError, match="the program changes a container that it has passed"):
        thunder.jit(changed, fallback="error")(torch.ones(3))


@pytest.mark.parametrize("decides", [False, True])
def test_host_code_that_keeps_a_container_does_not_change_it_later(decides):
    messages = []

    def program(number):
        host_calls.taken_from_log(0, messages.append, ([1, [2]],), {}, "", (0,))
        host_calls.taken_from_log(1, messages[-1][1].append, (number,), {}) if number else None

    run = host_calls.with_log(program, decides)
    run(0)
    with pytest.raises(CaptureError, match="append.. runs on the host and changes a list that it is given"):
        run(3)


QUEUES = {
    "once": lambda queue, row: (queue.put(row), queue.get())[1],
    "twice": lambda queue, row: (queue.put(row), queue.put(row), queue.get(), queue.get())[3],
    "inside": lambda queue, row: (queue.put({"row": row}), queue.get())[1]["row"],
}


@pytest.mark.parametrize("name", QUEUES)
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_container_that_host_code_gives_back_may_be_changed(name):
    """The list that a queue gives is that which it was given, which may be the program's own still."""
    linear, jobs, pass_through = torch.nn.Linear(3, 3), queue.SimpleQueue(), QUEUES[name]

    def program(x):
        row = [1, 2]
        job = pass_through(jobs, row)
        job.append(3)
        return linear(x) * len(job) + len(row)

    compiled, x = thunder.jit(program, fallback="eager"), torch.ones(2, 3)
    for _ in range(3):
        assert torch.equal(compiled(x), program(x)) and jobs.empty()
    with pytest.raises(CaptureError, match=r"append\(\) changes a (list|dict) that put\(\) was given"):
        thunder.jit(program, fallback="error")(x)


GROWING = {"list": list, "deque": collections.deque, "bytearray": bytearray}


@pytest.mark.parametrize("kind", GROWING)
@pytest.mark.parametrize("other", ["array", "item", "of a tensor"])
@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_container_and_an_array(kind, other):
    """`numbers += array` adds as the array does, and leaves the container alone."""
    array = np.arange(3.0)

    def program(x):
        numbers = same = GROWING[kind]([1, 2, 3])
        numbers += {"array": array, "item": array[1], "of a tensor": x.numpy()}[other]
        return numbers, same

    compiled = thunder.jit(program, fallback="error" if kind == "list" else "eager")
    for i in range(3):
        array += i
        (sums, same), expected = compiled(torch.ones(3) + i), program(torch.ones(3) + i)
        assert type(sums) is np.ndarray and np.array_equal(sums, expected[0]) and same == expected[1]


LISTS = {
    "numbers": (lambda x: [3, 1, 2, 0], lambda x, order: (x[order], order, order[0] + 1)),
    "tensors": (lambda x: [x, x * 2], lambda x, order: (order, order[0].sum())),
    "text": (lambda x: ["a", "b", "a"], lambda x, order: (x * len(order), "".join(order))),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_shuffled(name):
    make, use = LISTS[name]

    def f(x):
        order = make(x)
        random.shuffle(order)
        return use(x, order)

    compiled = thunder.jit(f, fallback="error")
    for seed in range(8):
        random.seed(seed)
        want, after = f(torch.arange(4.0)), random.random()
        random.seed(seed)
        torch.testing.assert_close(compiled(torch.arange(4.0)), want) if name != "text" else None
        if name == "text":
            assert compiled(torch.arange(4.0))[1] == want[1]
        assert random.random() == after
    assert len(compiled.programs) == {"numbers": 1, "tensors": 2, "text": 6}[name]


def test_a_list_from_outside_is_shuffled_in_place():
    def f(x, order):
        random.shuffle(order)
        np.random.shuffle(order)
        return x * 2

    ours, theirs = list("abcdef"), list("abcdef")
    random.seed(0)
    np.random.seed(0)
    f(torch.ones(2), theirs)
    random.seed(0)
    np.random.seed(0)
    assert torch.equal(thunder.jit(f, fallback="error")(torch.ones(2), ours), torch.full((2,), 2.0))
    assert ours == theirs


def test_tensors_are_saved_and_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))

    def f(x):
        torch.save({"x": x * 2, "all": [x, 3, "text"]}, tmp_path / "values")
        torch.save(model.state_dict(), tmp_path / "model")
        return torch.load(tmp_path / "values")["x"] + 1, pickle.loads(pickle.dumps((x, 1)))[0]

    compiled = thunder.jit(f, fallback="error")
    for value in (1.0, 2.0, 3.0):
        x = torch.full((2, 2), value)
        got = compiled(x)
        assert torch.equal(got[0], x * 2 + 1) and torch.equal(got[1], x)
        values, state = torch.load(tmp_path / "values"), torch.load(tmp_path / "model")
        assert torch.equal(values["x"], x * 2) and values["all"][1:] == [3, "text"]
        assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
        assert type(state) is type(model.state_dict()) and state._metadata == model.state_dict()._metadata
    assert len(compiled.programs) == 1
    with pytest.raises(CaptureError, match="requires grad"):
        thunder.jit(lambda: torch.save(model[0].weight, tmp_path / "weight"), fallback="error")()


WRITTEN = {
    "tensor": lambda x: (lambda a: x.add_(1).sum() + float(a[0]))(x.numpy()),
    "array": lambda x: (lambda a: a.fill(1.0) or x.sum())(x.numpy()),
    "array behind its tensor": lambda x: (lambda a, t: (t + 1, a.fill(2.0), t + 1))(
        *(lambda a: (a, torch.from_numpy(a)))(np.array(x.numpy()))
    )[2],
    "made of one": lambda x: torch.from_numpy(np.exp(x.numpy())).add_(1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_memory_that_arrays_share(name):
    """Not written to by the program that is captured: the original runs, or the function around the write."""
    compiled, x, y = thunder.jit(WRITTEN[name], fallback="eager"), torch.zeros(3), torch.zeros(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(2):
            np.testing.assert_array_equal(compiled(x), WRITTEN[name](y))
            assert torch.equal(x, y)
    assert thunder.cache_hits(compiled) == (name == "array behind its tensor")


def test_no_gradient_passes_through_host_code():
    with pytest.raises(CaptureError, match="a gradient would have to pass"):
        thunder.jit(lambda x: x * np.random.randn(3), fallback="error")(torch.ones(3, requires_grad=True))


EDGES = {
    "random": lambda x: x * random.random(), "time": lambda x: x * time.time(), "print": lambda x: print(x) or x,
    "open": lambda x: open(os.devnull).close() or x, "numpy": lambda x: x * np.random.rand(),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_is_an_error_where_it_is_not_wanted(name):
    with pytest.raises(SharpEdgeError, match=__file__):
        thunder.jit(EDGES[name], sharp_edges="error")(torch.ones(2))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * bisect.bisect([-1, 0, 1], x[0].item()),
        lambda x: (heapq.nlargest(2, x.tolist()), heapq.nsmallest(1, x.tolist())),
        lambda x: (x, array.array("d", x.tolist()).tolist()),
        lambda x: datetime.datetime.fromtimestamp(int(x[0].item() * 1000), datetime.timezone.utc).isoformat(),
    ],
)
def test_code_that_reads_containers_of_data(f):
    compiled = thunder.jit(f, fallback="error")
    for x in (torch.tensor([0.5, -2.0, 1.5]), torch.tensor([2.5, 0.0, -1.0])):
        assert str(compiled(x)) == str(f(x))


TEXTS = {
    "printed": (lambda y: print(y), True),
    "str": (lambda y: print(str(y)), True),
    "of a sum": (lambda y: print(y.sum()), True),
    "%s": (lambda y: print("%s" % y.sum()), True),  # noqa: UP031
    "!r": (lambda y: print("{!r}".format(y.sum())), True),  # noqa: UP032
    "a number": (lambda y: print(f"{y.sum()} {y.sum():.3f}", "%.3f" % y.sum(), "{}".format(y.sum())), True),  # noqa: UP031, UP032
    "detached": (lambda y: print(y.detach(), y.sum().item()), True),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_tensor_with_a_history_is_eagers(name, capsys):
    show, is_captured = TEXTS[name]

    def shown(y):
        show(y * 2)
        return y * 3

    def program(x):
        return shown(x.sin()).exp()

    x, printed = torch.ones(2, requires_grad=True), []
    for function in (program, thunder.jit(program, fallback="eager")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = [function(x), function(x)]
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and torch.equal(*results)
    assert is_captured is (not caught)


def test_the_text_of_an_array_of_the_program_is_captured(capsys):
    def program(x):
        a = np.arange(3)
        print(a, [a], {"a": a})
        return x * len(str(a)), f"{a}", "%s" % a

    compiled = thunder.jit(program, fallback="error")
    for _ in range(2):
        want, said = program(torch.ones(2)), capsys.readouterr().out
        got = compiled(torch.ones(2))
        assert torch.equal(got[0], want[0]) and got[1:] == want[1:] and capsys.readouterr().out == said


def test_log_records_name_the_line_and_the_function_that_write_them():
    records, logger = [], logging.getLogger("thunder.tests.places")

    class Keeping(logging.Handler):
        def emit(self, record):
            records.append((record.pathname, record.lineno, record.funcName, record.getMessage()))

    def helper():
        logger.warning("of the caller", stacklevel=2)

    def f(x):
        logger.info("with %s", 2)
        helper()
        return x * 2

    logger.addHandler(handler := Keeping())
    logger.setLevel(logging.INFO)
    try:
        compiled, x = thunder.jit(f, fallback="error"), torch.ones(2)
        for call in (f, compiled, compiled):
            call(x)
    finally:
        logger.removeHandler(handler)
    assert records[:2] == records[2:4] == records[4:]
    assert {record[2] for record in records} == {"f"}


@pytest.mark.filterwarnings("ignore::thunder.errors.FallbackWarning")
def test_a_record_of_an_exception_that_is_handled_holds_it():
    saved, logger = [], logging.getLogger("thunder.tests.exceptions")

    class Keeping(logging.Handler):
        def emit(self, record):
            saved.append(record.exc_info[0])

    def f(x):
        try:
            return {}["a"]
        except KeyError:
            logger.exception("no such key")
        return x * 2

    logger.addHandler(handler := Keeping())
    try:
        compiled = thunder.jit(f, fallback="eager")
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    finally:
        logger.removeHandler(handler)
    assert saved == [KeyError, KeyError]


@pytest.mark.parametrize("disable", [False, True])
def test_a_progress_bar_of_tqdm_runs_on_the_host(disable):
    tqdm = pytest.importorskip("tqdm", reason="transformers brings it")
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(3)])

    def f(x, file):
        for i in tqdm.tqdm(range(3), file=file, disable=disable):
            x = layers[i](x)
        with tqdm.trange(2, file=file, disable=disable) as bar:
            bar.set_description("done")
        return x * 2

    compiled = thunder.jit(f, fallback="error")
    for _ in range(3):
        ours, theirs = io.StringIO(), io.StringIO()
        x, y = (torch.ones(2, 3, requires_grad=True) for _ in range(2))
        compiled(x, ours).sum().backward()
        f(y, theirs).sum().backward()
        assert torch.equal(x.grad, y.grad)
        assert "done" in theirs.getvalue() if not disable else theirs.getvalue() == ""
        assert ("done" in ours.getvalue(), "3/3" in ours.getvalue()) == (not disable, not disable)
    assert len(compiled.programs) == 1
