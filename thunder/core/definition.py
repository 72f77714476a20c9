"""Definition: the facts about an operation that passes and executors ask for, as typed fields.

The family of an operation sets its facts; the pass that reads a field defines its meaning. A field may be a function of
a bound symbol, or of the arguments, where the fact depends on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from typing import Any, Literal, NamedTuple


class Unfit(RuntimeError):
    """An operation refuses its arguments. `infer.as_pytorch` finds PyTorch's words for it."""


def holds(fact: bool | Callable[[Any], bool], bound_symbol) -> bool:
    """Whether a fact that may depend on the bound symbol holds for one."""
    return fact(bound_symbol) if callable(fact) else fact


class InPlaceForm(NamedTuple):
    """function: takes the operation's arguments, and overwrites some of them. overwrites: {place of a result: place of
    the argument that it overwrites}, or a function from the bound symbol to {place of a result: tensor}."""

    function: Callable
    overwrites: dict[int, int] | Callable[[Any], dict[int, Any]]


@dataclasses.dataclass(eq=False, slots=True)
class Definition:
    """What is known of an operation beyond its type rule, its decomposition and its derivative. Each field is false, or
    says nothing, until the operation's family sets it."""

    # --- what it computes
    elementwise: bool = False
    """Computes each element of its results from those in the same place of its operands, after broadcasting."""
    reshapes: bool = False
    """Gives all elements of its operand, in their order, another shape."""
    selects: bool = False
    """Reads as many elements of its first operand as its result has."""
    checks_data: bool | Callable[[Any], bool] = False
    """Raises for what it reads (an index out of range), which would end the process in a generated kernel; or a
    function of the bound symbol."""
    may_raise: bool | Callable[[Any], bool] = False
    """Raises for some values of its operands (a singular matrix), beside what `checks_data` says; or a function of the
    bound symbol. So it runs where eager PyTorch runs it, even if nobody uses its results."""
    inductor_loops: bool = True
    """Inductor computes it in a loop, with PyTorch's results."""
    layout: Literal[
        "as operands", "second operand first", "row-major", "preserved", "memory format", "own", "as decomposition"
    ] = "as operands"
    """How PyTorch lays out the result: as TensorIterator does, likewise with the operands in another order, row-major,
    as `empty_like` does, in the memory format of the operands, otherwise, or as the decomposition says."""
    typed_by_running: bool = False
    """Its meta rule runs PyTorch, so that it knows which results require grad as well."""
    bind_postprocess: Callable | None = None
    """Called with each bound symbol that is recorded; what it returns takes its place."""

    condition: Callable[[Any, Any], str] | None = None
    """(bound symbol, printer): printed before a call, so that it is not made where it would do nothing: `n > 0 or`."""

    declared_outside: bool = False
    """Somebody who extends thunder declared it, so that its results are compared with the declaration."""

    # --- derivatives
    nondifferentiable: Container[int] = ()
    """Places of the results that never require grad."""
    reaches_all: bool = False
    """PyTorch has a derivative for each floating operand, so that no examples are differentiated to see which."""
    detaches: Callable[..., bool] | None = None
    """(*args, **kwargs): whether the results do not require grad, whatever the arguments do."""
    differentiate_decomposition: bool | Callable[..., bool] = False
    """PyTorch composes it of the same operations, so that these are differentiated; or a function of the arguments."""
    complex_derivative: Literal["holomorphic", "as written", "PyTorch's"] = "holomorphic"
    """What its rule is for complex operands: that of a holomorphic function, so that what multiplies a cotangent is
    conjugated; right as it is written; or not right, so that PyTorch's derivative is taken."""
    conjugates: bool = False
    """A kernel of derivatives that conjugates the complex numbers which it multiplies cotangents by."""
    functional_derivative: Callable | None = None
    """The rule in its place where a second derivative may follow."""
    forward_derivative: Callable | None = None
    """The rule in its place in forward mode, where an `autograd.Function` has a jvp of its own."""
    exact_derivative: bool = True
    """Its rule rounds as PyTorch's derivative does."""
    linear: Callable[..., bool] | None = None
    """(args, is_multiple, is_zero): whether the result is a multiple of the operands that are multiples."""
    from_uniform: Callable | None = None
    """(draw, *args, **kwargs): a random operation as a function of numbers from [0, 1), which `draw(shape, device)`
    gives; NotImplemented for arguments it does not know."""
    batching: Callable | None = None
    """(batch, bound symbol): what computes the operation for each element of a batch; None where that is not known."""
    unknown_to_vmap: bool | Callable[[Any], bool] = False
    """torch.vmap refuses it, or computes something else; or a function of the bound symbol."""
    own_derivative: bool = False
    """A `torch.autograd.Function`: its derivative need not be that of its decomposition."""
    once_differentiable: str | None = None
    """Why it has no second derivative, for the error."""
    formula: Callable | None = None
    """What a kernel computes, in operations: where the kernel is differentiated, these are."""
    accepts_missing_cotangents: bool = False
    """A backward that takes None in the place of a cotangent."""
    regathers: Callable[[Any], bool] | None = None
    """(bound symbol): whether backwards compute its result again, whatever that costs, as they gather parameters."""
    statistics: tuple[int, ...] = ()
    """Places of the arguments that gradients do not depend on, as a backward kernel's running statistics."""
    vjp_halves: list | None = None
    """The augmented forward and the backward that a user registered."""

    splitting: Callable | None = None
    """(split, bound symbol): the part of its result that a rank computes from its parts of operands; None where that
    is not known."""

    # --- aliases and mutation
    may_view: Callable[..., bool] | None = None
    """(*args, **kwargs): whether the results of a VIEW operation may share memory with its first tensor."""
    shows: int | None = None
    """The place of the argument whose memory the result of a VIEW operation shows, where it has several tensors."""
    may_copy: bool = False
    """A VIEW operation that copies where the strides do not allow a view."""
    view_inverse: Callable | None = None
    """(bound symbol, view, whole, part): `whole` with `part` in the place of the view; None where it is not known
    whether the operation made a view."""
    several_views: bool = False
    """Gives several views, none of which PyTorch's autograd lets a program write to."""
    undo: Callable | None = None
    """(tensor, *args): the operation, and its arguments, that undoes the in-place form, which changes what a tensor is
    and not what it holds; None where nothing does."""
    in_place: InPlaceForm | None = None
    """How it runs in place where PyTorch's form with a trailing underscore does not follow from its name."""
    check_in_place: Callable | None = None
    """(*args, **kwargs): raises PyTorch's error for what the in-place form refuses and the operation does not."""
    changes_metadata: bool = False
    """Changes an argument's shape or strides in place."""

    # --- modes
    autocast_when: Callable[[str, tuple, dict], bool] | None = None
    """(kind of device, args, kwargs): whether autocast casts the arguments; without it, always."""

    # --- execution
    asks_autograd: bool = False
    """Its effect depends on the inputs that autograd wants gradients of (`runtime.wanted`)."""
    synchronises: bool | Callable[[Any], bool] = False
    """PyTorch's kernel waits for the device: it looks at data or copies it to or from the host; or a function of the
    bound symbol."""
    holds_generator: bool = False
    """Asks for the state of a generator, or sets it."""
    owns_result: bool = False
    """PyTorch's kernel writes its result to memory that nobody else has."""
    aligned: Callable | None = None
    """(*args, **kwargs): a product that is fast for odd sizes and aligns the rows of its result
    (`ops/families/aligned.py`)."""
    in_float32: Callable | None = None
    """(*args): a product of half precision with its result in float32, in which it is added up."""
    takes_rows_apart: bool = False
    """Reads rows that are apart as fast as others; a result that is no product may have its operand's memory."""
    converts_numbers: tuple[int, ...] = ()
    """Places of operands: of numbers there its kernel on the CPU makes tensors of its type in each call."""
    accumulates: bool = False
    """Adds to its first operand: in place where that dies, as PyTorch's autograd does."""

    # --- cost
    factors: tuple[int, int] = (0, 1)
    """Places among the tensors of the two operands that a product multiplies."""
    multiply_adds: Callable[[Any], float] | None = None
    """(bound symbol): multiplications and additions, where it is no single product of two operands."""
    rate: str | None = None
    """The field of `Machine` with the rate of its multiplications and additions, where it is not that of products."""
    kernels: int = 1
    """How many kernels PyTorch launches for it."""
    scratch: Callable[[Any], int] | None = None
    """(bound symbol): bytes that it allocates beside its results."""

    def take_facts(self, other: Definition) -> None:
        """Makes all facts of another operation those of this one, which executes it."""
        for field in _FIELDS:
            setattr(self, field, getattr(other, field))


_FIELDS = tuple(field.name for field in dataclasses.fields(Definition))
