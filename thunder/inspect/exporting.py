"""`thunder.export`: a program as a file of `torch.export`, or as a package of AOTInductor."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from thunder import compat
from thunder.api import compiled_or_jit
from thunder.cache.entry import CacheEntry
from thunder.capture.world import Source
from thunder.compiled import Compiled
from thunder.core.paths import Decision
from thunder.core.proxies import NumberProxy
from thunder.core.pytree import tree_flatten, tree_unflatten
from thunder.core.symbol import OpTags, Symbol
from thunder.core.symbolic import RELATIONS
from thunder.core.trace import Trace
from thunder.core.unbacked import check_sizes
from thunder.errors import MissingImplementationError, ProgramFileError
from thunder.extend import get_always_executors
from thunder.inspect.explain import explained
from thunder.inspect.exported import Exported, NotExported, Origin, tree_of_paths
from thunder.inspect.plain import NoPlainProgram
from thunder.inspect.verification.programs import generators_restored
from thunder.options import NUMERICS_OPTIONS, DebugOptions
from thunder.pipeline import PASSES

__all__ = ["export"]

MOST_SIZES = 4096  # for which a value that a program computes of sizes is checked
FORMATS = ("torch.export", "aot_inductor")
_NAMESPACES = ("aten", "prims", "higher_order", "_operator", "math", "torch")


def export(
    fn: Callable, path: str | Path, /, *args: Any, dynamic_shapes: Any = None,
    format: Literal["torch.export", "aot_inductor"] = "torch.export", **kwargs: Any,
) -> Path:  # fmt: skip
    """Writes the program of `fn(*args, **kwargs)` and its parameters to a file that runs without thunder and without
    the code of `fn`.

        thunder.export(model.eval(), "model.pt2", x)
        served = torch.export.load("model.pt2").module()  # in another process

    The program computes no gradients. Branches on the values of tensors become `torch.cond`.

    Args:
        fn: A compiled function or module, or one that `thunder.jit` accepts. Its transforms are part of the program:
            quantized weights stay quantized.
        path: The file to write.
        args: Positional arguments of the program.
        dynamic_shapes: The sizes that may change, as for torch.export: `({0: torch.export.Dim("batch", min=2)},)`. All
            other sizes and numbers are fixed to those of the arguments. The loaded program checks both in each call.
        format: "torch.export", or "aot_inductor" for a package of machine code, which `aoti_load_package` of Inductor
            loads in Python and `torch::inductor::AOTIModelPackageLoader` loads in C++.
        kwargs: Keyword arguments of the program.

    Raises:
        ProgramFileError: If the program has something that the format does not support: calls of Python on the host,
            side effects, results other than tensors and numbers in tuples, lists and dicts, integers computed from
            data, or operations that PyTorch does not have.
        CaptureError: If the function cannot be captured.
        OSError: If `path` cannot be written. This is checked before anything is compiled.
    """
    if format not in FORMATS:
        raise ValueError(f"thunder.export: format is {format!r}; valid: {', '.join(FORMATS)}")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"thunder.export(fn, path, *args): path is a {type(path).__name__}, valid: a file's name")
    _check_target(Path(path))
    compiled = compiled_or_jit(fn)
    options = dataclasses.replace(
        compiled.options, executors=get_always_executors(), passes=PASSES, dynamic=dynamic_shapes is not None,
        numerics=NUMERICS_OPTIONS.EAGER, debug=DebugOptions(), used_compile_options={}, numbers_may_change=False,
    )  # fmt: skip
    plain = Compiled(compiled.fn, options)
    plain.overrides, plain.module = compiled.overrides, compiled.module
    try:
        with generators_restored(), torch.no_grad():
            shapes = _of_varargs(dynamic_shapes, kwargs)
            module = _exported(plain, args, kwargs, dynamic_shapes)
            program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
        _check_operators(program)
    except (NotExported, NoPlainProgram, MissingImplementationError) as error:
        raise ProgramFileError(f"this program cannot be exported to {path}: {error}") from error
    except compat.export_error as error:
        what = (
            "dynamic_shapes= are not those of this program (torch.export fixes a size that PyTorch runs a loop over, "
            "such as the length of nn.LSTM and nn.GRU: leave it out, and write a file for each length)"
            if dynamic_shapes
            else "torch.export refuses this program"
        )
        raise ProgramFileError(f"{what}: {error}") from error
    except compat.number_by_data_error as error:
        raise ProgramFileError(
            f"this program cannot be exported to {path}: data makes a whole number (int() of a tensor, or a size), of "
            f"which torch.export needs the value. Return a tensor, or a float: {str(error).splitlines()[0]}"
        ) from error
    if format == "aot_inductor":
        compat.aoti_compile_and_package(program, package_path=str(path))
    else:
        torch.export.save(program, path)
    return Path(path)


def _check_target(path: Path) -> None:
    """Raises OSError where no file can be written to a path."""
    folder, code = path.absolute().parent, 0
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "thunder.export: create the folder first, it does not exist", str(folder))
    if path.is_dir():
        code = errno.EISDIR
    elif not os.access(path if path.exists() else folder, os.W_OK):
        code = errno.EACCES
    if code:
        raise OSError(code, f"thunder.export: {os.strerror(code)}", str(path))


def _of_varargs(dynamic_shapes: Any, kwargs: dict) -> Any:
    """`dynamic_shapes` of a function, as torch.export takes them for the module, whose arguments are `*args` and
    `**kwargs`."""
    if dynamic_shapes is None:
        return None
    if isinstance(dynamic_shapes, dict):
        raise ProgramFileError(
            "dynamic_shapes= is a dict: give a tuple with an entry for each positional argument, and None for those "
            "without changing sizes"
        )
    return (tuple(dynamic_shapes), *([dict.fromkeys(kwargs)] if kwargs else []))


def _exported(plain: Compiled, args: tuple, kwargs: dict, dynamic_shapes: Any) -> Exported:
    """The module that torch.export records."""
    entry, inputs = plain.entry_for(args, kwargs)
    places, held, relations = dict[str, Origin](), dict[str, torch.Tensor](), dict[tuple, bool]()

    def program(entry: CacheEntry, inputs: Sequence[Any]) -> Trace:
        """The operations of an entry; notes its inputs."""
        trace = _checked(entry)
        relations.update(entry.captured.decisions.relations)
        sources = dict(zip((a.name for a in entry.captured.computation_traces[0].args), entry.captured._input_sources))
        for argument, value in zip(trace.args, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                origin = Origin(next((i for i, x in enumerate(tree_flatten((args, kwargs))[0]) if x is value), None))
                if origin.leaf is None and held.setdefault(argument.name, value) is not value:
                    raise NotExported(f"{argument.name} is another tensor after a branch")
            elif isinstance(argument, NumberProxy) and argument.name in sources:
                origin = _place_of_number(sources[argument.name], args, kwargs)
            else:
                raise NotExported(f"{argument.name} is a number or an object that a host call returns")
            places[argument.name] = origin
        return trace

    def other(path: tuple[Decision, ...]) -> tuple[Trace, tuple[Decision, ...]]:
        with plain._lock:
            entry = plain._compile(compat.modes_key(), args, kwargs, path)
        return program(entry, plain._inputs(entry, args, kwargs)), entry.path

    run = tree_of_paths(program(entry, inputs), entry.path, other, dynamic_shapes is not None)
    bounds = _bounds(args, dynamic_shapes)
    ranges = {name: bounds.get(origin, (2, None)) for name, origin in places.items() if origin.dimension is not None}
    return Exported(run, places, held, _without_computed(relations, ranges))


def _bounds(args: tuple, dynamic_shapes: Any) -> dict[Origin, tuple[int, int | None]]:
    """The least and the largest value of each size that changes, as `dynamic_shapes` says it."""
    ranges, leaf = {}, itertools.count()

    def walk(value: Any, shapes: Any) -> None:
        if isinstance(value, (list, tuple)):
            for i, inner in enumerate(value):
                walk(inner, shapes[i] if isinstance(shapes, (list, tuple)) and i < len(shapes) else None)
        elif isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, shapes.get(key) if isinstance(shapes, dict) else None)
        else:
            position = next(leaf)
            for d, dim in (shapes if isinstance(shapes, dict) else dict(enumerate(shapes or ()))).items():
                most = getattr(dim, "max", None)
                bounded = isinstance(most, int) and most < MOST_SIZES
                ranges[Origin(position, d)] = getattr(dim, "min", 2), most if bounded else None

    walk(args, dynamic_shapes)
    return ranges


def _without_computed(relations: dict[tuple, bool], ranges: dict[str, tuple[int, int | None]]) -> dict[tuple, bool]:
    """Relations between sizes, without those of numbers that PyTorch's operations compute of sizes, which torch.export
    cannot check. These are checked here, for every size there may be.

    A mask of ones is an example: transformers asks in each call whether all positions of a batch follow each other.
    """
    between_arguments = {}
    for (a, relation, b), holds in relations.items():
        if not a.computed() | b.computed():
            between_arguments[a, relation, b] = holds
            continue
        names = sorted(a.symbols() | b.symbols())
        sizes = [ranges.get(name, (2, None)) for name in names]
        count = math.prod(most - least + 1 if most is not None else MOST_SIZES + 1 for least, most in sizes)
        if count > MOST_SIZES:
            raise NotExported(
                f"it branches on a value that it computes from sizes, which is checked for each size: give these sizes "
                f"a max= in dynamic_shapes, so that there are at most {MOST_SIZES:,} of them"
            )
        for values in itertools.product(*(range(least, (most or 0) + 1) for least, most in sizes)):
            known = dict(zip(names, values, strict=True))
            if RELATIONS[relation](a.evaluate(known), b.evaluate(known)) is not holds:
                raise NotExported(
                    f"it branches on a value that it computes from sizes, and the outcome differs for {values}"
                )
    return between_arguments


def _checked(entry: CacheEntry) -> Trace:
    """The operations of a captured program. Raises NotExported for what PyTorch's formats do not have."""
    captured = entry.captured
    if captured.host_calls:
        calls = ", ".join(sorted({call.what for call in explained(entry, {})})[:3])
        raise NotExported(f"it calls Python on the host ({calls}): call that outside of the exported function")
    if entry.epilogue_fn is not None:
        raise NotExported(
            "it writes to arguments or other objects, or it returns an object that is not a tensor, tuple, list or "
            "dict: export a function that returns tensors, such as lambda tokens: model(tokens).logits"
        )
    trace = captured.computation_traces[-1]
    # torch.export types operations itself, and keeps the sizes of their results
    operations = [operation for operation in trace.bound_symbols if operation.sym is not check_sizes]
    for operation in operations:
        _check_effects(operation.sym)
    return trace.replace(bound_symbols=operations)


