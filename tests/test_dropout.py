"""Dropout draws what eager draws: the same masks from one seed, on a CPU and on a GPU, so that losses stay eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 20 if DEVICE == "cuda" else 2  # over the batches; a hundred steps where they take little


class Dropped(nn.Module):
    """Dropout of one mask for each place of a row of layers, beside what the layers compute."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        masks = []
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.2, self.training)
            masks.append(F.dropout(torch.ones_like(x), 0.3, self.training))
        return x.square().sum(), masks


@pytest.mark.parametrize("width", [32, 33, 250])
def test_masks_are_eagers(width):
    torch.manual_seed(0)
    module, x = Dropped(width).to(DEVICE), torch.randn(17, width, device=DEVICE)
    compiled = thunder.jit(module)
    states = []
    for function in (module, compiled):
        torch.manual_seed(3)
        results = []
        for _ in range(3):
            loss, masks = function(x)
            loss.backward()
            results += masks
        states.append((results, torch.rand(3, device=DEVICE)))
    (want, after), (masks, after_ours) = states
    assert all(torch.equal(a, b) for a, b in zip(masks, want, strict=True)) and torch.equal(after, after_ours)
    assert not torch.equal(want[0], want[3]), "each call draws others"


def losses(function, model, batches, seed: int) -> list[float]:
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    results = []
    for ids in batches:
        loss = function(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


def test_losses_of_steps_with_dropout():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=3, vocab_size=131, n_positions=32)

    def model():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).to(DEVICE).train()

    batches = [torch.randint(0, 131, (4, 24), device=DEVICE) for _ in range(5)] * STEPS
    eager, ours, other = model(), model(), model()
    want = torch.tensor(losses(eager, eager, batches, 1))
    ours_losses = torch.tensor(losses(thunder.jit(ours), ours, batches, 1))
    drawn_otherwise = torch.tensor(losses(other, other, batches[:10], 2))
    far = ((ours_losses - want).abs() / want).max()
    assert far <= 1e-3 < ((drawn_otherwise - want[:10]).abs() / want[:10]).max(), (
        "rounding is far less than another mask"
    )
