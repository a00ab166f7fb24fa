"""Benchmarks of the kernels, the decode step and the server on a GPU: `make bench-gpu`."""
