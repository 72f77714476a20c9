"""ThunderModule: what thunder.jit returns for an nn.Module behaves as the module it wraps."""

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import thunder
from thunder import ThunderModule
from thunder.errors import FallbackWarning


class Net(nn.Module):
    """Tied submodules, a BatchNorm, persistent and other buffers, a plain attribute, a property and methods."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.tied = self.a
        self.seq = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("b", torch.zeros(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.k = 3

    def forward(self, x, *, shift=0.0):
        return self.seq(self.tied(self.a(x))) * self.k + self.b + shift

    def generate(self, x, n):
        for _ in range(n):
            x = self(x)
        return x

    @torch.no_grad()
    def predict(self, x):
        return self.forward(x)

    @property
    def width(self):
        return self.a.in_features


X = torch.linspace(-1, 1, 8).reshape(4, 2)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    model = Net()
    return model, thunder.jit(model)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def same(a, b):
    return all(x is y for x, y in zip(a, b, strict=True))


def test_repr_and_kind(pair):
    model, compiled = pair
    assert type(compiled) is ThunderModule and isinstance(compiled, nn.Module)
    assert repr(compiled) == "ThunderModule(\n  (_model): " + repr(model).replace("\n", "\n  ") + "\n)"
    assert (
        repr(thunder.jit(nn.Linear(4, 8)))
        == "ThunderModule(\n  (_model): Linear(in_features=4, out_features=8, bias=True)\n)"
    )
    assert (
        compiled._model is model
        and thunder.compile_data(compiled).fn is model
        and compiled._lc_cs is thunder.compile_stats(compiled)
    )
    assert thunder.jit(compiled)._model is model, "what is compiled already is compiled anew from its original"
    with pytest.raises(NotImplementedError, match="compile the module that it was scripted or traced from"):
        thunder.jit(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))


def test_calls(pair):
    model, compiled = pair
    compiled.eval()
    assert torch.equal(compiled(X), model(X)) and torch.equal(compiled(x=X, shift=2.0), model(X, shift=2.0))
    assert torch.equal(compiled.forward(X), model(X))
    for method in (compiled.generate, compiled.predict):
        args = (X, 2) if method.__name__ == "generate" else (X,)
        assert torch.equal(method(*args), getattr(model, method.__name__)(*args))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        compiled(X, nonsense=1)


def test_lookups(pair):
    model, compiled = pair
    assert (
        compiled.get_parameter("seq.0.weight") is model.seq[0].weight
        and compiled.get_buffer("seq.1.running_mean") is model.seq[1].running_mean
    )
    assert compiled.get_submodule("seq.1") is model.seq[1] and compiled.get_submodule("") is model
    for get, wrong in (
        (compiled.get_parameter, "seq.9.weight"),
        (compiled.get_buffer, "k"),
        (compiled.get_submodule, "nobody"),
        (compiled.get_parameter, "b"),
    ):
        with pytest.raises(AttributeError) as ours:
            get(wrong)
        with pytest.raises(AttributeError) as theirs:
            getattr(model, get.__name__)(wrong)
        assert str(ours.value) == str(theirs.value)
    compiled.set_buffer("seq.1.running_mean", torch.ones(2))
    compiled.set_buffer("b", torch.full((2,), 5.0))
    assert model.seq[1].running_mean.tolist() == [1, 1] and model.b.tolist() == [5, 5]
    compiled.eval()
    assert torch.equal(compiled(X), model(X))
    for name in ("get_buffer", "get_parameter", "get_submodule", "named_buffers", "named_parameters", "no_sync"):
        assert inspect.getdoc(getattr(ThunderModule, name))


@pytest.mark.parametrize("iterate", ["parameters", "buffers", "children", "modules"])
def test_iteration_gives_the_same_objects(pair, iterate):
    model, compiled = pair
    assert same(getattr(compiled, iterate)(), getattr(model, iterate)())


def test_named_iteration(pair):
    model, compiled = pair
    for arguments in (
        {},
        {"prefix": "p"},
        {"recurse": False},
        {"remove_duplicate": False},
        {"prefix": "p", "recurse": True, "remove_duplicate": False},
    ):
        for iterate in ("named_parameters", "named_buffers"):
            ours, theirs = list(getattr(compiled, iterate)(**arguments)), list(getattr(model, iterate)(**arguments))
            assert [n for n, _ in ours] == [n for n, _ in theirs] and same([t for _, t in ours], [t for _, t in theirs])
    assert list(compiled.named_children()) == list(model.named_children())
    assert list(compiled.named_modules(prefix="p")) == list(model.named_modules(prefix="p"))
    assert list(compiled.named_modules(remove_duplicate=False)) == list(model.named_modules(remove_duplicate=False))


def test_state_dicts_are_the_wrapped_modules(pair):
    model, compiled = pair
    for arguments in ({}, {"prefix": "p."}, {"keep_vars": True}):
        for ours in (compiled.state_dict(**arguments), compiled.original_state_dict(**arguments)):
            theirs = model.state_dict(**arguments)
            assert list(ours) == list(theirs) and ours._metadata == theirs._metadata
            assert all(
                a.data_ptr() == b.data_ptr() and a.requires_grad == b.requires_grad
                for a, b in zip(ours.values(), theirs.values())
            )
    assert "scratch" not in compiled.state_dict()
    other = Net()
    assert str(compiled.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))
    compiled.load_original_state_dict(Net().state_dict())
    other = Net()
    compiled.load_state_dict(other.state_dict(), assign=True)
    assert model.a.weight.data_ptr() == other.a.weight.data_ptr()
    assert torch.equal(compiled.eval()(X), other.eval()(X))
    assert compiled.load_state_dict({"nonsense": X}, strict=False).unexpected_keys == ["nonsense"]
    with pytest.raises(RuntimeError, match="Missing key.*\n.*Unexpected key.*nonsense"):
        compiled.load_state_dict({"nonsense": X})


def test_state_dict_hooks_run_once(pair):
    model, compiled = pair
    seen = []
    model.register_state_dict_post_hook(lambda module, *rest: seen.append(module))
    model.register_load_state_dict_pre_hook(lambda module, *rest: seen.append(module))
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append(module))
    nn.Sequential(compiled).load_state_dict(nn.Sequential(compiled).state_dict())
    compiled.load_state_dict(compiled.state_dict())
    assert len(seen) == 6 and all(m in (model, compiled) for m in seen)


def test_train_and_eval(pair):
    model, compiled = pair
    assert compiled.training and compiled.eval() is compiled
    assert not (compiled.training or model.training or model.seq[1].training)
    assert torch.equal(compiled(X), model(X))
    assert compiled.train() is compiled and model.seq[1].training
    assert compiled.train(False) is compiled and not model.training
    model.train()
    assert compiled.training


def test_a_change_of_mode_is_noticed():
    class Louder(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if self.training else 1)

    model = Louder(2, 2)
    compiled = thunder.jit(model)
    for mode in (True, False, True, False):
        assert torch.equal(compiled.train(mode)(X), model(X))
    assert (thunder.cache_misses(compiled), thunder.cache_hits(compiled)) == (2, 2)
    assert thunder.last_recompile_reasons(compiled) == ["model.training was True, is False"]


def test_a_train_method_of_the_model_is_called():
    class Frozen(nn.Linear):
        def train(self, mode=True):
            return super().train(False)

    assert not thunder.jit(Frozen(2, 2)).train().training


def test_hooks_on_the_wrapper_and_on_the_wrapped(pair):
    model, compiled = pair
    compiled.eval()
    plain = model(X)
    seen = []
    handles = [
        compiled.register_forward_hook(lambda module, inputs, output: seen.append(module) or output * 2),
        compiled.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,)),
    ]
    assert torch.equal(compiled(X), model(X * 3) * 2) and seen == [compiled]
    handles.append(model.register_forward_hook(lambda module, inputs, output: output + 1))
    handles.append(model.seq.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),)))
    want = model(X * 3) * 2
    assert not torch.equal(want, plain) and torch.equal(compiled(X), want)
    for handle in handles:
        handle.remove()
    assert torch.equal(compiled(X), plain)


def test_hooks_of_the_wrapper_inside_another_compiled_program(pair):
    model, compiled = pair
    compiled.eval()
    programs = [thunder.jit(lambda x: compiled(x)), thunder.jit(nn.Sequential(compiled))]
    for factor in (None, 2, 3):
        handle = compiled.register_forward_hook(lambda module, inputs, output: output * factor) if factor else None
        for program in programs:
            assert torch.equal(program(X), compiled(X))
            assert torch.equal(program(X), model(X) * (factor or 1))
        if handle:
            handle.remove()


def test_attributes_fall_through(pair):
    model, compiled = pair
    compiled.eval()
    before = compiled(X)
    compiled.k = 5
    assert model.k == 5 == compiled.k and torch.allclose(compiled(X), before / 3 * 5)
    compiled.extra = nn.Linear(1, 1)
    compiled.weight = nn.Parameter(X)
    assert model.extra is compiled.extra and dict(model.named_parameters())["weight"] is compiled.weight
    del compiled.extra, compiled.weight
    assert not hasattr(model, "extra") and not hasattr(compiled, "weight")
    assert compiled.width == 2 and "generate" in dir(compiled) and "k" in dir(compiled)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nonsense'"):
        compiled.nonsense
    with pytest.raises(AttributeError):
        del compiled.nonsense
    model.__dict__["forward"] = lambda x: x + 7
    assert torch.equal(compiled(X), X + 7)


def _patched_module(module, monkeypatch):
    """As accelerate does it: the function of the bound method is wrapped and bound again."""
    before = module.forward.__func__
    module.forward = types.MethodType(lambda self, *args, **kwargs: before(self, *args, **kwargs) + 100, module)


def _patched_class(module, monkeypatch):
    before = type(module).forward
    monkeypatch.setattr(type(module), "forward", lambda self, *args, **kwargs: before(self, *args, **kwargs) + 100)


@pytest.mark.parametrize(
    "patch, of", [(_patched_module, "model"), (_patched_class, "model"), (_patched_module, "compiled")]
)
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_patched_forward_takes_effect(pair, patch, of, called_before, hooked, monkeypatch):
    model, compiled = pair
    compiled.eval()
    want = model(X)
    outer = thunder.jit(lambda x: compiled(x) * 2)
    if called_before:
        assert torch.equal(compiled(X), want) and torch.equal(outer(X), want * 2)
    if hooked:
        compiled.register_forward_hook(lambda module, inputs, output: output * 3)
    patch(model if of == "model" else compiled, monkeypatch)
    factor = 3 if hooked else 1
    assert torch.equal(compiled(X), (want + 100) * factor)
    assert torch.equal(outer(X), (want + 100) * factor * 2)
    if patch is _patched_module:
        assert torch.equal(copy.deepcopy(compiled)(X), (want + 100) * factor)
        del (model if of == "model" else compiled).forward
        assert torch.equal(compiled(X), want * factor)


def test_a_forward_that_calls_the_modules_inside_is_compiled():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(2, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.body(x))

    model = Net()
    compiled = thunder.jit(model)
    compiled.forward = types.MethodType(lambda self, x: self.body(x) @ self.head.weight.T, compiled)
    for _ in range(2):
        assert torch.equal(compiled(X), model.body(X) @ model.head.weight.T)
    assert len(compiled.programs) == 1 and "matmul" in str(thunder.last_traces(compiled)[0])


def test_methods_of_modules_can_be_replaced(pair):
    _, compiled = pair
    compiled.to = lambda *args: "replaced"
    assert compiled.to("cpu") == "replaced"


def _twice(module, inputs, output):
    return output * 2


def test_copies_keep_hooks_of_the_wrapper(pair):
    model, compiled = pair
    compiled.eval()
    want = model(X) * 2
    compiled.register_forward_hook(_twice)
    for copied in (copy.deepcopy(compiled), copy.copy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(copied(X), want)


def test_registration_goes_to_the_wrapped_module(pair):
    model, compiled = pair
    compiled.register_buffer("late", torch.ones(1), persistent=False)
    compiled.register_parameter("p", nn.Parameter(torch.ones(1)))
    compiled.add_module("m", nn.ReLU())
    assert "late" in dict(model.named_buffers()) and "late" not in model.state_dict()
    assert "p" in model.state_dict() and "m" in dict(model.named_children())


def test_moves(pair):
    model, compiled = pair
    for move, dtype in (
        ("double", torch.float64),
        ("half", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
    ):
        assert getattr(compiled, move)() is compiled and model.a.weight.dtype == dtype == compiled.scratch.dtype
    assert compiled.to(torch.float64) is compiled and compiled.to("cpu") is compiled and compiled.cpu() is compiled
    compiled.eval()
    assert torch.equal(compiled(X.double()), model(X.double())) and compiled(X.double()).dtype == torch.float64
    compiled.float()
    assert torch.equal(compiled(X), model(X)), "a change of dtype is noticed"
    assert "dtype was torch.float64, is torch.float32" in thunder.last_recompile_reasons(compiled)[0]
    assert next(compiled.to("meta").parameters()).device.type == "meta" and model.b.device.type == "meta"
    assert next(compiled.to_empty(device="cpu").parameters()).device.type == "cpu"


def test_gradients_of_parameters(pair):
    model, compiled = pair
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    compiled.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert compiled.requires_grad_(False) is compiled and not any(p.requires_grad for p in model.parameters())
    compiled.eval()
    compiled.requires_grad_()
    assert all(p.requires_grad for p in model.parameters())
    seen = []
    assert compiled.apply(seen.append) is compiled and seen[-1] is model and set(seen) == set(model.modules())


def test_training_with_an_optimizer():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    theirs.load_state_dict(ours.state_dict())
    compiled = thunder.jit(ours)
    with torch.enable_grad():
        for model, call in ((ours, compiled), (theirs, theirs)):
            optimizer = torch.optim.SGD(call.parameters(), 0.1)
            for _ in range(3):
                optimizer.zero_grad()
                call(X).square().sum().backward()
                optimizer.step()
    assert torch.equal(ours.weight, theirs.weight) and thunder.cache_misses(compiled) == 1


def test_inside_other_modules(pair):
    model, compiled = pair
    outer, plain = nn.Sequential(compiled, nn.ReLU()), nn.Sequential(model, nn.ReLU())
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in outer.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert same(outer.parameters(), plain.parameters()) and same(outer.buffers(), plain.buffers())
    outer.load_state_dict(nn.Sequential(Net(), nn.ReLU()).state_dict())
    outer.eval()
    assert not model.seq[1].training
    assert torch.equal(outer(X), plain(X)) and thunder.compile_stats(compiled).calls == 1
    outer.double()
    assert model.a.weight.dtype == torch.float64
    outer.float().requires_grad_(False)
    assert not model.a.weight.requires_grad


def test_compiled_inside_compiled_is_checked():
    """A compiled module or method inside another compiled program: changes of the original are seen."""
    model = nn.Linear(2, 2)
    inner, method = thunder.jit(model), thunder.jit(model.forward)
    outer, plain = thunder.jit(nn.Sequential(inner, nn.ReLU())), nn.Sequential(model, nn.ReLU())
    programs = [
        (outer, plain),
        (thunder.jit(lambda x: inner(x)), model),
        (thunder.jit(lambda x: method(x)), model.forward),
    ]
    for change in (
        lambda: None,
        lambda: setattr(model, "weight", nn.Parameter(torch.zeros(2, 2))),
        lambda: setattr(model, "bias", None),
        lambda: model.register_forward_hook(lambda module, inputs, output: output + 1),
        lambda: model.__dict__.update(forward=lambda x: x * 2),
    ):
        change()
        for ours, theirs in programs[: 2 if "forward" in model.__dict__ else 3]:
            assert torch.equal(ours(X), theirs(X))
    assert thunder.compile_stats(inner).calls == 0


def test_containers_stay_containers():
    compiled = thunder.jit(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert (
        len(compiled) == 2
        and compiled[1] is compiled._model[1]
        and list(compiled) == list(compiled._model)
        and compiled[0] in compiled
    )
    assert bool(compiled) and bool(thunder.jit(nn.Linear(1, 1)))
    with pytest.raises(TypeError):
        len(thunder.jit(nn.Linear(1, 1)))


def test_no_sync(pair):
    model, compiled = pair
    with compiled.no_sync() as nothing:
        assert nothing is None and torch.equal(compiled.eval()(X), model(X))


def test_copies(pair):
    model, compiled = pair
    compiled.eval()
    want = compiled(X)
    deep, shallow, unpickled = copy.deepcopy(compiled), copy.copy(compiled), pickle.loads(pickle.dumps(compiled))
    for copied in (deep, shallow, unpickled):
        assert type(copied) is ThunderModule and thunder.cache_misses(copied) == 0 and torch.equal(copied(X), want)
    assert shallow._model is model and deep._model is not model
    assert deep.a is deep.tied, "tied modules stay tied"
    assert deep.a.weight.data_ptr() != model.a.weight.data_ptr()
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), want)
    options = thunder.jit(Net(), cache="no caching", disable_torch_autograd=True)
    assert thunder.cache_option(copy.deepcopy(options)) is thunder.CACHE_OPTIONS.NO_CACHING


def test_tied_parameters_are_one_input(pair):
    model, compiled = pair
    compiled.eval()
    compiled(X)
    names = [a.name for a in thunder.last_traces(compiled)[0].args]
    assert names.count("t_tied_weight") + names.count("t_a_weight") == 1
    model.tied = nn.Linear(2, 2)
    assert torch.equal(compiled(X), model(X)), "untying is noticed"
    assert thunder.cache_misses(compiled) == 2


def test_parameters_replaced_in_place_and_anew(pair):
    model, compiled = pair
    compiled.eval()
    compiled(X)
    model.a.weight.mul_(2)
    assert torch.equal(compiled(X), model(X))
    model.a.weight = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(compiled(X), model(X))
    model.a.weight.data = torch.zeros(2, 2)
    assert torch.equal(compiled(X), model(X))
    assert thunder.cache_misses(compiled) == 1, "the metadata is the same"
    model.a.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float32), requires_grad=False)
    assert torch.equal(compiled(X), model(X)) and thunder.cache_misses(compiled) == 2
    assert "requires_grad was True, is False" in thunder.last_recompile_reasons(compiled)[0]


def test_freed(pair):
    model = Net().eval()
    compiled = thunder.jit(model)
    compiled(X)
    references = [weakref.ref(o) for o in (model, compiled, model.a.weight, compiled._compiled)]
    del model, compiled
    gc.collect()
    assert [r() for r in references] == [None] * 4


@pytest.mark.parametrize("used", ["called", "trained", "in a function"])
def test_parameters_are_freed_with_the_module(used):
    """As eager's are: they do not wait for the garbage collector."""
    model = nn.Linear(2, 2)
    weight = weakref.ref(model.weight)
    gc.collect()
    gc.disable()
    try:
        compiled = thunder.jit((lambda x, model=model: model(x)) if used == "in a function" else model)
        with torch.enable_grad():
            out = compiled(X).sum()
        if used == "trained":
            out.backward()
        del model, compiled, out
        assert weight() is None
    finally:
        gc.enable()


