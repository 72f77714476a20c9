"""Convolutions that run with channels last: how many copies they need, and that values and strides are eager's."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from tests.kernels_in_use import ROUNDING, assert_near
from thunder.analysis.aliases import is_view
from thunder.transforms import channels_last

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)
pytest.importorskip("triton", reason="what is fused decides about the copies")


class Block(nn.Module):
    """A residual block of a variational autoencoder."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, a), nn.GroupNorm(2, b)
        self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.short = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.short(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    """With attention in the middle, upsampling and a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.block1 = nn.Conv2d(3, 4, 3, padding=1), Block(4, 4)
        self.down, self.qkv, self.out = nn.Conv2d(4, 8, 3, 2, 1), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.block2 = nn.Conv2d(8, 4, 3, padding=1), Block(8, 4)
        self.last = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        skipped = self.block1(self.first(x))
        h = self.down(skipped)
        q, k, v = self.qkv(h.flatten(2).transpose(1, 2)).chunk(3, -1)
        y = self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        h = h + y.transpose(1, 2).reshape(h.shape)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.block2(torch.cat([h, skipped], 1))))


class Residual(nn.Module):
    """A ResNet with batch norms."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        sizes = (4, 2, 1, 0), (2, 2, 3, 1), (2, 8, 1, 0)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, 1, p, bias=False) for a, b, k, p in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.short, self.head = nn.Conv2d(4, 8, 1, bias=False), nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        h = x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = norm(conv(h))
            h = F.relu(h, inplace=True) if conv is not self.convs[-1] else h
        return self.head(F.relu(h + self.short(x)).mean((2, 3)))


class Volume(nn.Module):
    """A 3-D U-Net with instance norms."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 6, 3, 2, 1), nn.Conv3d(8, 2, 1)
        self.up = nn.ConvTranspose3d(6, 4, 2, 2)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(n, affine=True) for n in (4, 6, 4))

    def forward(self, x):
        x = F.leaky_relu(self.norms[0](self.a(x)), 0.01)
        h = F.leaky_relu(self.norms[1](self.b(x)), 0.01)
        return self.c(torch.cat([self.norms[2](self.up(h)), x], 1))


BATCH = 5  # which no weight has
MODELS = {
    "U-Net": (UNet, (BATCH, 3, 4, 4)), "ResNet": (Residual, (BATCH, 3, 16, 16)),
    "autoencoder": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), Block(4, 6), nn.ConvTranspose2d(6, 2, 2, 2)), (BATCH, 3, 4, 4)),
    "3-D": (Volume, (BATCH, 2, 4, 4, 4)),
}  # fmt: skip


def example(name: str, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make().to(dtype), torch.randn(shape, dtype=dtype)


# ------------------------------------------------------------------------------------------------------------- copies


def copies(*traces) -> list[tuple]:
    """The shapes of images and volumes that a program lays out anew: copies of values in memory, and second copies of
    results of a kernel. Kernels that read or write another layout than they compute in make none."""
    shapes = []
    for operation in (b for trace in traces if trace is not None for b in trace.bound_symbols):
        inside = operation.sym.fn.region.bound_symbols if operation.sym.is_fusion else [operation]
        written = dict.fromkeys(operation.outputs)
        in_memory = {*operation.inputs, *written}
        for b in inside:
            if is_view(b) and not in_memory.isdisjoint(b.inputs):
                in_memory.update(b.outputs)
            if b.sym.name == "clone" and b.kwargs.get("memory_format") is not None and b.output in written:
                if any(i in in_memory for i in b.inputs):
                    shapes.append(tuple(b.output.shape))
    return shapes


def programs(function, *args, **options):
    compiled = thunder.jit(lambda *args: function(*args), executors=["triton_fuser"], **options)
    entry = compiled.entry_for(args, {})[0]
    return entry.forward, entry.backward


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("name", MODELS)
def test_only_what_enters_and_leaves_is_copied(name):
    model, x = example(name, torch.bfloat16)
    result = model(x)
    ends = sorted([tuple(x.shape), *([tuple(result.shape)] if result.dim() > 3 else [])])
    forward, backward = programs(model, x, channels_last=True)
    assert sorted(s for s in copies(forward) if s[0] == BATCH) == ends
    assert sorted(s for s in copies(backward) if s[0] == BATCH) == ends


# -------------------------------------------------------------------------------------------------- values and strides


def outcome(function, model: nn.Module, x: torch.Tensor, grad: bool) -> dict[str, torch.Tensor]:
    """The result, the gradients and the buffers of a step."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        result = function(x)
    values = {"result": result.detach()}
    if grad:
        wanted = {"x": x} | dict(model.named_parameters())
        weights = torch.arange(result.numel(), dtype=result.dtype).cos().reshape(result.shape)
        gradients = torch.autograd.grad((result * weights).sum(), list(wanted.values()))
        values |= {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True)}
    return values | {name: b.clone() for name, b in model.named_buffers()}


