"""Programs that a second compilation takes from disk: what is captured no second time, and what is."""

import dataclasses
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import thunder
from tests import fresh
from thunder.core import codegen
from thunder.errors import ThunderError
from thunder.options import environment_of_children
from thunder.programs import files, keep

SCALE = 2.0


class Perceptron(torch.nn.Module):
    def __init__(self, width=8, bias=True):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, width, bias), torch.nn.Linear(width, 3, bias)
        self.act, self.scale = F.gelu, 1.5

    def forward(self, x):
        return self.second(self.act(self.first(x))) * self.scale


class Normed(torch.nn.Module):
    """A module that writes to its buffers, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(x)).relu()


class Recurrent(torch.nn.Module):
    """PyTorch differentiates its layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.GRU(2, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x.unflatten(1, (2, 2)))[0]


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Perceptron()

    def forward(self, x, y):
        logits = self.body(x)
        return Output(loss=F.mse_loss(logits, y), logits=logits)


class Counter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.history, self.weight = [], torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.history.append(x.shape[0])
        return x * self.weight


def scaled(x):
    return x * SCALE


def helped(x):
    return scaled(x).sin()


def masked(x, mask=None):
    return x.masked_fill(mask, 0.0).cumsum(-1) if mask is not None else x


def written(x):
    x.mul_(2)
    return x + 1


def several(x, y):
    return {"a": x @ y, "b": [x.sum(), (y, 3, "words")], "c": None}


def pair(x):
    a, b = x.chunk(2)
    return torch.return_types.max((a, b.long()))[0], a.t()


def random_numbers(x):
    return x + torch.rand_like(x)


def checked(x):
    with torch.no_grad():
        y = x.exp()
    return x * y


def branches(x, flag):
    return x.sin() if flag else x.cos()


