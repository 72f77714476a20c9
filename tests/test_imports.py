"""No module of thunder leads back to itself by imports, those inside of functions included; names that only annotations
need are imported under TYPE_CHECKING, which runs nothing."""

import grimp


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's strongly connected components)."""
    number, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        on_stack.add(module)
        for other in sorted(imports[module]):
            if other not in number:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in on_stack:
                low[module] = min(low[module], number[other])
        if low[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            on_stack.difference_update(group)
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_there_are_none():
    graph = grimp.build_graph("thunder", cache_dir=None, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    assert circles(imports) == []
