"""Weights in few bits and LoRA, on small models: results are those of the rounded weights, bytes are counted, and what
trains is what should."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import thunder
from thunder.errors import CaptureError, FallbackWarning
from thunder.executors.inductor import inductor_ex
from thunder.executors.triton_fuser import triton_fuser
from thunder.quantization import Float8Weights, Int4Weights, Int8Weights, NF4Weights, int8
from thunder.quantization.nf4 import NF4
from thunder.quantization.weights import pack, unpack
from thunder.transforms.lora import LoRA

# default executors take kernels to Triton's interpreter, where another file has asked for that
pytestmark = pytest.mark.usefixtures("triton_interpreter")

FORMATS = {
    "int8": Int8Weights,
    "int4": Int4Weights,
    "int4 of 32": lambda: Int4Weights(group=32),
    "nf4": NF4Weights,
    "nf4 of float32": lambda: NF4Weights(double=False),
    "float8": lambda: _WeightsOfFloat8(),
}


class _WeightsOfFloat8(Float8Weights):
    """Without the products."""

    def multiplies(self, x, shape):
        return False


# bits a weight of a matrix of 128 inputs: scales of float32 a row, of bfloat16 a group, bytes and two floats a row
BITS = {"int8": 8 + 32 / 128, "float8": 8 + 32 / 128, "int4": 4 + 32 / 64, "int4 of 32": 4 + 32 / 32, "nf4": 4 + 8 / 64 + 64 / 128,
        "nf4 of float32": 4 + 32 / 64}  # fmt: skip


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128, bias=False), nn.LayerNorm(128))
    for p in module.parameters():  # as trained weights are distributed
        if p.dim() == 2:
            nn.init.normal_(p, std=0.05)
    return module.to(dtype)


def llama(dtype=torch.float32, tied=False):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def rounded(original, format):
    """The module with the weights that quantizing leaves."""
    copied = copy.deepcopy(original)
    for module in copied.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            module.weight.data = format.dequantize(*format.quantize(weight)).to(weight.dtype)
    return copied


def error(actual, wanted):
    return ((actual.double() - wanted.double()).norm() / wanted.double().norm()).item()


# ------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_is_rounded_to_the_nearest(name):
    """What a step of the format can miss: half of it."""
    torch.manual_seed(0)
    weight, format = torch.randn(64, 128) * torch.rand(64, 1), FORMATS[name]()
    dequantized = format.dequantize(*format.quantize(weight))
    groups = weight.unflatten(1, (-1, getattr(format, "group", getattr(format, "block", 128))))
    largest, span = groups.abs().amax(-1, keepdim=True), groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    if name == "int8":
        bound = largest / 127 / 2
    elif name.startswith("int4"):
        bound = span / 15 / 2 + 2**-7 * (largest + span)  # scale and least value are rounded to bfloat16
    else:
        widest = max(b - a for a, b in zip(NF4, NF4[1:]))
        row = largest.amax(1, keepdim=True) - largest.amin(1, keepdim=True)
        bound = largest * widest / 2 + (row / 255 / 2 if name == "nf4" else 0)
    missed = (dequantized.unflatten(1, groups.shape[1:]) - groups).abs()
    assert (missed <= bound * (1 + 1e-5)).all()


def test_numbers_of_four_bits_are_packed_two_to_a_byte():
    codes = torch.randint(0, 16, (3, 8))
    packed = pack(codes)
    assert packed.shape == (3, 4) and packed.dtype is torch.uint8
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(unpack(packed, dtype), codes.to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_zeros_and_of_one_value(name):
    format = FORMATS[name]()
    for value in (0.0, 0.5, -3.0):
        weight = torch.full((2, 128), value)
        torch.testing.assert_close(format.dequantize(*format.quantize(weight)), weight, rtol=2**-8, atol=0)


# ---------------------------------------------------------------------------------------------- products in few bits

PRODUCTS = {"int8": lambda: Int8Weights(dynamic=True), "float8": Float8Weights}


def rounded_rows(name, x):
    """Rows rounded as the format rounds a weight's, in full."""
    format = PRODUCTS[name]()
    return format.dequantize(*format.quantize(x.reshape(-1, x.shape[-1]))).reshape(x.shape)


