"""From a region of lines to Triton kernels, in the order of the files.

values (what is computed), index (where), joins (what is stored in parts), schedule (in which kernel), emit (its text),
layout (of results), binary (machine code), launch.
"""
