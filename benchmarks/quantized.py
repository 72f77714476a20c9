"""Decoding with weights in few bits: bytes of the weights, milliseconds of a token and tokens per second.

    python benchmarks/quantized.py [--layers 32] [--batches 1 16] [--rounds 20] [--small]
        [--systems eager torch.compile "torch.compile, int8" "torchao, int8" "torchao, int4" thunder int8 int4 nf4]

A model of Llama-2-7B's sizes with random weights in bfloat16 (`--small`: small sizes in float32, for a CPU), without
grad: one token of each sequence, without a cache of keys, which weighs the same in all systems. On a GPU each system
records CUDA graphs (torch.compile: mode="reduce-overhead"), so that the device is measured; eager launches. The systems
take turns. "torch.compile, int8": linear layers that convert the weight and scale the result, as weight-only layers are
written for torch.compile. torchao's layers of bits in groups of 64 are compiled by torch.compile as well; where torchao
is not installed, these rows say so. `error`: the norm of the difference of logits to eager's bfloat16, relative.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable

import torch
from torch import nn

import thunder
from thunder.quantization import Int4Weights, Int8Weights, NF4Weights
from thunder.tests.litgpt_model import GPT, Config
from thunder.tests.measuring import interleaved, median, paired_ratio, repetitions
from thunder.transforms.cudagraph import CUDAGraphTransform

FORMATS: dict[str, Callable] = {"int8": Int8Weights, "int4": Int4Weights, "nf4": NF4Weights}
SYSTEMS = "eager", "torch.compile", "torch.compile, int8", "torchao, int8", "torchao, int4", "thunder", *FORMATS
ROUND_SECONDS = 0.05


class Int8Linear(nn.Module):
    """Weight-only int8, for torch.compile."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        held, scale = Int8Weights().quantize(layer.weight.detach())
        self.register_buffer("held", held)
        self.register_buffer("scale", scale.flatten().to(layer.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.held.to(x.dtype)) * self.scale


def with_int8_layers(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    return model


def with_layers_of_torchao(model: nn.Module, bits: str) -> nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    model = copy.deepcopy(model)
    if bits == "int8":
        quantize_(model, Int8WeightOnlyConfig())
    else:
        quantize_(model, Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d"))
    return model


def compiled(system: str, model: nn.Module, device: str) -> nn.Module | Callable:
    if system == "eager":
        return model
    library, _, bits = system.partition(", ")
    if library != "thunder" and system not in FORMATS:
        held = (
            with_layers_of_torchao(model, bits) if library == "torchao" else with_int8_layers(model) if bits else model
        )
        return torch.compile(held, mode="reduce-overhead" if device == "cuda" else None)
    formats = [FORMATS[system]()] if system in FORMATS else []
    return thunder.jit(model, transforms=[*formats, *([CUDAGraphTransform()] if device == "cuda" else [])])


def size_of(model: nn.Module) -> int:
    """Bytes; of a tensor's subclass, those of the tensors that it wraps."""
    return sum(map(_bytes, (*model.parameters(), *model.buffers())))


def _bytes(t: torch.Tensor) -> int:
    if not hasattr(t, "__tensor_flatten__"):
        return t.nbytes
    return sum(_bytes(getattr(t, name)) for name in t.__tensor_flatten__()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--systems", nargs="*", default=SYSTEMS, choices=SYSTEMS)
    parser.add_argument("--small", action="store_true")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"n_embd": 256, "n_head": 4, "intermediate_size": 512, "vocab_size": 512} if chosen.small else {}
    config = Config.from_name("Llama-2-7b-hf", n_layer=chosen.layers, block_size=512, **sizes)
    with torch.device(chosen.device):
        model = GPT(config).eval().to(torch.float32 if chosen.small else torch.bfloat16)
    synchronize = torch.cuda.synchronize if chosen.device == "cuda" else lambda: None
    for batch in chosen.batches:
        tokens = torch.randint(0, config.vocab_size, (batch, 1), device=chosen.device)
        with torch.no_grad():
            wanted = model(tokens).double()
            calls, facts = {}, {}
            for system in chosen.systems:
                try:
                    run = compiled(system, model, chosen.device)
                    for _ in range(4):  # compiles, and records
                        out = run(tokens)
                except Exception as e:
                    if not system.startswith("torchao"):
                        raise
                    print(f"batch {batch:3}  {system:20} {type(e).__name__}: {str(e).splitlines()[0]}", flush=True)
                    continue
                facts[system] = size_of(run), ((out.double() - wanted).norm() / wanted.norm()).item()
                calls[system] = lambda run=run, tokens=tokens: (run(tokens), synchronize())
            repeat = repetitions(next(iter(calls.values())), ROUND_SECONDS)
            interleaved(calls, 2, repeat)
            samples = interleaved(calls, chosen.rounds, repeat)
        for system, seconds in samples.items():
            size, error = facts[system]
            against = "".join(
                "  {} {:.2f} [{:.2f}, {:.2f}]".format(f"to {base}", *paired_ratio(seconds, samples[base]))
                for base in ("eager", "torch.compile")
                if base in samples and base != system
            )
            print(
                f"batch {batch:3}  {system:20} {size / 2**30:7.3f} GiB {1e3 * median(seconds):9.3f} ms "
                f"{batch / median(seconds):9.1f} tokens/s  error {error:.4f}{against}",
                flush=True,
            )
        del calls, run, out
        torch._dynamo.reset()
        gc.collect()


if __name__ == "__main__":
    main()
