"""Everything known about each operation, by family: one op, one place.

`define` says how an op is written down, `promotion` how types meet, `opaque` what happens to a torch function that has
no definition. Importing this package defines all operations and gives proxies their methods.
"""

from __future__ import annotations

import importlib

from thunder.ops import inplace, methods, opaque
from thunder.ops.define import LTORCH, PRIMS, inplace_of, lookup

FAMILIES = (
    "data",
    "elementwise",
    "binary",
    "ternary",
    "creation",
    "activations",
    "reductions",
    "extremes",
    "scans",
    "vector_norms",
    "random",
    "sorting",
    "special",
    "shape",
    "rearrange",
    "joining",
    "padding",
    "indexing",
    "selection",
    "scatter",
    "embeddings",
    "linalg",
    "grouped_products",
    "einsum",
    "norm_kernels",
    "norm_formulas",
    "sync_batch_norm",
    "normalization",
    "attention",
    "recurrent",
    "losses",
    "margin_losses",
    "convolution",
    "pooling",
    "windows",
    "resample",
    "factorizations",
    "equations",
    "lu",
    "matrix_norms",
    "quantization",
    "spectral",
    "view_copies",
    "statistics",
    "foreach",
    "collectives",
    "views",
    "batching_rules",
    "splitting_rules",
    "seeded",
    "linearity",
    "parts",
    "kernel_derivatives",
)
for _family in FAMILIES:
    importlib.import_module(f"thunder.ops.{_family}")

__all__ = ["FAMILIES", "LTORCH", "PRIMS", "lookup", "inplace_of", "inplace", "methods", "opaque"]
