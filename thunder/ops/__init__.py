"""What is known of each operation.

`registry` says how an operation is written down, `signature`, `shape_rules` and `promotion` read arguments and types as
PyTorch does, `infer` types by example, `functionalize` turns in-place operations into functional ones, `families` holds
the operations, and `opaque` takes the functions of PyTorch that no family defines. Importing this package defines all
operations and gives proxies their methods.
"""

from __future__ import annotations

import importlib

from thunder.ops import methods, opaque
from thunder.ops.families import FAMILIES
from thunder.ops.functionalize import inplace
from thunder.ops.promotion import Promotion
from thunder.ops.registry import (
    LTORCH,
    PRIMS,
    alias,
    by_example,
    composite,
    inplace_of,
    let_users_define,
    lookup,
    prim,
    torch_prim,
)

for _family in FAMILIES:
    importlib.import_module(f"thunder.ops.families.{_family}")
# rules for operations of all families, which have to be there
for _rules in (
    "functionalize.views",
    "families.seeded",
    "families.parts",
    "second_derivatives",
):
    importlib.import_module(f"thunder.ops.{_rules}")
let_users_define()

from thunder.ops.families.binary import binary  # noqa: E402
from thunder.ops.families.elementwise import unary  # noqa: E402

__all__ = [
    "FAMILIES", "LTORCH", "PRIMS", "Promotion", "alias", "binary", "by_example", "composite", "inplace", "inplace_of",
    "lookup", "methods", "opaque", "prim", "torch_prim", "unary",
]  # fmt: skip
