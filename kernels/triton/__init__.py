"""The ops as Triton kernels, for GPUs. Imported only where the triton backend is chosen.

One op a file: the kernels, then the launcher, whose contract is the reference function of the same name in `kernels/`.
"""
