"""A contract of import-linter: no files import each other in a circle, at run time, for types, or inside of functions.

`import thunder` stands for the files that thunder's public names come from, so that nothing below those imports it.
"""

from __future__ import annotations

import ast
from pathlib import Path

from importlinter import Contract, ContractCheck, output

PACKAGE = Path(__file__).resolve().parents[1] / "thunder" / "__init__.py"


class NoCircles(Contract):
    """`type = "no_circles"`; it has no options."""

    def check(self, graph, verbose: bool) -> ContractCheck:
        own = [m for m in graph.modules if m.split(".")[0] == "thunder"]
        imported = {m: {x for x in graph.find_modules_directly_imported_by(m) if x in graph.modules} for m in own}
        imported["thunder"] |= set(homes())
        cycles = circles(imported)
        return ContractCheck(kept=not cycles, metadata={"circles": cycles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in check.metadata["circles"]:
            output.print_error(" -> ".join((*circle, circle[0])))


def homes() -> list[str]:
    """The files of the names of `thunder`, which it imports when they are first used."""
    tree = ast.parse(PACKAGE.read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_FROM"
    )
    return list(ast.literal_eval(table))


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """A shortest circle of each file that is in one and in none of those before."""
    components: list[list[str]] = []
    for start in sorted(imported):
        if any(start in circle for circle in components):
            continue
        ways, pending = {start: [start]}, [start]
        for module in pending:
            for other in sorted(imported.get(module, ())):
                if other == start:
                    components.append(ways[module])
                    break
                if other not in ways:
                    ways[other] = [*ways[module], other]
                    pending.append(other)
            else:
                continue
            break
    return components
