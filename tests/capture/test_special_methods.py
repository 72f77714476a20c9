"""A special method that a class lacked and gets later changes what the program means."""

import torch

import thunder


def test_truth_and_comparison_of_objects_follow_methods_added_later():
    class Plain:
        pass

    a, b, x = Plain(), Plain(), torch.ones(2)
    truth = thunder.jit(lambda x: x * 2 if a else x)
    equal = thunder.jit(lambda x: x * 2 if a == b else x)
    for _ in range(2):
        assert torch.equal(truth(x), x * 2) and torch.equal(equal(x), x)
    Plain.__bool__ = lambda self: False
    Plain.__eq__ = lambda self, other: True
    assert torch.equal(truth(x), x) and torch.equal(equal(x), x * 2)
    assert thunder.cache_misses(truth) == thunder.cache_misses(equal) == 2
