"""CUDA graphs at run time: regions of a program, their recordings, and the memory that recordings share."""
