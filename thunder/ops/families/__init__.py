"""Operations by family: lowering, derivative, view, batching rule and cost stand at the operation."""

FAMILIES = (
    "data", "elementwise", "binary", "ternary", "creation", "activations", "reductions", "extremes", "scans",
    "vector_norms", "random", "sorting", "special", "shape", "rearrange", "joining", "padding", "indexing",
    "selection", "scatter", "embeddings", "linalg", "grouped_products", "einsum", "norm_kernels", "softmax",
    "norm_formulas", "batch_norm", "normalization", "attention", "recurrent", "losses", "margin_losses", "convolution",
    "pooling", "windows", "resample", "factorizations", "equations", "lu", "matrix_norms", "quantization",
    "spectral", "view_copies", "statistics", "foreach", "collectives",
)  # fmt: skip
"""In the order in which they are imported."""
