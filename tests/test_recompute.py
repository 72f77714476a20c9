"""Recomputation: activation checkpoints save nothing of what they contain, and gradients stay eager's."""

import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.core.proxies import TensorProxy


def T(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).requires_grad_()


def block(x, w):
    h = torch.tanh(x @ w)
    h = F.dropout(h, 0.3)
    return torch.sin(h) * x


def once(x, w):
    return (checkpoint(block, x, w, use_reentrant=False).exp() * w).sum()


def twice(x, w):
    y = checkpoint(block, x, w, use_reentrant=False)
    z = checkpoint(block, y, w, use_reentrant=False)
    return (z * z).sum()


def nested(x, w):
    def outer(x):
        y = checkpoint(block, x.exp(), w, use_reentrant=False)
        return checkpoint(block, torch.sigmoid(y), w, use_reentrant=False).tanh()

    return checkpoint(outer, x, use_reentrant=False).sum()


def only_outside(x, w):
    y = block(x, w)
    return checkpoint(torch.tanh, y, use_reentrant=False).sum() * block(y, w).sum()


def several_results(x, w):
    def inner(x):
        y = x.sigmoid()
        return y, (y * x, x.detach())

    a, (b, c) = checkpoint(inner, x, use_reentrant=False)
    return (a * b * c + w).sum()


def no_grad_inside(x, w):
    def inner(x):
        with torch.no_grad():
            mask = x.sin() > 0
        return x.exp() * mask

    return checkpoint(inner, x, use_reentrant=False).sum() + w.sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def attribute_function(x, w):
    return checkpoint(lambda x: Scaled.apply(x.sin()).cos(), x, use_reentrant=False).sum() + w.sum()


PROGRAMS = [once, twice, nested, only_outside, several_results, no_grad_inside, attribute_function]


def run(f, seed=7):
    x, w = T(6, 6), T(6, 6, seed=1)
    torch.manual_seed(seed)
    value = f(x, w)
    torch.autograd.backward(value)
    return value.detach(), x.grad, w.grad, torch.get_rng_state()


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_same_gradients_masks_and_generator_as_eager(f):
    for ours, eagers in zip(
        run(thunder.jit(f, debug_options=thunder.DebugOptions(check_traces=True))), run(f), strict=True
    ):
        torch.testing.assert_close(ours, eagers, rtol=1e-14, atol=1e-14)


def saved_names(compiled):
    tensors, _ = thunder.last_traces(compiled)[-1].output[1]
    return {t.name for t in tensors}


def saved_bytes(f, *args) -> int:
    """Bytes of the distinct storages that are saved for the backward, without the arguments'."""
    own, alive = {a.untyped_storage().data_ptr() for a in args}, weakref.WeakSet()

    class Saved:
        def __init__(self, t):
            self.t = t
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.t):
        out = f(*args)
    assert out.requires_grad
    storages = {s.t.untyped_storage().data_ptr(): s.t.untyped_storage().nbytes() for s in alive}
    return sum(n for pointer, n in storages.items() if pointer not in own)


def test_what_a_checkpoint_contains_is_not_saved():
    compiled = thunder.jit(twice)
    run(compiled)
    squared = thunder.last_traces(compiled)[0].bound_symbols[-2]
    assert saved_names(compiled) == {"x", "w", "y", squared.args[0].name}
    x, w = T(64, 64), T(64, 64, seed=1)
    without = thunder.jit(lambda x, w: (block(block(x, w), w) * x).sum())
    ours, plain, eagers = saved_bytes(compiled, x, w), saved_bytes(without, x, w), saved_bytes(twice, x, w)
    assert ours < plain / 2, (ours, plain)
    # the input of the second checkpoint: eager keeps it as an argument, not as a saved tensor
    assert ours <= eagers + x.nbytes, (ours, eagers)


def copies(compiled):
    return [
        b
        for b in thunder.last_backward_traces(compiled)[-1].bound_symbols
        if any(o.name.startswith("bw_") for o in b.outputs)
    ]