exact_int8 = pytest.mark.skipif(
    not int8.cpu_sums_exactly(), reason="oneDNN is kept from the instructions that make products of int8 exact"
)


EXACT = [pytest.param(name, marks=[exact_int8] if name == "int8" else []) for name in PRODUCTS]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("shape", [(20, 128), (2, 3, 128), (1, 128)])
def test_a_product_is_one_of_rounded_rows_and_a_rounded_weight(name, shape):
    torch.manual_seed(0)
    layer, x = nn.Linear(128, 256), torch.randn(shape)
    compiled = thunder.jit(layer, transforms=[PRODUCTS[name]()])
    wanted = rounded(layer, PRODUCTS[name]()).double()(rounded_rows(name, x).double())
    # float8's product of rows is written in bfloat16
    assert error(compiled(x), wanted) < (1e-6 if name == "int8" else 2**-8)
    trace = thunder.last_traces(compiled)[-1].python(memory=True)
    assert ("_int_mm" if name == "int8" else "scaled_mm") in trace and "linear" not in trace


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_those_of_the_rounded_weight(name):
    torch.manual_seed(0)
    layer, x, g = nn.Linear(128, 256), torch.randn(20, 128, requires_grad=True), torch.randn(20, 256)
    compiled = thunder.jit(layer, transforms=[PRODUCTS[name]()])
    reference = rounded(layer, PRODUCTS[name]())
    gradients = torch.autograd.grad(compiled(x), [x, compiled.get_parameter("bias")], g)
    for a, b in zip(gradients, torch.autograd.grad(reference(x), [x, reference.bias], g), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", EXACT)
def test_layers_under_autocast_multiply_in_few_bits(name):
    original, x = mlp(), torch.randn(20, 128)
    compiled = thunder.jit(original, transforms=[PRODUCTS[name]()])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        actual, wanted = compiled(x), original(x)
    assert actual.dtype is wanted.dtype and error(actual, wanted) < 0.1
    trace = thunder.last_traces(compiled)[-1].python(memory=True)
    assert trace.count("_int_mm(" if name == "int8" else "scaled_mm_impl(") == 2 and "linear" not in trace


def test_products_of_integers_that_are_not_exact_are_not_taken(monkeypatch):
    monkeypatch.setattr(int8, "cpu_sums_exactly", lambda: False)
    layer, x = nn.Linear(128, 256), torch.randn(20, 128)
    compiled = thunder.jit(layer, transforms=[Int8Weights(dynamic=True)])
    torch.testing.assert_close(compiled(x), rounded(layer, Int8Weights())(x))


@exact_int8
def test_weights_that_others_than_layers_read_are_made():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(128, 128)

        def forward(self, x):
            return self.fc(x) @ self.fc.weight

    torch.manual_seed(0)
    original, x = Reads(), torch.randn(20, 128)
    compiled = thunder.jit(original, transforms=[Int8Weights(dynamic=True)])
    reference = rounded(original, Int8Weights())
    wanted = reference.fc(rounded_rows("int8", x)) @ reference.fc.weight
    torch.testing.assert_close(compiled(x), wanted)


def test_sizes_that_no_product_of_float8_takes():
    layer, x = nn.Linear(120, 250), torch.randn(20, 120)
    compiled = thunder.jit(layer, transforms=[Float8Weights()])
    assert torch.equal(compiled(x), rounded(layer, Float8Weights())(x))


# --------------------------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_results_are_those_of_the_rounded_weights(name, dtype):
    original, x = mlp(dtype), torch.randn(4, 128, dtype=dtype)
    before = copy.deepcopy(original.state_dict())
    compiled = thunder.jit(original, transforms=[FORMATS[name]()])
    assert torch.equal(compiled(x), rounded(original, FORMATS[name]())(x))
    assert all(torch.equal(v, before[k]) for k, v in original.state_dict().items()), "the module stays as it was"


@pytest.mark.parametrize("name", FORMATS)
def test_bytes(name):
    compiled = thunder.jit(mlp(), transforms=[FORMATS[name]()])
    held = [v for k, v in compiled.state_dict().items() if k.startswith("0.weight")]
    assert sum(v.nbytes for v in held) * 8 == BITS[name] * 256 * 128


@pytest.mark.parametrize("name", FORMATS)
def test_a_language_model(name):
    """Errors of products that follow each other add up as those of independent numbers do: of nine, to three times
    that of one."""
    original, ids = llama(), torch.randint(0, 320, (2, 16))
    compiled = thunder.jit(original, transforms=[FORMATS[name]()])
    reference = rounded(original, FORMATS[name]())
    with torch.no_grad():
        actual, wanted = compiled(ids).logits, original(ids).logits
        assert torch.equal(actual, reference(ids).logits)
    linear = [(m.weight, n.weight) for m, n in zip(reference.modules(), original.modules()) if isinstance(m, nn.Linear)]
    assert 0 < error(actual, wanted) < 3 * max(error(a, b) for a, b in linear)
    quantized = sum(p.nbytes for k, p in compiled.named_parameters() if "_proj" in k or "lm_head" in k)
    assert quantized * 32 <= (BITS[name] + 0.5) * sum(b.nbytes for _, b in linear)


def test_weights_that_others_read_stay(recwarn):
    original = llama(tied=True)
    compiled = thunder.jit(original, transforms=[Int8Weights()])
    assert compiled.get_parameter("lm_head.weight") is original.model.embed_tokens.weight
    ids = torch.randint(0, 320, (1, 8))
    reference = rounded(original, Int8Weights())
    reference.lm_head.weight = reference.model.embed_tokens.weight = original.lm_head.weight
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, reference(ids).logits)