class Decoder(Net):
    """Overrides a method, and keeps private state that `forward` reads."""

    def forward(self, x, scale=1.0):
        self._calls = getattr(self, "_calls", 0) + 1
        return super().forward(x) * scale

    def generate(self, x, n):
        self._last, self.width_seen = n, self.width
        out = super().generate(x, n)
        return out, inspect.signature(self.forward), isinstance(self, Decoder), type(self)().k, copy.deepcopy(self)

    def replaced(self, forward):
        self.forward = forward
        return self


def test_methods_that_call_the_module_run_compiled_programs():
    model = Decoder().eval()
    with torch.no_grad():
        compiled = thunder.jit(copy.deepcopy(model))
        wanted, got = model.generate(X, 3), compiled.generate(X, 3)
    assert torch.equal(wanted[0], got[0]) and wanted[1:4] == got[1:4]
    assert type(got[4]) is Decoder and got[4].a.weight.data_ptr() != compiled.a.weight.data_ptr()
    assert thunder.compile_stats(compiled).calls == 3 and thunder.cache_hits(compiled) > 0
    assert compiled._model._calls == 3 and compiled._last == 3 and compiled.width_seen == 2
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    plain = thunder.jit(Net().eval())
    inside = thunder.jit(lambda x: plain.generate(x, 2))
    assert torch.equal(inside(X), plain._model.generate(X, 2)) and thunder.compile_stats(plain).calls == 0
    assert compiled.replaced(lambda x: x + 1) is not model and torch.equal(compiled.generate(X, 2)[0], X + 2)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(12))
        self.criterion, self.calls = nn.MSELoss(), 0

    def forward(self, x):
        return self.decoder(self.encode(x))

    def encode(self, x):
        self.calls += 1
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def distance(self, batch, weight=1.0):
        """Calls another method, and itself no module inside."""
        return (self.encode(batch["x"]) - self.encode(batch["y"])).square().sum() * weight

    def freeze(self, module):
        for p in self.encoder.parameters():
            p.requires_grad_(module is None)

    def encode_often(self, x, times):
        for _ in range(times):
            x = self.decoder(self.encoder(x))
        return x

    def criticise(self, x, times):
        return sum(self.criterion(self(x), x) for _ in range(times))

    def iterate(self, x, times):
        for _ in range(times):
            x = self.decoder(self.encoder(x))
        return x, self(x)


