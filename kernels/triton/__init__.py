"""The ops as Triton kernels for GPUs. Only imported if a triton backend is chosen.

One op a file: the launcher, whose contract is the reference function of the same name in `kernels/`, and its kernels.
"""