def test_a_filter_and_what_is_refused():
    compiled = thunder.jit(mlp(), transforms=[Int4Weights(filter=lambda module, path: path == "2")])
    assert compiled.get_parameter("0.weight").dtype is torch.float32
    assert compiled.get_parameter("2.weight").dtype is torch.uint8
    with pytest.warns(UserWarning, match="Int4Weights takes no layer: weight: 20 inputs are no multiple of 64"):
        thunder.jit(nn.Linear(20, 4), transforms=[Int4Weights()])
    for wrong in (lambda: Int4Weights(group=3), lambda: NF4Weights(block=0), lambda: Int8Weights(filter="fc")):
        with pytest.raises(ValueError, match="valid: an even number|is a function"):
            wrong()


@pytest.mark.parametrize("name", FORMATS)
def test_state_dicts_in_both_forms(name):
    original, x = mlp(), torch.randn(4, 128)
    compiled = thunder.jit(original, transforms=[FORMATS[name]()])
    plain = compiled.original_state_dict()
    assert plain.keys() == original.state_dict().keys()
    for key, value in rounded(original, FORMATS[name]()).state_dict().items():
        assert torch.equal(plain[key], value)
    other = mlp()
    nn.init.normal_(other[0].weight)
    compiled.load_original_state_dict(other.state_dict())
    assert torch.equal(compiled(x), rounded(other, FORMATS[name]())(x))
    fresh = thunder.jit(mlp(), transforms=[FORMATS[name]()])
    fresh.load_state_dict(compiled.state_dict())
    assert torch.equal(fresh(x), compiled(x))


def region_names(trace):
    return [o.sym.name for o in trace.bound_symbols if o.sym.is_fusion]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("executor", [inductor_ex, triton_fuser], ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "float8"])  # the fuser has no such type
def test_dequantizing_is_one_region(name, executor):
    if (why := executor.unavailable()) is not None:
        pytest.skip(why)
    device = "cuda" if executor is triton_fuser and torch.cuda.is_available() else "cpu"
    # with gradients, for which no kernels multiply what is held
    layer, x = nn.Linear(128, 256).to(device), torch.randn(64, 128, device=device, requires_grad=True)
    compiled = thunder.jit(layer, transforms=[FORMATS[name]()], executors=[executor])
    torch.testing.assert_close(compiled(x), rounded(layer, FORMATS[name]())(x))
    executed = [o for o in thunder.last_traces(compiled)[-1].bound_symbols if o.sym.executor is not None]
    assert [o.sym.is_fusion for o in executed] == [True, False], "a region and a product"


