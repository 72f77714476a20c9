"""`thunder.export` writes programs that another process runs without thunder and the model's code."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import thunder
from thunder.errors import ProgramFileError
from thunder.quantization import Int8Weights, NF4Weights


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, bias=None):
        q = self.norm(self.project(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.last(F.gelu(y * self.scale)) + (0.0 if bias is None else bias)


class Decides(nn.Module):
    """Three paths, of which one returns an argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y + 1
            if 2 * y.max().item() - 1 > 3.0:
                return {"y": y.relu(), "x": x}
        else:
            y = self.linear(y)
        return {"y": y * 3, "x": x}


class Sizes(nn.Module):
    """A batch and a length that may change."""

    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(10, 8), nn.Linear(8, 8)

    def forward(self, ids):
        batch, length = ids.shape
        x = self.linear(self.embedding(ids) + torch.arange(length)[:, None]).view(batch, length, 2, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, 8) / length


class Encoder(nn.Module):
    """PyTorch's encoder, which runs as one operation in inference, behind a mask of lengths."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding, self.layers = nn.Embedding(10, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, lengths):
        hidden = torch.arange(ids.shape[1])[None] >= lengths[:, None]
        y = self.layers(self.embedding(ids), src_key_padding_mask=hidden)
        return {"mean": y.masked_fill(hidden[..., None], 0).sum(1) / lengths[:, None], "largest": y.argmax(-1)[:, 0]}


class EarlyExit(nn.Module):
    """A decision in a program with sizes that change."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        y = self.first(x).softmax(-1)
        if y.max() > 0.8:
            return y
        return (y + self.second(x).softmax(-1)).view(x.shape[0] * 3).view(x.shape[0], 3)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.last = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.cells(x)[0][:, -1])


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def layers():
    return nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 8))


def numbers(*shape):
    return lambda: torch.randn(shape)


LENGTHS = ({0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=64)},)
# name -> (model, what draws each argument, further arguments of other sizes, options of jit, options of export)
MODELS = {
    "attention": (Attention, [numbers(2, 5, 16)], [], {}, {}),
    "two inputs": (Attention, [numbers(2, 5, 16), numbers(4)], [], {}, {}),
    "convolutions": (convolutions, [numbers(2, 3, 8, 8)], [], {}, {}),
    "recurrent": (Recurrent, [numbers(2, 5, 4)], [], {}, {}),
    "decisions": (Decides, [numbers(3, 4)], [], {}, {}),
    "sizes": (
        Sizes, [lambda: torch.randint(0, 10, (3, 5))],
        [(torch.arange(10)[None].repeat(7, 1),), (torch.arange(4).view(2, 2),)], {}, {"dynamic_shapes": LENGTHS},
    ),
    "encoder": (
        Encoder, [lambda: torch.randint(0, 10, (3, 5)), lambda: torch.randint(1, 6, (3,))],
        [(torch.arange(10)[None].repeat(7, 1), torch.arange(1, 8)), (torch.arange(4).view(2, 2), torch.tensor([1, 2]))],
        {}, {"dynamic_shapes": (*LENGTHS, {0: LENGTHS[0][0]})},
    ),
    "early exit": (
        EarlyExit, [numbers(3, 4)], [(torch.randn(9, 4),), (9 * torch.randn(2, 4),)], {},
        {"dynamic_shapes": ({0: Dim("rows", min=2, max=64)},)},
    ),
    "int8": (layers, [numbers(3, 64)], [], {"transforms": [Int8Weights()]}, {}),
    "nf4": (layers, [numbers(3, 64)], [], {"transforms": [NF4Weights()]}, {}),
}  # fmt: skip
LOADED = """
import json
import sys
import torch

def differs(path):
    program = torch.export.load(path).module()
    for arguments, expected in torch.load(path + ".values"):
        try:
            torch.testing.assert_close(program(*arguments), expected)  # another kernel may add in another order
        except AssertionError as error:
            return str(error)

print(json.dumps([differs(path) for path in sys.argv[1:]]))
assert "thunder" not in sys.modules
"""


