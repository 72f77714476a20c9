"""Comparisons of a compiled program with eager PyTorch, and the report of them."""

from __future__ import annotations

import dataclasses

from thunder.core.tables import table


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One operation of a program, compared.

    step: which call. part: "forward", "backward", "derivative" (of one operation by itself), "program" (results and
    gradients of all of it), or "original" (the captured program beside the original function). value: the name of what
    was compared. operation, executor: what computed it, and who. trace_line: its text; number: where it stands in the
    printed trace, from 1. location: (filename, line, function, source line) of the user's code, where known. eager,
    compiled: the largest deviation from float64, each; apart: the largest difference between the two. allowed: how
    large `compiled` may be. agrees: the verdict; None where nothing could be compared, for the reason in `note`.
    """

    step: int
    part: str
    value: str
    operation: str
    executor: str
    trace_line: str
    number: int | None
    location: tuple | None
    eager: float
    compiled: float
    apart: float
    allowed: float
    agrees: bool | None
    note: str = ""

    @property
    def where(self) -> str:
        return f"{self.location[0]}:{self.location[1]}" if self.location else "unknown place"

    def __str__(self) -> str:
        words = {
            True: "agrees with eager PyTorch",
            False: "differs from eager PyTorch by more than rounding explains",
            None: "was not compared",
        }[self.agrees]
        text = [
            f"{self.operation} of executor {self.executor} {words}: {self.value} in the {self.part} of step "
            f"{self.step}",
            f"  deviation from float64: compiled {self.compiled:.3g}, eager {self.eager:.3g}, explained up to "
            f"{self.allowed:.3g}",
        ]
        text += [f"  {self.note}"] * bool(self.note)
        text.append(f"  trace line{f' {self.number}' if self.number is not None else ''}: {self.trace_line}")
        if self.location:
            text.append(f"  in the user's program: {self.where}, in {self.location[2]}\n    {self.location[3].strip()}")
        return "\n".join(text)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `thunder.verify` found. `str()` is a table."""

    comparisons: tuple[Comparison, ...]

    @property
    def first(self) -> Comparison | None:
        """The first comparison that rounding does not explain; None where all agree."""
        return next((c for c in self.comparisons if c.agrees is False), None)

    def __str__(self) -> str:
        verdict = "All operations agree with eager PyTorch." if self.first is None else str(self.first)
        return f"{table(_HEAD, map(_row, self.comparisons))}\n\n{verdict}"


_HEAD = (
    "step", "part", "value", "operation", "executor", "eager", "compiled", "explained", "verdict", "user's line",
)  # fmt: skip
_VERDICTS = {True: "agrees", False: "DIFFERS", None: "not compared"}


def _row(c: Comparison) -> tuple[str, ...]:
    deviations = (f"{x:.2e}" for x in (c.eager, c.compiled, c.allowed))
    return str(c.step), c.part, c.value, c.operation, c.executor, *deviations, _VERDICTS[c.agrees], c.where
