"""What executors of compiled kernels share: the strides of inputs and results, machine code, and launches.

layout and expected: strides; by_strides and by_sizes: the functions of a region; compiling and binary: machine code;
launcher and launched: the functions that launch it.
"""
