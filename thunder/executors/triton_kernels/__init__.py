"""From a region of operations to Triton kernels.

In the order of the flow: values (graph of values), index (places in tensors), joins (results stored in parts),
reductions (their steps), schedule (kernels), emit (text of a kernel), layout (strides of results), binary (machine
code), launch.
"""
