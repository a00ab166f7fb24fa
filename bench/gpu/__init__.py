"""What a GPU does with Pagoda's kernels, its decode step and its server: `make bench-gpu`."""
