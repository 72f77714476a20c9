"""Random programs of operations that fuse, their float64 references, and what makes a result right.

    region = random_region(seed, SMALL)
    eager, exact = region(region.inputs), region.exact(region.inputs)
    deviations = judge(fused, eager, exact)

A region is a function of tensors as Python text, which prints and runs by itself. The reference is the same program on
the inputs in float64; a conversion to a type rounds its values to that type there as well. Operations that jump
(comparisons, roundings, places of extremes) are given exact values only: inputs, and what moving, choosing and negating
makes of them. So integers and bools have one right answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

__all__ = ["LARGE", "SMALL", "RandomRegion", "Sizes", "judge", "random_region"]


class Sizes(NamedTuple):
    """dims: the lengths of dimensions. numel: the most elements of a value. steps: how many lines a program has, at
    least and at most."""

    dims: tuple[int, ...]
    numel: int
    steps: tuple[int, int]


SMALL = Sizes((1, 2, 3, 4, 5, 7, 8, 16, 33, 70), 3000, (3, 9))
LARGE = Sizes((1, 3, 16, 33, 64, 127, 300, 1024, 2048, 5000), 2_000_000, (4, 14))

FLOATS = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.float64)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.bool)

# {0}, {1}: operands. {dim}: a dimension of the first, {dims}: some of them, {keep}: True or False, {type}: a type,
# {number}: a small number.
SMOOTH = """
    torch.sin({0}) torch.cos({0}) torch.tanh({0}) torch.sigmoid({0}) F.gelu({0}) F.gelu({0},approximate='tanh')
    F.silu({0}) torch.exp(-{0}*{0})
    torch.sqrt({0}*{0}+1) torch.rsqrt({0}*{0}+1) torch.log1p({0}*{0}) torch.expm1({0}.clamp(-2,2)) torch.erf({0})
    F.softplus({0}) F.elu({0}) F.leaky_relu({0},0.1)
    F.mish({0}) F.logsigmoid({0}).contiguous() {0}.pow(2) {0}.pow(3) 1/({0}*{0}+1) {0}*{number}+1 {number}-{0} {0}/3
    torch.square({0}) torch.exp2({0}.clamp(-3,3))
    F.hardswish({0}) F.hardtanh({0}) cast({0},torch.float32) torch.log2({0}*{0}+1) F.selu({0}) torch.softmax({0},{dim})
    torch.log_softmax({0},{dim})
    F.layer_norm({0},{0}.shape[-1:]) F.rms_norm({0},{0}.shape[-1:]) F.normalize({0},dim={dim})
""".split()
SMOOTH_PAIRS = """
    {0}+{1} {0}*{1} {0}-{1} {0}/({1}*{1}+1) {0}*{1}+{0} torch.lerp(cast({0},torch.float32),cast({1},torch.float32),0.3)
    torch.where({0}>{1},{0},{1})
    torch.addcmul(cast({0},torch.float32),cast({0},torch.float32),cast({1},torch.float32)) torch.hypot({0},{1})
    F.mse_loss({0}+{1}*0,{1}+{0}*0)
    F.smooth_l1_loss({0}+{1}*0,{1}+{0}*0,reduction='none')
""".split()
SMOOTH_REDUCTIONS = """
    {0}.sum() {0}.mean({dims}) {0}.sum({dims},keepdim={keep}) {0}.var({dims},unbiased=False)
    {0}.std({dim},keepdim={keep},unbiased=False) {0}.logsumexp({dims})
    {0}.norm(dim={dim}) ({0}*{0}).mean() {0}.mean({dim},keepdim=True) torch.var_mean({0},{dim},unbiased=False)[0]
    torch.linalg.vector_norm({0},1,{dims})
