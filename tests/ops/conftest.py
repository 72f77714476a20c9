"""Set-up of the operation tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def without_onednn():
    """oneDNN's bfloat16 convolutions end the process with an illegal instruction on some processors, eager's too."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)
