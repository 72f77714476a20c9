"""The python executor: operations on Python values, which run as the Python functions they are."""

from __future__ import annotations

import platform

from thunder.extend import OperatorExecutor, get_always_executors, register_executor, set_always_executors

python_ex = OperatorExecutor("python", version=platform.python_version(), exact=True)
register_executor(python_ex)
set_always_executors((*get_always_executors(), python_ex))