class Residual(Autoencoder):
    def encode(self, x):
        return super().encode(x) + 1


@torch.enable_grad()
@pytest.mark.parametrize("kind", [Autoencoder, Residual])
def test_methods_that_call_modules_inside_are_programs(kind):
    model, x = kind(), torch.randn(2, 4)
    compiled, batch = thunder.jit(model), {"x": x, "y": torch.randn(2, 4)}
    for call in (lambda m: m.encode(x), lambda m: m.distance(batch, weight=2.0), lambda m: m.iterate(x, 4)[0].sum()):
        expected, got = call(model), call(compiled)
        assert_close(got, expected)
        grads = (torch.autograd.grad(y.sum(), list(model.parameters()), allow_unused=True) for y in (got, expected))
        for ours, theirs in zip(*grads, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.allclose(ours, theirs)
    assert model.calls == 8 and compiled.calls == 8
    assert thunder.cache_misses(compiled.encode) == 1 and thunder.cache_hits(compiled.encode) == 2
    assert len(thunder.last_traces(compiled.iterate)) > 1 and thunder.compile_stats(compiled).calls == 0
    compiled.freeze(None)  # which is given no tensor
    compiled.freeze(compiled)
    assert not any(p.requires_grad for p in model.encoder.parameters())
    assert thunder.compile_stats(compiled.freeze).calls == 0
    again = thunder.jit(compiled.encode)
    assert torch.equal(again(x), model.encode(x)) and thunder.cache_misses(again) == 1


def test_a_method_that_loops_over_calls_of_a_module_runs_as_it_is():
    """Its calls of the module itself are compiled; a warning says that those of modules inside are eager."""
    model, x = Autoencoder(), torch.randn(2, 4)
    compiled = thunder.jit(model, fallback="error")
    with pytest.warns(FallbackWarning, match="is called more than 8 times"):
        assert_close(compiled.iterate(x, 30)[0], model.iterate(x, 30)[0])
    assert thunder.cache_misses(compiled) == 1
    assert_close(compiled.criticise(x, 30), model.criticise(x, 30))  # whose criterion has no parameters
    with pytest.warns(FallbackWarning, match="is called more than 8 times"):
        assert torch.equal(compiled.encode_often(x, 30), model.encode_often(x, 30))
    longer = thunder.jit(model, max_module_calls=40)
    assert_close(longer.iterate(x, 30)[0], model.iterate(x, 30)[0])
    assert thunder.cache_misses(longer.iterate) == 1


class Named(nn.Linear):
    def own_class(self):
        return self.__class__

    def weights(self):
        return self.state_dict()["weight"]


def test_a_compiled_module_is_one_of_its_models_class_to_those_who_ask():
    compiled = thunder.jit(Named(2, 2))
    assert isinstance(compiled, Named) and isinstance(compiled, thunder.ThunderModule)
    assert compiled.__class__ is Named and compiled.own_class() is Named
    assert type(copy.deepcopy(compiled)) is thunder.ThunderModule


def test_methods_see_the_parameters_that_transforms_put():
    compiled = thunder.jit(Named(2, 2))
    compiled.set_parameter("weight", nn.Parameter(torch.full((2, 2), 3.0)))
    assert compiled.weights().tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_forward_around_the_compiled_one_is_compiled_whatever_its_name():
    """As accelerate does: a function named `forward` runs a library's own forward, which computes more than the
    module."""
    model = torch.nn.Linear(4, 4)
    compiled = thunder.jit(model, fallback="error")
    original = compiled.forward

    @functools.wraps(type(compiled).forward)
    def own(self, x, twice=False):
        return self.weight.sum() * x @ x.T if twice else original(x)

    compiled.forward = types.MethodType(own, compiled)
    inner = compiled.forward.__func__

    def forward(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args, **kwargs).float() + 1

    compiled.forward = types.MethodType(forward, compiled)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = (model.weight.sum() * x @ x.T).float() + 1
    assert torch.equal(compiled(x, twice=True), expected)
    (program,) = compiled.programs
    assert "bf16" in str(program.forward) and inspect.signature(compiled.forward)
