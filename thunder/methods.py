"""A compiled function in a class's body, bound to an instance."""

from __future__ import annotations

import copy
import types
from typing import Any


class CompiledMethod:
    """A compiled function of a class's body, bound to an instance. Its attributes are the compiled function's."""

    def __init__(self, function: Any, instance: Any):
        self.__func__, self.__self__, self.__doc__ = function, instance, function.__doc__

    _lc_cd = property(lambda self: self.__func__)
    _lc_original = property(lambda self: types.MethodType(self.__func__.fn, self.__self__))
    __wrapped__ = _lc_original

    def __call__(self, *args, **kwargs):
        return self.__func__(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)

    def __repr__(self) -> str:
        return f"<bound method of {self.__self__!r}: {self.__func__!r}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is CompiledMethod and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __deepcopy__(self, memo):
        return CompiledMethod(self.__func__, copy.deepcopy(self.__self__, memo))

    def __reduce__(self):
        return getattr, (self.__self__, self.__func__.__name__)

    def lower(self, *args, **kwargs) -> Any:
        """The program that a call with these arguments would run, compiled where there is none. Nothing runs."""
        return self.__func__.lower(self.__self__, *args, **kwargs)