FUNCTIONS = {
    "global": (scaled, lambda: (torch.randn(3),)),
    "helper": (helped, lambda: (torch.randn(3),)),
    "mask": (masked, lambda: (torch.randn(2, 3), torch.tensor([[True, False, True]]))),
    "structure": (several, lambda: (torch.randn(2, 3), torch.randn(3, 2))),
    "random": (random_numbers, lambda: (torch.randn(3),)),
    "no grad inside": (checked, lambda: (torch.randn(3, requires_grad=True),)),
    "flag": (branches, lambda: (torch.randn(3), True)),
    "views": (pair, lambda: (torch.randn(4, 2),)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_loaded_and_equal_eager(name, again):
    fn, make = FUNCTIONS[name]
    args = make()
    torch.manual_seed(0)
    wanted = fn(*args)
    for loaded in (0, 1):
        torch.manual_seed(0)
        actual, stats = again(fn, *args)
        assert stats.loaded == loaded, stats.not_loaded
        assert same(actual, wanted)
    assert stats.interpreted_instructions == 0


def test_the_code_of_programs_is_kept_with_them(again, monkeypatch):
    """What Python compiles their texts to: the prologue's too, though it is written anew."""
    compiled = []

    def spy(text, *args):
        compiled.append(text.partition("(")[0])
        return compile(text, *args)

    monkeypatch.setattr(codegen, "compile", spy, raising=False)
    x = torch.randn(5, 4, requires_grad=True)
    for loaded in (0, 1):
        compiled.clear()
        actual, stats = again(Perceptron(), x)
        actual.sum().backward()
        programs = {"def prologue", "def augmented_forward_fn", "def backward_fn"} & set(compiled)
        assert stats.loaded == loaded and len(programs) == (0 if loaded else 3), compiled


def same(a, b) -> bool:
    """Whether two results are bit for bit the same, in the same structure."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(same, a.values(), b.values()))
    return type(a) is type(b) and (all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b)


def test_what_is_written_to_is_written_to(again):
    for loaded in (0, 1):
        x = torch.ones(3)
        actual, stats = again(written, x)
        assert stats.loaded == loaded and x.tolist() == [2.0] * 3 and actual.tolist() == [3.0] * 3


def asks_for_a_gradient(x, y):
    x.requires_grad_()
    return y * 2


def test_an_argument_that_nothing_uses_requires_grad(again):
    for loaded in (0, 1):
        x = torch.ones(3)
        _, stats = again(asks_for_a_gradient, x, torch.ones(2))
        assert stats.loaded == loaded and x.requires_grad


def overwritten(m, w):
    m.mul_(w)
    return m[1:], m.sin()


def test_an_argument_that_gets_a_history_gets_it(again):
    w = torch.randn(3, requires_grad=True)
    for loaded in (0, 1):
        m = torch.ones(3)
        (view, result), stats = again(overwritten, m, w)
        assert view._base is m and stats.loaded == loaded
        gradient = torch.autograd.grad(result.sum() + m.sum() + view.sum(), w)[0]
        torch.testing.assert_close(gradient, w.cos() + torch.tensor([1.0, 2.0, 2.0]))


@pytest.mark.parametrize("kind", [Perceptron, Normed, Recurrent])
def test_modules_train(kind, again):
    torch.manual_seed(0)
    original = kind()
    x = torch.randn(5, 4, requires_grad=True)

    def trained(run, model):
        torch.manual_seed(1)
        model.zero_grad()
        x.grad = None
        result = run(model)
        result.square().sum().backward()
        return [result, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]

    def copy():
        model = kind()
        model.load_state_dict(original.state_dict())
        return model

    wanted = trained(lambda m: m(x), copy())
    for loaded in (0, 1):
        seen = []
        losses = trained(lambda m: (seen.append(again(m, x)), seen[0][0])[1], copy())  # noqa: B023
        assert seen[0][1].loaded == loaded, seen[0][1].not_loaded
        for a, b in zip(losses, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def gradients_of_loss(run, model, x, y):
    model.zero_grad()
    run(model, x, y).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def test_a_loss_beside_logits(again):
    """The backward that logits play no part in is kept when it is first compiled."""
    model, x, y = WithLoss(), torch.randn(2, 4), torch.randn(2, 3)
    wanted = gradients_of_loss(lambda m, *a: m(*a), model, x, y)
    for loaded in (0, 1):
        compiled = thunder.jit(model, keep_programs=True)
        gradients = gradients_of_loss(lambda m, *a: compiled(*a), model, x, y)  # noqa: B023
        torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
        assert thunder.compile_stats(compiled).loaded == loaded
    (path,) = files.directory().glob("*.program")
    assert list(files.read(path, files.key_of_user())["without"]) == ["1"]


def test_derivatives_that_are_not_in_the_file(again):
    """Where a file has no backward for a case, PyTorch differentiates the program."""
    model, x, y = WithLoss(), torch.randn(2, 4), torch.randn(2, 3)
    again(model, x, y)  # no backward runs: the one of the loss alone is not in the file
    actual, stats = again(model, x, y)
    wanted = gradients_of_loss(lambda m, *a: m(*a), model, x, y)
    model.zero_grad()
    actual.loss.backward()
    assert stats.loaded == 1
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)

    actual, stats = again(model, x, y)
    first = torch.autograd.grad(actual.logits.square().sum(), model.body.first.weight, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), model.body.second.weight)[0]
    result = model(x, y)
    first = torch.autograd.grad(result.logits.square().sum(), model.body.first.weight, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), model.body.second.weight)[0])
    assert stats.loaded == 1


def stopped(x):
    """Values that are computed without grad between others: as operations, as views, as one of several results."""
    with torch.no_grad():
        scale = x.detach().exp().sum(-1, keepdim=True)
        top, places = x.topk(2)
        seen = x[:, 1:]
    y = x.sin() * scale + x.gather(1, places).sum()
    return y + top.mean() * x.cos() + seen.sum() * x, x.argmax(-1), x.detach() * 2


@pytest.mark.parametrize("fn", [stopped, checked, helped, several, random_numbers], ids=lambda fn: fn.__name__)
def test_second_derivatives_of_what_is_loaded(fn, again):
    def derivatives(run):
        torch.manual_seed(0)
        inputs = [torch.randn(3, 3, requires_grad=True) for _ in range(2 if fn is several else 1)]
        torch.manual_seed(1)
        leaves = torch.utils._pytree.tree_leaves(run(fn, *inputs))
        differentiable = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        flags = [t.requires_grad for t in leaves if isinstance(t, torch.Tensor)]
        loss = sum(t.square().sum() for t in differentiable)
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in first), inputs, allow_unused=True)
        return [flags, *first, *second]

    wanted = derivatives(lambda fn, *arguments: fn(*arguments))
    for loaded in (0, 1):
        seen = []
        all_derivatives = derivatives(lambda fn, *arguments: (seen.append(again(fn, *arguments)), seen[0][0])[1])  # noqa: B023
        assert seen[0][1].loaded == loaded, seen[0][1].not_loaded
        torch.testing.assert_close(all_derivatives, wanted)


def test_effects_are_repeated(again):
    for loaded in (0, 1):
        model = Counter()
        _, stats = again(model, torch.ones(2, 3))
        assert model.history == [2] and stats.loaded == loaded, stats.not_loaded


def drawn(x):
    a = torch.rand(2)
    try:
        return a + torch.bernoulli(x)
    except RuntimeError:
        return a - x


def test_the_original_that_handles_an_error_draws_the_same_numbers(again):
    for value, loaded in ((1.0, 0), (2.0, 1), (0.0, 1), (3.0, 1)):
        x = torch.full((2,), value)
        torch.manual_seed(1)
        wanted, state = drawn(x), torch.get_rng_state()
        torch.manual_seed(1)
        actual, stats = again(drawn, x, fallback="eager")
        assert stats.loaded == loaded, stats.not_loaded
        assert torch.equal(actual, wanted) and torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------- what is another program


def test_a_module_with_another_structure_is_captured(again):
    x = torch.randn(2, 4)
    again(Perceptron(), x)
    for model in (Perceptron(bias=False), Perceptron(width=9)):
        actual, stats = again(model, x)
        assert stats.loaded == 0 and stats.not_loaded
        torch.testing.assert_close(actual, model(x))


CHANGES = {
    "a number": lambda m: setattr(m, "scale", 2.5),
    "a function": lambda m: setattr(m, "act", F.relu),
    "a hook": lambda m: m.first.register_forward_hook(lambda *_: None),
    "grad of a parameter": lambda m: m.first.weight.requires_grad_(False),
    "dtype": lambda m: m.double(),
    "another forward": lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x, m)),
    "a module replaced": lambda m: setattr(m, "second", torch.nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_was_changed_is_captured(change, again):
    x = torch.randn(2, 4)
    model = Perceptron(width=3)
    again(model, x)
    CHANGES[change](model)
    x = x.to(model.first.weight.dtype)
    actual, stats = again(model, x)
    assert stats.loaded == 0
    torch.testing.assert_close(actual, model(x), rtol=0, atol=0)


def test_a_function_that_was_changed_is_captured(again, monkeypatch):
    x = torch.randn(3)
    again(helped, x)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    actual, stats = again(helped, x)
    assert stats.loaded == 0 and "SCALE" in stats.not_loaded[0]
    torch.testing.assert_close(actual, helped(x))
    before = scaled.__code__
    scaled.__code__ = (lambda x: x * SCALE - 1).__code__
    try:
        actual, stats = again(helped, x)
        assert stats.loaded == 0
        torch.testing.assert_close(actual, helped(x))
    finally:
        scaled.__code__ = before


def test_arguments_and_modes_and_options(again):
    x = torch.randn(3, requires_grad=True)
    again(branches, x, True)
    assert again(branches, x, False)[1].loaded == 0
    assert again(branches, x.detach(), True)[1].loaded == 0
    assert again(branches, torch.randn(4, requires_grad=True), True)[1].loaded == 0
    with torch.no_grad():
        assert again(branches, x, True)[1].loaded == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert again(branches, x, True)[1].loaded == 0
    assert again(branches, x, True, numerics="eager")[1].loaded == 0
    assert again(branches, x, True)[1].loaded == 1


def test_one_parameter_in_two_places(again):
    """No question of the program's: its gradients are added up."""
    x, model = torch.randn(2, 4), Perceptron(width=3)
    again(model, x)
    model.second.bias = model.first.bias
    actual, _ = again(model, x)
    actual.sum().backward()
    gradient, model.first.bias.grad = model.first.bias.grad, None
    model(x).sum().backward()
    torch.testing.assert_close(gradient, model.first.bias.grad)


def test_two_objects_that_become_one(again):
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def tied(first, second):
        model = torch.nn.Sequential(first, second)
        model.same = first is second
        return model

    x = torch.randn(2, 3)
    again(tied(a, b), x)
    actual, stats = again(tied(a, a), x)
    torch.testing.assert_close(actual, a(a(x)))
    assert stats.loaded == 0


def test_a_loaded_program_misses_as_any(again):
    model, x = Perceptron(), torch.randn(2, 4)
    again(model, x)
    compiled = thunder.jit(model, keep_programs=True)
    compiled(x)
    model.scale = 4.0
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    stats = thunder.compile_stats(compiled)
    assert stats.loaded == 1 and stats.cache_misses == 2
    assert "scale" in stats.last_compile_reasons[0]


def test_looking_at_a_program_captures_it(again):
    model, x = Perceptron(), torch.randn(2, 4)
    again(model, x)
    compiled = thunder.jit(model, keep_programs=True)
    compiled(x)
    assert "torch.nn.functional.gelu" in str(thunder.last_traces(compiled)[-1])
    assert compiled.lower(x).forward.bound_symbols


def test_what_looks_at_bound_symbols_says_that_there_are_none(again):
    model, x = Perceptron(), torch.randn(2, 4)
    again(model, x)
    compiled = thunder.jit(model, keep_programs=True)
    compiled(x)
    for look in (thunder.profile, lambda f, x: thunder.report(f), lambda f, x: thunder.report(f, None, x)):
        with pytest.raises(ThunderError, match="comes from the disk.*keep_programs=False"):
            look(compiled, x)


# ------------------------------------------------------------------------------------ sizes and numbers that change


class Lengths(torch.nn.Module):
    """Sizes in results, slices and decisions; numbers as factors, in functions of the host and as places."""

    def __init__(self):
        super().__init__()
        self.table, self.out = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 3)
        self.scales = [1.0, 0.5, 0.25, 2.0, 3.0]

    def forward(self, ids, scale, step):
        n = ids.shape[1]
        y = self.out(self.table(ids)) * min(scale, 1.5) * self.scales[step]
        if n > 20:
            y = y[:, : n // 2]
        return y.flatten(0, 1), 2 * n + step, torch.zeros(n, step + 2)


def test_sizes_and_numbers_stay_symbolic(cache):
    model = Lengths()

    def steps(*calls):
        compiled = thunder.jit(model, keep_programs=True)
        for n, scale, step in calls:
            inputs = torch.randint(0, 20, (2, n)), scale, step
            actual, wanted = compiled(*inputs), model(*inputs)
            torch.testing.assert_close(actual, wanted)
            gradients = [torch.autograd.grad(out[0].square().sum(), [*model.parameters()]) for out in (actual, wanted)]
            torch.testing.assert_close(*gradients)
        return thunder.compile_stats(compiled)

    assert steps((3, 0.5, 2), (5, 0.7, 3), (9, 0.9, 4)).loaded == 0
    later = steps((7, 0.3, 3), (4, 1.25, 2), (13, 0.6, 4))  # others than those that were seen
    assert later.loaded == 1 and later.interpreted_instructions == 0
    assert steps((30, 0.3, 2)).loaded == 0, "another side of n > 20"
    assert steps((30, 0.3, 2), (8, 0.4, 3)).loaded == 2


# ------------------------------------------------------------------------------------------------- what is not kept


class Draws(torch.nn.Module):
    def forward(self, x):
        print("drawn")
        return x + 1


class Nothing(thunder.Transform):
    pass


REFUSED = {
    "host call": (Draws(), (torch.ones(2),), {}, "on the host"),
    "transform": (scaled, (torch.ones(2),), {"transforms": [Nothing()]}, "the transform Nothing, which is not"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_says_why_and_runs(what, again):
    fn, args, options, words = REFUSED[what]
    for _ in range(2):
        actual, stats = again(fn, *args, **options)
        assert stats.loaded == 0
        torch.testing.assert_close(actual, fn(*args))
    (path,) = files.directory().glob("*.refused")
    assert words in files.read(path, files.key_of_user())["reason"]
    assert not [*files.directory().glob("*.program")]


def test_without_the_option_nothing_is_written(cache, monkeypatch):
    thunder.jit(scaled)(torch.ones(2))
    assert not cache.exists()
    monkeypatch.setenv("THUNDER_KEEP_PROGRAMS", "1")
    thunder.jit(scaled)(torch.ones(2))
    assert len([*cache.iterdir()]) == 1
    thunder.jit(several, keep_programs=False)(torch.ones(2, 2), torch.ones(2, 2))
    assert len([*cache.iterdir()]) == 1


def test_no_more_than_a_number_of_programs_of_one_key(again, monkeypatch):
    monkeypatch.setattr(keep, "MOST_PROGRAMS", 3)
    for n in range(1, 6):
        again(scaled, torch.ones(n))
    assert len([*files.directory().glob("*.program")]) == 3


# ----------------------------------------------------------------------------------------------------- processes

PROGRAM = """
import sys, collections
import torch
import thunder
from tests import fresh
from thunder.capture import host

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.names = {"act": torch.nn.functional.silu}
    def forward(self, x):
        for layer in self.layers:
            x = self.names["act"](layer(x)) + x
        return {"out": x}

captures = []
made = host.TorchHost.__init__
host.TorchHost.__init__ = lambda self, *a, **k: (captures.append(1), made(self, *a, **k))[1]
torch.manual_seed(0)
model = Model()
x = torch.randn(2, 4)
compiled = thunder.jit(model, keep_programs=True)
loss = compiled(x)["out"].square().sum()
loss.backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x)["out"].square().sum().backward()
same = all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters()))
print(len(captures), thunder.compile_stats(compiled).loaded, same)
"""


def started(path: Path, before: Callable | None = None) -> fresh.Program:
    path.write_text(PROGRAM)
    return fresh.Program(path, env=environment_of_children() | {"OMP_NUM_THREADS": "1"}, before=before)


def said(program: fresh.Program) -> tuple[str, str]:
    done = program.result()
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def full() -> None:
    """The disk of this process."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # what is printed is less, a program is more


def test_a_second_process_does_not_capture(cache, tmp_path):
    """Also where nothing can be written any more: a full disk, and a directory that is read-only."""
    path = tmp_path / "model.py"
    out, errors = said(started(path, before=full))
    assert out == "1 0 True" and errors.count("ProgramFileWarning: programs are not kept") == 1
    assert not [*cache.glob("*")]
    assert said(started(path)) == ("1 0 True", "")
    cache.chmod(0o500)
    assert said(started(path, before=full)) == ("0 1 True", "")


def test_eight_processes_at_once(cache, tmp_path):
    processes = [started(tmp_path / f"model_{i}.py") for i in range(8)]
    assert {said(process)[0] for process in processes} <= {"1 0 True", "0 1 True"}
    assert [p.suffix for p in cache.iterdir()] == [".program"]
    assert said(started(tmp_path / "model.py")) == ("0 1 True", "")


SEEN: dict[int, str] = {}


def by_id(x):
    return x + 1 if id(x) in SEEN else x - 1


def with_memo(x):
    seen = {id(x)}
    return x + len(seen)


def test_ids_of_objects(again):
    """An id is another number in each process: a program that compares one with outside numbers is not kept."""
    x = torch.ones(2)
    for fn, loaded in ((by_id, 0), (with_memo, 1)):
        again(fn, x)
        actual, stats = again(fn, x)
        assert stats.loaded == loaded and torch.equal(actual, fn(x))


def decorated(function):
    def run(self, x):
        return function(self, x) * 2

    return run


class Decorated(torch.nn.Module):
    @decorated
    def forward(self, x):
        return x.to(torch.device("cpu")) + 1


def test_functions_in_closures_and_local_classes(again):
    class Local(torch.nn.Module):
        def forward(self, x):
            return self.helper(x) + 1

        def helper(self, x):
            return x.sin()

    x = torch.randn(3)
    for model in (Decorated(), Local()):
        again(model, x)
        actual, stats = again(model, x)
        assert stats.loaded == 1, stats.not_loaded
        assert torch.equal(actual, model(x))


@pytest.mark.parametrize("value", [b"abc", "abc", np.float32(2), np.arange(3)[1], Path("a"), 2.5], ids=repr)
def test_values_that_may_change_are_written(cache, again, value):
    """The program runs and is kept, whatever the kind of a value that it holds."""

    def program(x, value):
        # the text of a number of numpy's is a value of the host
        return x * (float(value) if isinstance(value, np.generic) else len(str(value)))

    x = torch.ones(3)
    for loaded in (0, 1):
        result, stats = again(program, x, value)
        assert torch.equal(result, program(x, value)) and stats.loaded == loaded
