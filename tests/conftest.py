"""Set-up of all tests."""

import os
import random

import pytest
import torch

os.environ.setdefault("THUNDER_FALLBACK", "error")  # a program that is not captured is a failure
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, whichever test does that


@pytest.fixture(scope="session")
def triton_interpreter():
    """Triton's interpreter, in kernels with loops to a number that they have loaded: before Triton 3.7, it makes an
    index of an array of one dimension, which NumPy refuses from 2.4 on."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    usual = interpreter._patch_lang_tensor

    def patch(tensor, *scope):
        usual(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(interpreter, "_patch_lang_tensor", patch)
        yield


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests ran before, in the samples of PyTorch's op_db as well, which ask Python for
    some."""
    random.seed(0)
    torch.manual_seed(0)
