"""Reading the files of a checkpoint, which may come from others, without running code that they name.

PyTorch unpickles the description (`.metadata`), and values that are no tensors. Here the description may name
the classes that PyTorch describes checkpoints with, and nothing else. Values are loaded with `weights_only=True` where
they can be, and with a warning where not.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner

from thunder.errors import warn_user

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def check_description(checkpoint: pathlib.Path) -> None:
    """Raises pickle.UnpicklingError for a description that names anything but classes of checkpoints."""
    path = checkpoint / ".metadata"
    with open(path, "rb") as file:
        _Description(file, path).load()


class _Description(pickle.Unpickler):
    """Reads the description of a checkpoint. Raises UnpicklingError for a name that describes none."""

    def __init__(self, file: io.BufferedReader, path: pathlib.Path):
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if not _describes(module, name):
            raise pickle.UnpicklingError(
                f"{self.path} names {module}.{name}, which describes no checkpoint: it is damaged, or somebody wrote "
                "it to run code here. If you trust its author, load it by torch.distributed.checkpoint.load"
            )
        return super().find_class(module, name)


def _describes(module: str, name: str) -> bool:
    """Whether a class, or a constant, may stand in a description."""
    if module == "torch":
        return name in ("Size", "device") or isinstance(getattr(torch, name, None), _CONSTANTS)
    if module.startswith("torch.distributed.checkpoint."):
        return "." not in name
    return (
        (module, name) == ("torch.serialization", "_get_layout")
        or module.partition(".")[0] == "pathlib"
        or (
            module in ("builtins", "collections")
            and name in ("set", "frozenset", "dict", "list", "tuple", "OrderedDict")
        )
    )


class Planner(DefaultLoadPlanner):
    """PyTorch's, which loads values that are no tensors with `weights_only=True`, and warns where that is refused."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Loads an object of a checkpoint, and warns where it is unpickled with code of its author's choice."""
        content = value.read()
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except pickle.UnpicklingError:
            warn_user(
                f"{read_item.dest_index.fqn} of the checkpoint is an object that torch.load(weights_only=True) "
                "refuses: it is unpickled, which runs code that its author chose. Load checkpoints of authors that "
                "you trust, or allow its class by torch.serialization.add_safe_globals",
                UserWarning,
            )
        super().load_bytes(read_item, io.BytesIO(content))
