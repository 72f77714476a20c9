"""Set-up of all tests."""

import os
import random

import pytest
import torch

os.environ.setdefault("THUNDER_FALLBACK", "error")  # a program that is not captured is a failure
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, whichever test does that


@pytest.fixture(autouse=True)
def seeded():
    """The same numbers whichever tests ran before, in the samples of PyTorch's op_db as well, which ask Python for
    some."""
    random.seed(0)
    torch.manual_seed(0)
