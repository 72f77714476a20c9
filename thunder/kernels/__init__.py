"""The compiler of kernels: operations are lowered to an IR of indexed values, rewritten, scheduled and emitted.

In the order of the flow: `ir` (nodes, the verifier, the printer), `lower` (operations to IR; `formulas` of functions
that have no node), `rules` (rewrites), `machine` (what a device does in a second), `schedule` (which loops compute
what), `cpp` (C++ for CPUs), `measure` (measures a machine). `index` is the algebra of indices, `sizes` that of sizes
that stay symbolic.
"""
