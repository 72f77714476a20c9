"""Hooks that no backward of the program has run: the backward outside calls them, made of the values of each call."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable

from thunder.capture.epilogue import EpilogueWriter
from thunder.capture.interface import Capture
from thunder.capture.library.hooks import Hook, hooked
from thunder.capture.world import IDENTITY
from thunder.core.proxies import TensorProxy, proxies_in


def finish(c: Capture, results) -> None:
    """Hooks that no backward of the program has run go to the backward outside. Raises CaptureError where one holds
    something that the next call has another of. results: what leaves the program, as its result or stored in an
    object."""
    leaving = set(map(id, proxies_in(results, []))) if c.engine.retained else ()
    for value, tensor in c.engine.retained.items():
        overwrites = c.recorder.memory.base(tensor) in c.tensors.written_after
        leaves = any(id(p) in leaving for p in (tensor, value, c.recorder.latest(tensor)))
        if value not in c.engine.ran and (leaves or overwrites):
            c.refuse(
                f"retain_grad of a tensor that it {'overwrites' if overwrites else 'returns or stores'} is called, and "
                "the backward runs outside",
                "call retain_grad() on the result",
            )
    for i, operation in enumerate(c.recorder.bound_symbols):
        if operation.sym is hooked:
            value, hook, _ = operation.args
            values = _rebuild(c, hook)
            c.recorder.replace(i, operation.replace(args=(value, hook, values)))


def _rebuild(c: Capture, hook: Hook) -> tuple:
    """Sets what makes a hook of the values of one call. Returns these values."""
    hook.rebuilt, values = _HookWriter(c).function(hook.function)
    return values


class _HookWriter(EpilogueWriter):
    """Writes a program that makes a hook again. Objects from outside stay the same; those of the program may be shared
    with code that runs later, so that they must not change."""

    def function(self, hook: Callable) -> tuple[Callable, tuple]:
        _, program = self.program("hook", "values", self.build(hook))
        return program, tuple(value for _, value in self.values.values())

    def path(self, source) -> str:
        if source.base is not None:  # else it is the compiled module, or stands in the program
            self.c.world.ask(source, IDENTITY)
        return self.pin(self.c.world.value_at(source))

    def _outside(self, value, source) -> str:
        return self.path(source)

    def _function(self, value: types.FunctionType) -> str:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = {name for name, cell in cells if id(cell) not in self.c.outside.cells}
        stores = ("STORE_DEREF", "DELETE_DEREF")
        if any(i.opname in stores and i.argval in own for i in dis.get_instructions(value.__code__)):
            self.c.refuse(
                "a hook that is registered inside of it assigns to a variable of the program",
                "keep the value in an object from outside, or call backward inside",
            )
        return super()._function(value)

    def afterwards(self, value: TensorProxy) -> str:
        return self.c.refuse(
            "a hook that is registered inside of it has an argument that it overwrites with a value that requires grad",
            "give the hook the value, or call backward inside",
        )

    def _container(self, value, t: type) -> str:
        return self._refuse(t)

    def _other(self, value, t: type) -> str:
        if t is functools.partial:
            operands = map(self.build, (value.func, *value.args))
            named = (f"{k}={self.build(v)}" for k, v in value.keywords.items())
            return self.variable(value, f"{self.pin(t)}({', '.join((*operands, *named))})")
        return super()._other(value, t) if self._is_fixed(value, t) else self._refuse(t)

    def _refuse(self, t: type) -> str:
        return self.c.refuse(
            f"a hook that is registered inside of it has a {t.__name__} of the program's own, which the backward "
            "outside would find as it was at the first call",
            "give the hook tensors, numbers, or objects from outside, or call backward inside",
        )
