"""Models, layers and losses of libraries, for `benchmarks/foreign.py`."""
