"""Set-up of all tests."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which Triton reads when it is imported, whichever test does that
