"""The known peers, what each needs, and which interpreter has it."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.peers.peer import Peer, PeerSettings

# Peers may have their own environment, .venv-peers (`make bench-peers`), so that their pins do not bind Pagoda.
PEERS_PYTHON = Path(__file__).parent.parent.parent / ".venv-peers" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """
    module      defines Peer(settings)
    packages    packages that its interpreter must have
    program     program on the PATH, or named by the environment variable of the same name in capitals
    weights     form of the model that it reads
    """

    module: str
    weights: Literal["folder", "gguf", "gguf-bf16", "gguf-q8_0", "gguf-q4_0"]
    packages: tuple[str, ...] = ()
    program: str = ""

    def make(self, settings: PeerSettings) -> Peer:
        peer: Peer = importlib.import_module(self.module).Peer(settings)
        return peer

    def interpreter(self) -> str | None:
        """Return the first Python that has all packages; None if the peer is not installed."""
        if self.program and not find_program(self.program):
            return None
        candidates = [sys.executable, *([str(PEERS_PYTHON)] if PEERS_PYTHON.exists() else [])]
        return next((python for python in candidates if has_packages(python, self.packages)), None)


PEERS = {
    "openvino-genai": PeerSpec("bench.peers.openvino_genai", "gguf", ("openvino_genai",)),
    "llama.cpp": PeerSpec("bench.peers.llama_server", "gguf", program="llama-server"),
    "llama.cpp-q4_0": PeerSpec("bench.peers.llama_server", "gguf-q4_0", program="llama-server"),
    "llama.cpp-q8_0": PeerSpec("bench.peers.llama_server", "gguf-q8_0", program="llama-server"),
    "llama.cpp-bf16": PeerSpec("bench.peers.llama_server", "gguf-bf16", program="llama-server"),
    "transformers-generate-batch": PeerSpec("bench.peers.transformers_continuous", "folder", ("torch", "transformers")),
}


def find_program(name: str) -> str | None:
    return os.environ.get(name.upper().replace("-", "_")) or shutil.which(name)


@functools.cache
def has_packages(python: str, packages: tuple[str, ...]) -> bool:
    check = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    needed = (*packages, "numpy")  # workloads need numpy
    return subprocess.run([python, "-c", check, *needed], check=False, capture_output=True).returncode == 0
