"""The python executor: operations on Python values, which run as the Python functions they are."""

from __future__ import annotations

import platform

from thunder.extend import OperatorExecutor, register_executor

__all__ = ["python_ex"]

python_ex = OperatorExecutor("python", version=platform.python_version())
register_executor(python_ex)
