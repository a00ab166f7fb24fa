"""`python -m tests.kernels.triton.print_ptx CAPABILITY KERNEL` prints the PTX of the kernel's first case."""

from __future__ import annotations

import sys

from pagoda_server.kernels.triton.launches import compile_kernel
from tests.kernels.triton.cases import cases
from tests.kernels.triton.compile_gate import collect

capability, kernel = sys.argv[1:]
launch = next(item.launch for item in collect(cases(), [int(capability)]) if item.launch.name == kernel)
print(compile_kernel(launch).asm["ptx"])
