"""Benchmarks of the kernels, the decode step and the server on a GPU: `make bench-gpu`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCES = (ROOT / "src", ROOT / "clients" / "python")
# A machine that is lent for minutes has nothing of ours installed; where it is installed, that comes first.
sys.path += [str(folder) for folder in SOURCES]
