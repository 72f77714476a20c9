"""`torch.compiler.is_compiling()` says no, as in eager mode: what a program decides by data then is a path."""

import pytest
import torch

import thunder
from tests.test_recompute import saved_bytes
from thunder.errors import CaptureError

X = torch.ones(3)


def asks(x):
    return x + 1 if torch.compiler.is_compiling() else x - 1


def decides(x):
    if not torch.compiler.is_compiling() and x.sum() > 0:
        return x + 1
    return x - 1


def is_not_for_compilers(x):
    if torch.compiler.is_compiling():
        raise AssertionError("not for compilers")
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("program", [asks, decides, is_not_for_compilers])
def test_a_program_goes_eagers_way(program):
    compiled = thunder.jit(program, fallback="error")
    for x in (X, -X, X, -X):
        assert torch.equal(compiled(x), program(x))
    assert len(compiled.programs) == (1 if program is asks else 2)


def test_a_program_that_has_written_before_it_decides_goes_eagers_way(capsys):
    def fn(x):
        is_compiling = torch.compiler.is_compiling()
        print("sum", x.sum())
        return x + 1 if not is_compiling and x.sum() > 0 else x - 1

    compiled = thunder.jit(fn, fallback="error")
    for sign in (1.0, -1.0, 1.0):
        assert torch.equal(compiled(sign * torch.ones(2)), sign * torch.ones(2) + sign)
    assert capsys.readouterr().out.count("sum") == 3


def trained(model, ids, mask, half: bool) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("options", [{}, {"numerics": "eager"}], ids=["default", "eager"])
def test_a_mask_of_ones_trains_as_none(options, half):
    """transformers looks at the values of a mask, and takes the causal kernel where all are ones."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 61, (2, 16))
    ones, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[0, :5] = 0
    compiled = thunder.jit(model, fallback="error", **options)

    def nbytes(mask) -> int:
        def loss(*parameters):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                return compiled(ids, attention_mask=mask, labels=ids).loss

        return saved_bytes(loss, *model.parameters())

    without = trained(compiled, ids, None, half)
    for mask in (ones, padded, ones, padded):
        ours = trained(compiled, ids, mask, half)
        wanted = without if mask is ones else trained(model, ids, padded, half)
        assert all(map(torch.equal, ours, wanted))
    assert nbytes(ones) == nbytes(None) < nbytes(padded)
    assert len(compiled.programs) == 3  # without a mask, with ones, padded
    assert [{d.answer for d in p.path} for p in compiled.programs] == [set(), {True}, {False}]


def test_ranks_that_may_not_decide_by_themselves_say_yes():
    def fn(x):
        return x + 1 if torch.compiler.is_compiling() or x.sum() > 0 else x - 1

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        compiled = thunder.jit(fn, fallback="error")
        assert torch.equal(compiled(-X), -X + 1) and torch.equal(compiled(X), X + 1)
        assert torch.equal(thunder.jit(asks, fallback="error")(X), X - 1), "it does not decide"
        with pytest.raises(CaptureError, match="ranks that communicate would have to decide together"):
            thunder.jit(is_not_for_compilers, fallback="error")(X)
    finally:
        torch.distributed.destroy_process_group()