def assert_as_eager(model: nn.Module, images, bound: float, grad: bool = True, **options) -> None:
    """Runs a model with channels last on several images, and compares values, strides and buffers with eager's."""
    eager = copy.deepcopy(model)
    compiled = thunder.jit(model, channels_last=True, **options)
    for x in images:
        ours, exact = outcome(compiled, model, x, grad), outcome(eager, eager, x, grad)
        assert any("Channels Last" in t.python() for t in thunder.last_traces(compiled))
        assert {name: t.stride() for name, t in ours.items()} == {name: t.stride() for name, t in exact.items()}
        for name, t in exact.items():
            assert_near(ours[name], t, bound, lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mode", ["train", "evaluate", "infer"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_strides_are_eagers(name, mode):
    model, x = example(name)
    images = x, torch.randn_like(x), torch.randn(3, *x.shape[1:], dtype=x.dtype)
    # another kernel adds in another order: float64 leaves 1e-16 for each of some 1e3 additions, amplified by norms
    assert_as_eager(model.train(mode == "train"), images, 1e-10, mode != "infer", executors=["torch"])


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_compute_the_same(name):
    model, x = example(name, torch.float32)
    assert_as_eager(model, [x], ROUNDING, executors=["triton_fuser"])


def rotated(x, w):
    """Views of an image that has channels last."""
    y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), w, padding=1)
    return y.permute(0, 2, 3, 1), y.reshape(-1), y[:, :, ::2], y.as_strided((2, 3), (3, 1))


def dropped(x, w):
    """Random numbers, which are drawn in the order of memory."""
    return F.conv2d(F.dropout(F.conv2d(x, w, padding=1), 0.5), w, padding=1), x.mean()


def written(x, w):
    """In place, on images that convolutions write and read."""
    y = F.conv2d(F.conv2d(x, w, padding=1), w, padding=1)
    y[:, 0] = 1.0
    y.mul_(2)
    return F.conv2d(y.relu_(), w, padding=1), y


def formatted(x, w):
    """What the program itself asks for."""
    y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), w, padding=1)
    last = y.contiguous(memory_format=torch.channels_last)
    return last, F.conv2d(last, w), y.to(memory_format=torch.channels_last), torch.empty_like(y), y.clone(), y + 1


def small(x, w):
    """Images of one channel, and of one pixel."""
    y = F.conv2d(F.conv2d(x, w, padding=1), w[:1])
    return (
        y,
        F.conv2d(F.relu(F.conv2d(x, w)), w),
        F.adaptive_avg_pool2d(F.conv2d(x, w), 1),
        F.conv2d(y.expand(2, 3, 3, 3), w),
    )


@pytest.mark.parametrize("function", [rotated, dropped, written, formatted, small], ids=lambda f: f.__name__)
def test_strides_of_results_are_eagers(function):
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(3, 3, 3, 3, dtype=torch.float64)
    compiled = thunder.jit(function, channels_last=True, executors=["torch"])
    torch.manual_seed(1)
    exact = function(x, w)
    torch.manual_seed(1)
    results = compiled(x, w)
    assert any("Channels Last" in t.python() for t in thunder.last_traces(compiled))
    assert [t.stride() for t in results] == [t.stride() for t in exact]
    for ours, t in zip(results, exact, strict=True):
        if function is not formatted or t is not exact[3]:  # numbers of empty memory
            torch.testing.assert_close(ours, t, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- choices


def chain(x, w, v):
    return F.conv2d(F.relu(F.conv2d(F.relu(F.conv2d(x, w)), v)), v)


def chain_example():
    return torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4, 4, 3, 3)


def test_a_group_is_converted_where_that_moves_fewer_bytes(monkeypatch):
    """cuDNN would convert both images of each convolution. One alone gains nothing."""
    monkeypatch.setattr(channels_last, "_gains", lambda b, is_forced: channels_last._operands(b) is not None)
    x, w, v = chain_example()
    for function, args, count in ((chain, (x, w, v), 4), (F.conv2d, (x, w), 0)):
        compiled = thunder.jit(lambda *args, function=function: function(*args), executors=["torch"])
        torch.testing.assert_close(compiled(*args), function(*args))
        assert len(copies(thunder.last_traces(compiled)[-1])) == count  # x, w, v, and the result


def test_strides_are_guarded_where_the_pass_needs_them():
    x, w, v = chain_example()
    compiled = thunder.jit(chain, channels_last=True, executors=["torch"])
    last = x.to(memory_format=torch.channels_last)
    for image in (x, last, x, last):
        result, exact = compiled(image, w, v), chain(image, w, v)
        torch.testing.assert_close(result, exact)
        assert result.stride() == exact.stride()
    assert thunder.cache_misses(compiled) == 2
    assert "x.stride() was (243, 81, 9, 1), is (243, 1, 27, 3)" in str(thunder.last_recompile_reasons(compiled))
    other = thunder.jit(chain, channels_last=False, executors=["torch"])
    for image in (x, last):
        other(image, w, v)
    assert thunder.cache_misses(other) == 1


@pytest.mark.parametrize("options", [{"numerics": "eager", "channels_last": True}, {"channels_last": False}, {}])
def test_programs_that_keep_their_layout(options):
    """`numerics="eager"`, the option, and by default programs on a CPU."""
    x, w, v = chain_example()
    compiled = thunder.jit(chain, executors=["torch"], **options)
    assert torch.equal(compiled(x, w, v), chain(x, w, v))
    assert not copies(*thunder.last_traces(compiled))
