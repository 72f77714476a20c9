"""Runtime: the functions that compiled programs call, independent of passes: the autograd node, CUDA graphs,
background compilation, and the cache on disk."""
