"""Token mixers as functions: a plain float64 reference, a fast torch path, a kernel if any.

    ops.ssd             Mamba-2's state space dual, chunked
    ops.selective_scan  Mamba-1's scan
    ops.biwkv           RWKV's bidirectional weighted sum (`biwkv_triton` is its kernel)
    ops.matrix_state    RWKV-7's scan
    ops.conv            causal depthwise convolution along a path
    ops.shift           token shift: quarters of the channels from the four grid neighbours
    ops.dispatch        which implementation runs, and why

Every op takes `kernel="auto"`: the kernel where it is installed and fits the inputs, torch
otherwise. A name asks for that implementation and is an error where it cannot run.
"""
