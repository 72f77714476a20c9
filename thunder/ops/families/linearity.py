"""Which primitives are linear, and in which operands: `Definition.linear`."""

from __future__ import annotations

from thunder.ops.registry import PRIMS

for _name, _rule in {
    "mul": lambda args, is_multiple, is_zero: sum(map(is_multiple, args)) == 1,
    "add": lambda args, is_multiple, is_zero: all(map(is_multiple, args)),
    "sub": lambda args, is_multiple, is_zero: all(map(is_multiple, args)),
    "cat": lambda args, is_multiple, is_zero: all(map(is_multiple, args[0])),
    "where": lambda args, is_multiple, is_zero: (
        not is_multiple(args[0]) and all(is_multiple(x) or is_zero(x) for x in args[1:])
    ),
    "pad": lambda args, is_multiple, is_zero: is_zero(args[1]),
}.items():
    PRIMS[_name].linear = _rule
for _name in (
    "true_divide", "neg", "sum", "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "transpose",
    "slice_prim", "flip", "clone_prim", "detach_prim", "stride_order",
):  # fmt: skip
    PRIMS[_name].linear = lambda args, is_multiple, is_zero: (
        is_multiple(args[0]) and not any(map(is_multiple, args[1:]))
    )
