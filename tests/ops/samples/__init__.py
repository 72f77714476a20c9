"""Samples: arguments that tests call operations with, a file for each family of `thunder/ops`.

`@operation.samples` gives a function of `make`, which makes tensors of the type that is tested; it yields tuples of
arguments, or pairs of arguments and keywords. `@operation.error_samples` yields what PyTorch refuses.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
