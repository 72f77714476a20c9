"""Everything known about each operation, by family: one op, one place.

`define` says how an op is written down, `promotion` how types meet, `opaque` what happens to a torch function that has no definition. Importing this
package defines all operations and gives proxies their methods.
"""

from __future__ import annotations

from thunder.ops import activations, creation, data, einsum, elementwise, indexing, inplace, joining, linalg, methods, opaque, random, rearrange, reductions, scatter, shape
]  # fmt: skip
