"""Attributes that a `__getattribute__` in Python answers: remembered where it only looks, asked again otherwise."""

import pytest
import torch

import thunder

X = torch.ones(2)


class Config:
    """As transformers' configurations: some names stand for others."""

    def __init__(self):
        self.names = {"alias": "real"}
        self.real, self.other = 2, 5

    def __getattribute__(self, key):
        if key != "names" and key in super().__getattribute__("names"):
            key = super().__getattribute__("names")[key]
        return super().__getattribute__(key)


class Counting:
    def __init__(self):
        self.n = 0

    def __getattribute__(self, key):
        if key == "real":
            self.__dict__["n"] += 1
            return self.__dict__["n"]
        return super().__getattribute__(key)


class Making:
    def __getattribute__(self, key):
        return [key]


def write_attribute(config):
    config.real = 7


def write_container(config):
    config.names["alias"] = "other"


def write_class(config):
    type(config).real2 = 1
    config.names = {}
    config.alias = 3


@pytest.mark.parametrize("write", [write_attribute, write_container, write_class])
def test_what_the_program_writes_is_seen(write):
    def program(x, config):
        before = config.alias
        write(config)
        return x * before, x * config.alias

    try:
        config, expected = Config(), program(X, Config())
        actual = thunder.jit(program)(X, config)
    finally:
        if hasattr(Config, "real2"):
            del Config.real2
    assert all(map(torch.equal, actual, expected))


def test_what_changes_between_calls_is_asked():
    compiled = thunder.jit(lambda x, config: x * config.alias * config.alias)
    config = Config()
    assert torch.equal(compiled(X, config), X * 4)
    config.real = 3
    assert torch.equal(compiled(X, config), X * 9)
    config.names["alias"] = "other"
    assert torch.equal(compiled(X, config), X * 25)


def test_a_read_costs_little_after_the_first():
    def instructions(n):
        def program(x, config):
            for _ in range(n):
                config.alias  # noqa: B018
            return x + 1

        compiled = thunder.jit(program)
        compiled(X, Config())
        return thunder.compile_stats(compiled).interpreted_instructions

    assert instructions(30) - instructions(20) <= 10 * 8  # the loop's own; those of the method are about thirty


def test_a_method_that_writes_runs_each_time():
    def program(x, config):
        return x * config.real + config.real

    config, eager = Counting(), Counting()
    assert torch.equal(thunder.jit(program)(X, config), program(X, eager))
    assert config.__dict__["n"] == eager.__dict__["n"] == 2


def test_what_is_made_anew_stays_apart():
    def program(x, config):
        first, second = config.a, config.a
        first.append(1)
        return x * len(second), first is second

    assert thunder.jit(program)(X, Making())[1] is False
    assert torch.equal(thunder.jit(program)(X, Making())[0], X)