""".split()
MOVES = """
    {0}.transpose(0,-1) {0}.transpose({dim},{dim2}) {0}.reshape(-1) {0}[...,1:] {0}[::2] {0}[...,1::3]
    {0}.unsqueeze({dim}) {0}.flip({dims}) {0}.chunk(2,{dim})[0]
    {0}.expand(2,*{0}.shape) torch.cat(({0},-{0}),{dim}) torch.cat(({0},{0}.flip(0)),-1) F.pad({0},(1,2))
    F.pad({0},(-1,2),value=0.5) {0}.reshape({0}.shape[-1],-1)
    torch.stack(({0},{0}),{dim}) {0}.movedim(0,-1) {0}.movedim(0,-1).contiguous() torch.roll({0},1,{dim})
    {0}.repeat(2,*[1]*({0}.dim()-1)) {0}.squeeze()
    {0}.narrow({dim},0,1) torch.tril({0}) torch.triu({0},1) {0}.flatten(0,1) {0}.clone()
    torch.cat(({0}[...,{0}.shape[-1]//2:],{0}[...,:{0}.shape[-1]//2]),-1)
    {0}[None,:,None] {0}.select({dim},-1) {0}.unflatten({dim},(1,-1)) {0}.masked_fill({0}==0,2) {0}[:0]
""".split()
CHOOSING = """
    -{0} {0}.abs() {0}.clamp(-1,1) {0}.clamp(min=0) torch.maximum({0},{1}) torch.minimum({0},{1})
    torch.where({0}>{1},{0},{1}) torch.where({0}>0,{0},0)
    {0}.amax({dims},keepdim={keep}) {0}.amin({dim}) {0}.amax() torch.relu({0}) {0}.masked_fill({0}>0,-1)
    torch.fmax({0},{1}) torch.nan_to_num({0})
    torch.aminmax({0},dim={dim})[1] cast({0},{type})
""".split()
JUMPS = """
    {0}>{1} {0}<={1} {0}=={1} {0}!=0 torch.floor({0}) torch.ceil({0}) torch.trunc({0}) torch.sign({0}) torch.isnan({0})
    torch.isinf({0}) torch.isfinite({0})
    torch.logical_and({0},{1}).contiguous() torch.logical_not({0}).contiguous() ({0}>0).any({dim}) ({0}>0).all()
    ({0}!=0).any() ({0}<1).all({dim},keepdim={keep})
    {0}.argmax({dim}) {0}.count_nonzero({dim}) cast({0}.clamp(0,100),{integer}) torch.signbit({0}) ({0}>0).sum({dim})
    {0}.gather({dim},{0}.argsort({dim}))
    {0}.argmin() F.one_hot(({0}>0).long(),3).contiguous() ({0}>0)*{0}
""".split()
WHOLE = """
    {0}+{1} {0}*{1} {0}-{1} -{0} {0}*3+1 {0}.sum({dims}) {0}.sum() {0}&{1} {0}|{1} {0}^{1} {0}.amax({dim})
    {0}.amin({dims},keepdim={keep}) cast({0},torch.float32)
    {0}/4 torch.square({0}) {0}.abs() cast({0},{type}) torch.where({0}>{1},{0},{1}) torch.minimum({0},{1})
    torch.maximum({0},{1}) cast({0},torch.float64) cast({0},torch.float16)
    {0}.bool() torch.logical_xor({0},{1}).contiguous() ~{0} {0}.any({dim}) {0}.cumsum({dim}) {0}//3 {0}%5 {0}<<2 {0}>>1
""".split()

REFUSED = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


def _cast(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.to(kind)


def _cast_in_double(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounded to the type, and computed with in float64."""
    return x.to(kind).double() if kind.is_floating_point else x.to(kind)


class RandomRegion:
    """text: of `def program(x0, ...)`. inputs: CPU tensors. unit: the rounding of its coarsest type. Called with
    tensors, on any device, it gives its results as a tuple."""

    def __init__(self, seed: int, text: str, inputs: Sequence[torch.Tensor], unit: float):
        self.seed, self.text, self.inputs, self.unit = seed, text, tuple(inputs), unit
        self.function = _function(text, _cast)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple:
        return self.function(*inputs)

    def resized(self, more: int) -> RandomRegion:
        """The same program on other inputs, laid out in memory alike, whose dimensions of more than 2 have `more`."""
        generator = torch.Generator().manual_seed(self.seed + more)
        return RandomRegion(self.seed, self.text, [_resized(x, more, generator) for x in self.inputs], self.unit)

    def exact(self, inputs: Sequence[torch.Tensor]) -> tuple:
        """The results in float64."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return _function(self.text, _cast_in_double)(*[x.double() if x.is_floating_point() else x for x in inputs])
        finally:
            torch.set_default_dtype(default)

    def sensitivity(self) -> list[float]:
        """How far each result in float64 moves, as a Deviation says it, where every number that comes in is moved by a
        rounding of its type."""
        generator = torch.Generator().manual_seed(self.seed)
        signs = [torch.randint(0, 2, x.shape, generator=generator) * 2 - 1 for x in self.inputs]
        moved = [
            x.double() * (1 + s * torch.finfo(x.dtype).eps / 2) if x.is_floating_point() else x
            for x, s in zip(self.inputs, signs, strict=True)
        ]
        exact = self.exact(self.inputs)
        return [d.got for d in judge(self.exact(moved), exact, exact)]

    def with_gradients(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> tuple:
        """Results of these inputs, and the gradients of those that require grad, row-major, for cotangents that are
        always the same."""
        generator = torch.Generator().manual_seed(self.seed)
        cotangents = [
            torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.device, r.dtype) for r in results
        ]
        chosen = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
        leaves = [x for x in inputs if x.requires_grad]
        gradients = (
            torch.autograd.grad([r for r, _ in chosen], leaves, [c for _, c in chosen], allow_unused=True)
            if chosen
            else ()
        )
        return (*[r.detach() for r in results], *[g.contiguous() for g in gradients if g is not None])

    def placed(self, device) -> list[torch.Tensor]:
        """The inputs on a device, as they lie in memory here."""
        return [_like(x, device) for x in self.inputs]


def _like(x: torch.Tensor, device) -> torch.Tensor:
    whole = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).to(device)
    return torch.as_strided(whole, x.shape, x.stride(), x.storage_offset())


def _resized(x: torch.Tensor, more: int, generator: torch.Generator) -> torch.Tensor:
    shape = [n + more if n > 2 else n for n in x.shape]
    order = sorted(range(x.dim()), key=lambda d: -x.stride(d))
    gaps = 2 if x.dim() and min(x.stride()) == 2 else 1
    stored = [1 if x.stride(d) == 0 else shape[d] * (gaps if d == order[-1] else 1) for d in order]
    values = _of_type(torch.randn(stored, generator=generator, dtype=torch.float64), x.dtype)
    values = values[..., ::gaps] if stored else values
    return values.permute([order.index(d) for d in range(x.dim())]).expand(shape)


def _of_type(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if kind is torch.bool:
        return values > 0
    if kind.is_floating_point:
        return values.to(kind)
    return (values * 4).abs().to(kind) if kind is torch.uint8 else (values * 4).to(kind)


def _function(text: str, cast: Callable) -> Callable:
    space = {"torch": torch, "F": F, "cast": cast}
    exec(text, space)  # noqa: S102
    return space["program"]


class _Value(NamedTuple):
    name: str
    tensor: torch.Tensor
    exact: bool


class _Writer:
    def __init__(self, seed: int, sizes: Sizes, smooth: bool):
        self.random, self.sizes, self.smooth = random.Random(seed), sizes, smooth
        self.generator = torch.Generator().manual_seed(seed)
        self.pool: list[_Value] = []
        self.lines: list[str] = []

    # ------------------------------------------------------------------------------------------------------------
    # inputs
    def shape(self) -> list[int]:
        while True:
            shape = [self.random.choice(self.sizes.dims) for _ in range(self.random.choice((1, 2, 2, 3, 3, 4)))]
            if math.prod(shape) <= self.sizes.numel // 2:
                return shape if self.random.random() > 0.03 else [*shape[:-1], 0]

    def input(self, shape: Sequence[int]) -> torch.Tensor:
        kind = torch.float32 if self.smooth else self.random.choice(FLOATS if self.random.random() < 0.75 else OTHERS)
        layout = self.random.choice(("plain", "plain", "plain", "transposed", "gaps", "offset", "expanded"))
        stored = list(shape)
        if layout == "transposed":
            stored.reverse()
        if layout == "gaps":
            stored[-1] *= 2
        if layout == "expanded":
            stored[0] = min(stored[0], 1)
        values = torch.randn(stored, generator=self.generator, dtype=torch.float64)
        if kind.is_floating_point and self.random.random() < 0.2 and not self.smooth:
            values = torch.where(
                torch.rand(stored, generator=self.generator) < 0.05,
                self.random.choice((0.0, -0.0, math.inf, -math.inf, math.nan)),
                values,
            )
        operand = _of_type(values, kind)
        if layout == "offset":
            whole = torch.zeros(operand.numel() + 1, dtype=kind)
            whole[1:] = operand.reshape(-1)
            return whole[1:].reshape(shape)
        if layout == "transposed":
            return operand.permute(*reversed(range(len(shape))))
        return operand[..., ::2] if layout == "gaps" else operand.expand(shape)

    def inputs(self) -> list[torch.Tensor]:
        base = self.shape()
        values = [self.input(base)]
        for _ in range(self.random.choice((1, 2, 2))):
            shape = base[self.random.choice((0, 0, 1)) :] or base
            if self.random.random() < 0.5:
                shape = [1 if self.random.random() < 0.4 else n for n in shape]
            values.append(self.input(shape))
        return values

    # ------------------------------------------------------------------------------------------------------------ lines
    def step(self) -> None:
        a, b = self.random.choice(self.pool), self.random.choice(self.pool)
        if a.tensor.dim() == 0 and self.random.random() < 0.7:
            return
        floating = a.tensor.is_floating_point()
        if floating:
            kinds = [
                SMOOTH,
                SMOOTH,
                SMOOTH_PAIRS,
                SMOOTH_PAIRS,
                SMOOTH_REDUCTIONS,
                MOVES,
                MOVES,
                *([] if self.smooth else [CHOOSING]),
            ]
            if a.exact and b.exact and not self.smooth:
                kinds += [JUMPS, CHOOSING, CHOOSING]
        else:
            kinds = [WHOLE, WHOLE, MOVES, CHOOSING, JUMPS] if b.exact else [MOVES]
        kind = self.random.choice(kinds)
        template = self.random.choice(kind)
        if "{1}" in template:
            if kind in (CHOOSING, JUMPS, WHOLE) and not b.exact and not a.exact == b.exact:
                return
            shape = self.broadcast(a.tensor, b.tensor)
            if shape is None or math.prod(shape) > self.sizes.numel:
                return
        rank = max(a.tensor.dim(), 1)
        text = template.format(
            a.name, b.name, dim=self.random.randrange(-rank, rank), dim2=self.random.randrange(rank),
                dims=self.dims(rank), keep=self.random.random() < 0.5,
            number=self.random.choice((0.5, 2, -1.25, 0.1)), type=self.random.choice(FLOATS),
                integer=self.random.choice(OTHERS[:4]),
        )  # fmt: skip
        exact = a.exact and kind in (MOVES, CHOOSING, JUMPS, WHOLE) and ("{1}" not in template or b.exact)
        self.write(text, exact)

    def broadcast(self, a: torch.Tensor, b: torch.Tensor) -> Sequence[int] | None:
        try:
            return torch.broadcast_shapes(a.shape, b.shape)
        except RuntimeError:
            return None

    def dims(self, rank: int) -> tuple[int, ...]:
        return tuple(self.random.sample(range(rank), self.random.randint(1, rank)))

    def write(self, text: str, exact: bool) -> None:
        try:
            tensor = eval(text, {"torch": torch, "F": F, "cast": _cast, **{v.name: v.tensor for v in self.pool}})
        except REFUSED:
            return
        if tensor.numel() > self.sizes.numel or tensor.dim() > 5 or tensor.is_complex():
            return
        name = f"v{len(self.lines)}"
        self.lines.append(f"    {name} = {text}")
        self.pool.append(_Value(name, tensor, exact and (not tensor.is_floating_point() or tensor.dtype.itemsize >= 2)))


def random_region(seed: int, sizes: Sizes, smooth: bool = False) -> RandomRegion:
    """The region of a seed. smooth: of float32 and of operations with a derivative, so that its gradients may be
    compared."""
    writer = _Writer(seed, sizes, smooth)
    inputs = writer.inputs()
    writer.pool = [_Value(f"x{i}", x, True) for i, x in enumerate(inputs)]
    wanted, tries = writer.random.randint(*sizes.steps), 0
    while len(writer.lines) < wanted and tries < 200:
        writer.step()
        tries += 1
    values = writer.pool[len(inputs) :]
    read = "\n".join(writer.lines)
    results = [
        v.name
        for i, v in enumerate(values)
        if i >= len(values) - 2 or not any(f"{v.name}{c}" in read for c in ".,)+-*/[ =!<>&|^")
    ] or [values[-1].name]
    names = ", ".join(f"x{i}" for i in range(len(inputs)))
    text = f"def program({names}):\n" + "\n".join(writer.lines) + f"\n    return ({', '.join(results)},)\n"
    unit = max((torch.finfo(v.tensor.dtype).eps for v in writer.pool if v.tensor.is_floating_point()), default=0.0)
    unit = max(unit, 2.0**-46)  # float64 is its own reference
    return RandomRegion(seed, text, inputs, unit)


class Deviation(NamedTuple):
    """The largest distance from the float64 reference, as a share of the largest number there, or of 0.01: numbers of
    the order 1 cancel.

    wrong: what no rounding explains, or ''.
    """

    got: float
    eager: float
    wrong: str


def judge(got: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> list[Deviation]:
    """One Deviation for each result. All on the CPU. Integers and bools have to be equal; numbers have to be infinite
    or none where eager's or the reference's are."""
    return [_judged(g.detach(), e.detach(), x.detach()) for g, e, x in zip(got, eager, exact, strict=True)]


def _judged(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Deviation:
    if (got.dtype, got.shape, _steps(got)) != (eager.dtype, eager.shape, _steps(eager)):
        return Deviation(
            0.0,
            0.0,
            f"{got.dtype} {tuple(got.shape)} {got.stride()} instead of {eager.dtype} {tuple(eager.shape)} "
            f"{eager.stride()}",
        )
    if not eager.is_floating_point():
        return Deviation(
            0.0, 0.0, "" if torch.equal(got, eager) else f"{int((got != eager).sum())} of {got.numel()} differ"
        )
    got, eager = got.double(), eager.double()
    if not bool((_same_kind(got, eager) | _same_kind(got, exact)).all()):
        return Deviation(0.0, 0.0, "infinite, or no number, elsewhere")
    finite = got.isfinite() & eager.isfinite() & exact.isfinite()
    if not bool(finite.any()):
        return Deviation(0.0, 0.0, "")
    scale = max(float(exact[finite].abs().max()), 0.01)
    return Deviation(*(float((x - exact)[finite].abs().max()) / scale for x in (got, eager)), "")


def _steps(x: torch.Tensor) -> list[int]:
    """The strides that say where elements lie."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel()]


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.isfinite() & b.isfinite()) | (a.isnan() & b.isnan()) | (a == b)
