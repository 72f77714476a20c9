"""Layouts that `search` projects: what it reads off shallow copies is what whole models take, and candidates are planned
as `plan` plans modules that are prepared by hand."""

import functools

import pytest
import torch

from tests.distributed.test_layouts_and_models import COLUMNS, ROWS, build
from thunder.distributed import H200, Candidate, plan
from thunder.distributed import search as search_on
from thunder.distributed.layout_search import _kind, _Shape
from thunder.errors import OptionError

search = functools.partial(search_on, device="cpu")  # where the models make their positions
CANDIDATES = [
    Candidate("ddp", 8), Candidate("zero3", 8, shards=4), Candidate("zero3", 4, tp=2), Candidate("zero2", 4, cp=2),
    Candidate("zero2", 2, tp=2, pp=2, microbatches=8),
]  # fmt: skip
EXPERTS = [Candidate("ddp", 4, ep=2), Candidate("zero3", 2, ep=4)]


def deep(model, layers=8):
    """A model of so many layers, on the meta device."""
    module = build(model)
    module.blocks = torch.nn.ModuleList(build(model).blocks[0] for _ in range(layers))
    return module.to("meta")


def tokens():
    return torch.empty(4, 16, dtype=torch.int64, device="meta")


# of peaks half of what plans themselves may be off: where in a step the peak lies depends on the depth
BOUNDS = {"seconds": 0.01, "communicated": 0.01, "peak": 0.05}


@pytest.mark.parametrize("model, candidates", [("llama", CANDIDATES), ("grouped", EXPERTS)])
def test_shallow_copies_say_what_the_whole_takes(model, candidates):
    experts = ["blocks.0.mlp.experts"] if model == "grouped" else []
    module = deep(model)
    predictions, whole = (
        {p.candidate: p for p in search(module, tokens(), gpus=8, candidates=candidates, experts=experts, exact=exact)}
        for exact in (False, True)
    )
    assert list(map(str, predictions)) and predictions.keys() == whole.keys() == set(candidates)
    for candidate, p in predictions.items():
        for name, bound in BOUNDS.items():
            read, wanted = getattr(p, name), getattr(whole[candidate], name)
            assert abs(read - wanted) <= bound * wanted, (candidate, name, read, wanted)


def test_layers_that_ranks_divide_are_found():
    module = deep("llama", 4)
    split = _Shape(module, tokens(), H200, "adamw", (), False, "cpu").split
    wanted = {
        n: int(n.split(".")[-2] in ROWS) for n, _ in module.named_parameters() if n.split(".")[-2] in (*COLUMNS, *ROWS)
    }
    assert split == {_kind(n): dim for n, dim in wanted.items()} and len(split) == 7


def test_candidates_are_planned_as_modules_that_are_prepared():
    module = deep("llama", 4)
    one = search(module, tokens(), gpus=4, candidates=[Candidate("ddp", 4)])[0]
    planned = plan(module, tokens(), world_size=4, sharding_strategy=None, device="cpu")
    assert (one.seconds, one.peak, one.communicated) == (planned.seconds, planned.peak, planned.communicated)
    assert one.samples == 16 and one.bubbles == 0


def test_stages_idle_at_both_ends():
    module = deep("llama", 8)
    few, many = (
        search(module, tokens(), gpus=4, candidates=[Candidate("ddp", pp=4, microbatches=m)])[0] for m in (4, 64)
    )
    assert 0.35 < few.bubbles <= 3 / 7 and many.bubbles <= 3 / 67 and many.rate > few.rate
    assert many.peak == few.peak  # as many microbatches are saved as there are stages


def test_the_table_and_what_is_refused(tmp_path):
    module = deep("llama", 4)
    candidates = search(module, tokens(), gpus=4)
    assert [p.rate for p in candidates] == sorted((p.rate for p in candidates), reverse=True) and all(
        p.fits for p in candidates
    )
    layouts = [str(p.candidate) for p in candidates]
    assert {"ddp 4", "zero2 4", "zero3 4", "zero3 2 x tp 2", "pp 4", "zero2 2 x pp 2"} <= set(layouts)
    assert len(set(layouts)) == len(layouts) and all(layout in str(candidates) for layout in layouts)
    candidates.html(str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text().count("<tr>") == len(candidates) + 1
    assert not search(module, tokens(), gpus=4, memory=1.0)
    assert not search(module, tokens(), gpus=2, memory=1e4, candidates=[Candidate("ddp", 2)])[0].fits
    with pytest.raises(OptionError, match="candidate ddp 2 has 2 GPUs; valid: candidates of 4"):
        search(module, tokens(), gpus=4, candidates=[Candidate("ddp", 2)])
    with pytest.raises(OptionError, match="gpus=0 is not an option"):
        search(module, tokens(), gpus=0)
