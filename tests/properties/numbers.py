"""Programs of numbers that change from call to call: ints and floats of arguments, sizes, integers of data, and what is
asked of a text, beside each other, in arithmetic, sizes, branches, keys of a dict and errors that the program handles.
"""

from __future__ import annotations

import random

from tests.properties.compared import Program

CALLS = 8
_NUMBERS = (
    "({} + {})", "({} * {})", "({} - {})", "({} / (abs({}) + 1))", "(({}) % 5 + {})", "({} // 2 + {})", "max({}, {})",
    "min({}, {})", "abs({})", "round({}, 1)", "float({})", "math.tanh({})", "math.sqrt(abs({}) + 1)", "math.floor({})",
    "math.exp(-abs({}))", "math.log1p(abs({}))",
)  # fmt: skip
_INTEGERS = (
    "({} + {})", "({} * {})", "({} - {})", "max({}, {})", "min({}, {})", "({} // 2)", "({} % 4)", "abs({})",
    "math.isqrt(abs({}))", "math.gcd({}, {})", "int({n})", "round({n})",
)  # fmt: skip
# new tensors of tensors {x} and {y}, numbers {n} and {m}, and integers {i} and {j}
_TENSORS = (
    "{x} * {n} + {m}", "{x} * {m} - {n}", "{x}[:, :abs({i}) % {x}.shape[1] + 1]", "torch.cat([{x}, {y}], 1)",
    "torch.nn.functional.pad({x}, (abs({i}) % 6, abs({j}) % 3))", "{x}.roll({i}, 1)",
    "{x} + torch.arange({x}.shape[1]) * {n}", "{x} * 2 if {n} > {m} else {x} - 1", "{x}.clamp(-abs({n}), abs({n}))",
    "torch.cat([{x}[:, {x}.sum(0) > {n}], {x}[:, :2]], 1)", "filled({x}, abs({i}) % {x}.shape[1], {n})",
    "over({x}, {i} - 4)", "{x} * {n} if s.startswith('ab') else {x}", "{x} - {n} if 'c' in s and s < 'abc' else {x}",
)  # fmt: skip
# of the dict that all calls write to
_ITEMS = (
    "TABLE[{i}] = {n}", "TABLE[{i}] = {n}", "TABLE[{i}] = {x}", "TABLE['last'] = {n}", "TABLE[{i}], TABLE[{j}] = {n}, {m}",
    "TABLE[{i}] = TABLE.get({j})", "TABLE[{i}] = {j} in TABLE", "TABLE[{i}] = len(TABLE)", "TABLE[3] = {n}",
    "TABLE.pop({i}, None)", "TABLE[{i}] = list(TABLE)", "TABLE.setdefault({i}, {n})", "TABLE.update({{{i}: {n}}})",
)  # fmt: skip
_HEAD = """import math
import torch
TABLE = {0: 1.5, 3: 2, "first": 4}
def filled(x, i, n):
    x = x.clone()
    x[:, i:] = n
    return x
def over(x, n):
    try: return x * (1 / n)
    except ZeroDivisionError: return x
"""


class _Writer:
    """numbers, integers, tensors: what a program may use by now."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.numbers = ["k", "t", "x.shape[1]", "at[0].item()", "len(s)", "2", "0.5"]
        self.integers = ["k", "x.shape[1]", "int(at[1])", "len(s)", "s.find('c')", "s.count('b')", "3"]
        self.tensors = ["x"]

    def number(self, depth: int, integer: bool = False) -> str:
        if depth == 0 or self.random.random() < 0.3:
            return self.random.choice(self.integers if integer else self.numbers)
        form = self.random.choice(_INTEGERS if integer else _NUMBERS)
        parts = [self.number(depth - 1, integer) for _ in range(form.count("{}"))]
        return form.format(*parts, n=self.number(1))

    def statement(self, name: str) -> str:
        kind = self.random.random()
        if kind < 0.25:
            integer = kind < 0.12
            text = self.number(2, integer)
            self.numbers.append(name)
            self.integers += [name] if integer else []
            return f"{name} = {text}"
        numbers = {n: self.number(2) for n in "nm"}
        integers = {i: self.number(1, integer=True) for i in "ij"}
        x, y = self.random.choice(self.tensors), self.random.choice(self.tensors)
        if kind < 0.4:
            return self.random.choice(_ITEMS).format(x=x, **numbers, **integers)
        self.tensors.append(name)
        return f"{name} = {self.random.choice(_TENSORS).format(x=x, y=y, **numbers, **integers)}"


def generate(seed: int) -> Program:
    """The sizes and numbers of its arguments change at each call. A third of the programs gives gradients too."""
    writer = _Writer(seed)
    lines = [writer.statement(f"v{n}") for n in range(writer.random.randint(3, 7))]
    result = f"{writer.tensors[-1]}, {writer.numbers[-1]}"
    if writer.random.random() < 0.3:
        lines = ["x.requires_grad_()", *lines, f"({writer.tensors[-1]}.sum() + x.sum()).backward()"]
        result = f"x.grad, {result}"
    inputs = [
        f"[torch.rand(2, {4 + i}, generator=torch.Generator().manual_seed({i})) - 0.3, {3 + 2 * i - 9 * (i == 4)}, "
        f"{0.3 + 0.4 * i:.1f}, torch.tensor([{3 * i % 6}, {5 * i % 7}]), {'ab' * (i % 4) + 'c' * (i % 3)!r}]"
        for i in range(CALLS)
    ]
    body = "".join(f"    {line}\n" for line in [*lines, f"return {result}"])
    return Program(
        f"{_HEAD}ARGS = {inputs[0]}\ndef f(x, k, t, at, s):\n{body}", tuple(f"ARGS[:] = {g}" for g in inputs[1:])
    )
