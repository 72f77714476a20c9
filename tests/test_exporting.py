"""`thunder.export` writes programs that another process runs without thunder and the model's code."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder
from thunder.errors import ProgramFileError
from thunder.quantization import Int8Weights


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, bias=None):
        q = self.norm(self.project(x)).unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        return self.last(F.gelu(y * self.scale)) + (0.0 if bias is None else bias)


LOADED = """
import sys
import torch
path = sys.argv[1]
x, expected = torch.load(path + ".values")
torch.testing.assert_close(torch.export.load(path).module()(*x), expected, rtol=0, atol=1e-6)
assert "thunder" not in sys.modules
"""
MODELS = {
    "attention": (Attention, lambda: (torch.randn(2, 5, 16),)),
    "two inputs": (Attention, lambda: (torch.randn(2, 5, 16), torch.randn(4))),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        lambda: (torch.randn(2, 3, 8, 8),),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_another_process_runs_it_without_thunder(name, tmp_path):
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, args = make().eval(), draw()
    path = thunder.export(thunder.jit(model), tmp_path / "model.pt2", *args)
    with torch.no_grad():
        torch.save((args, model(*args)), f"{path}.values")
    ran = subprocess.run([sys.executable, "-I", "-c", LOADED, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def refused_in(fn, *args, tmp_path, **options):
    with pytest.raises(ProgramFileError) as refused:
        thunder.export(thunder.jit(fn, **options), tmp_path / "no.pt2", *args)
    assert not (tmp_path / "no.pt2").exists()
    return str(refused.value)


def test_what_the_format_does_not_have_is_refused_in_words(tmp_path):
    x = torch.ones(4)
    assert "decides by data" in refused_in(lambda x: x + 1 if x.sum() > 0 else x, x, tmp_path=tmp_path)
    assert "has an effect" in refused_in(lambda x: x.add_(1), x, tmp_path=tmp_path)
    assert "calls Python" in refused_in(lambda x: (print(x.sum()), x * 2)[1], x, tmp_path=tmp_path)
    quantized = {"transforms": [Int8Weights()]}
    assert "transforms" in refused_in(nn.Linear(64, 64), torch.ones(2, 64), tmp_path=tmp_path, **quantized)


def test_numbers_of_the_call_are_checked(tmp_path):
    x = torch.ones(4)
    served = torch.export.load(thunder.export(lambda x, n: x * n, tmp_path / "times.pt2", x, 2)).module()
    assert torch.equal(served(x, 2), x * 2)
    for other in ((x, 3), (torch.ones(5), 2)):
        with pytest.raises((AssertionError, RuntimeError)):
            served(*other)
