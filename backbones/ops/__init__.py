"""Token mixers as functions: each with a float64 reference, a fast torch path and often kernels.

    ops.ssd             Mamba-2's state space dual, chunked
    ops.selective_scan  Mamba-1's scan
    ops.biwkv           RWKV's bidirectional weighted sum (`biwkv_triton` is its kernel)
    ops.matrix_state    RWKV-7's scan
    ops.conv            causal depthwise convolution along a path
    ops.mixer           the convolution and scan of a Mamba-2 mixer, chosen once for a block
    ops.shift           token shift: quarters of the channels from the four grid neighbours
    ops.native          fused C++ operations for CPUs
    ops.dispatch        which implementation runs, and why

Every op has an argument `kernel`. "auto" uses a kernel where one is installed and takes the inputs,
and torch otherwise; a name requests that implementation, and is an error where it cannot run.
"""
