"""thunder: a source-to-source compiler for PyTorch."""