def test_nested_checkpoints_are_computed_again_twice():
    compiled = thunder.jit(nested)
    run(compiled)
    names = [b.sym.name for b in copies(compiled)]
    # the outer checkpoint once, with its own tanh and those of both blocks, and each block once more for its own
    # backward
    assert names.count("exp") == 1 and names.count("sigmoid") == 1
    assert names.count("tanh") == 3 + 2, names


def test_copies_stand_right_before_their_first_use():
    compiled = thunder.jit(twice)
    run(compiled)
    lines = thunder.last_backward_traces(compiled)[-1].bound_symbols
    producers = {
        o: i for i, b in enumerate(lines) for o in b.outputs if isinstance(o, TensorProxy) and o.name.startswith("bw_")
    }
    assert producers
    for value, at in producers.items():
        first = next(i for i, b in enumerate(lines) if b.has_input(value) and b.sym.name != "python_del")
        between = lines[at + 1 : first]
        assert all(
            b.sym.name == "python_del" or "rng" in b.sym.name or any(o in producers for o in b.outputs) for b in between
        ), value


def test_a_module_with_checkpointed_layers_under_dropout():
    class Layers(torch.nn.Module):
        def __init__(self, use):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.5)) for _ in range(3)
            )
            self.use = use

        def forward(self, x):
            for layer in self.layers:
                x = x + (checkpoint(layer, x, use_reentrant=False, preserve_rng_state=True) if self.use else layer(x))
            return x.sum()

    torch.manual_seed(0)
    model, x, gradients, saved = Layers(True), torch.randn(5, 8), {}, {}
    for use in (True, False):
        model.use = use
        for name, program in (("eager", model), ("thunder", thunder.jit(model))):
            model.zero_grad()
            torch.manual_seed(3)
            program(x).backward()
            gradients[name, use] = [p.grad.clone() for p in model.parameters()]
            saved[name, use] = saved_bytes(program, x)
    for key, gradients_of_rule in gradients.items():
        for ours, eagers in zip(gradients_of_rule, gradients["eager", False], strict=True):
            torch.testing.assert_close(ours, eagers, rtol=1e-6, atol=1e-6, msg=str(key))
    assert saved["thunder", True] < saved["thunder", False]


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}])
def test_reentrant_checkpoints_have_gradients_where_an_argument_has(options, requires_grad):
    layer, dropout = torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def program(x):
        y, counts = checkpoint(lambda x, n: (dropout(layer(x)).sin(), n + 1), x.exp(), torch.arange(4), **options)
        return (y * counts).sum()

    gradients = []
    for f in (program, thunder.jit(program)):
        layer.zero_grad()
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 8).view(2, 4).requires_grad_(requires_grad)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = f(x)
        if loss.requires_grad:
            loss.backward()
        gradients.append((loss.detach(), x.grad, layer.weight.grad, [str(w.message) for w in caught]))
    eagers, ours = gradients
    assert ours[3] == eagers[3]
    for a, b in zip(ours[:3], eagers[:3], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_reentrant_checkpoints_with_tensors_in_a_structure_are_refused():
    with pytest.raises(thunder.errors.CaptureError, match="use_reentrant=False"):
        thunder.jit(lambda x: checkpoint(lambda x: {"y": x.sin()}, x, use_reentrant=True))(T(3))


def test_a_checkpoint_after_a_computed_leaf_writes_nothing():
    first, second = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first.requires_grad_(False), second
            first.register_forward_hook(lambda module, inputs, result: result.requires_grad_(True))

        def forward(self, x):
            return checkpoint(self.layer, self.first(x), use_reentrant=False).sum()

        def layer(self, x):
            hidden = x.to(torch.float32)  # x itself, which gets a name in the checkpoint
            return self.second(hidden).tanh()

    model, gradients = Model(), []
    for f in (model, thunder.jit(model, fallback="error")):
        second.zero_grad()
        f(torch.tensor([1, 3])).backward()
        gradients.append(second.weight.grad)
    assert torch.equal(*gradients)
