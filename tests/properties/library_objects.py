"""Objects of libraries' classes, with a state that a program reads by their attributes and methods.

A row is the expression that makes an object, what a program may read of it, and what changes it, as in
`tests.properties.objects`: there is no class of the program's own, and its methods are the library's.
"""

from __future__ import annotations

from typing import Any

IMPORTS = "import argparse, contextlib, io, logging, threading, traceback, torch.utils.data"

ROWS: list[tuple[str, list[str], list[str]]] = [
    ("logging.Logger('log')", [
        "{p}.isEnabledFor(10)", "{p}.getEffectiveLevel()", "{p}.hasHandlers()", "len({p}.handlers)", "str({p})"], [
        "{at}.setLevel(10)", "{at}.setLevel(50)", "{at}.addHandler(logging.NullHandler())", "{at}.disabled = True",
        "{at}.name = 'other'"]),
    ("logging.Filter('a')", ["{p}.filter(logging.makeLogRecord({{'name': 'a.b'}}))"], ["{at}.name = 'b'"]),
    ("collections.UserString('ab')", [
        "{p}.upper()", "{p} + 'x'", "len({p})", "{p} == 'ab'", "'a' in {p}", "{p}[0]", "hash({p}) == hash('ab')"],
        ["{at}.data = 'q'", "{at}.data += 'b'"]),
    ("string.Template('$a $b')", ["{p}.safe_substitute(a=1)", "{p}.substitute(a=1, b=2)"], ["{at}.template = '$a!'"]),
    ("string.Formatter()", ["{p}.format('{{}}', 3)", "{p}.vformat('{{a}}', (), {{'a': 1}})"], [
        "{at}.format = lambda *a: 'other'", "{at}.get_value = lambda *a: 'other'"]),
    ("textwrap.TextWrapper(width=9)", ["{p}.wrap('aa bb cc dd ee')", "{p}.fill('aa bb cc dd')"], [
        "{at}.width = 4", "{at}.initial_indent = '- '"]),
    ("json.JSONEncoder(indent=1)", ["{p}.encode([1, {{'a': 2}}])", "{p}.encode({q})"], [
        "{at}.indent = None", "{at}.sort_keys = True", "{at}.default = lambda o: 'x'"]),
    ("json.JSONDecoder(object_hook=lambda d: sorted(d))", ["{p}.decode('{{\"b\": 1, \"a\": [2]}}')"], [
        "{at}.object_hook = None", "{at}.scan_once = lambda s, i: (3, len(s))"]),
    ("decimal.Context(prec=5)", ["{p}.divide(1, 3)", "{p}.prec", "{p}.create_decimal('1.23456789')"], [
        "{at}.prec = 3", "{at}.capitals = 0"]),
    ("inspect.signature(adds).bind(1)", ["{p}.args", "{p}.kwargs", "dict({p}.arguments)"], [
        "{at}.arguments['k'] = {new}", "{at}.arguments.clear()"]),
    ("torch.utils.data.TensorDataset(torch.ones(3, 2))", ["{p}[0]", "len({p})", "{p}.tensors[0] + 1"], [
        "{at}.tensors = (torch.zeros(2, 2),)", "{at}.tensors[0].add_(1)"]),
    ("torch.utils.data.Subset([1, 2, 3], [0, 2])", ["{p}[0]", "len({p})", "{p}[1] + 1"], [
        "{at}.indices.append(1)", "{at}.dataset = [7, 8, 9]", "{at}.indices[0] = 1"]),
    ("np.ma.array([1.0, 2.0])", ["{p}.fill_value", "float({p}.sum())", "{p}.mask", "{p}.filled(3)"], [
        "{at}.fill_value = 5", "{at}.mask = [True, False]", "{at}[0] = 7"]),
    ("np.poly1d([1, 2])", ["{p}(2)", "{p}.coeffs.tolist()", "{p}.order", "{p}.variable"], [
        "{at}.coeffs[0] = 5", "{at}[3] = 2"]),
    ("functools.singledispatch(adds(1))", ["{p}(2)", "{p}(2.5)", "len({p}.registry)", "{p}.dispatch(int)(1)"], [
        "{at}.register(int, adds(5))", "{at}.register(float, adds(6))", "{at}.zz = {new}"]),
    ("functools.cmp_to_key(lambda a, b: (a > b) - (a < b))", ["sorted([3, 1, 2], key={p})", "max([1, 2], key={p})"],
        ["{at}.__call__"]),
    ("functools.cached_property(adds(1))", ["{p}.attrname", "{p}.func(2)", "{p}.__get__(None, int) is {p}"], [
        "{at}.attrname = 'q'", "{at}.func = adds(7)"]),
    ("functools.partialmethod(adds(1), 3)", ["{p}.args", "{p}.func(1)", "{p}.__get__(3, int)()"], [
        "{at}.args = ({new},)", "{at}.func = adds(7)"]),
    ("functools.lru_cache()", ["{p}(adds(2))(1)", "{p}.zz"], ["{at}.zz = {new}"]),
    ("contextlib.nullcontext(3)", ["{p}.enter_result", "{p}.__enter__()"], ["{at}.enter_result = {new}"]),
    ("contextlib.ExitStack()", ["len({p}._exit_callbacks)"], ["{at}.callback(print)"]),
    ("threading.Thread(name='t')", ["{p}.name", "{p}.daemon", "{p}.is_alive()"], [
        "{at}.name = 's'", "{at}.daemon = True"]),
    ("io.StringIO('ab')", ["{p}.getvalue()", "{p}.read()", "{p}.tell()"], ["{at}.write('q')", "{at}.seek(1)"]),
    ("traceback.FrameSummary('f', 1, 'n')", ["{p}.lineno", "str({p})", "{p}.line"], ["{at}.lineno = 3"]),
    ("argparse.Namespace(a=1, b=2)", ["{p}.a", "vars({p})", "'a' in {p}", "str({p})", "{p} == {q}"], [
        "{at}.a = {new}", "{at}.zz = {new}", "del {at}.b"]),
    ("torch.distributions.Normal(0.0, 1.0)", ["{p}.mean", "{p}.log_prob(t)", "{p}.loc + 1"], [
        "{at}.loc = torch.ones(3)", "{at}.scale = torch.tensor(2.0)"]),
    ("torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)", [
        "{p}.param_groups[0]['lr']", "len({p}.state)", "{p}.param_groups[0]['params'][0] + 1"], [
        "{at}.param_groups[0]['lr'] = 0.5", "{at}.param_groups[0]['momentum'] = 0.9"]),
    ("types.MethodType(adds(1), 2)", ["{p}()", "{p}(3)", "{p}.__self__"], ["{at}.__func__.zz = 3"]),
    ("typing.TypeVar('T')", ["{p}.__name__", "{p}.zz"], ["{at}.zz = {new}"]),
]  # fmt: skip
TEXTS = [text for text, _, _ in ROWS]


def of_kinds(space: dict[str, Any]) -> dict[type, tuple[list[str], list[str]]]:
    """What is read of objects, and what changes them, by their classes; functions and methods have more of them."""
    methods: dict[type, tuple[list[str], list[str]]] = {}
    for text, reads, changes in ROWS:
        known = methods.setdefault(type(eval(text, space)), ([], []))
        known[0].extend(reads)
        known[1].extend(changes)
    return methods


def own_attributes(value: Any) -> list[str]:
    """The names of the public attributes that a library's object has by itself."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return []
    return [n for n in own if type(n) is str and n.isidentifier() and n[0] != "_"] if type(own) is dict else []
