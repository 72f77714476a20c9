"""Minimum cuts against networkx, which PyTorch brings along."""

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thunder.analysis.min_cut import sink_side

NODES = 9  # the first is the source, the last the sink
EDGES = st.dictionaries(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)).filter(lambda e: e[0] != e[1]),
    st.one_of(st.integers(0, 5).map(float), st.just(float("inf"))),
    max_size=40,
)


@given(EDGES)
def test_the_cut_is_that_of_networkx(edges):
    graph = networkx.DiGraph()
    graph.add_nodes_from((0, NODES - 1))
    for (a, b), capacity in edges.items():
        graph.add_edge(a, b, **({} if capacity == float("inf") else {"capacity": capacity}))
    try:
        _, (_, want) = networkx.minimum_cut(graph, 0, NODES - 1)
    except networkx.NetworkXUnbounded:
        with pytest.raises(ValueError, match="without any limit"):
            sink_side([(a, b, c) for (a, b), c in edges.items()], 0, NODES - 1)
        return
    assert sink_side([(a, b, c) for (a, b), c in edges.items()], 0, NODES - 1) == want


def test_a_long_chain_has_no_deep_recursion():
    edges = [(i, i + 1, 2.0 if i != 5000 else 1.0) for i in range(10000)]
    assert sink_side(edges, 0, 10000) == set(range(5001, 10001))