def _check_effects(symbol: Symbol) -> None:
    """Raises NotExported for an operation that does more than to compute its results in PyTorch."""
    if OpTags.DECISION in symbol.tags:
        return
    if OpTags.RANDOM_OP in symbol.tags:
        raise NotExported(f"it draws random numbers ({symbol.name}): call eval() on the module, or pass them in")
    if OpTags.OPAQUE in symbol.tags and symbol.declared_outside:
        raise NotExported(f"it calls {symbol.name}, which is Python code: call that outside of the exported function")
    if not symbol.tags.isdisjoint((OpTags.DONT_DCE, OpTags.IN_PLACE)):
        raise NotExported(f"{symbol.name} writes to its arguments, or has another effect: call it outside")


def _place_of_number(source: Source, args: tuple, kwargs: dict) -> Origin:
    """Where a symbolic number comes from: a number among the arguments, or a size of one."""
    leaves, structure = tree_flatten((args, kwargs))
    numbered_args, numbered_kwargs = tree_unflatten(range(len(leaves)), structure)
    roots = {"args": numbered_args, "kwargs": numbered_kwargs}

    def leaf(source: Source) -> Any:
        if source.base is None:
            return roots.get(source.key)
        return None if (base := leaf(source.base)) is None else source.fetch(base, {})

    is_size = source.step == "size"
    try:
        position = leaf(source.base if is_size else source)
    except (AttributeError, KeyError, IndexError, TypeError):
        position = None
    if type(position) is not int:
        raise NotExported("it reads a number or a size of an object that is not an argument: pass it as an argument")
    return Origin(position, source.key if is_size else None)


def _check_operators(program: torch.export.ExportedProgram) -> None:
    """Raises NotExported where another process would need more than PyTorch to load a program."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function" and (name := _namespace(node.target)) not in _NAMESPACES:
                raise NotExported(f"it calls {node.target}, which is an operator of {name}")


def _namespace(target: Any) -> str:
    return getattr(target, "namespace", None) or (getattr(target, "__module__", None) or "").partition(".")[0]
