"""Repeated launches of handwritten Triton kernels: by the compiled binary, without the work of Triton's launcher on the
host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thunder import compat

ALIGNMENT = 16  # bytes, of addresses that kernels are compiled for


class RepeatedLaunch:
    """A kernel whose arguments are tensors of one device and, after them, numbers."""

    def __init__(self, kernel):
        self.kernel = kernel
        self._known: dict[tuple, Callable[[Sequence[int], int], None]] = {}

    def __call__(
        self, key: tuple, tensors: Sequence[torch.Tensor], settings: Callable[[], tuple[int, tuple[Any, ...], int]]
    ) -> None:
        """key: all that the tensors' types and the settings depend on. settings: makes (programs, numbers, warps)."""
        addresses = [t.data_ptr() for t in tensors]
        together = 0
        for address in addresses:
            together |= address
        device = tensors[0].get_device()
        key = (*key, device)
        launch = None if together % ALIGNMENT else self._known.get(key)
        if launch is not None and compat.current_device() == device:
            launch(addresses, compat.current_stream(device))
            return
        programs, numbers, warps = settings()
        with torch.cuda.device_of(tensors[0]):
            compiled = self.kernel[(programs,)](*tensors, *numbers, num_warps=warps)
        if compiled is not None and not together % ALIGNMENT:  # Triton's interpreter compiles nothing
            self._known[key] = _launcher(compiled, programs, len(tensors), numbers, warps, device)


KINDS = {"i32": "i", "i64": "l"}  # of numbers, as PyTorch's launcher names them


def _launcher(
    compiled: Any, programs: int, tensors: int, numbers: tuple, warps: int, device: int
) -> Callable[[Sequence[int], int], None]:
    """A function of addresses and a stream: a call of PyTorch's launcher, which takes the host less than Triton's, for
    kernels that need no more than that has."""
    metadata, kinds = compiled.metadata, list(compiled.src.signature.values())
    scratch = [getattr(metadata, f"{what}_scratch_size", None) for what in ("global", "profile")]
    plain = (
        len(kinds) == tensors + len(numbers)
        and all(kind == "constexpr" or kind in KINDS for kind in kinds[tensors:])
        and metadata.num_ctas == 1
        and not any(getattr(metadata, what, False) for what in ("launch_cooperative_grid", "launch_pdl"))
        and not any(scratch)
    )
    if not plain:
        run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

        def launch(addresses: Sequence[int], stream: int) -> None:
            run(programs, 1, 1, stream, function, packed, None, None, None, *addresses, *numbers)

        return launch
    absent = len(scratch) - scratch.count(None)
    given = [(KINDS[kind], n) for kind, n in zip(kinds[tensors:], numbers, strict=True) if kind != "constexpr"]
    text = "O" * tensors + "".join(letter for letter, _ in given) + "O" * absent
    rest = *[n for _, n in given], *[None] * absent
    launch_kernel, function, shared = compat.launch_kernel, compiled.function, metadata.shared

    def launch_directly(addresses: Sequence[int], stream: int) -> None:
        if device:  # PyTorch's launcher takes device 0 in a thread that has no context yet
            compat.set_device(device)
        launch_kernel(function, programs, 1, 1, warps, shared, text, (*addresses, *rest), stream)

    return launch_directly
