"""Triton's compiler, for one kernel. A process that compiles imports this module, and neither PyTorch nor the rest of
thunder.

A kernel is compiled in a fork of a process that has compiled one: the first kernel of a process takes most of a second
more than another one.
"""

from __future__ import annotations

from typing import NamedTuple

from thunder.core.codegen import compile_source


class Request(NamedTuple):
    """All that the machine code of a kernel depends on. arguments: for each one Triton's name of the type, and whether
    it is a multiple of 16. capability: 90 for 9.0. constants: by the name of the argument; `tl.int8` is Triton's.
    stages: how many tiles are read ahead; None for Triton's default."""

    name: str
    text: str
    arguments: tuple[tuple[str, bool], ...]
    warps: int
    capability: int
    constants: tuple[tuple[str, int | float | str], ...] = ()
    stages: int | None = None

    def compile(self) -> tuple[dict, bytes]:
        """The facts of a Binary but for its path, and the machine code."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        # Triton 3.6 asks functions for their modules
        function = compile_source(self.text, self.name, {"__name__": "kernels"})
        signature = {name: kind for name, (kind, _) in zip(function.arg_names, self.arguments, strict=True)}
        attributes = {(i,): [["tt.divisibility", 16]] for i, (_, aligned) in enumerate(self.arguments) if aligned}
        tl = triton.language
        constants = {n: getattr(tl, v.removeprefix("tl.")) if type(v) is str else v for n, v in self.constants}
        source = ASTSource(function, signature, constants, attributes)
        options = {"num_warps": self.warps, "enable_fp_fusion": True}
        if self.stages is not None:
            options["num_stages"] = self.stages
        if "tl.device_assert" in self.text:  # Triton leaves assertions out otherwise, and adds some of its own then
            options |= {"debug": True, "sanitize_overflow": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        scratch = [getattr(compiled.metadata, f"{what}_scratch_size", None) for what in ("global", "profile")]
        assert not any(scratch), "kernels of ours need no scratch memory"
        return {
            "name": compiled.metadata.name,
            "shared": compiled.metadata.shared,
            "scratch": len(scratch) - scratch.count(None),
        }, compiled.asm["cubin"]


FIRST = Request(
    "first",
    """import triton
import triton.language as tl
@triton.jit
def first(a, b):
    i = tl.arange(0, 64)
    tl.store(b + i, tl.sum(tl.load(a + i)) + tl.exp(tl.load(a + i)))
""",
    (("*fp32", True), ("*fp32", True)),
    warps=4,
    capability=80,  # which every Triton knows; its machine code is thrown away
)


def prepare() -> None:
    """Loads what the first kernel of a process loads."""
    from triton import knobs
    from triton.compiler import compiler
    from triton.runtime import cache

    knobs.compilation.always_compile = True  # what is found on Triton's part of the disk loads nothing
    knobs.compilation.store_binary_only = True
    for module in (cache, compiler):  # of Triton 3.6 and before
        if hasattr(module, "triton_key"):
            # in place of a hash of the compiler's file, which takes as long as the rest; our cache has Triton's version
            module.triton_key = lambda: "kernels of thunder"
    FIRST.compile()
