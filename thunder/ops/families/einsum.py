"""torch.einsum: typed from its equation, decomposed into permutations, sums and batched matrix products, executed by
torch.einsum itself."""

from __future__ import annotations

import string

import torch

from thunder.core.dtypes import bool8
from thunder.core.proxies import TensorProxy, like
from thunder.core.symbol import OpTags, current_recorder
from thunder.ops import autocast, ltorch, opaque, pytorch_derivative
from thunder.ops.families.linalg import matmul_prim
from thunder.ops.families.shape import expand, permute, reshape, unsqueeze
from thunder.ops.promotion import result_type, same_device
from thunder.ops.registry import alias, composite
from thunder.ops.rules import derivatives
from thunder.ops.shape_rules import require


def parse(equation: str, ranks: list[int]) -> tuple[list[list], list]:
    """Labels of each operand's dimensions and of the result's. A label is a letter, or a number for a dimension that
    `...` stands for (counted from the last).

    Raises RuntimeError where equation and operands do not fit.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    require(len(terms) == len(ranks))
    inputs, spread = [], 0
    for term, rank in zip(terms, ranks, strict=True):
        letters = term.replace("...", "")
        extra = rank - len(letters)
        require(extra >= 0 and (not extra or "..." in term) and (letters.isalpha() or not letters))
        inputs.append(_labels(term, extra))
        spread = max(spread, extra)
    if arrow:
        output = _labels(right, spread)
    else:
        count: dict = {}
        for x in left.replace("...", "").replace(",", ""):
            count[x] = count.get(x, 0) + 1
        output = [*reversed(range(spread)), *sorted(x for x, n in count.items() if n == 1)]
    known = {x for labels in inputs for x in labels}
    for x in output:
        require(not isinstance(x, str) or x in known)
    require(len(set(output)) == len(output))
    return inputs, output


def _labels(term: str, extra: int) -> list:
    before, dots, after = term.partition("...")
    return [*before, *(reversed(range(extra)) if dots else ()), *after]


def _label_sizes(inputs: list[list], operands) -> dict:
    """The size of each label. Raises PyTorch's error where operands disagree."""
    sizes: dict = {}
    for labels, t in zip(inputs, operands, strict=True):
        for x, n in zip(labels, t.shape, strict=True):
            known = sizes.get(x, 1)
            if known is n:
                continue
            if known == 1:
                sizes[x] = n
            elif n != 1 and n != known:
                raise RuntimeError(
                    f"einsum(): subscript {x} has size {n} for operand which does not broadcast with previously seen "
                    f"size {known}"
                )
            else:
                sizes.setdefault(x, n)
    return sizes


