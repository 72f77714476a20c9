"""Weights of linear layers in few bits, as transforms. One file each.

thunder.jit(model, transforms=[NF4Weights(), LoRA(r=8)])
"""

from thunder._lazy import names_from

_FROM = {
    "thunder.quantization.int8": ("Int8Weights",),
    "thunder.quantization.float8": ("Float8Weights",),
    "thunder.quantization.int4": ("Int4Weights",),
    "thunder.quantization.nf4": ("NF4Weights",),
    "thunder.quantization.weights": ("QuantizedWeights",),
}
__getattr__, __dir__ = names_from(__name__, _FROM)
