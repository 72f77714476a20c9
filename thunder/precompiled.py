"""`thunder.precompile` and `thunder.load`: a program in a file of the user's, for other processes and machines."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thunder import compat
from thunder.api import compiled_or_jit, jit
from thunder.compiled import compiled_of
from thunder.core.paths import Decision
from thunder.errors import OptionError, ProgramFileError
from thunder.programs import files
from thunder.programs.describe import MISSING, Unspeakable, find_named
from thunder.programs.entry import check_texts, key_of_missing
from thunder.programs.keep import document_for
from thunder.programs.regions import named_transforms
from thunder.programs.text import Damaged, written_text

__all__ = ["load", "precompile"]

MOST_PATHS = 16  # of a program with decisions by data, in one file
SUBSETS = 4  # outputs whose every subset may be differentiated without the others; of more, each one alone


def precompile(fn: Callable, *args: Any, path: str | os.PathLike, **kwargs: Any) -> Path:
    """Compiles the program of `fn(*args, **kwargs)`, without running it, and writes it to a file for `thunder.load`.

    If results require grad, the file also holds the backward, and the backwards of single results (a loss beside
    logits). If the function branches on the values of tensors, the file also holds the paths that these arguments do
    not take, up to MOST_PATHS. Other paths are captured when a call of the loaded function takes them.

    Args:
        fn: A function or module, compiled or not.
        args: Positional arguments of the call.
        path: The file to write.
        kwargs: Keyword arguments of the call.

    Returns:
        The path.

    Raises:
        ProgramFileError: If the program cannot be written. The message gives the reason.
        OSError: If the file cannot be written.
    """
    compiled = compiled_or_jit(fn)
    modes, _ = compat.without_stance(compat.modes_key())
    try:
        document, decisions = _document_of_path(compiled, modes, args, kwargs, ())
        others = _other_paths(decisions, lambda taken: _document_of_path(compiled, modes, args, kwargs, taken))
    except (Unspeakable, Damaged) as error:
        raise ProgramFileError(f"this program cannot be written to {path}: {error}") from None
    files.write(Path(path), document | {"paths": others}, None, files.key_of_user(make=True))
    return Path(path)


def _document_of_path(
    compiled: Any, modes: tuple, args: tuple, kwargs: dict, path: tuple[Decision, ...]
) -> tuple[dict, tuple[Decision, ...]]:
    """The document of the program whose decisions begin with `path`, with its backwards, and all of its decisions."""
    document, entry = document_for(compiled, modes, args, kwargs, path)
    connection = entry.connection
    if connection is not None:
        for missing in _subsets(sum(bool(r) for r in connection.requires_grad)):
            document["without"][key_of_missing(missing)] = written_text(
                connection.variants(missing), {}, named_transforms(compiled.options.transforms)
            )
    return document, entry.path


def _other_paths(decisions: tuple[Decision, ...], document_of: Callable) -> list[dict]:
    """The documents of the paths beside the one with these decisions: each decision by a comparison goes the other way.
    Paths that raise, or that no file can hold, are left out."""
    documents, pending = list[dict](), _flipped(decisions, 0)
    while pending and len(documents) < MOST_PATHS - 1:
        path = pending.pop(0)
        try:
            document, taken = document_of(path)
        except Exception:  # noqa: BLE001 - what the user's program raises on that path
            continue
        documents.append(document)
        pending += _flipped(taken, len(path))
    return documents


def _flipped(decisions: tuple[Decision, ...], start: int) -> list[tuple[Decision, ...]]:
    return [
        (*decisions[:i], decisions[i]._replace(answer=not decisions[i].answer))
        for i in range(start, len(decisions))
        if isinstance(decisions[i].answer, bool)
    ]


def _subsets(outputs: int) -> list[tuple[int, ...]]:
    """Places of the cotangents that may be missing."""
    places = range(outputs)
    if outputs <= SUBSETS:
        return [m for n in range(1, outputs) for m in itertools.combinations(places, n)]
    return [tuple(i for i in places if i != one) for one in places]


def load(path: str | os.PathLike, fn: Callable | None = None, *, trusted: bool = False, **options: Any) -> Any:
    """Returns `thunder.jit(fn, **options)` with the program of a file that `thunder.precompile` wrote.

    A call for which the guards of that program hold runs it without capture. Other calls are captured, and
    `thunder.compile_stats(...).not_loaded` lists the reasons.

    The file and its directory must belong to this user, and other users must not be able to write to them.

    Args:
        path: The file.
        fn: The function or module. It may be omitted for a function that can be imported by its module and name.
        trusted: If True, accepts a file that another user or another machine wrote. The program of such a file may only
            contain operations on tensors. Its first run checks the shapes and dtypes of each operator's inputs before
            the operator's kernel runs (ProgramFileError). What it computes is up to its author.
        options: The options that the program was compiled with, including transforms. The program reads the weights
            that the transforms quantize in this process.

    Raises:
        ProgramFileError: If the file is damaged or not trusted. The message gives the reason.
        OSError: If the file cannot be read.
    """
    try:
        document = files.read(Path(path), None, files.key_of_user(), trusted)
        name = document["metadata"]["function"]
        own = {part: document[part] for part in ("metadata", files.FOREIGN)}
        documents = [document, *(other | own for other in document["paths"])]
        for one in documents:
            check_texts(one)
    except (AttributeError, Damaged, KeyError, TypeError) as error:
        raise ProgramFileError(f"{path} is not loaded: {error}") from None
    if fn is None:
        module, _, qualified = name.rpartition(".")
        fn = find_named(module, qualified)
        if fn is MISSING or isinstance(fn, type):
            raise OptionError(f"{path} is a program of {name}: give the function or the module, load(path, fn)")
    compiled_fn = fn if compiled_of(fn) is not None else jit(fn, **options)
    compiled = compiled_of(compiled_fn)
    assert compiled is not None, "thunder.jit compiles"
    compiled.documents = (*compiled.documents, *documents)
    return compiled_fn
