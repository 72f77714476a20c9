"""`python -m thunder`: versions, devices, executors."""

from __future__ import annotations

import platform

import torch

import thunder
import thunder.compiled
from thunder.compat.names import NEWEST, OLDEST, missing


def main() -> None:
    print(f"thunder {thunder.__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    names = ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))]
    print(f"devices: {', '.join(names)}")
    for executor in thunder.get_all_executors():
        kind = "always" if executor in thunder.get_always_executors() else "default" if executor in thunder.get_default_executors() else "on request"
        print(f"executor {executor.name} {executor.version or ''} ({kind})")
    lacks = missing()
    print(f"private names of PyTorch: {len(lacks) or 'none'} missing (tried on PyTorch {OLDEST} to {NEWEST})")
    for row in lacks:
        print(f"  {row.path}, for {row.needed_for}: {row.lost}")


main()
