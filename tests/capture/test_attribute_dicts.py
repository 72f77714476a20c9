"""`o.__dict__` of an object from outside: what is read of it is asked, as of any dict."""

import pytest
import torch

import thunder
from tests.capture.runs import same_as_eager


class Settings:
    """Attributes that the programs read."""


class Layer(torch.nn.Module):
    def __init__(self, read):
        super().__init__()
        self.settings, self.read = Settings(), read
        self.settings.width, self.settings.name = 4, None

    def forward(self, x):
        return x * self.read(self.settings)


ENTRIES = {
    "item": lambda s: s.__dict__["width"],
    "get": lambda s: s.__dict__.get("width", 3) + s.__dict__.get("height", 1),
    "in": lambda s: 2 if "width" in s.__dict__ and "height" not in vars(s) else 3,
    "vars": lambda s: vars(s)["width"],
    "attribute": lambda s: s.width + s.__dict__["width"],
}


@pytest.mark.parametrize("read", ENTRIES)
def test_entries_are_guarded_one_by_one(read):
    layer, x = Layer(ENTRIES[read]), torch.ones(2)
    compiled = thunder.jit(layer)
    for name, value in (("name", "a"), ("other", 1), ("depth", 3)):
        setattr(layer.settings, name, value)
        torch.testing.assert_close(compiled(x), layer(x))
    assert len(compiled.programs) == 1
    layer.settings.width, layer.settings.height = 5, 2
    torch.testing.assert_close(compiled(x), layer(x))


def test_all_entries_are_guarded_where_the_program_iterates():
    layer, x = Layer(lambda s: len(s.__dict__) + sum(1 for _ in vars(s))), torch.ones(2)
    compiled = thunder.jit(layer)
    for name in ("other", "depth"):
        setattr(layer.settings, name, 1)
        torch.testing.assert_close(compiled(x), layer(x))


def written_and_read(jit):
    s, seen = Settings(), []
    s.width, s.gone, s.name = 4, 5, "a"

    def f(x):
        space = s.__dict__
        first = space["width"]
        s.width = 7
        space["depth"] = s.width + space["width"]
        del s.gone
        missing = "gone" in space, space.get("gone"), space.get("none", 3)
        s.depth += 1
        space.pop("name")
        s.name = "b"
        return x * first, s.depth, space["depth"], missing, sorted(space), sorted(dict(space)), hasattr(s, "gone")

    f = jit(f)
    for i in range(3):
        s.gone, s.width = 5, i
        seen.append((*f(torch.ones(2)), sorted(vars(s).items())))
    return seen


def deleted_first(jit):
    s, seen = Settings(), []

    def f(x):
        del s.__dict__["a"]
        with_b = "b" in s.__dict__
        try:
            s.__dict__["a"]
        except KeyError as error:
            seen.append(str(error))
        s.__dict__.update(a=3, c=4)
        s.__dict__.setdefault("d", 5)
        return x * s.a + s.c + s.d, with_b, sorted(s.__dict__.items())

    f = jit(f)
    for _ in range(3):
        vars(s).clear()
        s.a, s.b = 1, 2
        seen.append((*f(torch.ones(2)), sorted(vars(s).items())))
    return seen


def returned(jit):
    s = Settings()
    s.width, s.name = 4, "a"

    def f(x):
        s.__dict__["depth"] = 1
        return x * s.__dict__["width"], vars(s), [vars(s)], {**vars(s)}, dict(vars(s)), vars(s) == {"width": 4}

    f = jit(f)
    return [f(torch.ones(2)) for _ in range(2)]


def returned_alone(jit):
    s = Settings()
    s.width, s.name = 4, "a"
    f, g = jit(lambda x: (x * 2, s.__dict__)), jit(lambda x: {"all": [vars(s)], "x": x})
    seen = []
    for i in range(3):
        s.width = i
        seen.append((f(torch.ones(2))[1]["width"], sorted(g(torch.ones(2))["all"][0].items())))
    return seen


class Described:
    """A class whose property hides an entry."""

    @property
    def width(self):
        return self.__dict__["width"] * 2

    @width.setter
    def width(self, value):
        self.__dict__["width"] = value


def behind_a_property(jit):
    s = Described()
    s.width = 4

    def f(x):
        s.width = s.width + 1
        return x * s.width, s.__dict__["width"], "width" in vars(s)

    f = jit(f)
    return [(*f(torch.ones(2)), vars(s)["width"]) for _ in range(3)]


@pytest.mark.parametrize(
    "run", [written_and_read, deleted_first, returned, returned_alone, behind_a_property], ids=lambda f: f.__name__
)
def test_writes_show_in_the_dict_and_in_the_attributes(run):
    same_as_eager(run)
