"""import statements inside functions."""

from tests.interpreter.corpus.kit import program


@program()
def plain_and_aliased():
    import math
    import os.path as p
    from collections import OrderedDict as OD
    from math import floor, sqrt

    return math.floor(2.5), p.join("a", "b"), floor(sqrt(17)), OD(a=1)


@program()
def dotted():
    import os.path
    import xml.dom

    return os.path.basename("/a/b"), xml.dom.__name__


@program()
def missing_module():
    import no_such_module_anywhere  # noqa: F401


@program()
def missing_name():
    from math import no_such_name  # noqa: F401


@program()
def missing_submodule():
    import os.nothing  # noqa: F401


@program()
def conditional_import():
    try:
        import no_such_fast_json as json
    except ImportError:
        import json
    return json.dumps([1])


@program()
def import_error_attributes():
    try:
        import no_such_thing  # noqa: F401
    except ModuleNotFoundError as e:
        return e.name, e.msg


@program()
def relative_import():
    from . import kit
    from .kit import PROGRAMS

    return kit.PROGRAMS is PROGRAMS


@program()
def submodule_as_name():
    from concurrent import futures
    from xml import dom

    return dom.__name__, futures.__name__


@program()
def dynamic_imports():
    import importlib

    return importlib.import_module("math").pi, __import__("os.path").__name__, importlib.import_module(".kit", __package__).__name__[-3:]


@program()
def import_in_class_body():
    class A:
        from math import pi as p

        import string

        value = round(p, 2)

    return A.value, A.string.digits


@program()
def import_global():
    global json_module
    import json as json_module

    return "json_module" in globals(), json_module.loads("[1]")