def exported(name, path, **more):
    """The file of a model's program, and calls with their results: as many as there are paths, at least."""
    make, draws, others, options, settings = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    compiled, drawn = thunder.jit(model, **options), [tuple(draw() for draw in draws) for _ in range(8)]
    calls = [*drawn, *(tuple(x * s for x in a) for a in drawn[:2] for s in (-9, 9) if a[0].is_floating_point())]
    path = thunder.export(compiled, path, *drawn[0], **settings, **more)
    run = compiled if options else model
    with torch.no_grad():
        torch.save([(args, run(*args)) for args in [*calls, *others]], f"{path}.values")
    return path


def test_another_process_runs_them_without_thunder(tmp_path):
    paths = [str(exported(name, tmp_path / f"{i}.pt2")) for i, name in enumerate(MODELS)]
    ran = subprocess.run([sys.executable, "-I", "-c", LOADED, *paths], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert dict(zip(MODELS, json.loads(ran.stdout), strict=True)) == dict.fromkeys(MODELS)


def test_the_calls_go_all_ways():
    """Otherwise the test above would compare one of them."""
    torch.manual_seed(0)
    model = thunder.jit(Decides().eval())
    drawn = [torch.randn(3, 4) for _ in range(8)]
    with torch.no_grad():
        for x in [*drawn, *(x * s for x in drawn[:2] for s in (-9, 9))]:
            model(x)
    ways = {tuple(decision.answer for decision in path.decisions) for path in thunder.last_paths(model)}
    assert ways == {(False,), (True, False), (True, True)}


def test_a_quantized_program_is_smaller_than_its_weights(tmp_path):
    model = nn.Linear(512, 512)
    path = thunder.export(thunder.jit(model, transforms=[Int8Weights()]), tmp_path / "small.pt2", torch.ones(1, 512))
    assert path.stat().st_size < 0.4 * 4 * model.weight.numel()


CPP = Path(__file__).parents[1] / "examples" / "serve_in_cpp" / "main.cpp"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The example of C++, built."""
    program, torch_root = tmp_path_factory.mktemp("cpp") / "serve", Path(torch.__file__).parent
    include, libraries = torch_root / "include", torch_root / "lib"
    built = subprocess.run(
        [
            os.environ.get("CXX", "c++"), "-std=c++20", "-O0", f"-I{include}",
            f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(CPP), "-o", str(program), f"-L{libraries}",
            f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # of Inductor's own code
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ["attention", "decisions", "sizes", "encoder", "int8"])
def test_a_program_in_cpp_runs_it(name, server, tmp_path):
    path = exported(name, tmp_path / "model.pt2", format="aot_inductor")
    for arguments, expected in torch.load(f"{path}.values"):
        torch.save(list(arguments), tmp_path / "inputs.pt")
        command = [server, path, tmp_path / "inputs.pt", tmp_path / "outputs.pt"]
        ran = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        flat = list(expected.values()) if isinstance(expected, dict) else [expected]
        torch.testing.assert_close(list(torch.load(tmp_path / "outputs.pt")), flat)


def refused_in(fn, *args, tmp_path, settings=None, **options):
    with pytest.raises(ProgramFileError) as refused:
        thunder.export(thunder.jit(fn, **options), tmp_path / "no.pt2", *args, **(settings or {}))
    assert not (tmp_path / "no.pt2").exists()
    return str(refused.value)


def test_numbers_that_data_makes_are_results(tmp_path):
    path = tmp_path / "number.pt2"
    thunder.export(lambda x: (x * 2, float(x.sum())), path, torch.ones(4))
    served, x = torch.export.load(path).module(), torch.randn(4)
    doubled, total = served(x)
    assert torch.equal(doubled, x * 2) and total == x.sum().item()


def test_what_the_format_does_not_have_is_refused_in_words(tmp_path):
    x = torch.ones(4)
    assert "writes to its arguments" in refused_in(lambda x: x.add_(1), x, tmp_path=tmp_path)
    assert "calls Python" in refused_in(lambda x: (print(x.sum()), x * 2)[1], x, tmp_path=tmp_path)
    own = thunder.opaque(lambda x: x + 1, meta=torch.empty_like, name="mine")
    assert "it calls mine, which is Python code" in refused_in(lambda x: own(x), x, tmp_path=tmp_path)
    training = refused_in(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), x, tmp_path=tmp_path)
    assert "draws random numbers (dropout): call eval() on the module" in training
    assert "branches on the result of equal" in refused_in(
        lambda x: x * 2 if torch.equal(x, x + 1) else x, x, tmp_path=tmp_path
    )
    chosen = refused_in(lambda x: x * [1, 2, 3, 4, 5][int(x.sum().item())], x, tmp_path=tmp_path)
    assert "branches on the value of a number" in chosen
    makes = refused_in(lambda x: x * x.sum().item() if x.sum().item() > 0 else x, x, tmp_path=tmp_path)
    assert "which depends on data" in makes

    assert "data makes a whole number" in refused_in(lambda x: int(x.sum() * 10), x, tmp_path=tmp_path)

    def many(x):
        for i in range(5):
            x = x + 1 if x.sum() > i else x * 2
        return x

    assert "more than 16 paths" in refused_in(many, x, tmp_path=tmp_path)
    small = {"dynamic_shapes": ({0: Dim("n", min=2)},)}
    sizes = refused_in(lambda x: x * 2 if x.shape[0] > 3 else x, x, tmp_path=tmp_path, settings=small)
    assert "dynamic_shapes= are not those of this program" in sizes and "min=4" in sizes


def consecutive(x):
    """Decides by a value that operations compute of a size, as transformers does for its masks."""
    positions = torch.arange(x.shape[0])
    return (x * 2).contiguous(memory_format=torch.contiguous_format) if (positions.diff() == 1).all() else x


def test_values_computed_of_sizes_are_checked_for_each_size(tmp_path):
    path, x = tmp_path / "consecutive.pt2", torch.ones(4)
    thunder.export(consecutive, path, x, dynamic_shapes=({0: Dim("n", min=3, max=64)},))
    assert torch.equal(torch.export.load(path).module()(torch.ones(9)), 2 * torch.ones(9))
    many = {"dynamic_shapes": ({0: Dim("n", min=3)},)}
    assert "give these sizes a max=" in refused_in(consecutive, x, tmp_path=tmp_path, settings=many)

    def short(x):
        return x * 2 if (torch.arange(x.shape[0]) < 8).all() else x

    some = {"dynamic_shapes": ({0: Dim("n", min=2, max=16)},)}
    assert "differs for (9,)" in refused_in(short, x, tmp_path=tmp_path, settings=some)


def test_a_target_that_cannot_be_written_is_named_before_anything_is_compiled(tmp_path):
    calls = []

    def program(x):
        calls.append(1)
        return x + 1

    with pytest.raises(FileNotFoundError, match="create the folder first"):
        thunder.export(program, tmp_path / "missing" / "program.pt2", torch.ones(2))
    with pytest.raises(IsADirectoryError):
        thunder.export(program, tmp_path, torch.ones(2))
    assert not calls


def test_errors_of_the_program_are_its_own_with_its_line():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(5, 2))
    for compile_only in (lambda *args: thunder.export(model, "unused.pt2", *args), thunder.jit(model).lower):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
            compile_only(torch.ones(2, 3))
        assert any("nothing has run" in note for note in caught.value.__notes__)
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            compile_only()
    with pytest.raises(TypeError, match="path is a Sequential"):
        thunder.export("unused.pt2", model, torch.ones(2, 3))


def test_a_result_of_another_class_names_the_remedy(tmp_path):
    def f(x):
        return types.SimpleNamespace(logits=x * 2)

    assert "export a function that returns tensors" in refused_in(f, torch.ones(2), tmp_path=tmp_path)


def test_numbers_of_the_call_are_checked(tmp_path):
    x = torch.ones(4)
    served = torch.export.load(thunder.export(lambda x, n: x * n, tmp_path / "times.pt2", x, 2)).module()
    assert torch.equal(served(x, 2), x * 2)
    for other in ((x, 3), (torch.ones(5), 2)):
        with pytest.raises((AssertionError, RuntimeError)):
            served(*other)