def test_the_type_of_numbers_changes_nothing():
    layer, x = nn.Linear(128, 256), torch.randn(4, 128)
    wanted = rounded(layer, NF4Weights())(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for executors in ([], [triton_fuser]):
            compiled = thunder.jit(layer, transforms=[NF4Weights()], executors=executors)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_saved_for_the_backward():
    """Weights are dequantized again, but for the one that the backward reads first."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    compiled = thunder.jit(layers, transforms=[NF4Weights(), LoRA(r=2)])
    compiled(torch.randn(4, 128)).sum().backward()
    text = str(thunder.last_backward_traces(compiled)[-1])
    saved = next(line for line in text.split("\n") if line.endswith(" = C0")).replace(",", "").split()
    assert "t_3_weight" in saved and "t_1_weight" not in saved and any("t_1_weight_held" in name for name in saved)


# ----------------------------------------------------------------------------------------------------------------- LoRA


class Added(nn.Module):
    """A linear layer and the product of two thin matrices, by hand."""

    def __init__(self, linear, a, b, scale):
        super().__init__()
        self.linear, self.a, self.b, self.scale = linear, nn.Parameter(a.clone()), nn.Parameter(b.clone()), scale
        self.linear.requires_grad_(False)

    def forward(self, x):
        return self.linear(x) + nn.functional.linear(nn.functional.linear(x, self.a), self.b) * self.scale


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_training_equals_that_of_a_module_by_hand(format):
    original, lora, x, y = mlp(), LoRA(r=4, alpha=2), torch.randn(8, 128), torch.randn(8, 128)
    quantizing = [FORMATS[format]()] if format else []
    compiled = thunder.jit(original, transforms=[*quantizing, lora])
    reference = rounded(original, quantizing[0]) if format else copy.deepcopy(original)
    reference.requires_grad_(False)
    assert torch.equal(compiled(x), reference(x)), "B is zeros in the beginning"
    for i in (0, 2):
        a, b = (compiled.get_parameter(f"{i}.lora_{m}.weight").detach() for m in "AB")
        reference[i] = Added(reference[i], a, b, 0.5)
    trained = [p for p in reference.parameters() if p.requires_grad]
    assert [n for n, p in compiled.named_parameters() if p.requires_grad] == [
        f"{i}.lora_{m}.weight" for i in (0, 2) for m in "AB"
    ]
    optimizers = [torch.optim.SGD(parameters, 0.5) for parameters in (lora.parameters(compiled), trained)]
    for _ in range(5):
        losses = [(m(x) - y).square().mean() for m in (compiled, reference)]
        for loss, optimizer in zip(losses, optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(*losses)
        for p, q in zip(lora.parameters(compiled), trained):
            torch.testing.assert_close(p.grad, q.grad)
    assert thunder.cache_misses(compiled) == 1 and original[0].weight.grad is None


def test_merged_weights_in_a_plain_copy():
    original, lora, x = llama(), LoRA(r=4, targets=("q_proj", "v_proj")), torch.randint(0, 320, (1, 8))
    compiled = thunder.jit(original, transforms=[lora])
    for p in lora.parameters(compiled):
        nn.init.normal_(p, std=0.1)
    plain = copy.deepcopy(original)
    plain.load_state_dict(lora.merged(compiled))
    with torch.no_grad():
        assert error(compiled(x).logits, original(x).logits) > 1e-3
        assert error(compiled(x).logits, plain(x).logits) < 1e-5
    unmerged = compiled.original_state_dict()
    assert all(torch.equal(v, unmerged[k]) for k, v in original.state_dict().items())


def test_state_dicts_are_pefts():
    lora = LoRA(r=4, targets=("0",))
    compiled, fresh = (thunder.jit(mlp(), transforms=[lora]) for _ in range(2))
    for p in lora.parameters(compiled):
        nn.init.normal_(p)
    state = lora.state_dict(compiled)
    assert {k: tuple(v.shape) for k, v in state.items()} == {
        "base_model.model.0.lora_A.weight": (4, 128),
        "base_model.model.0.lora_B.weight": (256, 4),
    }
    lora.load_state_dict(fresh, state)
    x = torch.randn(2, 128)
    assert torch.equal(fresh(x), compiled(x))
    with pytest.raises(ValueError, match="missing or unexpected: base_model.model.0.lora_A.weight, other"):
        lora.load_state_dict(fresh, {"base_model.model.0.lora_B.weight": torch.ones(256, 4), "other": torch.ones(1)})
    with pytest.raises(ValueError, match=r"lora_A.weight is \[4, 128\], not \[1\]"):
        lora.load_state_dict(fresh, state | {"base_model.model.0.lora_A.weight": torch.ones(1)})


@pytest.mark.filterwarnings("ignore")  # theirs, when they are imported
def test_peft_loads_them():
    peft = pytest.importorskip("peft")
    lora, ids = LoRA(r=4, alpha=8, targets=("q_proj", "v_proj")), torch.randint(0, 320, (1, 8))
    original = llama()
    compiled = thunder.jit(original, transforms=[lora])
    for p in lora.parameters(compiled):
        nn.init.normal_(p, std=0.1)
    theirs = peft.get_peft_model(
        copy.deepcopy(original), peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    )
    result = peft.set_peft_model_state_dict(theirs, lora.state_dict(compiled))
    assert not result.unexpected_keys
    with torch.no_grad():
        assert error(compiled(ids).logits, theirs(ids).logits) < 1e-5
    lora.load_state_dict(compiled, peft.get_peft_model_state_dict(theirs))


@pytest.mark.slow
def test_a_language_model_in_four_bits_learns_what_one_in_full_does():
    """QLoRA: the loss of LoRA, to 2 %, on text that repeats itself."""
    torch.manual_seed(0)
    ids = torch.randint(0, 320, (4, 8)).repeat(1, 4)
    losses = {}
    for name, quantizing in (("lora", []), ("qlora", [NF4Weights()])):
        torch.manual_seed(1)
        lora = LoRA(r=8)
        compiled = thunder.jit(llama(), transforms=[*quantizing, lora])
        optimizer = torch.optim.AdamW(lora.parameters(compiled), lr=5e-3)
        first = None
        for _ in range(40):
            loss = compiled(ids, labels=ids).loss
            first = first or loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[name] = first, loss.item()
    assert losses["lora"][1] < 0.9 * losses["lora"][0]
    assert losses["qlora"][1] < 1.02 * losses["lora"][1]


@pytest.mark.filterwarnings("ignore")  # theirs, when they are imported
def test_torchaos_tensors_are_opaque():
    quantization = pytest.importorskip("torchao.quantization")
    x = torch.randn(4, 128)
    for config in (quantization.Int8WeightOnlyConfig(), quantization.Int8DynamicActivationInt8WeightConfig()):
        module = mlp()
        quantization.quantize_(module, config)
        with torch.no_grad():
            assert torch.equal(thunder.jit(module, fallback="error")(x), module(x))


@pytest.mark.filterwarnings("ignore")  # theirs, when they are imported
def test_modules_of_bitsandbytes_are_refused_in_words():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    x = torch.randn(4, 128)
    for module, words in (
        (
            bitsandbytes.nn.Linear8bitLt(128, 64, has_fp16_weights=False),
            r"'data' is set on a tensor(.|\n)*Linear8bitLt",
        ),
        (bitsandbytes.nn.Linear4bit(128, 64, compute_dtype=torch.float32), "a Params4bit is read"),
    ):
        module.to("cpu")  # which quantizes
        with torch.no_grad():
            wanted = module(x)
            with pytest.raises(CaptureError, match=words):
                thunder.jit(module, fallback="error")(x)
            with pytest.warns(FallbackWarning, match=words):
                assert torch.equal(thunder.jit(module, fallback="eager")(x), wanted)


def test_autocast_and_what_is_refused():
    compiled = thunder.jit(mlp(), transforms=[NF4Weights(), LoRA(r=4)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = compiled(torch.randn(4, 128))
    (y * torch.randn(4, 128)).sum().backward()
    assert compiled.get_parameter("0.lora_B.weight").grad.abs().sum() > 0
    with pytest.raises(ValueError, match="has no linear layer of these names"):
        thunder.jit(mlp(), transforms=[LoRA(targets=("q_proj",))])
    for wrong in ({"r": 0}, {"targets": "q_proj"}):
        with pytest.raises(ValueError, match="valid:"):
            LoRA(**wrong)


def test_frozen_results_do_not_require_grad():
    layer = nn.Linear(128, 8, bias=False)
    assert not thunder.jit(layer, transforms=[Int8Weights()])(torch.randn(2, 128)).requires_grad
    x = torch.randn(2, 128, requires_grad=True)
    y = thunder.jit(layer, transforms=[Int8Weights()])(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, rounded(layer, Int8Weights()).weight.sum(0).expand(2, 128))
