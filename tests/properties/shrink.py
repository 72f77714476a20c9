"""Drop parts of a program that is wrong until it is wrong only with every part that is left."""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable

from tests.properties.compared import Program

_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def _edits(tree: ast.AST, expressions: bool) -> list[Callable[[], None]]:
    """The changes that make a tree smaller by one part, each in place; statements from the outside in."""
    edits: list[Callable[[], None]] = []
    for node in ast.walk(tree):
        for block in _BLOCKS:
            statements = getattr(node, block, None)
            if not isinstance(statements, list):
                continue
            needed = block == "body" and not isinstance(node, ast.Module)
            for i in range(len(statements) - 1, -1, -1):
                statement = statements[i]
                if not (isinstance(statement, ast.Pass) and len(statements) == 1):
                    edits.append(lambda s=statements, i=i, n=needed: _remove(s, i, n))
                if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
                    edits.append(lambda s=statements, i=i: s.__setitem__(slice(i, i + 1), s[i].body))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            edits += [lambda n=node, i=i: n.decorator_list.pop(i) for i in range(len(node.decorator_list))]
        if isinstance(node, ast.ClassDef):
            edits += [lambda n=node, i=i: n.bases.pop(i) for i in range(len(node.bases))]
            edits += [lambda n=node, i=i: n.keywords.pop(i) for i in range(len(node.keywords))]
    if expressions:
        for node in ast.walk(tree):
            edits += _expression_edits(node)
    return edits


def _remove(statements: list, i: int, needed: bool) -> None:
    del statements[i]
    if needed and not statements:
        statements.append(ast.Pass())


def _expression_edits(node: ast.AST) -> list[Callable[[], None]]:
    edits: list[Callable[[], None]] = []
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        edits += [lambda n=node, i=i: n.elts.pop(i) for i in range(len(node.elts) - 1, -1, -1)]
    elif isinstance(node, ast.Dict):
        edits += [lambda n=node, i=i: (n.keys.pop(i), n.values.pop(i)) for i in range(len(node.keys) - 1, -1, -1)]
    elif isinstance(node, ast.Call):
        edits += [lambda n=node, i=i: n.args.pop(i) for i in range(len(node.args) - 1, -1, -1)]
        edits += [lambda n=node, i=i: n.keywords.pop(i) for i in range(len(node.keywords))]
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            for part in _parts(value):
                edits.append(lambda n=node, name=name, part=part: setattr(n, name, part))
        elif isinstance(value, list):
            for i, one in enumerate(value):
                if isinstance(one, ast.expr):
                    for part in _parts(one):
                        edits.append(lambda v=value, i=i, part=part: v.__setitem__(i, part))
    return edits


def _parts(e: ast.expr) -> list[ast.expr]:
    """Expressions that may stand in the place of `e`."""
    if isinstance(getattr(e, "ctx", None), ast.Store | ast.Del):
        return []
    if isinstance(e, ast.BinOp):
        return [e.left, e.right]
    if isinstance(e, ast.BoolOp):
        return list(e.values)
    if isinstance(e, ast.Compare):
        return [e.left, e.comparators[-1]]
    if isinstance(e, ast.IfExp):
        return [e.body, e.orelse]
    if isinstance(e, ast.Call):
        return [a for a in e.args if not isinstance(a, ast.Starred)]
    if isinstance(e, ast.List | ast.Tuple | ast.Set) and e.elts:
        return [a for a in e.elts[:2] if not isinstance(a, ast.Starred)]
    if isinstance(e, ast.UnaryOp):
        return [e.operand]
    if isinstance(e, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        return [e.generators[0].iter]
    return []


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 600) -> Program:
    """A smallest program that still `fails`, by one change at a time, for as many `tries`."""
    program = Program(_normal(program.source), program.steps)  # which steps are neutral no longer matters
    for expressions in (False, True):
        changed = True
        while changed and tries > 0:
            changed = False
            i = 0
            while i < len(program.steps) and tries > 0:
                smaller = Program(program.source, program.steps[:i] + program.steps[i + 1 :])
                tries -= 1
                if fails(smaller):
                    program, changed = smaller, True
                else:
                    i += 1
            i = 0
            while tries > 0:
                tree = ast.parse(program.source)
                edits = _edits(tree, expressions)
                if i >= len(edits):
                    break
                edits[i]()
                text = _text(tree)
                if text is None or text == program.source:
                    i += 1
                    continue
                smaller = Program(text, program.steps)
                tries -= 1
                if fails(smaller):
                    program, changed = smaller, True
                else:
                    i += 1
    return program


def _normal(source: str) -> str:
    return ast.unparse(ast.parse(source)) + "\n"


def _text(tree: ast.AST) -> str | None:
    try:
        text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(tree))) + "\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "<shrunk>", "exec")
        return text
    except Exception:  # noqa: BLE001 - a tree that an edit has made nonsense of
        return None
