"""Reports about compiled functions: programs, fusions, saved values, times, memory, guards, comparisons with eager.

`thunder` and `thunder.examine` export the public names.
"""
