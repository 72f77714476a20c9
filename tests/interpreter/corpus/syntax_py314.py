"""What came with Python 3.14: template strings, lazy annotations, except without parentheses."""

from string.templatelib import Interpolation, Template

from tests.interpreter.corpus.kit import program


@program("w")
def template_string(x):
    t = t"hello {x!r:>5} and {x + 'y'}{1}"
    return t.strings, [(i.value, i.expression, i.conversion, i.format_spec) for i in t.interpolations], isinstance(t, Template)


@program()
def template_nested_and_concatenated():
    n = 3
    t = t"a{n:{n}}" + t"b" t"{n}"

    def render(t):
        return "".join(p if isinstance(p, str) else f"<{p.value}:{p.format_spec}>" for p in t)

    return render(t), render(t""), [type(p) is Interpolation for p in t]


@program()
def annotations_are_lazy():
    def f(x: Undefined) -> also_undefined:  # noqa: F821
        return x

    out = f(1)
    try:
        f.__annotations__
    except NameError as e:
        return out, str(e)


@program()
def class_annotations_are_lazy():
    class A:
        x: Later
        y: int = 1

    class Later:
        pass

    return A.__annotations__["y"], A.__annotations__["x"] is Later, A.y


@program()
def annotation_formats():
    import annotationlib

    def f(x: Missing, y: int): ...  # noqa: F821

    return annotationlib.get_annotations(f, format=annotationlib.Format.STRING)


@program()
def except_without_parentheses():
    out = []
    for kind in (ValueError, KeyError):
        try:
            raise kind("x")
        except ValueError, KeyError:
            out.append(kind.__name__)
    return out


@program()
def small_integers_and_borrowed_loads():
    a = 5
    b = a + 255
    c, d = b, a
    return a + b + c + d, [a, b, c][1], -1 + 256, a if a else 0


@program()
def any_and_all_are_inlined():
    xs = [1, 2, 0]
    return any(x > 1 for x in xs), all(x for x in xs), tuple(x * 2 for x in xs), all(False for _ in ())


@program()
def any_shadowed():
    any = lambda it: ("mine", list(it))  # noqa: A001, E731
    return any(x for x in (1, 2))


@program()
def with_special_methods():
    log = []

    class M:
        def __enter__(self):
            log.append("enter")
            return self

        def __exit__(self, *a):
            log.append(a[0] and a[0].__name__)
            return True

    with M() as m, M():
        raise KeyError(type(m).__name__)
    return log


@program()
def dataclass_with_lazy_annotations():
    import dataclasses

    @dataclasses.dataclass
    class Node:
        value: int
        next: Node | None = None

    return Node(1, Node(2)), [f.name for f in dataclasses.fields(Node)]


@program()
def partial_placeholder():
    import functools

    def f(a, b, c):
        return a, b, c

    return functools.partial(f, functools.Placeholder, 2)(1, 3)


@program()
def subscript_operator():
    class S:
        def __getitem__(self, k):
            return k

        def __add__(self, o):
            return "add"

    s, d = S(), {"a": [1, 2]}
    d["a"][0] += 5
    return s[1], s[1:2], s + 1, d["a"][0], d["a"][-1:]
