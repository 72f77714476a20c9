"""The checks that `torch.distributions` makes of its arguments, on by default: the program makes them when it runs, and
goes on as where they hold."""

from __future__ import annotations

from thunder.capture.interface import Capture
from thunder.compat.names import DISTRIBUTION_CHECK
from thunder.core.proxies import proxies_in
from thunder.core.symbol import OpTags, primitive

# PyTorch's words where a check fails, but for the distribution's own parameters
_TEXTS = {
    "Distribution.__init__": "Expected parameter {param} (Tensor of shape {shape}) of distribution {kind} to satisfy "
    "the constraint {rule}, but found invalid values:\n",
    "Distribution._validate_sample": "Expected value argument (Tensor of shape {shape}) to be within the support "
    "({rule}) of the distribution {kind}, but found invalid values:\n",
    "Geometric.__init__": "Expected parameter probs (Tensor of shape {shape}) of distribution {kind} to be positive "
    "but found invalid values:\n",
    "Uniform.__init__": "Uniform is not defined when low>= high",
}


@primitive(lambda holds, value, text: None, tags=(OpTags.DONT_DCE,))
def check_values(holds, value, text: str) -> None:
    if not holds:
        raise ValueError(text if value is None else f"{text}{value}")


def is_check(c: Capture, holds) -> bool:
    """Whether the truth of the tensor `holds` is asked for by such a check. Then an operation checks it."""
    frame, *outer = reversed(c.stack_of_frames)
    if frame.fn.__qualname__ == DISTRIBUTION_CHECK and outer:
        frame = outer[0]
    text = _TEXTS.get(frame.fn.__qualname__) if (frame.fn.__module__ or "").startswith("torch.distributions.") else None
    if text is None:
        return False
    names = frame.locals
    value, rule = names.get("value"), names.get("constraint", names.get("support"))
    rule = type(rule).__name__ if proxies_in(list(getattr(rule, "__dict__", {}).values()), []) else repr(rule)
    check_values(
        holds,
        value,
        text.format(
            param=names.get("param"),
            kind=type(names["self"]).__name__,
            shape=tuple(getattr(value, "shape", ())),
            rule=rule,
        ),
    )
    return True
