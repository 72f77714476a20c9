"""torch.tensor of lists in which numbers and tensors with one element stand: values, types and errors are PyTorch's."""

import pytest
import torch

import thunder

DATA = {
    "tensors": lambda x: [x.max() + 1, x.min()],
    "tensors beside numbers": lambda x: [[x.max(), 2.0], [3, x.max().double()]],
    "integers beside floats": lambda x: [x.argmax(), 2.5],
    "small integers": lambda x: [x.argmax().to(torch.int8), True],
    "half beside a float": lambda x: [x.max().half(), 2.0],
    "half beside an integer": lambda x: (x.max().half(), 2),
    "half beside bfloat16": lambda x: [x.max().half(), x.max().bfloat16()],
    "one element": lambda x: [x.max().reshape(1, 1), 2.0],
    "complex": lambda x: [x.max(), 1j],
    "a size": lambda x: [x.max(), x.shape[0]],
    "a value": lambda x: [x.max(), x.sum().item()],
    "several elements": lambda x: [x, x],
    "ragged": lambda x: [[x.max()], [x.max(), x.max()]],
}
KINDS = {
    "tensor": torch.tensor,
    "float64": lambda data: torch.tensor(data, dtype=torch.float64),
    "int64": lambda data: torch.tensor(data, dtype=torch.int64),
    "as_tensor": torch.as_tensor,
    "new_tensor": lambda data: torch.ones(1, dtype=torch.complex64).new_tensor(data),
    "requires_grad": lambda data: torch.tensor(data, dtype=torch.float32, requires_grad=True),
}


def outcome(f, x):
    try:
        result = f(x)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error), str(error)
    return result.tolist(), result.dtype, result.requires_grad, result.is_leaf


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DATA)
def test_tensors_of_tensors(name, kind):
    def f(x):
        return KINDS[kind](DATA[name](x))

    compiled = thunder.jit(f, fallback="error")
    for values in ([1.0, 4.0, 2.0], [5.0, 3.0, 0.5]):
        x = torch.tensor(values)
        assert outcome(compiled, x) == outcome(f, x)


def test_integers_that_may_not_fit_are_refused():
    with pytest.raises(thunder.errors.CaptureError, match="fewer bits"):
        thunder.jit(lambda x: torch.tensor([x.argmax(), 3], dtype=torch.uint8), fallback="error")(torch.ones(3))


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
def test_elements_are_detached():
    def f(x):
        return torch.tensor([x.max(), 2.0])

    x = torch.ones(3, requires_grad=True)
    assert outcome(thunder.jit(f, fallback="error"), x) == outcome(f, x)
