"""How operations are defined: one op, one place.

`prim` makes an operation that stands for itself: the decorated function is its meta rule. `composite` makes an
operation with PyTorch's semantics: the decorated function says what it means in terms of other operations. From a
definition follow the `ltorch` symbol, the method on proxies, the in-place form, what the torch executor calls and
prints, and the tests: there is no second registration.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable

import torch

from thunder import compat
from thunder.compat.names import NN_BINDINGS
from thunder.core.definition import InPlaceForm
from thunder.core.proxies import METHODS
from thunder.core.symbol import OpTags, Symbol, is_outside
from thunder.ops import infer

LTORCH: dict[str, Symbol] = {}  # operations with PyTorch's semantics, by name
PRIMS: dict[str, Symbol] = {}  # operations without broadcasting, promotion or defaults, by name
_BY_TORCH: dict[Callable, Callable] = {}
# qualified name of an operator that a library registered with torch.library -> what it means in terms of operations
SUBSTITUTES: dict[str, Callable] = {}
_INPLACE: dict[Callable, Symbol] = {}  # torch's in-place callable -> the operation whose result it writes back


def attributes_of(table: dict[str, Symbol], namespace: dict[str, object], words: str) -> Callable[[str], Symbol]:
    """`__getattr__` of a module whose names are a table's symbols. words: what the names are, in errors."""

    def attribute(name: str) -> Symbol:
        try:
            symbol = namespace[name] = table[name]
        except KeyError:
            raise AttributeError(f"there is no {words}.{name}") from None
        return symbol

    return attribute


def lookup(function) -> Callable | None:
    """The operation (or alias of operations) that a torch function, Tensor method or C builtin stands for; None where
    it has no definition here."""
    try:
        operation = _BY_TORCH.get(function)
    except TypeError:  # unhashable: no function of torch's
        return None
    if operation is None and SUBSTITUTES and isinstance(function, (compat.OpOverloadPacket, compat.OpOverload)):
        return SUBSTITUTES.get(str(getattr(function, "_qualified_op_name", None) or function._schema.name))
    return operation


def operation_of(function: Callable) -> Symbol | None:
    """The operation that a torch function stands for; where the arguments decide which, the one of its name, and else
    the usual one. None for other functions."""
    operation = lookup(function)
    if operation is not None and not isinstance(operation, Symbol):
        operation = LTORCH.get(getattr(function, "__name__", ""), getattr(operation, "__wrapped__", None))
    return operation if isinstance(operation, Symbol) else None


def inplace_of(function) -> Symbol | None:
    """For an in-place callable of torch (`torch.Tensor.add_`): the operation it applies and writes back."""
    try:
        return _INPLACE.get(function)
    except TypeError:
        return None


_NAMESPACES = [
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
    ("torch.fft", torch.fft),
    ("Tensor", torch.Tensor),
    (NN_BINDINGS, compat.nn_bindings),
    ("torch.ops.aten", torch.ops.aten),
]


def torch_path(function: Callable) -> tuple[str, str] | None:
    """(printed module, name) under which a function of torch's is found, e.g. ("torch.nn.functional", "linear")."""
    name = getattr(function, "__name__", None)
    if name is None:
        return None
    short = name.partition("_")[2]  # torch.linalg.inv calls itself linalg_inv
    for module, space in _NAMESPACES[:-1]:
        if getattr(space, name, None) == function:
            return module, name
        if short and getattr(space, short, None) == function:
            return module, short
    return None


_users_define = False


def let_users_define() -> None:
    """Ends thunder's own definitions, in which a function that is neither thunder's nor PyTorch's is one that the user
    has put in the place of PyTorch's. From now on it is one that the user defines an operation for."""
    global _users_define
    _users_define = True


def _means(function: Callable, meaning: Callable, over: Callable | None = None) -> None:
    """Makes `meaning` what a function stands for, unless the user has put it in the place of PyTorch's (see
    `let_users_define`). Raises ValueError where it stands for another operation."""
    if is_outside(function) and not _users_define:
        return
    before = _BY_TORCH.get(function)
    if before is not None and before is not meaning and before is not over:
        raise ValueError(
            f"{getattr(function, '__name__', function)} is the operation {before!r} already, and cannot be {meaning!r}"
        )
    _BY_TORCH[function] = meaning
    name = getattr(function, "__name__", "")
    if getattr(torch.Tensor, name, None) == function:
        METHODS[name] = meaning


def register(
    symbol: Symbol, *torch_functions: Callable, method: str | None = None, properties: tuple[str, ...] = ()
) -> Symbol:
    """Makes `symbol` the meaning of some torch functions; the first one is what the torch executor calls and prints.

    A Tensor method among them becomes a method of proxies, and where Tensor has the same name with a trailing
    underscore, that is its in-place form.
    """
    symbol.torch_functions = torch_functions
    if torch_functions and symbol.fn is None:
        symbol.fn = torch_functions[0]
    for function in torch_functions:
        _means(function, symbol)
        name = getattr(function, "__name__", "")
        if getattr(torch.Tensor, name, None) == function:
            register_inplace(symbol, name)
    if method is not None:
        METHODS[method] = symbol
    for name in properties:
        METHODS.properties[name] = symbol
        descriptor = getattr(torch.Tensor, name, None)
        if isinstance(descriptor, (types.GetSetDescriptorType, property)):
            _means(descriptor.__get__, symbol)
    return symbol


def register_inplace(symbol: Symbol, name: str) -> None:
    """Makes every callable of PyTorch's called `name_` the in-place form of `symbol`."""
    for space in (torch.Tensor, torch, torch.nn.functional, compat.nn_bindings):
        function = getattr(space, f"{name}_", None)
        if function is not None and not name.startswith("__"):
            if _INPLACE.setdefault(function, symbol) is not symbol:
                raise ValueError(f"{name}_ is the in-place form of {_INPLACE[function]!r} already, not of {symbol!r}")
            if symbol.in_place is None:
                symbol.in_place = InPlaceForm(function, {0: 0})


