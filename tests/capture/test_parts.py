"""The parts of a capture: each field is written by the file of its class, and each function says what it takes."""

import ast
import collections
import pathlib

import thunder.capture

FOLDER = pathlib.Path(thunder.capture.__file__).parent
TREES = {path.name: ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}
CHANGES = set("append add update setdefault pop clear extend discard remove insert popitem appendleft subtract".split())
CALLED = {"recorder.add"}  # a method of its own


def chain(node):
    """`c.world.sources` as ["c", "world", "sources"]; None for what begins elsewhere."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def written(node):
    """The targets of a statement, and what a call of a container's method changes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        targets = [node.func.value]
    else:
        targets = []
    for target in targets:
        for one in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            while isinstance(one, (ast.Subscript, ast.Starred)):
                one = one.value
            yield one


def test_a_field_of_a_capture_has_one_writer():
    writers = collections.defaultdict(set)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            for target in written(node):
                names = chain(target)
                names = names and (names[1:] if names[0] == "self" and names[1:2] in (["c"], ["capture"]) else names)
                if names and names[0] in ("c", "capture") and len(names) > 1:
                    field = ".".join(names[1:])
                    called = isinstance(node, ast.Call) and f"{field}.{node.func.attr}" in CALLED
                    writers[field] |= set() if called else {name}
    assert {field: files for field, files in writers.items() if len(files) > 1} == {}


def test_a_capture_is_passed_with_its_type():
    untyped = [
        f"{name}:{node.lineno} {node.name}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for argument in node.args.args
        if argument.arg in ("c", "capture") and argument.annotation is None
    ]
    assert not untyped
