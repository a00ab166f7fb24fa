"""GPU kernels run in Triton's interpreter, on CPU tensors, unless TRITON_INTERPRET=0 says that there is a GPU.

The interpreter is chosen when a kernel is defined, so before anything is imported.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
