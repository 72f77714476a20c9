"""The kernels of fused regions, as text, and as scripts that run one region beside PyTorch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy, number_value
from thunder.core.regions import FusedFunction
from thunder.core.symbol import BoundSymbol, Names
from thunder.core.trace import Trace
from thunder.inspect.plain import plain_program
from thunder.ops.torch_types import to_torch_device, to_torch_dtype


class Kernel(str):
    """The text of a fused region's kernels.

    `script()` is a program that runs them on random inputs beside PyTorch's operations.
    """

    _name: str
    _operation: BoundSymbol
    _names: Names

    @classmethod
    def of(cls, name: str, operation: BoundSymbol, names: Names) -> Kernel:
        """operation: of a trace with these names, whose function is a `FusedFunction`."""
        kernel = cls(operation.sym.fn.description)
        kernel._name, kernel._operation, kernel._names = name, operation, names
        return kernel

    def script(self) -> str:
        """The text of a Python program that runs the kernels of this region and PyTorch's operations on the same
        inputs, and prints the largest difference of each result and both times.

        Its inputs have the shapes, strides, dtypes and devices that the region was called with, and random values.
        Integers are below the largest size for which they are valid indices. Where the region writes a result over an
        input, the script allocates it. Raises NoScript for a region of Inductor, and NoPlainProgram where PyTorch has
        no name for an operation.
        """
        b = self._operation
        inputs = [x for x in b.inputs if isinstance(x, TensorProxy)]
        numbers = [number_value(x) for x in b.args if not isinstance(x, TensorProxy)]
        kernel = b.sym.fn.script(numbers)
        plain = plain_program(inputs, b.subsymbols, tuple(b.outputs), self._names, number_value)
        below = _valid_below(inputs, kernel.strides, b, self._names)
        input_texts = [_tensor_text(x, s, below) for x, s in zip(inputs, kernel.strides, strict=True)]
        return _SCRIPT.format(
            name=self._name,
            executor=b.sym.executor.name,
            imports="\n".join(text for text in plain.imports if text != "import torch"),
            operations=plain.source.replace("def program(", "def operations(", 1),
            kernel=kernel.text,
            inputs="\n".join(f"    {text},  # {x.name}" for text, x in zip(input_texts, inputs, strict=True)),
            numbers="".join(f", {n!r}" for n in numbers),
            results=", ".join(repr(o.name) for o in b.outputs),
        )


def kernels_of(prefix: str, trace: Trace) -> dict[str, Kernel]:
    """The kernels of a trace as executed, by the name of their region behind a prefix."""
    regions = [b for b in trace.bound_symbols if isinstance(b.sym.fn, FusedFunction)]
    return {name: Kernel.of(name, b, trace.names) for b in regions for name in [f"{prefix}{b.sym.name}"]}


def _tensor_text(x: TensorProxy, strides: Sequence[int], below: int) -> str:
    shape, device = tuple(map(number_value, x.shape)), str(to_torch_device(x.device))
    own = [f"device={device!r}"] if device != "cpu" else []
    own += [f"below={below}"] if x.dtype.category == 1 else []
    return f"tensor({', '.join([str(shape), str(tuple(strides)), str(to_torch_dtype(x.dtype)), *own])})"


def _valid_below(inputs: Sequence[TensorProxy], strides: Sequence[tuple], b: BoundSymbol, names: Names) -> int:
    """The largest size of a dimension below which all integers are valid for the operations, by trying them on the
    CPU; 1 where there is none."""
    if not any(x.dtype.category == 1 for x in inputs):
        return 2
    on_cpu = plain_program(inputs, b.subsymbols, tuple(b.outputs), names, _on_cpu).function
    tensors = [x for x in (*b.inputs, *b.outputs) if isinstance(x, TensorProxy)]
    space: dict[str, Any] = {}
    exec(_TENSOR, {"torch": torch}, space)
    for below in sorted({number_value(n) for x in tensors for n in x.shape if number_value(n) > 1}, reverse=True):
        try:
            on_cpu(*(
                space["tensor"](tuple(map(number_value, x.shape)), s, to_torch_dtype(x.dtype), below=below)
                for x, s in zip(inputs, strides, strict=True)
            ))  # fmt: skip
        except (IndexError, RuntimeError):  # a number is no index
            continue
        return below
    return 1


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Device):
        return Device("cpu")
    return torch.device("cpu") if isinstance(x, torch.device) else number_value(x)


_TENSOR = '''
def tensor(shape, strides, dtype, device="cpu", below=2):
    """Random numbers; integers from 0 to below - 1."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
    is_real = dtype.is_floating_point or dtype.is_complex
    memory = torch.randn(size) if is_real else torch.randint(below, (size,))
    return memory.to(dtype).to(device).as_strided(shape, strides)
'''

_SCRIPT = (
    '''"""The region {name} of the executor {executor} beside PyTorch's operations."""

import torch
{imports}
from torch.utils.benchmark import Timer


{operations}


# the region's kernels
{kernel}

'''
    + _TENSOR.replace("{", "{{").replace("}", "}}")
    + '''

def difference(x, y):
    """The largest one; 0 where both are NaN, or the same infinity."""
    x, y = (z.to(torch.complex128 if z.is_complex() else torch.float64) for z in (x, y))
    apart = (x - y).abs()[(x != y) & ~(x.isnan() & y.isnan())]
    return apart.max().item() if apart.numel() else 0.0


def microseconds(call, *arguments):
    space = {{"call": call, "arguments": arguments}}
    timer = Timer("call(*arguments)", globals=space, num_threads=torch.get_num_threads())
    return 1e6 * timer.blocked_autorange(min_run_time=0.5).median


torch.manual_seed(0)
inputs = [
{inputs}
]
with torch.no_grad():
    expected, results = operations(*inputs), kernel(*inputs{numbers})
    for name, y, z in zip(({results},), expected, results, strict=True):
        print(f"{{name}}: largest difference {{difference(y, z):.3g}}, largest value {{y.abs().max().item():.3g}}")
    print(f"PyTorch's operations {{microseconds(operations, *inputs):.1f}} us")
    print(f"kernels {{microseconds(kernel, *inputs{numbers}):.1f}} us")
'''
)