def register_list_inplace(symbol: Symbol, function: Callable | None) -> None:
    """Makes `function` the in-place form of a symbol on lists: each result overwrites the tensor at its place in the
    first argument."""
    if function is not None:
        _INPLACE[function] = symbol
        symbol.in_place = InPlaceForm(
            function,
            lambda operation: (
                dict(enumerate(operation.args[0])) if isinstance(operation.args[0], (tuple, list)) else {}
            ),
        )


@functools.cache
def operand_places(*functions: Callable) -> dict[str, int]:
    """Where functions of PyTorch take their operands, tensors and numbers, by the names that they, or numpy, have for
    them."""
    places: dict[str, int] = {}
    for function in functions:
        if isinstance(function, types.FunctionType):
            operands = itertools.takewhile(
                lambda p: p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty,
                inspect.signature(function).parameters.values(),
            )
            places = {p.name: i for i, p in enumerate(operands)} | places
            continue
        for schema in compat.schemas_of(f"aten::{getattr(function, '__name__', '')}"):
            operands = [
                (i, a.name)
                for i, a in enumerate(schema.arguments)
                if not a.kwarg_only and str(a.type).removeprefix("Optional[").startswith(("Tensor", "number"))
            ]
            places = {name: i for i, name in operands} | places
    places = {"input": places.get("self", 0)} | places
    numpys = {"a": "input", "x": "input", "x1": "input", "x2": "other"}
    return {name: places[ours] for name, ours in numpys.items() if ours in places} | places


def _define(symbol: Symbol, torch_functions: tuple, **options) -> Symbol:
    """torch_functions: None among them stands for one that this PyTorch does not have."""
    symbol.explain, symbol.places = infer.as_pytorch, operand_places
    return register(symbol, *(f for f in torch_functions if f is not None), **options)


def prim(
    fn: Callable | None = None, *, name: str | None = None, tags: tuple[OpTags, ...] = ()
) -> Callable[[Callable], Symbol]:
    """Defines a primitive: the decorated function is its meta rule, `fn` computes it on real tensors."""

    def define(meta: Callable) -> Symbol:
        symbol = Symbol(name or meta.__name__, meta, module="prims", is_prim=True, tags=tags, fn=fn)
        assert symbol.name not in PRIMS, f"the primitive {symbol.name} is defined twice"
        PRIMS[symbol.name] = symbol
        return symbol

    return define


def composite(
    *torch_functions: Callable,
    name: str | None = None,
    meta: Callable | None = None,
    method: str | None = None,
    properties: tuple[str, ...] = (),
    tags: tuple[OpTags, ...] = (),
    autocast: str | None = None,
    canonicalize: Callable | None = None,
    fn: Callable | None = None,
) -> Callable[[Callable], Symbol]:
    """Defines an operation with PyTorch's semantics: the decorated function is its decomposition.

    torch_functions: the functions and Tensor methods it is the meaning of; the first is called with the recorded
    arguments to execute it (`fn` where given). meta: types it without running the decomposition. method, properties:
    further names on proxies. autocast: "lower", "float32" or "widest", what torch.autocast casts its arguments to.
    canonicalize: (args, kwargs) -> (args, kwargs), applied before the call is recorded.
    """

    def define(decomposition: Callable) -> Symbol:
        symbol = Symbol(
            name or decomposition.__name__, meta, module="ltorch", decomposition=decomposition, tags=tags, fn=fn
        )
        symbol.autocast, symbol.canonicalize = autocast, canonicalize
        assert symbol.name not in LTORCH, f"the operation {symbol.name} is defined twice"
        LTORCH[symbol.name] = symbol
        return _define(symbol, torch_functions, method=method, properties=properties)

    return define


def alias(*torch_functions: Callable, over: Callable | None = None) -> Callable[[Callable], Callable]:
    """The decorated function says what some torch callables mean in terms of defined operations; only those are
    recorded, not an operation of its own. over: the operation that they stand for, which the function calls."""

    def define(function: Callable) -> Callable:
        for torch_function in torch_functions:
            _means(torch_function, function, over)
        return function

    return define


def by_example(*torch_functions: Callable, name: str | None = None, **options) -> Symbol:
    """Defines a rare operation, whose derivative is PyTorch's and whose type is what PyTorch gives for tensors without
    memory (`infer.typed_on_meta`): a function of tensors on one device that looks at no values and gives no views.
    Symbolic sizes become constants. Not for functions that PyTorch types in Python, which imports sympy."""
    symbol = torch_prim(*torch_functions, name=name or torch_functions[0].__name__, **options)(
        infer.typed_on_meta(torch_functions[0])
    )
    symbol.typed_by_running = True
    return symbol


def torch_prim(*torch_functions: Callable, name: str | None = None, **options) -> Callable[[Callable], Symbol]:
    """Defines an operation that PyTorch computes in one piece and that has no useful decomposition: the decorated
    function is its meta rule."""

    def define(meta: Callable) -> Symbol:
        symbol = Symbol(
            name or meta.__name__,
            meta,
            module="ltorch",
            is_prim=True,
            tags=options.pop("tags", ()),
            fn=options.pop("fn", None),
        )
        symbol.autocast, symbol.canonicalize = options.pop("autocast", None), options.pop("canonicalize", None)
        assert symbol.name not in LTORCH, f"the operation {symbol.name} is defined twice"
        LTORCH[symbol.name] = symbol
        return _define(symbol, torch_functions, **options)

    return define