def _arguments(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = operands[0]
    if not isinstance(equation, str):
        return _from_sublists([equation, *operands]), kwargs
    return (equation, *operands), kwargs


def _from_sublists(args: list) -> tuple:
    """The other calling form: operand, list of numbers, operand, list of numbers ..., and a list for the result."""

    def written(numbers):
        return "".join("..." if n is ... else chr(ord("A") + n if n < 26 else ord("a") + n - 26) for n in numbers)

    operands, terms = args[0 : len(args) - len(args) % 2 : 2], args[1::2]
    equation = ",".join(map(written, terms))
    return (f"{equation}->{written(args[-1])}" if len(args) % 2 else equation, *operands)


def _meta(equation, *operands):
    """The type of the result of `einsum`. Raises PyTorch's errors."""
    inputs, output = parse(equation, [len(t.shape) for t in operands])
    sizes = _label_sizes(inputs, operands)
    dtype = operands[0].dtype
    if any(t.dtype is not dtype for t in operands):
        require(not _sums_products(equation, *operands))
        dtype = result_type(*operands)
    require(
        dtype is not bool8 or not any(x not in output for x in sizes),
        "the type of a sum of bools follows the way PyTorch computes it: convert the operands to int64 first",
    )
    return like(operands[0], tuple(sizes.get(x, 1) for x in output), dtype, same_device(*operands))


@composite(
    torch.einsum,
    torch.functional.einsum,
    meta=_meta,
    canonicalize=_arguments,
    autocast="lower",
    tags=(OpTags.MATMUL_OP,),
)
def einsum(equation, *operands):
    """The decomposition of `einsum`: operands are contracted from left to right, labels that no later operand has are
    summed."""
    inputs, output = parse(equation, [len(t.shape) for t in operands])
    terms = [_diagonals(t, labels) for t, labels in zip(operands, inputs, strict=True)]
    done, labels = terms[0]
    for i, (t, other) in enumerate(terms[1:]):
        later = {x for _, more in terms[i + 2 :] for x in more} | set(output)
        done, labels = _contract(done, labels, t, other, later)
    gone = tuple(i for i, x in enumerate(labels) if x not in output)
    if gone:
        done, labels = ltorch.sum(done, gone), [x for x in labels if x in output]
    for x in output:
        if x not in labels:
            done, labels = unsqueeze(done, -1), [*labels, x]
    return permute(done, tuple(labels.index(x) for x in output))


@einsum.vjp
def _(equation, *operands):
    """The gradient of an operand is a sum of products of the cotangent and the other operand."""
    inputs, output = parse(equation, [len(t.shape) for t in operands])
    if len(operands) != 2 or any(len(set(labels)) != len(labels) for labels in inputs):
        return (yield from pytorch_derivative.derivative_of(einsum)(equation, *operands))
    g = yield einsum(equation, *operands)
    names = dict(zip(dict.fromkeys((*output, *inputs[0], *inputs[1])), string.ascii_letters, strict=False))

    def gradient(operand, own: list, other, theirs: list):
        if not operand.requires_grad:
            return None
        of_g, of_other = (dict(zip(x, t.shape, strict=True)) for x, t in ((output, g), (theirs, other)))
        # a dimension of size 1 may have been expanded, and one that no other tensor has was summed alone
        seen = {x: [of[x] for of in (of_g, of_other) if x in of] for x in own}
        stays = [
            x for x, n in zip(own, operand.shape, strict=True) if seen[x] and (n != 1 or all(k == 1 for k in seen[x]))
        ]
        operands, wanted = (
            ",".join("".join(map(names.__getitem__, x)) for x in xs) for xs in ((output, theirs), (stays,))
        )
        gradient_part = einsum(f"{operands}->{wanted}", g, other)
        for d, x in enumerate(own):
            gradient_part = gradient_part if x in stays else unsqueeze(gradient_part, d)
        return expand(gradient_part, operand.shape)

    (a, b), (left, right) = operands, inputs
    return None, gradient(a, left, b, right), gradient(b, right, a, left)


@alias(torch.einsum, torch.functional.einsum, over=einsum)
def _einsum(*args, **kwargs):
    """One operand of which nothing is summed is shown: views are recorded, so that writes are known to reach it."""
    (equation, *operands), kwargs = _arguments(args, kwargs)
    if len(operands) != 1 or not isinstance(operands[0], TensorProxy) or not _shows(equation, operands[0]):
        return einsum(equation, *operands, **kwargs)
    autocast = current_recorder().context.autocast  # type: ignore[union-attr]
    if autocast is not None:
        (equation, *operands), kwargs = autocast(einsum, (equation, *operands), kwargs)
    return einsum.decomposition(equation, *operands)  # type: ignore[misc]


def _shows(equation: str, operand: TensorProxy) -> bool:
    try:
        (labels,), output = parse(equation, [len(operand.shape)])
    except RuntimeError:  # which the operation explains
        return False
    return set(labels) == set(output)


def _diagonals(t, labels: list):
    """Repeated labels of one operand name its diagonal."""
    while len(set(labels)) != len(labels):
        x = next(x for x in labels if labels.count(x) > 1)
        i = labels.index(x)
        j = labels.index(x, i + 1)
        t = ltorch.diagonal(t, 0, i, j)
        labels = [y for k, y in enumerate(labels) if k not in (i, j)] + [x]
    return t, labels


def _contract(a, left: list, b, right: list, later: set):
    """Two operands made one: batched over the labels both have and later ones need, summed over those nobody needs."""
    a, left = _sum_unneeded(a, left, later | set(right))
    b, right = _sum_unneeded(b, right, later | set(left))
    sizes_a, sizes_b = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    batch = [x for x in left if x in right and (x in later or sizes_a[x] != sizes_b[x])]
    summed = [x for x in left if x in right and x not in batch]
    rows, columns = [x for x in left if x not in right], [x for x in right if x not in left]
    x = _grouped(a, left, batch, rows, summed)
    y = _grouped(b, right, batch, summed, columns)
    out = matmul_prim(x, y)
    common = tuple(sizes_b[k] if sizes_a[k] == 1 else sizes_a[k] for k in batch)
    return reshape(out, (*common, *(sizes_a[k] for k in rows), *(sizes_b[k] for k in columns))), [
        *batch,
        *rows,
        *columns,
    ]


def _sum_unneeded(t, labels: list, needed: set):
    gone = tuple(i for i, x in enumerate(labels) if x not in needed)
    return (ltorch.sum(t, gone), [x for x in labels if x in needed]) if gone else (t, labels)


def _grouped(t, labels: list, batch: list, first: list, second: list):
    """`t` with its dimensions in the order batch, first, second, the latter two each made one dimension."""
    size = dict(zip(labels, t.shape, strict=True))
    t = permute(t, tuple(labels.index(x) for x in (*batch, *first, *second)))
    return reshape(t, (*(size[x] for x in batch), _product(size[x] for x in first), _product(size[x] for x in second)))


def _product(sizes):
    out = 1
    for n in sizes:
        out = out * n
    return out


def _sums_products(equation, *operands) -> bool:
    inputs, output = parse(equation, [len(t.shape) for t in operands])
    return any(sum(x in labels for labels in inputs) > 1 for labels in inputs for x in labels if x not in output)


# on the CPU it is the products inside that are cast
autocast.when.set(lambda kind, args, kwargs: kind != "cpu" or _sums_products(*args), einsum)


def _more_than_a_product(lower: dict, *args, **kwargs) -> bool:
    """Whether, on the CPU, there is more inside than one product of matrices: sums and products of elements, which are
    not cast."""
    (equation, *operands), _ = _arguments(args, kwargs)
    if "cpu" not in lower or len(operands) < 2 or operands[0].device.type != "cpu":
        return False
    try:
        inputs, output = parse(equation, [len(t.shape) for t in operands])
    except RuntimeError:  # which the operation explains
        return False
    return len(operands) > 2 or any(
        (x in inputs[0]) != (x in inputs[1]) for labels in inputs for x in labels if x not in output
    )


opaque.casts_inside(torch.einsum, when=_more_than_a_product)
derivatives.inexact.add(einsum)
derivatives.of_complex.set("PyTorch's", einsum)
